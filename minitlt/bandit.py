"""Which way to draft, chosen anew for every step: arms, and the bandit that learns what pays.

How to run: `pytest tests/test_bandit.py`, `minitlt simulate`.
"""

from __future__ import annotations

import functools
import math
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from minitlt.draft import MAX_NODES

OFF = "off"
SOURCES = ("ngram", "eagle", "merged", "int8")


class Arm(NamedTuple):
    """A way to draft: the source, how deep, how many children per node, how many nodes, and how
    likely (in percent, as the source believes) each must be to stand."""

    source: str = OFF
    depth: int = 0
    width: int = 1
    budget: int = 0  # 0: depth * width
    sure: int = 0

    @property
    def name(self) -> str:
        if self.source == OFF:
            return OFF
        tree = (f"x{self.width}" if self.width > 1 else "") + (
            f"b{self.budget}" * (self.budget > 0)
        )
        return f"{self.source}-{self.depth}{tree}" + f"p{self.sure:02}" * (self.sure > 0)

    @property
    def nodes(self) -> int:
        """Drafts per row at most, i.e. one less than the tokens that a verify step feeds."""
        return self.budget or min(self.depth * self.width, MAX_NODES - 1)

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`off`, `ngram-3`, `eagle-4`, `eagle-3x4` (depth 3, width 4), `eagle-4x3b5` (the best 5
        nodes of such a tree), `eagle-4x3b5p40` (those of them that are likely by 40 % or more),
        `merged-4x2` (a learned tree and a copied chain in one), `int8-6` (the policy in 8 bits).

        >>> Arm.parse("eagle-4x3b5p40")
        Arm(source='eagle', depth=4, width=3, budget=5, sure=40)

        Raises ValueError with the right form for anything else.
        """
        if text == OFF:
            return cls()
        found = re.fullmatch(r"(\w+)-(\d+)(?:x(\d+)(?:b(\d+))?)?(?:p(\d\d))?", text)
        if not found:
            raise ValueError(
                f"arm {text!r}: write off, SOURCE-DEPTH, SOURCE-DEPTHxWIDTH, "
                "SOURCE-DEPTHxWIDTHbNODES or, with a likelihood in percent, ..pNN"
            )
        source, *numbers = found.groups()
        depth, width, budget, sure = (int(number or 0) for number in numbers)
        arm = cls(source, depth, width or 1, budget, sure)
        if not 1 <= arm.depth <= 32 or not 1 <= arm.width <= 32:
            raise ValueError(f"arm {text!r}: depth and width go from 1 to 32")
        if found[4] and arm.width < 2:
            raise ValueError(f"arm {text!r}: a chain has as many nodes as its depth; leave bN out")
        if budget and not arm.depth <= arm.budget < MAX_NODES:
            raise ValueError(f"arm {text!r}: its nodes go from the depth to {MAX_NODES - 1}")
        if found[5] and (arm.width < 2 or not sure or source == "ngram"):
            raise ValueError(f"arm {text!r}: pNN, from 01 to 99, is of learned trees (x2 or more)")
        if source == "int8" and arm.width > 1:
            raise ValueError(f"arm {text!r}: int8 drafts chains, e.g. int8-{depth}")
        if source == "merged" and arm.width < 2:
            raise ValueError(f"arm {text!r}: a merged tree needs two branches, e.g. {text}x2")
        return arm


class Bandit:
    """BEG-MAB (TLT, section on adaptive rollout): buckets by active rows, epsilon-greedy over
    tokens per second in a sliding window. `off` is an arm like any other.

    TLT takes the median of tokens per second. That is blind where it matters most: alone, a draft
    that is accepted 45 % of the time has the median of one that never is. Here an arm's value is

        active * accept length / usual seconds of a step in this bucket

    where usual is the mean without the slowest tenth: first steps of a shape are slow, and a median
    is blind again (copied drafts cost nothing in the steps in which no row has a match).
    Seconds belong to the bucket, and within it they are scaled to the rows there are now, by the
    power that this arm's seconds follow between two buckets: otherwise one measured with 31 rows
    looks slow beside one measured with 17. Acceptance hardly depends on company, so what other
    buckets saw of it counts as `PRIOR_ROWS` row-steps; but it changes along a text (copies of the
    prompt stand at its beginning), so no more than `WINDOW_ROWS` row-steps are remembered. An arm
    is tried for `tries` row-steps in a bucket before it is judged there, unless it cannot win, not
    even if all its drafts stood: more rows, nodes or levels never take less time, and what smaller
    drafts cost more than `off` grows with them at least. That bound is the break-even prior which
    keeps exploration cheap. Four row-steps may all be unlucky (with a draft that is right half of
    the time, one series in 16), so an arm is judged by what its accept length may be: what was
    seen, and HOPE / sqrt(row-steps) more. A rollout's texts are alike, hard or easy, so at the next
    one's `begin` row-steps count half. Hope explores where it may pay, so epsilon is 0 unless asked
    for: a random arm with 32 rows costs three plain steps. When a drafter changes, `renew` makes
    its arms prove themselves again, so that yesterday's acceptance does not bind. How the constants
    were chosen: LOG.md.
    """

    PRIOR_ROWS = 16.0
    WINDOW_ROWS = 128  # four steps of 32 rows: known to a tenth of a token
    GROWTH = 0.5  # the power, where an arm is known in one bucket only
    SLACK = 1.1
    HOPE = 0.7  # tokens; somewhat less than the usual spread of a row's accepted drafts
    LEAST_STEPS = 2  # the first draft after a while also pays for what its drafter has missed
    MARGIN = 1.1  # over `off`: of many arms measured, the best looks better than it is

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        epsilon: float = 0.0,
        window: int = 40,
        tries: int = 4,
        seed: int = 0,
    ) -> None:
        if not arms:
            raise ValueError("the bandit needs at least one arm, e.g. off")
        if tries > window:
            raise ValueError(f"of {window} steps no {tries} can be remembered: window below tries")
        self.arms = list(dict.fromkeys(arms))
        self.epsilon, self.window, self.tries = epsilon, window, tries
        self._random = random.Random(seed)
        # Per step, in windows: (tokens, rows) and (seconds, rows) by bucket and arm, (tokens, rows)
        # by arm.
        self._here: dict[tuple[int, str], deque[tuple[int, int]]] = {}
        self._seconds: dict[tuple[int, str], deque[tuple[float, int]]] = {}
        self._anywhere: dict[str, deque[tuple[int, int]]] = {}
        self._tried: dict[str, float] = {}  # row-steps by arm; those of earlier rollouts fade
        # Of these, where known: mean seconds and rows, and sums of tokens and of rows.
        self._usuals: dict[tuple[int, str], tuple[float, float]] = {}
        self._sums: dict[Any, tuple[int, int]] = {}

    def begin(self) -> None:
        """A rollout begins."""
        self._tried = {name: rows / 2 for name, rows in self._tried.items()}

    @staticmethod
    def bucket(active: int) -> int:
        """0 for 1 row, then 2-3, 4-7, 8-15, .. active rows."""
        return active.bit_length() - 1

    def seen(self, active: int, arm: Arm) -> int:
        """Row-steps remembered of this arm in this bucket."""
        return self._sum(self._here, (self.bucket(active), arm.name))[1]

    def accept_length(self, active: int, arm: Arm) -> float:
        """Tokens per row-step to expect of this arm; at least the target's own."""
        tokens, rows = self._sum(self._anywhere, arm.name)
        if not rows:
            return 1.0
        tokens_here, rows_here = self._sum(self._here, (self.bucket(active), arm.name))
        prior = self.PRIOR_ROWS * tokens / rows
        return (prior + tokens_here) / (self.PRIOR_ROWS + rows_here)

    def _sum(self, table: dict[Any, Any], key: Any) -> tuple[int, int]:
        """Tokens and row-steps that a table remembers."""
        if key not in self._sums:
            steps = table.get(key, ())
            self._sums[key] = sum(t for t, _ in steps), sum(rows for _, rows in steps)
        return self._sums[key]

    def hope(self, arm: Arm) -> float:
        """How much longer than seen its accept length may be; plain has nothing to hope for."""
        tried = self._tried.get(arm.name, 0)
        return self.HOPE / math.sqrt(tried) if tried and arm.source != OFF else 0.0

    def value(self, active: int, arm: Arm, hope: float = 0.0) -> float:
        """Tokens per second to expect, at an accept length longer than seen by `hope`; 0 if the
        arm was never tried in this bucket."""
        key = self.bucket(active), arm.name
        if key not in self._seconds:
            return 0.0
        return active * (self.accept_length(active, arm) + hope) / self.usual(active, arm.name)

    def usual(self, active: int, name: str) -> float:
        """Seconds of a step of an arm that was tried in this bucket, with so many rows."""
        bucket, power = self.bucket(active), self.GROWTH
        seconds, rows = self._mean((bucket, name))
        for other in ((bucket + 1, name), (bucket - 1, name)):
            if len(self._seconds.get(other, ())) < self.LEAST_STEPS:
                continue
            others, other_rows = self._mean(other)
            if abs(apart := math.log(other_rows / rows)) > 0.4:  # nearer, it would be noise
                power = min(max(math.log(others / seconds) / apart, 0.0), 1.0)
                break
        return seconds * (active / rows) ** power

    def _mean(self, key: tuple[int, str]) -> tuple[float, float]:
        """Mean seconds and rows, of few steps without the first, of more without the slowest tenth.
        Not without the slowest of few: drafts that end with their texts make quick steps."""
        if key not in self._usuals:
            steps = list(self._seconds[key])
            kept = sorted(steps)[: len(steps) - len(steps) // 10] if len(steps) > 9 else steps[1:]
            kept = kept or steps
            self._usuals[key] = fmean(s for s, _ in kept), fmean(rows for _, rows in kept)
        return self._usuals[key]

    def choose(self, active: int) -> Arm:
        best = max(self.value(active, arm) for arm in self.arms)
        able = [a for a in self.arms if not self._cannot_win(active, a, best)] or self.arms
        if fresh := [arm for arm in able if self._is_fresh(active, arm)]:
            return min(fresh, key=lambda arm: arm.nodes)  # small ones say what large ones cost
        if self._random.random() < self.epsilon:
            return self._random.choice(able)
        margin = {OFF: self.MARGIN}
        return max(
            able, key=lambda a: self.value(active, a, self.hope(a)) * margin.get(a.source, 1.0)
        )

    def _is_fresh(self, active: int, arm: Arm) -> bool:
        steps = len(self._seconds.get((self.bucket(active), arm.name), ()))
        return steps < self.LEAST_STEPS or self.seen(active, arm) < self.tries

    def _cannot_win(self, active: int, arm: Arm, best: float) -> bool:
        """Even its highest possible value, with some slack, is below the best seen here."""
        if arm.source == OFF or self.value(active, arm) == best:
            return False
        highest = arm.depth + 1.0
        if self._sum(self._anywhere, arm.name)[1] >= self.tries:
            highest = min(highest, self.accept_length(active, arm) + self.hope(arm))
        return active * highest * self.SLACK < best * self._least_seconds(active, arm)

    def _least_seconds(self, active: int, arm: Arm) -> float:
        """What a step of it takes here, or a bound: no less than a smaller one took, of fewer rows
        or of a smaller draft by the same drafter; per row no less than with more rows; and no less
        than on the line from `off` through such a draft, because cost bends upwards (with nodes in
        the target, with levels in the drafter: the shorter of both is the bound)."""
        bucket = self.bucket(active)
        if len(self._seconds.get((bucket, arm.name), ())) >= self.LEAST_STEPS:
            return self.usual(active, arm.name)
        smaller = [
            a
            for a in self.arms
            if a.source == OFF
            or (a.source == arm.source and a.sure >= arm.sure and self._fits_in(a, arm))
        ]
        least, plain = 0.0, 0.0
        for a in sorted(smaller, key=lambda a: a.nodes):
            for b in range(bucket + 2):
                if len(self._seconds.get((b, a.name), ())) < self.LEAST_STEPS:  # not a slow start
                    continue
                if b != bucket:
                    seconds, rows = self._mean((b, a.name))
                    least = max(least, seconds * min(active / rows, 1.0))
                    continue
                here = self.usual(active, a.name)
                least, plain = max(least, here), here if a.source == OFF else plain
                if plain and a.nodes and not arm.sure:
                    times = min(arm.nodes / a.nodes, arm.depth / a.depth)
                    least = max(least, plain + (here - plain) * times)
        return least

    @staticmethod
    def _fits_in(one: Arm, other: Arm) -> bool:
        return one.nodes <= other.nodes and one.depth <= other.depth

    def record(self, active: int, arm: Arm, tokens: int, seconds: float) -> None:
        key = (self.bucket(active), arm.name)
        self._remember(self._here, key, (tokens, active), self.WINDOW_ROWS)
        self._remember(self._seconds, key, (max(seconds, 1e-9), active))
        for known in (self._usuals, self._sums):
            known.pop(key, None)
        self._sums.pop(arm.name, None)
        self._remember(self._anywhere, arm.name, (tokens, active), self.WINDOW_ROWS)
        self._tried[arm.name] = self._tried.get(arm.name, 0) + active

    def _remember(
        self, table: dict[Any, Any], key: Any, value: Any, most: float = math.inf
    ) -> None:
        """most: row-steps to keep, and the step that is begun with them."""
        steps = table.setdefault(key, deque(maxlen=self.window))
        steps.append(value)
        while sum(rows for _, rows in steps) - steps[0][1] >= most:
            steps.popleft()

    def renew(self, source: str) -> None:
        """The drafter behind `source` changed: what its arms achieved is forgotten, what their
        steps cost is not."""
        names = {arm.name for arm in self.arms if arm.source in (source, "merged")}
        self._here = {key: steps for key, steps in self._here.items() if key[1] not in names}
        self._anywhere = {n: steps for n, steps in self._anywhere.items() if n not in names}
        self._tried = {n: rows for n, rows in self._tried.items() if n not in names}
        self._sums.clear()

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self._random.getstate()
        tables = {
            "here": [[*key, list(v)] for key, v in self._here.items()],
            "seconds": [[*key, list(v)] for key, v in self._seconds.items()],
            "anywhere": [[name, list(v)] for name, v in self._anywhere.items()],
        }
        return {"random": [version, list(internal), gauss], "tried": self._tried, **tables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
        fresh: Callable[..., Any] = functools.partial(deque, maxlen=self.window)
        self._here = {(b, name): fresh(map(tuple, v)) for b, name, v in state["here"]}
        # Seconds without rows are of an earlier version; two steps measure them anew.
        pairs = [(b, name, v) for b, name, v in state["seconds"] if isinstance(v[0], list | tuple)]
        self._seconds = {(b, name): fresh(map(tuple, v)) for b, name, v in pairs}
        self._usuals.clear()
        self._sums.clear()
        self._tried = dict(state["tried"])
        self._anywhere = {name: fresh(map(tuple, v)) for name, v in state["anywhere"]}
