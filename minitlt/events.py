"""The run log: one JSON line per event, the table of all events, and the table of all metrics.

Idea: every process of a run appends to the same `events.jsonl`, one `write` call per line on a
file opened for appending, which the kernel keeps whole between processes. Nothing else records a
run: the summary and the live display (`minitlt.report`), the pictures and the HTML page
(`minitlt.pictures`) read this file, so a run can be looked at while it runs, after it crashed, or
on another machine.

Each line has `t` (unix seconds), `rank`, `event`, and the event's own fields; `nonfinite` counts
the NaN or infinite numbers that were written as null. Steps count from 1. A training step writes,
in this order: `rollout_start`, `rollout_progress` (about once a second), `rollout_end`; on a rank
that is done early `harvest_start`, `harvest_step`, `publish`, `harvest_end`; on a rank that still
generates `swap` and `swap_result`; then `merge`, `update` and a few `row` samples. `run` opens the
log (again after a resume), `summary` closes it, `guard` and `note` may come at any time. The table
EVENTS says what every field means; METRICS says the same of every number derived from them, and
TRAINER_METRICS of those that reach TRL's trackers.

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

# event -> field -> meaning. A meaning that starts with "optional" names a field that may be absent.
EVENTS: dict[str, dict[str, str]] = {
    "run": {
        "config": "the resolved configuration (dict)",
        "versions": "package name -> version (dict)",
        "world_size": "number of ranks",
        "target": "name, layers, backend path and dtype of the target model (dict)",
        "machine": "cpu count and device (dict)",
    },
    "rollout_start": {
        "step": "optimizer step that this rollout feeds, from 1",
        "rows": "completions that this rank will generate",
        "version": "version of the policy's weights",
    },
    "rollout_progress": {
        "step": "optimizer step",
        "active": "rows still generating",
        "done": "rows finished",
        "tokens": "tokens emitted so far in this rollout",
        "seconds": "seconds since the rollout started",
        "tok_s": "tokens per second since the previous progress event",
        "accept_len": "accept length since the previous progress event",
        "arm": "strategy used most since the previous progress event ('off' = plain)",
    },
    "rollout_end": {
        "step": "optimizer step",
        "seconds": "seconds of generation on this rank",
        "rows": "completions generated",
        "tokens": "tokens emitted",
        "verify_steps": "target forwards after prefill",
        "accept_len": "tokens per verify step and row, the target's own included (ratio of sums)",
        "accept_by_position": "entry i-1: fraction of verify steps with drafts that accepted >= i",
        "lengths": "completion lengths, tokens",
        "truncated": "rows cut by the length cap",
        "arms": "strategy name -> {steps, tokens, seconds}",
        "drafter_version": "version of the drafter at the end",
        "active_trace": "list of [seconds since the start, rows still active]",
    },
    "harvest_start": {"step": "optimizer step"},
    "harvest_step": {
        "step": "optimizer step",
        "n": "drafter steps taken so far in this window",
        "seconds": "seconds of this drafter step",
        "loss": "drafter loss",
        "tokens": "tokens in the drafter's batch",
        "acceptance": "optional: expected acceptance on the batch, 0..1",
    },
    "harvest_end": {
        "step": "optimizer step",
        "available_s": "length of this rank's idle window, seconds",
        "harvested_s": "seconds of it spent on drafter steps",
        "overshoot_s": "seconds that the last drafter step outlived the window",
        "drafter_steps": "drafter steps in this window",
        "tokens": "tokens trained on",
        "loss_first": "drafter loss of the window's first step",
        "loss_last": "drafter loss of its last step",
        "buffer_tokens": "tokens in the replay buffer",
    },
    "publish": {
        "step": "optimizer step",
        "version": "drafter version written",
        "seconds": "seconds to write it",
        "bytes": "its size",
    },
    "swap": {
        "step": "optimizer step",
        "version": "drafter version loaded",
        "source_rank": "rank that published it",
        "seconds": "seconds that generation paused",
        "drafter_steps": "optional: drafter steps behind that version in its window",
        "accept_before": "optional: accept length before the swap",
        "accept_after": "optional: accept length after it",
    },
    "swap_result": {
        "step": "optimizer step",
        "version": "drafter version",
        "accept_before": "accept length before the swap",
        "accept_after": "accept length after it",
    },
    "merge": {
        "step": "optimizer step",
        "seconds": "seconds of the merge itself",
        "steps_by_rank": "drafter steps of each rank since the last merge (the weights)",
        "fingerprint": "hash of the merged drafter, equal on all ranks",
        "wait_s": "seconds this rank waited for the others before it",
    },
    "update": {
        "step": "optimizer step",
        "seconds": "seconds of the step that were not rollout",
        "reward": "mean reward of the step's completions",
        "reward_std": "standard deviation of the rewards",
        "loss": "policy loss",
        "grad_norm": "norm of the policy gradient before clipping",
        "mean_length": "mean completion length, tokens",
        "kl": "optional: mean KL to the reference policy",
        "entropy": "optional: mean entropy of the policy, nats per token",
        "step_seconds": "seconds of the whole training step",
    },
    "row": {
        "step": "optimizer step",
        "row": "global row index",
        "prompt": "prompt text",
        "completion": "completion text",
        "reward": "its reward",
        "token_flags": "per token: 1 = drafted and accepted, 0 = the target's own",
        "token_texts": "per token: its text",
    },
    "guard": {
        "name": "which guard spoke",
        "count": "how often so far",
        "message": "what it saw and what was done",
    },
    "note": {"message": "one line for the reader of the log"},
    "summary": {
        "reward_first": "mean reward, first third of the steps",
        "reward_last": "mean reward, last third",
        "accept_first": "accept length, first third",
        "accept_last": "accept length, last third",
        "tok_s_plain": "optional: tokens per second, sample rows generated again without drafts",
        "tok_s_spec": "optional: tokens per second, the same rows with drafts",
        "idle_available_s": "idle seconds, all ranks",
        "idle_harvested_s": "idle seconds spent on drafter steps, all ranks",
        "drafter_steps": "drafter steps, all ranks",
        "token_mismatches": "optional: tokens that differ between plain and speculative (fp32)",
        "steps": "optimizer steps done",
        "wall_s": "seconds from the first to the last event, pauses between resumes not counted",
    },
}

# Columns of `step_table`: name -> (unit, meaning, what is healthy).
METRICS: dict[str, tuple[str, str, str]] = {
    "step": ("", "optimizer step, from 1", "every step present"),
    "end_s": ("s", "when the step ended, since the start", "even spacing"),
    "reward": ("", "mean reward of the step's completions", "rises"),
    "reward_std": ("", "standard deviation of the rewards", "above 0: equal rewards teach nothing"),
    "loss": ("", "policy loss", "small and finite; not a measure of progress in GRPO"),
    "grad_norm": ("", "policy gradient norm before clipping", "finite, no spikes"),
    "mean_length": ("tokens", "mean completion length", "no drift to the cap"),
    "kl": ("nats", "mean KL to the reference policy", "grows slowly"),
    "entropy": ("nats", "mean entropy of the policy", "falls slowly, not to 0"),
    "step_s": ("s", "seconds of the whole step", "falls as the accept length rises"),
    "rollout_s": ("s", "generation seconds of the slowest rank", "the largest part of step_s"),
    "tok_s": ("tokens/s", "tokens of all ranks per second of the slowest rank", "rises"),
    "accept_len": ("tokens", "tokens per verify step and row, ratio of sums", "above 1, rises"),
    "truncated": ("rows", "completions cut by the length cap", "few"),
    "idle_available_s": ("s", "idle windows, summed over ranks", "small, or harvested"),
    "idle_harvested_s": ("s", "part of it spent on drafter steps", "close to idle_available_s"),
    "overshoot_s": ("s", "drafter steps outliving their windows, summed over ranks", "near 0"),
    "drafter_steps": ("", "drafter steps, summed over ranks", "above 0 once rows are buffered"),
    "drafter_loss": ("", "drafter loss at the end of the windows", "falls"),
}


# What the trainer adds to TRL's own metrics (TensorBoard, W&B, trackio): the same three columns.
TRAINER_METRICS: dict[str, tuple[str, str, str]] = {
    "spec/accept_length": ("tokens", "tokens per verify step and row, all ranks", "above 1, rises"),
    "spec/verify_steps": ("", "target forwards after prefill, all ranks", "falls"),
    "rollout/seconds": ("s", "generation seconds of the slowest rank", "falls"),
    "rollout/tokens_per_second": ("tokens/s", "tokens of all ranks per such second", "rises"),
    "guard/logprob_gap": ("nats", "largest |engine - trainer| logprob of a sample", "below 1e-3"),
}


def check_event(event: Event) -> list[str]:
    """Say how `event` departs from EVENTS: unknown event, unknown field, missing field."""
    name = event.get("event", "")
    if name not in EVENTS:
        return [f"unknown event {name!r}"]
    known = EVENTS[name]
    found = set(event) - {"t", "rank", "event", "nonfinite"}
    required = {field for field, text in known.items() if not text.startswith("optional")}
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
    except ValueError:
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
