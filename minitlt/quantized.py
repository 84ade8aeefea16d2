"""The policy itself, with weights of 8 bits, as a drafter.

The idea. On a CPU a decoding step takes as long as reading the weights, so a copy of the policy in
a quarter of the bytes (half, beside bf16) decodes a token in a quarter of the time, and the policy
then looks at all its drafts in one step. The copy needs no training and is never stale: after a
refresh its weights are rounded again (EfficientRollout, arXiv 2606.18967, drafts so from a live
policy). It has no cache of its own: it reads the policy's keys and values and writes those of its
drafts behind them, where the verifying forward puts the exact ones in their place.

It is right nearly always (LOG.md), and every draft costs a quarter of a step; the draft model's
cost almost nothing and are right half of the time. So long chains of the copy pay with few rows,
short ones of the draft model with many.

Left out: trees (there is little to hedge against); activations of 8 bits, which would pay with more
rows; GPUs; a draft model that drafts for the copy.

How to run: `pytest tests/test_quantized.py`. Shape suffixes: B rows, K drafts, V vocab.
"""

from __future__ import annotations

import logging

import torch

from minitlt import native
from minitlt.bandit import Arm
from minitlt.draft import Draft, Drafter, RowState, chain_of
from minitlt.kernels import gumbel_topk
from minitlt.slots import Target
from minitlt.target import LlamaTarget

logger = logging.getLogger(__name__)
INT8_ARMS = ("int8-5", "int8-12")  # with many rows, with few


def int8_drafts(target: Target) -> bool:
    """Whether it can draft for this target."""
    return isinstance(target, LlamaTarget) and target.native


def with_int8(arms: list[Arm], target: Target) -> tuple[list[Arm], list[Drafter]]:
    """The arms that this target can serve, and the drafter behind those of int8."""
    others = [arm for arm in arms if arm.source != QuantizedDrafter.name]
    if len(others) == len(arms):
        return arms, []
    if int8_drafts(target):
        assert isinstance(target, LlamaTarget)
        return arms, [QuantizedDrafter(target)]
    missing = target.device.type == "cpu" and native.library() is None  # on a GPU none is built
    here = native.status() if missing else f"{target.device.type}, {target.backend}"
    logger.warning("arms of int8 are left out: they need native code on a CPU; here: %s", here)
    return others or [Arm()], []


class QuantizedDrafter(Drafter):
    """Chains by the target's own weights in int8; only of a target that native code decodes."""

    name = "int8"

    def __init__(self, target: LlamaTarget) -> None:
        assert target.native, "native code decodes the target"
        self.target = target
        self._copy: native.Decoder | None = None
        self._version = 0
        self.fixed_bytes = target.num_weights

    def reserve(self, num_slots: int, length: int) -> None:
        self._fresh()  # here, where no step is measured

    def _fresh(self) -> native.Decoder:
        """The copy, of the weights as they are now."""
        if self._copy is None:
            self._copy = self.target.native_decoder.in_int8()
            self.fixed_bytes = 0  # they are not free any more
        elif self._version != self.target.version:
            self._copy.requantize()
        self._version = self.target.version
        return self._copy

    @torch.no_grad()
    def propose(self, rows: RowState, depth: int, width: int, nodes: int) -> Draft:
        copy, place = self._fresh(), self.target.place(0)
        tokens_B1 = rows.roots_B[:, None]
        columns, drawn_from, going_B1 = [tokens_B1], [], torch.ones_like(tokens_B1).bool()
        for level in range(depth):
            at_B = rows.positions_B - 1 + level
            logits_B1V = copy(tokens_B1, at_B, None, *place, True)[2]
            assert logits_B1V is not None
            logits_BV = logits_B1V[:, 0]
            if not rows.coupled:
                drawn_from.append(logits_BV)
            noise = rows.keys_B, at_B + 1, rows.temperatures_B
            tokens_B1 = gumbel_topk(logits_BV, *noise, 1).tokens_Nk
            columns.append(tokens_B1)
            going_B1 &= ~torch.isin(tokens_B1, rows.stop_ids)
            if not going_B1.any():
                break
        return chain_of(columns, rows, drawn_from)
