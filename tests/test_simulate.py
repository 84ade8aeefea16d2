"""The simulator: exact where costs are exact, and within 10 % of a recorded two-rank run."""

import random
from pathlib import Path

import pytest
from fake_run import write_fake_run
from hypothesis import given
from hypothesis import strategies as st

from minitlt.events import read_events
from minitlt.simulate import (
    Costs,
    _plain_cost,
    depth_by_rows,
    draw_lengths,
    foretell,
    measure,
    measured,
    recorded_lengths,
    replay,
    simulate,
)

# A real run of the default recipe (10 steps, 2 ranks, 2-core CPU), without its samples and config.
RECORDED = Path(__file__).parent / "data" / "two_ranks.jsonl"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 8))
def test_every_token_is_decoded_once(lengths, slots):
    """The first rows' first tokens come with their prompts."""
    depth, first = depth_by_rows(lengths, slots), min(slots, len(lengths))
    assert sum(rows * tokens for rows, tokens in depth.items()) == sum(lengths) - first
    assert max(depth) == first
    assert sum(depth.values()) >= max(max(lengths) - 1, (sum(lengths) - first) / slots)


def test_rows_leave_and_free_slots_are_refilled():
    assert depth_by_rows([3, 6, 6], slots=3) == {3: 2, 2: 3}
    assert depth_by_rows([2, 5, 3], slots=2) == {2: 4}


def test_plain_costs_are_recovered_exactly():
    rng = random.Random(0)
    steps = [(n, n * rng.randint(1, 8)) for n in range(1, 20)]
    off = [{"steps": n, "tokens": t, "seconds": 0.05 * n + 0.002 * t} for n, t in steps]
    assert _plain_cost(off) == pytest.approx((0.05, 0.002))
    falling = [{"steps": n, "tokens": t, "seconds": 0.05 * n - 0.001 * t} for n, t in steps]
    assert _plain_cost(falling)[1] == 0.0  # more rows never take less time
    with pytest.raises(ValueError, match="must hold 'off'"):
        _plain_cost([])


def test_steps_from_known_costs():
    """One token of depth takes 1 s at any number of rows; plain, 1 s + 1 s per row."""
    costs = Costs(
        token={1: 1.0, 2: 1.0},
        plain=(1.0, 1.0),
        start=0.0,
        rest=(1.0, 1.0),
        extra=0.5,
        steps_per_idle=4.0,
    )
    got = replay(costs, [[[3, 5], [9, 9]]], slots=2)
    assert got.plain == 10 + 8 * 3  # the rest: 1 s and 1 s per token of the longest
    assert got.tlt == 10 + 8 + 0.5
    assert got.perfect == 10 + (4 + 8) / 2
    assert (got.idle, got.drafter_steps) == (4.0, 16.0)


def test_rows_of_one_token_take_no_step():
    """Not even a cost of one need be known."""
    costs = Costs({}, (1.0, 1.0), start=2.0, rest=(1.0, 0.0), extra=0.5, steps_per_idle=0.0)
    got = replay(costs, [[[1, 1], [1]]], slots=2)
    assert (got.plain, got.tlt, got.perfect) == (2 + 1, 2 + 1 + 0.5, 2 + 1)


def test_a_rollout_that_feeds_two_steps_is_shared_by_them():
    """num_iterations = 2: rollout 10 s, twice a rest of 4 s, once a merge of 1 s."""
    costs = Costs({1: 1.0}, (1.0, 0.0), 0.0, (4.0, 0.0), 1.0, 0.0, updates=2.0)
    got = replay(costs, [[[11], [7]]], slots=1)
    assert (got.plain, got.tlt, got.perfect) == (18 / 2, 19 / 2, 16 / 2)
    assert got.idle == 4 / 2


def test_a_run_that_trains_twice_on_a_rollout_is_met():
    """The recorded run, each update followed by another of the same rest without a rollout."""
    events, extra = [], measure(read_events(RECORDED)).extra
    for event in read_events(RECORDED):
        step = 2 * event.get("step", 0)
        events.append({**event, "step": step - 1} if step else event)
        if event["event"] == "update":
            seconds = event["seconds"] - extra
            events.append({**event, "step": step, "seconds": seconds, "step_seconds": seconds})
    costs, (seconds, idle) = measure(events), measured(events)
    assert costs.updates == 2.0
    own = replay(costs, recorded_lengths(events), slots=64)
    assert own.tlt == pytest.approx(seconds, rel=0.10)
    assert own.idle == pytest.approx(idle, rel=0.15)
    told, seen = foretell(events)
    assert told == pytest.approx(seen, rel=0.10)


@pytest.mark.parametrize("which", ["recorded", "synthetic"])
def test_a_two_rank_run_is_met_within_ten_percent(which, tmp_path):
    events = read_events(RECORDED if which == "recorded" else write_fake_run(tmp_path, steps=12))
    seconds, idle = measured(events)
    own = replay(measure(events), recorded_lengths(events), slots=64)
    assert own.ranks == 2
    assert own.tlt == pytest.approx(seconds, rel=0.10)
    assert own.idle == pytest.approx(idle, rel=0.15)
    assert own.perfect < own.tlt


def test_costs_of_the_odd_steps_foretell_the_even_ones():
    """Out of sample, whole steps: under 10 % on the recorded run."""
    told, seen = foretell(read_events(RECORDED))
    assert told == pytest.approx(seen, rel=0.10)


def test_more_ranks_wait_longer_and_draw_whole_groups():
    events = read_events(RECORDED)
    costs, lengths = measure(events), recorded_lengths(events)
    groups = {tuple(rank) for step in lengths for rank in step}
    drawn = draw_lengths(lengths, 16, group=8)
    assert {tuple(rank) for step in drawn for rank in step} <= groups
    own, many = replay(costs, lengths, 8), replay(costs, drawn, 8)
    assert many.ranks == 16
    assert many.tlt > own.tlt and many.idle > 4 * own.idle
    assert drawn == draw_lengths(lengths, 16, group=8), "drawn from an explicit seed"


def test_the_table_has_the_paper_beside_it():
    text = "\n".join(simulate(read_events(RECORDED), ranks=8, nodes=8))
    assert "8 x 8 ranks" in text
    for ranks, nodes in ((1_000_000, 1_000_000), (0, 10**9)):
        with pytest.raises(ValueError, match="at most 4096"):
            simulate(read_events(RECORDED), ranks=ranks, nodes=nodes)
    assert "1.21x on one node" in text and "1.76x on eight" in text
    assert "error" in text


def test_logs_that_cannot_be_replayed_say_why(tmp_path):
    with pytest.raises(ValueError, match="no finished step"):
        simulate([])
    plain = read_events(write_fake_run(tmp_path, steps=2))
    for event in plain:
        event.get("arms", {}).pop("off", None)
    with pytest.raises(ValueError, match="must hold 'off'"):
        simulate(plain)
