"""The run log: what is written is what is read, whatever happens to the file; and its table.

How to run: python -m pytest tests/test_events.py
"""

import ast
import doctest
import json
import logging
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_run import check_event
from hypothesis import given, settings
from hypothesis import strategies as st

import minitlt.events
from minitlt.events import TABLE, EventLog, read_events, table
from minitlt.report import step_table

PACKAGE = Path(minitlt.events.__file__).parent
EVENTS = re.findall(r"^### (\w+)$", TABLE.read_text(), re.MULTILINE)


# Writing and reading.


def test_values_become_json_and_nonfinite_numbers_are_counted(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", rank=3, clock=lambda: 1234.56789)
    log.write(
        "note",
        message=Path("a/b"),
        a=float("nan"),
        b=[1 / 3, float("inf"), {"x": -float("inf")}],
        c=np.float32(0.5),
        d=torch.tensor([1.0, float("nan")]),
        e=True,
        f={1, 2},
    )
    line = (tmp_path / "e.jsonl").read_text()
    assert "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {
        "t": 1234.568, "rank": 3, "event": "note", "message": "a/b", "a": None,
        "b": [0.333333, None, {"x": None}], "c": 0.5, "d": [1.0, None], "e": True, "f": [1, 2],
        "nonfinite": 4,
    }  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(), max_size=4))
def test_any_text_survives(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("log") / "e.jsonl"
    log = EventLog(path, rank=0)
    for text in texts:
        log.write("note", message=text + '{"t":1}\n')
    log.close()
    assert [event["message"] for event in read_events(path)] == [t + '{"t":1}\n' for t in texts]


def test_half_a_last_line_is_normal_and_others_are_reported(tmp_path, caplog):
    path = tmp_path / "e.jsonl"
    log = EventLog(path, rank=0)
    log.write("note", message="one")
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING):
        assert [event["message"] for event in read_events(path)] == ["one"]
        assert not caplog.records
        # A killed run that goes on starts a fresh line.
        EventLog(path, rank=0).write("note", message="two")
        assert [event["message"] for event in read_events(path)] == ["one", "two"]
    assert "1 unreadable lines (2)" in caplog.text
    caplog.clear()
    # Half a line with another rank's whole line glued to it: only the half is lost.
    path.write_bytes(whole[:20] + whole + whole)
    with caplog.at_level(logging.WARNING):
        assert len(read_events(path)) == 2
    assert "1 unreadable lines (1)" in caplog.text


def test_missing_log_is_a_user_error(tmp_path):
    with pytest.raises(ValueError, match=r"no run log here"):
        read_events(tmp_path / "events.jsonl")


def test_a_clock_that_is_set_back_keeps_the_order_of_a_ranks_events(tmp_path):
    """A step that was done again after a resume counts; across ranks time decides."""
    path, times = tmp_path / "events.jsonl", iter([50.0, 30.0, 31.0])
    logs = [EventLog(path, 0, lambda: next(times)), EventLog(path, 1, lambda: 40.0)]
    for log, step in zip((logs[0], logs[0], logs[1], logs[0]), (1, 2, 9, 3), strict=True):
        log.write("update", step=step)
    assert [event["step"] for event in read_events(path)] == [9, 1, 2, 3]


WRITER = """
import sys
from minitlt.events import EventLog
log = EventLog(sys.argv[1], rank=int(sys.argv[2]))
for i in range(1500):
    log.write("note", message="x" * (i * 7919 % 9000), i=i)
"""


def test_two_processes_lose_nothing(tmp_path, caplog):
    path = tmp_path / "e.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(rank)], cwd=PACKAGE.parent)
        for rank in range(2)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    events = read_events(path)
    assert not caplog.records
    for rank in range(2):
        mine = [event for event in events if event["rank"] == rank]
        assert [event["i"] for event in mine] == list(range(1500))
        assert all(len(event["message"]) == event["i"] * 7919 % 9000 for event in mine)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
def test_full_disk_is_said_once_and_survived(capsys):
    log = EventLog("/dev/full", rank=0)
    log.write("note", message="a")
    log.write("note", message="b")
    said = capsys.readouterr().err
    assert said.count("cannot write /dev/full") == 1 and "the run goes on" in said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full (Linux)")
def test_a_full_disk_is_survived_where_nobody_can_be_told(monkeypatch):
    """What a rank says goes to a file beside the log."""
    said = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", said)
    EventLog("/dev/full", rank=0).write("note", message="a")
    with suppress(OSError):
        said.close()


def test_write_after_close_does_not_raise(tmp_path, capsys):
    log = EventLog(tmp_path / "e.jsonl", rank=0)
    log.close()
    log.write("note", message="late")
    assert "the run goes on" in capsys.readouterr().err


def test_docstring_example():
    assert doctest.testmod(minitlt.events).failed == 0


# The tables of events and metrics.


def test_fake_run_writes_exactly_the_table(fake):
    events = read_events(fake / "events.jsonl")
    assert [problem for event in events for problem in check_event(event)] == []
    used: dict[str, set[str]] = {}
    for event in events:
        used.setdefault(event["event"], set()).update(event.keys() - {"t", "rank", "event"})
    assert used == {name: set(table(name)) for name in EVENTS}


def test_package_writes_only_what_the_table_has():
    wrong = []
    for source in PACKAGE.glob("*.py"):
        for call in ast.walk(ast.parse(source.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            if call.func.attr not in ("write", "_write") or not call.args:
                continue
            name = getattr(call.args[0], "value", None)
            if not isinstance(name, str) or not call.keywords:
                continue  # a file, or a method that passes an event on
            fields = {keyword.arg for keyword in call.keywords} - {None}
            if name not in EVENTS or not fields <= set(table(name)):
                wrong.append(f"{source.name}:{call.lineno} {name} {fields}")
    assert wrong == []


def test_trainer_metrics_table_is_what_the_trainer_names():
    sources = [PACKAGE / "rl.py", PACKAGE / "spot.py"]
    text = "".join(source.read_text() for source in sources if source.exists())
    named = set(re.findall(r'"((?:spec|rollout|guard)/\w+)"', text))
    known = {name for name in table("Metrics in TRL's trackers") if name[:5] in ("spec/", "guard")}
    assert known <= named <= set(table("Metrics in TRL's trackers"))


def test_the_table_names_every_event_in_its_order():
    text = TABLE.read_text()
    assert set(EVENTS) <= set(re.findall(r"`(\w+)`", text[text.index("## Events") :]))


def test_metrics_table_is_what_step_table_returns(fake):
    rows = step_table(read_events(fake / "events.jsonl"))
    known = list(table("Metrics of a step"))
    assert all(list(row) == known for row in rows)
    assert all(row[name] is not None for row in rows for name in known)
    for unit, meaning, healthy in table("Metrics of a step").values():
        assert meaning and healthy and "|" not in unit + meaning + healthy


def test_check_event_names_what_is_wrong():
    assert check_event({"event": "nope"}) == ["unknown event 'nope'"]
    problems = check_event({"event": "note", "t": 0, "rank": 0, "text": "x"})
    assert problems == ["note: unknown field 'text'", "note: field 'message' is missing"]
