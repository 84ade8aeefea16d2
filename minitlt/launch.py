"""The parent process of a run: start the ranks, show what they do, collect the results.

The ranks are plain processes that find each other through torch's environment variables, so
`torchrun` and `accelerate launch` can take this module's place. When one fails, the others are
ended within seconds and its last error line is the parent's error. Ctrl-C (or SIGTERM) is passed
on once: the ranks finish their step, write a checkpoint and leave. A file `stop` in the run folder
asks for the same and reaches ranks that another launcher started. Ranks whose parent was killed
notice it and leave by themselves.

Left out: several nodes (use accelerate), restarts (use `--resume`).
How to run: `minitlt train`; `pytest -m slow tests/test_faults.py` does it harm.
"""

from __future__ import annotations

import fcntl
import json
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
from contextlib import suppress
from pathlib import Path
from typing import Any

from minitlt.common import write_atomically

GRACE_SECONDS = 8.0  # between asking a rank to end and killing it
STOP_FILE = "stop"


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

    logs = run_dir / "logs"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)  # raises KeyboardInterrupt
    stop_file = run_dir / STOP_FILE
    processes = _start(command, logs, nproc, on_cpu, agent, () if claim is None else (claim,))
    stop = threading.Event()
    display = threading.Thread(
        target=watch, args=(run_dir / "events.jsonl", total_steps, stop), daemon=True
    )
    display.start()
    try:
        failed = _wait(processes, stop_file if agent else None)
    finally:
        stop.set()
        display.join(timeout=5)
        _end(processes)
        sweep()
    codes = [process.returncode for process in processes]
    if codes.count(130) == nproc or (130 in codes and failed is None) or stop_file.exists():
        raise KeyboardInterrupt
    if failed is not None:
        path = logs / f"rank{failed}.log"
        raise RunFailed(f"rank {failed} {_cause(codes[failed], path)} (its output: {path})")


def _cause(code: int, path: Path) -> str:
    if code == -signal.SIGKILL:
        return "was killed; if nobody did that, the machine ran out of memory"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if shutil.disk_usage(path.parent).free < 1 << 20:  # then its own last words are lost as well
        return "failed: No space left on device"
    return f"failed: {last_line(path)}"


def _start(
    command: list[str], logs: Path, nproc: int, on_cpu: bool, agent: bool, fds: tuple[int, ...]
) -> list[subprocess.Popen[bytes]]:
    shared = dict(os.environ, MINITLT_LAUNCHER="0")  # 0: not the ranks' own parent
    if not agent:
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared["MINITLT_LAUNCHER"] = str(os.getpid())
        shared["WORLD_SIZE"] = shared["LOCAL_WORLD_SIZE"] = str(nproc)
    if on_cpu:
        shared["ACCELERATE_USE_CPU"] = "true"
    # OpenMP threads spin: more of them than cores is not twice but twenty times slower.
    shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // nproc))
    processes = []
    for rank in range(1 if agent else nproc):
        own = {} if agent else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(logs / f"rank{rank}.log", "ab") as output:
            process = subprocess.Popen(
                command,
                env=shared | own,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                start_new_session=True,  # Ctrl-C reaches the ranks through us, once
            )
        processes.append(process)
    return processes


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel hands out: rank 0 listens there
    only seconds later, and by then another run's connection would often have been given it."""
    while True:
        port = secrets.choice(range(15_000, 32_000))
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _wait(processes: list[subprocess.Popen[bytes]], stop_file: Path | None) -> int | None:
    """Waits for all ranks; returns the first rank that failed, or None. Passes Ctrl-C on: as a
    signal, or as a file, because accelerate would turn the signal into a kill after seconds."""
    interrupted = False
    while True:
        try:
            codes = [process.poll() for process in processes]
            if failed := [(c, rank) for rank, c in enumerate(codes) if c not in (None, 0, 130)]:
                return min(failed)[1]  # a rank that was killed before those that missed it
            if None not in codes:
                return None
            time.sleep(0.1)
        except KeyboardInterrupt:
            if interrupted:
                raise
            interrupted = True
            print("stopping after this step; press Ctrl-C again to stop at once", file=sys.stderr)
            if stop_file is not None:
                stop_file.touch()
            else:
                _signal(processes, signal.SIGINT)


def _signal(processes: list[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
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
        text = path.read_text(errors="replace")
        lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in text.splitlines()]
    errors = [line for line in lines if re.match(r"(minitlt|[\w.]+(Error|Exception)):", line)]
    noise = re.compile(r"$|\[|Traceback|File |warnings\.warn|\S+: \w*Warning:")
    said = errors or [line for line in lines if not noise.match(line)] or ["no output"]
    return said[-1][:300]


def finish(run_dir: Path) -> dict[str, Any]:
    """summary.json, pictures, report.html and the table on the screen, from the run log alone."""
    from minitlt.page import render_report
    from minitlt.report import print_summary, read_events, summarize

    if not (run_dir / "policy").is_dir():
        raise RunFailed(f"the ranks left before the run was done (their output: {run_dir}/logs)")
    summary = summarize(read_events(run_dir / "events.jsonl"))
    write_atomically(run_dir / "summary.json", json.dumps(summary, indent=2) + "\n")
    render_report([run_dir], run_dir / "report.html")
    print_summary(summary, run_dir)
    return summary
