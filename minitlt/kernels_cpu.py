"""The CPU path of `kernels`: the tokens of the definition, bit for bit, in a fraction of the time.

Three ideas. (1) The token half of the hash is computed once per vocabulary, and the rest is int32
arithmetic, which wraps like the definition. (2) Gumbel-max is a race (`_race`): one divide per
token shows which handful of tokens can still win, and only those pay for two logarithms. (3) The
tree is walked level by level, so that a row of logits that no row reaches is never read. The
temporaries of a row or two fit the L2 cache and are reused, which is worth as much as (2).

The drafter's loss goes through the L2 cache as well, a few rows at a time.
Letters: as in `kernels`; n rows of one pass, J tiles of W tokens, C candidates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minitlt import kernels as defs
from minitlt.kernels import FLT_MAX, INF, Sampled, Verified
from minitlt.noise import MIX1, MIX2, TOKEN

_L2_ENTRIES = 65536  # numbers per temporary; four of them and the logits fit 2 MB
_HUGE = 1e30
_TILE = 64  # tokens per tile of the race; a tile is looked at again only if its best may win


@dataclass
class _Rows:
    """Rows `pick` of a stack of logits, and what decides their samples."""

    logits_RV: Tensor
    pick: list[int]
    words: tuple[Tensor, Tensor]  # the noise's row state, int64 [N] each
    temperatures: list[float]
    ids_V: Tensor | None = None
    sample_RV: Tensor | None = None
    thresholds_R: Tensor | None = None

    @property
    def divisors(self) -> list[float]:
        return [t if t > 0 else 1.0 for t in self.temperatures]

    @property
    def separate(self) -> bool:
        """The sample is not simply taken from the logits."""
        return self.sample_RV is not None or self.thresholds_R is not None


@dataclass
class _Race:
    """Arrival times of every token, and per-row numbers, of one call."""

    arrival_NV: Tensor
    sample_top_N: Tensor
    lse_N: Tensor
    entropy_N: Tensor
    num_nan_N: Tensor


@lru_cache(maxsize=8)
def _token_half(num_ids: int) -> Tensor:
    """The row-independent half of the hash for ids 0..V-1, int32 (wraps like the definition)."""
    return torch.arange(num_ids, dtype=torch.int32) * _signed(TOKEN)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _fast_bits(row0_n: Tensor, row1_n: Tensor, half_V: Tensor, h: Tensor, shifted: Tensor) -> None:
    """`hash_bits` into h in int32: multiplies wrap, a logical shift is a shift and a mask."""
    torch.bitwise_xor(row0_n.int()[:, None], half_V, out=h)
    h ^= torch.bitwise_right_shift(h, 16, out=shifted).bitwise_and_(0xFFFF)
    torch.add(row1_n.int()[:, None], h, alpha=_signed(MIX1), out=h)
    h ^= torch.bitwise_right_shift(h, 13, out=shifted).bitwise_and_(0x7FFFF)
    h *= _signed(MIX2)
    h ^= torch.bitwise_right_shift(h, 16, out=shifted).bitwise_and_(0xFFFF)


def _weigh(
    raw_nV: Tensor, divisors: list[float], limit_n1: Tensor | None, x_nV: Tensor, out_nV: Tensor
) -> tuple[Tensor, Tensor | int]:
    """raw / T, clean, into x; exp(x - max) into out; the maxima [n] and the numbers of NaN."""
    num_nan: Tensor | int = 0
    torch.div(raw_nV.float(), torch.tensor(divisors, dtype=torch.float32)[:, None], out=x_nV)
    if limit_n1 is not None:
        x_nV.masked_fill_(raw_nV.float() < limit_n1, -INF)  # limits are fp32
    top_n1 = x_nV.amax(-1, keepdim=True)
    if not all(map(math.isfinite, top_n1.flatten().tolist())):  # NaN, +inf or a row of -inf
        num_nan = raw_nV.isnan().sum(-1)
        x_nV.copy_(defs.finite(x_nV))
        top_n1 = x_nV.amax(-1, keepdim=True).clamp_min_(-FLT_MAX)
    torch.sub(x_nV, top_n1, out=out_nV).exp_()
    return top_n1[:, 0], num_nan


def _run(rows: _Rows, entropy: bool) -> _Race:
    """One pass over the logits, a row or two at a time.

    Gumbel-max is a race: token v arrives after E_v / w_v, w = exp(y - max y), and the first one
    wins. u <= E, so u_v / w_v, one divide, is a bound on the arrival from below. At T = 0 every u
    is the same.
    """
    vocab, num_rows = rows.logits_RV.shape[-1], len(rows.pick)
    half_V = _token_half(vocab) if rows.ids_V is None else (rows.ids_V * TOKEN).int()
    step = min(num_rows, max(1, _L2_ENTRIES // vocab))
    x_nV, weights_nV = torch.empty(2, step, vocab, dtype=torch.float32)
    bits_nV, shifted_nV = torch.empty(2, step, vocab, dtype=torch.int32)
    arrival_NV = torch.empty(num_rows, vocab, dtype=torch.float32)
    top_N, sample_top_N, total_N, entropy_N = torch.zeros(4, num_rows, dtype=torch.float32)
    num_nan_N = torch.zeros(num_rows, dtype=torch.int64)
    divisors, greedy = rows.divisors, [t == 0 for t in rows.temperatures]
    for start in range(0, num_rows, step):
        pick = rows.pick[start : start + step]
        n, to = len(pick), slice(start, start + len(pick))
        at = slice(pick[0], pick[0] + 1) if n == 1 else pick  # one row is a view, not a copy
        x, w, bits = x_nV[:n], weights_nV[:n], bits_nV[:n]
        top_N[to], nans = _weigh(rows.logits_RV[at], divisors[to], None, x, w)
        num_nan_N[to] += nans
        total_N[to] = w.sum(-1)
        if entropy:
            gap = (x - top_N[to, None]).masked_fill_(w == 0, 0.0)
            entropy_N[to] = total_N[to].log() - (w * gap).sum(-1) / total_N[to]
        sample_top_N[to] = top_N[to]
        if rows.separate:
            raw = (rows.logits_RV if rows.sample_RV is None else rows.sample_RV)[at]
            limit = None if rows.thresholds_R is None else rows.thresholds_R[at, None]
            sample_top_N[to], nans = _weigh(raw, divisors[to], limit, x, w)
            num_nan_N[to] += 0 if rows.sample_RV is None else nans
        if not all(greedy[to]):
            _fast_bits(rows.words[0][to], rows.words[1][to], half_V, bits, shifted_nV[:n])
        if any(greedy[to]):
            bits[greedy[to]] = 1
        torch.div(arrival_NV[to].copy_(bits.view(torch.uint32)), w, out=arrival_NV[to])
    entropy_N.nan_to_num_(nan=0.0, neginf=0.0)
    return _Race(arrival_NV, sample_top_N, top_N + total_N.log(), entropy_N, num_nan_N)


def _finalists(race: _Race, k: int) -> tuple[Tensor, Tensor]:
    """(row, index) of every token that may be among the best k of its row, ascending.

    E <= 23 u, so 23 times the k-th smallest bound is one on the k-th arrival from above.
    """
    arrival_NV, (num_rows, vocab) = race.arrival_NV, race.arrival_NV.shape
    tile = _TILE if vocab >= _TILE * max(k, _TILE) else 1
    if pad := -vocab % tile:
        arrival_NV = F.pad(arrival_NV, (0, pad), value=INF)
    arrival_NJW = arrival_NV.view(num_rows, -1, tile)
    best_NJ = arrival_NJW.amin(-1)
    kth_N = best_NJ.topk(k, dim=-1, largest=False).values[:, -1] if k > 1 else best_NJ.amin(-1)
    # Rounding moves a score by ulps of |y|: a bound that wide sees every rounded tie. A hash of 0
    # stands for u = 2^-33 but gives 0 (or 0 / 0 = NaN) here: rare, so the whole row is scored.
    slack_N = (race.sample_top_N.abs() + 64.0) * 2.0**-21 + 1e-4
    bound_N1 = torch.where(kth_N > 0, kth_N * (23.0 * slack_N.exp()), INF)[:, None]
    row_C, tile_C = (~(best_NJ > bound_N1)).nonzero(as_tuple=True)
    hit_C, lane_C = (~(arrival_NJW[row_C, tile_C] > bound_N1[row_C])).nonzero(as_tuple=True)
    row_C, index_C = row_C[hit_C], tile_C[hit_C] * tile + lane_C
    return (row_C[index_C < vocab], index_C[index_C < vocab]) if pad else (row_C, index_C)


def _sample(
    rows: _Rows, k: int = 1, entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The best k of every row: (index_Nk, scores_Nk, logprobs_Nk, entropy_N, num_nan_N)."""
    race, num_rows = _run(rows, entropy), len(rows.pick)
    row_C, index_C = _finalists(race, k)
    # The handful that is left, by the definition.
    flat_C = torch.tensor(rows.pick)[row_C]
    divisor_C = torch.tensor(rows.divisors, dtype=torch.float32)[row_C]
    x_C = defs.finite(rows.logits_RV[flat_C, index_C].float() / divisor_C)
    y_C = x_C
    if rows.separate:
        raw_RV = rows.logits_RV if rows.sample_RV is None else rows.sample_RV
        raw_C = raw_RV[flat_C, index_C].float()
        y_C = defs.finite(raw_C / divisor_C)
        if rows.thresholds_R is not None:
            y_C = y_C.masked_fill(raw_C < rows.thresholds_R[flat_C], -INF)
    ids_C = index_C if rows.ids_V is None else rows.ids_V[index_C]
    noise_C = defs.gumbel(defs.token_bits(rows.words[0][row_C], rows.words[1][row_C], ids_C))
    greedy_N = torch.tensor([t == 0 for t in rows.temperatures])
    score_C = torch.where(greedy_N[row_C], y_C, y_C + noise_C)
    # Rows of candidates as a matrix; ascending ids and a stable sort give ties to the lowest id.
    count_N = torch.bincount(row_C, minlength=num_rows)
    place_C = torch.arange(row_C.numel()) - (count_N.cumsum(0) - count_N)[row_C]
    score_NC = score_C.new_full((num_rows, int(count_N.max())), -INF)
    which_NC = index_C.new_zeros(score_NC.shape)
    score_NC[row_C, place_C], which_NC[row_C, place_C] = score_C, torch.arange(row_C.numel())
    score_NC, order_NC = score_NC.sort(dim=-1, descending=True, stable=True)
    best_Nk = which_NC.gather(1, order_NC[:, :k])
    logprob_Nk = defs.logprob(x_C[best_Nk], race.lse_N[:, None])
    return index_C[best_Nk], score_NC[:, :k], logprob_Nk, race.entropy_N, race.num_nan_N


def coupled_verify_cpu(
    logits_BTV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperatures_B: Tensor,
    tokens_BT: Tensor,
    parents_BT: Tensor,
    *,
    thresholds_BT: Tensor | None = None,
    sample_logits_BTV: Tensor | None = None,
    limits_B: Tensor | None = None,
    stop_ids: Sequence[int] | None = None,
    entropy: bool = False,
) -> Verified:
    """`coupled_verify` level by level: only the rows of logits that the walk reaches are read."""
    num_nodes, temperatures = tokens_BT.shape[1], temperatures_B.tolist()
    logits_RV = logits_BTV.flatten(0, 1)
    sample_RV = None if sample_logits_BTV is None else sample_logits_BTV.flatten(0, 1)
    thresholds_R = None if thresholds_BT is None else thresholds_BT.flatten()
    positions_BT = positions_B[:, None] + torch.arange(num_nodes)
    word0_BT, word1_BT = defs.row_words(keys_B[:, None].expand_as(positions_BT), positions_BT)

    def sample(rows: list[int], nodes: list[int], depth: int) -> Sampled:
        pick = [b * num_nodes + node for b, node in zip(rows, nodes, strict=True)]
        words = word0_BT[rows, depth], word1_BT[rows, depth]
        temps = [temperatures[b] for b in rows]
        at = _Rows(logits_RV, pick, words, temps, None, sample_RV, thresholds_R)
        index_N1, _, *rest = _sample(at, entropy=entropy)
        return Sampled(*(x.flatten().tolist() for x in (index_N1, *rest)))

    return defs.walk(sample, tokens_BT, parents_BT, limits_B, stop_ids, entropy)


def gumbel_topk_cpu(
    logits_NV: Tensor,
    keys_N: Tensor,
    positions_N: Tensor,
    temperatures_N: Tensor,
    k: int,
    ids_V: Tensor | None = None,
) -> defs.TopK:
    """`gumbel_topk` through the race."""
    num_rows, vocab = logits_NV.shape
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be in 1..{vocab}, not {k}")
    if num_rows == 0:
        return defs.gumbel_topk_ref(logits_NV, keys_N, positions_N, temperatures_N, k, ids_V)
    words = defs.row_words(keys_N, positions_N)
    rows = _Rows(logits_NV, list(range(num_rows)), words, temperatures_N.tolist(), ids_V)
    index_Nk, score_Nk, logprob_Nk, _, _ = _sample(rows, k)
    tokens_Nk = index_Nk if ids_V is None else ids_V[index_Nk]
    return defs.TopK(tokens_Nk, index_Nk, score_Nk, logprob_Nk)


class DraftLossFunction(torch.autograd.Function):
    """Forward keeps the two logits and three numbers per row; backward rebuilds the probabilities.

    With c = sum_v q [q > p]:  dKL = q - p,  dTV = q ([q > p] - c).
    """

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, teacher_NV: Tensor, kind: str, eta: float, passes: Any
    ) -> tuple[Tensor, Tensor]:
        kl_N, tv_N, stats_N3 = passes.forward(logits_NV, teacher_NV)
        acceptance_N = 1.0 - tv_N
        ctx.weights, ctx.passes = defs.mix(kind, acceptance_N, eta), passes
        ctx.save_for_backward(logits_NV, teacher_NV, stats_N3)
        ctx.mark_non_differentiable(acceptance_N)
        return ctx.weights[0] * kl_N + ctx.weights[1] * tv_N, acceptance_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        kl_grad_N, tv_grad_N = (grads[0] * weight for weight in ctx.weights)
        grad_NV = ctx.passes.backward(*ctx.saved_tensors, kl_grad_N, tv_grad_N)
        return grad_NV, None, None, None, None


class _DraftLossPasses:
    """The two passes of the draft loss, in chunks of rows that fit the L2 cache."""

    @staticmethod
    def forward(logits_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_rows = logits_NV.shape[0]
        kl_N, tv_N, lse_p_N, lse_q_N, over_N = torch.empty(5, num_rows, dtype=torch.float32)
        for n, q, p, above in _loss_chunks(logits_NV):
            x, y = logits_NV[n].float(), teacher_NV[n].float()
            lse_q_N[n], lse_p_N[n] = _softmax_(x, q), _softmax_(y, p)
            # p log p / q = p (y - x) + constants; -inf teacher logits have p = 0
            gap = torch.clamp(y, min=-_HUGE, out=above).sub_(x).mul_(p)
            kl_N[n] = gap.sum(-1) + lse_q_N[n] - lse_p_N[n]
            p, above = _difference_(q, p, above)
            tv_N[n], over_N[n] = p.mul_(above).sum(-1), q.mul_(above).sum(-1)
        return kl_N, tv_N, torch.stack([lse_p_N, lse_q_N, over_N], dim=1)

    @staticmethod
    def backward(
        logits_NV: Tensor,
        teacher_NV: Tensor,
        stats_N3: Tensor,
        kl_grad_N: Tensor,
        tv_grad_N: Tensor,
    ) -> Tensor:
        grad_NV = torch.empty_like(logits_NV)
        for n, q, p, above in _loss_chunks(logits_NV):
            lse_p, lse_q, over = stats_N3[n, :, None].unbind(1)
            torch.sub(logits_NV[n].float(), lse_q, out=q).exp_()
            torch.sub(teacher_NV[n].float(), lse_p, out=p).exp_()
            p, above = _difference_(q, p, above)
            above.sub_(over).mul_(q).mul_(tv_grad_N[n, None])
            grad_NV[n] = p.mul_(kl_grad_N[n, None]).add_(above)
        return grad_NV


def _loss_chunks(logits_NV: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Slices of rows, each with the same three buffers."""
    num_rows, vocab = logits_NV.shape
    step = max(1, _L2_ENTRIES // max(vocab, 1))
    buffers = torch.empty(3, step, vocab, dtype=torch.float32)
    for start in range(0, num_rows, step):
        n = slice(start, min(start + step, num_rows))
        yield (n, *buffers[:, : n.stop - start])


def _softmax_(x_nV: Tensor, out_nV: Tensor) -> Tensor:
    """softmax(x) into out; returns logsumexp(x)."""
    top_n1 = x_nV.amax(-1, keepdim=True)
    total_n1 = torch.sub(x_nV, top_n1, out=out_nV).exp_().sum(-1, keepdim=True)
    out_nV.div_(total_n1)
    return (top_n1 + total_n1.log())[:, 0]


def _difference_(q: Tensor, p: Tensor, above: Tensor) -> tuple[Tensor, Tensor]:
    """q - p into p, and [q > p] into above (a saturated product: torch converts bools slowly)."""
    torch.sub(q, p, out=p)
    return p, torch.mul(p, _HUGE, out=above).mul_(_HUGE).clamp_(0.0, 1.0)


def draft_loss_cpu(
    logits_NV: Tensor, teacher_NV: Tensor, kind: str = "lk", eta: float = 3.0
) -> defs.DraftLoss:
    """`draft_loss` without a probability tensor."""
    args = (logits_NV, teacher_NV.detach(), kind, eta, _DraftLossPasses)
    return defs.DraftLoss(*DraftLossFunction.apply(*args))
