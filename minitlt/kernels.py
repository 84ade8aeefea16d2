"""The arithmetic of speculative verification: definitions, and the choice of who computes them.

A target model has scored a root token and K drafts behind it (a chain, or a tree of T nodes). Which
drafts stand, and which token comes next? The answer here is *coupled*: at every position the target
samples its own token with noise that is a pure function of (row key, position, token id),

    s = argmax_v ( logits[v] / T + g(key, position, v) ),        g = standard Gumbel noise,

and a draft is accepted exactly when it is that token. s is emitted either way. By the Gumbel-max
identity s is a sample of softmax(logits / T); because the noise belongs to the position and not to
the attempt, the text does not depend on the drafter at all. A drafter that proposes with the *same*
noise (`gumbel_topk`) agrees with the target as often as their distributions do, within a few
percent of the best possible rule (Daliri, Musco and Suresh, arXiv 2408.07978). Two things to know
before changing anything. Emitting s after a mismatch is what makes this exact: drop the sample on a
mismatch and the law is biased. And the noise must never be shared with the ratio test
u < p/q (`rejection_verify`, `block_verify`), which draws from its own `stream_keys`.

**The noise** is a hash of (key, position, token id), explained and defined in `noise`.

**Two launches.** A verify step reads B x T rows of V logits and needs four numbers of each: the
best score's token, its logit, and the (max, sum) of the softmax. Launch 1 (`kernels_triton`) cuts
every row into tiles; one program per (row, tile) divides by T, adds noise, and writes its tile's
maximum, sum, best score and id: some twenty bytes for every 8,192 logits, each logit read once.
The hash costs ten integer operations; the two logarithms would cost more than the memory traffic,
so a program bounds every score from above without one (E >= u, and the bits of a float, read as an
integer, are nearly its logarithm) and scores exactly only the groups of 32 tokens whose bound
beats the best score so far: one or two of 256. Launch 2 gives each sequence one program: it
combines the tiles of a node in a fixed order, takes the token, looks for the child that carries
it, and walks on until no child does, or a stop id or the row's budget ends the walk. The number of
tiles depends on V alone, so a row's result does not depend on its batch. Nothing V-sized is ever
written. Rejection sampling cannot be that cheap: its residual max(p - q, 0) needs both softmax
normalisers before it can be sampled, so the rejected row is read twice. It is here in PyTorch only.

On a CPU the same bound turns two logarithms per token into one divide (`kernels_cpu`, and
`csrc/sampler.c` where there is a C compiler).

Conventions: ties go to the lowest id; NaN counts as -inf and is counted; +inf is the largest float;
a row of -inf yields token 0 with logprob -inf; T = 0 is the argmax of the logits, with no noise.

Left out: fusing the sampler into the LM head, so that logits are never written.
How to run: `pytest tests/test_kernels.py tests/test_kernels_triton.py`, `python
benchmarks/kernels.py`, and MINITLT_KERNELS=auto|ref|triton to choose the implementation.

Letters: B rows, K drafts, T tree nodes per row (root included), D emitted tokens (= T), N rows of
logits, V vocabulary, k proposals; attention: H heads, D head width, S slots, L slot length.
"""

import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from minitlt.noise import gumbel as gumbel
from minitlt.noise import gumbel_noise, row_words, stream_keys, token_bits
from minitlt.noise import hash_bits as hash_bits
from minitlt.noise import row_key as row_key

_LOG = logging.getLogger(__name__)
INF, FLT_MAX = math.inf, torch.finfo(torch.float32).max
_P = ParamSpec("_P")
_R = TypeVar("_R")

# Which implementation runs.


@lru_cache(maxsize=1)
def _have_triton() -> bool:
    return find_spec("triton") is not None


def backend(device: torch.device) -> tuple[str, str]:
    """("ref", "cpu" or "triton"; the reason), from MINITLT_KERNELS and the device."""
    wish = os.environ.get("MINITLT_KERNELS", "auto")
    if wish not in ("auto", "ref", "triton"):
        raise ValueError(f"MINITLT_KERNELS must be auto, ref or triton, not {wish!r}")
    if wish == "ref":
        return "ref", "MINITLT_KERNELS=ref"
    if wish == "triton":
        if not _have_triton():
            raise ValueError("MINITLT_KERNELS=triton, but triton is not installed")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            hint = "TRITON_INTERPRET=1 runs the kernels there, slowly"
            raise ValueError(f"MINITLT_KERNELS=triton on {device.type} tensors; {hint}")
        return "triton", "MINITLT_KERNELS=triton"
    if device.type == "cuda" and not _have_triton():
        return "ref", "CUDA tensors, but triton is not installed"
    known = {"cuda": "triton", "cpu": "cpu"}
    return known.get(device.type, "ref"), f"{device.type} tensors"


@lru_cache(maxsize=64)
def _say_once(name: str, chosen: str, reason: str) -> None:
    _LOG.info("kernels: %s runs as %s (%s)", name, chosen, reason)


def _dispatched(ref: Callable[_P, _R], triton: str = "kernels_triton") -> Callable[_P, _R]:
    """x from x_ref: the same signature, answered by x_triton, x_cpu or x_ref itself."""
    name, modules = ref.__name__.removesuffix("_ref"), {"triton": triton, "cpu": "kernels_cpu"}

    @wraps(ref)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        chosen, reason = backend(first.device)
        fast = None
        if chosen != "ref":
            fast = getattr(import_module(f"minitlt.{modules[chosen]}"), f"{name}_{chosen}", None)
        _say_once(name, chosen if fast else "ref", reason)
        return (fast or ref)(*args, **kwargs)

    run.__name__ = run.__qualname__ = name
    return run


# Scores.


def finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, nan=-INF, posinf=FLT_MAX, neginf=-INF)


def scaled(logits_NV: Tensor, temperatures_N: Tensor) -> Tensor:
    """logits / T in fp32 (T = 0: logits), with NaN and +inf made harmless."""
    divisor_N = torch.where(temperatures_N > 0, temperatures_N, 1.0).float()
    return finite(logits_NV.float() / divisor_N[:, None])


def logprob(x: Tensor, lse: Tensor) -> Tensor:
    """x - lse, and -inf (not NaN) for a token of a row that is -inf throughout."""
    return torch.where(x == -INF, -INF, x - lse)


def _scores(
    x_NV: Tensor, keys_N: Tensor, positions_N: Tensor, temperatures_N: Tensor, ids_V: Tensor
) -> Tensor:
    noise_NV = gumbel_noise(keys_N, positions_N, ids_V)
    return torch.where((temperatures_N > 0)[:, None], x_NV + noise_NV, x_NV)


# Coupled verification.


@dataclass
class Verified:
    """What one verify step emitted. Pads: token -1, logprob 0, entropy 0, node -1.

    nodes_BD[b, i] is the tree node whose logits row decided token i. num_nan_B counts the NaN
    logits met (and read as -inf) in those rows.
    """

    tokens_BD: Tensor
    num_emit_B: Tensor
    logprobs_BD: Tensor
    entropies_BD: Tensor | None
    nodes_BD: Tensor
    num_nan_B: Tensor


class Sampled(NamedTuple):
    """One sample for each of some rows of logits, on the host."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    num_nan: list[int]


def walk(
    sample: Callable[[list[int], list[int], int], Sampled],
    tokens_BT: Tensor,
    parents_BT: Tensor,
    limits_B: Tensor | None,
    stop_ids: Sequence[int] | None,
    entropy: bool,
) -> Verified:
    """Emit the target's own sample at each node reached; go on to the child that equals it.

    sample(rows, nodes, depth) draws from the logits of node nodes[i] of row rows[i]. A row whose
    limit is 0 or less is inert: nothing is read and nothing emitted.
    """
    num_rows, num_nodes = tokens_BT.shape
    drafts, parents, stops = tokens_BT.tolist(), parents_BT.tolist(), set(stop_ids or ())
    limits = [num_nodes] * num_rows if limits_B is None else limits_B.tolist()
    tokens, nodes = ([[-1] * num_nodes for _ in range(num_rows)] for _ in range(2))
    logprobs, entropies = ([[0.0] * num_nodes for _ in range(num_rows)] for _ in range(2))
    num_emit, num_nan = [0] * num_rows, [0] * num_rows
    at = {b: 0 for b in range(num_rows) if limits[b] > 0}
    for depth in range(num_nodes):
        if not at:
            break
        rows = list(at)
        sampled = sample(rows, list(at.values()), depth)
        for b, token, logp, spread, nans in zip(rows, *sampled, strict=True):
            here = at.pop(b)
            tokens[b][depth], nodes[b][depth], num_emit[b] = token, here, depth + 1
            logprobs[b][depth], entropies[b][depth] = logp, spread
            num_nan[b] += nans
            if token in stops or num_emit[b] >= limits[b]:
                continue
            for child in range(here + 1, num_nodes):
                if parents[b][child] == here and drafts[b][child] == token:
                    at[b] = child
                    break

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=tokens_BT.device)

    def floats(values: list[list[float]]) -> Tensor:
        shaped = torch.tensor(values, dtype=torch.float32, device=tokens_BT.device)
        return shaped.view(num_rows, num_nodes)

    tokens_BD, nodes_BD = (ints(x).view(num_rows, num_nodes) for x in (tokens, nodes))
    spread_BD = floats(entropies) if entropy else None
    return Verified(tokens_BD, ints(num_emit), floats(logprobs), spread_BD, nodes_BD, ints(num_nan))


def coupled_verify_ref(
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
    """Walk a draft tree with the target's own samples; accept a draft iff it is the sample.

    Node 0 is the root (token: the last committed one); parents_BT[b, n] < n, -1 for the root and
    for pads, whose token is -1 too. A node at depth d decides the token at positions_B + d. Of
    equal children the lowest node wins. The walk ends after a token of stop_ids (which is emitted)
    or after limits_B tokens; limits_B <= 0 marks an inert row.

    Logprobs and entropies are those of softmax(logits_BTV / T) (T = 0: of softmax(logits_BTV)).
    The *sample* is taken from sample_logits_BTV instead where it is given (penalties, masks), and
    only from entries >= thresholds_BT (`sampling_thresholds`).

    Shapes: logits [B, T, V] of any float type, keys int64, positions int64, temperatures float.
    """
    ids_V = torch.arange(logits_BTV.shape[-1], device=logits_BTV.device)

    def sample(rows: list[int], nodes: list[int], depth: int) -> Sampled:
        logits_NV, temps_N = logits_BTV[rows, nodes], temperatures_B[rows]
        x_NV = scaled(logits_NV, temps_N)
        num_nan_N = logits_NV.isnan().sum(-1)
        y_NV, raw_NV = x_NV, logits_NV
        if sample_logits_BTV is not None:
            raw_NV = sample_logits_BTV[rows, nodes]
            y_NV = scaled(raw_NV, temps_N)
            num_nan_N += raw_NV.isnan().sum(-1)
        if thresholds_BT is not None:
            y_NV = y_NV.masked_fill(raw_NV.float() < thresholds_BT[rows, nodes, None], -INF)
        score_NV = _scores(y_NV, keys_B[rows], positions_B[rows] + depth, temps_N, ids_V)
        token_N = score_NV.argmax(-1)
        logp_N = logprob(x_NV.gather(1, token_N[:, None])[:, 0], x_NV.logsumexp(-1))
        logp_NV = x_NV.log_softmax(-1)
        entropy_N = -torch.nan_to_num(logp_NV.exp() * logp_NV, nan=0.0).sum(-1)
        return Sampled(token_N.tolist(), logp_N.tolist(), entropy_N.tolist(), num_nan_N.tolist())

    return walk(sample, tokens_BT, parents_BT, limits_B, stop_ids, entropy)


coupled_verify = _dispatched(coupled_verify_ref)


class TopK(NamedTuple):
    """The k best proposals of each row, best first."""

    tokens_Nk: Tensor  # target ids
    index_Nk: Tensor  # rows of the draft vocabulary
    scores_Nk: Tensor
    logprobs_Nk: Tensor


def gumbel_topk_ref(
    logits_NV: Tensor,
    keys_N: Tensor,
    positions_N: Tensor,
    temperatures_N: Tensor,
    k: int,
    ids_V: Tensor | None = None,
) -> TopK:
    """The k tokens with the largest logits / T + noise: what the target's sample will likely be.

    ids_V int64 maps a row of a reduced draft vocabulary to its target id (ascending); the noise is
    keyed by the *target* id. k = 1 is the coupled chain proposal; k > 1 is a sample without
    replacement, the children of a tree node. T = 0: plain top-k. Ties: lowest id.
    """
    if not 1 <= k <= logits_NV.shape[1]:
        raise ValueError(f"k must be in 1..{logits_NV.shape[1]}, not {k}")
    ids = torch.arange(logits_NV.shape[1], device=logits_NV.device) if ids_V is None else ids_V
    x_NV = scaled(logits_NV, temperatures_N)
    score_NV = _scores(x_NV, keys_N, positions_N, temperatures_N, ids)
    score_NV, order_NV = score_NV.sort(dim=-1, descending=True, stable=True)
    index_Nk = order_NV[:, :k]
    logprob_Nk = logprob(x_NV.gather(1, index_Nk), x_NV.logsumexp(-1, keepdim=True))
    return TopK(ids[index_Nk], index_Nk, score_NV[:, :k], logprob_Nk)


gumbel_topk = _dispatched(gumbel_topk_ref)
_TOP_P_FIRST = 256  # tokens that nearly always hold the nucleus


def sampling_thresholds(
    logits_NV: Tensor, temperatures_N: Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0
) -> Tensor:
    """The smallest logit [N] that temperature -> top_k -> top_p -> min_p keep (not divided by T).

    The kept set {v: logit >= threshold} is the one of transformers' processors in that order. One
    difference: tokens that tie with the last one of the nucleus are all kept, where a sort keeps
    an arbitrary part of them. 0, 1.0 and 0.0 switch a filter off. T = 0 rows: -inf (keep all).
    """
    if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
        raise ValueError(f"need top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1: {top_k, top_p, min_p}")
    if len(logits_NV) == 1:  # torch has each thread sum a part of a lone row: other bits
        twice = logits_NV.repeat(2, 1), temperatures_N.repeat(2)
        return sampling_thresholds(*twice, top_k, top_p, min_p)[:1]
    x_NV = scaled(logits_NV, temperatures_N)
    top_N1 = x_NV.amax(-1, keepdim=True)
    keep_NV, vocab = x_NV > -INF, x_NV.shape[1]
    if 0 < top_k < vocab:
        keep_NV &= x_NV >= x_NV.topk(top_k).values[:, -1:]
    if top_p < 1:
        lse_N1 = x_NV.masked_fill(~keep_NV, -INF).logsumexp(-1, keepdim=True)
        limit = min(top_k or vocab, vocab)
        size = min(limit, _TOP_P_FIRST)
        while True:
            best_Nk = x_NV.topk(size).values
            mass_Nk = (best_Nk - lse_N1).exp().cumsum(-1)
            if size == limit or bool((mass_Nk[:, -1] >= top_p).all()):
                break
            size = min(8 * size, limit)
        above_Nk = torch.cat([torch.zeros_like(mass_Nk[:, :1]), mass_Nk[:, :-1]], dim=1)
        last_N1 = (above_Nk < top_p).sum(-1, keepdim=True) - 1
        keep_NV &= x_NV >= best_Nk.gather(1, last_N1)
    if min_p > 0:
        keep_NV &= (x_NV - top_N1).exp() >= min_p
    threshold_N = logits_NV.float().masked_fill(~keep_NV, INF).amin(-1)
    return torch.where(temperatures_N > 0, threshold_N, -INF)


# The ratio test: rejection and block verification, for drafts that were drawn with other noise.


def accept_chances(
    ratio_BK: Tensor, num_drafts_B: Tensor, residual_mass: Callable[[Tensor], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """(chance [B, K] that coin i comes up, carry [B, K + 1]); residual weights are carry p - q.

    ratio_BK = p(d_i) / q(d_i). Token rule (residual_mass None; Leviathan et al., 2211.17192):
    chance = ratio, carry = 1. Block rule (Sun et al., arXiv 2403.10444): carry_i =
    min(carry_{i-1} ratio_i, 1) and chance = Z / (Z + 1 - carry_i), where Z =
    residual_mass(carry)[:, i] = sum_v max(carry_i p - q, 0) in the row behind draft i; the last
    draft's chance is carry_i.
    """
    one_B1 = torch.ones_like(ratio_BK[:, :1])
    if residual_mass is None:
        return ratio_BK, torch.cat([one_B1, torch.ones_like(ratio_BK)], dim=1)
    carry = [one_B1[:, 0]]
    for ratio_B in ratio_BK.unbind(1):
        carry.append((carry[-1] * ratio_B).clamp(max=1.0))
    carry_BK1 = torch.stack(carry, dim=1)
    carry_BK, mass_BK = carry_BK1[:, 1:], residual_mass(carry_BK1[:, 1:])
    rest_BK = mass_BK + 1.0 - carry_BK
    # 0 / 0: this block is certain and p = q behind it, so the next one is certain as well
    chance_BK = torch.where(rest_BK > 0, mass_BK / rest_BK, 1.0)
    place_K = torch.arange(1, ratio_BK.shape[1] + 1, device=ratio_BK.device)
    return torch.where(place_K == num_drafts_B[:, None], carry_BK, chance_BK), carry_BK1


def num_accepted(passed_BK: Tensor, block: bool) -> Tensor:
    """Drafts accepted [B]: up to the first failed coin; by the block rule, up to the *last* coin
    that came up, whatever failed before it."""
    if not block:
        return passed_BK.long().cumprod(1).sum(1)
    place_K = torch.arange(1, passed_BK.shape[1] + 1, device=passed_BK.device)
    return torch.cat([place_K.new_zeros(len(passed_BK), 1), passed_BK * place_K], dim=1).amax(1)


def coins(keys_B: Tensor, positions_B: Tensor, num: int) -> Tensor:
    """Uniforms in [0, 1) for the drafts at positions, positions + 1, ..: [B, num]."""
    at_BK = positions_B[:, None] + torch.arange(num, device=keys_B.device)
    row0, row1 = row_words(stream_keys(keys_B, "accept")[:, None].expand_as(at_BK), at_BK)
    return (token_bits(row0, row1, torch.zeros_like(at_BK)) >> 8).float() * 2.0**-24


def residual(p_NV: Tensor, q_NV: Tensor, carry_N: Tensor) -> Tensor:
    """Weights of the token after a rejection: max(carry p - q, 0), or p where that is empty."""
    weights_NV = (carry_N[:, None] * p_NV - q_NV).clamp(min=0.0)
    return torch.where(weights_NV.sum(-1, keepdim=True) > 0, weights_NV, p_NV)


def _law(logits_BTV: Tensor, temperatures_B: Tensor) -> Tensor:
    """softmax(logits / T); one-hot at T = 0, and at token 0 for a row of -inf. fp32 [B, T, V]."""
    heat_N = temperatures_B.repeat_interleave(logits_BTV.shape[1])
    x_NV = scaled(logits_BTV.flatten(0, 1), heat_N)
    top_N1, token_N1 = x_NV.max(-1, keepdim=True)
    sure_NV = torch.zeros_like(x_NV).scatter_(-1, token_N1, 1.0)
    certain_N1 = (heat_N[:, None] == 0) | (top_N1 == -INF)
    return torch.where(certain_N1, sure_NV, x_NV.softmax(-1)).view(logits_BTV.shape)


def emit(
    tokens_BD: Tensor,
    num_accepted_B: Tensor,
    logprobs_BD: Tensor,
    num_nan_BD: Tensor,
    limits_B: Tensor | None,
    stop_ids: Sequence[int] | None,
) -> Verified:
    """Cut accepted drafts + one sample per row at the first stop id (kept) and at the limit."""
    place_D = torch.arange(tokens_BD.shape[1], device=tokens_BD.device)
    num_B = num_accepted_B + 1
    if stop_ids is not None and len(stop_ids):
        stops = torch.as_tensor(stop_ids, device=tokens_BD.device)
        stop_BD = torch.isin(tokens_BD, stops) & (place_D < num_B[:, None])
        num_B = torch.where(stop_BD, place_D + 1, num_B[:, None]).amin(1)
    if limits_B is not None:
        num_B = torch.minimum(num_B, limits_B.clamp(min=0))
    live_BD = place_D < num_B[:, None]
    tokens_BD, logprobs_BD = (
        torch.where(live_BD, tokens_BD, -1),
        torch.where(live_BD, logprobs_BD, 0.0),
    )
    nodes_BD = torch.where(live_BD, place_D, -1)
    num_nan_B = num_nan_BD.masked_fill(~live_BD, 0).sum(1)
    return Verified(tokens_BD, num_B, logprobs_BD, None, nodes_BD, num_nan_B)


def rejection_verify(
    logits_BTV: Tensor,
    draft_logits_BKV: Tensor | None,
    drafts_BK: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperatures_B: Tensor,
    *,
    block: bool = False,
    limits_B: Tensor | None = None,
    stop_ids: Sequence[int] | None = None,
) -> Verified:
    """Classic speculative sampling of a chain: accept d_i if u_i < p(d_i) / q(d_i), else resample.

    logits_BTV holds T = K + 1 rows: row i follows i drafts. q = softmax(draft_logits / T) must be
    the law the drafts were drawn from, with noise of stream_keys(keys, "draft"); None means that
    the drafts were chosen, not drawn (q is one-hot). Rows may hold fewer drafts: pads are -1, at
    the end.
    """
    (num_rows, num_drafts), device = drafts_BK.shape, logits_BTV.device
    if num_drafts < 1:
        raise ValueError("drafts_BK needs a column; -1 marks a row that has no draft")
    num_drafts_B, safe_BK = (drafts_BK >= 0).sum(1), drafts_BK.clamp(min=0)
    p_BTV = _law(logits_BTV, temperatures_B)
    one_hot_BKV = torch.zeros_like(p_BTV[:, :num_drafts]).scatter_(-1, safe_BK[..., None], 1.0)
    q_BKV = one_hot_BKV if draft_logits_BKV is None else _law(draft_logits_BKV, temperatures_B)
    p_BK = p_BTV[:, :num_drafts].gather(-1, safe_BK[..., None])[..., 0]
    q_BK = q_BKV.gather(-1, safe_BK[..., None])[..., 0]
    ratio_BK = torch.where(p_BK > 0, p_BK / q_BK, 0.0)
    q_BTV = torch.cat([q_BKV, torch.zeros_like(p_BTV[:, :1])], dim=1)
    rows = torch.arange(num_rows, device=device)
    q_BTV[rows, num_drafts_B] = 0.0  # nothing was drafted behind the last draft

    def mass(carry_BK: Tensor) -> Tensor:
        return (carry_BK[..., None] * p_BTV[:, 1:] - q_BTV[:, 1:]).clamp(min=0.0).sum(-1)

    chance_BK, carry_BT = accept_chances(ratio_BK, num_drafts_B, mass if block else None)
    passed_BK = (coins(keys_B, positions_B, num_drafts) < chance_BK) & (drafts_BK >= 0)
    tau_B = num_accepted(passed_BK, block)
    weights_BV = residual(p_BTV[rows, tau_B], q_BTV[rows, tau_B], carry_BT[rows, tau_B])
    ids_V, stream_B = torch.arange(p_BTV.shape[-1], device=device), stream_keys(keys_B, "residual")
    noise_BV = gumbel_noise(stream_B, positions_B + tau_B, ids_V)
    tokens_BT = torch.cat([safe_BK, safe_BK.new_zeros(num_rows, 1)], dim=1)
    tokens_BT[rows, tau_B] = (weights_BV.log() + noise_BV).argmax(-1)
    x_NV = scaled(logits_BTV.flatten(0, 1), temperatures_B.repeat_interleave(num_drafts + 1))
    logp_N = logprob(x_NV.gather(1, tokens_BT.view(-1, 1))[:, 0], x_NV.logsumexp(-1))
    num_nan_BT = logits_BTV.isnan().sum(-1)
    return emit(tokens_BT, tau_B, logp_N.view_as(tokens_BT), num_nan_BT, limits_B, stop_ids)


def block_verify(*args: Any, **kwargs: Any) -> Verified:
    """`rejection_verify` with the block rule: accepts at least as many drafts on average."""
    return rejection_verify(*args, block=True, **kwargs)


# Attention of a draft tree over the slots of a ragged cache.


def tree_attention_ref(
    q_BHTD: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    lengths_B: Tensor,
    ancestors_BT: Tensor,
    scale: float,
) -> Tensor:
    """Each of T <= 64 nodes attends to its row's context and its ancestors; returns [B, H, T, D].

    Row b owns slot b of k_slots, v_slots [S, Hkv, L, D], S >= B: context at positions
    0..lengths_B - 1, node j at lengths_B + j. Bit j of ancestors_BT[b, t] says that node t sees
    node j (itself included). H / Hkv query heads share a key head. Rows with lengths_B < 0 are
    inert and return 0. Softmax and sums are fp32.
    """
    num_rows, _, num_nodes, width = q_BHTD.shape
    num_kv, length = k_slots.shape[1:3]
    place_L = torch.arange(length, device=q_BHTD.device) - lengths_B[:, None, None]
    is_node = (place_L >= 0) & (place_L < num_nodes)
    bits = (ancestors_BT[..., None] >> place_L.clamp(0, 63)) & 1
    seen_BTL = ((place_L < 0) | (is_node & (bits == 1))) & (lengths_B >= 0)[:, None, None]
    q = q_BHTD.float().view(num_rows, num_kv, -1, num_nodes, width)
    score = torch.einsum("bhgtd,bhld->bhgtl", q, k_slots[:num_rows].float()) * scale
    weight = score.masked_fill(~seen_BTL[:, None, None], -INF).softmax(-1).nan_to_num(0.0)
    out = torch.einsum("bhgtl,bhld->bhgtd", weight, v_slots[:num_rows].float())
    return out.reshape(q_BHTD.shape).to(q_BHTD.dtype)


tree_attention = _dispatched(tree_attention_ref, "kernels_triton_model")


# The drafter's loss.


class DraftLoss(NamedTuple):
    loss_N: Tensor
    acceptance_N: Tensor  # sum_v min(p, q), detached: the best possible chance to be accepted


def mix(kind: str, acceptance_N: Tensor, eta: float) -> tuple[Any, Any]:
    """Weights of (KL, TV). "lk": w = exp(-eta mean acceptance), w KL + (1 - w) TV."""
    if kind not in ("kl", "tv", "lk"):
        raise ValueError(f"draft loss {kind!r} mixes no KL and TV (kl, tv, lk do); if the "
                         "definition has it, set MINITLT_KERNELS=ref")  # fmt: skip
    if kind != "lk":
        return (1.0, 0.0) if kind == "kl" else (0.0, 1.0)
    weight = (acceptance_N.mean() * -eta).exp() if acceptance_N.numel() else torch.tensor(1.0)
    return weight, 1.0 - weight


def draft_loss_ref(
    logits_NV: Tensor, teacher_NV: Tensor, kind: str = "lk", eta: float = 3.0
) -> DraftLoss:
    """KL(p || q), total variation, or their mixture "lk", per row; p teacher, q draft, fp32.

    Both logits cover the draft vocabulary's rows only; the teacher gets no gradient. The mixture
    (arXiv 2602.23881) starts as KL, whose gradient is useful from scratch, and turns into TV, which
    is what acceptance is made of, as the mean acceptance of the batch grows.
    """
    logp_NV = teacher_NV.detach().float().log_softmax(-1)
    logq_NV = logits_NV.float().log_softmax(-1)
    p_NV, q_NV = logp_NV.exp(), logq_NV.exp()
    kl_N = torch.where(p_NV > 0, p_NV * (logp_NV - logq_NV), 0.0).sum(-1)
    tv_N = 0.5 * (p_NV - q_NV).abs().sum(-1)
    acceptance_N = torch.minimum(p_NV, q_NV).sum(-1).detach()
    kl_weight, tv_weight = mix(kind, acceptance_N, eta)
    return DraftLoss(kl_weight * kl_N + tv_weight * tv_N, acceptance_N)


draft_loss = _dispatched(draft_loss_ref, "kernels_triton_model")
