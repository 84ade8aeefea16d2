"""How a picture is made: colours, figures, labels, and a run read for drawing.

Idea: a colour means the same thing everywhere: blue generates, green is the drafter (its training
and what it buys), amber merges, purple is the policy and its update, grey waits or is plain. Lines
are labelled where they end, and every axis has its unit. Figures are 4.6 inches wide, so that
their text is readable on a phone, and leave as SVG whose text is text and whose colours are CSS
variables, so that a page can be light or dark.

Left out: pyplot and its global state; smoothing (a step is drawn as it was).

How to run: see `minitlt.pictures`.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import stdev
from typing import Any

from minitlt.events import Event, read_events
from minitlt.report import mean, number, run_seconds, step_table, thirds

# name -> (on white, on dark). Figures are drawn with the first; the page replaces it by a variable.
COLOURS = {
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#646c75", "#9aa3ad"),
    "grid": ("#e3e6e9", "#30353b"),
    "generate": ("#0072b2", "#4fa8e0"),
    "harvest": ("#00875f", "#35c391"),
    "merge": ("#d98b00", "#f0b540"),
    "update": ("#ad4f86", "#dd93bb"),
    "wait": ("#b9c0c7", "#565e67"),
    "run2": ("#c8500a", "#f08a4b"),
    "run5": ("#7a5c3e", "#bf9f7d"),
}
RUN_COLOURS = ("generate", "run2", "harvest", "update", "merge", "run5")
WIDTH = 4.6  # inches
LINE = 0.2  # inches that a line of a key takes
STYLE: dict[str, Any] = {
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9.5,
    "axes.edgecolor": COLOURS["muted"][0],
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.titlecolor": COLOURS["muted"][0],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "axes.xmargin": 0.02,
    "grid.color": COLOURS["grid"][0],
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "text.color": COLOURS["ink"][0],
    "xtick.color": COLOURS["muted"][0],
    "ytick.color": COLOURS["muted"][0],
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # names of runs and arms may hold a dollar
}


@dataclass
class Run:
    """One run folder, read."""

    name: str
    path: Path
    events: list[Event]
    steps: list[dict[str, Any]] = field(default_factory=list)
    label: str = ""  # A, B, .. among runs that are compared: names are long

    @classmethod
    def read(cls, path: str | Path) -> "Run":
        """Read `path`/events.jsonl; ValueError when it is not there or holds no event."""
        path = Path(path)
        events = read_events(path / "events.jsonl")
        if not events:
            raise ValueError(f"{path}/events.jsonl: the log is empty, nothing to draw")
        return cls(path.resolve().name, path, events, step_table(events))

    def __post_init__(self) -> None:
        seconds = run_seconds(self.events)
        self._at = {id(event): at for event, at in zip(self.events, seconds, strict=True)}

    @property
    def opened(self) -> Event:
        """The event that opened the log, the last one after resumes; {} if it is missing."""
        return (self.of("run") or [{}])[-1]

    def of(self, name: str) -> list[Event]:
        """Events called `name`, oldest first."""
        return [event for event in self.events if event["event"] == name]

    def at(self, event: Event) -> float:
        """Seconds since the start of the run."""
        return self._at[id(event)]

    def column(self, name: str, along: str = "step") -> tuple[list[float], list[float]]:
        """(x, y) of the metric `name`, steps without it left out."""
        pairs = [(row[along], row[name]) for row in self.steps]
        pairs = [pair for pair in pairs if None not in pair]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


@dataclass
class Picture:
    """A figure and its two sentences."""

    name: str
    title: str
    shows: str
    concludes: str
    figure: Any

    def svg(self) -> str:
        """Inline SVG: text as text, colours as CSS variables, no reference outside itself."""
        import matplotlib

        buffer = io.StringIO()
        # Clip paths are named by a hash; the salt keeps pictures of one page apart.
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": self.name}):
            self.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        svg = buffer.getvalue()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        svg = re.sub(r' xmlns(:xlink)?="[^"]*"| (width|height)="[\d.]+pt"', "", svg)
        svg = re.sub(r' id="[A-Za-z]+[\w.]*_\d+"', "", svg).replace("xlink:href", "href")
        svg = re.sub(r"(font: [^;\"']*px) [^;\"]*", r"\1 var(--font)", svg)
        for name, (light, _) in COLOURS.items():
            svg = svg.replace(light, f"var(--{name})")
        return svg.replace("<svg", '<svg role="img"', 1)

    def png(self) -> bytes:
        """The figure on white with its title, 920 pixels wide."""
        import matplotlib

        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            self.figure.suptitle(self.title, x=0.01, ha="left", fontsize=11, fontweight="bold")
            self.figure.savefig(buffer, format="png", dpi=200)
            self.figure.suptitle("")
        return buffer.getvalue()


def colour(name: str) -> str:
    """The colour of a meaning, as drawn on white."""
    return COLOURS[name][0]


def run_colour(runs: Sequence[Run], index: int, meaning: str) -> str:
    """The colour of a single run is that of the meaning; of several runs, one for each run."""
    return colour(RUN_COLOURS[index % len(RUN_COLOURS)] if len(runs) > 1 else meaning)


def new_figure(height: float, rows: int = 1, share_x: bool = False) -> tuple[Any, list[Any]]:
    """A figure of `rows` axes below each other, `height` inches high; returns it and the axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, 1, squeeze=False, sharex=share_x)[:, 0]
    for ax in axes:
        ax.grid(axis="y")
        ax.spines["left"].set_visible(False)
    return figure, list(axes)


def integer_ticks(axis: Any) -> None:
    """Let an axis of counts have whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))


def key(ax: Any, meanings: dict[str, str], columns: int = 0, lift: float = 0.0) -> None:
    """Write text -> meaning pairs as coloured squares above the axes, `lift` points higher."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    patches = [Patch(color=colour(meaning), label=text) for text, meaning in meanings.items()]
    place = ax.transAxes + ScaledTranslation(0, lift / 72, ax.figure.dpi_scale_trans)
    form = {"handlelength": 0.8, "handleheight": 0.8, "handletextpad": 0.4, "columnspacing": 1.1,
            "borderpad": 0.2, "loc": "lower left", "bbox_to_anchor": (-0.01, 1.0)}  # fmt: skip
    ax.legend(handles=patches, ncols=columns or len(patches), bbox_transform=place, **form)


def shortened(name: str, most: int = 40) -> str:
    """At most so many characters of a name, its ends kept.

    >>> shortened("01_smollm2_cpu-20260101-120000", 20)
    '01_smollm..01-120000'
    """
    left = (most - 2) // 2
    return name if len(name) <= most else f"{name[:left]}..{name[left + 2 - most :]}"


def run_key(ax: Any, runs: Sequence[Run]) -> None:
    """Write the runs' names in their colours above the title of the axes (several runs only); the
    figure grows by what that takes."""
    if len(runs) > 1:
        names = [f"{run.label} {shortened(run.name)}" for run in runs]
        columns = max(1, 48 // (max(map(len, names)) + 5))
        tints = [RUN_COLOURS[i % len(RUN_COLOURS)] for i in range(len(runs))]
        key(ax, dict(zip(names, tints, strict=True)), columns, lift=17)
        more = -(-len(runs) // columns) * LINE
        ax.figure.set_figheight(ax.figure.get_figheight() + more)


def mark(
    ax: Any, text: str, at: tuple[float, float], shift: tuple[float, float] = (0, 0),
    x: str = "data", y: str = "data", **style: Any,
) -> None:  # fmt: skip
    """Write at a point, shifted by points of text size; x, y: "data", or "axes" for 0 to 1."""
    frame = tuple("axes fraction" if way == "axes" else way for way in (x, y))
    ax.annotate(text, at, shift, xycoords=frame, textcoords="offset points", annotation_clip=False,
                **style)  # fmt: skip


def end_labels(ax: Any, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, text, colour) beside the ends of lines, spread so that they do not overlap."""
    low, high = ax.get_ylim()
    gap = 14 / (ax.figure.get_figheight() * 72 / len(ax.figure.axes) * 0.7) * (high - low)
    below = low - gap
    for x, y, text, tint in sorted(labels, key=lambda label: label[1]):
        below = max(y, below + gap)
        mark(ax, text, (x, below), (7, 0), va="center", color=tint)


def draw_lines(
    ax: Any, runs: list[Run], metric: str, meaning: str, title: str, along: str = "step"
) -> list[tuple[Run, list[float]]]:
    """Plot a metric of each run, by step or by second; returns the runs that have it, with its
    values."""
    found = [(run, *run.column(metric, along)) for run in runs]
    found = [(run, xs, ys) for run, xs, ys in found if ys]
    labels = []
    for run, xs, ys in found:
        tint = run_colour(runs, runs.index(run), meaning)
        marker = {"marker": "o", "markersize": 3.5} if len(xs) <= 40 else {}
        ax.plot(xs, ys, color=tint, **marker)
        labels.append((xs[-1], ys[-1], number(ys[-1]), tint))
    ax.set(title=title, xlabel="step" if along == "step" else "seconds since the start")
    ax.margins(x=0.02, y=0.12)
    if len(runs) == 1:
        end_labels(ax, labels)
    if along == "step":
        integer_ticks(ax.xaxis)
        run_key(ax, runs)
    return [(run, ys) for run, _, ys in found]


def say_change(
    found: list[tuple[Run, list[float]]],
    what: str,
    ends: list[tuple[float | None, float | None]] | None = None,
) -> str:
    """Say how a metric moved from the first to the last third, and whether beyond noise.

    `ends` are the values of the thirds per run, where they are not the means over the steps.
    """
    if ends is None:
        ends = [(mean(thirds(ys)[0]), mean(thirds(ys)[1])) for _, ys in found]
    if len(found) > 1:
        said = [f"{run.label} {number(end[1])}" for (run, _), end in zip(found, ends, strict=True)]
        return f"{what.capitalize()} in the last third: {', '.join(said)}."
    ys = found[0][1]
    first, last = ends[0]
    if len(ys) < 6 or first is None or last is None:
        return f"Too few steps ({len(ys)}) to speak of a trend in {what}."
    # Differences of neighbours hold the noise but hardly the trend.
    noise = stdev([after - before for before, after in pairwise(ys)]) / 2**0.5
    error = noise * (2 / (len(ys) // 3)) ** 0.5
    moved = f"{number(first)} in the first third to {number(last)} in the last"
    if abs(last - first) <= 2 * error:
        return f"No clear change of {what}: {moved}, within the noise between steps."
    verb = "rose" if last > first else "fell"
    return f"The {what} {verb} from {moved}; neighbouring steps differ by about {number(noise, 2)}."


def spread(items: list[Any], most: int) -> list[Any]:
    """At most `most` items, evenly spread, first and last included."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]
