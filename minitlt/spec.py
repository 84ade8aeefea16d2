"""The rollout engine: batched decoding with speculative drafts that never change a token.

One step, for all active rows at once (`RolloutEngine.step`):

    choose an arm -> draft a tree per row -> one target forward -> verify -> commit

Verification is coupled (`kernels.coupled_verify`): the target samples its own token at every
position, with noise that is a pure function of (row key, position, token id), and a draft is
accepted exactly when it is that token. So the text is a function of the keys and the target alone.
Speculation on or off, any drafter, any depth, any batch order, any hot swap: same tokens. Plain
decoding is the arm `off`, through the same code.

`verify="rejection"` is the customary rule instead, lossless in law only: a chain that was drawn
from q is accepted by the ratio test p / q and repaired from the residual (`kernels.
rejection_verify`), with noise streams of its own for drafts, coins and residual. Where the drafts
were chosen and not drawn (copied text, trees), q is a point mass, and the ratio test comes down to
one sample of p that is compared with the drafts: of these children no rule accepts more. Not the
block rule: its coins depend on drafts behind the one that fails, whose noise the next step draws
with again.

`generate(replay=...)` decodes recorded completions once more: the recorded token plays the part of
the target's sample, so two configurations are timed on identical rollouts, whatever their dtype.

Rows live in slots 0..B-1. When one finishes, the last active row takes its place (one copy of its
cache), so every step works on plain views; a free slot is refilled from the queue. A row's last
token, its root, is fed with the next step, and so is that of a prompt which takes a freed slot. The
first rows of a rollout have no step to join: their first tokens come from the prompts' own forward
(`_first`). Siblings of a GRPO group share one prefill, and what all prompts of a rollout begin with
(a system prompt, an example) is computed once. What a step emitted comes to the host in one
transfer.

Left out: beam search; trees drawn at random under the ratio test (their shape may not depend on
what was drawn). How to try it: `pytest tests/test_spec.py`, `minitlt generate`.

Shape suffixes: B active rows, T tree nodes (root included), D emitted tokens, V vocab,
F tapped width, H hidden.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from minitlt.bandit import OFF, SOURCES, Arm, Bandit
from minitlt.draft import Draft, Drafter, RowState, Taps, depths
from minitlt.kernels import (
    Verified,
    coupled_verify,
    rejection_verify,
    sampling_thresholds,
    stream_keys,
)
from minitlt.sampling import SamplingParams, process_logits, rescore
from minitlt.slots import Target, free_bytes

__all__ = ["OFF", "SOURCES", "Arm", "Bandit", "Rollout", "RolloutEngine", "Row", "SamplingParams",
           "SpecStats"]  # fmt: skip

_SURE = 1e30  # a logit that no noise can beat
_SHORT = 16  # a common beginning of fewer tokens is not worth a forward of its own


@dataclass
class Row:
    """One completion in the making."""

    index: int
    prompt: list[int]
    key: int
    temperature: float
    limit: int  # tokens it may emit
    replay: list[int]  # what it must emit; empty: whatever the target samples
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # Per token: 1 = drafted and accepted, 2 = corrected (what was drafted there differed), 0 = the
    # target's own, where nothing was drafted.
    accepted: list[int] = field(default_factory=list)
    stopped: bool = False  # by a stop string
    finish_reason: str = ""

    @property
    def end(self) -> int:
        return min(self.limit, len(self.replay) or self.limit)


@dataclass
class SpecStats:
    """What a rollout cost. Accept length is tokens that steps emitted over row-steps, a ratio of
    sums; `first_tokens` came with their prompts, without a step."""

    seconds: float = 0.0
    verify_steps: int = 0
    row_steps: int = 0
    tokens: int = 0
    first_tokens: int = 0
    nan_logits: int = 0
    drafted: list[int] = field(default_factory=list)  # row-steps with a draft this deep
    accepted: list[int] = field(default_factory=list)  # row-steps that accepted this deep
    sources: dict[str, list[int]] = field(default_factory=dict)  # [drafted, accepted] at depth 1
    arms: dict[str, dict[str, float]] = field(default_factory=dict)
    arms_by_rows: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)  # by bucket
    active_trace: list[tuple[float, int]] = field(default_factory=list)  # (seconds, rows)

    @property
    def accept_length(self) -> float:
        return self.step_tokens / self.row_steps if self.row_steps else 0.0

    @property
    def step_tokens(self) -> int:
        return self.tokens - self.first_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accept_by_position(self) -> list[float]:
        pairs = zip(self.accepted, self.drafted, strict=True)
        return [got / asked if asked else 0.0 for got, asked in pairs]

    def trace(self, seconds: float, num_rows: int) -> None:
        if not self.active_trace or self.active_trace[-1][1] != num_rows:
            self.active_trace.append((seconds, num_rows))

    def count(self, source: str, drafted_B: list[int], emitted_B: list[int]) -> None:
        """Adds one verify step: how deep each row's draft was and how many tokens it emitted."""
        drafted, accepted = self.sources.get(source, (0, 0))
        drafted += sum(depth > 0 for depth in drafted_B)
        self.sources[source] = [drafted, accepted + sum(num > 1 for num in emitted_B)]
        deeper = [0] * (max(drafted_B) - len(self.drafted))
        self.drafted += deeper
        self.accepted += deeper
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
    keys: list[int]
    stats: SpecStats
    policy_version: int


class RolloutEngine:
    """Batched speculative decoding of one target with any number of drafters.

    verify: coupled | rejection. decode: token ids -> text, needed for stop strings only.
    on_step, if given, is called after every verify step with the engine; it is where a straggler
    picks up fresher drafters and progress is logged. on_prefill is called after every chunk of a
    prompt (many long ones take minutes without a step), on_finish with every finished row.
    `policy_version` is stamped by the owner. Drafters are fed if any arm but `off` is there.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter] = (),
        bandit: Bandit | None = None,
        *,
        verify: str = "coupled",
        max_rows: int = 0,
        cache_gb: float = 0.0,
        prefill_chunk: int = 512,
        decode: Callable[[list[int]], str] | None = None,
        on_step: Callable[[RolloutEngine], None] | None = None,
        on_finish: Callable[[Row], None] | None = None,
    ) -> None:
        if verify not in ("coupled", "rejection"):
            raise ValueError(f"verify: {verify!r} is not one of coupled, rejection")
        self.target, self.verify, self.decode = target, verify, decode
        self.sources = {d.name: d for d in drafters}
        self.bandit = bandit or Bandit([Arm()])
        used = {a.source for a in self.bandit.arms} - {OFF}
        if missing := used - self.sources.keys():
            raise ValueError(f"arms need drafters that are not there: {', '.join(sorted(missing))}")
        self.drafters = list(drafters) if used else []
        self.max_rows, self.cache_gb = max_rows, cache_gb
        self.prefill_chunk = prefill_chunk
        self.on_step, self.on_finish = on_step, on_finish
        self.on_prefill: Callable[[], None] | None = None
        self.policy_version = 0
        self.active: list[Row] = []  # row in slot i
        self.waiting: deque[Row] = deque()
        self.stats = SpecStats()
        self.arm = Arm()
        self.started = 0.0
        self.num_rows = 0
        self._drafter_bytes = 0  # reserved by the drafters for the last rollout

    def generate(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[int],
        *,
        temperatures: Sequence[float] | None = None,
        replay: Sequence[list[int]] | None = None,
    ) -> Rollout:
        """Completes every prompt; results come in the order of the prompts.

        keys: one signed 64-bit integer per prompt (`kernels.row_key`), the row's whole randomness.
        temperatures: one per prompt, in the place of params.temperature.
        replay: completions to decode again, one per prompt. At every position the recorded token
            plays the part of the target's sample (logprobs are its own), after all the work that a
            sample takes; a draft is accepted iff it is the recorded token. A row ends with its
            record, or where `params` ends it. Drafters see noise and texts as they always do.
        Raises ValueError, naming the row, for a prompt that is empty, leaves no room in the
        context or can never fit the cache budget, and for a record that is empty.
        """
        if params.stop_strings and self.decode is None:
            raise ValueError("stop_strings need RolloutEngine(decode=...), e.g. tokenizer.decode")
        if replay is not None and self.verify != "coupled":
            raise ValueError("replay needs verify='coupled': the ratio test has no sample to play")
        rows = self._rows_of(prompts, params, keys, temperatures, replay)
        self.params, self.stats, self.started = params, SpecStats(), time.perf_counter()
        self.waiting, self.active, self.num_rows = deque(rows), [], len(rows)
        self.bandit.begin()
        if rows:
            self._reserve(rows)
        while self.waiting or self.active:
            self._admit()
            if self.active:  # otherwise all ended with their first tokens
                self.step()
                if self.on_step:
                    self.on_step(self)
        self.stats.seconds = time.perf_counter() - self.started
        return Rollout(
            [row.tokens for row in rows],
            [row.logprobs for row in rows],
            [row.finish_reason for row in rows],
            [row.accepted for row in rows],
            [row.key for row in rows],
            self.stats,
            self.policy_version,
        )

    def step(self) -> None:
        """One verify step for all active rows."""
        start, num_rows = time.perf_counter(), len(self.active)
        num_graphs = self.target.num_graphs
        self.arm = self.bandit.choose(num_rows)
        draft = self._draft(self.arm)
        logits_BTV, taps = self.target.forward(
            draft.tokens_BT,
            self.rows.positions_B - 1,
            draft.parents_BT if self.arm.width > 1 else None,
        )
        assert logits_BTV is not None
        num_tokens = self._commit(draft, self._verify(logits_BTV, draft), taps)
        seconds = time.perf_counter() - start
        if self.target.num_graphs == num_graphs:  # recording a graph is no part of a step's cost
            self.bandit.record(num_rows, self.arm, num_tokens, seconds)
        by_rows = self.stats.arms_by_rows.setdefault(str(1 << self.bandit.bucket(num_rows)), {})
        cost = {"steps": 1, "row_steps": num_rows, "tokens": num_tokens, "seconds": seconds}
        for table in (self.stats.arms, by_rows):
            arm = table.setdefault(self.arm.name, {})
            for name, amount in cost.items():
                arm[name] = arm.get(name, 0) + amount
        self.stats.trace(start - self.started, num_rows)

    def _draft(self, arm: Arm) -> Draft:
        """Asks the arm's drafter, no deeper than any row may still go."""
        depth = min(arm.depth, max(row.limit - len(row.tokens) for row in self.active) - 1)
        if depth < 1:
            self.arm, root_B1 = Arm(), self.rows.roots_B[:, None]
            return Draft(root_B1, torch.full_like(root_B1, -1))
        rows = self.rows
        if arm.sure:
            rows = replace(rows, least=math.log(arm.sure / 100))
        if self.verify == "rejection":
            rows = replace(rows, keys_B=stream_keys(rows.keys_B, "draft"), coupled=False)
        return self.sources[arm.source].propose(rows, depth, arm.width, arm.nodes)

    def _law(self, logits_BTV: Tensor, draft: Draft) -> tuple[Tensor | None, Tensor | None]:
        """(logits to sample from, smallest logit that may win [B, T]); None: as they are, any."""
        params, processed, thresholds = self.params, None, None
        if params.rewrites:
            seen = [{*row.prompt, *row.tokens} for row in self.active]
            emitted = [len(row.tokens) for row in self.active]
            processed = process_logits(logits_BTV, draft, params, seen, emitted)
        if params.truncates:
            scores_BTV = logits_BTV if processed is None else processed
            heat_BT = self.rows.temperatures_B[:, None].expand(scores_BTV.shape[:2])
            filters = params.top_k, params.top_p, params.min_p
            if scores_BTV.is_cuda:  # pads are computed there, and to count them is to wait for it
                found_N = sampling_thresholds(scores_BTV.flatten(0, 1), heat_BT.flatten(), *filters)
                return processed, found_N.view(heat_BT.shape)
            fed_BT = draft.tokens_BT >= 0  # pads' logits are rubbish, and slow to look through
            fed_BT[:, 0] = True
            thresholds = heat_BT.new_full(heat_BT.shape, -torch.inf)
            thresholds[fed_BT] = sampling_thresholds(scores_BTV[fed_BT], heat_BT[fed_BT], *filters)
        return processed, thresholds

    def _verify(self, logits_BTV: Tensor, draft: Draft) -> Verified:
        processed, thresholds = self._law(logits_BTV, draft)
        scores_BTV = logits_BTV if processed is None else processed
        rows, tokens_BT = self.rows, draft.tokens_BT
        keys_B, places = rows.keys_B, (rows.positions_B, rows.temperatures_B)
        ends: dict[str, Any] = {"limits_B": self._limits_B, "stop_ids": self.params.stop_ids}
        if draft.logits_BKV is not None:
            if thresholds is not None:
                scores_BTV = scores_BTV.masked_fill(scores_BTV < thresholds[..., None], -torch.inf)
            drafts = draft.logits_BKV, tokens_BT[:, 1:]
            verified = rejection_verify(scores_BTV, *drafts, keys_B, *places, **ends)
            if scores_BTV is not logits_BTV:
                rescore(verified, logits_BTV, rows.temperatures_B)
            return verified
        if self.verify == "rejection":
            keys_B = stream_keys(keys_B, "residual")
        recorded_BT1 = self._recorded(draft) if self.active[0].replay else None
        if recorded_BT1 is not None:
            own_BT1 = scores_BTV.gather(2, recorded_BT1)
            scores_BTV.scatter_(2, recorded_BT1, _SURE)
        ends |= {"thresholds_BT": thresholds, "sample_logits_BTV": processed}
        verified = coupled_verify(logits_BTV, keys_B, *places, tokens_BT, draft.parents_BT, **ends)
        if recorded_BT1 is not None and processed is None:
            scores_BTV.scatter_(2, recorded_BT1, own_BT1)
            rescore(verified, logits_BTV, rows.temperatures_B)
        return verified

    def _recorded(self, draft: Draft) -> Tensor:
        """The recorded token that each node decides, [B, T, 1]; behind the record's end, 0."""
        num_nodes, depth_BT = draft.tokens_BT.shape[1], depths(draft.parents_BT)
        rest = [row.replay[len(row.tokens) :][:num_nodes] for row in self.active]
        padded = torch.tensor([tokens + [0] * (num_nodes - len(tokens)) for tokens in rest])
        return padded.to(depth_BT.device).gather(1, depth_BT)[..., None]

    def _commit(self, draft: Draft, verified: Verified, taps: Taps, *, step: bool = True) -> int:
        """Appends what was emitted, tells cache and drafters, retires finished rows.

        Returns the number of tokens emitted. step: False for first tokens, which take none.
        """
        emitted, drafted = self._fetch(draft, verified)
        nums = [len(tokens) for tokens in emitted]
        if step:
            self.stats.count(self.arm.source, drafted, nums)
        else:
            self.stats.tokens += sum(nums)
            self.stats.first_tokens += sum(nums)
        nodes_BD = verified.nodes_BD[:, : max(nums)]
        if self.arm.width > 1:
            self.target.compact(self.rows.positions_B - 1, nodes_BD)
        if any(d.needs_taps for d in self.drafters):
            taps = taps.at(nodes_BD)
        for drafter in self.drafters:
            drafter.observe(emitted, taps)
        news = torch.tensor([nums, [tokens[-1] for tokens in emitted]]).to(self.target.device)
        self.rows.roots_B.copy_(news[1])
        self.rows.positions_B.add_(news[0])
        self._limits_B.sub_(news[0])
        self._retire()
        return sum(nums)

    def _fetch(self, draft: Draft, verified: Verified) -> tuple[list[list[int]], list[int]]:
        """What the rows emitted and how deep their drafts were, in one transfer (fp64: exact)."""
        ints = [verified.num_emit_B[:, None], verified.num_nan_B[:, None], draft.tokens_BT]
        ints += [draft.parents_BT, verified.nodes_BD, verified.tokens_BD]
        table = torch.cat([torch.cat(ints, 1).double(), verified.logprobs_BD.double()], 1).tolist()
        most, emitted, deepest = verified.tokens_BD.shape[1], [], []
        for row, values in zip(self.active, table, strict=True):
            num, num_nan = int(values[0]), int(values[1])
            cuts = range(2, len(values), most)
            drafts, parents, nodes, tokens, logprobs = (values[i : i + most] for i in cuts)
            there = [t for t, up in zip(drafts, parents, strict=True) if up == nodes[num - 1]]
            mark = (1 if tokens[num - 1] in there else 2) if there else 0  # of the last token
            depth_T = [0]
            for up in parents[1:]:
                depth_T.append(depth_T[int(up)] + 1 if up >= 0 else 0)
            deepest.append(max(depth_T))
            tokens = [int(token) for token in tokens[:num]]
            if num_nan and -torch.inf in logprobs:
                raise RuntimeError(
                    f"the policy's logits are all NaN (row {row.index}, token {len(row.tokens)}): "
                    "its weights have diverged; resume from an earlier checkpoint with a lower "
                    "learning_rate or max_grad_norm"
                )
            if self.params.stop_strings:
                assert self.decode is not None
                end, row.stopped = self.params.stops_by_text(row.tokens, tokens, self.decode)
                tokens = tokens[:end]
            row.tokens += tokens
            row.logprobs += logprobs[: len(tokens)]
            row.accepted += ([1] * (num - 1) + [mark])[: len(tokens)]
            self.stats.nan_logits += num_nan
            emitted.append(tokens)
        return emitted, deepest

    def _retire(self) -> None:
        """Finished rows leave; the last active row takes the freed slot."""
        stop = set(self.params.stop_ids)
        for slot in reversed(range(len(self.active))):
            row = self.active[slot]
            if row.stopped or row.tokens[-1] in stop:
                row.finish_reason = "stop"
            elif len(row.tokens) >= row.end:
                row.finish_reason = "length"
            else:
                continue
            for drafter in self.drafters:
                drafter.finish(slot, row.prompt, row.tokens)
            if self.on_finish:
                self.on_finish(row)
            last = self.active.pop()
            if last is not row:
                self._move(last, len(self.active), slot)
        self._view()

    def _move(self, row: Row, src: int, dst: int) -> None:
        self.target.copy_slot(src, dst, len(row.prompt) + len(row.tokens) - 1)
        for drafter in self.drafters:
            drafter.move(src, dst)
        self.active[dst], self._held[dst] = row, row.prompt
        for state in self._state:
            state[..., dst] = state[..., src]

    def _admit(self) -> None:
        """Fills free slots from the queue. Siblings copy; of the others, what is there already
        (all prompts begin alike, and a free slot holds its last row's) is not computed again."""
        first, num = len(self.active), min(len(self.waiting), self._num_slots - len(self.active))
        if not self.target.keeps_free_slots:
            self._held[first:] = [[]] * (self._num_slots - first)
        alone = not any(self._held) and self.target.splits_head
        ends: dict[int, Taps] = {}  # by slot: the taps of a prompt's last position, if `alone`
        firsts: list[Row] = []
        siblings: list[Row] = []
        seen = {tuple(row.prompt) for row in self.active}
        for row in (self.waiting.popleft() for _ in range(num)):
            (siblings if tuple(row.prompt) in seen else firsts).append(row)
            seen.add(tuple(row.prompt))
        firsts.sort(key=lambda row: len(row.prompt))  # prompts fed together are of like length
        starts = [self._begin(slot, row) for slot, row in enumerate(firsts, first)]
        for start, rows in groupby(range(len(firsts)), key=starts.__getitem__):
            at = list(rows)
            parts = [firsts[i].prompt[start : None if alone else -1] for i in at]
            self._prefill(first + at[0], parts, start, ends if alone else None)
        self.active += firsts
        for row in siblings:
            source = next(i for i, r in enumerate(self.active) if r.prompt == row.prompt)
            slot = len(self.active)
            for drafter in self.drafters:
                drafter.begin(slot, row.prompt, 0)
            self._share(source, slot, len(row.prompt) - 1)
            if alone:
                ends[slot] = ends[source]
            self.active.append(row)
        for slot, row in enumerate(self.active[first:], first):
            self._held[slot] = row.prompt
            values = (row.prompt[-1], row.key, len(row.prompt), row.end)
            self._state[0][:, slot] = torch.tensor(values)
            self._state[1][slot] = row.temperature
        self._view()
        if alone:
            self._first([ends[slot] for slot in range(len(self.active))])

    def _first(self, ends: list[Taps]) -> None:
        """First tokens from the prompts' own forward: what their last positions saw is here."""
        self.arm, root_B1 = Arm(), self.rows.roots_B[:, None]
        self.stats.trace(time.perf_counter() - self.started, len(ends))
        hidden = torch.cat([taps.hidden_BNH for taps in ends])
        taps = Taps(torch.cat([taps.features_BNF for taps in ends]), hidden)
        draft = Draft(root_B1, torch.full_like(root_B1, -1))
        verified = self._verify(self.target.logits(hidden), draft)
        self._commit(draft, verified, taps, step=False)

    def _begin(self, slot: int, row: Row) -> int:
        """A row enters; returns how much of its prompt need not be fed any more."""
        same = self._held[slot] == row.prompt
        kept = len(row.prompt) - 1 if same else self._common if self._held[slot] else 0
        for drafter in self.drafters:
            drafter.begin(slot, row.prompt, kept)
        if kept < self._common:
            source = next((i for i, prompt in enumerate(self._held) if prompt), None)
            if source is None:
                self._prefill(slot, [row.prompt[: self._common]], 0)
            else:
                self._share(source, slot, self._common)
        self._held[slot] = row.prompt
        return max(kept, self._common)

    def _share(self, src: int, dst: int, length: int) -> None:
        self.target.copy_slot(src, dst, length + 1)  # the next one too: it may be a root's already
        for drafter in self.drafters:
            drafter.share(src, dst, length)

    def _prefill(
        self, slot: int, parts: list[list[int]], start: int, ends: dict[int, Taps] | None = None
    ) -> None:
        """Feeds a part of each prompt, from position `start` on, to this and the next slots.

        ends: the parts go to the prompts' ends, whose taps go in here: to the drafters they belong
            with the tokens that they decide.
        """
        width = min(max(map(len, parts)), self.prefill_chunk) or 1
        height, device = max(1, self.prefill_chunk // width), self.target.device
        for top in range(0, len(parts), height):
            block = parts[top : top + height]
            for left in range(0, max(map(len, block)), width):
                pieces = [part[left : left + width] for part in block]
                most = max(map(len, pieces))  # a pad lies behind its row
                _, taps = self.target.forward(
                    torch.tensor([p + [-1] * (most - len(p)) for p in pieces], device=device),
                    torch.tensor([start + left] * len(pieces), device=device),
                    first_slot=slot + top,
                    logits=False,
                )
                for i, n in enumerate(map(len, pieces)):
                    at = slot + top + i
                    if ends is not None and 0 < n == len(block[i]) - left:
                        n -= 1
                        ends[at] = taps.part(i, n, n + 1).clone()  # the chunk need not stay
                    for drafter in self.drafters:
                        drafter.prefill(at, start + left, taps.part(i, 0, n))
                if self.on_prefill:
                    self.on_prefill()

    def _rows_of(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        keys: Sequence[int],
        temperatures: Sequence[float] | None,
        replay: Sequence[list[int]] | None,
    ) -> list[Row]:
        context, vocab = self.target.shape.context, self.target.shape.vocab
        heat = [params.temperature] * len(prompts) if temperatures is None else temperatures
        for name, values in (("keys", keys), ("temperatures", heat), ("records", replay)):
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"{len(prompts)} prompts need as many {name}, got {len(values)}")
        rows = []
        for i, (prompt, key) in enumerate(zip(prompts, keys, strict=True)):
            if not prompt:
                raise ValueError(f"prompt {i} is empty; it needs at least one token")
            if len(prompt) >= context:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens and leaves no room in the context of "
                    f"{context}; the longest possible prompt has {context - 1}"
                )
            record = list(replay[i]) if replay is not None else []
            if replay is not None and not record:
                raise ValueError(f"record {i} is empty; it needs at least one token")
            ids = [*prompt, *record]
            if not 0 <= min(ids) <= max(ids) < vocab:
                raise ValueError(f"prompt {i} or its record has a token id outside 0..{vocab - 1}")
            limit = min(params.max_new_tokens, context - len(prompt))
            rows.append(Row(i, list(prompt), key, heat[i], limit, record))
        return rows

    def _reserve(self, rows: list[Row]) -> None:
        """Decides how many rows run at once and makes room for them."""
        # A drafter writes depth * width keys behind a row, whatever it keeps of them.
        deepest = 1 + max(max(a.nodes, a.depth * a.width) for a in self.bandit.arms)
        longest = max(rows, key=lambda r: len(r.prompt) + r.limit)
        length = len(longest.prompt) + longest.limit + deepest
        per_token = sum(d.bytes_per_token for d in self.drafters)
        per_row = length * (self.target.cache_bytes_per_token + per_token)
        budget = self.cache_gb * 2**30 if self.cache_gb else self._fair_budget()
        fitting = int(budget // per_row)
        if fitting < 1:
            raise ValueError(
                f"prompt {longest.index} needs {per_row / 2**30:.2f} GiB of cache and the budget "
                f"is {budget / 2**30:.2f}; raise rollout.cache_gb or lower max_new_tokens"
            )
        self._num_slots = min(len(rows), fitting, self.max_rows or len(rows))
        while self._num_slots > 1 and self.target.slots_for(self._num_slots) > fitting:
            self._num_slots -= 1
        self.target.reserve(self._num_slots, length)
        self._held: list[list[int]] = [[]] * self._num_slots  # whose prompt each slot begins with
        low, high = min(row.prompt for row in rows), max(row.prompt for row in rows)
        pairs = enumerate(zip(low[:-1], high, strict=False))
        common = next((i for i, (a, b) in pairs if a != b), len(low) - 1)
        self._common = common if common >= _SHORT else 0
        for drafter in self.drafters:
            drafter.reserve(self._num_slots, length)
        self._drafter_bytes = self._num_slots * length * per_token
        device = self.target.device
        ids_4B = torch.zeros(4, self._num_slots, dtype=torch.int64, device=device)
        self._state = ids_4B, torch.zeros(self._num_slots, device=device)
        self._stop_ids = torch.tensor(self.params.stop_ids, dtype=torch.int64, device=device)

    def _fair_budget(self) -> float:
        """60 % of what is free; the memory of the last rollout is ours to use again."""
        ours = self.target.cache.num_bytes + self._drafter_bytes
        soon = sum(d.fixed_bytes for d in self.drafters)
        return 0.6 * max(free_bytes(self.target.device) + ours - soon, 0)

    def _view(self) -> None:
        ids_4B, temperatures_B = (state[..., : len(self.active)] for state in self._state)
        roots_B, keys_B, positions_B, self._limits_B = ids_4B
        self.rows = RowState(roots_B, keys_B, positions_B, temperatures_B, self._stop_ids)
