"""The CPU path of `kernels`: the tokens of the definition, bit for bit, for a tenth of the work.

Three ideas. (1) The token half of the hash is computed once per vocabulary, and the rest is int32
arithmetic, which wraps like the definition. (2) Gumbel-max is a race (`_race`): one divide per
token shows which handful of tokens can still win, and only those pay for two logarithms. (3) The
tree is walked level by level, so that a row of logits that no row reaches is never read.

8 rows of 49,152 logits take about 3 ms on one core, where the definition takes 60.
Letters: as in `kernels`; n rows of one chunk, J tiles of W tokens, C candidates.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from minitlt import kernels as defs
from minitlt.kernels import FLT_MAX, INF, MIX1, MIX2, TOKEN, Sampled, Verified

_L2_ENTRIES = 65536
_TILE = 64  # tokens per block of the race; a block is looked at again only if its best may win


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@lru_cache(maxsize=8)
def _token_half(num_ids: int) -> Tensor:
    """The row-independent half of the hash for ids 0..V-1, int32 (wraps like the definition)."""
    return torch.arange(num_ids, dtype=torch.int32) * _signed(TOKEN)


def _fast_bits(row0_n: Tensor, row1_n: Tensor, half_V: Tensor, h: Tensor, shifted: Tensor) -> None:
    """`hash_bits` into h in int32: multiplies wrap, a logical shift is a shift and a mask."""
    torch.bitwise_xor(row0_n.int()[:, None], half_V, out=h)
    h ^= torch.bitwise_right_shift(h, 16, out=shifted).bitwise_and_(0xFFFF)
    torch.add(row1_n.int()[:, None], h, alpha=_signed(MIX1), out=h)
    h ^= torch.bitwise_right_shift(h, 13, out=shifted).bitwise_and_(0x7FFFF)
    h *= _signed(MIX2)
    h ^= torch.bitwise_right_shift(h, 16, out=shifted).bitwise_and_(0xFFFF)


def _weigh(raw_nV: Tensor, divisors: list[float], threshold_n1: Tensor | None, x_nV: Tensor,
           weights_nV: Tensor) -> tuple[list[float], Tensor | int]:  # fmt: skip
    """raw / T into x (clean), exp(x - max) into weights; the maxima and the numbers of NaN."""
    divisor_n1 = torch.tensor(divisors)[:, None]
    num_nan: Tensor | int = 0
    torch.div(raw_nV.float(), divisor_n1, out=x_nV)
    if threshold_n1 is not None:
        x_nV.masked_fill_(raw_nV < threshold_n1, -INF)
    top_n1 = x_nV.amax(-1, keepdim=True)
    if not all(map(math.isfinite, top_n1.flatten().tolist())):  # NaN, +inf or a row of -inf
        num_nan = raw_nV.isnan().sum(-1)
        x_nV.copy_(defs.finite(x_nV))
        top_n1 = x_nV.amax(-1, keepdim=True).clamp_min_(-FLT_MAX)
    torch.sub(x_nV, top_n1, out=weights_nV).exp_()
    return top_n1.flatten().tolist(), num_nan


def _race(arrival_NV: Tensor, tops: list[float], k: int) -> tuple[Tensor, Tensor]:
    """(row, index) of every token that may be among the best k of its row, ascending.

    Gumbel-max is a race: token v arrives after E_v / w_v, w = exp(y - max y), and the first one
    wins. u <= E <= 23 u, so u_v / w_v (one divide) bounds the arrival from below, and 23 times its
    k-th smallest bounds the k-th arrival from above. What lies between is a handful of tokens.
    """
    num_rows, vocab = arrival_NV.shape
    tile = _TILE if vocab >= _TILE * max(k, _TILE) else 1
    if pad := -vocab % tile:
        arrival_NV = F.pad(arrival_NV, (0, pad), value=INF)
    arrival_NJW = arrival_NV.view(num_rows, -1, tile)
    best_NJ = arrival_NJW.amin(-1)
    kth_N = best_NJ.topk(k, dim=-1, largest=False).values[:, -1] if k > 1 else best_NJ.amin(-1)
    # Rounding moves a score by ulps of |y|: a bound that wide sees every rounded tie. A hash of 0
    # stands for u = 2^-33 but gives 0 (or 0 / 0 = NaN) here: rare, so the whole row is scored.
    slack_N = (torch.tensor(tops).abs() + 64.0) * 2.0**-21 + 1e-4
    bound_N1 = torch.where(kth_N > 0, kth_N * (23.0 * slack_N.exp()), INF)[:, None]
    row_C, tile_C = (~(best_NJ > bound_N1)).nonzero(as_tuple=True)
    hit_C, lane_C = (~(arrival_NJW[row_C, tile_C] > bound_N1[row_C])).nonzero(as_tuple=True)
    row_C, index_C = row_C[hit_C], tile_C[hit_C] * tile + lane_C
    return (row_C[index_C < vocab], index_C[index_C < vocab]) if pad else (row_C, index_C)


def _sample_cpu(
    logits_RV: Tensor, pick: list[int], words: tuple[Tensor, Tensor], temperatures: list[float],
    ids_V: Tensor | None = None, *, sample_RV: Tensor | None = None,
    thresholds_R: Tensor | None = None, k: int = 1, entropy: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The best k of rows `pick`: (index_Nk, scores_Nk, logprobs_Nk, entropy_N, num_nan_N)."""
    vocab, num_rows = logits_RV.shape[-1], len(pick)
    half_V = _token_half(vocab) if ids_V is None else (ids_V * TOKEN).int()
    divisors = [t if t > 0 else 1.0 for t in temperatures]
    greedy = [t == 0 for t in temperatures]
    step = min(num_rows, max(1, _L2_ENTRIES // vocab))  # rows whose temporaries fit the L2 cache
    x_nV, weights_nV, arrival_NV = (torch.empty(n, vocab) for n in (step, step, num_rows))
    bits_nV, shifted_nV = torch.empty(2, step, vocab, dtype=torch.int32)
    top_N, total_N, entropy_N = torch.zeros(3, num_rows)
    num_nan_N = torch.zeros(num_rows, dtype=torch.int64)
    tops: list[float] = []
    for start in range(0, num_rows, step):
        rows = pick[start : start + step]
        n, to = len(rows), slice(start, start + len(rows))
        at = slice(rows[0], rows[0] + 1) if n == 1 else rows  # one row is a view, not a copy
        x, w = x_nV[:n], weights_nV[:n]
        top, nans = _weigh(logits_RV[at], divisors[to], None, x, w)
        num_nan_N[to] += nans
        top_N[to], total_N[to] = torch.tensor(top), w.sum(-1)
        if entropy:
            gap = (x - top_N[to, None]).masked_fill_(w == 0, 0.0)
            entropy_N[to] = total_N[to].log() - (w * gap).sum(-1) / total_N[to]
        if sample_RV is not None or thresholds_R is not None:
            raw = (logits_RV if sample_RV is None else sample_RV)[at]
            limit = None if thresholds_R is None else thresholds_R[at, None]
            top, nans = _weigh(raw, divisors[to], limit, x, w)
            num_nan_N[to] += nans if sample_RV is not None else 0
        tops += top
        bits = bits_nV[:n]
        if not all(greedy[to]):
            _fast_bits(words[0][to], words[1][to], half_V, bits, shifted_nV[:n])
        if any(greedy[to]):
            bits[greedy[to]] = 1  # the same race without chance
        torch.div(arrival_NV[to].copy_(bits.view(torch.uint32)), w, out=arrival_NV[to])
    row_C, index_C = _race(arrival_NV, tops, k)

    # the handful that is left, by the definition
    flat_C, divisor_C = torch.tensor(pick)[row_C], torch.tensor(divisors)[row_C]
    ids_C = index_C if ids_V is None else ids_V[index_C]
    x_C = defs.finite(logits_RV[flat_C, index_C].float() / divisor_C)
    y_C = x_C
    if sample_RV is not None or thresholds_R is not None:
        raw_C = (logits_RV if sample_RV is None else sample_RV)[flat_C, index_C].float()
        y_C = defs.finite(raw_C / divisor_C)
        if thresholds_R is not None:
            y_C = y_C.masked_fill(raw_C < thresholds_R[flat_C], -INF)
    noise_C = defs.gumbel(defs.token_bits(words[0][row_C], words[1][row_C], ids_C))
    score_C = torch.where(torch.tensor(greedy)[row_C], y_C, y_C + noise_C)
    # Rows of candidates as a matrix; ascending ids and a stable sort give ties to the lowest id.
    count_N = torch.bincount(row_C, minlength=num_rows)
    place_C = torch.arange(row_C.numel()) - (count_N.cumsum(0) - count_N)[row_C]
    score_NC = torch.full((num_rows, int(count_N.max())), -INF)
    which_NC = torch.zeros(score_NC.shape, dtype=torch.int64)
    score_NC[row_C, place_C], which_NC[row_C, place_C] = score_C, torch.arange(row_C.numel())
    score_NC, order_NC = score_NC.sort(dim=-1, descending=True, stable=True)
    best_Nk = which_NC.gather(1, order_NC[:, :k])
    logprob_Nk = defs.logprob(x_C[best_Nk], (top_N + total_N.log())[:, None])
    entropy_N = entropy_N.nan_to_num_(nan=0.0, neginf=0.0)
    return index_C[best_Nk], score_NC[:, :k], logprob_Nk, entropy_N, num_nan_N


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
    words = defs.row_words(keys_B[:, None].expand_as(positions_BT), positions_BT)

    def sample(rows: list[int], nodes: list[int], depth: int) -> Sampled:
        pick = [b * num_nodes + node for b, node in zip(rows, nodes, strict=True)]
        index_Nk, _, *rest = _sample_cpu(
            logits_RV,
            pick,
            (words[0][rows, depth], words[1][rows, depth]),
            [temperatures[b] for b in rows],
            sample_RV=sample_RV,
            thresholds_R=thresholds_R,
            entropy=entropy,
        )
        return Sampled(*(x.flatten().tolist() for x in (index_Nk, *rest)))

    return defs.walk(sample, tokens_BT, parents_BT, limits_B, stop_ids, entropy)


def gumbel_topk_cpu(
    logits_NV: Tensor, keys_N: Tensor, positions_N: Tensor, temperatures_N: Tensor, k: int,
    ids_V: Tensor | None = None,
) -> defs.TopK:  # fmt: skip
    """`gumbel_topk` through the race."""
    words, pick = defs.row_words(keys_N, positions_N), list(range(logits_NV.shape[0]))
    if not pick:
        empty_Nk = torch.empty(0, k)
        return defs.TopK(empty_Nk.long(), empty_Nk.long(), empty_Nk, empty_Nk)
    index_Nk, score_Nk, logprob_Nk, _, _ = _sample_cpu(
        logits_NV, pick, words, temperatures_N.tolist(), ids_V, k=k)  # fmt: skip
    tokens_Nk = index_Nk if ids_V is None else ids_V[index_Nk]
    return defs.TopK(tokens_Nk, index_Nk, score_Nk, logprob_Nk)


class _DraftLossPasses:
    """The two passes of the draft loss, in chunks of rows that fit the L2 cache."""

    @staticmethod
    def forward(logits_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, vocab = logits_NV.shape
        kl_N, tv_N, lse_p_N, lse_q_N, over_N = torch.empty(5, num_rows)
        for n in _row_chunks(num_rows, vocab):
            x, t = logits_NV[n].float(), teacher_NV[n].float()
            lse_q_N[n], lse_p_N[n] = x.logsumexp(-1), t.logsumexp(-1)
            logq, logp = x - lse_q_N[n, None], t - lse_p_N[n, None]
            q, p = logq.exp(), logp.exp()
            kl_N[n] = p.mul(logp.sub_(logq)).masked_fill_(p == 0, 0.0).sum(-1)
            tv_N[n] = (p - q).abs_().sum(-1).mul_(0.5)
            over_N[n] = q.masked_fill_(q <= p, 0.0).sum(-1)
        return kl_N, tv_N, torch.stack([lse_p_N, lse_q_N, over_N], dim=1)

    @staticmethod
    def backward(logits_NV: Tensor, teacher_NV: Tensor, stats_N3: Tensor, kl_grad_N: Tensor,
                 tv_grad_N: Tensor) -> Tensor:  # fmt: skip
        grad_NV = torch.empty_like(logits_NV)
        for n in _row_chunks(*logits_NV.shape):
            lse_p, lse_q, over = stats_N3[n, :, None].unbind(1)
            q = (logits_NV[n].float() - lse_q).exp_()
            p = (teacher_NV[n].float() - lse_p).exp_()
            above = (q > p).float().sub_(over).mul_(q)
            grad = q.sub_(p).mul_(kl_grad_N[n, None])
            grad_NV[n] = grad.addcmul_(above, tv_grad_N[n, None])
        return grad_NV


def _row_chunks(num_rows: int, vocab: int) -> list[slice]:
    step = max(1, _L2_ENTRIES // max(vocab, 1))
    return [slice(start, start + step) for start in range(0, num_rows, step)]


def draft_loss_cpu(
    logits_NV: Tensor, teacher_NV: Tensor, kind: str = "lk", eta: float = 3.0
) -> defs.DraftLoss:
    """`draft_loss` without a probability tensor."""
    return defs.DraftLoss(*defs.DraftLossFunction.apply(
        logits_NV, teacher_NV.detach(), kind, eta, _DraftLossPasses))  # fmt: skip
