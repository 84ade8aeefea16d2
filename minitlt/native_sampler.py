"""The CPU's samplers in C (sampler.c): the ctypes side, plain tensors in and out.

`kernels_cpu` asks for them where the library is there (`native.py`) and the logits are fp32; the
definitions are `kernels.coupled_verify_ref` and `gumbel_topk_ref`.

How to run: `pytest tests/test_native_sampler.py tests/test_kernels.py`.

Letters: as in `kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, byref, c_int64, c_void_p

import torch
from torch import Tensor

from minitlt import native

_MOST = 256  # proposals of a row; they are kept in order by insertion


class _Trees(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "others", "thresholds", "temperatures")),
        *((name, c_void_p) for name in ("keys", "positions", "tokens", "parents", "limits")),
        *((name, c_void_p) for name in ("stops", "emitted", "at", "num_emit", "num_nan")),
        *((name, c_void_p) for name in ("logprobs", "entropies")),
        *((name, c_int64) for name in ("rows", "nodes", "vocab", "num_stops", "threads")),
        *((name, c_int64) for name in ("row_stride", "node_stride")),
        *((name, c_int64) for name in ("other_row_stride", "other_node_stride")),
    )


class _Proposals(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "temperatures", "keys", "positions", "ids")),
        *((name, c_void_p) for name in ("tokens", "index", "scores", "logprobs")),
        *((name, c_int64) for name in ("rows", "vocab", "k", "stride", "threads")),
    )


def takes(*numbers: Tensor | None, k: int = 1) -> bool:
    """Whether sampler.c can do it: fp32 logits, temperatures and thresholds, and k proposals."""
    return (
        k <= _MOST
        and all(x is None or x.dtype == torch.float32 for x in numbers)
        and native.library() is not None
    )


def _ints(x: Tensor) -> Tensor:
    return x.to(torch.int64).contiguous()


def _rows(x: Tensor) -> Tensor:
    """Logits whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def verify(
    logits_BTV: Tensor,
    keys_B: Tensor,
    positions_B: Tensor,
    temperatures_B: Tensor,
    tokens_BT: Tensor,
    parents_BT: Tensor,
    thresholds_BT: Tensor | None,
    sample_logits_BTV: Tensor | None,
    limits_B: Tensor | None,
    stop_ids: Sequence[int] | None,
    entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """What `kernels.Verified` holds, in its order."""
    found = native.library()
    assert found is not None, "takes() first"
    logits, others = _rows(logits_BTV), None
    tokens, parents, keys, positions = map(_ints, (tokens_BT, parents_BT, keys_B, positions_B))
    temperatures = temperatures_B.contiguous()
    thresholds = None if thresholds_BT is None else thresholds_BT.contiguous()
    limits = None if limits_B is None else _ints(limits_B)
    strides = (*logits.stride()[:2], 0, 0)
    if sample_logits_BTV is not None:
        others = _rows(sample_logits_BTV)
        strides = (*logits.stride()[:2], *others.stride()[:2])
    stops = (c_int64 * len(stop_ids or ()))(*(stop_ids or ()))
    size = num_rows, num_nodes = tokens.shape
    assert logits.shape[:2] == parents.shape == size, "a row of logits per node"
    assert others is None or others.shape == logits.shape, "as many other logits"
    assert thresholds is None or thresholds.shape == size, "a threshold per node"
    assert len(keys) == len(positions) == len(temperatures) == num_rows, "one of each per row"
    assert limits is None or len(limits) == num_rows, "a limit per row"
    emitted, nodes = (torch.empty(size, dtype=torch.int64, device="cpu") for _ in range(2))
    num_emit, num_nan = (torch.empty(num_rows, dtype=torch.int64, device="cpu") for _ in range(2))
    logprobs = torch.empty(size, dtype=torch.float32, device="cpu")
    entropies = torch.empty_like(logprobs) if entropy else None
    given = _Trees(
        _at(logits), _at(others), _at(thresholds), _at(temperatures), _at(keys), _at(positions),
        _at(tokens), _at(parents), _at(limits), addressof(stops), _at(emitted), _at(nodes),
        _at(num_emit), _at(num_nan), _at(logprobs), _at(entropies), num_rows, num_nodes,
        logits.shape[-1], len(stops), torch.get_num_threads(), *strides,
    )  # fmt: skip
    found.verify(byref(given))
    return emitted, num_emit, logprobs, entropies, nodes, num_nan


def topk(
    logits_NV: Tensor,
    keys_N: Tensor,
    positions_N: Tensor,
    temperatures_N: Tensor,
    k: int,
    ids_V: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `kernels.TopK` holds, in its order."""
    found = native.library()
    assert found is not None, "takes() first"
    logits, keys, positions = _rows(logits_NV), _ints(keys_N), _ints(positions_N)
    temperatures, ids = temperatures_N.contiguous(), None if ids_V is None else _ints(ids_V)
    num_rows, vocab = logits.shape
    assert len(keys) == len(positions) == len(temperatures) == num_rows, "one of each per row"
    assert ids is None or len(ids) == vocab, "an id per logit"
    index = torch.empty(num_rows, k, dtype=torch.int64, device="cpu")
    tokens = index if ids is None else torch.empty_like(index)
    scores = torch.empty(num_rows, k, dtype=torch.float32, device="cpu")
    logprobs = torch.empty_like(scores)
    given = _Proposals(
        _at(logits), _at(temperatures), _at(keys), _at(positions), _at(ids),
        None if ids is None else _at(tokens), _at(index), _at(scores), _at(logprobs),
        num_rows, vocab, k, logits.stride(0), torch.get_num_threads(),
    )  # fmt: skip
    found.topk(byref(given))
    return tokens, index, scores, logprobs
