"""Small things that several modules need: options with a help text, hints, files read and written.

Light: neither torch nor transformers is loaded. Left out: whatever one module alone needs.
How to run: `pytest tests/test_fuzz.py`.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from pathlib import Path
from typing import Any

WHOLE = "minitlt/whole.json"  # in a checkpoint that is whole: the size of each of its files


def option(default: Any, help_text: str) -> Any:
    """A dataclass field with a help text; a list or dict is copied for every instance."""
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata={"help": help_text})
    return field(default=default, metadata={"help": help_text})


def suggest(name: str, valid: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the valid names when none is near.

    >>> suggest("lerning_rate", ["learning_rate", "seed"])
    "did you mean 'learning_rate'?"
    """
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(repr(c) for c in close) + "?"
    return "valid: " + ", ".join(names[:12]) + (", .." if len(names) > 12 else "")


def counted(number: float, word: str) -> str:
    """
    >>> counted(1, "rank"), counted(2, "rank"), counted(0.5, "generation")
    ('1 rank', '2 ranks', '0.5 generations')
    """
    return f"{number:.12g} {word}{'s' * (number != 1)}"


def one_line(error: object) -> str:
    return " ".join(str(error).split())


def version_of(package: str) -> str:
    """The installed version of a package; "" if it is not installed."""
    import importlib.metadata  # 20 ms, and the command line loads this module

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def by_piece(flat: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{"a.b.c": x, "d": y} as {"a": {"b.c": x}, "d": {"": y}}: the parts of a checkpoint."""
    pieces: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        piece, _, rest = name.partition(".")
        pieces.setdefault(piece, {})[rest] = value
    return pieces


def write_atomically(path: Path, content: str | Callable[[Path], Any]) -> Path:
    """Writes beside `path`, flushes to the disk, renames: there is the old file or the new one,
    never half of one. content: a text, or a function that writes the file it is given."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if isinstance(content, str):
            beside.write_text(content, encoding="utf-8", errors="replace")
        else:
            content(beside)
        _flush(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _flush(path.parent)  # the rename itself must reach the disk as well
    return path


def _flush(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def seal(folder: Path, receipt: str = WHOLE) -> None:
    """Marks a folder as whole once all its files are there: flushes each of them to the disk and
    writes the file `receipt` in it, which says their sizes."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / receipt:
            _flush(path)
            files[str(path.relative_to(folder))] = path.stat().st_size
    write_atomically(folder / receipt, json.dumps({"files": files}))


def is_whole(folder: Path, receipt: str = WHOLE) -> bool:
    """Whether the folder was sealed and its files still have the sizes they had then."""
    try:
        files = json.loads((folder / receipt).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


@contextmanager
def reading(path: Path, hint: str = "") -> Iterator[None]:
    """Whatever a torn or foreign file makes a reader raise becomes a ValueError that names it."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ in ("MemoryError", "OutOfMemoryError"):  # torch is not loaded here
            raise
        raise ValueError(f"{path} is torn or foreign: {one_line(error)}{hint}") from error


def read_jsonl(path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of every line that is not blank. ValueError names the line."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    value = json.loads(line)
                    if "\\ud" in line.lower():  # half of a character, which no tokenizer takes
                        json.dumps(value, ensure_ascii=False).encode()
                    yield f"{path} line {number}", value
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(f"cannot read {path}: {reason}; give one JSON object per line") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} line {number}: not JSON ({error})") from error
