"""The pictures of a run, drawn from its log alone.

Idea: one function per picture takes the runs and returns a figure and one sentence that says what
to conclude, computed from the same numbers; or None when the log has no data for it. `picture` adds
its title and the sentence that says what it shows. Pictures of several runs compare curves; what
happens inside a run (its timeline, its arms, its idle time) is drawn for one run only.

Left out: interactive charts. The page that holds the pictures is made by `minitlt.page`.

How to run: `minitlt report RUN...`
"""

from collections.abc import Callable, Iterable
from functools import wraps
from itertools import pairwise, repeat, zip_longest
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from minitlt.charts import (
    STYLE,
    Picture,
    Run,
    colour,
    draw_lines,
    end_labels,
    integer_ticks,
    key,
    mark,
    new_figure,
    run_colour,
    run_key,
    say_change,
    spread,
)
from minitlt.common import counted
from minitlt.events import Event
from minitlt.report import accept_thirds, by_step, mean, number, ratio, summarize, thirds

MAX_STEPS_ON_TIMELINE = 8
_LEAST_STEPS = 10  # of an arm in a bucket, before its rate is a candidate for the best
PHASES = ("generate", "wait", "harvest", "merge", "update")
Spans = dict[int, list[tuple[str, float, float]]]  # rank -> (phase, start, end)
Drawn = tuple[Any, str] | None  # the figure, and what to conclude from it
PICTURES: list[Callable[[list[Run]], Picture | None]] = []  # in the order of the page


def picture(
    title: str, shows: str, compares: bool = False
) -> Callable[[Callable[[list[Run]], Drawn]], Callable[[list[Run]], Picture | None]]:
    """Make a drawing function one of PICTURES; only one that compares gets several runs."""

    def register(function: Callable[[list[Run]], Drawn]) -> Callable[[list[Run]], Picture | None]:
        @wraps(function)
        def drawn(runs: list[Run]) -> Picture | None:
            made = function(runs) if compares or len(runs) == 1 else None
            name = function.__name__.removeprefix("draw_")
            return Picture(name, title, shows, made[1], made[0]) if made else None

        PICTURES.append(drawn)
        return drawn

    return register


def draw(runs: list[Run]) -> list[Picture]:
    """All pictures that the logs have data for; of several runs those that can be compared."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        return [made for function in PICTURES if (made := function(runs))]


def write_pngs(pictures: list[Picture], folder: Path) -> None:
    """Write each picture as `folder`/NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for made in pictures:
        (folder / f"{made.name}.png").write_bytes(made.png())


@picture(
    "Reward by step and by time",
    "Mean reward of each step's completions, against optimizer steps and against seconds.",
    compares=True,
)
def draw_reward(runs: list[Run]) -> Drawn:
    figure, (top, bottom) = new_figure(4.2, rows=2)
    found = draw_lines(top, runs, "reward", "update", "mean reward")
    draw_lines(bottom, runs, "reward", "update", "mean reward", along="end_s")
    return (figure, say_change(found, "reward")) if found else None


def timeline_spans(run: Run, steps: list[int]) -> Spans:
    """Per rank the (phase, start, end) spans in seconds; later ones are drawn over earlier ones."""
    spans: Spans = {}
    rollouts, updates = by_step(run.events, "rollout_end"), by_step(run.events, "update")
    merges, windows = by_step(run.events, "merge"), by_step(run.events, "harvest_end")
    starts = {(e["step"], e["rank"]): run.at(e) for e in run.of("harvest_start")}
    for step in steps:
        merged = {merge["rank"]: merge for merge in merges.get(step, [])}
        closed = {window["rank"]: window for window in windows.get(step, [])}
        slowest = max(run.at(end) for end in rollouts[step])
        for end in rollouts[step]:
            rank, at = end["rank"], run.at(end)
            mine = spans.setdefault(rank, [])
            mine.append(("generate", at - end["seconds"], at))
            merge = merged.get(rank)
            ready = run.at(merge) if merge else slowest
            began = ready - merge["seconds"] if merge else ready
            mine += [("merge", began, ready), ("wait", at, began)]
            if rank in closed and closed[rank]["drafter_steps"]:
                mine.append(("harvest", starts.get((step, rank), at), run.at(closed[rank])))
            for update in updates.get(step, [])[:1]:  # data parallel: one update, all ranks in it
                begin = max(ready, run.at(update) - (update["seconds"] or 0.0))
                mine.append(("update", begin, run.at(update)))
    return spans


@picture(
    "Who does what, when",
    "Each rank's time: generating, harvesting idle time, waiting, merging drafters, updating; "
    "blank: checkpoints and the like. Of a long run the eight steps in a row with most idle time.",
)
def draw_timeline(runs: list[Run]) -> Drawn:
    run = runs[0]
    rollouts = by_step(run.events, "rollout_end")
    if not rollouts:
        return None
    idle = [_idle(run, ends) for ends in rollouts.values()]
    firsts = range(max(1, len(idle) - MAX_STEPS_ON_TIMELINE + 1))
    first = max(firsts, key=lambda i: sum(idle[i : i + MAX_STEPS_ON_TIMELINE]))
    steps = list(rollouts)[first : first + MAX_STEPS_ON_TIMELINE]
    spans = timeline_spans(run, steps)
    figure, (ax,) = new_figure(1.25 + 0.42 * len(spans))
    ax.grid(visible=False)
    for rank, mine in spans.items():
        for phase in PHASES:
            bars = [(begin, end - begin) for name, begin, end in mine if name == phase]
            ax.broken_barh(bars, (rank - 0.36, 0.72), color=colour(phase), linewidth=0)
    for step in steps:
        begin = min(run.at(end) - end["seconds"] for end in rollouts[step])
        mark(ax, str(step), (begin, -0.42), va="bottom", color=colour("muted"), fontsize=8)
    ax.set_yticks(sorted(spans), [f"rank {rank}" for rank in sorted(spans)])
    ax.set_ylim(max(spans) + 0.5, -0.75)
    ax.margins(x=0.005)
    ax.set_xlabel("seconds since the start; small numbers: step")
    key(ax, {phase: phase for phase in PHASES})
    return figure, _say_idle(run, list(rollouts.values()))


def _idle(run: Run, ends: list[Event]) -> float:
    """Seconds that the ranks of one rollout waited for the last of them, summed."""
    return sum(max(map(run.at, ends)) - run.at(end) for end in ends)


def _say_idle(run: Run, rollouts: list[list[Event]]) -> str:
    harvested = sum(event["harvested_s"] for event in run.of("harvest_end"))
    if max(map(len, rollouts)) == 1:
        return f"One rank waits for nobody; {number(harvested)} s went into drafter steps."
    idle = sum(_idle(run, ends) for ends in rollouts)
    total = sum(max(end["seconds"] for end in ends) * len(ends) for ends in rollouts)
    slowest = [max(ends, key=run.at)["rank"] for ends in rollouts]
    worst = max(set(slowest), key=slowest.count)
    used = f"drafter steps filled {min(harvested / (idle or 1), 1):.0%} of that"
    ended = [row for row in run.steps if row["rollout_s"] and row["step_s"]]
    share = ratio((row["rollout_s"], row["step_s"]) for row in ended)
    most = f" Rollouts take {share or 0:.0%} of the steps' time: faster ones could save no more."
    return (
        f"Rank {worst} was last in {slowest.count(worst)} of {counted(len(slowest), 'rollout')}. "
        f"Ranks idled {idle / total:.0%} of the rollout time; "
        f"{used if harvested else 'no drafter step used it'}.{most if share else ''}"
    )


@picture(
    "Accept length by step",
    "Tokens that one forward of the target yields per row, its own token included: of all steps, "
    "and of those in which the draft model drafted.",
    compares=True,
)
def draw_accept_length(runs: list[Run]) -> Drawn:
    figure, (ax,) = new_figure(2.6)
    found = draw_lines(ax, runs, "accept_len", "harvest", "tokens per verify step and row")
    if not found:
        return None
    if len(runs) == 1:
        steps, lengths = runs[0].column("drafter_accept_len")
        if lengths:
            ax.plot(steps, lengths, color=colour("update"), linewidth=1)
            key(ax, {"all steps": "harvest", "those of the draft model": "update"})
    ax.axhline(1, color=colour("muted"), linewidth=1, linestyle=(0, (4, 3)))
    mark(ax, "plain decoding: 1 token", (0, 1), (2, -3), x="axes", va="top", color=colour("muted"))
    ax.set_ylim(0.8, max(1.5, ax.get_ylim()[1]))
    ends = [accept_thirds(run.events) for run, _ in found]
    return figure, say_change(found, "accept length", ends)


def _acceptance(rollouts: list[list[Event]]) -> list[float]:
    """Acceptance by position over rollouts, weighted by how many drafts were that deep."""
    ends = [
        [*zip(rates, end.get("drafts_by_position", repeat(end["verify_steps"])), strict=False)]
        for ranks in rollouts
        for end in ranks
        if (rates := end["accept_by_position"])
    ]
    places = zip_longest(*ends, fillvalue=(0.0, 0))
    return [ratio((rate * n, n) for rate, n in place) or 0.0 for place in places]


@picture(
    "Acceptance by draft position",
    "How often at least so many drafts in a row equalled what the target sampled itself, among the "
    "drafts that went so deep, learned and copied ones together.",
)
def draw_acceptance_by_position(runs: list[Run]) -> Drawn:
    figure, (ax,) = new_figure(2.6)
    parts = thirds(list(by_step(runs[0].events, "rollout_end").values()))
    labels, values = [], []
    for part, name, tint in zip(parts, ("first", "last"), ("muted", "harvest"), strict=True):
        if values := _acceptance(part):
            xs, ys = range(1, len(values) + 1), [100 * value for value in values]
            ax.plot(xs, ys, color=colour(tint), marker="o", markersize=4)
            labels.append((float(xs[-1]), ys[-1], f"{name} third", colour(tint)))
    if not values:
        return None
    ax.set_ylim(-7, 100)  # a label at 0 % stands clear of the axis
    end_labels(ax, labels)
    integer_ticks(ax.xaxis)
    ax.set(title="% of drafts at least so deep", xlabel="accepted at least this many drafts")
    useful, said = sum(v >= 0.1 for v in values), ""
    trained = runs[0].opened.get("config", {}).get("drafter", {}).get("ttt_steps")
    if useful == trained < len(values) and values[useful] < values[useful - 1] / 4:
        said = (
            f" The cliff after {useful} is where the learned drafter's training ends "
            "(drafter.ttt_steps); copied drafts (n-grams) have none."
        )
    return figure, (
        f"In the last third the first draft is accepted {values[0]:.0%} of the time, and "
        f"{len(values)} in a row {values[-1]:.0%}. Drafting pays {useful} deep here, if a draft "
        f"accepted one time in ten covers its cost.{said}"
    )


def _mark_lengths(ax: Any, values: list[int], cap: int | None) -> None:
    """Vertical lines at the median, the 90th percentile and the cap, named above the title."""
    marks = {"median": median(values), "90th percentile": quantiles(values, n=10)[-1]}
    if cap and cap <= 1.5 * values[-1]:  # one far beyond the longest row would squeeze the picture
        marks["cap"] = cap
    for x in marks.values():
        ax.axvline(x, color=colour("ink"), linewidth=1, linestyle=(0, (4, 3)))
    lines = ", ".join(f"{text} {number(x)}" for text, x in marks.items())
    ax.set_title(f"lines: {lines}\n{ax.get_title('left')}")


@picture(
    "Response lengths",
    "Lengths of all completions; of a single run with the median, the 90th percentile and the cap.",
    compares=True,
)
def draw_lengths(runs: list[Run]) -> Drawn:
    lengths = [sorted(n for end in run.of("rollout_end") for n in end["lengths"]) for run in runs]
    if min(map(len, lengths)) < 2:
        return None
    figure, (ax,) = new_figure(2.8)
    longest = max(own[-1] for own in lengths)
    edges = [longest * i / 24 for i in range(25)]
    said = []
    for index, (run, own) in enumerate(zip(runs, lengths, strict=True)):
        cut = sum(end["truncated"] for end in run.of("rollout_end")) / len(own)
        said.append(f"{run.label}: median {number(median(own))}, longest {own[-1]}, {cut:.0%} cut")
        shape = {"rwidth": 0.9} if len(runs) == 1 else {"histtype": "step", "linewidth": 1.8}
        tint = run_colour(runs, index, "generate")
        ax.hist(own, edges, weights=[100 / len(own)] * len(own), color=tint, **shape)
    run_key(ax, runs)
    ax.set(title="% of completions", xlabel="completion length, tokens")
    if len(runs) == 1:
        _mark_lengths(ax, own, runs[0].opened.get("config", {}).get("max_completion_length"))
        tail = sum(own[-max(1, len(own) // 10) :]) / sum(own)
        times = own[-1] / median(own)
        wait = ": short rows and their ranks wait" if times >= 1.5 else ""
        said = [
            f"The longest tenth holds {tail:.0%} of all tokens and the longest completion has "
            f"{number(times)} x the median{wait}. {cut:.0%} were cut by the cap"
        ]
    return figure, f"{'; '.join(said)}."


@picture(
    "The long tail of one rollout",
    "Rows still generating over the run's longest rollout, rank by rank, and what a finished rank "
    "does. Blank at the left: the prompts are read.",
)
def draw_active_rows(runs: list[Run]) -> Drawn:
    rollouts = by_step(runs[0].events, "rollout_end")
    traced = {s: e for s, e in rollouts.items() if all(end["active_trace"] for end in e)}
    if not traced:
        return None
    step, ends = max(traced.items(), key=lambda item: max(end["seconds"] for end in item[1]))
    windows = by_step(runs[0].events, "harvest_end").get(step, [])
    harvested = {window["rank"]: window["harvested_s"] for window in windows}
    shown = spread(sorted(ends, key=lambda end: end["seconds"]), 4)
    slowest = max(end["seconds"] for end in ends)
    figure, axes = new_figure(0.9 + 1.0 * len(shown), rows=len(shown), share_x=True)
    for ax, end in zip(axes, shown, strict=True):
        xs, ys = zip(*spread(end["active_trace"], 300), (end["seconds"], 0), strict=True)
        ax.fill_between(xs, ys, step="post", linewidth=0, color=colour("generate"))
        at, idle, height = end["seconds"], slowest - end["seconds"], max(ys) * 0.3
        used = min(harvested.get(end["rank"], 0.0), idle)
        if idle > 0.02 * slowest:
            ax.broken_barh([(at, idle)], (0, height), color=colour("wait"))
            ax.broken_barh([(at, used)], (0, height), color=colour("harvest"))
            text = f"then harvests {number(used)} of " if used else "then waits "
            ax.set_title(f"{text}{number(idle)} s", loc="right", color=colour("ink"))
        ax.set_title(f"rank {end['rank']}: rows still generating")
        ax.set_ylim(0, max(ys) * 1.05)
        integer_ticks(ax.yaxis)
    axes[-1].set_xlim(0, slowest * 1.01)
    axes[-1].set_xlabel(f"seconds since the rollout of step {step} started")
    share, all_shares = _active_share(ends), [_active_share(ends) for ends in traced.values()]
    return figure, (
        f"On average {share:.0%} of the rows are active here; over all rollouts "
        f"{sum(all_shares) / len(all_shares):.0%}, in the run's last {all_shares[-1]:.0%}. What is "
        "missing to 100 % is the long tail: a batch that empties before its last row is done."
    )


def _active_share(ends: list[Event]) -> float:
    """Row-seconds of one rollout over what they were if every row took as long as the last."""
    rows = row_seconds = 0.0
    for end in ends:
        trace = [*end["active_trace"], [end["seconds"], 0]]
        rows += max(active for _, active in trace)
        row_seconds += trace[0][0] * trace[0][1]  # the prompts are read for all rows
        row_seconds += sum((b[0] - a[0]) * a[1] for a, b in pairwise(trace))
    return row_seconds / (rows * max(end["seconds"] for end in ends))


@picture(
    "Idle time, available and harvested",
    "Time between a rank's own end of rollout and the last rank's, and the part that trained.",
)
def draw_harvest(runs: list[Run]) -> Drawn:
    names = ("idle_available_s", "idle_harvested_s", "overshoot_s", "drafter_steps")
    available, harvested, overshoot, steps = (sum(runs[0].column(name)[1]) for name in names)
    if not available or summarize(runs[0].events)["ranks"] == 1:  # one rank is never idle
        return None
    figure, (ax,) = new_figure(2.6)
    xs, idle = runs[0].column("idle_available_s")
    ax.bar(xs, idle, width=0.84, color=colour("wait"))
    ax.bar(*runs[0].column("idle_harvested_s"), width=0.5, color=colour("harvest"))
    integer_ticks(ax.xaxis)
    ax.set(xlabel="step", xlim=(xs[0] - 0.6, xs[-1] + 0.6))
    key(ax, {"idle seconds of all ranks": "wait", "harvested": "harvest"})
    if not steps:
        return figure, f"{number(available)} idle seconds, and no drafter step in them."
    saved = runs[0].column("saved_s")[1]
    did = "saved" if sum(saved) >= 0 else "cost"
    won = f" Drafts, of every source, {did} the rollouts {number(abs(sum(saved)))} s." * bool(saved)
    return figure, (
        f"{number(harvested)} of {number(available)} idle seconds became {number(steps)} drafter "
        f"steps, for an overshoot of {number(overshoot)} s that others waited.{won}"
    )


@picture(
    "Drafter loss",
    "Mean loss of the drafter's train steps in each step's idle windows (one a second is logged), "
    "all ranks. It moves with the text of their packs as well; what counts is acceptance.",
    compares=True,
)
def draw_drafter_loss(runs: list[Run]) -> Drawn:
    return _draw_column(runs, "drafter_loss", "harvest", "drafter loss", "drafter loss")


def _draw_column(runs: list[Run], column: str, phase: str, label: str, words: str) -> Drawn:
    figure, (ax,) = new_figure(2.6)
    found = draw_lines(ax, runs, column, phase, label)
    ax.set_ylim(bottom=0)
    return (figure, say_change(found, words)) if found else None


@picture(
    "Hot swaps",
    "Accept length of a rank's rollout until it first took over a fresher drafter, and after that.",
)
def draw_swaps(runs: list[Run]) -> Drawn:
    rollouts: dict[tuple[int, int], list[Event]] = {}
    for swap in runs[0].of("swap_result"):
        rollouts.setdefault((swap["step"], swap["rank"]), []).append(swap)
    points = []  # (step, accept length before the first swap, after it)
    for (step, _), swaps in rollouts.items():
        after = ratio((swap["accept_after"] * n, n) for swap in swaps
                      if (n := swap["row_steps_after"]))  # fmt: skip
        if (before := swaps[0]["accept_before"]) and after:
            points.append((step, before, after))
    if not points:
        return None
    figure, (ax,) = new_figure(2.6)
    xs, befores, afters = zip(*points, strict=True)
    ax.vlines(xs, befores, afters, color=colour("wait"), linewidth=2)
    ax.plot(xs, befores, "o", color=colour("muted"), markersize=5)
    ax.plot(xs, afters, "o", color=colour("harvest"), markersize=5)
    integer_ticks(ax.xaxis)
    ax.margins(x=0.05, y=0.15)
    ax.set_xlabel("step")
    key(ax, {"accept length before": "muted", "after": "harvest"})
    better = sum(before < after for _, before, after in points)
    return figure, (
        f"Higher after the swap in {better} of {counted(len(points), 'rollout')}; the mean went "
        f"from {number(mean(befores))} to {number(mean(afters))}. The rows left by then are the "
        "long ones, whose text is harder to foretell, so a fall does not speak against the drafter."
    )


@picture(
    "Rollout speed",
    "Completion tokens of all ranks per second of the slowest rank's rollout, by step. Longer "
    "accept lengths raise it, a long tail lowers it, and so does other work on the machine.",
    compares=True,
)
def draw_throughput(runs: list[Run]) -> Drawn:
    return _draw_column(runs, "tok_s", "generate", "tokens per second, all ranks", "rollout speed")


Used = dict[tuple[str, int], list[float]]  # (arm, column) -> [steps, tokens, seconds]


def _arm_use(cells: Iterable[tuple[int, dict[str, dict[str, float]]]]) -> Used:
    """What arms did in the columns of a picture, summed; cells: (column, what each arm did)."""
    used: Used = {}
    for column, arms in cells:
        for arm, done in arms.items():
            total = used.setdefault((arm, column), [0.0, 0.0, 0.0])
            for i, name in enumerate(("steps", "tokens", "seconds")):
                total[i] += done[name]
    return used


def best_arms(used: Used) -> dict[int, tuple[str, float]]:
    """Bucket of active rows -> the arm that made most tokens per second there, and its rate."""
    best: dict[int, tuple[str, float]] = {}
    for (arm, bucket), (steps, tokens, seconds) in used.items():
        rate = tokens / seconds if seconds and steps >= _LEAST_STEPS else 0.0
        if rate > best.get(bucket, ("", 0.0))[1]:
            best[bucket] = (arm, rate)
    return best


def regret(used: Used) -> float | None:
    """Share of the time that the best fixed arm of each bucket would have saved; None without data.

    The best is known in hindsight only, and the luckiest of several equal arms counts as the best,
    so this is an upper bound.

    >>> regret({("off", 1): [50, 200, 20.0], ("eagle-2", 1): [50, 400, 20.0]})  # 10 and 20 tok/s
    0.25
    """
    best = best_arms(used)
    cells = [(tokens, seconds, best[b][1]) for (_, b), (_, tokens, seconds) in used.items()
             if b in best]  # fmt: skip
    spent = sum(seconds for _, seconds, _ in cells)
    return 1 - sum(tokens / rate for tokens, _, rate in cells) / spent if spent else None


def _draw_cells(ax: Any, arms: list[str], columns: list[int], names: list[str], used: Used) -> None:
    """One square per arm and column; the darker, the larger its share of the column's time."""
    from matplotlib.patches import Rectangle

    ax.grid(visible=False)
    for x, column in enumerate(columns):
        spent = [used.get((arm, column), [0.0, 0.0, 0.0])[2] for arm in arms]
        for y, arm in enumerate(arms):
            tint = colour("muted" if arm == "off" else "harvest")
            for face, alpha in ((colour("grid"), 1.0), (tint, spent[y] / (sum(spent) or 1.0))):
                square = ((x - 0.47, y - 0.44), 0.94, 0.88)
                ax.add_patch(Rectangle(*square, linewidth=0, facecolor=face, alpha=alpha))
    ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(arms) - 0.5, -0.5))
    ax.set_yticks(range(len(arms)), arms)
    ticks = range(0, len(columns), -(-len(columns) // 10))
    ax.set_xticks(ticks, [names[x] for x in ticks])
    ax.spines["bottom"].set_visible(False)


@picture(
    "What the bandit chose, and its regret",
    "Share of decoding time per arm: by step, and by the number of rows still generating. Rates "
    "are of the whole run: an arm that was used early met a younger drafter and other texts.",
)
def draw_arms(runs: list[Run]) -> Drawn:
    rollouts = by_step(runs[0].events, "rollout_end")
    ends = [(step, end) for step, ranks in rollouts.items() for end in ranks]
    width = -(-len(rollouts) // 48) or 1  # steps that share a column
    firsts = list(rollouts)[::width]
    column = {step: firsts[i // width] for i, step in enumerate(rollouts)}
    by_column = _arm_use((column[step], end["arms"]) for step, end in ends)
    rows = _arm_use((int(least), arms) for _, end in ends
                    for least, arms in end["arms_by_rows"].items())  # fmt: skip
    seconds: dict[str, float] = {}
    for (arm, _), (_, _, spent) in by_column.items():
        seconds[arm] = seconds.get(arm, 0.0) + spent
    if len(seconds) < 2:
        return None
    arms = sorted(seconds, key=lambda arm: -seconds[arm])
    shares = [seconds[arm] / sum(seconds.values()) for arm in arms]
    figure, (top, bottom) = new_figure(2 * (0.95 + 0.34 * len(arms)), rows=2)
    _draw_cells(top, arms, firsts, list(map(str, firsts)), by_column)
    for y, share in enumerate(shares):
        mark(top, f"{share:.0%} of time", (1, y), (6, 0), x="axes", va="center")
    top.set_xlabel("step; the darker, the larger the share of time")
    buckets, best = sorted({least for _, least in rows}), best_arms(rows)
    _draw_cells(bottom, arms, buckets, list(map(_rows, buckets)), rows)
    for (arm, least), (count, tokens, spent) in rows.items():
        if count >= _LEAST_STEPS:
            weight = "bold" if best.get(least, ("", 0.0))[0] == arm else "normal"
            at = (buckets.index(least), arms.index(arm))
            mark(bottom, number(tokens / spent), at, ha="center", va="center", fontsize=8,
                 fontweight=weight)  # fmt: skip
    bottom.set_xlabel("rows still generating; in the squares tokens per second, best bold")
    return figure, f"Most used: {arms[0]} ({shares[0]:.0%}). {_say_regret(rows)}"


def _rows(least: int) -> str:
    """The name of a bucket of active rows."""
    return "1" if least == 1 else f"{least}-{2 * least - 1}"


def _say_regret(rows: Used) -> str:
    lost = regret(rows)
    if lost is None:
        return "No arm ran long enough at one number of rows to speak of regret."
    return (
        f"Regret: at most {lost:.1%} of the decoding time would have been saved by the best fixed "
        "arm of each number of rows, known in hindsight. What drafts gain over plain decoding is "
        "in the summary, measured on the same rows."
    )
