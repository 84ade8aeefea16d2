"""The Triton kernels of `kernels`. Read that module's docstring first.

Every vocabulary pass has the same shape: program (row, tile) reads one tile of one row once and
writes a few numbers; a second, small launch combines a row's tiles in ascending order. The tiles of
a row depend on V alone, never on the batch, so a row's result does not either.

Noise and scores are compiled without fused multiply-adds (`_EXACT`): a fused add rounds once where
the definition rounds twice, and the bits would differ. Everything else may fuse.

What the interpreter (TRITON_INTERPRET=1) can run decides the dialect: no autotuning, no libdevice,
no bf16 arithmetic. Left out: launches on a device that is not the current one.

Letters: as in `kernels`; J tiles per row, N programs' rows; kernel arguments named *_ptr are
pointers, s* strides; constexpr arguments are upper case.
"""
# mypy: disable-error-code="no-untyped-def"

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitlt import kernels as defs
from minitlt import noise as draws
from minitlt.kernels import TopK, Verified

BLOCK = 8192  # logits per program of a vocabulary pass
TOPK_BLOCK = 1024
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}

_TOKEN, _MIX1, _MIX2 = tl.constexpr(draws.TOKEN), tl.constexpr(draws.MIX1), tl.constexpr(draws.MIX2)
_SEED0, _SEED1 = tl.constexpr(draws.SEEDS[0]), tl.constexpr(draws.SEEDS[1])
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7 = (tl.constexpr(c) for c in draws.LOG_POLY)
_LN2_HI, _LN2_LO = tl.constexpr(draws.LN2_HI), tl.constexpr(draws.LN2_LO)
_SQRT_HALF, _SMALL_U = tl.constexpr(draws.SQRT_HALF_BITS), tl.constexpr(draws.SMALL_U)
_INF, _FLT_MAX = tl.constexpr(defs.INF), tl.constexpr(defs.FLT_MAX)
_UNIT, _LOG2_E = tl.constexpr(2.0**-32), tl.constexpr(1.4426950408889634)
# log u of a hash h, from the bits of float(h): (bits / 2^23 - 127 - 32) ln 2, never too large
_BIT_LN2, _BOUND_TOP = tl.constexpr(math.log(2) * 2.0**-23), tl.constexpr(159 * math.log(2))
_NUM_F, _NUM_I = tl.constexpr(5), tl.constexpr(2)  # numbers that `_tiles_kernel` leaves per tile


def scratch(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised memory; every kernel writes what another one reads (tests poison it)."""
    return torch.empty(shape, dtype=dtype, device=device)


# The noise, as in the definition.


@triton.jit
def _absorb(h, word):
    k = word * 0xCC9E2D51
    k = (k << 15) | (k >> 17)
    h = h ^ (k * 0x1B873593)
    h = (h << 13) | (h >> 19)
    return h * 5 + 0xE6546B64


@triton.jit
def _row_word(key, position, SEED: tl.constexpr):
    h = _absorb(SEED, key.to(tl.uint32))
    h = _absorb(h, (key >> 32).to(tl.uint32))
    h = _absorb(h, position.to(tl.uint32))
    h = (h ^ (h >> 16)) * _MIX1
    h = (h ^ (h >> 13)) * _MIX2
    return h ^ (h >> 16)


@triton.jit
def _token_bits(row0, row1, ids):
    h = row0 ^ (ids.to(tl.uint32) * _TOKEN)
    h = (h ^ (h >> 16)) * _MIX1 + row1
    h = (h ^ (h >> 13)) * _MIX2
    return h ^ (h >> 16)


@triton.jit
def _log(f, exponent):
    square = f * f
    poly = ((_C7 * f + _C6) * f + _C5) * f + _C4
    poly = (((poly * f + _C3) * f + _C2) * f + _C1) * f + _C0
    tail = poly * f * square + exponent * _LN2_LO - 0.5 * square
    return (f + tail) + exponent * _LN2_HI


@triton.jit
def _split(y):
    bits = y.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF) >> 23
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    return f, exponent.to(tl.float32)


@triton.jit
def _gumbel(bits):
    u = (bits.to(tl.float32) + 0.5) * _UNIT
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * _UNIT
    f, exponent = _split(rest)
    small = u < _SMALL_U
    waiting = -_log(tl.where(small, -u, f), tl.where(small, 0.0, exponent))
    f, exponent = _split(waiting)
    return -_log(f, exponent)


# Pieces of a vocabulary pass.


@triton.jit
def _scaled(raw, temperature):
    """logits / T, clean; division is the rounded one of the definition, skipped where it is 1."""
    x = raw
    if (temperature > 0) & (temperature != 1.0):
        x = tl.div_rn(raw, temperature)
    return tl.minimum(tl.where(x != x, -_INF, x), _FLT_MAX)


@triton.jit
def _softmax_tile(raw, temperature):
    """(x = logits / T, clean; max x; exp(x - max); their sum; number of NaN). All -inf: sum 0.

    NaN and +inf show up in the sum of the weights, so that only a tile that has some pays for
    looking.
    """
    x = raw
    if (temperature > 0) & (temperature != 1.0):
        x = tl.div_rn(raw, temperature)
    top = tl.maximum(tl.max(x, axis=0), -_FLT_MAX)
    weights = tl.exp2((x - top) * _LOG2_E)
    total = tl.sum(weights, axis=0)
    num_nan = 0
    if total != total:
        num_nan = tl.sum((raw != raw).to(tl.int32), axis=0)
        x = tl.minimum(tl.where(x != x, -_INF, x), _FLT_MAX)
        top = tl.maximum(tl.max(x, axis=0), -_FLT_MAX)
        weights = tl.exp2((x - top) * _LOG2_E)
        total = tl.sum(weights, axis=0)
    return x, top, weights, total, num_nan


@triton.jit
def _sampled_from(raw, temperature, threshold):
    return tl.where(raw < threshold, -_INF, _scaled(raw, temperature))


@triton.jit
def _combine(top, total):
    """logsumexp of a row from its tiles' (max, sum), and each tile's factor."""
    row_top = tl.max(top, axis=0)
    factor = tl.exp(top - row_top)
    row_total = tl.sum(total * factor, axis=0)
    f, exponent = _split(row_total)
    log_total = tl.where(row_total > 0, _log(f, exponent), -_INF)
    return row_top, row_total, log_total, factor


@triton.jit
def _logprob(x, lse):
    return tl.where(x == -_INF, -_INF, x - lse)


# Coupled verification.


@triton.jit
def _winner(
    y, y_top, y_ptr, row0, row1, temperature, threshold, first, V,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """(best score, its lowest id) of a tile.

    E >= u and log2 (1 + f) >= f: the bits of the float u, read as an integer, are a lower bound on
    log E. Groups whose bound beats the best score so far are scored exactly.
    """
    ids = first + tl.arange(0, BLOCK)
    bits = _token_bits(row0, row1, ids).to(tl.float32).to(tl.int32, bitcast=True)
    bound = tl.fma(bits.to(tl.float32), -_BIT_LN2, y)
    groups = tl.max(tl.reshape(bound, (BLOCK // GROUP, GROUP)), axis=1) + _BOUND_TOP
    group_index, member = tl.arange(0, BLOCK // GROUP), tl.arange(0, GROUP)
    slack = (tl.abs(y_top) + 64.0) * 4.76837158e-07 + 1e-4  # rounding of scores, 4 ulp
    best, best_id = tl.full((), -_INF, tl.float32), first
    most = tl.max(groups, axis=0)
    while (most > -_INF) & (most + slack >= best):
        group = tl.min(tl.where(groups == most, group_index, BLOCK), axis=0)
        at = first + group * GROUP + member
        again = tl.load(y_ptr + at, mask=at < V, other=-_INF).to(tl.float32)
        noise = _gumbel(_token_bits(row0, row1, at))
        score = _sampled_from(again, temperature, threshold) + noise
        high = tl.max(score, axis=0)
        hit = tl.min(tl.where(score == high, at, V), axis=0)
        better = (high > best) | ((high == best) & (hit < best_id))
        best_id = tl.where(better, hit, best_id)
        best = tl.maximum(best, high)
        groups = tl.where(group_index == group, -_INF, groups)
        most = tl.max(groups, axis=0)
    return best, best_id


@triton.jit
def _tiles_kernel(
    logits_ptr, sample_ptr, thresholds_ptr, keys_ptr, positions_ptr, temperatures_ptr,
    tokens_ptr, parents_ptr, limits_ptr, floats_ptr, ints_ptr,
    slb, slt, ssb, sst, T, V, J,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, SAMPLE: tl.constexpr, THRESHOLD: tl.constexpr,
    LIMITED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Launch 1: what one tile of one node's logits contributes."""
    row, tile = tl.program_id(0), tl.program_id(1)
    b, node = row // T, row % T
    if (node > 0) & (tl.load(tokens_ptr + row) < 0):
        return  # a pad: the walk never comes here
    limit = 1
    if LIMITED:
        limit = tl.load(limits_ptr + b)
    if limit <= 0:
        return  # an inert row
    temperature = tl.load(temperatures_ptr + b)
    first = tile * BLOCK
    ids = first + tl.arange(0, BLOCK)
    x_ptr = logits_ptr + b.to(tl.int64) * slb + node.to(tl.int64) * slt
    x = tl.load(x_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
    x, top, weights, total, num_nan = _softmax_tile(x, temperature)
    spread = 0.0
    if ENTROPY:
        spread = tl.sum(tl.where(weights > 0, (x - top) * weights, 0.0), axis=0)
    y, y_top, y_ptr, threshold = x, top, x_ptr, -_INF
    if THRESHOLD:
        threshold = tl.load(thresholds_ptr + row)
    if SAMPLE:
        y_ptr = sample_ptr + b.to(tl.int64) * ssb + node.to(tl.int64) * sst
    if SAMPLE or THRESHOLD:
        raw = tl.load(y_ptr + ids, mask=ids < V, other=-_INF).to(tl.float32)
        if SAMPLE:
            num_nan += tl.sum((raw != raw).to(tl.int32), axis=0)
        y = _sampled_from(raw, temperature, threshold)
        y_top = tl.maximum(tl.max(y, axis=0), -_FLT_MAX)
    if temperature > 0:
        position = tl.load(positions_ptr + b)
        up = tl.load(parents_ptr + row)
        while up >= 0:
            position += 1
            up = tl.load(parents_ptr + b * T + up)
        key = tl.load(keys_ptr + b)
        row0, row1 = _row_word(key, position, _SEED0), _row_word(key, position, _SEED1)
        best, best_id = _winner(
            y, y_top, y_ptr, row0, row1, temperature, threshold, first, V, BLOCK, GROUP
        )
    else:
        best = tl.max(y, axis=0)
        best_id = tl.min(tl.where(y == best, ids, V), axis=0)
    x_best = _scaled(tl.load(x_ptr + best_id).to(tl.float32), temperature)
    floats_ptr += row * _NUM_F * J + tile
    tl.store(floats_ptr, top)
    tl.store(floats_ptr + J, total)
    if ENTROPY:
        tl.store(floats_ptr + 2 * J, spread)
    tl.store(floats_ptr + 3 * J, best)
    tl.store(floats_ptr + 4 * J, x_best)
    ints_ptr += row * _NUM_I * J + tile
    tl.store(ints_ptr, best_id)
    tl.store(ints_ptr + J, num_nan)


@triton.jit
def _walk_kernel(
    floats_ptr, ints_ptr, tokens_ptr, parents_ptr, limits_ptr, stops_ptr,
    out_tokens_ptr, out_num_ptr, out_logprobs_ptr, out_entropies_ptr, out_nodes_ptr, out_nan_ptr,
    T, J, num_stops,
    T2: tl.constexpr, J2: tl.constexpr, STOPS2: tl.constexpr,
    LIMITED: tl.constexpr, STOPS: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Launch 2: one program per sequence combines tiles and walks the tree."""
    b = tl.program_id(0)
    n, j = tl.arange(0, T2), tl.arange(0, J2)
    drafts = tl.load(tokens_ptr + b * T + n, mask=n < T, other=-1)
    parents = tl.load(parents_ptr + b * T + n, mask=n < T, other=-1)
    limit = b * 0 + T  # a value, where T = 1 is a constant: the loop below carries what follows
    if LIMITED:
        limit = tl.minimum(tl.load(limits_ptr + b), T).to(tl.int32)
    tokens, nodes = tl.full((T2,), -1, tl.int64), tl.full((T2,), -1, tl.int64)
    logprobs, entropies = tl.zeros((T2,), tl.float32), tl.zeros((T2,), tl.float32)
    num_emit, node, num_nan = b * 0, b * 0, b * 0
    alive = limit > 0
    while alive:
        f_ptr = floats_ptr + (b * T + node) * _NUM_F * J + j
        i_ptr = ints_ptr + (b * T + node) * _NUM_I * J + j
        top = tl.load(f_ptr, mask=j < J, other=-_FLT_MAX)
        total = tl.load(f_ptr + J, mask=j < J, other=0.0)
        row_top, row_total, log_total, factor = _combine(top, total)
        best = tl.load(f_ptr + 3 * J, mask=j < J, other=-_INF)
        tile = tl.min(tl.where(best == tl.max(best, axis=0), j, J2), axis=0)
        x = tl.load(floats_ptr + ((b * T + node) * _NUM_F + 4) * J + tile)
        token = tl.load(ints_ptr + (b * T + node) * _NUM_I * J + tile).to(tl.int64)
        here = n == num_emit
        tokens, nodes = tl.where(here, token, tokens), tl.where(here, node.to(tl.int64), nodes)
        logprobs = tl.where(here, _logprob(x, row_top + log_total), logprobs)
        if ENTROPY:
            spread = tl.load(f_ptr + 2 * J, mask=j < J, other=0.0)
            spread = tl.where(factor > 0, (spread + (top - row_top) * total) * factor, 0.0)
            entropy = log_total - tl.sum(spread, axis=0) / row_total
            entropies = tl.where(here, tl.where(row_total > 0, entropy, 0.0), entropies)
        num_nan += tl.sum(tl.load(i_ptr + J, mask=j < J, other=0), axis=0)
        num_emit += 1
        child = tl.min(tl.where((parents == node) & (drafts == token), n, T2), axis=0)
        alive = (num_emit < limit) & (child < T2)
        if STOPS:
            s = tl.arange(0, STOPS2)
            stops = tl.load(stops_ptr + s, mask=s < num_stops, other=-1)
            alive = alive & (tl.sum((stops == token).to(tl.int32), axis=0) == 0)
        node = child
    tl.store(out_tokens_ptr + b * T + n, tokens, mask=n < T)
    tl.store(out_nodes_ptr + b * T + n, nodes, mask=n < T)
    tl.store(out_logprobs_ptr + b * T + n, logprobs, mask=n < T)
    if ENTROPY:
        tl.store(out_entropies_ptr + b * T + n, entropies, mask=n < T)
    tl.store(out_num_ptr + b, num_emit.to(tl.int64))
    tl.store(out_nan_ptr + b, num_nan.to(tl.int64))


@lru_cache(maxsize=16)
def _stop_tensor(stop_ids: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(stop_ids, dtype=torch.int64, device=device)


def rows_last(x: Tensor) -> Tensor:
    """x with unit stride along the vocabulary, which the kernels rely on."""
    return x if x.stride(-1) == 1 else x.contiguous()


def coupled_verify_triton(
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
    """`coupled_verify` in two launches."""
    (num_rows, num_nodes, vocab), device = logits_BTV.shape, logits_BTV.device
    block = min(BLOCK, triton.next_power_of_2(vocab))
    num_tiles = triton.cdiv(vocab, block)
    logits = rows_last(logits_BTV)
    sample = logits if sample_logits_BTV is None else rows_last(sample_logits_BTV)
    tokens, parents = tokens_BT.contiguous(), parents_BT.contiguous()
    thresholds = logits if thresholds_BT is None else thresholds_BT.float().contiguous()
    limits = tokens if limits_B is None else limits_B
    stops = _stop_tensor(tuple(stop_ids or ()), device)
    total = num_rows * num_nodes
    floats = scratch(total, _NUM_F.value, num_tiles, dtype=torch.float32, device=device)
    ints = scratch(total, _NUM_I.value, num_tiles, dtype=torch.int32, device=device)
    out_BD, nodes_BD = torch.empty(2, num_rows, num_nodes, dtype=torch.int64, device=device)
    logps_BD, spread_BD = torch.empty(2, num_rows, num_nodes, dtype=torch.float32, device=device)
    num_B, nan_B = torch.empty(2, num_rows, dtype=torch.int64, device=device)
    verified = Verified(out_BD, num_B, logps_BD, spread_BD if entropy else None, nodes_BD, nan_B)
    if total == 0:
        return verified
    _tiles_kernel[(total, num_tiles)](
        logits, sample, thresholds, keys_B, positions_B, temperatures_B.float(), tokens, parents,
        limits, floats, ints, *logits.stride()[:2], *sample.stride()[:2], num_nodes, vocab,
        num_tiles, block, min(32, block), sample_logits_BTV is not None,
        thresholds_BT is not None, limits_B is not None, entropy, num_warps=8, **_EXACT,
    )  # fmt: skip
    _walk_kernel[(num_rows,)](
        floats, ints, tokens, parents, limits, stops, out_BD, num_B, logps_BD, spread_BD, nodes_BD,
        nan_B, num_nodes, num_tiles, stops.numel(), triton.next_power_of_2(num_nodes),
        triton.next_power_of_2(num_tiles), triton.next_power_of_2(max(stops.numel(), 1)),
        limits_B is not None, stops.numel() > 0, entropy, num_warps=1, **_EXACT,
    )  # fmt: skip
    return verified


# The drafter's proposals.


@triton.jit
def _topk_tiles_kernel(
    logits_ptr, keys_ptr, positions_ptr, temperatures_ptr, map_ptr, stats_ptr, scores_ptr, at_ptr,
    sl, V, J, K: tl.constexpr, BLOCK: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The K best of one tile, and its (max, sum). -FLT_MAX stands for -inf, -inf for no token."""
    row, tile = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    index = tile * BLOCK + lane
    inside = index < V
    temperature = tl.load(temperatures_ptr + row)
    raw = tl.load(logits_ptr + row.to(tl.int64) * sl + index, mask=inside, other=-_INF)
    x, top, _, total, _ = _softmax_tile(raw.to(tl.float32), temperature)
    tl.store(stats_ptr + row * 2 * J + tile, top)
    tl.store(stats_ptr + row * 2 * J + J + tile, total)
    score = x
    if temperature > 0:
        key, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)
        ids = index.to(tl.int64)
        if MAPPED:
            ids = tl.load(map_ptr + index, mask=inside, other=0)
        row0, row1 = _row_word(key, position, _SEED0), _row_word(key, position, _SEED1)
        score = x + _gumbel(_token_bits(row0, row1, ids))
    score = tl.where(inside, tl.maximum(score, -_FLT_MAX), -_INF)
    for i in range(K):
        best, at = tl.max(score, axis=0, return_indices=True)
        tl.store(scores_ptr + (row * J + tile) * K + i, best)
        tl.store(at_ptr + (row * J + tile) * K + i, tile * BLOCK + at)
        score = tl.where(lane == at, -_INF, score)


@triton.jit
def _topk_merge_kernel(
    logits_ptr, temperatures_ptr, map_ptr, stats_ptr, scores_ptr, at_ptr,
    out_tokens_ptr, out_index_ptr, out_scores_ptr, out_logprobs_ptr,
    sl, J, K: tl.constexpr, J2: tl.constexpr, C2: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The K best of the tiles' bests, which stand in ascending order of tile: ties go down."""
    row = tl.program_id(0)
    j, c = tl.arange(0, J2), tl.arange(0, C2)
    top = tl.load(stats_ptr + row * 2 * J + j, mask=j < J, other=-_FLT_MAX)
    total = tl.load(stats_ptr + row * 2 * J + J + j, mask=j < J, other=0.0)
    row_top, _, log_total, _ = _combine(top, total)
    temperature = tl.load(temperatures_ptr + row)
    score = tl.load(scores_ptr + row * J * K + c, mask=c < J * K, other=-_INF)
    for i in range(K):
        best, at = tl.max(score, axis=0, return_indices=True)
        index = tl.load(at_ptr + row * J * K + at).to(tl.int64)
        x = tl.load(logits_ptr + row.to(tl.int64) * sl + index).to(tl.float32)
        token = index
        if MAPPED:
            token = tl.load(map_ptr + index)
        tl.store(out_tokens_ptr + row * K + i, token)
        tl.store(out_index_ptr + row * K + i, index)
        tl.store(out_scores_ptr + row * K + i, tl.where(best == -_FLT_MAX, -_INF, best))
        logprob = _logprob(_scaled(x, temperature), row_top + log_total)
        tl.store(out_logprobs_ptr + row * K + i, logprob)
        score = tl.where(c == at, -_INF, score)


def gumbel_topk_triton(
    logits_NV: Tensor,
    keys_N: Tensor,
    positions_N: Tensor,
    temperatures_N: Tensor,
    k: int,
    ids_V: Tensor | None = None,
) -> TopK:
    """`gumbel_topk` in two launches."""
    (num_rows, vocab), device = logits_NV.shape, logits_NV.device
    if not 1 <= k <= vocab:
        raise ValueError(f"k must be in 1..{vocab}, not {k}")
    block = min(TOPK_BLOCK, triton.next_power_of_2(vocab))
    num_tiles = triton.cdiv(vocab, block)
    logits, temperatures = rows_last(logits_NV), temperatures_N.float()
    ids = keys_N if ids_V is None else ids_V
    stats = scratch(num_rows, 2, num_tiles, dtype=torch.float32, device=device)
    scores = scratch(num_rows, num_tiles, k, dtype=torch.float32, device=device)
    at = scratch(num_rows, num_tiles, k, dtype=torch.int32, device=device)
    tokens_Nk, index_Nk = torch.empty(2, num_rows, k, dtype=torch.int64, device=device)
    score_Nk, logprob_Nk = torch.empty(2, num_rows, k, dtype=torch.float32, device=device)
    if num_rows:
        _topk_tiles_kernel[(num_rows, num_tiles)](
            logits, keys_N, positions_N, temperatures, ids, stats, scores, at, logits.stride(0),
            vocab, num_tiles, k, block, ids_V is not None, **_EXACT,
        )  # fmt: skip
        _topk_merge_kernel[(num_rows,)](
            logits, temperatures, ids, stats, scores, at, tokens_Nk, index_Nk, score_Nk,
            logprob_Nk, logits.stride(0), num_tiles, k, triton.next_power_of_2(num_tiles),
            triton.next_power_of_2(num_tiles * k), ids_V is not None, **_EXACT,
        )  # fmt: skip
    return TopK(tokens_Nk, index_Nk, score_Nk, logprob_Nk)
