"""The drafter as a file in shared memory: published whole, read by other ranks, kept as checkpoint.

The idea: a rank writes its trainable tensors beside the old file and renames. A reader that has
mapped the old file keeps it; a reader that comes later sees the new one; nobody sees half of one,
whatever kills the writer. The files of a run lie in a folder of their own, private to the user,
which every rank holds with a shared flock while it lives. The kernel lets go of a lock whatever
ends the process, so a folder that can be locked alone belongs to the dead, and every later run of
the same user removes it.

Folder names hold a token that cannot be guessed. The format is safetensors, so reading runs no
code; its header carries step, version, source and a checksum.

Left out: swap between machines, and huge pages. How to run: spot.py uses this; tests/test_spot.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import struct
import tempfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from minitlt.common import write_atomically

FORMAT = "minitlt-swap-1"
_SHARED, _PREFIX = "/dev/shm", "minitlt-swap-"
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
        token: letters, digits and underscores, the same on all ranks of a run.
    """

    def __init__(self, directory: Path, token: str, rank: int, world_size: int) -> None:
        if not directory.is_dir():
            raise ValueError(f"{directory}, where the ranks share drafters, does not exist here")
        sweep(directory)
        self.directory, folder = directory, directory / f"{_PREFIX}{token}"
        paths = [folder / f"r{r}.safetensors" for r in range(world_size)]
        self.own = paths[rank]
        self.others = {other: path for other, path in enumerate(paths) if other != rank}
        self._lock = _hold(folder)

    def write(self, tensors: Tensors, numbers: dict[str, int]) -> int:
        """Publishes atomically; returns the bytes written. OSError if they do not fit."""
        metadata = {name: str(numbers[name]) for name in NUMBERS}
        metadata |= {"format": FORMAT, "crc32": fingerprint(tensors)}
        header, views = _layout(tensors, metadata)
        beside = self.own.with_suffix(".tmp")
        try:
            with open(beside, "wb") as file:
                file.write(header)
                file.writelines(views)
                size = file.tell()
            os.replace(beside, self.own)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return size

    def remove(self) -> None:
        """The last rank to leave takes the run's folder along."""
        self.own.unlink(missing_ok=True)
        os.close(self._lock)
        sweep(self.directory)


def sweep(directory: Path | None = None) -> None:
    """Removes what dead processes of this user left, of any run. None: wherever we put files."""
    if directory is None:
        for place in {_SHARED, tempfile.gettempdir()}:
            if os.path.isdir(place):
                sweep(Path(place))
        return
    for folder in directory.glob(f"{_PREFIX}*"):
        # OSError: gone, not a folder, another user's, with a file that is not ours in it, or
        # (BlockingIOError) a process lives in it.
        with suppress(OSError):
            lock = _open_own(folder)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for path in folder.glob("r*"):
                    if re.fullmatch(r"r\d+\.(safetensors|tmp)", path.name):
                        path.unlink()
                folder.rmdir()
            finally:
                os.close(lock)


def _open_own(folder: Path) -> int:
    """A descriptor of a folder that only this user can enter; PermissionError for any other."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    info = os.fstat(lock)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        os.close(lock)
        raise PermissionError(f"{folder} is not a private folder of this user")
    return lock


def _hold(folder: Path) -> int:
    """Makes the folder if need be and holds it for the life of this process."""
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = _open_own(folder)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):  # another run's sweep has been quicker: once more
            if os.path.samestat(os.fstat(lock), os.stat(folder, follow_symlinks=False)):
                return lock
        os.close(lock)


def fingerprint(tensors: Tensors) -> str:
    """Checksum (crc32, hex) of names, dtypes and bits."""
    crc = 0
    for name, tensor in sorted(tensors.items()):
        crc = zlib.crc32(f"{name} {tensor.dtype}".encode(), crc)
        crc = zlib.crc32(_bytes_of(tensor), crc)
    return f"{crc:08x}"


def read_drafter(path: Path, like: Tensors | None = None) -> tuple[Tensors, dict[str, int]]:
    """A published drafter, mapped into memory, and the numbers in its header.

    ValueError if it is torn or foreign, or unless names, shapes and dtypes are those of `like` and
    the checksum is right. Without `like` only the header is read.
    """
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
    """Copies the open file `source` to `path`."""

    def copy(beside: Path) -> None:
        with os.fdopen(source, "rb") as old, open(beside, "wb") as new:
            shutil.copyfileobj(old, new, 1 << 20)

    return write_atomically(path, copy)


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
