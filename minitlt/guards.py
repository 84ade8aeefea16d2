"""Guards: what must not go wrong in silence is looked at after every rollout, counted and said.

Each guard has a name; what it saw goes to the run log as a `guard` event the 1st, 2nd, 4th, 8th ..
time. What makes the rollout unusable (lost rows, logits that are all NaN) ends the run instead.

    rows               as many completions as prompts, none empty, as many tokens as were verified
    padding            no row holds a draft's or a batch's padding (its ids are negative)
    drafts_refused     many drafts of a trained source and none accepted: its drafter is broken
    nan_logits         NaN among the policy's logits (read as -inf)
    logprobs_differ    the engine's logprobs are not the trainer's
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

MANY_DRAFTS = 256  # refused one after another, by a source that has learned something
FP32_GAP, NARROW_GAP = 1e-3, 1.0  # largest difference of a token's logprob, nats


class Guards:
    """Counts per guard. `write(event, **fields)` is the run log."""

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self.counts: dict[str, int] = {}
        self._rewards: dict[int, int] = {}  # failures of each reward function, as last seen

    def say(self, name: str, message: str, times: int = 1) -> None:
        """Counts; writes an event when the count passes 1, 2, 4, 8, .."""
        before = self.counts.get(name, 0)
        count = self.counts[name] = before + times
        if count.bit_length() > before.bit_length():
            self._write("guard", name=name, count=count, message=message)

    def rollout(self, num_prompts: int, rollout: Rollout, trained: bool) -> None:
        """Raises RuntimeError for rows that are lost, doubled or empty."""
        lengths, stats = [len(tokens) for tokens in rollout.completion_ids], rollout.stats
        scored = [len(logprobs) for logprobs in rollout.logprobs]
        if len(lengths) != num_prompts or 0 in lengths or lengths != scored:
            self._end("rows", f"{num_prompts} prompts got {len(lengths)} completions of {lengths} "
                              f"tokens with {scored} logprobs")  # fmt: skip
        if sum(lengths) != stats.tokens:
            self._end("rows", f"{stats.tokens} tokens were verified, {sum(lengths)} returned")
        if min(map(min, rollout.completion_ids), default=0) < 0:
            self._end("padding", "a row holds a padding token")
        if stats.nan_logits:
            message = "NaN among the policy's logits of this rollout, read as -inf"
            self.say("nan_logits", f"{stats.nan_logits} times {message}", stats.nan_logits)
        refused = stats.drafted[0] if stats.drafted and not stats.accepted[0] else 0
        if trained and refused >= MANY_DRAFTS:
            self.say("drafts_refused", f"none of {refused} drafts was accepted in this rollout")

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


def largest_gap(dtypes: Sequence[torch.dtype]) -> float:
    """How far two logprobs of one token may be apart when these dtypes took part."""
    wide = all(dtype in (torch.float32, torch.float64) for dtype in dtypes)
    return FP32_GAP if wide else NARROW_GAP
