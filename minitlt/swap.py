"""The drafter as a file in shared memory: published whole, read by other ranks, kept as checkpoint.

The idea: a rank writes its trainable tensors beside the old file and renames. A reader that has
mapped the old file keeps it; a reader that comes later sees the new one; nobody sees half of one,
whatever kills the writer. A lock file beside it is held with flock while the writer's process
lives. The kernel lets go of a lock whatever ends the process, so every later run of the same user
can tell what the dead left behind, and removes it.

Names hold a token that cannot be guessed and files are private to the user (mode 0600). The format
is safetensors, so reading runs no code; its header carries step, version, source and a checksum.

Left out: swap between machines, and huge pages. How to run: spot.py uses this; tests/test_spot.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import stat
import struct
import tempfile
import time
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

FORMAT = "minitlt-swap-1"
_SHARED = "/dev/shm"
NUMBERS = ("step", "window", "drafter_steps", "version", "rank")  # of the header, beside crc32

_KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
}

Tensors = dict[str, torch.Tensor]


class SharedFiles:
    """This rank's published drafter, and the paths of the other ranks'.

    Args:
        directory: one that all ranks of this machine share. ValueError if it does not exist.
        token: letters, digits and underscores. RuntimeError if a live process already uses it.
    """

    def __init__(self, directory: Path, token: str, rank: int, world_size: int) -> None:
        if not directory.is_dir():
            raise ValueError(f"{directory}, where rank 0 shares drafters, does not exist here")
        self._directory = directory
        paths = [directory / f"minitlt-{token}-r{r}.safetensors" for r in range(world_size)]
        self.own = paths[rank]
        self.others = {other: path for other, path in enumerate(paths) if other != rank}
        sweep(directory)
        self._lock = _hold(self.own.with_suffix(".lock"))

    def write(self, tensors: Tensors, numbers: dict[str, int]) -> int:
        """Publishes atomically; returns the bytes written. OSError if they do not fit."""
        metadata = {name: str(numbers[name]) for name in NUMBERS}
        metadata |= {"format": FORMAT, "crc32": fingerprint(tensors)}
        header, views = _layout(tensors, metadata)
        beside = self.own.with_suffix(".tmp")
        beside.unlink(missing_ok=True)
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW
        try:
            with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
                file.write(header)
                file.writelines(views)
                size = file.tell()
            os.replace(beside, self.own)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return size

    def remove(self) -> None:
        _remove_all(self.own.with_suffix(".lock"))
        os.close(self._lock)


def sweep(directory: Path | None = None) -> None:
    """Removes what dead processes of this user left, of any run. None: wherever we put files."""
    if directory is None:
        for place in {_SHARED, tempfile.gettempdir()}:
            if os.path.isdir(place):
                sweep(Path(place))
        return
    for entry in os.scandir(directory):
        if not re.fullmatch(r"minitlt-\w+-r\d+\.lock", entry.name):
            continue
        with suppress(FileNotFoundError, PermissionError, BlockingIOError):
            if entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            lock = os.open(entry.path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: it lives
                if _still_names(Path(entry.path), lock):
                    _remove_all(Path(entry.path))
            finally:
                os.close(lock)


def fingerprint(tensors: Tensors) -> str:
    """Checksum (crc32, hex) of names, dtypes and bits."""
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype}".encode(), crc)
        crc = zlib.crc32(_bytes_of(tensor), crc)
    return f"{crc:08x}"


def read_header(path: Path) -> dict[str, int]:
    """The numbers in a published drafter's header. ValueError if it is torn or not ours."""
    info = os.stat(path, follow_symlinks=False)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise ValueError(f"{path} is not a private file of this user")
    return _open_drafter(path, None)[1]


def read_drafter(path: Path, like: Tensors) -> tuple[Tensors, dict[str, int]]:
    """A published drafter, mapped into memory, and its numbers.

    ValueError unless names, shapes and dtypes are those of `like` and the checksum is right.
    """
    return _open_drafter(path, like)


def _open_drafter(path: Path, like: Tensors | None) -> tuple[Tensors, dict[str, int]]:
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT or not set(NUMBERS) <= set(header):
                raise ValueError(f"{path} is not a published drafter")
            numbers = {name: int(header[name]) for name in NUMBERS}
            if like is None:
                return {}, numbers
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is torn or foreign: {error}") from error
    if {n: (t.shape, t.dtype) for n, t in tensors.items()} != {
        n: (t.shape, t.dtype) for n, t in like.items()
    }:
        raise ValueError(f"{path} holds another drafter's tensors")
    if fingerprint(tensors) != header.get("crc32"):
        raise ValueError(f"{path}: the checksum is wrong")
    return tensors, numbers


def copy_durably(source: int, path: Path) -> Path:
    """Copies the open file `source` to `path`: beside, flushed to disk, renamed."""
    beside = path.with_name(path.name + ".tmp")
    try:
        with os.fdopen(source, "rb") as old, open(beside, "wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)
            new.flush()
            os.fsync(new.fileno())
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the rename itself must reach the disk as well
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return path


def roomy_directory(size: int) -> str:
    """/dev/shm, unless it is missing, closed or has no room for `size` bytes (64 MB in Docker)."""
    usable = os.path.isdir(_SHARED) and os.access(_SHARED, os.W_OK | os.X_OK)
    return _SHARED if usable and shutil.disk_usage(_SHARED).free > size else tempfile.gettempdir()


def _layout(tensors: Tensors, metadata: dict[str, str]) -> tuple[bytes, list[memoryview]]:
    """The header of a safetensors file and what follows it, without a copy of the tensors.

    The library's own `save` copies everything twice, which took most of a publication's time.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    views, start = [], 0
    # Wide types come first, so that every tensor is aligned.
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):
        views.append(_bytes_of(tensor))
        end = start + views[-1].nbytes
        kind = _KINDS[tensor.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, views


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _hold(path: Path) -> int:
    """Creates and locks `path` for the life of this process."""
    give_up = time.monotonic() + 1.0  # another run's sweep may hold it for a moment
    while time.monotonic() < give_up:
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _still_names(path, lock):
                return lock
        os.close(lock)
        time.sleep(0.01)
    raise RuntimeError(f"a live process already shares drafters under this token: {path}")


def _still_names(path: Path, descriptor: int) -> bool:
    """Whether `path` is the file that `descriptor` has open (and not removed or replaced)."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _remove_all(lock_path: Path) -> None:
    """The lock goes last: while it is there, the rest can be found."""
    for suffix in (".tmp", ".safetensors", ".lock"):
        lock_path.with_suffix(suffix).unlink(missing_ok=True)
