"""The CPU path of `kernels`: the tokens of the definition, bit for bit, in a fraction of the time.

Four ideas. (1) The token half of the hash is computed once per vocabulary, and the rest is uint32
arithmetic, which wraps like the definition. (2) Gumbel-max is a race (`_run`): one divide per
token shows which handful of tokens can still win, and only those pay for two logarithms. (3) The
tree is walked level by level, so that a row of logits that no row reaches is never read. The
temporaries of a row or two fit the L2 cache and are reused, which is worth as much as (2). (4) With
few rows the calls cost more than the numbers in them: whatever is small is done by NumPy. Where
there is a C compiler, fp32 logits go through the same race in C (`native_sampler`) instead, a fifth
of the time and less.

The drafter's loss goes through the L2 cache as well, a few rows at a time.
Letters: as in `kernels`; n rows of one pass, J tiles of W tokens, C candidates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minitlt import kernels as defs
from minitlt import native_sampler
from minitlt.kernels import FLT_MAX, INF, Sampled, Verified
from minitlt.noise import MIX1, MIX2, TOKEN

_L2_ENTRIES = 65536  # numbers per temporary; four of them and the logits fit 2 MB
_HUGE = 1e30
_TILE = 64  # tokens per tile of the race; a tile is looked at again only if its best may win


@dataclass
class _Rows:
    """Rows `pick`, ascending, of a stack of logits, and what decides their samples."""

    logits_RV: Tensor
    pick: list[int]
    words_N2: np.ndarray  # the noise's row state, int64
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
    sample_tops: list[float]
    lse_N: Tensor
    entropies: list[float]
    num_nan: list[int]


# A draft and its verification ask for the same ones.
_row_words = lru_cache(maxsize=1 << 14)(defs.row_words)


@lru_cache(maxsize=8)
def _token_half(num_ids: int) -> np.ndarray:
    """The row-independent half of the hash for ids 0..V-1, uint32 (wraps like the definition)."""
    return np.arange(num_ids, dtype=np.uint32) * np.uint32(TOKEN)


def _fast_bits(
    words_n2: np.ndarray, half_V: np.ndarray, h: np.ndarray, shifted: np.ndarray
) -> None:
    """`hash_bits` into h, in uint32."""
    words_n2 = words_n2.astype(np.uint32)
    np.bitwise_xor(words_n2[:, :1], half_V, out=h)
    h ^= np.right_shift(h, 16, out=shifted)
    h *= MIX1
    h += words_n2[:, 1:]
    h ^= np.right_shift(h, 13, out=shifted)
    h *= MIX2
    h ^= np.right_shift(h, 16, out=shifted)


def _weigh(
    raw_nV: Tensor, divisors: list[float], limit_n1: Tensor | None, x_nV: Tensor, out_nV: Tensor
) -> tuple[Tensor, Tensor, list[int]]:
    """raw / T, clean; exp(it - max) into out; the maxima; numbers of NaN. x is room to work in."""
    clean_nV, num_nan = raw_nV.float(), [0] * len(divisors)
    if any(divisor != 1.0 for divisor in divisors):
        divisor_n1 = torch.tensor(divisors, dtype=torch.float32)[:, None]
        clean_nV = torch.div(clean_nV, divisor_n1, out=x_nV)
    if limit_n1 is not None:
        clean_nV = torch.where(raw_nV.float() < limit_n1, -INF, clean_nV)  # limits are fp32
    top_n1 = clean_nV.amax(-1, keepdim=True)
    if not all(map(math.isfinite, top_n1[:, 0].tolist())):  # NaN, +inf or a row of -inf
        num_nan = raw_nV.isnan().sum(-1).tolist()
        clean_nV = defs.finite(clean_nV)
        top_n1 = clean_nV.amax(-1, keepdim=True).clamp_min_(-FLT_MAX)
    torch.sub(clean_nV, top_n1, out=out_nV).exp_()
    return clean_nV, top_n1, num_nan


def _run(rows: _Rows, entropy: bool) -> _Race:
    """One pass over the logits, a row or two at a time.

    Gumbel-max is a race: token v arrives after E_v / w_v, w = exp(y - max y), and the first one
    wins. u <= E, so u_v / w_v, one divide, is a bound on the arrival from below. At T = 0 every u
    is the same.
    """
    vocab, num_rows = rows.logits_RV.shape[-1], len(rows.pick)
    half_V = _token_half(vocab)
    if rows.ids_V is not None:
        half_V = (rows.ids_V.numpy() * TOKEN).astype(np.uint32)
    step = min(num_rows, max(1, _L2_ENTRIES // vocab))
    x_nV, weights_nV = torch.empty(2, step, vocab, dtype=torch.float32)
    bits_nV, shifted_nV = np.empty((2, step, vocab), dtype=np.uint32)
    arrival_NV = torch.empty(num_rows, vocab, dtype=torch.float32)
    lse_n1s, sample_tops, entropies, num_nan = [], [], [], []
    divisors, greedy = rows.divisors, [t == 0 for t in rows.temperatures]
    for start in range(0, num_rows, step):
        pick = rows.pick[start : start + step]
        n, to = len(pick), slice(start, start + len(pick))
        side_by_side = pick[-1] - pick[0] == n - 1  # then they are a view, not a copy
        at = slice(pick[0], pick[-1] + 1) if side_by_side else pick
        w_nV, bits = weights_nV[:n], bits_nV[:n]
        y_nV, top_n1, nans = _weigh(rows.logits_RV[at], divisors[to], None, x_nV[:n], w_nV)
        total_n1 = w_nV.sum(-1, keepdim=True)
        lse_n1s.append(top_n1 + total_n1.log())
        if entropy:
            gap_nV = (y_nV - top_n1).masked_fill_(w_nV == 0, 0.0)
            spread_n1 = total_n1.log() - (w_nV * gap_nV).sum(-1, keepdim=True) / total_n1
            entropies += spread_n1.nan_to_num(nan=0.0, neginf=0.0)[:, 0].tolist()
        if rows.separate:
            raw = (rows.logits_RV if rows.sample_RV is None else rows.sample_RV)[at]
            limit = None if rows.thresholds_R is None else rows.thresholds_R[at, None]
            _, top_n1, more = _weigh(raw, divisors[to], limit, x_nV[:n], w_nV)
            if rows.sample_RV is not None:
                nans = [a + b for a, b in zip(nans, more, strict=True)]
        sample_tops += top_n1[:, 0].tolist()
        num_nan += nans
        if not all(greedy[to]):
            _fast_bits(rows.words_N2[to], half_V, bits, shifted_nV[:n])
        if any(greedy[to]):
            bits[greedy[to]] = 1
        u_nV = arrival_NV[to].copy_(torch.from_numpy(bits))
        u_nV /= w_nV
    lse_N = torch.cat(lse_n1s)[:, 0]
    return _Race(arrival_NV, sample_tops, lse_N, entropies or [0.0] * num_rows, num_nan)


def _finalists(race: _Race, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, index) of every token that may be among the best k of its row, ascending.

    E <= 23 u, so 23 times the k-th smallest bound is one on the k-th arrival from above.
    """
    arrival_NV, (num_rows, vocab) = race.arrival_NV, race.arrival_NV.shape
    tile = _TILE if vocab >= _TILE * max(k, _TILE) else 1
    if pad := -vocab % tile:
        arrival_NV = F.pad(arrival_NV, (0, pad), value=INF)
    arrival_NJW = arrival_NV.view(num_rows, -1, tile)
    best_NJ = arrival_NJW.amin(-1).numpy()
    kth_N = best_NJ.min(-1) if k == 1 else np.partition(best_NJ, k - 1, axis=-1)[:, k - 1]
    bounds = []
    for kth, top in zip(kth_N.tolist(), race.sample_tops, strict=True):
        # Rounding moves a score by ulps of |y|: a bound that wide sees every rounded tie. A hash
        # of 0 stands for u = 2^-33 but gives 0 (or 0 / 0 = NaN) here: rare, so the whole row is
        # scored.
        slack = (abs(top) + 64.0) * 2.0**-21 + 1e-4
        bounds.append(kth * 23.0 * math.exp(slack) if kth > 0 and slack < 100.0 else INF)
    bound_N1 = np.array(bounds)[:, None]
    row_C, tile_C = np.nonzero(~(best_NJ > bound_N1))
    hit_C, lane_C = np.nonzero(~(arrival_NJW.numpy()[row_C, tile_C] > bound_N1[row_C]))
    row_C, index_C = row_C[hit_C], tile_C[hit_C] * tile + lane_C
    return (row_C[index_C < vocab], index_C[index_C < vocab]) if pad else (row_C, index_C)


@np.errstate(over="ignore", invalid="ignore")
def _sample(
    rows: _Rows, k: int = 1, entropy: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray, _Race]:
    """The best k of every row: (index_Nk, scores_Nk, logprobs_Nk, what else the pass saw)."""
    race, num_rows = _run(rows, entropy), len(rows.pick)
    row_C, index_C = _finalists(race, k)
    # The handful that is left, by the definition.
    flat_C = np.array(rows.pick)[row_C]
    at_C = torch.from_numpy(flat_C), torch.from_numpy(index_C)
    raw_C = rows.logits_RV[at_C].float().numpy()
    divisor_C = np.array(rows.divisors, dtype=np.float32)[row_C]
    x_C = y_C = _finite(raw_C / divisor_C)
    if rows.separate:
        if rows.sample_RV is not None:
            raw_C = rows.sample_RV[at_C].float().numpy()
        y_C = _finite(raw_C / divisor_C)
        if rows.thresholds_R is not None:
            y_C[raw_C < rows.thresholds_R.numpy()[flat_C]] = -INF
    score_C = y_C
    if any(rows.temperatures):
        ids_C = index_C if rows.ids_V is None else rows.ids_V.numpy()[index_C]
        word0_C, word1_C = rows.words_N2[row_C].T
        score_C = y_C + defs.gumbel(defs.token_bits(word0_C, word1_C, ids_C))
        if not all(rows.temperatures):
            score_C = np.where(np.array(rows.temperatures)[row_C] == 0, y_C, score_C)
    # Rows and ids ascend and the sort is stable: ties go to the lowest id.
    order_C, first_N = np.lexsort((-score_C, row_C)), np.searchsorted(row_C, np.arange(num_rows))
    best_Nk = order_C[first_N[:, None] + np.arange(k)]
    x_Nk = x_C[best_Nk]
    logprob_Nk = np.where(x_Nk == -INF, x_Nk, x_Nk - race.lse_N.numpy()[:, None])
    return index_C[best_Nk], score_C[best_Nk], logprob_Nk, race


def _finite(x_C: np.ndarray) -> np.ndarray:
    """`kernels.finite`."""
    return np.fmin(np.fmax(x_C, -INF), FLT_MAX)


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
    if native_sampler.takes(logits_BTV, temperatures_B, thresholds_BT, sample_logits_BTV):
        return Verified(*native_sampler.verify(
            logits_BTV, keys_B, positions_B, temperatures_B, tokens_BT, parents_BT,
            thresholds_BT, sample_logits_BTV, limits_B, stop_ids, entropy,
        ))  # fmt: skip
    num_nodes, temperatures = tokens_BT.shape[1], temperatures_B.tolist()
    logits_RV = logits_BTV.flatten(0, 1)
    sample_RV = None if sample_logits_BTV is None else sample_logits_BTV.flatten(0, 1)
    thresholds_R = None if thresholds_BT is None else thresholds_BT.flatten()
    keys, positions = keys_B.tolist(), positions_B.tolist()

    def sample(rows: list[int], nodes: list[int], depth: int) -> Sampled:
        pick = [b * num_nodes + node for b, node in zip(rows, nodes, strict=True)]
        words = np.array([_row_words(keys[b], positions[b] + depth) for b in rows])
        temps = [temperatures[b] for b in rows]
        at = _Rows(logits_RV, pick, words, temps, None, sample_RV, thresholds_R)
        index_N1, _, logprob_N1, race = _sample(at, entropy=entropy)
        found = index_N1[:, 0].tolist(), logprob_N1[:, 0].tolist()
        return Sampled(*found, race.entropies, race.num_nan)

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
    if native_sampler.takes(logits_NV, temperatures_N, k=k):
        places = keys_N, positions_N, temperatures_N
        return defs.TopK(*native_sampler.topk(logits_NV, *places, k, ids_V))
    words = np.array(list(map(_row_words, keys_N.tolist(), positions_N.tolist())))
    rows = _Rows(logits_NV, list(range(num_rows)), words, temperatures_N.tolist(), ids_V)
    index_Nk, *rest = (torch.from_numpy(x) for x in _sample(rows, k)[:3])
    return defs.TopK(index_Nk if ids_V is None else ids_V[index_Nk], index_Nk, *rest)


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
