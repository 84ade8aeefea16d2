"""Guards: what must not go wrong in silence is looked at after every rollout, counted and said.

Each guard has a name; what it saw goes to the run log as a `guard` event the 1st, 2nd, 4th, 8th ..
time. What makes the rollout unusable (lost rows, logits that are all NaN) ends the run instead.

    rows               the rows that were asked for, in their order, none empty or drawn twice, with
                       as many tokens as were verified
    padding            no row holds a draft's or a batch's padding (its ids are negative)
    drafts_refused     a source that drafted well, or was saved as one that does, no longer does
    nan_logits         NaN among the policy's logits (read as -inf)
    logprobs_differ    the engine's logprobs of some row are not the trainer's
    stale_weights      ... and a refresh of the engine's weights mended that
    reward_failed      a reward function raised, timed out or returned NaN; those rows scored 0.0

Drafters that differ after a merge are spot.py's guard. Left out: looks inside a forward; a guard
reads numbers that are there anyway, and once in a while runs one row again.
How to run: `pytest tests/test_guards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minitlt.spec import Rollout

MANY_DRAFTS = 256  # of one source, over as many rollouts as it takes, are judged together
WELL, BADLY = 0.2, 0.02  # shares of them that were accepted
FP32_GAP, NARROW_GAP = 1e-3, 1.0  # largest difference of a token's logprob, nats
NARROW_MEAN = 0.05  # mean difference; a sound one, measured on small models, is 0.014 to 0.03
FEW_TOKENS = 64  # a row that is shorter has the mean of one that is so long and equal in the rest


class Guards:
    """Counts per guard. `write(event, **fields)` is the run log. saved: sources whose drafter was
    a good one when the run began."""

    def __init__(self, write: Callable[..., None], saved: Sequence[str] = ()) -> None:
        self._write = write
        self.counts: dict[str, int] = {}
        self._drafts: dict[str, tuple[int, int]] = {}  # drafted and accepted, not yet judged
        self._drafted_well = set(saved)
        self._rewards: dict[int, int] = {}  # failures of each reward function, as last seen

    def say(self, name: str, message: str, times: int = 1) -> None:
        """Counts; writes an event when the count passes 1, 2, 4, 8, .."""
        before = self.counts.get(name, 0)
        count = self.counts[name] = before + times
        if count.bit_length() > before.bit_length():
            self._write("guard", name=name, count=count, message=message)

    def rollout(self, keys: Sequence[int], rollout: Rollout) -> None:
        """Raises RuntimeError for rows that are lost, doubled, empty or out of order."""
        lengths, stats = [len(tokens) for tokens in rollout.completion_ids], rollout.stats
        scored = [len(logprobs) for logprobs in rollout.logprobs]
        if len(lengths) != len(keys) or 0 in lengths or lengths != scored:
            self._end("rows", f"{len(keys)} prompts got {len(lengths)} completions of {lengths} "
                              f"tokens with {scored} logprobs")  # fmt: skip
        if rollout.keys != list(keys) or len({*keys}) < len(keys):
            self._end("rows", "rows are out of their order, or two of them share their noise")
        if sum(lengths) != stats.tokens:
            self._end("rows", f"{stats.tokens} tokens were verified, {sum(lengths)} returned")
        if min(map(min, rollout.completion_ids), default=0) < 0:
            self._end("padding", "a row holds a padding token")
        if stats.nan_logits:
            message = "NaN among the policy's logits of this rollout, read as -inf"
            self.say("nan_logits", f"{stats.nan_logits} times {message}", stats.nan_logits)
        for source, counts in stats.sources.items():
            self._judge(source, *counts)

    def _judge(self, source: str, drafted: int, accepted: int) -> None:
        """The bandit soon drops a source that fails, so its drafts are few in each rollout."""
        before = self._drafts.pop(source, (0, 0))
        drafted, accepted = before[0] + drafted, before[1] + accepted
        if drafted < MANY_DRAFTS:
            self._drafts[source] = drafted, accepted
        elif accepted > WELL * drafted:
            self._drafted_well.add(source)
        elif accepted < BADLY * drafted and source in self._drafted_well:
            self.say("drafts_refused", f"of {drafted} drafts of {source}, which drafted well "
                                       f"before, {accepted} were accepted")  # fmt: skip

    def _end(self, name: str, message: str) -> None:
        self.say(name, message)
        raise RuntimeError(f"guard {name}: {message}; this is a bug, please report it")

    def rewards(self, functions: Sequence[Any]) -> None:
        """Counts what guarded reward functions (rewards.GuardedReward) have swallowed."""
        for index, function in enumerate(functions):
            failures = getattr(function, "failures", 0)
            if new := failures - self._rewards.get(index, 0):
                self._rewards[index] = failures
                message = f"{function.__name__}: {function.last_error}; such rows score 0.0"
                self.say("reward_failed", message, new)


def gap_limits(dtypes: Sequence[torch.dtype], usual: float) -> tuple[float, float]:
    """How far the logprobs of a row's tokens may be apart, at most and in the mean, when these
    dtypes took part and the mean was `usual` with fresh weights."""
    if all(dtype in (torch.float32, torch.float64) for dtype in dtypes):
        return FP32_GAP, FP32_GAP
    return NARROW_GAP, max(NARROW_MEAN, 2 * usual)
