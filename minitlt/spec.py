"""The rollout engine: batched decoding with speculative drafts that never change a token.

One step, for all active rows at once (`RolloutEngine.step`):

    choose an arm -> draft a tree per row -> one target forward -> verify -> commit

Verification is coupled (`kernels.coupled_verify`): the target samples its own token at every
position, with noise that is a pure function of (row key, position, token id), and a draft is
accepted exactly when it is that token. So the text is a function of the keys and the target alone.
Speculation on or off, any drafter, any depth, any batch order, any hot swap: same tokens. Plain
decoding is the arm `off`, through the same code.

Rows live in slots 0..B-1. When one finishes, the last active row takes its place (one copy of its
cache), so every step works on plain views; a free slot is refilled from the queue. A row's last
token, its root, is always fed with the next step, so a prompt needs no logits when it is
prefilled, and siblings of a GRPO group share one prefill.

Left out: draft probabilities and acceptance coins (coupling needs none), stop strings,
beam search. How to try it: `pytest tests/test_spec.py`, `minitlt generate`.

Shape suffixes: B active rows, T tree nodes (root included), D emitted tokens, V vocab,
F tapped width, H hidden.
"""

from __future__ import annotations

import functools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor

from minitlt.draft import MAX_NODES, Draft, Taps, ancestor_bits, depths
from minitlt.kernels import Verified, coupled_verify, sampling_thresholds
from minitlt.target import Target

OFF = "off"


class Drafter(Protocol):
    """Proposes trees; keeps its own state per slot, told of every committed token.

    A row with L tokens has its root at index L - 1. `observe` brings the emitted tokens
    x_L, x_{L+1}, .. with the taps of the nodes that decided them (positions L - 1, L, ..).
    """

    name: str
    needs_taps: bool

    def begin(self, slot: int, prompt: list[int], group: int) -> None: ...
    def prefill(self, slot: int, start: int, taps: Taps) -> None: ...
    def share(self, src: int, dst: int, length: int) -> None: ...
    def observe(self, slots: list[int], tokens_BN: Tensor, num_B: Tensor, taps: Taps) -> None: ...
    def propose(
        self,
        slots: list[int],
        roots_B: Tensor,
        keys_B: Tensor,
        positions_B: Tensor,
        temperatures_B: Tensor,
        depth: int,
        width: int,
    ) -> Draft: ...
    def move(self, src: int, dst: int) -> None: ...
    def finish(self, slot: int, prompt: list[int], completion: list[int]) -> None: ...


class Arm(NamedTuple):
    """A way to draft: from which source, how deep, how many children per node."""

    source: str = OFF
    depth: int = 0
    width: int = 1

    @property
    def name(self) -> str:
        if self.source == OFF:
            return OFF
        return f"{self.source}-{self.depth}" + (f"x{self.width}" if self.width > 1 else "")

    @classmethod
    def parse(cls, text: str) -> Arm:
        """`off`, `ngram-3`, `eagle-4`, `eagle-3x4` (depth 3, width 4).

        >>> Arm.parse("eagle-3x4")
        Arm(source='eagle', depth=3, width=4)

        Raises ValueError with the right form for anything else.
        """
        if text == OFF:
            return cls()
        source, _, size = text.rpartition("-")
        depth, _, width = size.partition("x")
        if not source or not depth.isdigit() or not (width.isdigit() or "x" not in size):
            raise ValueError(f"arm {text!r}: write off, SOURCE-DEPTH or SOURCE-DEPTHxWIDTH")
        arm = cls(source, int(depth), int(width or 1))
        if not 1 <= arm.depth <= 32 or not 1 <= arm.width <= 32:
            raise ValueError(f"arm {text!r}: depth and width go from 1 to 32")
        return arm


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; the names and the order of effects are those of transformers.

    top_k 0, top_p 1.0, min_p 0.0 and repetition_penalty 1.0 are off. T = 0 is exact argmax.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    suppress_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "temperature must be 0 or more": self.temperature >= 0,
            "top_k must be 0 (off) or more": self.top_k >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "min_p must be in [0, 1)": 0 <= self.min_p < 1,
            "repetition_penalty must be positive": self.repetition_penalty > 0,
            "min_new_tokens must be 0 or more": self.min_new_tokens >= 0,
        }
        if wrong := [text for text, right in checks.items() if not right]:
            raise ValueError(f"sampling: {wrong[0]}")

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def rewrites(self) -> bool:
        return self.repetition_penalty != 1 or self.min_new_tokens > 0 or bool(self.suppress_ids)


@dataclass
class Row:
    """One completion in the making."""

    index: int
    prompt: list[int]
    key: int
    limit: int  # tokens it may emit
    group: int  # rows with equal prompts share it
    temperature: float
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)  # per token: 1 = drafted and accepted
    finish_reason: str = ""


@dataclass
class SpecStats:
    """What a rollout cost. Accept length is emitted tokens over row-steps, a ratio of sums."""

    seconds: float = 0.0
    verify_steps: int = 0
    row_steps: int = 0
    tokens: int = 0
    nan_logits: int = 0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)  # row-steps with a draft this deep
    accepted: list[int] = field(default_factory=list)  # row-steps that accepted this deep
    arms: dict[str, dict[str, float]] = field(default_factory=dict)
    arms_by_rows: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # by bucket
    active_trace: list[tuple[float, int]] = field(default_factory=list)

    @property
    def accept_length(self) -> float:
        return self.tokens / self.row_steps if self.row_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accept_by_position(self) -> list[float]:
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [got / asked if asked else 0.0 for got, asked in pairs]

    def count(self, drafted_B: list[int], emitted_B: list[int]) -> None:
        """Adds one verify step: how deep each row's draft was and how many tokens it emitted."""
        deepest = max(drafted_B)
        while len(self.drafted) < deepest:
            self.drafted.append(0)
            self.accepted.append(0)
        for drafted, emitted in zip(drafted_B, emitted_B, strict=True):
            for i in range(drafted):
                self.drafted[i] += 1
                self.accepted[i] += emitted > i + 1
        self.verify_steps += 1
        self.row_steps += len(emitted_B)
        self.tokens += sum(emitted_B)


@dataclass
class Rollout:
    """Completions in the order of the prompts. logprobs are log_softmax(logits / T) in fp32 of
    the emitted token (T = 0: of the logits), from the very row of logits that decided it."""

    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]  # stop | length
    accepted: list[list[int]]
    stats: SpecStats
    policy_version: int


class Bandit:
    """BEG-MAB (TLT, section on adaptive rollout): buckets by active rows, epsilon-greedy over
    tokens per second in a sliding window. `off` is an arm like any other.

    TLT takes the median of tokens per second. That is blind where it matters most: alone, a draft
    that is accepted 45 % of the time has the median of one that never is. Here an arm's value is

        active * accept length / median seconds of a step in this bucket

    Seconds belong to the bucket; acceptance hardly depends on company, so what other buckets saw
    of it counts as `PRIOR_ROWS` row-steps. An arm is tried for `tries` row-steps in a bucket before
    it is judged there, unless it cannot win: more rows or deeper drafts never take less time. That
    bound is the break-even prior which keeps exploration cheap. When a drafter changes, `renew`
    makes its arms prove themselves again, so that yesterday's acceptance does not bind.
    """

    PRIOR_ROWS = 16.0
    SLACK = 1.1

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        epsilon: float = 0.05,
        window: int = 40,
        tries: int = 4,
        seed: int = 0,
    ) -> None:
        if not arms:
            raise ValueError("the bandit needs at least one arm, e.g. off")
        self.arms = list(dict.fromkeys(arms))
        self.epsilon, self.window, self.tries = epsilon, window, tries
        self._random = random.Random(seed)
        # Per step, in windows: (tokens, rows) and seconds by bucket and arm, (tokens, rows) by arm.
        self._here: dict[tuple[int, str], deque[tuple[int, int]]] = {}
        self._seconds: dict[tuple[int, str], deque[float]] = {}
        self._anywhere: dict[str, deque[tuple[int, int]]] = {}

    @staticmethod
    def bucket(active: int) -> int:
        """0 for 1 row, then 2-3, 4-7, 8-15, .. active rows."""
        return active.bit_length() - 1

    def seen(self, active: int, arm: Arm) -> int:
        """Row-steps remembered of this arm in this bucket."""
        return sum(rows for _, rows in self._here.get((self.bucket(active), arm.name), ()))

    def accept_length(self, active: int, arm: Arm) -> float:
        """Tokens per row-step to expect of this arm; at least the target's own."""
        anywhere = self._anywhere.get(arm.name)
        if not anywhere:
            return 1.0
        pooled = sum(t for t, _ in anywhere) / sum(r for _, r in anywhere)
        here = self._here.get((self.bucket(active), arm.name), ())
        tokens = self.PRIOR_ROWS * pooled + sum(t for t, _ in here)
        return tokens / (self.PRIOR_ROWS + sum(r for _, r in here))

    def value(self, active: int, arm: Arm) -> float:
        """Tokens per second to expect; 0 if the arm was never tried in this bucket."""
        seconds = self._seconds.get((self.bucket(active), arm.name))
        return active * self.accept_length(active, arm) / median(seconds) if seconds else 0.0

    def choose(self, active: int) -> Arm:
        hopeful = [a for a in self.arms if not self._cannot_win(active, a)] or self.arms
        fresh = [arm for arm in hopeful if self.seen(active, arm) < self.tries]
        if fresh:
            return min(fresh, key=lambda arm: self.seen(active, arm))
        if self._random.random() < self.epsilon:
            return self._random.choice(hopeful)
        return max(hopeful, key=lambda arm: self.value(active, arm))

    def _cannot_win(self, active: int, arm: Arm) -> bool:
        """Even its highest possible value, with some slack, is below another arm's seen here."""
        anywhere = self._anywhere.get(arm.name, ())
        if sum(rows for _, rows in anywhere) < self.tries or arm.source == OFF:
            return False
        best = max((self.value(active, a) for a in self.arms if a != arm), default=0.0)
        highest = active * self.accept_length(active, arm) * self.SLACK
        return highest < best * self._least_seconds(self.bucket(active), arm)

    def _least_seconds(self, bucket: int, arm: Arm) -> float:
        """A step cannot take less than a smaller one took: fewer rows, or a shallower draft."""
        smaller = [a.name for a in self.arms if a.depth * a.width <= arm.depth * arm.width]
        known = [
            median(seconds)
            for (b, name), seconds in self._seconds.items()
            if b <= bucket and name in smaller and len(seconds) >= self.tries  # not one slow start
        ]
        return max(known, default=0.0)

    def record(self, active: int, arm: Arm, tokens: int, seconds: float) -> None:
        key = (self.bucket(active), arm.name)
        self._remember(self._here, key, (tokens, active))
        self._remember(self._seconds, key, max(seconds, 1e-9))
        self._remember(self._anywhere, arm.name, (tokens, active))

    def _remember(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        table.setdefault(key, deque(maxlen=self.window)).append(value)

    def renew(self, source: str) -> None:
        """The drafter behind `source` changed: what its arms achieved is forgotten, what their
        steps cost is not."""
        names = {arm.name for arm in self.arms if arm.source == source}
        self._here = {key: steps for key, steps in self._here.items() if key[1] not in names}
        self._anywhere = {n: steps for n, steps in self._anywhere.items() if n not in names}

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = self._random.getstate()
        tables = {
            "here": [[*key, list(v)] for key, v in self._here.items()],
            "seconds": [[*key, list(v)] for key, v in self._seconds.items()],
            "anywhere": [[name, list(v)] for name, v in self._anywhere.items()],
        }
        return {"random": [version, list(internal), gauss], **tables}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, internal, gauss = state["random"]
        self._random.setstate((version, tuple(internal), gauss))
        fresh: Callable[..., Any] = functools.partial(deque, maxlen=self.window)
        self._here = {(b, name): fresh(map(tuple, v)) for b, name, v in state["here"]}
        self._seconds = {(b, name): fresh(v) for b, name, v in state["seconds"]}
        self._anywhere = {name: fresh(map(tuple, v)) for name, v in state["anywhere"]}


class RolloutEngine:
    """Batched speculative decoding of one target with any number of drafters.

    on_step, if given, is called after every verify step with the engine; it is where a straggler
    picks up fresher drafters and progress is logged. on_finish is called with every finished row.
    `policy_version` is stamped by the owner.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter] = (),
        bandit: Bandit | None = None,
        *,
        max_rows: int = 0,
        cache_gb: float = 0.0,
        prefill_chunk: int = 512,
        on_step: Callable[[RolloutEngine], None] | None = None,
        on_finish: Callable[[Row], None] | None = None,
    ) -> None:
        self.target = target
        self.drafters = {d.name: d for d in drafters}
        self.bandit = bandit or Bandit([Arm()])
        missing = {a.source for a in self.bandit.arms} - {OFF} - self.drafters.keys()
        if missing:
            raise ValueError(f"arms need drafters that are not there: {', '.join(sorted(missing))}")
        self.max_rows, self.cache_gb = max_rows, cache_gb
        self.prefill_chunk = prefill_chunk
        self.on_step, self.on_finish = on_step, on_finish
        self.policy_version = 0
        self.active: list[Row] = []  # row in slot i
        self.waiting: deque[Row] = deque()
        self.stats = SpecStats()
        self.arm = Arm()
        self.started = 0.0
        self.num_rows = 0

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, keys: Sequence[int]
    ) -> Rollout:
        """Completes every prompt; results come in the order of the prompts.

        keys: one signed 64-bit integer per prompt (`kernels.row_key`), the row's whole randomness.
        Raises ValueError, naming the row, for a prompt that is empty, leaves no room in the
        context or can never fit the cache budget.
        """
        rows = self._rows(prompts, params, keys)
        self.params, self.stats, self.started = params, SpecStats(), time.perf_counter()
        self.waiting, self.active, self.num_rows = deque(rows), [], len(rows)
        if rows:
            self._reserve(rows)
        while self.waiting or self.active:
            self._admit()
            self.step()
            if self.on_step:
                self.on_step(self)
        self.stats.seconds = time.perf_counter() - self.started
        return Rollout(
            [r.tokens for r in rows],
            [r.logprobs for r in rows],
            [r.finish_reason for r in rows],
            [r.accepted for r in rows],
            self.stats,
            self.policy_version,
        )

    def step(self) -> None:
        """One verify step for all active rows."""
        start = time.perf_counter()
        self.arm = self.bandit.choose(len(self.active))
        draft = self._draft(self.arm)
        drafted = time.perf_counter()
        logits_BTV, taps = self.target.forward(
            draft.tokens_BT,
            self._positions_B - 1,
            draft.parents_BT if self.arm.width > 1 else None,
        )
        assert logits_BTV is not None
        forwarded = time.perf_counter()
        verified = self._verify(logits_BTV, draft)
        num_rows, num_tokens = len(self.active), self._commit(draft, verified, taps)
        end = time.perf_counter()
        self.bandit.record(num_rows, self.arm, num_tokens, end - start)
        self._clock(num_rows, num_tokens, start, drafted, forwarded, end)

    def _clock(
        self, num_rows: int, tokens: int, start: float, drafted: float, done: float, end: float
    ) -> None:
        stats = self.stats
        stats.draft_seconds += drafted - start
        stats.forward_seconds += done - drafted
        stats.verify_seconds += end - done
        least = str(1 << self.bandit.bucket(num_rows))
        for table in (stats.arms, stats.arms_by_rows.setdefault(least, {})):
            arm = table.setdefault(self.arm.name, {"steps": 0, "tokens": 0, "seconds": 0.0})
            arm["steps"] += 1
            arm["tokens"] += tokens
            arm["seconds"] += end - start
        if not stats.active_trace or stats.active_trace[-1][1] != num_rows:
            stats.active_trace.append((start - self.started, num_rows))

    def _draft(self, arm: Arm) -> Draft:
        """Asks the arm's drafter, no deeper than any row may still go, and drops empty columns."""
        room = max(row.limit - len(row.tokens) for row in self.active) - 1
        depth = min(arm.depth, room)
        root_B1 = self._roots_B[:, None]
        if depth < 1:
            return Draft(root_B1, torch.full_like(root_B1, -1))
        draft = self.drafters[arm.source].propose(
            list(range(len(self.active))),
            self._roots_B,
            self._keys_B,
            self._positions_B,
            self._temperatures_B,
            depth,
            arm.width,
        )
        used = int((draft.tokens_BT >= 0).any(0).nonzero().max()) + 1
        return Draft(draft.tokens_BT[:, :used], draft.parents_BT[:, :used])

    def _verify(self, logits_BTV: Tensor, draft: Draft) -> Verified:
        params = self.params
        processed = thresholds = None
        if params.rewrites:
            processed = process_logits(logits_BTV, draft, self.active, params)
        if params.truncates:
            num_rows, num_nodes, vocab = logits_BTV.shape
            thresholds = sampling_thresholds(
                (logits_BTV if processed is None else processed).reshape(-1, vocab),
                self._temperatures_B.repeat_interleave(num_nodes),
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
            ).view(num_rows, num_nodes)
        return coupled_verify(
            logits_BTV,
            self._keys_B,
            self._positions_B,
            self._temperatures_B,
            draft.tokens_BT,
            draft.parents_BT,
            thresholds_BT=thresholds,
            sample_logits_BTV=processed,
            limits_B=self._limits_B,
            stop_ids=self.params.stop_ids,
        )

    def _commit(self, draft: Draft, verified: Verified, taps: Taps) -> int:
        """Appends what was emitted, tells cache and drafters, retires finished rows.

        Returns the number of tokens emitted.
        """
        emitted_B = verified.num_emit_B.tolist()
        self._count_nan(verified)
        most = max(emitted_B)
        nodes_BD = verified.nodes_BD[:, :most]
        if self.arm.width > 1:
            self.target.compact(self._positions_B - 1, nodes_BD)
        kept = (
            _gather(taps, nodes_BD) if any(d.needs_taps for d in self.drafters.values()) else taps
        )
        slots = list(range(len(self.active)))
        for drafter in self.drafters.values():
            drafter.observe(slots, verified.tokens_BD[:, :most], verified.num_emit_B, kept)
        tokens_BD = verified.tokens_BD[:, :most].tolist()
        logprobs_BD = verified.logprobs_BD[:, :most].tolist()
        for row, num, tokens, logprobs in zip(
            self.active, emitted_B, tokens_BD, logprobs_BD, strict=True
        ):
            row.tokens += tokens[:num]
            row.logprobs += logprobs[:num]
            row.accepted += [1] * (num - 1) + [0]
        self.stats.count(_depth_per_row(draft), emitted_B)
        num_B = verified.num_emit_B
        last_B = verified.tokens_BD.gather(1, num_B[:, None] - 1)[:, 0]
        self._roots_B.copy_(last_B)
        self._positions_B.add_(num_B)
        self._limits_B.sub_(num_B)
        self._retire()
        return sum(emitted_B)

    def _count_nan(self, verified: Verified) -> None:
        """NaN reads as -inf: a few do no harm, but logprob -inf means a row without any number."""
        num_nan = int(verified.num_nan_B.sum())
        self.stats.nan_logits += num_nan
        lost_B = (verified.logprobs_BD == -torch.inf).any(1) if num_nan else None
        if lost_B is not None and lost_B.any():
            row = self.active[int(lost_B.nonzero()[0])]
            raise RuntimeError(
                f"the policy's logits are all NaN (row {row.index}, token {len(row.tokens)}): "
                "its weights have diverged; resume from an earlier checkpoint with a lower "
                "learning_rate or max_grad_norm"
            )

    def _retire(self) -> None:
        """Finished rows leave; the last active row takes the freed slot."""
        stop = set(self.params.stop_ids)
        for slot in reversed(range(len(self.active))):
            row = self.active[slot]
            if row.tokens[-1] in stop:
                row.finish_reason = "stop"
            elif len(row.tokens) >= row.limit:
                row.finish_reason = "length"
            else:
                continue
            for drafter in self.drafters.values():
                drafter.finish(slot, row.prompt, row.tokens)
            if self.on_finish:
                self.on_finish(row)
            last = len(self.active) - 1
            if slot != last:
                self._move(last, slot)
            self.active.pop()
        self._view(len(self.active))

    def _move(self, src: int, dst: int) -> None:
        row = self.active[src]
        self.target.copy_slot(src, dst, len(row.prompt) + len(row.tokens) - 1)
        for drafter in self.drafters.values():
            drafter.move(src, dst)
        self.active[dst] = row
        for state in self._state.values():
            state[dst] = state[src]

    def _admit(self) -> None:
        """Fills free slots from the queue; the first row of a group is prefilled, siblings copy."""
        start = time.perf_counter()
        while self.waiting and len(self.active) < self._num_slots:
            row = self.waiting.popleft()
            slot = len(self.active)
            source = next((i for i, r in enumerate(self.active) if r.group == row.group), None)
            for drafter in self.drafters.values():
                drafter.begin(slot, row.prompt, row.group)
            known = len(row.prompt) - 1
            if source is None:
                self._prefill(slot, row.prompt[:-1])
            else:
                self.target.copy_slot(source, slot, known)
                for drafter in self.drafters.values():
                    drafter.share(source, slot, known)
            self.active.append(row)
            values = (row.prompt[-1], row.key, len(row.prompt), row.temperature, row.limit)
            for state, value in zip(self._state.values(), values, strict=True):
                state[slot] = value
        self._view(len(self.active))
        self.stats.prefill_seconds += time.perf_counter() - start

    def _prefill(self, slot: int, tokens: list[int]) -> None:
        for start in range(0, len(tokens), self.prefill_chunk):
            chunk = torch.tensor([tokens[start : start + self.prefill_chunk]])
            _, taps = self.target.forward(
                chunk.to(self.target.device),
                torch.tensor([start], device=self.target.device),
                first_slot=slot,
                logits=False,
            )
            for drafter in self.drafters.values():
                drafter.prefill(slot, start, taps)

    def _rows(
        self, prompts: Sequence[list[int]], params: SamplingParams, keys: Sequence[int]
    ) -> list[Row]:
        context, vocab = self.target.shape.context, self.target.shape.vocab
        if len(keys) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many keys, got {len(keys)}")
        groups: dict[tuple[int, ...], int] = {}
        rows = []
        for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            if not prompt:
                raise ValueError(f"prompt {i} is empty; it needs at least one token")
            if len(prompt) >= context:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens and leaves no room in the context of "
                    f"{context}; the longest possible prompt has {context - 1}"
                )
            if not 0 <= min(prompt) <= max(prompt) < vocab:
                raise ValueError(f"prompt {i} holds a token id outside 0..{vocab - 1}")
            limit = min(params.max_new_tokens, context - len(prompt))
            group = groups.setdefault(tuple(prompt), len(groups))
            rows.append(Row(i, list(prompt), key, limit, group, params.temperature))
        return rows

    def _reserve(self, rows: list[Row]) -> None:
        """Decides how many rows run at once and makes room for them."""
        trees = any(arm.width > 1 for arm in self.bandit.arms)
        deepest = MAX_NODES if trees else 1 + max(arm.depth for arm in self.bandit.arms)
        length = max(len(r.prompt) + r.limit for r in rows) + deepest
        per_row = length * self.target.cache_bytes_per_token
        budget = self.cache_gb * 2**30 if self.cache_gb else self._fair_budget()
        fitting = int(budget // per_row)
        if not fitting:
            longest = max(rows, key=lambda r: len(r.prompt) + r.limit)
            raise ValueError(
                f"prompt {longest.index} needs {per_row / 2**30:.2f} GiB of cache and the budget "
                f"is {budget / 2**30:.2f}; raise rollout.cache_gb or lower max_new_tokens"
            )
        self._num_slots = min(len(rows), fitting, self.max_rows or len(rows))
        self.target.reserve(self._num_slots, length)
        device = self.target.device
        kinds = {"root": torch.int64, "key": torch.int64, "position": torch.int64}
        kinds |= {"temperature": torch.float32, "limit": torch.int64}
        self._state = {
            name: torch.zeros(self._num_slots, dtype=kind, device=device)
            for name, kind in kinds.items()
        }
        self._view(0)

    def _fair_budget(self) -> float:
        """60 % of what is free; the cache of the last rollout is ours to use again."""
        return 0.6 * (free_bytes(self.target.device) + self.target.cache.num_bytes)

    def _view(self, num_rows: int) -> None:
        state = self._state
        self._roots_B = state["root"][:num_rows]
        self._keys_B = state["key"][:num_rows]
        self._positions_B = state["position"][:num_rows]
        self._temperatures_B = state["temperature"][:num_rows]
        self._limits_B = state["limit"][:num_rows]


def _gather(taps: Taps, nodes_BD: Tensor) -> Taps:
    """The taps of the nodes that decided each emitted token."""
    at = nodes_BD.clamp(min=0)[:, :, None]
    features, hidden = taps.features_BNF, taps.hidden_BNH
    return Taps(
        features.gather(1, at.expand(-1, -1, features.shape[-1])),
        hidden.gather(1, at.expand(-1, -1, hidden.shape[-1])),
    )


def _depth_per_row(draft: Draft) -> list[int]:
    if draft.tokens_BT.shape[1] == 1:
        return [0] * draft.tokens_BT.shape[0]
    return depths(draft.parents_BT).amax(1).tolist()


def process_logits(
    logits_BTV: Tensor, draft: Draft, rows: Sequence[Row], params: SamplingParams
) -> Tensor:
    """What the sample is drawn from: repetition penalty, minimum length, suppressed ids.

    In transformers' order. A node's history is its row's tokens and the drafts on its path, so a
    drafted block sees exactly what plain decoding would have seen.
    """
    scores = logits_BTV.clone()
    if params.repetition_penalty != 1:
        seen = torch.zeros_like(scores, dtype=torch.bool)
        for b, row in enumerate(rows):
            seen[b, :, list({*row.prompt, *row.tokens})] = True
        num_nodes = draft.tokens_BT.shape[1]
        at_T = torch.arange(num_nodes, device=scores.device)
        on_path = ((ancestor_bits(draft.parents_BT)[:, :, None] >> at_T) & 1).bool()
        at, n, m = torch.nonzero(on_path & (draft.tokens_BT >= 0)[:, None], as_tuple=True)
        seen[at, n, draft.tokens_BT[at, m]] = True
        penalty = params.repetition_penalty
        scores = torch.where(
            seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores
        )
    if params.min_new_tokens and params.stop_ids:
        emitted = torch.tensor([len(row.tokens) for row in rows], device=scores.device)
        early = emitted[:, None] + depths(draft.parents_BT) < params.min_new_tokens
        stop = torch.tensor(params.stop_ids, device=scores.device)
        scores[:, :, stop] = scores[:, :, stop].masked_fill(early[:, :, None], -torch.inf)
    if params.suppress_ids:
        scores[:, :, list(params.suppress_ids)] = -torch.inf
    return scores


def free_bytes(device: torch.device) -> int:
    """Memory that may still be taken on this device."""
    if device.type == "cuda":
        pool = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pool
    return psutil.virtual_memory().available
