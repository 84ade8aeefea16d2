"""What a rank shows of its drafter, and how the drafters of several ranks become one.

The idea: ranks that train apart and average their weights and moments now and then (local SGD) need
no more than one vector each. `flatten` makes it, of everything that is averaged, times the rank's
weight; after one all-reduce `unflatten` puts the sum back. Counters are not averaged: they take the
maximum, which travels through the store.

How to run: spot.py uses this; tests/test_merge.py.
"""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

import torch

from minitlt.tensorfile import Tensors


class Trainable(Protocol):
    """What the coordinator needs of a drafter's trainer. Names and shapes never change in a run.

    `version` grows by one per train step, which should take at most `budget_seconds`. Every rank
    has the same names, shapes and dtypes. `header` goes beside the tensors into every file.
    """

    version: int
    header: dict[str, str]

    @property
    def budget_seconds(self) -> float: ...

    def train_step(self) -> dict[str, Any]:
        """One short optimizer step, done when it returns (on a GPU too).

        Returns {"loss": float, "tokens": int, "seconds": float, ...}. tokens == 0 means there was
        nothing to train on and no step was taken ("loss" is then ignored). An optional
        "buffer_tokens" goes to the log. A loss that is not finite says that the step was not taken,
        because loss or gradient was not finite; it ends harvesting on this rank.
        """
        ...

    def tensors(self) -> Tensors:
        """The drafter's own tensors themselves (not copies), by name: the trainable ones, which
        are averaged, and the draft vocabulary, the only integers."""
        ...

    def optimizer_tensors(self) -> Tensors:
        """The optimizer's state itself, by name, complete from the start (zeros before step 1).

        Floating point tensors are averaged. Integer tensors, and those whose last name part is
        "step" (AdamW keeps that one as a float), hold one element each and take the maximum.
        """
        ...

    def load(self, tensors: Tensors, version: int) -> None:
        """Copy `tensors` (all names, any device and float dtype) into place; set `version`."""
        ...

    def choose_vocab(self) -> list[int]:
        """The draft vocabulary that fits this rank's own rows best."""
        ...

    def set_vocab(self, ids: list[int]) -> None:
        """Take this draft vocabulary, in all that is trained."""
        ...

    def free(self) -> None:
        """Memory ran out in a train step: let go of what the next one would make anew."""
        ...


def floats(trainable: Trainable) -> list[torch.Tensor]:
    """The trainable tensors in the order of their names."""
    named = sorted(trainable.tensors().items())
    return [tensor.detach() for _, tensor in named if tensor.is_floating_point()]


def averaged(trainable: Trainable) -> list[torch.Tensor]:
    """Weights, then optimizer moments."""
    moments = sorted(trainable.optimizer_tensors().items())
    return floats(trainable) + [t.detach() for name, t in moments if not _is_counter(name, t)]


def counters(trainable: Trainable) -> list[torch.Tensor]:
    moments = sorted(trainable.optimizer_tensors().items())
    return [tensor.detach() for name, tensor in moments if _is_counter(name, tensor)]


def vocabulary(trainable: Trainable) -> torch.Tensor:
    (ids_V,) = [t for t in trainable.tensors().values() if not t.is_floating_point()]
    return ids_V


def flatten(trainable: Trainable, weight: float) -> torch.Tensor:
    """All averaged tensors times `weight`, as one fp32 vector."""
    parts = averaged(trainable)
    count = sum(part.numel() for part in parts)
    buffer = torch.zeros(count, dtype=torch.float32, device=parts[0].device)
    if weight:  # a drafter that is not finite has weight 0, but 0 * nan is nan
        for view, part in zip(_views(buffer, parts), parts, strict=True):
            view.copy_(part).mul_(weight)
    return buffer


def unflatten(trainable: Trainable, buffer: torch.Tensor, version: int, counts: list[int]) -> None:
    parts = averaged(trainable)
    for part, view in zip(parts, _views(buffer, parts), strict=True):
        part.copy_(view)
    for counter, value in zip(counters(trainable), counts, strict=True):
        counter.fill_(value)
    trainable.version = version


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """One pass and no temporary: a sum is finite only if all its terms are."""
    return all(math.isfinite(tensor.sum(dtype=torch.float32)) for tensor in tensors)


def _is_counter(name: str, tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or re.split(r"[./]", name)[-1] == "step"


def _views(buffer: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = buffer.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
