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
from collections.abc import Callable, Iterable, Iterator
from math import floor, log10
from pathlib import Path
from typing import Any

from minitlt.common import counted
from minitlt.events import Event, parse_line
from minitlt.events import read_events as read_events

QUIET_S = 5.0  # between two lines that say what every rank is doing


def run_seconds(events: list[Event]) -> list[float]:
    """Seconds since the first event, one per event; the pause before a resume counts as nothing."""
    seconds, pause = [], 0.0
    for index, event in enumerate(events):
        if index and event["event"] == "run":
            pause += event["t"] - events[index - 1]["t"]
        seconds.append(event["t"] - events[0]["t"] - pause)
    return seconds


def has_ended(events: list[Event]) -> bool:
    """Whether the last start of the run came to its end."""
    return [e["event"] for e in events if e["event"] in ("run", "summary")][-1:] == ["summary"]


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


def accept_pairs(ends: Iterable[Event]) -> list[tuple[float, float]]:
    """(tokens that steps emitted, row-steps) of each rollout: its accept length as a ratio."""
    # Steps belong to arms, first tokens to none. The lessons' small logs have no arms.
    pairs = [
        (sum(arm["tokens"] for arm in end.get("arms", {}).values()) or end["tokens"],
         end["accept_len"])
        for end in ends
    ]  # fmt: skip
    return [(tokens, tokens / accept) for tokens, accept in pairs if accept]


def drafter_pairs(ends: Iterable[Event]) -> list[tuple[float, float]]:
    """The same of the steps in which the draft model drafted, alone."""
    arms = [arm for end in ends for arm in end.get("arms", {}).items()]
    return [
        (arm["tokens"], arm["row_steps"])
        for name, arm in arms
        if name.startswith("eagle-") and "row_steps" in arm
    ]


def _plain_costs(ends: Iterable[Event]) -> dict[str, float]:
    """Active rows (by bucket) -> seconds of a token with the arm `off`, where it was used."""
    sums: dict[str, list[float]] = {}
    for end in ends:
        for rows, arms in end.get("arms_by_rows", {}).items():
            if off := arms.get("off"):
                seconds, tokens = sums.get(rows, (0.0, 0))
                sums[rows] = [seconds + off["seconds"], tokens + off["tokens"]]
    return {rows: seconds / tokens for rows, (seconds, tokens) in sums.items() if tokens}


def saved_seconds(end: Event, plain: dict[str, float]) -> float:
    """What drafts have saved this rollout: their tokens at the plain cost of as many rows, less the
    seconds they took. Numbers of rows at which the run never decoded plainly do not count.

    >>> arms = {"off": {"seconds": 9, "tokens": 9}, "eagle-3": {"seconds": 5, "tokens": 20}}
    >>> saved_seconds({"arms_by_rows": {"4": arms, "8": arms}}, plain={"4": 0.5})
    5.0
    """
    return sum(
        (arm["tokens"] * plain[rows] - arm["seconds"]
         for rows, arms in end.get("arms_by_rows", {}).items() if rows in plain
         for name, arm in arms.items() if name != "off"),
        start=0.0,
    )  # fmt: skip


_OF_UPDATE = ("reward", "reward_std", "loss", "grad_norm", "mean_length", "kl", "entropy")
_OF_WINDOWS = {"idle_available_s": "available_s", "idle_harvested_s": "harvested_s",
               "overshoot_s": "overshoot_s", "drafter_steps": "drafter_steps"}  # fmt: skip


def _window_losses(events: list[Event]) -> dict[int, list[float | None]]:
    """Step -> the losses that the log has of the drafter steps in its windows, of all ranks."""
    found: dict[tuple[int, int], list[float | None]] = {}
    for event in events:
        if event["event"] == "harvest_start":  # after a resume a window may be there twice
            found[event["step"], event["rank"]] = []
        elif event["event"] == "harvest_step":
            found.setdefault((event["step"], event["rank"]), []).append(event["loss"])
    losses: dict[int, list[float | None]] = {}
    for (step, _), own in found.items():
        if own:
            losses.setdefault(step, []).extend(own)
    return losses


def step_table(events: list[Event]) -> list[dict[str, Any]]:
    """One dict per step with the columns of metrics.md, over all ranks; None where not logged."""
    updates = {step: ranks[0] for step, ranks in by_step(events, "update").items()}
    rollouts, harvests = by_step(events, "rollout_end"), by_step(events, "harvest_end")
    losses = _window_losses(events)
    clock = {id(event): at for event, at in zip(events, run_seconds(events), strict=True)}
    plain = _plain_costs(end for ends in rollouts.values() for end in ends)
    rows = []
    for step in sorted(updates.keys() | rollouts.keys()):
        update, ends = updates.get(step, {}), rollouts.get(step, [])
        windows = harvests.get(step, [])
        slowest = max((end["seconds"] for end in ends), default=None)
        row: dict[str, Any] = {
            "step": step,
            "end_s": clock[id(update)] if update else None,
            **{name: update.get(name) for name in _OF_UPDATE},
            "step_s": update.get("step_seconds"),
            "rollout_s": slowest,
            "tok_s": sum(end["tokens"] for end in ends) / slowest if slowest else None,
            "accept_len": ratio(accept_pairs(ends)),
            "drafter_accept_len": ratio(drafter_pairs(ends)),
            "truncated": sum(end["truncated"] for end in ends) if ends else None,
            "saved_s": sum(saved_seconds(end, plain) for end in ends) if plain and ends else None,
            **{name: sum(window[field] for window in windows) if windows else None
               for name, field in _OF_WINDOWS.items()},
            "drafter_loss": mean(losses.get(step, [window["loss_last"] for window in windows])),
        }  # fmt: skip
        if not windows and len(ends) > 1:  # nobody harvested: the idle time was there all the same
            last = max(end["t"] for end in ends)
            row["idle_available_s"] = sum(last - end["t"] for end in ends)
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


def accept_thirds(
    events: Iterable[Event],
    pairs_of: Callable[[Iterable[Event]], list[tuple[float, float]]] = accept_pairs,
) -> tuple[float | None, float | None]:
    """Accept length of the first and the last third of the rollouts (ratios of sums)."""
    first, last = thirds(list(by_step(events, "rollout_end").values()))
    return (
        ratio(pair for ends in first for pair in pairs_of(ends)),
        ratio(pair for ends in last for pair in pairs_of(ends)),
    )


def summarize(events: list[Event]) -> dict[str, Any]:
    """The keys of summary.json that the log can tell (`summary` in metrics.md).

    The measurements made after training (`tok_s_plain`, `tok_s_spec`, `token_mismatches`) are
    there only if the log already holds a `summary` event that has them.
    """
    rows = step_table(events)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    accept_first, accept_last = accept_thirds(events)
    drafter_first, drafter_last = accept_thirds(events, drafter_pairs)
    summary = {
        "reward_first": mean(thirds(rewards)[0]),
        "reward_last": mean(thirds(rewards)[1]),
        "accept_first": accept_first,
        "accept_last": accept_last,
        "idle_available_s": sum(row["idle_available_s"] or 0.0 for row in rows),
        "idle_harvested_s": sum(row["idle_harvested_s"] or 0.0 for row in rows),
        "drafter_steps": sum(row["drafter_steps"] or 0 for row in rows),
        "guards": guard_counts(events),
        "ranks": 1 + max((event["rank"] for event in events), default=0),
        "steps": max(by_step(events, "update"), default=0),
        "wall_s": run_seconds(events)[-1] if events else 0.0,
    }
    if drafter_first and drafter_last:
        summary |= {"drafter_accept_first": drafter_first, "drafter_accept_last": drafter_last}
    for event in events:
        if event["event"] == "summary":
            measured = ("tok_s_plain", "tok_s_spec", "token_mismatches")
            summary |= {key: event[key] for key in measured if key in event}
    rounded = {key: float(f"{x:.6g}") for key, x in summary.items() if isinstance(x, float)}
    return summary | rounded


def guard_counts(events: list[Event]) -> dict[str, int]:
    """How often each guard spoke, summed over ranks; a resumed run counts from 1 again."""
    counts: dict[str, int] = {}
    last: dict[tuple[str, int], int] = {}
    for event in events:
        if event["event"] == "guard":
            name, rank, count = event["name"], event["rank"], event["count"]
            before = last.get((name, rank), 0)
            counts[name] = counts.get(name, 0) + count - (before if count > before else 0)
            last[name, rank] = count
    return counts


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

    accept = "tokens per forward and row, first third -> last third"
    rows = [
        ("Reward", change("reward_first", "reward_last"), "mean, first third -> last third"),
        ("Accept length", change("accept_first", "accept_last"), accept),
    ]
    if "drafter_accept_first" in summary:
        drafter = change("drafter_accept_first", "drafter_accept_last")
        rows.append(("- draft model's", drafter, "the same where the model in training drafted"))
    plain, spec = summary.get("tok_s_plain"), summary.get("tok_s_spec")
    if plain and spec:
        gain = f"plain -> speculative, same rows: {spec / plain:.2f} x"
        rows.append(("Tokens per second", change("tok_s_plain", "tok_s_spec"), gain))
    available, harvested = summary["idle_available_s"], summary["idle_harvested_s"]
    share = f" ({harvested / available:.0%})" if available else ""
    if summary["ranks"] == 1:
        rows.append(("Drafter's time", f"{number(harvested)} s", "its own: one rank never waits"))
    else:
        wait = "ranks waiting for the last one, summed"
        rows.append(("Idle time", f"{number(available)} s", wait))
        rows.append(("Harvested", f"{number(harvested)} s", f"of it, for drafter steps{share}"))
    rows.append(("Drafter steps", number(summary["drafter_steps"]), "summed over ranks"))
    if (odd := summary.get("token_mismatches")) is not None:
        rows.append(("Token mismatches", number(odd), "plain against speculative (0 = lossless)"))
    wall = f"in {duration(summary['wall_s'])} (minutes:seconds)"
    rows.append(("Steps", number(summary["steps"]), wall))
    return rows


def print_summary(summary: dict[str, Any], run_dir: str | Path) -> None:
    """Print the summary as a table, then which files of the run folder exist."""
    rows = summary_rows(summary)
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    print("What happened", *(f"{a:{first}}  {b:{second}}  {c}" for a, b, c in rows), sep="\n")
    run_dir = Path(run_dir)
    order = ("report.html", "pictures", "summary.json", "events.jsonl", "policy", "drafter")
    names = [name + "/" * (run_dir / name).is_dir() for name in order if (run_dir / name).exists()]
    print(f"Files in {run_dir}: {', '.join(names)}")


# What a rank does after the event of that name.
_NEXT = {"rollout_start": "generating", "rollout_end": "waiting", "harvest_start": "harvesting",
         "harvest_end": "merging", "merge": "updating"}  # fmt: skip


class Board:
    """What a run has done and is doing, fed one event at a time, as lines of text."""

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.doing: dict[int, str] = {}  # by rank
        self._at: dict[int, Event] = {}  # by rank: what it last told of its rollout or harvest
        self._recent: list[Event] = []  # since the last update
        self._updates: list[Event] = []
        self._odd: set[str] = set()
        self._started = 0.0

    def feed(self, event: Event) -> list[str]:
        """Take in one event; return the lines that it is worth.

        An event that lacks a field it should have is worth a line, and nothing else.
        """
        try:
            return self._take(event)
        except (KeyError, TypeError) as error:
            said = f"display: event {event['event']!r} is not as expected ({error!r})"
            new, self._odd = {said} - self._odd, self._odd | {said}
            return list(new)

    def _take(self, event: Event) -> list[str]:
        name, rank = event["event"], event["rank"]
        self._recent.append(event)
        self.doing[rank] = _NEXT.get(name, self.doing.get(rank, "starting"))
        if name in ("rollout_start", "harvest_start"):
            self._at[rank] = event
        elif name in ("rollout_progress", "harvest_step"):
            self._at[rank] = self._at[rank] | event
        elif name == "run":
            self._started, self._recent = self._started or event["t"], []
            self.doing = dict.fromkeys(range(event["world_size"]), "starting")
            target = event["target"].get("name", "?")
            ranks, steps = counted(event["world_size"], "rank"), counted(self.total_steps, "step")
            return [f"{target}, {ranks}, {steps}"]
        elif name == "update":
            self.doing = dict.fromkeys(self.doing, "waiting")
            return [self._step_line(event)]
        elif name in ("guard", "note"):
            return [f"{event.get('name', 'note')}: {event['message']}"]
        states = set(self.doing.values())
        idle = states == {"waiting"} or (len(self.doing) == 1 and states == {"merging"})
        if name in ("rollout_end", "harvest_end") and idle:  # and nothing is to be merged
            self.doing = dict.fromkeys(self.doing, "updating")
        return []

    def _step_line(self, update: Event) -> str:
        recent, self._recent = self._recent, []
        self._updates.append(update)
        row, total = step_table(recent)[-1], self.total_steps
        idle, harvested = row["idle_available_s"] or 0.0, row["idle_harvested_s"] or 0.0
        spot = f"idle {number(idle)} s, harvested" if len(self.doing) > 1 else "drafter"
        return (
            f"step {row['step']:>{len(str(total))}}/{total}  reward {number(row['reward'])}"
            f"  accept length {number(row['accept_len'])}  {number(row['tok_s'])} tok/s"
            f"  {spot} {number(harvested)} s"
            f"  took {duration(row['step_s'])}, left {duration(self.seconds_left())}"
        )

    def seconds_left(self) -> float | None:
        """Remaining steps times the mean of the last five; None before the first step ends."""
        recent = mean(update["step_seconds"] for update in self._updates[-5:])
        return None if recent is None else (self.total_steps - self._updates[-1]["step"]) * recent

    def clock(self, now: float) -> str:
        """Minutes and seconds from the start of the run to unix time `now`."""
        return duration(now - self._started if self._started else 0.0)

    def status(self) -> list[str]:
        """What every rank is doing, one line each."""
        lines = []
        for rank, what in sorted(self.doing.items()):
            at = self._at.get(rank, {})
            more = {
                "generating": f", {at.get('done', 0)} of {at.get('rows', 0)} rows done, "
                f"{number(at.get('tok_s'))} tok/s, accept length {number(at.get('accept_len'))}",
                "harvesting": f", {counted(at.get('n', 0), 'drafter step')}",
            }
            lines.append(f"rank {rank} {what}{more.get(what, '')}")
        return lines


def _follow(path: Path, stop: threading.Event) -> Iterator[list[Event]]:
    """What was appended since the last look, four times a second; when `stop` is set one more look,
    as the last lines of the log may be newer than the flag."""
    offset, ending = 0, False
    while not ending:
        ending = stop.wait(0.25)
        data = b""
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        offset += len(complete)
        events = [parse_line(line) for line in complete.split(b"\n") if line.strip()]
        yield [event for event in events if event is not None]


def watch(
    events_path: str | Path, total_steps: int, stop: threading.Event, plain: bool | None = None
) -> None:
    """Follow a run log until `stop` is set and show what every rank is doing.

    One line per finished step; beneath them a terminal shows what each rank is doing right now.
    Anything else (or `plain=True`) gets that as a line every few seconds. Any failure in here ends
    the display with one line on stderr and leaves the run alone: a display must never stop a
    training.
    """
    try:
        board = Board(total_steps)
        news = (
            [line for event in events for line in board.feed(event)]
            for events in _follow(Path(events_path), stop)
        )
        if plain if plain is not None else not sys.stdout.isatty():
            _watch_plain(news, board, stop)
        else:
            _watch_live(news, board)
    except Exception as error:
        print(f"minitlt: the live display ended ({error!r}); the run goes on", file=sys.stderr)


def _watch_plain(news: Iterator[list[str]], board: Board, stop: threading.Event) -> None:
    told, shown = time.monotonic(), board.status()
    for lines in news:
        quiet = time.monotonic() - told >= QUIET_S and not stop.is_set()
        if not lines and quiet and board.status() != shown:
            shown = board.status()
            lines = [f"  [{board.clock(time.time())}] {'; '.join(shown)}"]
        if lines:
            print("\n".join(lines), flush=True)
            told = time.monotonic()


def _watch_live(news: Iterator[list[str]], board: Board) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False, transient=True) as live:
        for lines in news:
            for line in lines:
                live.console.print(Text(line))
            clock, left = board.clock(time.time()), duration(board.seconds_left())
            now = [f"{clock} gone, {left} left", *board.status()]
            live.update(Text("\n".join(now), style="cyan"), refresh=True)
