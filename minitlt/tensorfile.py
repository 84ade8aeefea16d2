"""Tensors in a file: the one writer and the one reader of drafters, hot swaps and checkpoints.

The format is safetensors, so reading runs no code; the header also carries a checksum. The
library's own `save` copies everything twice, which took most of a publication's time, so the
layout is written here, without a copy. Nothing is renamed or flushed: that is the caller's.

Left out: files in parts, and dtypes that a drafter or a checkpoint never has.

How to run: swap.py, eagle3.py and run.py use this; `pytest tests/test_swap.py`.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from minitlt.common import reading

Tensors = dict[str, torch.Tensor]
_CHECKSUM = "crc32"
_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], header: dict[str, str], mode: int = 0o666
) -> int:
    """Writes a new file; returns its bytes. mode: as of os.open. OSError if they do not fit."""
    checksum = fingerprint(tensors) + _layout(tensors, header)
    entries: dict[str, Any] = {"__metadata__": header | {_CHECKSUM: checksum}}
    views, start = [], 0
    # Wide types come first, so that every tensor is aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        views.append(_bytes_of(tensor))
        end = start + views[-1].nbytes
        kind, shape = _KINDS[tensor.dtype], list(tensor.shape)
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(views)
        return file.tell()


def read_tensors(path: Path, hint: str = "") -> tuple[Tensors, dict[str, str]]:
    """The tensors, mapped into memory, and the header. ValueError, which ends with `hint`, if the
    file is missing, torn or foreign or if its checksum is wrong."""
    with reading(path, hint):
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        checksum, bits = header.pop(_CHECKSUM, ""), fingerprint(tensors)
        # Files of earlier versions, as the drafter that comes with the package, have the bits only.
        if checksum not in (bits, bits + _layout(tensors, header)):
            raise ValueError("its checksum is wrong")
    return tensors, header


def _layout(tensors: Mapping[str, torch.Tensor], header: dict[str, str]) -> str:
    """Checksum (crc32, hex) of all that the file says beside the bits."""
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return f"{zlib.crc32(json.dumps([shapes, header], sort_keys=True).encode()):08x}"


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Checksum (crc32, hex) of names, dtypes and bits."""
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype}".encode(), crc)
        crc = zlib.crc32(_bytes_of(tensor), crc)
    return f"{crc:08x}"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
