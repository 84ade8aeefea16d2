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
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
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


class EventLog:
    """Append events of one rank to a JSONL file that all ranks of a machine share.

    A line goes out in a single `os.write` on an O_APPEND descriptor, so lines of several
    processes never mix. Half a line, left by a kill or a full disk, is glued to the next one;
    `parse_line` tells them apart. A log that cannot be written (full disk) says so once on stderr
    and the run goes on. `clock` returns unix seconds (replaced by tests).
    """

    def __init__(self, path: str | Path, rank: int, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self.rank = rank
        self._clock = clock
        self._said_broken = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: str, **fields: Any) -> None:
        """Append one event. Floats keep 6 significant digits; NaN and infinity become null."""
        assert not {"t", "rank"} & fields.keys(), "t and rank are set by the log itself"
        # Written and read once, which turns every number into what the log shall hold of it.
        bad: list[str] = []  # NaN and infinities, which become None
        text = json.dumps(fields, default=_plain)
        clean = json.loads(text, parse_float=_rounded, parse_constant=bad.append)
        if bad:
            clean["nonfinite"] = len(bad)
        record = {"t": round(self._clock(), 3), "rank": self.rank, "event": event, **clean}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError("the disk is full")
        except OSError as error:
            if not self._said_broken:
                said = f"cannot write {self.path} ({error}); the run goes on"
                with suppress(OSError):  # of a rank this goes to a file as well
                    print(f"minitlt: {said}", file=sys.stderr)
            self._said_broken = True

    def close(self) -> None:
        """Close the file; later writes are an error of the caller, reported like a full disk."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _plain(value: Any) -> Any:
    """What JSON can hold of a value that it does not know."""
    if hasattr(value, "tolist"):  # numpy and torch, without importing either
        return value.tolist()
    return list(value) if isinstance(value, set | frozenset) else str(value)


def _rounded(number: str) -> float:
    return float(f"{float(number):.6g}")


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
    # A clock that was set back does not change the order in which a rank wrote.
    latest: dict[Any, float] = {}
    times = []
    for event in events:
        rank = event.get("rank")
        times.append(max(event.get("t", 0.0), latest.get(rank, 0.0)))
        latest[rank] = times[-1]
    return [events[i] for i in sorted(range(len(events)), key=times.__getitem__)]
