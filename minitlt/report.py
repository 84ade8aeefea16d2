"""What a run log says: the summary table, the metrics per step, and the live display.

Idea: nothing here is measured; every number is derived from `events.jsonl` (`minitlt.events` says
what is in it), so that a crashed, a resumed and a running run are read by the same code. The live
display follows the file from a parent process or a thread and cannot disturb the training.

Left out: any state of its own. The pictures and the HTML page are in `minitlt.pictures`.

How to run: `minitlt train` shows it, `minitlt report RUN` draws it afterwards.
"""

import sys
import threading
import time
from collections.abc import Iterable
from math import floor, log10
from pathlib import Path
from typing import Any

from minitlt.events import Event, parse_line
from minitlt.events import read_events as read_events


def run_seconds(events: list[Event]) -> list[float]:
    """Seconds since the first event, one per event; the pause before a resume counts as nothing."""
    seconds, pause = [], 0.0
    for index, event in enumerate(events):
        if index and event["event"] == "run":
            pause += event["t"] - events[index - 1]["t"]
        seconds.append(event["t"] - events[0]["t"] - pause)
    return seconds


def by_step(events: Iterable[Event], name: str) -> dict[int, list[Event]]:
    """Events called `name` as step -> one per rank, in rank order.

    After a resume a step may be in the log twice; the later one is the one that counted.
    """
    last = {(event["step"], event["rank"]): event for event in events if event["event"] == name}
    steps: dict[int, list[Event]] = {}
    for step, rank in sorted(last):
        steps.setdefault(step, []).append(last[step, rank])
    return steps


def ratio(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Ratio of sums of (numerator, denominator) pairs; None when nothing was counted.

    >>> ratio([(30, 10), (90, 90)])  # accept lengths 3 and 1, weighted by their row-steps
    1.2
    """
    pairs = list(pairs)
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below > 0 else None


def _accept_pairs(ends: Iterable[Event]) -> list[tuple[float, float]]:
    """(tokens, row-steps) of each rollout; row-steps are what its accept length divided by."""
    return [(end["tokens"], end["tokens"] / end["accept_len"]) for end in ends if end["accept_len"]]


def step_table(events: list[Event]) -> list[dict[str, Any]]:
    """One dict per step with the columns of metrics.md, over all ranks; None where not logged."""
    updates = {step: ranks[0] for step, ranks in by_step(events, "update").items()}
    rollouts, harvests = by_step(events, "rollout_end"), by_step(events, "harvest_end")
    clock = {id(event): at for event, at in zip(events, run_seconds(events), strict=True)}
    rows = []
    for step in sorted(updates.keys() | rollouts.keys()):
        update, ends, windows = updates.get(step, {}), rollouts.get(step, []), harvests.get(step)
        slowest = max((end["seconds"] for end in ends), default=None)
        row: dict[str, Any] = {"step": step, "end_s": clock[id(update)] if update else None}
        for name in ("reward", "reward_std", "loss", "grad_norm", "mean_length", "kl", "entropy"):
            row[name] = update.get(name)
        row["step_s"] = update.get("step_seconds")
        row["rollout_s"] = slowest
        row["tok_s"] = sum(end["tokens"] for end in ends) / slowest if slowest else None
        row["accept_len"] = ratio(_accept_pairs(ends))
        row["truncated"] = sum(end["truncated"] for end in ends) if ends else None
        for name, field in (
            ("idle_available_s", "available_s"),
            ("idle_harvested_s", "harvested_s"),
            ("overshoot_s", "overshoot_s"),
            ("drafter_steps", "drafter_steps"),
        ):
            row[name] = sum(window[field] for window in windows) if windows else None
        if not windows and len(ends) > 1:  # nobody harvested: the idle time was there all the same
            last = max(end["t"] for end in ends)
            row["idle_available_s"] = sum(last - end["t"] for end in ends)
        losses = [window["loss_last"] for window in windows or []]
        row["drafter_loss"] = mean(losses)
        rows.append(row)
    return rows


def thirds(items: list[Any]) -> tuple[list[Any], list[Any]]:
    """The first and the last third (at least one item each)."""
    count = max(1, len(items) // 3)
    return items[:count], items[-count:]


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there, else None."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def accept_thirds(events: Iterable[Event]) -> tuple[float | None, float | None]:
    """Accept length of the first and the last third of the rollouts (ratios of sums)."""
    first, last = thirds(list(by_step(events, "rollout_end").values()))
    return (
        ratio(pair for ends in first for pair in _accept_pairs(ends)),
        ratio(pair for ends in last for pair in _accept_pairs(ends)),
    )


def summarize(events: list[Event]) -> dict[str, Any]:
    """The keys of summary.json that the log can tell (`summary` in metrics.md).

    The measurements made after training (`tok_s_plain`, `tok_s_spec`, `token_mismatches`) are
    there only if the log already holds a `summary` event that has them.
    """
    rows = step_table(events)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    accept_first, accept_last = accept_thirds(events)
    summary = {
        "reward_first": mean(thirds(rewards)[0]),
        "reward_last": mean(thirds(rewards)[1]),
        "accept_first": accept_first,
        "accept_last": accept_last,
        "idle_available_s": sum(row["idle_available_s"] or 0.0 for row in rows),
        "idle_harvested_s": sum(row["idle_harvested_s"] or 0.0 for row in rows),
        "drafter_steps": sum(row["drafter_steps"] or 0 for row in rows),
        "steps": max(by_step(events, "update"), default=0),
        "wall_s": run_seconds(events)[-1] if events else 0.0,
    }
    for event in events:
        if event["event"] == "summary":
            measured = ("tok_s_plain", "tok_s_spec", "token_mismatches")
            summary |= {key: event[key] for key in measured if key in event}
    rounded = {key: float(f"{x:.6g}") for key, x in summary.items() if isinstance(x, float)}
    return summary | rounded


def number(value: float | None, digits: int = 3) -> str:
    """Format for people: about three significant digits, thousands grouped, '-' for None.

    >>> number(0.12345), number(1234.5), number(None)
    ('0.123', '1,234', '-')
    """
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    places = digits - 1 - floor(log10(abs(value)))
    return f"{value:.{min(places, 4)}f}"


def duration(seconds: float | None) -> str:
    """Minutes and seconds, with hours where there are any; '-' for None.

    >>> duration(187), duration(3787)
    ('3:07', '1:03:07')
    """
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, what the value is) for each line of the summary table."""

    def change(first: str, last: str) -> str:
        return f"{number(summary.get(first))} -> {number(summary.get(last))}"

    accept = "tokens per verify step and row, likewise"
    rows = [
        ("Reward", change("reward_first", "reward_last"), "mean, first third -> last third"),
        ("Accept length", change("accept_first", "accept_last"), accept),
    ]
    plain, spec = summary.get("tok_s_plain"), summary.get("tok_s_spec")
    if plain and spec:
        gain = f"plain -> speculative, same rows: {spec / plain:.2f} x"
        rows.append(("Tokens per second", change("tok_s_plain", "tok_s_spec"), gain))
    available, harvested = summary["idle_available_s"], summary["idle_harvested_s"]
    share = f" ({harvested / available:.0%})" if available else ""
    rows.append(("Idle time", f"{number(available)} s", "ranks waiting for the last one, summed"))
    rows.append(("Harvested", f"{number(harvested)} s", f"of it, for drafter steps{share}"))
    rows.append(("Drafter steps", number(summary["drafter_steps"]), "summed over ranks"))
    if (odd := summary.get("token_mismatches")) is not None:
        rows.append(("Token mismatches", number(odd), "plain against speculative (0 = lossless)"))
    wall = f"in {duration(summary['wall_s'])} (minutes:seconds)"
    rows.append(("Steps", number(summary["steps"]), wall))
    return rows


def print_summary(summary: dict[str, Any], run_dir: str | Path) -> None:
    """Print the summary as a table, then which files of the run folder exist."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="What happened", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("", style="bold", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("", style="dim")
    for row in summary_rows(summary):
        table.add_row(*row)
    console = Console()
    console.print(table)
    run_dir = Path(run_dir)
    order = ("report.html", "pictures", "summary.json", "events.jsonl", "policy", "drafter")
    names = [name + "/" * (run_dir / name).is_dir() for name in order if (run_dir / name).exists()]
    console.print(
        f"Files in {run_dir}: {', '.join(names)}", soft_wrap=True, highlight=False, markup=False
    )


# What a rank does after the event of that name.
_NEXT = {"rollout_start": "generating", "rollout_end": "waiting", "harvest_start": "harvesting",
         "harvest_end": "merging", "merge": "updating"}  # fmt: skip
_STYLE = {"generating": "bold blue", "harvesting": "bold green", "merging": "yellow",
          "updating": "magenta"}  # fmt: skip


class Board:
    """The state of a run, fed one event at a time; renders itself as lines or as a table."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.doing: dict[int, tuple[str, float]] = {}  # rank -> what it does, since when
        self.latest: dict[int, dict[str, Event]] = {}  # rank -> event name -> the last such event
        self.idle: dict[int, list[float]] = {}  # rank -> [available, harvested] in closed windows
        self.updates: list[Event] = []
        self.notes: list[str] = []
        self.started = self.now = 0.0
        self._told = [0.0, 0.0]

    def feed(self, event: Event) -> list[str]:
        """Take in one event; return the plain lines that it is worth.

        An event that lacks a field it should have is worth a note, and nothing else.
        """
        try:
            return self._take(event)
        except (KeyError, TypeError) as error:
            note = f"display: event {event['event']!r} is not as expected ({error!r})"
            known = note in self.notes
            self.notes += [] if known else [note]
            return [] if known else [note]

    def _take(self, event: Event) -> list[str]:
        name, rank, self.now = event["event"], event["rank"], event["t"]
        self.latest.setdefault(rank, {})[name] = event
        if name in _NEXT:
            self.doing[rank] = _NEXT[name], self.now
        if name == "run":
            self.started = self.now
            for index in range(event["world_size"]):
                self.doing.setdefault(index, ("starting", self.now))
            target = event["target"].get("name", "?")
            return [f"{target}, {event['world_size']} ranks, {self.total_steps} steps"]
        if name == "harvest_end":
            idle = self.idle.setdefault(rank, [0.0, 0.0])
            idle[0] += event["available_s"]
            idle[1] += event["harvested_s"]
        if name == "update":
            self.updates.append(event)
            self._all_do("waiting")
            return [self._step_line(event)]
        if name in ("guard", "note"):
            self.notes.append(f"{event.get('name', 'note')}: {event['message']}")
            return [self.notes[-1]]
        if name in ("rollout_end", "harvest_end"):  # all wait, and nothing is to be merged: update
            doing = {what for what, _ in self.doing.values()}
            if doing == {"waiting"} or (len(self.doing) == 1 and doing == {"merging"}):
                self._all_do("updating")
        return []

    def _all_do(self, what: str) -> None:
        self.doing = dict.fromkeys(self.doing, (what, self.now))

    def _step_line(self, update: Event) -> str:
        step, total = update["step"], self.total_steps
        ends = [events["rollout_end"] for events in self.latest.values() if "rollout_end" in events]
        ends = [end for end in ends if end["step"] == step]
        slowest = max((end["seconds"] for end in ends), default=0.0)
        rate = sum(end["tokens"] for end in ends) / slowest if slowest else None
        idle = [sum(part) for part in zip(*self.idle.values(), strict=True)] or [0.0, 0.0]
        now = [after - before for after, before in zip(idle, self._told, strict=True)]
        self._told = idle
        return (
            f"step {step:>{len(str(total))}}/{total}  reward {number(update['reward'])}"
            f"  accept length {number(ratio(_accept_pairs(ends)))}  {number(rate)} tok/s"
            f"  idle {number(now[0])} s, harvested {number(now[1])} s"
            f"  took {duration(update['step_seconds'])}, left {duration(self.seconds_left())}"
        )

    def seconds_left(self) -> float | None:
        """Remaining steps times the mean of the last five; None before the first step ends."""
        recent = mean(update["step_seconds"] for update in self.updates[-5:])
        return None if recent is None else (self.total_steps - self.updates[-1]["step"]) * recent

    def _progress(self, rank: int) -> Event:
        """The newest of a rank's rollout events, with the rate and the rows done."""
        events = self.latest.get(rank, {})
        known = [events[n] for n in ("rollout_start", "rollout_progress", "rollout_end")
                 if n in events]  # fmt: skip
        newest = max(known, key=lambda event: event["t"], default={})
        start = {"done": 0, "rows": events.get("rollout_start", {}).get("rows", 0)}
        if newest.get("event") == "rollout_end":
            start |= {"done": newest["rows"], "tok_s": newest["tokens"] / (newest["seconds"] or 1)}
        return start | newest

    def _window(self, rank: int) -> tuple[float, int]:
        """Seconds and drafter steps of the open idle window."""
        what, since = self.doing[rank]
        step = self.latest.get(rank, {}).get("harvest_step", {"t": 0.0, "n": 0})
        is_open = what == "harvesting" and step["t"] >= since
        return (step["t"] - since, step["n"]) if is_open else (0.0, 0)

    def phase_line(self, now: float) -> str:
        """One plain line: what every rank is doing at unix time `now`."""
        parts = []
        for rank, (what, _) in sorted(self.doing.items()):
            text = f"rank {rank} {what}"
            if what == "generating":
                at = self._progress(rank)
                text += f", {at['done']} of {at['rows']} rows done, {number(at.get('tok_s'))} tok/s"
            elif what == "harvesting":
                text += f", {self._window(rank)[1]} drafter steps"
            parts.append(text)
        return f"  [{duration(max(now, self.now) - self.started)}] " + "; ".join(parts)

    def renderable(self, now: float) -> Any:
        """A rich renderable of the whole board at unix time `now`."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        rewards = [u["reward"] for u in self.updates if u["reward"] is not None]
        head = (
            f"step {self.updates[-1]['step'] if self.updates else 0}/{self.total_steps}   "
            f"{duration(now - self.started if self.started else 0)} gone, "
            f"{duration(self.seconds_left())} left   "
            f"reward {' -> '.join(number(r) for r in rewards[:1] + rewards[1:][-1:]) or '-'}"
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for title in ("rank", "doing", "rows", "tok/s", "accept", "idle s", "harvested s"):
            table.add_column(title, justify="left" if title == "doing" else "right", no_wrap=True)
        for rank, (what, since) in sorted(self.doing.items()):
            at, (available, harvested) = self._progress(rank), self.idle.get(rank, (0.0, 0.0))
            table.add_row(
                str(rank),
                Text(f"{what} {now - since:.0f} s", style=_STYLE.get(what, "dim")),
                f"{at['done']}/{at['rows']}",
                number(at.get("tok_s")),
                number(at.get("accept_len")),
                number(available + (now - since if what == "harvesting" else 0.0)),
                number(harvested + self._window(rank)[0]),
            )
        notes = [Text(note, style="yellow", overflow="ellipsis") for note in self.notes[-3:]]
        return Group(Text(head), table, *notes)


class _Tail:
    """Reads the complete lines that were appended since the last call."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def new_events(self) -> list[Event]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        events = [parse_line(line) for line in complete.split(b"\n") if line.strip()]
        return [event for event in events if event is not None]


def watch(
    events_path: str | Path, total_steps: int, stop: threading.Event, plain: bool | None = None
) -> None:
    """Follow a run log until `stop` is set and show what every rank is doing.

    A terminal gets a live table; anything else (or `plain=True`) one line per finished step and a
    line of phases every few seconds. Any failure in here ends the display with one line on stderr
    and leaves the run alone: a display must never stop a training.
    """
    try:
        tail, board = _Tail(Path(events_path)), Board(total_steps)
        if plain if plain is not None else not sys.stdout.isatty():
            _watch_plain(tail, board, stop)
        else:
            _watch_live(tail, board, stop)
    except Exception as error:
        print(f"minitlt: the live display ended ({error!r}); the run goes on", file=sys.stderr)


def _watch_plain(tail: _Tail, board: Board, stop: threading.Event, every_s: float = 5.0) -> None:
    quiet_since, shown = time.monotonic(), ""
    ending = False
    while not ending:
        ending = stop.wait(0.25)  # then one more look: the last lines may be newer than the flag
        lines = [line for event in tail.new_events() for line in board.feed(event)]
        if not lines and board.doing and time.monotonic() - quiet_since >= every_s and not ending:
            quiet_since, line = time.monotonic(), board.phase_line(time.time())
            phase = line.partition("]")[2]
            lines, shown = [line] if phase != shown else [], phase
        if lines:
            print("\n".join(lines), flush=True)
            quiet_since = time.monotonic()


def _watch_live(tail: _Tail, board: Board, stop: threading.Event) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False) as live:
        ending = False
        while not ending:
            ending = stop.wait(0.25)
            for event in tail.new_events():
                board.feed(event)
            live.update(board.renderable(time.time()), refresh=True)
