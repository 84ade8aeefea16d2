"""What a run would cost on other machines' worth of ranks, replayed from its log.

The idea. Rows that decode together advance together, so a list of completion lengths says how long
each number of active rows lasts, in tokens: 8 rows up to the shortest, 7 up to the next, .. (with a
queue behind them, a free slot is refilled). The log says how long each number of active rows lasted
in seconds. Their ratio is the cost of one token at that number of rows, with everything that the
bandit did in it. For plain decoding the steps of the arm `off` say the same: such a step emits one
token per row, so seconds = u * steps + v * tokens, fitted by least squares over the rollouts.

A step is then the slowest rank's rollout plus the rest, which grows with the longest completion
(the update pads to it): u + v * longest, fitted over the steps. Where a generation is trained on
more than once, its rollout is shared by as many steps.

    plain    slowest rank at plain cost + rest
    TLT      slowest rank at the run's own cost + rest + overshoot and merge
    perfect  the mean rank at the run's own cost + rest: nobody ever waits

At the run's own number of ranks its own lengths are replayed, step by step. How far off that is,
says `foretell`: costs from the odd steps, replayed on the even ones. At another number every rank
draws groups of completions of one prompt from the whole run, the same number of rows per rank, so
the work grows with the ranks.

Left out: faster drafters through more harvesting, slower merges on more nodes, updates that shard.

How to run: `minitlt simulate RUN --ranks 8 --nodes 4`.
"""

from __future__ import annotations

import bisect
import heapq
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean

from minitlt.events import Event
from minitlt.report import by_step

PAPER = "the paper (TLT, Qwen2.5-7B on H100): 1.21x on one node of 8 GPUs, 1.76x on eight"
_DRAWS = 100  # simulated steps where the run's own lengths do not fit
MOST_RANKS = 4096


@dataclass
class Costs:
    """What the log says things take, in seconds.

    token: by bucket of active rows, one token of depth with the run's own drafting.
    plain: (u, v), a plain step of a rows takes u + v * a. start: prefill and what else a rollout
    begins with. rest: (u, v), the step outside the rollout takes u + v * longest, as the batch is
    padded to its longest completion; without overshoot and merge (extra).
    steps_per_idle: drafter steps per idle second. updates: training steps per rollout.
    """

    token: dict[int, float]
    plain: tuple[float, float]
    start: float
    rest: tuple[float, float]
    extra: float
    steps_per_idle: float
    updates: float = 1.0

    def rollout(self, lengths: Sequence[int], slots: int, *, plain: bool) -> float:
        """Seconds that a rank needs for completions of these lengths."""
        depth = depth_by_rows(lengths, slots)
        u, v = self.plain
        each = {
            a: u + v * a if plain else self.token[_nearest(a, self.token)]
            for a, steps in depth.items()
            if steps  # rows of one token take none
        }
        return self.start + sum(depth[a] * seconds for a, seconds in each.items())


def _bucket(rows: int) -> int:
    return rows.bit_length()


def _nearest(rows: int, known: Iterable[int]) -> int:
    return min(known, key=lambda bucket: abs(bucket - _bucket(rows)))


def depth_by_rows(lengths: Iterable[int], slots: int) -> dict[int, int]:
    """Active rows -> plain steps for which so many are active; free slots are refilled. The first
    rows have their first tokens from the prompts' own pass, which is no step.

    >>> depth_by_rows([3, 6, 6], slots=3)
    {3: 2, 2: 3}
    """
    waiting = list(lengths)[::-1]
    active = sorted(waiting.pop() - 1 for _ in range(min(slots, len(waiting))))  # where rows end
    depth, result = 0, defaultdict[int, int](int)
    while waiting or active:
        while waiting and len(active) < slots:
            heapq.heappush(active, depth + waiting.pop())
        result[len(active)] += active[0] - depth
        depth = active[0]
        while active and active[0] == depth:
            heapq.heappop(active)
    return dict(result)


def measure(events: list[Event]) -> Costs:
    """The costs in a run log. ValueError says what the log lacks."""
    rollouts, windows = _every(events, "rollout_end"), _every(events, "harvest_end")
    updates = {step: ends[0] for step, ends in by_step(events, "update").items()}
    if not rollouts or not updates:
        raise ValueError("the run log holds no finished step; nothing can be simulated from it")
    seconds, depth = defaultdict[int, float](float), defaultdict[int, int](int)
    for end in rollouts:
        ends = [at for at, _ in end["active_trace"][1:]] + [end["seconds"]]
        for (at, rows), until in zip(end["active_trace"], ends, strict=True):
            seconds[_bucket(rows)] += until - at
        for rows, tokens in depth_by_rows(end["lengths"], _slots(end)).items():
            depth[_bucket(rows)] += tokens
    extra = _mean_of_slowest(events, "harvest_end", "overshoot_s")
    extra += _mean_of_slowest(events, "merge", "seconds")
    idle = sum(w["available_s"] for w in windows)
    by_generation = by_step(events, "rollout_end")
    if len(by_generation[rollouts[0]["step"]]) == 1:  # inline: time of its own
        extra += _mean_of_slowest(events, "harvest_end", "harvested_s")
    longest = {n: max(max(e["lengths"]) for e in ends) for n, ends in by_generation.items()}
    # A step that trains on an earlier generation has no rollout of its own.
    before = {n: max((g for g in longest if g <= n), default=min(longest)) for n in updates}
    rest = [
        (1.0, longest[before[n]], max(u["seconds"] - (extra if n in longest else 0.0), 0.0))
        for n, u in updates.items()
    ]
    return Costs(
        token={b: seconds[b] / depth[b] for b in depth if depth[b] and seconds[b]},
        plain=_plain_cost([end["arms"]["off"] for end in rollouts if "off" in end["arms"]]),
        start=mean(end["active_trace"][0][0] for end in rollouts),
        rest=_fit(rest),
        extra=extra,
        steps_per_idle=sum(w["drafter_steps"] for w in windows) / idle if idle else 0.0,
        updates=max(len(updates) / len(longest), 1.0),
    )


def _every(events: list[Event], name: str) -> list[Event]:
    """The events called `name`, of every step and rank."""
    return [event for ranks in by_step(events, name).values() for event in ranks]


def _mean_of_slowest(events: list[Event], name: str, field: str) -> float:
    """Over the steps, the mean of the largest value on any rank; 0 if there is none."""
    return mean([max(e[field] for e in ends) for ends in by_step(events, name).values()] or [0.0])


def _slots(end: Event) -> int:
    return max(rows for _, rows in end["active_trace"])


def _most_slots(events: list[Event]) -> int:
    return max(map(_slots, _every(events, "rollout_end")))


def _plain_cost(off: list[dict[str, float]]) -> tuple[float, float]:
    if not off:
        raise ValueError(
            "the run never decoded plainly, so plain cost is unknown; rollout.arms must hold 'off'"
        )
    return _fit([(arm["steps"], arm["tokens"], arm["seconds"]) for arm in off])


def _fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(u, v) >= 0 with z = u * x + v * y for points (x, y, z), by least squares."""
    xx, xy, yy, xz, yz = (
        sum(p[i] * p[j] for p in points) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2))
    )
    det = xx * yy - xy * xy
    u, v = ((xz * yy - yz * xy) / det, (yz * xx - xz * xy) / det) if det > 1e-9 else (xz / xx, 0.0)
    if v < 0:
        return xz / xx, 0.0
    return (u, v) if u >= 0 else (0.0, yz / yy)


@dataclass
class Outcome:
    """Mean seconds of a step, and of it what all ranks together waited (with TLT)."""

    ranks: int
    plain: float
    tlt: float
    perfect: float
    idle: float
    drafter_steps: float


def replay(costs: Costs, steps: Sequence[Sequence[Sequence[int]]], slots: int) -> Outcome:
    """steps: per rollout and rank the completion lengths."""
    outcomes, updates = [], costs.updates
    for ranks in steps:
        plain = [costs.rollout(lengths, slots, plain=True) for lengths in ranks]
        tlt = [costs.rollout(lengths, slots, plain=False) for lengths in ranks]
        rest = costs.rest[0] + costs.rest[1] * max(max(lengths) for lengths in ranks)
        rest *= updates
        outcomes.append((
            max(plain) + rest,
            max(tlt) + rest + costs.extra,
            mean(tlt) + rest,
            sum(max(tlt) - t for t in tlt),
        ))  # fmt: skip
    plain_s, tlt_s, perfect_s, idle = (mean(c) / updates for c in zip(*outcomes, strict=True))
    return Outcome(len(steps[0]), plain_s, tlt_s, perfect_s, idle, idle * costs.steps_per_idle)


def recorded_lengths(events: list[Event]) -> list[list[list[int]]]:
    """Per step and rank, of the steps that all ranks finished."""
    steps = by_step(events, "rollout_end").values()
    most = max(len(ends) for ends in steps)
    return [[list(end["lengths"]) for end in ends] for ends in steps if len(ends) == most]


def draw_lengths(
    recorded: list[list[list[int]]], ranks: int, group: int, seed: int = 0
) -> list[list[list[int]]]:
    """Steps for another number of ranks: each rank draws whole groups from the run."""
    rng, rows = random.Random(seed), len(recorded[0][0])
    groups = [
        lengths[i : i + group]
        for step in recorded
        for lengths in step
        for i in range(0, len(lengths), group)
    ]

    def rank() -> list[int]:
        return [n for drawn in rng.choices(groups, k=max(rows // group, 1)) for n in drawn]

    return [[rank() for _ in range(ranks)] for _ in range(_DRAWS)]


def measured(events: list[Event]) -> tuple[float, float]:
    """(mean seconds of a step, mean idle seconds of a step over all ranks) as they were."""
    steps = [ends[0]["step_seconds"] for ends in by_step(events, "update").values()]
    ends = by_step(events, "rollout_end").values()
    idle = sum(max(e["t"] for e in step) - e["t"] for step in ends for e in step)
    return mean(steps), idle / max(len(steps), len(ends))


def foretell(events: list[Event]) -> tuple[float, float]:
    """(simulated, measured) mean seconds of every second generation's steps, with the costs of the
    others alone. ValueError if there are not two."""
    starts = sorted(by_step(events, "rollout_end"))
    if len(starts) < 2:
        raise ValueError("the run log holds one rollout; half of it cannot foretell the other")
    parts: list[list[Event]] = [[], []]
    for event in events:
        parts[(bisect.bisect_right(starts, event.get("step", 0)) - 1) % 2].append(event)
    odd, even = parts
    told = replay(measure(odd), recorded_lengths(even), _most_slots(events)).tlt
    return told, measured(even)[0]


def simulate(events: list[Event], ranks: int = 0, nodes: int = 1) -> list[str]:
    """The table of `minitlt simulate`: the run itself, then `ranks` ranks on each of `nodes`.

    Raises ValueError for more than MOST_RANKS ranks in all.
    """
    if ranks * nodes > MOST_RANKS or nodes > MOST_RANKS:
        raise ValueError(f"{ranks or 'as many'} ranks on {nodes} nodes are more than can be "
                         f"simulated: at most {MOST_RANKS} in all")  # fmt: skip
    costs, recorded = measure(events), recorded_lengths(events)
    slots = _most_slots(events)
    own = replay(costs, recorded, slots)
    seconds, idle = measured(events)
    head = f"{'':>22}{'plain':>9}{'TLT':>9}{'perfect':>9}{'speedup':>9}{'idle':>9}"
    lines = [f"{head}{'drafter steps':>15}", _line("the run's lengths", own)]
    if ranks * nodes not in (0, own.ranks) or nodes > 1:
        runs = [e["config"] for e in events if e["event"] == "run"]
        group = int(runs[0].get("num_generations", 8)) if runs else 8
        total = (ranks or own.ranks) * nodes
        drawn = draw_lengths(recorded, total, min(group, len(recorded[0][0])))
        lines.append(_line(f"{nodes} x {ranks or own.ranks} ranks", replay(costs, drawn, slots)))
    check = "too few steps to foretell some from the others"
    if len(recorded) > 3:
        told, seen = foretell(events)
        check = f"costs of the odd steps foretell {told:.3g} s for the even ones, which took "
        check += f"{seen:.3g} s (error {100 * abs(told - seen) / seen:.1f} %)"
    return [
        *lines,
        "",
        "Seconds per training step; idle is summed over ranks; speedup is plain / TLT.",
        f"Check: this run took {seconds:.3g} s per step with {idle:.3g} s idle; {check}.",
        f"Beside it {PAPER}.",
    ]


def _line(name: str, o: Outcome) -> str:
    numbers = f"{o.plain:>9.3g}{o.tlt:>9.3g}{o.perfect:>9.3g}{o.plain / o.tlt:>8.2f}x"
    return f"{name:>22}{numbers}{o.idle:>9.3g}{o.drafter_steps:>15.0f}"
