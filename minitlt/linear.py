"""A matrix product whose weight is replaced and never trained, packed on a CPU; RMSNorm.

Why it is a module of its own: on it rests that speculation changes no bit. `native.py`'s products
give a row the same bits in any company. Where there are none (no compiler), weights are packed for
oneDNN, whose products do so in fp32, some from four rows on: `fewest_rows` tests that when weights
are loaded, and fewer rows are then repeated up to that. The norms do so always.
Left out: quantised weights. How to try it: `pytest tests/test_target.py`.
Shape suffixes: N rows, H inputs, O outputs.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minitlt import native

logger = logging.getLogger(__name__)
_SAFE_ROWS = 4  # from here on a row of a product has the same bits in any company
_TRIED = 40_000  # outputs of single rows that are compared


class Linear:
    """y = x W^T + b over a weight that is replaced, never trained.

    On a CPU the weight (fp32 or bf16) is packed once, in `panels` for native code, else for oneDNN;
    activations stay fp32, and in oneDNN's fp32 what follows the product (`swish`, `mul`) happens
    before its result leaves the cache. Elsewhere it is a plain product in the weight's dtype.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.panels = native.Panels(dtype) if native.runs(dtype, device) else None
        self.packed = device.type == "cpu" and can_pack(dtype) and self.panels is None
        self.fuses = self.packed and dtype == torch.float32
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.fewest = 1  # rows that a product is given; see `fewest_rows`

    @property
    def packs(self) -> bool:
        return self.packed or self.panels is not None

    @property
    def num_inputs(self) -> int:
        if self.panels is not None:
            return self.panels.matrix.inputs
        assert self.weight is not None, "load() the weight first"
        return self.weight.shape[1]

    @property
    def num_weights(self) -> int:
        if self.panels is not None:
            return self.panels.matrix.inputs * self.panels.matrix.outputs
        assert self.weight is not None, "load() the weight first"
        return self.weight.numel()

    def load(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if self.panels is not None:
            self.panels.load(weight, bias)
            return
        weight = weight.detach().to(self.device, self.dtype)
        if self.packed:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
            self.weight = packed if self.weight is None else self.weight.copy_(packed)
        else:
            self.weight = put(self.weight, weight)
        if bias is not None:
            self.bias = put(self.bias, bias.detach().to(self.device, self.dtype))

    def __call__(self, x_NH: Tensor) -> Tensor:
        if self.panels is not None:
            return self.panels(x_NH)
        if self.fuses:
            return self.fused(x_NH)
        if 0 < (num := len(x_NH)) < self.fewest:
            return self(self._repeated(x_NH))[:num]
        x_NH = x_NH.to(self.dtype)
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x_NH, self.weight, self.bias, "none", [], "")
        else:
            assert self.weight is not None, "load() the weight first"
            y = F.linear(x_NH, self.weight, self.bias)
        return y.float() if self.device.type == "cpu" and y.dtype != torch.float64 else y

    def fused(self, x_NH: Tensor, how: str = "none", factor: Tensor | None = None) -> Tensor:
        """how: none | swish, or mul by `factor`."""
        if 0 < (num := len(x_NH)) < self.fewest:
            factor = factor if factor is None else self._repeated(factor)
            return self.fused(self._repeated(x_NH), how, factor)[:num]
        product: Any = torch.ops.mkldnn._linear_pointwise
        if factor is None:
            return product(x_NH, self.weight, self.bias, how, [], "")
        return product.binary(x_NH, factor, self.weight, self.bias, how)

    def _repeated(self, x_NH: Tensor) -> Tensor:
        """As often as gives `fewest` rows or more."""
        return torch.cat([x_NH] * -(-self.fewest // len(x_NH)))


class Residual:
    """The residual stream `h_NH`, to which layers add in place, and its RMSNorm.

    On a CPU F.rms_norm is ten small operations. Here it is three: each row ends in one entry more,
    sqrt(H * eps), and its length is then sqrt(H) times the root that RMSNorm divides by. All three
    treat rows alike. (`hypot` of length and eps does not: vectors of 8 or 16 rows and the rest are
    rounded by two functions, which differ once in ten million.)
    """

    def __init__(self, h_NH: Tensor, eps: float) -> None:
        self.eps, num_inputs = eps, h_NH.shape[1]
        self._fused = h_NH.device.type != "cpu"
        end = math.sqrt(num_inputs * eps)
        self._wide = h_NH if self._fused else F.pad(h_NH, (0, 1), value=end)
        self.h_NH = self._wide[:, :num_inputs]

    def normed(self, weight_H: Tensor) -> Tensor:
        """weight_H: times `norm_factor`."""
        if self._fused:
            return F.rms_norm(self.h_NH, weight_H.shape, weight_H, self.eps)
        length_N1 = torch.linalg.vector_norm(self._wide, dim=-1, keepdim=True)
        return (self.h_NH / length_N1).mul_(weight_H)


def norm_factor(num_inputs: int, device: torch.device) -> float:
    """What weights of `Residual.normed` are multiplied by when they are loaded."""
    return math.sqrt(num_inputs) if device.type == "cpu" else 1.0


def put(old: Tensor | None, new: Tensor) -> Tensor:
    """`new` in the memory of `old`, if there is any: references and captured graphs stay valid.
    Dense and in its order, as C reads it."""
    return new.clone(memory_format=torch.contiguous_format) if old is None else old.copy_(new)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack a weight of this dtype for oneDNN on this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def decoding_dtype(wish: str, trains_in: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype a replica decodes: wish is auto, fp32 or bf16.

    auto is the dtype of training, so that the policy that samples is the policy that learns; on a
    CPU without packed bf16 products it is fp32, which is faster there as well. So a run that trains
    in fp32 keeps the promise that speculation changes no token, and bf16 is a choice: with native
    code it keeps that promise as well; elsewhere a row's rounding depends on its company in bf16,
    and what holds is the law, not the token.
    """
    if wish != "auto":
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[wish]
    if device.type == "cpu" and trains_in.itemsize < 4 and not Linear(trains_in, device).packs:
        return torch.float32
    return trains_in


def fewest_rows(linear: Linear) -> int:
    """The least number of rows whose product has the bits it has in larger company, up to 64.

    That is 1 or 4, and a matter of processor and shape: some take another path for few rows.
    A processor that needs still more in fp32 is warned about; in oneDNN's bf16 none are promised.
    """
    x_NH = torch.randn(64, linear.num_inputs, generator=torch.Generator().manual_seed(0))
    y_NO = linear(x_NH)
    # In bf16 the result's rounding hides most of what differs, so many outputs are looked at.
    singles = min(64, 1 + _TRIED // y_NO.shape[1])
    alone = torch.cat([linear(x_NH[i : i + 1]) for i in range(singles)])
    unlike = [n for n in (2, 3, 4, 16) if not torch.equal(linear(x_NH[:n]), y_NO[:n])]
    most = max(unlike, default=int(not torch.equal(alone, y_NO[:singles])))
    if most >= _SAFE_ROWS and linear.dtype == torch.float32:
        logger.warning(
            "a product of %d rows and one of 64 round differently on this processor: speculation "
            "may change a token where two nearly tie (the law stays)", most
        )  # fmt: skip
    return _SAFE_ROWS if most else 1
