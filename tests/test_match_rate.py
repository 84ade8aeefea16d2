"""benchmarks/match_rate.py: what it counts and what it writes down.

How to run: python -m pytest tests/test_match_rate.py
"""

import json
import sys
from pathlib import Path

import pytest
from models import random_prompts, tiny_model

from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # for _machine.py and rollout.py beside them
import match_rate  # noqa: E402


def test_match_rate_by_hand():
    """Row 0 equal (3 tokens), row 1 differs in its 2nd, row 2 is a token short: 2 of 3 + 2 + 3."""
    found = match_rate.compare([[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[1, 2, 3], [4, 0, 6], [7, 8]])
    assert found == {"rows_equal": 1, "rows": 3, "tokens_compared": 8,
                     "differences_per_1000": 250.0}  # fmt: skip


class Bench:
    """A tiny model in the place of the default one."""

    def __init__(self, options):
        self.options, self.prompts = options, random_prompts([5, 9, 4, 7])

    def sampling(self, new):
        return SamplingParams(max_new_tokens=new)

    def engines(self, *dtype):
        model = tiny_model()
        target = make_target(model)
        drafter = Eagle3Drafter(Eagle3Config.from_target(model.config, DrafterConfig()), seed=1)
        drafter.tie(target.embed_weight, target.head_weight)
        spec = RolloutEngine(target, [Eagle3Proposer(drafter)], Bandit([Arm.parse("eagle-1")]))
        return RolloutEngine(target), spec


def test_match_rate_of_a_tiny_model(tmp_path, monkeypatch, capsys):
    """In fp32 on a CPU every chain is equal; every arm and dtype has its row."""
    monkeypatch.setattr(match_rate, "Bench", Bench)
    out = tmp_path / "new" / "out.json"
    assert match_rate.main(["--rows", "4", "--new", "12", "--threads", "1", "--out", str(out)]) == 0
    said = json.loads(out.read_text())
    assert said == json.loads(capsys.readouterr().out.splitlines()[-1]) and said["commit"]
    assert said["rows"] == 4 and list(said["match_rate"]["fp32"]) == match_rate.ARMS
    for arm in ("eagle-1", "eagle-3", "eagle-7"):
        found = said["match_rate"]["fp32"][arm]
        assert found["rows_equal"] == 4 and found["differences_per_1000"] == 0
        assert found["tokens_compared"] == 48


def test_match_rate_has_no_options_of_another_benchmark(capsys):
    with pytest.raises(SystemExit):
        match_rate.parse(["--help"])
    text = capsys.readouterr().out
    assert "--rows" in text and "--peer" not in text and "--sizes" not in text
