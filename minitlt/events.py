"""The run log: one JSON line per event.

Idea: every process of a run appends to the same `events.jsonl`, one `write` call per line on a
file opened for appending, which the kernel keeps whole between processes. Nothing else records a
run: the summary and the live display (`minitlt.report`), the pictures and the HTML page
(`minitlt.pictures`) read this file, so a run can be looked at while it runs, after it crashed, or
on another machine. `metrics.md`, beside this file, says what every event, field and metric means.

Left out: levels, rotation and remote sinks (TRL's `report_to` serves TensorBoard, W&B and
trackio); appends from several machines to one NFS file (there the kernel does not keep lines
whole: give each node its own file).

How to run:

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = EventLog(Path(folder) / "events.jsonl", rank=0)
    ...     log.write("note", message="hello")
    ...     print([event["message"] for event in read_events(log.path)])
    ['hello']
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
logger = logging.getLogger("minitlt")

TABLE = Path(__file__).parent / "metrics.md"  # every event, field and metric, with its meaning


def table(title: str) -> dict[str, list[str]]:
    """First cell -> other cells of the table below a heading of metrics.md; no heading: empty."""
    _, _, rest = TABLE.read_text(encoding="utf-8").partition(f"# {title}\n")
    lines = rest.partition("\n#")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in rows}


def check_event(event: Event) -> list[str]:
    """Say how `event` departs from metrics.md: unknown event, unknown field, missing field."""
    name = event.get("event", "")
    known = table(name)
    if not known:
        return [f"unknown event {name!r}"]
    found = set(event) - {"t", "rank", "event", "nonfinite"}
    required = {field for field, (text,) in known.items() if not text.startswith("optional")}
    unknown = [f"{name}: unknown field {field!r}" for field in sorted(found - set(known))]
    return unknown + [f"{name}: field {field!r} is missing" for field in sorted(required - found)]


class EventLog:
    """Append events of one rank to a JSONL file that all ranks of a machine share.

    A line goes out in a single `os.write` on an O_APPEND descriptor, so lines of several
    processes never mix. A log that cannot be written (full disk) says so once on stderr and the
    run goes on. `clock` returns unix seconds (replaced by tests).
    """

    def __init__(self, path: str | Path, rank: int, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.rank = rank
        self._clock = clock
        self._said_broken = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        # A run that was killed in the middle of a write leaves half a line: start a fresh one.
        size = os.fstat(self._fd).st_size
        self._mid_line = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Floats keep 6 significant digits; NaN and infinity become null."""
        assert not {"t", "rank"} & fields.keys(), "t and rank are set by the log itself"
        bad: list[float] = []
        clean = {name: _plain(value, bad) for name, value in fields.items()}
        if bad:
            clean["nonfinite"] = len(bad)
        record = {"t": round(self._clock(), 3), "rank": self.rank, "event": event, **clean}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self._mid_line:
            line = b"\n" + line
        try:
            written = os.write(self._fd, line)
        except OSError as error:
            self._complain(str(error))
            return
        self._mid_line = 0 < written < len(line)
        if written < len(line):
            self._complain("the disk is full")

    def _complain(self, reason: str) -> None:
        if not self._said_broken:
            print(f"minitlt: cannot write {self.path} ({reason}); the run goes on", file=sys.stderr)
            self._said_broken = True

    def close(self) -> None:
        """Close the file; later writes are an error of the caller, reported like a full disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _plain(value: Any, bad: list[float]) -> Any:
    """Turn `value` into what JSON can hold; append every non-finite number to `bad`."""
    if isinstance(value, float):
        if not math.isfinite(value):
            bad.append(value)
            return None
        return float(f"{value:.6g}")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item, bad) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, bad) for item in value]
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return _plain(value.tolist(), bad)
    return str(value)


def parse_line(line: bytes) -> Event | None:
    """Parse one line; after a torn write the last record glued to it is recovered."""
    start = line.rfind(b'{"t":')  # inside a JSON string the quotes would be escaped
    try:
        event = json.loads(line[max(start, 0) :])
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) and "event" in event else None


def read_events(path: str | Path) -> list[Event]:
    """Read a run log, oldest first. Half a last line is normal while a run writes, or after a
    kill; any other unreadable line is reported through `logging` and skipped.

    Raises ValueError when there is no such file.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no run log here (a run folder holds events.jsonl)")
    lines = path.read_bytes().split(b"\n")
    events, torn = [], []
    for number, line in enumerate(lines, start=1):
        event = parse_line(line) if line.strip() else None
        if event is not None:
            events.append(event)
        # A recovered line still lost the record in front of it.
        whole = event is not None and line.startswith(b'{"t":') and line.count(b'{"t":') == 1
        if line.strip() and not whole and number < len(lines):
            torn.append(number)
    if torn:
        some = ", ".join(map(str, torn[:5])) + (", ..." if len(torn) > 5 else "")
        logger.warning("%s: %d unreadable lines (%s)", path, len(torn), some)
    return sorted(events, key=lambda event: event.get("t", 0.0))
