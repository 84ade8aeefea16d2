"""Drafters: who proposes the next tokens of each row, and from what.

`Eagle3Proposer` runs the draft model (eagle3.py) over slots beside the target's. It keeps the taps
of every committed position and its own small key/value cache, and after each verify step it
computes the new pairs again from the TARGET's taps, over whatever it had written from its own
drafts. The cache is extended lazily, at the next proposal: while speculation is off nothing is
computed, and switching it on (or swapping the weights) costs the drafter one pass of `fc` and two
small products per pair and the target nothing.

The other sources are in ngram.py: `NgramDrafter` copies what followed an earlier match and learns
nothing; `MergedDrafter` puts both into one tree.

All proposals are coupled: they are sampled with the noise that the target will use (`gumbel_topk`),
so a drafter equal to the target is always right. The shape of a tree follows EAGLE-2 (arXiv
2406.16858): the most confident nodes are expanded and the most confident of all are kept. The
confidence differs: with the noise known, the children of a node compete by score (log q + noise),
and softmax(scores / s) is the chance that each wins once the target's logits replace the drafter's,
if the two differ by Gumbel noise of scale s. Against EAGLE-2's own rule (q alone) this gave accept
lengths of 1.99 instead of 1.71 with 16 nodes and 2.08 instead of 1.80 with 31 (SmolLM2-135M, T = 1,
a drafter after 90 s of training; s = 1.5 was best of 0.7..3).

On a CPU with a C compiler a coupled proposal is one call (csrc/tree.c); the definition is here.

For the ratio test (`RowState.coupled` false) the noise is a stream of its own: a chain is drawn
with it and hands over its logits, a tree is chosen without it, by EAGLE-2's own rule.

Left out: captured graphs for the drafter, a memory-shared prompt among siblings (its taps are
copied), drafting for rows whose taps were not seen from the start (they get no drafts).

How to run: `pytest tests/test_drafter.py`.

Shape suffixes: B rows, N new tokens of a row, W beam (width), k children, T nodes, S cached pairs
read, F = 3H taps, H hidden, V draft vocabulary, P pool of candidate nodes.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from minitlt.draft import Draft, Drafter, RowState, Taps, chain_of
from minitlt.eagle3 import DrafterConfig, Eagle3Drafter
from minitlt.kernels import gumbel_topk

_TAIL = 16  # up to this many new pairs are computed together with the first draft
_FILL = 512  # more are written first, this many at a time
_READ_STEP = 128  # the cache is read in multiples of this many pairs
_SOFTNESS = 1.5  # scale of the noise between the drafter's logits and the target's
_STEP_PENALTY = 1e-4  # a child is never as confident as its parent, not even after rounding
_FLOOR = -30.0  # log confidence of one step is not let below this
_NEVER = -1e3  # log confidence of what follows a stop token; a _STEP_PENALTY still counts in it


class Sink(Protocol):
    """Where finished rows go, normally the replay buffer."""

    def add(
        self, tokens: list[int], prompt_len: int, features_NF: Tensor, hidden_NH: Tensor
    ) -> None: ...


class Eagle3Proposer(Drafter):
    """The draft model behind slots.

    drafter: the module that is trained; tied to the target by the caller. Proposals come from a
        frozen copy of it, so training never disturbs them: `reload` takes the weights over.
    config: serve_dtype and tap_dtype are read.
    buffer: takes every finished row with its taps, for training.

    Memory per token and slot: 6H bytes of taps in bfloat16 (8H with a buffer, which also needs the
    last hidden state), plus 2 * kv heads * head dim * 4 bytes of cache on a CPU. SmolLM2-135M:
    3.5 KB (4.6) + 1.5 KB. On a CPU untouched pages cost nothing.
    """

    name = "eagle"
    needs_taps = True

    def __init__(
        self,
        drafter: Eagle3Drafter,
        config: DrafterConfig | None = None,
        *,
        buffer: Sink | None = None,
    ) -> None:
        config = config or DrafterConfig()
        self.drafter, self.sink = drafter, buffer
        self.device = drafter.fc.device
        self.model = drafter.serving_copy(config.serve_dtype)
        c, taps, cache = self.model.config, getattr(torch, config.tap_dtype), self.model.fc.dtype
        self._shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "tokens": ((), torch.int64),
            "features": ((3 * c.hidden_size,), taps),
            "keys": ((c.num_kv_heads, c.head_dim), cache),
            "values": ((c.num_kv_heads, c.head_dim), cache),
        }
        if buffer is not None:
            self._shapes["hidden"] = ((c.hidden_size,), taps)
        sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in self._shapes.values())
        self.bytes_per_token = sum(sizes)
        self._num_slots = self._length = 0
        self._lengths: list[int] = []  # tokens of the row in each slot
        self._tapped: list[int] = []  # positions whose taps are here
        self._cached: list[int] = []  # pairs whose keys and values come from the target's taps
        self._buffers: dict[str, Tensor] = {}
        self._slot_N1 = torch.zeros(0, 1, dtype=torch.int64)

    # What the engine tells.

    def reserve(self, num_slots: int, length: int) -> None:
        if num_slots <= self._num_slots and length <= self._length:
            return
        length = -(-length // _READ_STEP) * _READ_STEP
        self._buffers.clear()  # free the old block before the new one is asked for
        # Zeros, because what lies behind a row's end is masked but still multiplied by zero.
        for name, (shape, dtype) in self._shapes.items():
            size = (num_slots, length, *shape)
            self._buffers[name] = torch.zeros(size, dtype=dtype, device=self.device)
        self._slot_N1 = torch.arange(num_slots, device=self.device)[:, None]
        self._lengths, self._tapped, self._cached = ([0] * num_slots for _ in range(3))
        self._num_slots, self._length = num_slots, length
        self.model.reserve_positions(length)

    def begin(self, slot: int, prompt: list[int], kept: int = 0) -> None:
        self._buffers["tokens"][slot, : len(prompt)] = torch.tensor(prompt)
        self._lengths[slot], self._tapped[slot] = len(prompt), kept
        self._cached[slot] = _same_pairs(self._cached[slot], kept)

    def prefill(self, slot: int, start: int, taps: Taps) -> None:
        stop = start + taps.features_BNF.shape[1]
        assert start == self._tapped[slot] and stop < self._lengths[slot], "prefill out of order"
        self._keep_taps(slot, slice(start, stop), Taps(taps.features_BNF[0], taps.hidden_BNH[0]))
        self._tapped[slot] = stop

    def share(self, src: int, dst: int, length: int) -> None:
        assert length <= min(self._tapped[src], self._lengths[dst] - 1)
        self._copy(src, dst, length)
        self._tapped[dst] = length
        self._cached[dst] = _same_pairs(self._cached[src], length)

    def observe(self, tokens: list[list[int]], taps: Taps) -> None:
        """Appends the emitted tokens; what is written behind a row's own number is never read."""
        starts, most = self._lengths[: len(tokens)], taps.features_BNF.shape[1]
        padded = [row + [0] * (most - len(row)) for row in tokens]
        slot_B1 = self._slot_N1[: len(tokens)]
        at_BN = torch.tensor(starts, device=self.device)[:, None]
        at_BN = at_BN + torch.arange(most, device=self.device)
        self._buffers["tokens"][slot_B1, at_BN] = torch.tensor(padded, device=self.device)
        self._keep_taps(slot_B1, at_BN - 1, taps)
        for slot, (start, row) in enumerate(zip(starts, tokens, strict=True)):
            if self._tapped[slot] == start - 1:  # otherwise the row's beginning was never seen
                self._tapped[slot] += len(row)
            self._lengths[slot] = start + len(row)

    def _keep_taps(self, slots: Any, at: Any, taps: Taps) -> None:
        for name, values in (("features", taps.features_BNF), ("hidden", taps.hidden_BNH)):
            if name in self._buffers:
                self._buffers[name][slots, at] = values.to(self._buffers[name].dtype)

    def move(self, src: int, dst: int) -> None:
        self._copy(src, dst, self._lengths[src])
        for state in (self._lengths, self._tapped, self._cached):
            state[dst] = state[src]

    def _copy(self, src: int, dst: int, length: int) -> None:
        for buffer in self._buffers.values():
            buffer[dst, :length] = buffer[src, :length]

    def finish(self, slot: int, prompt: list[int], completion: list[int]) -> None:
        """Hands the row to the sink; its last token has no taps, the target never read it."""
        tokens = prompt + completion
        known = len(tokens) - 1
        if self.sink is not None and 0 < known <= self._tapped[slot]:
            features, hidden = (self._buffers[k][slot, :known] for k in ("features", "hidden"))
            self.sink.add(tokens, len(prompt), features.clone(), hidden.clone())

    def reload(self) -> None:
        """Takes over the drafter's weights and draft vocabulary as they are now. No row loses its
        taps; every cache is computed again at the next proposal."""
        self.model.load_state_dict(self.drafter.state_dict())
        self.model.pack_weights()
        self._cached = [0] * self._num_slots

    # Proposing.

    @torch.no_grad()
    def propose(self, rows: RowState, depth: int, width: int, nodes: int) -> Draft:
        """A chain, or for width > 1 the best `nodes` of a tree. Rows that have no pair yet (a
        prompt of one token) get pads."""
        num_rows, width = len(rows.roots_B), min(width, self.model.config.draft_vocab_size)
        new_pairs = self._catch_up(num_rows)
        trees = self.model.native_trees() if rows.coupled else None
        if trees is not None and self._buffers["features"].dtype in (torch.float32, torch.bfloat16):
            each = rows.roots_B, rows.keys_B, rows.positions_B, torch.tensor(new_pairs)
            noise = rows.temperatures_B, rows.stop_ids
            given = self._buffers, self.model.turns, each, *noise
            return Draft(*trees(*given, depth, width, nodes, rows.least))
        read = max(self._lengths[:num_rows]) + (depth - 1) * width
        read = min(-(-read // _READ_STEP) * _READ_STEP, self._length)
        h_BH, logits_BV = self._first(num_rows, max(1, *new_pairs), rows.positions_B, read)
        if width == 1:
            draft = self._chain(h_BH, logits_BV, rows, depth, read)
        else:
            draft = self._tree(h_BH, logits_BV, rows, depth, width, nodes, read)
        for slot, num in enumerate(new_pairs):
            if not num:
                draft.tokens_BT[slot, 1:] = draft.parents_BT[slot, 1:] = -1
        return draft

    def _catch_up(self, num_rows: int) -> list[int]:
        """Writes long stretches of missing keys and values; returns how many of its last pairs
        each row still has to compute, 0 for a row that gets no drafts. Only K and V are needed of a
        pair that is not the last."""
        new_pairs = []
        for slot in range(num_rows):
            pairs, start = self._tapped[slot], self._cached[slot]
            if not 0 < pairs == self._lengths[slot] - 1:
                new_pairs.append(0)
                continue
            if pairs - start > _TAIL:
                for at in range(start, pairs - 1, _FILL):
                    self._fill(slot, at, min(at + _FILL, pairs - 1))
                start = pairs - 1
            self._cached[slot] = pairs
            new_pairs.append(max(pairs - start, 1))
        return new_pairs

    def _fill(self, slot: int, start: int, stop: int) -> None:
        model, at_N = self.model, torch.arange(start, stop, device=self.device)
        h_NH = model.fuse(self._buffers["features"][slot, start:stop].to(model.fc.dtype))
        x_N2H = model.mix(self._buffers["tokens"][slot, start + 1 : stop + 1], h_NH)
        _, k_NKD, v_NKD = model.attention_inputs(x_N2H, at_N)
        self._buffers["keys"][slot, start:stop] = k_NKD
        self._buffers["values"][slot, start:stop] = v_NKD

    def _first(
        self, num_rows: int, num_new: int, positions_B: Tensor, read: int
    ) -> tuple[Tensor, Tensor]:
        """The last `num_new` pairs of every row from the target's taps, and the first logits.

        Rows with fewer new pairs compute old ones again (the same values); the last column is the
        row's last pair, so nothing is ragged.
        """
        model, slot_B1 = self.model, self._slot_N1[:num_rows]
        at_BN = positions_B[:, None] - 1 + torch.arange(-num_new, 0, device=self.device)
        at_BN = at_BN.clamp_(min=0)
        tokens_BN = self._buffers["tokens"][slot_B1, at_BN + 1]
        features_BNF, seen_B1 = self._buffers["features"][slot_B1, at_BN], at_BN[:, -1:] + 1
        h_BNH = model.fuse(features_BNF)
        q, k, v = model.attention_inputs(model.mix(tokens_BN, h_BNH), at_BN)
        self._write(slot_B1, at_BN, k, v)
        mask_B1S = torch.arange(read, device=self.device) < seen_B1[..., None]
        h_BH = model.finish(h_BNH[:, -1:], self._attend(q[:, -1:], mask_B1S))[:, 0]
        return h_BH, model.logits(h_BH)

    def _next(
        self,
        tokens_BW: Tensor,
        h_BWH: Tensor,
        turn_BW: Tensor,
        place_BW: Tensor,
        seen_BW: Tensor,
        path_BWP: Tensor,
        read: int,
    ) -> tuple[Tensor, Tensor]:
        """One recurrent step from the drafter's own states; keys and values go to `place`. A node
        sees the first `seen` pairs of its slot and those at `path`, itself among them."""
        model = self.model
        q, k, v = model.attention_inputs(model.mix(tokens_BW, h_BWH), turn_BW)
        self._write(self._slot_N1[: len(k)], place_BW, k, v)
        mask_BWS = torch.arange(read, device=self.device) < seen_BW[..., None]
        mask_BWS.scatter_(2, path_BWP, True)
        h_BWH = model.finish(h_BWH, self._attend(q, mask_BWS))
        return h_BWH, model.logits(h_BWH)

    def _write(self, slot_B1: Tensor, place_BN: Tensor, k: Tensor, v: Tensor) -> None:
        self._buffers["keys"][slot_B1, place_BN] = k
        self._buffers["values"][slot_B1, place_BN] = v

    def _attend(self, q_BWQD: Tensor, mask_BWS: Tensor) -> Tensor:
        """Grouped-query attention to the slots; query heads of a group stand side by side."""
        num_rows, width, heads, dim = q_BWQD.shape
        read, kv = mask_BWS.shape[-1], self.model.config.num_kv_heads
        q = q_BWQD.view(num_rows, width, kv, heads // kv, dim).transpose(1, 2).flatten(2, 3)
        mask = mask_BWS[:, None, :, None].expand(-1, 1, -1, heads // kv, -1).flatten(2, 3)
        keys, values = (
            self._buffers[name][:num_rows, :read].transpose(1, 2) for name in ("keys", "values")
        )
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return out.view(num_rows, kv, width, heads // kv, dim).transpose(1, 2).flatten(2, 3)

    def _chain(
        self, h_BH: Tensor, logits_BV: Tensor, rows: RowState, depth: int, read: int
    ) -> Draft:
        tokens_B1, h_B1H, drawn_from = rows.roots_B[:, None], h_BH[:, None], []
        columns, nowhere = [tokens_B1], tokens_B1.new_empty(len(tokens_B1), 1, 0)
        for level in range(depth):
            if level:
                at_B1 = rows.positions_B[:, None] - 2 + level
                places = at_B1, at_B1, at_B1 + 1, nowhere
                h_B1H, logits_B1V = self._next(tokens_B1, h_B1H, *places, read)
                logits_BV = logits_B1V[:, 0]
            noise = rows.keys_B, rows.positions_B + level, rows.temperatures_B
            tokens_B1 = gumbel_topk(logits_BV, *noise, 1, self._ids_V).tokens_Nk
            columns.append(tokens_B1)
            if not rows.coupled:
                drawn_from.append(logits_BV)
        draft = chain_of(columns, rows, drawn_from)
        if draft.logits_BKV is not None and self._ids_V is not None:
            size = *draft.logits_BKV.shape[:2], self.model.config.vocab_size
            whole = draft.logits_BKV.new_full(size, -torch.inf)
            whole[:, :, self._ids_V] = draft.logits_BKV
            draft.logits_BKV = whole
        return draft

    @property
    def _ids_V(self) -> Tensor | None:
        return self.model.ids_V if self.model.config.reduced else None

    def _tree(
        self,
        h_BH: Tensor,
        logits_BV: Tensor,
        rows: RowState,
        depth: int,
        width: int,
        nodes: int,
        read: int,
    ) -> Draft:
        """Level by level: the `width` most confident nodes get `width` children each."""
        at_B1, device = rows.positions_B[:, None], self.device
        heat_B = rows.temperatures_B if rows.coupled else torch.zeros_like(rows.temperatures_B)
        noise = [rows.keys_B, rows.positions_B, heat_B]
        beam_BW, trust_BW = self._best(logits_BV, noise, rows.coupled, width)
        keys_N, at_N, heat_N = (x.repeat_interleave(width) for x in noise)  # of W nodes per row
        h_BWH = h_BH[:, None].expand(-1, width, -1)
        place_W = torch.arange(width, device=device)
        node_BW, first = place_W.expand(len(at_B1), -1), width  # index in the pool
        row_B1 = self._slot_N1[: len(at_B1)]
        seen_BW = (at_B1 - 1).expand(-1, width)  # what is committed, and then the ancestors' keys
        path_BWP = place_W.new_empty(len(at_B1), width, 0)
        pool = [(beam_BW, torch.full_like(beam_BW, -1), trust_BW)]
        for level in range(1, depth):
            place_BW = at_B1 + (place_W + ((level - 1) * width - 1))
            path_BWP = torch.cat([path_BWP, place_BW[..., None]], 2)
            turn_BW = (at_B1 + (level - 2)).expand(-1, width)
            places = turn_BW, place_BW, seen_BW, path_BWP
            h_BWH, logits_BWV = self._next(beam_BW, h_BWH, *places, read)
            noise = [keys_N, at_N + level, heat_N]
            best = self._best(logits_BWV.flatten(0, 1), noise, rows.coupled, width)
            tokens_BWk, trust_BWk = (x.view(-1, width, width) for x in best)
            trust_BW = trust_BW.masked_fill(torch.isin(beam_BW, rows.stop_ids), _NEVER)
            trust_BP = (trust_BWk + trust_BW[..., None]).flatten(1)
            tokens_BP = tokens_BWk.flatten(1)
            pool.append((tokens_BP, node_BW.repeat_interleave(width, 1), trust_BP))
            if level + 1 < depth:
                top_BW = _most_trusted(trust_BP, width)
                trust_BW = trust_BP.gather(1, top_BW)
                beam_BW, from_BW = tokens_BP.gather(1, top_BW), top_BW // width
                h_BWH, path_BWP = h_BWH[row_B1, from_BW], path_BWP[row_B1, from_BW]
                node_BW = top_BW + first
                first += width * width
        tokens_BP, parents_BP, trust_BP = (torch.cat(part, 1) for part in zip(*pool, strict=True))
        return _prune(rows.roots_B, tokens_BP, parents_BP, trust_BP, nodes, rows.least)

    def _best(
        self, logits_NV: Tensor, noise: list[Tensor], coupled: bool, k: int
    ) -> tuple[Tensor, Tensor]:
        """The k best proposals of each node [N, k], and the log confidence in each.

        noise: keys, positions and temperatures of the nodes.
        """
        keys_N, at_N, heat_N = noise
        best = gumbel_topk(logits_NV, keys_N, at_N, heat_N, k, self._ids_V)
        trust_Nk = best.logprobs_Nk
        if coupled:
            trust_Nk = (best.scores_Nk / _SOFTNESS).log_softmax(-1).nan_to_num(_FLOOR)
        return best.tokens_Nk, trust_Nk.clamp(min=_FLOOR) - _STEP_PENALTY


def _same_pairs(cached: int, length: int) -> int:
    """How many pairs two rows have in common if `length` tokens are: a pair reads the next token,
    so the last one is computed again."""
    return max(min(cached, length - 1), 0)


def _most_trusted(trust_BP: Tensor, num: int) -> Tensor:
    """Indices of the most confident nodes (all, if there are fewer), best first; of equals the
    first."""
    return trust_BP.sort(dim=1, descending=True, stable=True).indices[:, :num]


def _prune(
    roots_B: Tensor,
    tokens_BP: Tensor,
    parents_BP: Tensor,
    trust_BP: Tensor,
    nodes: int,
    least: float,
) -> Draft:
    """The most confident nodes of the pool, parents before children, under the root.

    A child is less confident than its parent, so a kept node's ancestors are kept too; the pool is
    in level order, so ascending pool indices put parents first. What is less sure than `least`
    becomes a pad, behind the others.
    """
    at_BT, num = _most_trusted(trust_BP, nodes), trust_BP.shape[1]
    kept_BT = at_BT.masked_fill(trust_BP.gather(1, at_BT) < least, num).sort(1).values
    pad_BT, at_BT = kept_BT == num, kept_BT.clamp(max=num - 1)
    # A parent's place among the kept is how many of them do not come after it; the root's is 0.
    parents_BT = torch.searchsorted(kept_BT, parents_BP.gather(1, at_BT), right=True)
    tokens_BT = tokens_BP.gather(1, at_BT).masked_fill(pad_BT, -1)
    return Draft(
        torch.cat([roots_B[:, None], tokens_BT], 1),
        F.pad(parents_BT.masked_fill(pad_BT, -1), (1, 0), value=-1),
    )
