"""The drafter as a file in shared memory: published whole, read by other ranks, kept as checkpoint.

The idea: a rank writes its drafter beside the old file and renames. A reader that has mapped the
old file keeps it; a reader that comes later sees the new one; nobody sees half of one, whatever
kills the writer. The files of a run lie in a folder of their own, private to the user, which every
rank holds with a shared flock while it lives. The kernel lets go of a lock whatever ends the
process, so a folder that can be locked alone belongs to the dead, and every later run of the same
user removes it.

Folder names hold a token that cannot be guessed. A file (tensorfile.py) holds what is the drafter's
own: the tensors it trains and the draft vocabulary, nothing of the policy. Its header says step,
version and source. The same file on a disk is the selective checkpoint of a run.

Left out: swap between machines, and huge pages. How to run: spot.py uses this; tests/test_swap.py.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from safetensors import safe_open

from minitlt.common import reading
from minitlt.tensorfile import Tensors, read_tensors, write_tensors

_SHARED, _PREFIX = "/dev/shm", "minitlt-swap-"
NUMBERS = ("step", "window", "drafter_steps", "version", "rank")  # of the header


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

    def write(self, tensors: Tensors, header: dict[str, str]) -> int:
        """Publishes atomically; returns the bytes written. OSError if they do not fit."""
        beside = self.own.with_suffix(".tmp")
        try:
            size = write_tensors(beside, tensors, header, mode=0o600)
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


def read_numbers(path: Path) -> dict[str, int]:
    """What the header of a published drafter says of it. ValueError if it is torn or foreign."""
    with reading(path), safe_open(path, "pt") as file:
        return _numbers(file.metadata() or {})


def read_drafter(path: Path, like: Tensors, hint: str = "") -> tuple[Tensors, dict[str, int]]:
    """A published drafter, mapped into memory, and the numbers in its header.

    ValueError if it is torn or foreign, or unless names, shapes and dtypes are those of `like`.
    """
    tensors, header = read_tensors(path, hint)
    with reading(path, hint):
        if _layout(tensors) != _layout(like):
            raise ValueError("it holds another drafter's tensors")
        return tensors, _numbers(header)


def _numbers(header: dict[str, str]) -> dict[str, int]:
    return {name: int(header[name]) for name in NUMBERS}


def _layout(tensors: Tensors) -> dict[str, object]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def roomy_directory(size: int) -> str:
    """/dev/shm, unless it is missing, closed or has no room for `size` bytes (64 MB in Docker)."""
    usable = os.path.isdir(_SHARED) and os.access(_SHARED, os.W_OK | os.X_OK)
    return _SHARED if usable and shutil.disk_usage(_SHARED).free > size else tempfile.gettempdir()
