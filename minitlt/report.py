"""What a run log says: the summary table, the metrics per step, and the live display.

Idea: nothing here is measured; every number is derived from `events.jsonl` (`minitlt.events` says
what is in it), so that a crashed, a resumed and a running run are read by the same code. The live
display follows the file from a parent process or a thread and cannot disturb the training.

Left out: any state of its own. The pictures and the HTML page are in `minitlt.pictures`.

How to run: `minitlt train` shows it, `minitlt report RUN` draws it afterwards.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log10
from pathlib import Path
from typing import Any, Protocol

from minitlt.events import EVENTS, METRICS, Event, EventLog, check_event, parse_line, read_events

__all__ = [
    "EVENTS", "METRICS", "Event", "EventLog", "accept_thirds", "by_step", "check_event", "duration",
    "mean", "number", "print_summary", "ratio", "read_events", "run_seconds", "step_table",
    "summarize", "summary_rows", "thirds", "watch",
]  # fmt: skip


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
    """Ratio of sums of (numerator, denominator) pairs; None when nothing was counted."""
    pairs = list(pairs)
    below = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / below if below > 0 else None


def _accept_pairs(ends: Iterable[Event]) -> list[tuple[float, float]]:
    """(tokens, row-steps) of each rollout; row-steps are what its accept length divided by."""
    return [(end["tokens"], end["tokens"] / end["accept_len"]) for end in ends if end["accept_len"]]


def step_table(events: list[Event]) -> list[dict[str, Any]]:
    """One dict per step with the columns of METRICS, over all ranks; None where not logged."""
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
    """The keys of summary.json that the log can tell (see EVENTS["summary"]).

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
    """Format for people: about three significant digits, thousands grouped, '-' for None."""
    if value is None:
        return "-"
    if abs(value) >= 10 ** (digits - 1) or value == int(value):
        return f"{value:,.0f}"
    places = digits - 1 - floor(log10(abs(value)))
    return f"{value:.{min(places, 4)}f}"


def duration(seconds: float | None) -> str:
    """Minutes and seconds as 3:07, with hours 1:03:07; '-' for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, value, what the value is) for each line of the summary table."""

    def change(first: str, last: str) -> str:
        return f"{number(summary.get(first))} -> {number(summary.get(last))}"

    rows = [
        ("Reward", change("reward_first", "reward_last"), "mean, first third -> last third"),
        (
            "Accept length",
            change("accept_first", "accept_last"),
            "tokens per verify step and row, first third -> last third",
        ),
    ]
    plain, spec = summary.get("tok_s_plain"), summary.get("tok_s_spec")
    if plain and spec:
        gain = f"plain -> speculative on the same rollouts: {spec / plain:.2f} x"
        rows.append(("Tokens per second", change("tok_s_plain", "tok_s_spec"), gain))
    available, harvested = summary["idle_available_s"], summary["idle_harvested_s"]
    share = f" ({harvested / available:.0%})" if available else ""
    waited = "ranks that were done waiting for the last one, summed over ranks"
    rows.append(("Idle time", f"{number(available)} s", waited))
    rows.append(("Harvested", f"{number(harvested)} s", f"of it, for drafter steps{share}"))
    rows.append(("Drafter steps", number(summary["drafter_steps"]), "summed over ranks"))
    if summary.get("token_mismatches") is not None:
        meaning = "sample rows generated again, plain against speculative (0 = lossless)"
        rows.append(("Token mismatches", number(summary["token_mismatches"]), meaning))
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


class StopFlag(Protocol):
    """threading.Event and multiprocessing.Event both are one."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


@dataclass
class RankState:
    """What one rank is doing, as far as the log tells."""

    doing: str = "starting"
    since: float = 0.0  # unix seconds at which it began
    rows: int = 0
    done: int = 0
    tok_s: float | None = None
    accept_len: float | None = None
    available_s: float = 0.0  # of closed idle windows
    harvested_s: float = 0.0
    drafter_steps: int = 0  # of closed idle windows
    window_steps: int = 0  # of the open one
    window_s: float = 0.0  # seconds harvested in the open one


class Board:
    """The state of a run, fed one event at a time; renders itself as lines or as a table."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.ranks: dict[int, RankState] = {}
        self.started = 0.0
        self.now = 0.0
        self.step = 0
        self.rewards: list[float] = []
        self.step_seconds: list[float] = []
        self.notes: list[str] = []
        self._ends: list[Event] = []
        self._idle_told = (0.0, 0.0)

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
        name, self.now = event["event"], event["t"]
        rank = self.ranks.setdefault(event["rank"], RankState())
        if name == "run":
            self.started = event["t"]
            for index in range(event["world_size"]):
                self.ranks.setdefault(index, RankState(since=event["t"]))
            target = event["target"].get("name", "?")
            return [f"{target}, {event['world_size']} ranks, {self.total_steps} steps"]
        if name == "rollout_start":
            self._now_doing(rank, "generating")
            rank.rows, rank.done = event["rows"], 0
        elif name == "rollout_progress":
            rank.done, rank.tok_s = event["done"], event["tok_s"]
            rank.accept_len = event["accept_len"]
        elif name == "rollout_end":
            self._now_doing(rank, "waiting")
            rank.done, rank.accept_len = event["rows"], event["accept_len"]
            rank.tok_s = event["tokens"] / event["seconds"] if event["seconds"] else None
            self._ends.append(event)
            self._settle()
        elif name == "harvest_start":
            self._now_doing(rank, "harvesting")
        elif name == "harvest_step":
            rank.window_steps, rank.window_s = event["n"], event["t"] - rank.since
        elif name == "harvest_end":
            self._now_doing(rank, "merging")
            rank.available_s += event["available_s"]
            rank.harvested_s += event["harvested_s"]
            rank.drafter_steps += event["drafter_steps"]
            rank.window_steps, rank.window_s = 0, 0.0
            self._settle()
        elif name == "merge":
            self._now_doing(rank, "updating")
        elif name == "update":
            return [self._finish_step(event)]
        elif name in ("guard", "note"):
            label = event.get("name", "note")
            self.notes.append(f"{label}: {event['message']}")
            return [self.notes[-1]]
        return []

    def _now_doing(self, rank: RankState, doing: str) -> None:
        rank.doing, rank.since = doing, self.now

    def _settle(self) -> None:
        """When nobody generates or harvests any more and nothing is to be merged: the update."""
        doing = {rank.doing for rank in self.ranks.values()}
        if doing == {"waiting"} or (len(self.ranks) == 1 and doing == {"merging"}):
            for rank in self.ranks.values():
                self._now_doing(rank, "updating")

    def _finish_step(self, event: Event) -> str:
        self.step = event["step"]
        if event["reward"] is not None:
            self.rewards.append(event["reward"])
        self.step_seconds.append(event["step_seconds"] or 0.0)
        for rank in self.ranks.values():
            self._now_doing(rank, "waiting")
        slowest = max((end["seconds"] for end in self._ends), default=0.0)
        tokens = sum(end["tokens"] for end in self._ends)
        accept_len = ratio(_accept_pairs(self._ends))
        self._ends = []
        idle, before = self.idle(), self._idle_told
        self._idle_told = idle
        return (
            f"step {self.step:>{len(str(self.total_steps))}}/{self.total_steps}"
            f"  reward {number(event['reward'])}  accept length {number(accept_len)}"
            f"  {number(tokens / slowest if slowest else None)} tok/s"
            f"  idle {number(idle[0] - before[0])} s, harvested {number(idle[1] - before[1])} s"
            f"  took {duration(event['step_seconds'])}, left {duration(self.seconds_left())}"
        )

    def idle(self) -> tuple[float, float]:
        """Idle seconds (available, harvested) of all ranks, closed windows only."""
        ranks = self.ranks.values()
        return sum(rank.available_s for rank in ranks), sum(rank.harvested_s for rank in ranks)

    def seconds_left(self) -> float | None:
        """Remaining steps times the mean of the last five; None before the first step ends."""
        recent = self.step_seconds[-5:]
        if not recent:
            return None
        return (self.total_steps - self.step) * sum(recent) / len(recent)

    def phase_line(self, now: float) -> str:
        """One plain line: what every rank is doing at unix time `now`."""
        parts = []
        for index, rank in sorted(self.ranks.items()):
            text = f"rank {index} {rank.doing}"
            if rank.doing == "generating":
                text += f", {rank.done} of {rank.rows} rows done, {number(rank.tok_s)} tok/s"
            elif rank.doing == "harvesting":
                text += f", {rank.window_steps} drafter steps"
            parts.append(text)
        return f"  [{duration(max(now, self.now) - self.started)}] " + "; ".join(parts)

    def renderable(self, now: float) -> Any:
        """A rich renderable of the whole board at unix time `now`."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        style = {
            "generating": "bold blue",
            "harvesting": "bold green",
            "merging": "yellow",
            "updating": "magenta",
        }
        head = Table.grid(padding=(0, 2, 0, 0))
        reward = f"reward {number(self.rewards[-1] if self.rewards else None)}"
        if len(self.rewards) > 1:
            reward += f", at step 1 {number(self.rewards[0])}"
        head.add_row(
            f"step {self.step}/{self.total_steps}",
            ProgressBar(total=max(self.total_steps, 1), completed=self.step, width=20),
            f"{duration(now - self.started if self.started else 0)} gone",
            f"{duration(self.seconds_left())} left",
        )
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("rank")
        table.add_column("doing", min_width=16, no_wrap=True)
        for title in ("done", "tok/s", "accept", "idle s", "harvest s", "drafter"):
            table.add_column(title, justify="right", no_wrap=True)
        for index, rank in sorted(self.ranks.items()):
            open_s = now - rank.since if rank.doing == "harvesting" else 0.0
            doing = f"{rank.doing} {now - rank.since:.0f} s" if rank.since else rank.doing
            table.add_row(
                str(index),
                Text(doing, style=style.get(rank.doing, "dim")),
                f"{rank.done}/{rank.rows}",
                number(rank.tok_s),
                number(rank.accept_len),
                number(rank.available_s + open_s),
                number(rank.harvested_s + rank.window_s),
                str(rank.drafter_steps + rank.window_steps),
            )
        notes = [Text(note, style="yellow", overflow="ellipsis") for note in self.notes[-3:]]
        return Group(head, reward, table, *notes)


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
    events_path: str | Path, total_steps: int, stop: StopFlag, plain: bool | None = None
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


def _watch_plain(tail: _Tail, board: Board, stop: StopFlag, every_s: float = 5.0) -> None:
    quiet_since, shown = time.monotonic(), ""
    ending = False
    while not ending:
        ending = stop.wait(0.25)  # then one more look: the last lines may be newer than the flag
        lines = [line for event in tail.new_events() for line in board.feed(event)]
        if not lines and board.ranks and time.monotonic() - quiet_since >= every_s and not ending:
            quiet_since, line = time.monotonic(), board.phase_line(time.time())
            phase = line.partition("]")[2]
            lines, shown = [line] if phase != shown else [], phase
        if lines:
            print("\n".join(lines), flush=True)
            quiet_since = time.monotonic()


def _watch_live(tail: _Tail, board: Board, stop: StopFlag) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False) as live:
        ending = False
        while not ending:
            ending = stop.wait(0.25)
            for event in tail.new_events():
                board.feed(event)
            live.update(board.renderable(time.time()), refresh=True)
