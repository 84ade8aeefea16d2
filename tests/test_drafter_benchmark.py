"""benchmarks/drafter.py: what it computes from a log, and acceptance on rows, by hand."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from drafter_reference import W, make_drafter
from fake_run import write_fake_run
from models import tiny_model
from test_distill import make_buffer

from minitlt.events import read_events

path = Path(__file__).parent.parent / "benchmarks" / "drafter.py"
spec = importlib.util.spec_from_file_location("drafter_benchmark", path)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)


def window(**fields):
    return {"event": "harvest_end", "drafter_steps": 0, "overshoot_s": 0.0, **fields}


def test_idle_by_hand():
    events = [
        window(available_s=4.0, harvested_s=3.9, overshoot_s=0.1, drafter_steps=20),  # 0.2 s each
        window(available_s=1.0, harvested_s=0.9, overshoot_s=0.1, drafter_steps=10),  # 0.1 s each
        window(available_s=0.1, harvested_s=0.0),
    ]
    got = bench.idle(events)
    assert got["harvest_fraction"] == pytest.approx(4.8 / 5.1)
    assert got["overshoot_over_step_median"] == pytest.approx((0.5 + 1.0) / 2)
    assert got["drafter_steps"] == 30


def test_swaps_are_ratios_of_sums():
    def result(before, after):
        return {
            "event": "swap_result",
            "accept_before": before[0] / max(before[1], 1),
            "accept_after": after[0] / max(after[1], 1),
            "row_steps_before": before[1],
            "row_steps_after": after[1],
        }

    events = [
        result((10, 10), (30, 20)),
        result((30, 20), (40, 20)),
        result((40, 20), (0, 0)),  # the rollout ended at once: there is nothing after it
        {"event": "swap", "seconds": 0.25},
    ]
    got = bench.swaps(events)
    assert got["log_accept_before_swap"] == pytest.approx(40 / 30)
    assert got["log_accept_after_swap"] == pytest.approx(70 / 40)
    assert (got["swaps"], got["swap_seconds"]) == (1, 0.25)


def test_a_swap_is_judged_by_the_tokens_behind_it():
    """100 tokens in 80 row-steps; with a swap after 20 tokens in 16, the other 80 took 40."""
    old, new = (
        SimpleNamespace(step_tokens=100, row_steps=80),
        SimpleNamespace(step_tokens=100, row_steps=56),
    )
    got = bench.same_tokens(old, new, [(7, 20, 16), (9, 60, 40)])
    assert got == {"swap_accept_before": 80 / 64, "swap_accept_after": 80 / 40}
    assert bench.same_tokens(old, old, []) == {"swap_accept_before": 0.0, "swap_accept_after": 0.0}


def test_fresh_rows_are_there_with_their_taps():
    lab = object.__new__(bench.Lab)
    lab.model, lab.stop = tiny_model().float(), 2
    lab.options = SimpleNamespace(quick=True)
    rows = lab.rows_of([[5, 6, 7], [8, 9, 10, 11]])
    assert len(rows) == 2 and all(len(r.features_NF) == r.num_tokens - 1 for r in rows)
    assert sorted(r.prompt_len for r in rows) == [3, 4]


def test_a_frozen_drafter_is_one_of_the_first_half(tmp_path):
    lab = object.__new__(bench.Lab)
    lab.run = tmp_path
    (tmp_path / "checkpoints" / "checkpoint-36" / "minitlt").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"step 36 of 36.*save_total_limit"):
        lab.frozen()
    (tmp_path / "checkpoints" / "checkpoint-12" / "minitlt").mkdir(parents=True)
    assert lab.frozen() == tmp_path / "checkpoints" / "checkpoint-12" / "minitlt"


def test_facts_and_simulator_read_a_run(tmp_path):
    events = read_events(write_fake_run(tmp_path, steps=12))
    got = bench.facts(events)
    ends = [e for e in events if e["event"] == "rollout_end"]
    assert got["steps"] == 12 and got["tokens"] == sum(e["tokens"] for e in ends)
    assert got["accept_last_third"] > got["accept_first_third"] > 1
    assert bench.simulator(events)["simulator_error"] < 0.2


def test_a_drafter_with_the_targets_law_is_always_accepted(monkeypatch):
    """And one whose draft vocabulary lacks some tokens exactly as often as they do not come."""
    rows = make_buffer(rows=[(3, 40, 1), (5, 30, 2)]).rows
    for row in rows:  # as wide a law as this head can give
        row.hidden_NH = 4 * row.hidden_NH
    drafter = make_drafter(0, torch.float32)
    drafter.tie(drafter._target.embed.float(), drafter._target.head.float())
    laws = iter([row.hidden_NH[row.prompt_len :].float() @ drafter.target_head().T
                 for row in rows])  # fmt: skip
    monkeypatch.setattr(drafter, "logits", lambda states: next(laws))
    got = bench.acceptance(drafter, rows, children=2)
    assert got["tokens"] == sum(len(r.hidden_NH) - r.prompt_len for r in rows) > 50
    for name in ("chain", "children", "optimum", "coverage"):
        assert got[name] == pytest.approx(1.0, abs=1e-5)


def test_acceptance_of_an_untrained_drafter():
    rows = make_buffer(rows=[(3, 60, 1), (5, 60, 2)]).rows
    drafter = make_drafter(23, torch.float32)
    drafter.tie(drafter._target.embed.float(), drafter._target.head.float())
    got = bench.acceptance(drafter, rows, children=23)
    assert 0 < got["chain"] < got["children"] <= 1
    assert (1 - (1 - got["optimum"])) / (2 - got["optimum"]) - 0.1 < got["chain"]
    assert got["chain"] < got["optimum"] + 0.1
    # With as many children as tokens, a draft fails only where the target leaves its vocabulary.
    assert got["children"] == pytest.approx(got["coverage"], abs=0.1)
    assert got["coverage"] < 23.0 / W * 2
