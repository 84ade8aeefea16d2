"""Triton kernels around the model: attention of a draft tree over slots, and the drafter's loss.

Attention splits a row's cache into chunks that run in parallel (flash decoding), because a decode
batch is too small to fill a GPU with rows and heads alone; a second launch joins the chunks in
ascending order. A chunk is a fixed number of positions, so that the result does not depend on the
batch. The G query heads of a key head and the T nodes form one block of queries: keys and values
are read once for all of them, and the tree mask is one 64-bit word per node, tested in registers.

The loss reads both logits twice forward and once backward and keeps three numbers per row.

Left out: paged slots, fp8 caches, a backward pass of attention (decoding needs none).
Letters and argument names: as in `kernels_triton`.
"""
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from torch import Tensor

from minitlt import kernels as defs
from minitlt.kernels import DraftLoss
from minitlt.kernels_cpu import DraftLossFunction
from minitlt.kernels_triton import rows_last, scratch

KV_CHUNK, KV_BLOCK = 256, 64  # cache positions per attention program, and per step of it
LOSS_BLOCK = 2048
_INF, _FLT_MAX = tl.constexpr(defs.INF), tl.constexpr(defs.FLT_MAX)


# Attention of a draft tree over the slots of a ragged cache.


@triton.jit
def _attend_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, ancestors_ptr, acc_ptr, stats_ptr, scale,
    sqb, sqh, sqt, sks, skh, skl, svs, svh, svl, HKV, G, T, L, D, S,
    M2: tl.constexpr, D2: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """All G x T queries of a key head (M2 at a time) against one chunk of one row's cache."""
    b, head = tl.program_id(0) // HKV, tl.program_id(0) % HKV
    split = tl.program_id(2)
    length = tl.load(lengths_ptr + b).to(tl.int32)
    end = tl.minimum(length + T, L)
    start = split * CHUNK
    if (length < 0) | (start >= end):
        return
    slot = b.to(tl.int64)
    m, d = tl.program_id(1) * M2 + tl.arange(0, M2), tl.arange(0, D2)
    g, t, real = m // T, m % T, m < G * T
    q_at = b.to(tl.int64) * sqb + (head * G + g).to(tl.int64) * sqh + t.to(tl.int64) * sqt
    q = tl.load(
        q_ptr + q_at[:, None] + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0
    )
    ancestors = tl.load(ancestors_ptr + b * T + t, mask=real, other=0)
    k_row = k_ptr + slot * sks + head.to(tl.int64) * skh
    v_row = v_ptr + slot * svs + head.to(tl.int64) * svh
    top = tl.full((M2,), -_INF, tl.float32)
    total = tl.zeros((M2,), tl.float32)
    acc = tl.zeros((M2, D2), tl.float32)
    for step in range(0, CHUNK, STEP):  # a fixed count, so that loads are pipelined
        n = start + step + tl.arange(0, STEP)
        here = (n < end)[:, None] & (d < D)[None, :]
        k = tl.load(k_row + n.to(tl.int64)[:, None] * skl + d[None, :], mask=here, other=0.0)
        v = tl.load(v_row + n.to(tl.int64)[:, None] * svl + d[None, :], mask=here, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        bit = tl.minimum(tl.maximum(n - length, 0), 63).to(tl.int64)
        own = ((ancestors[:, None] >> bit[None, :]) & 1) == 1
        seen = (n < length)[None, :] | (own & (n < end)[None, :])
        score = tl.where(seen, score, -_INF)
        new_top = tl.maximum(top, tl.max(score, axis=1))
        safe_top = tl.maximum(new_top, -_FLT_MAX)
        weight = tl.exp(score - safe_top[:, None])
        shrink = tl.exp(top - safe_top)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top
    out = ((b * HKV + head) * G * T + m).to(tl.int64) * S + split
    tl.store(stats_ptr + out * 2, top, mask=real)
    tl.store(stats_ptr + out * 2 + 1, total, mask=real)
    tl.store(acc_ptr + out[:, None] * D + d[None, :], acc, mask=real[:, None] & (d < D)[None, :])


@triton.jit
def _join_kernel(
    acc_ptr, stats_ptr, lengths_ptr, out_ptr, HT, T, L, D, S, D2: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Join the chunks of one query in ascending order."""
    query, d = tl.program_id(0).to(tl.int64), tl.arange(0, D2)
    length = tl.load(lengths_ptr + query // HT).to(tl.int32)
    top = tl.full((), -_INF, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    acc = tl.zeros((D2,), tl.float32)
    last = tl.where(length >= 0, tl.minimum(length + T, L), 0)
    split = last * 0
    while split * CHUNK < last:
        at = query * S + split
        part_top, part = tl.load(stats_ptr + at * 2), tl.load(stats_ptr + at * 2 + 1)
        new_top = tl.maximum(top, part_top)
        safe_top = tl.maximum(new_top, -_FLT_MAX)
        old, new = tl.exp(top - safe_top), tl.exp(part_top - safe_top)
        total = total * old + part * new
        acc = acc * old + tl.load(acc_ptr + at * D + d, mask=d < D, other=0.0) * new
        top = new_top
        split += 1
    acc = acc / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + query * D + d, acc.to(out_ptr.dtype.element_ty), mask=d < D)


def tree_attention_triton(
    q_BHTD: Tensor,
    k_slots: Tensor,
    v_slots: Tensor,
    lengths_B: Tensor,
    ancestors_BT: Tensor,
    scale: float,
) -> Tensor:
    """`tree_attention`, split over the context: chunks of a row in parallel, then joined."""
    (num_rows, num_heads, num_nodes, width), device = q_BHTD.shape, q_BHTD.device
    num_kv, length = k_slots.shape[1:3]
    if num_nodes > 64:
        raise ValueError(f"a draft tree has at most 64 nodes, not {num_nodes}")
    out = torch.empty(q_BHTD.shape, dtype=q_BHTD.dtype, device=device)
    if out.numel() == 0:
        return out
    q, k, v = (rows_last(x) for x in (q_BHTD, k_slots, v_slots))
    group, num_splits = num_heads // num_kv, triton.cdiv(length, KV_CHUNK)
    wide_type = q.element_size() > 2  # fp32 has no tensor cores in full precision: small tiles
    tile = max(16, min(16 if wide_type else 64, triton.next_power_of_2(group * num_nodes)))
    step = min(KV_BLOCK, 32) if wide_type else KV_BLOCK
    shape = (num_rows, num_heads, num_nodes, num_splits)
    acc = scratch(*shape, width, dtype=torch.float32, device=device)
    stats = scratch(*shape, 2, dtype=torch.float32, device=device)
    wide = max(16, triton.next_power_of_2(width))
    _attend_kernel[(num_rows * num_kv, triton.cdiv(group * num_nodes, tile), num_splits)](
        q, k, v, lengths_B, ancestors_BT.contiguous(),
        acc, stats, scale, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], num_kv, group,
        num_nodes, length, width, num_splits, tile, wide, KV_CHUNK, step,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    _join_kernel[(num_rows * num_heads * num_nodes,)](
        acc, stats, lengths_B, out, num_heads * num_nodes, num_nodes, length, width, num_splits,
        wide, KV_CHUNK, num_warps=1,
    )  # fmt: skip
    return out


# The drafter's loss.


@triton.jit
def _loss_kernel(
    logits_ptr, teacher_ptr, kl_ptr, tv_ptr, stats_ptr, sl, st, V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: two normalisers in one pass, KL, TV and c = sum q [q > p] in another."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top_q, top_p = tl.full((), -_FLT_MAX, tl.float32), tl.full((), -_FLT_MAX, tl.float32)
    sum_q, sum_p = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        at = start + lane
        x = tl.load(logits_ptr + row * sl + at, mask=at < V, other=-_INF).to(tl.float32)
        y = tl.load(teacher_ptr + row * st + at, mask=at < V, other=-_INF).to(tl.float32)
        new_q, new_p = tl.maximum(top_q, tl.max(x, axis=0)), tl.maximum(top_p, tl.max(y, axis=0))
        sum_q = sum_q * tl.exp(top_q - new_q) + tl.sum(tl.exp(x - new_q), axis=0)
        sum_p = sum_p * tl.exp(top_p - new_p) + tl.sum(tl.exp(y - new_p), axis=0)
        top_q, top_p = new_q, new_p
    lse_q, lse_p = top_q + tl.log(sum_q), top_p + tl.log(sum_p)
    kl, tv = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    over = tl.full((), 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        at = start + lane
        x = tl.load(logits_ptr + row * sl + at, mask=at < V, other=-_INF).to(tl.float32)
        y = tl.load(teacher_ptr + row * st + at, mask=at < V, other=-_INF).to(tl.float32)
        q, p = tl.exp(x - lse_q), tl.exp(y - lse_p)
        kl += tl.sum(tl.where(p > 0, p * ((y - lse_p) - (x - lse_q)), 0.0), axis=0)
        tv += 0.5 * tl.sum(tl.abs(p - q), axis=0)
        over += tl.sum(tl.where(q > p, q, 0.0), axis=0)
    tl.store(kl_ptr + row, kl)
    tl.store(tv_ptr + row, tv)
    tl.store(stats_ptr + row * 3, lse_p)
    tl.store(stats_ptr + row * 3 + 1, lse_q)
    tl.store(stats_ptr + row * 3 + 2, over)


@triton.jit
def _loss_grad_kernel(
    logits_ptr, teacher_ptr, stats_ptr, kl_grad_ptr, tv_grad_ptr, out_ptr, sl, st, V,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    lse_p, lse_q = tl.load(stats_ptr + row * 3), tl.load(stats_ptr + row * 3 + 1)
    over = tl.load(stats_ptr + row * 3 + 2)
    x = tl.load(logits_ptr + row * sl + at, mask=at < V, other=-_INF).to(tl.float32)
    y = tl.load(teacher_ptr + row * st + at, mask=at < V, other=-_INF).to(tl.float32)
    q, p = tl.exp(x - lse_q), tl.exp(y - lse_p)
    grad = tl.load(kl_grad_ptr + row) * (q - p)
    grad += tl.load(tv_grad_ptr + row) * q * (tl.where(q > p, 1.0, 0.0) - over)
    tl.store(out_ptr + row * V + at, grad.to(out_ptr.dtype.element_ty), mask=at < V)


class _LossPasses:
    @staticmethod
    def forward(logits_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (num_rows, vocab), device = logits_NV.shape, logits_NV.device
        logits, teacher = rows_last(logits_NV), rows_last(teacher_NV)
        kl_N, tv_N = torch.empty(2, num_rows, dtype=torch.float32, device=device)
        stats_N3 = torch.empty(num_rows, 3, dtype=torch.float32, device=device)
        if num_rows:
            _loss_kernel[(num_rows,)](
                logits, teacher, kl_N, tv_N, stats_N3, logits.stride(0), teacher.stride(0), vocab,
                min(LOSS_BLOCK, triton.next_power_of_2(vocab)),
            )  # fmt: skip
        return kl_N, tv_N, stats_N3

    @staticmethod
    def backward(
        logits_NV: Tensor,
        teacher_NV: Tensor,
        stats_N3: Tensor,
        kl_grad_N: Tensor,
        tv_grad_N: Tensor,
    ) -> Tensor:
        num_rows, vocab = logits_NV.shape
        logits, teacher = rows_last(logits_NV), rows_last(teacher_NV)
        block = min(LOSS_BLOCK, triton.next_power_of_2(vocab))
        grad_NV = torch.empty(num_rows, vocab, dtype=logits.dtype, device=logits.device)
        if num_rows:
            _loss_grad_kernel[(num_rows, triton.cdiv(vocab, block))](
                logits, teacher, stats_N3, kl_grad_N.contiguous(), tv_grad_N.contiguous(), grad_NV,
                logits.stride(0), teacher.stride(0), vocab, block,
            )  # fmt: skip
        return grad_NV


def draft_loss_triton(
    logits_NV: Tensor, teacher_NV: Tensor, kind: str = "lk", eta: float = 3.0
) -> DraftLoss:
    """`draft_loss`: one launch forward (two reads), one backward (one read, one write)."""
    args = (logits_NV, teacher_NV.detach(), kind, eta, _LossPasses)
    return DraftLoss(*DraftLossFunction.apply(*args))
