"""Much at once and little room: many rows in waves, an engine of one slot, 10,000 prompts by file.

Slow (a few minutes of one core). Run: pytest -m slow tests/test_load.py
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from models import random_prompts, tiny_model
from tiny import save_tiny_model

from minitlt.kernels import row_key
from minitlt.ngram import NgramDrafter
from minitlt.serve import generate, load_served
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def engine_of(max_rows, arm="off", cache_gb=0.0):
    target = make_target(tiny_model(num_hidden_layers=2, max_position_embeddings=1024))
    bandit = Bandit([Arm.parse(arm)])
    return RolloutEngine(target, [NgramDrafter()], bandit, max_rows=max_rows, cache_gb=cache_gb)


def test_512_rows_of_512_tokens_in_waves():
    """A cache for 96 of the rows; every row is whole, and what a row says does not depend on it."""
    prompts = random_prompts([1 + i % 40 for i in range(512)])
    keys = [row_key(1, 0, i) for i in range(512)]
    params = SamplingParams(max_new_tokens=512)  # nothing stops a row
    engine = engine_of(0)
    engine.cache_gb = 96.5 * (40 + 512 + 1) * engine.target.cache_bytes_per_token / 2**30
    most = []
    engine.on_step = lambda e: most.append(len(e.active))
    rollout = engine.generate(prompts, params, keys)
    assert max(most) == 96
    assert [len(ids) for ids in rollout.completion_ids] == [512] * 512
    assert [len(logprobs) for logprobs in rollout.logprobs] == [512] * 512
    assert rollout.stats.tokens == 512 * 512 and set(rollout.finish_reasons) == {"length"}
    some = [0, 1, 95, 96, 300, 511]
    alone = engine_of(1).generate([prompts[i] for i in some], params, [keys[i] for i in some])
    assert alone.completion_ids == [rollout.completion_ids[i] for i in some]


@pytest.mark.parametrize("arm", ["off", "ngram-4"])
def test_an_engine_of_one_slot(arm):
    prompts, keys = random_prompts([3, 200, 1, 40] * 8), [row_key(2, 0, i) for i in range(32)]
    params = SamplingParams(max_new_tokens=200, stop_ids=(2,), temperature=0.7)
    most, engine = [], engine_of(1, arm)
    engine.on_step = lambda e: most.append(len(e.active))
    narrow = engine.generate(prompts, params, keys)
    wide = engine_of(0).generate(prompts, params, keys)
    assert max(most) == 1
    assert narrow.completion_ids == wide.completion_ids
    assert narrow.finish_reasons == wide.finish_reasons


def test_ten_thousand_prompts_killed_half_way(tmp_path):
    """`minitlt generate` from file to file, killed (-9) after half of the rows: the same command
    makes the rest; none is lost, none is there twice, and each is what its prompt and key say."""
    number, model = 10_000, save_tiny_model(tmp_path / "model", num_hidden_layers=1)
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [f"question {i}" for i in range(number)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = [sys.executable, "-m", "minitlt.cli", "generate", "--model", str(model), "--raw"]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "6"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    done = 0
    while done < number // 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
        done = out.read_bytes().count(b"\n") if out.exists() else 0
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = out.read_bytes().count(b"\n")
    assert number // 2 <= done < number
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert f"{done} of {number} rows are in" in again.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(number))
    assert all(row["prompt"] == texts[row["index"]] and row["completion_ids"] for row in rows)
    served, got = load_served(str(model), arms=("off",), dtype="fp32"), {}
    skip = set(range(number)) - set(range(0, number, 500))
    params = SamplingParams(max_new_tokens=6, stop_ids=served.stop_ids)
    generate(served, texts, params, lambda r: got.setdefault(r["index"], r), raw=True, skip=skip)
    by_index = {row["index"]: row for row in rows}
    assert len(got) == 20
    for index, row in got.items():
        assert row["completion_ids"] == by_index[index]["completion_ids"]
