"""The parent of a run: what becomes of ranks that end, fail, stay or are told to stop.

The ranks here are a few lines of Python that train nothing.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_run import write_fake_run

from minitlt import launch
from minitlt.events import EventLog
from minitlt.launch import RunFailed, finish, last_line

pytestmark = pytest.mark.xdist_group("launch")  # signals to this process
TOLD = """import os, signal, sys, time
told = []
signal.signal(signal.SIGINT, lambda *_: told.append(1))
"""
READY = "os.write(1, b'ready')\n"
LEAVES = f"""{TOLD}{READY}
while not told: time.sleep(0.02)
time.sleep(0.3); print('whole'); sys.exit(130)"""
FAILS = f"""{TOLD}{READY}
while not told: time.sleep(0.02)
raise ValueError('the last step was bad')"""
STAYS = f"""{TOLD}
signal.signal(signal.SIGTERM, lambda *_: None)
{READY}
while True: time.sleep(0.02)"""


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a background job ignores some
        signal.signal(number, signal.default_int_handler)
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(launch, "STOP_SECONDS", 60.0)
    monkeypatch.setattr(launch, "free_port", lambda: 1)


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.6)


@pytest.fixture
def ranks(tmp_path):
    """ranks(code of rank 0, of rank 1, ..): runs them. signals: (seconds, signal) pairs that this
    process gets, counted from when all ranks are ready for theirs."""
    logs = tmp_path / "logs"
    logs.mkdir()
    (tmp_path / "events.jsonl").touch()

    def kill(number, after):
        wait_until(lambda: sum("ready" in p.read_text() for p in logs.glob("*.log")) == number)
        started = time.monotonic()
        for seconds, signum in after:
            time.sleep(max(0.0, started + seconds - time.monotonic()))
            os.kill(os.getpid(), signum)

    def go(*codes, signals=(), **options):
        choose = f"import os; exec({list(codes)!r}[int(os.environ.get('RANK', 0))])"
        killer = threading.Thread(target=kill, args=(len(codes), signals), daemon=True)
        if signals:
            killer.start()
        launch.launch([sys.executable, "-c", choose], tmp_path, len(codes), 1, **options)

    yield go
    for path in logs.glob("*.log"):
        print(path.read_text())


def gone(pid):
    """Whether no such process runs; a zombie does not."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ranks_that_end_well(ranks):
    before = signal.getsignal(signal.SIGTERM)
    ranks("pass", "pass")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_comes_twice_at_once_lets_the_step_be_finished(ranks, tmp_path, monkeypatch):
    """As systemd or a shell would send it, to the launcher and again."""
    monkeypatch.setattr(launch, "REPEAT_SECONDS", 20.0)  # a busy machine
    three = (0.0, signal.SIGTERM), (0.1, signal.SIGINT), (0.2, signal.SIGHUP)
    with pytest.raises(KeyboardInterrupt):
        ranks(LEAVES, LEAVES, signals=three)
    for rank in (0, 1):
        assert "whole" in (tmp_path / "logs" / f"rank{rank}.log").read_text()


def test_a_rank_that_was_just_started_may_be_told_to_stop(ranks, tmp_path):
    """It does not listen yet, so the signal ends it; without a wish that is a failure."""
    with pytest.raises(KeyboardInterrupt):
        ranks(f"import os, time\n{READY}\ntime.sleep(60)", LEAVES, signals=[(0.0, signal.SIGINT)])
    assert "whole" in (tmp_path / "logs" / "rank1.log").read_text()
    with pytest.raises(RunFailed, match="rank 0 was ended by SIGINT"):
        ranks("raise KeyboardInterrupt", "pass")


@pytest.mark.parametrize("other", [LEAVES, STAYS])
def test_a_step_that_does_not_end_is_ended(ranks, capfd, no_patience, other):
    with pytest.raises(KeyboardInterrupt):
        ranks(STAYS, other, signals=[(0.0, signal.SIGINT)])
    assert "the step was not done within 0.6 s" in capfd.readouterr().err


def test_a_second_wish_ends_at_once(ranks, monkeypatch):
    monkeypatch.setattr(launch, "REPEAT_SECONDS", 0.2)
    with pytest.raises(KeyboardInterrupt):
        ranks(STAYS, STAYS, signals=[(0.0, signal.SIGINT), (0.5, signal.SIGINT)])


def test_a_rank_that_stays_when_the_other_is_done(ranks, no_patience):
    with pytest.raises(RunFailed, match=r"rank 1 did not end within 0\.6 s after the others"):
        ranks("pass", STAYS)
    with pytest.raises(KeyboardInterrupt):  # stopped by somebody else
        ranks("raise SystemExit(130)", STAYS)


def test_a_failure_while_the_run_stops_is_said(ranks, tmp_path):
    with pytest.raises(RunFailed, match="rank 1 failed: ValueError: the last step was bad"):
        ranks(STAYS, FAILS, signals=[(0.0, signal.SIGINT)])
    (tmp_path / "stop").touch()
    with pytest.raises(RunFailed, match="rank 0 failed: ValueError: x"):
        ranks("raise ValueError('x')", "raise SystemExit(130)")


def test_accelerate_turns_130_into_1(ranks, tmp_path):
    (tmp_path / "stop").touch()
    stopped = "import subprocess; raise subprocess.CalledProcessError(130, 'a rank')"
    with pytest.raises(KeyboardInterrupt):
        ranks(stopped, agent=True)
    failed = "print('ValueError: no room'); " + stopped
    with pytest.raises(RunFailed, match="rank 0 failed: ValueError: no room"):
        ranks(failed, agent=True)
    with pytest.raises(KeyboardInterrupt):  # what an earlier start said is not heard again
        ranks(stopped, agent=True)
    (tmp_path / "stop").unlink()
    with pytest.raises(RunFailed):
        ranks(stopped, agent=True)


def test_signals_while_the_ranks_are_ended_change_nothing(ranks, tmp_path, monkeypatch):
    """Rank 0 fails at once when it is asked; rank 1 has to be killed, a second later."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    pid = tmp_path / "pid"
    stays = f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))\n{STAYS}"
    with pytest.raises(RunFailed, match="rank 0 failed: ValueError: the last step was bad"):
        ranks(FAILS, stays, signals=[(0.2 * i, signal.SIGINT) for i in range(3)])
    assert gone(pid.read_text())


def test_children_of_a_rank_that_was_killed_do_not_stay(ranks, tmp_path):
    starts = f"""import os, subprocess
child = subprocess.Popen(['sleep', '600'])
open({str(tmp_path / "child")!r}, 'w').write(str(child.pid))
os.kill(os.getpid(), 9)"""
    with pytest.raises(RunFailed, match="rank 1 was killed"):
        ranks(STAYS, starts)
    wait_until(lambda: gone((tmp_path / "child").read_text()))


def test_a_rank_that_cannot_be_started_takes_the_first_one_along(ranks, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(subprocess.Popen, "__init__", _noting(started))
    (tmp_path / "logs" / "rank1.log").mkdir()
    with pytest.raises(IsADirectoryError):
        ranks(STAYS, STAYS)
    assert len(started) == 1 and gone(started[0].pid)
    (tmp_path / "logs" / "rank1.log").rmdir()


def _noting(started, init=subprocess.Popen.__init__):
    def note(self, *args, **kwargs):
        started.append(self)
        init(self, *args, **kwargs)

    return note


def test_a_ranks_own_error_is_said_on_a_full_disk(ranks, monkeypatch):
    full = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=0))
    monkeypatch.setattr(launch, "shutil", full)
    with pytest.raises(RunFailed, match="failed: ValueError: short; No space left on device"):
        ranks("raise ValueError('short')")
    with pytest.raises(RunFailed, match="failed: No space left on device"):
        ranks("raise SystemExit(1)")


def test_ranks_that_leave_early_without_an_error_are_noticed(tmp_path, monkeypatch):
    """A reward called os._exit(0); policy/ and the first summary are of an earlier start."""
    monkeypatch.setattr("minitlt.page.draw", lambda runs: [])
    (tmp_path / "policy").mkdir()
    write_fake_run(tmp_path)
    finish(tmp_path)
    (tmp_path / "summary.json").unlink()
    EventLog(tmp_path / "events.jsonl", 0).write("run", config={})
    with pytest.raises(RunFailed, match="left before the run was done"):
        finish(tmp_path)
    assert not (tmp_path / "summary.json").exists()


def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    write_fake_run(tmp_path)
    monkeypatch.setattr(launch, "write_atomically", full)
    said = f"the run is done, but .* No space left on device; make room, then: .* report {tmp_path}"
    with pytest.raises(RunFailed, match=said):
        finish(tmp_path)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("[rank0]: Traceback (most recent call last):\n[rank0]: OSError: [Errno 28] No space\n"
         "/a/b.py:3: FutureWarning: x is old\n  warnings.warn(\n", "OSError: [Errno 28] No space"),
        ("minitlt: a reward is short\n[rank0]:[W11 Process.cpp] x\n", "minitlt: a reward is short"),
        ("torch.OutOfMemoryError: CUDA\n\n", "torch.OutOfMemoryError: CUDA"),
        ("Bus error\n/a/b.py:3: UserWarning: y\n", "Bus error"),
        ("/a/b.py:3: UserWarning: y\n", "no output"),
    ],
)  # fmt: skip
def test_the_last_error_of_a_rank_is_found_among_warnings(tmp_path, lines, said):
    (tmp_path / "rank0.log").write_text(lines)
    assert last_line(tmp_path / "rank0.log") == said
    assert last_line(tmp_path / "none.log") == "no output"
