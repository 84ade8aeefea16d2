"""The parent process of a run: start the ranks, show what they do, collect the results.

The ranks are plain processes that find each other through torch's environment variables, so
`torchrun` and `accelerate launch` can take this module's place. When one fails, the others are
ended within seconds and its last error line is the parent's error. Ctrl-C (or SIGTERM) is passed
on once: the ranks finish their step, write a checkpoint and leave, or are ended after
STOP_SECONDS. A file `stop` in the run folder asks for the same, however long the step takes, and
reaches ranks that another launcher started. Ranks whose parent was killed notice it and leave by
themselves.

Left out: several nodes (use accelerate), restarts (use `--resume`).
How to run: `minitlt train`; `pytest -m slow tests/test_faults.py` does it harm.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from minitlt.common import write_atomically

GRACE_SECONDS = 8.0  # between asking a rank to end and killing it
STOP_SECONDS = 45.0  # for a step and a checkpoint, after Ctrl-C or once the first rank has left
REPEAT_SECONDS = 2.0  # a signal that comes again so soon is the same wish: systemd tells everyone
STOP_FILE = "stop"
_BEGIN = "[minitlt begins]"  # a line in a rank's output: what is above it was another start
_ERROR = re.compile(r"(minitlt|(?!.*(ChildFailed|CalledProcess)Error)[\w.]+(Error|Exception)):")


class RunFailed(RuntimeError):
    """A rank failed; the message is its last error line and where its output is."""


def open_run_folder(run_dir: Path, config: str) -> int:
    """Makes the folder, with config.yaml in it and no old wish to stop, and claims it: until the
    descriptor that comes back and its copies in the ranks are closed, nobody else can.

    Raises ValueError when the folder cannot be written, or belongs to a run that is alive.
    """
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        claim = os.open(run_dir / "logs" / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_atomically(run_dir / "config.yaml", config)
        (run_dir / STOP_FILE).unlink(missing_ok=True)
        return claim
    except BlockingIOError:
        raise ValueError(
            f"a run is alive in {run_dir}; wait for its end, or end it: touch {run_dir / STOP_FILE}"
        ) from None
    except OSError as error:
        raise ValueError(
            f"run folder {run_dir} cannot be written: {error.strerror}; choose another --run-dir"
        ) from error


def launch(
    command: list[str],
    run_dir: Path,
    nproc: int,
    total_steps: int,
    *,
    on_cpu: bool = True,
    agent: bool = False,
    claim: int | None = None,
) -> None:
    """Runs `command` as `nproc` ranks and follows the run log until they end.

    agent: the command starts the ranks itself (accelerate launch). claim: see `open_run_folder`;
    the ranks hold it too, as they may outlive this process.
    Raises RunFailed when a rank fails, KeyboardInterrupt when the run was interrupted.
    """
    from minitlt.report import watch
    from minitlt.swap import sweep

    logs, stop_file = run_dir / "logs", run_dir / STOP_FILE
    asked: list[float] = []  # when signals came
    stop = threading.Event()
    display = threading.Thread(
        target=watch, args=(run_dir / "events.jsonl", total_steps, stop), daemon=True
    )
    display.start()
    processes: list[subprocess.Popen[bytes]] = []
    with _signals_noted(asked):
        try:
            _start(processes, command, logs, nproc, on_cpu, agent, claim)
            failed = _wait(processes, asked, stop_file if agent else None)
        finally:
            stop.set()
            display.join(timeout=5)
            _end(processes)
            sweep()
    codes = [process.returncode for process in processes]
    if failed is not None:
        path = logs / f"rank{failed}.log"
        # accelerate makes a 1 of the 130 with which its ranks stopped
        if not (agent and stop_file.exists() and not _ERROR.match(last_line(path))):
            raise RunFailed(f"rank {failed} {_cause(codes[failed], path)} (its output: {path})")
    if any(codes):
        raise KeyboardInterrupt


@contextmanager
def _signals_noted(asked: list[float]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP interrupt nothing: the time of each goes into `asked`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [n for n in numbers if signal.getsignal(n) != signal.SIG_IGN]  # nohup
    before = [signal.signal(n, lambda *_: asked.append(time.monotonic())) for n in heard]
    try:
        yield
    finally:
        for number, handler in zip(heard, before, strict=True):
            signal.signal(number, handler)


def _cause(code: int, path: Path) -> str:
    if code == -signal.SIGKILL:
        return "was killed; if nobody did that, the machine ran out of memory"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    said = last_line(path)
    if "No space left" not in said and shutil.disk_usage(path.parent).free < 1 << 20:
        own = f"{said}; " if _ERROR.match(said) else ""  # its last words may be lost as well
        said = f"{own}No space left on device"
    return f"failed: {said}"


def _start(
    processes: list[subprocess.Popen[bytes]],
    command: list[str],
    logs: Path,
    nproc: int,
    on_cpu: bool,
    agent: bool,
    claim: int | None,
) -> None:
    """Starts the ranks, or the agent that does; each is in `processes` as soon as it lives."""
    shared = dict(os.environ, MINITLT_LAUNCHER="0")  # 0: not the ranks' own parent
    if not agent:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared["MINITLT_LAUNCHER"] = str(os.getpid())
        shared["WORLD_SIZE"] = shared["LOCAL_WORLD_SIZE"] = str(nproc)
        shared["MINITLT_CLAIM"] = "" if claim is None else str(claim)
    if on_cpu:
        shared["ACCELERATE_USE_CPU"] = "true"
    # OpenMP threads spin: more of them than cores is not twice but twenty times slower.
    shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
    for rank in range(1 if agent else nproc):
        own = {} if agent else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(logs / f"rank{rank}.log", "ab", buffering=0) as output:
            output.write(f"{_BEGIN}\n".encode())
            process = subprocess.Popen(
                command,
                env=shared | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=() if claim is None else (claim,),
                start_new_session=True,  # Ctrl-C reaches the ranks through us, once
            )
        processes.append(process)


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel hands out: rank 0 listens there
    only seconds later, and by then another run's connection would often have been given it."""
    while True:
        port = secrets.choice(range(15_000, 32_000))
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _wait(
    processes: list[subprocess.Popen[bytes]], asked: list[float], stop_file: Path | None
) -> int | None:
    """Waits for all ranks; returns the first rank that failed, or None, also when ranks that were
    asked to stop still run. Passes Ctrl-C on: as a signal, or as a file, because accelerate would
    turn the signal into a kill after seconds.

    Raises RunFailed when a rank stays on long after another one is done.
    """
    passed_on, deadline = False, math.inf
    while True:
        codes = [process.poll() for process in processes]
        if asked:  # one that had just been started heard it as Python itself does
            codes = [130 if code == -signal.SIGINT else code for code in codes]
        stopped = 130 in codes  # an error that comes later is about the rank that has left
        if failed := [(c, rank) for rank, c in enumerate(codes) if c not in (None, 0, 130)]:
            return None if asked and stopped else min(failed)[1]  # killed before missing it
        if None not in codes:
            return None
        if asked and not passed_on:
            passed_on = True
            if stop_file is not None:
                stop_file.touch()
            for process in processes if stop_file is None else ():
                process.send_signal(signal.SIGINT)  # its children are not asked
            _say("stopping after this step; press Ctrl-C again to stop at once")
        if asked or any(code is not None for code in codes):
            deadline = min(deadline, time.monotonic() + STOP_SECONDS)
        if asked and asked[-1] - asked[0] > REPEAT_SECONDS:
            return None
        if time.monotonic() > deadline:
            if not asked and not stopped:
                late = f"rank {codes.index(None)} did not end within {STOP_SECONDS:g} s"
                raise RunFailed(f"{late} after the others")
            _say(f"the step was not done within {STOP_SECONDS:g} s")
            return None
        time.sleep(0.1)


def _say(words: str) -> None:
    with suppress(OSError):  # the terminal may be gone: that was the signal
        print(words, file=sys.stderr)


def _signal(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    """To the ranks and to their children, which may live on when a rank is gone."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):  # none is left
            os.killpg(process.pid, number)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """Ends what still runs: politely first, then by force; no orphan stays."""
    _signal(processes, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, deadline - time.monotonic()))
    _signal(processes, signal.SIGKILL)
    for process in processes:
        process.wait()


def last_line(path: Path) -> str:
    """The error that a rank's output ends with, else its last line that is no warning.

    torch puts `[rank0]: ` before every line of a traceback, and warnings may follow it.
    """
    lines: list[str] = []
    with suppress(OSError):
        text = path.read_text(errors="replace").rpartition(_BEGIN)[2]
        lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    noise = re.compile(r"$|\[|Traceback|File |warnings\.warn|\S+: \w*Warning:")
    said = errors or [line for line in lines if not noise.match(line)] or ["no output"]
    return said[-1][:300]


def finish(run_dir: Path) -> dict[str, Any]:
    """summary.json, pictures, report.html and the table on the screen, from the run log alone.

    Raises RunFailed when the last start of the run did not come to its end, or nothing can be
    written.
    """
    from minitlt.page import render_report
    from minitlt.report import has_ended, print_summary, read_events, summarize

    events = read_events(run_dir / "events.jsonl")
    if not has_ended(events):
        raise RunFailed(f"the ranks left before the run was done (their output: {run_dir}/logs)")
    summary = summarize(events)
    try:
        write_atomically(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
        render_report([run_dir], run_dir / "report.html")
    except OSError as error:
        raise RunFailed(
            f"the run is done, but its report cannot be written: {error.strerror}; "
            f"make room, then: minitlt report {run_dir}"
        ) from error
    print_summary(summary, run_dir)
    return summary
