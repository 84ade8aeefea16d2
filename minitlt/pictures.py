"""The pictures of a run, drawn from its log alone.

Idea: one function per picture takes the runs and returns a Picture: the figure, one sentence that
says what it shows, and one that says what to conclude, computed from the same numbers; or None when
the log has no data for it. Pictures of several runs compare curves; what happens inside a run (its
timeline, its arms, its idle time) is drawn for one run only.

Left out: interactive charts. The page that holds the pictures is made by `minitlt.page`.

How to run: `minitlt report RUN...`
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from minitlt.charts import (
    STYLE,
    Picture,
    Run,
    bucket_medians,
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
)  # fmt: skip
from minitlt.events import Event
from minitlt.report import accept_thirds, by_step, number, ratio, thirds

MAX_STEPS_ON_TIMELINE = 12
_LEAST_STEPS = 10  # of an arm in a bucket, before its rate is a candidate for the best
PHASES = ("generate", "wait", "harvest", "merge", "update")
Spans = dict[int, list[tuple[str, float, float]]]  # rank -> (phase, start, end)


def draw_reward(runs: list[Run]) -> Picture | None:
    """Mean reward against steps and against seconds."""
    figure, (top, bottom) = new_figure(4.2, rows=2)
    found = draw_lines(top, runs, "reward", "update")
    if not found:
        return None
    draw_lines(bottom, runs, "reward", "update", along="end_s")
    run_key(top, runs)
    top.set(title="mean reward", xlabel="step")
    bottom.set(title="mean reward", xlabel="seconds since the start")
    return Picture(
        "reward",
        "Reward by step and by time",
        "Mean reward of each step's completions, against optimizer steps and against seconds.",
        say_change(found, "reward"),
        figure,
    )


def draw_accept_length(runs: list[Run]) -> Picture | None:
    """Accept length of all rollouts of a step."""
    figure, (ax,) = new_figure(2.6)
    found = draw_lines(ax, runs, "accept_len", "harvest")
    if not found:
        return None
    ax.axhline(1, color=colour("muted"), linewidth=1, linestyle=(0, (4, 3)))
    mark(ax, "plain decoding: 1 token", (0, 1), (2, -3), x="axes", va="top", color=colour("muted"))
    ax.set_ylim(0.8, max(1.5, ax.get_ylim()[1]))
    run_key(ax, runs)
    ax.set(title="tokens per verify step and row", xlabel="step")
    return Picture(
        "accept_length",
        "Accept length by step",
        "Tokens that one forward of the target yields per row, its own token included.",
        say_change(found, "accept length", [accept_thirds(run.events) for run, _ in found]),
        figure,
    )


def _acceptance(rollouts: list[list[Event]]) -> list[float]:
    """Acceptance by position over rollouts, weighted by their verify steps."""
    ends = [end for ranks in rollouts for end in ranks]
    depth = max((len(end["accept_by_position"]) for end in ends), default=0)
    return [
        ratio(
            (end["accept_by_position"][i] * end["verify_steps"], end["verify_steps"])
            for end in ends
            if i < len(end["accept_by_position"])
        )
        or 0.0
        for i in range(depth)
    ]


def draw_acceptance(runs: list[Run]) -> Picture | None:
    """How many verify steps accept at least i drafts."""
    figure, (ax,) = new_figure(2.6)
    parts = thirds(list(by_step(runs[0].events, "rollout_end").values()))
    names = ("first third", "muted"), ("last third", "harvest")
    curves = [(_acceptance(part), *name) for part, name in zip(parts, names, strict=True)]
    curves = [curve for curve in curves if curve[0]]
    if not curves:
        return None
    labels = []
    for values, name, tint in curves:
        xs, ys = range(1, len(values) + 1), [100 * value for value in values]
        ax.plot(xs, ys, color=colour(tint), marker="o", markersize=4)
        labels.append((float(xs[-1]), ys[-1], name, colour(tint)))
    ax.set_ylim(-7, 100)  # a label at 0 % stands clear of the axis
    end_labels(ax, labels)
    integer_ticks(ax.xaxis)
    ax.set(title="% of verify steps with drafts", xlabel="accepted at least this many drafts")
    values = curves[-1][0]
    return Picture(
        "acceptance_by_position",
        "Acceptance by draft position",
        "How often at least so many drafts in a row equalled what the target sampled itself.",
        f"In the last third, {values[0]:.0%} of verify steps accept the first draft and "
        f"{values[-1]:.0%} all {len(values)}. Drafting pays {sum(v >= 0.1 for v in values)} deep "
        "here, if a draft accepted in one step of ten covers its cost.",
        figure,
    )


def _cap(run: Run, longest: int) -> int | None:
    """The length cap of the completions; None when it is unknown, or so far beyond the longest
    row that it would only squeeze the picture."""
    config = run.of("run")[-1]["config"] if run.of("run") else {}
    cap = config.get("max_completion_length")
    return cap if cap and cap <= 1.5 * longest else None


def _mark_lengths(ax: Any, values: list[int], cap: int | None) -> None:
    """Vertical lines at the median, the 90th percentile and the cap, each named."""
    marks = [(median(values), "median", "left"), (quantiles(values, n=10)[-1], "90 %", "right")]
    marks += [(float(cap), "cap", "right")] if cap else []
    ax.set_ylim(0, ax.get_ylim()[1] * 1.35)
    for row, (x, text, side) in enumerate(marks):
        at = 1 - 0.09 * row  # each mark has its own line of text
        style = "-" if text == "cap" else (0, (4, 3))
        ax.axvline(x, ymax=at, color=colour("ink"), linewidth=1, linestyle=style)
        shift = (4 if side == "left" else -4, 0)
        mark(ax, f"{text} {number(x)}", (x, at), shift, y="axes", ha=side, va="top")


def draw_lengths(runs: list[Run]) -> Picture | None:
    """Histogram of completion lengths with its median, 90th percentile and the cap."""
    lengths = [sorted(n for end in run.of("rollout_end") for n in end["lengths"]) for run in runs]
    if min(map(len, lengths)) < 2:
        return None
    figure, (ax,) = new_figure(2.8)
    longest = max(own[-1] for own in lengths)
    edges = [longest * i / 24 for i in range(25)]
    said = []
    for index, (run, own) in enumerate(zip(runs, lengths, strict=True)):
        cut = sum(end["truncated"] for end in run.of("rollout_end")) / len(own)
        said.append(f"{run.name}: median {number(median(own))}, longest {own[-1]}, {cut:.0%} cut")
        shape = {"rwidth": 0.9} if len(runs) == 1 else {"histtype": "step", "linewidth": 1.8}
        tint = run_colour(runs, index, "generate")
        ax.hist(own, edges, weights=[100 / len(own)] * len(own), color=tint, **shape)
    run_key(ax, runs)
    ax.set(title="% of completions", xlabel="completion length, tokens")
    if len(runs) == 1:
        own = lengths[0]
        _mark_lengths(ax, own, _cap(runs[0], longest))
        tail = sum(own[-max(1, len(own) // 10) :]) / sum(own)
        said = [
            f"The longest tenth holds {tail:.0%} of all tokens and the longest completion is "
            f"{number(own[-1] / median(own))} times the median: short rows and their ranks wait. "
            f"{cut:.0%} were cut by the cap"
        ]
    shows = "Lengths of all completions, with the median, the 90th percentile and the cap."
    if len(runs) > 1:
        shows = "Lengths of all completions of each run."
    return Picture("lengths", "Response lengths", shows, f"{'; '.join(said)}.", figure)


def draw_active_rows(runs: list[Run]) -> Picture | None:
    """Rows still generating on each rank in the run's last rollout, and what the idle time did."""
    rollouts = by_step(runs[0].events, "rollout_end")
    traced = {s: e for s, e in rollouts.items() if all(end["active_trace"] for end in e)}
    if not traced:
        return None
    step, ends = list(traced.items())[-1]
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
            text = (
                f"harvests {number(used)} of {number(idle)} s"
                if used
                else f"waits {number(idle)} s"
            )
            mark(ax, text, (slowest, height), (0, 3), ha="right")
        ax.set_title(f"rank {end['rank']}: rows still generating")
        ax.set_ylim(0, max(ys) * 1.05)
        integer_ticks(ax.yaxis)
    axes[-1].set_xlim(0, slowest * 1.01)
    axes[-1].set_xlabel("seconds since the rollout started")
    rows = row_seconds = 0.0
    for end in ends:
        trace = [*end["active_trace"], [end["seconds"], 0]]
        rows += max(active for _, active in trace)
        row_seconds += sum((b[0] - a[0]) * a[1] for a, b in pairwise(trace))
    return Picture(
        "active_rows",
        f"The long tail of one rollout (step {step})",
        "Rows still generating over one rollout, rank by rank; beneath, what a finished rank does.",
        f"On average only {row_seconds / (rows * slowest):.0%} of the rows are active: "
        "the batch empties long before the last row is done.",
        figure,
    )


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


def draw_timeline(runs: list[Run]) -> Picture | None:
    """What every rank did when."""
    run = runs[0]
    rollouts = by_step(run.events, "rollout_end")
    if not rollouts:
        return None
    steps = list(rollouts)[-MAX_STEPS_ON_TIMELINE:]
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
    key(ax, {phase: phase for phase in ("generate", "harvest", "wait", "merge", "update")})
    idle = sum(max(map(run.at, ends)) - run.at(end) for ends in rollouts.values() for end in ends)
    total = sum(max(end["seconds"] for end in ends) * len(ends) for ends in rollouts.values())
    slowest = [max(ends, key=run.at)["rank"] for ends in rollouts.values()]
    worst = max(set(slowest), key=slowest.count)
    harvested = sum(event["harvested_s"] for event in run.of("harvest_end"))
    filled = f"drafter steps filled {min(harvested / (idle or 1), 1):.0%} of that"
    said = (
        f"Rank {worst} was last in {slowest.count(worst)} of {len(slowest)} rollouts. Ranks idled "
        f"{idle / total:.0%} of the rollout time; "
        f"{filled if harvested else 'no drafter step used it'}."
    )
    if len(spans) == 1:
        said = f"One rank waits for nobody; {number(harvested)} s went into drafter steps."
    return Picture(
        "timeline",
        "Who does what, when",
        "Each rank's time: generating, harvesting idle time, waiting, merging drafters, updating.",
        said,
        figure,
    )


def draw_harvest(runs: list[Run]) -> Picture | None:
    """Idle seconds available and harvested by step."""
    names = ("idle_available_s", "idle_harvested_s", "overshoot_s", "drafter_steps")
    available, harvested, overshoot, steps = (sum(runs[0].column(name)[1]) for name in names)
    if not available:
        return None
    figure, (ax,) = new_figure(2.6)
    ax.bar(*runs[0].column("idle_available_s"), width=0.84, color=colour("wait"))
    ax.bar(*runs[0].column("idle_harvested_s"), width=0.5, color=colour("harvest"))
    integer_ticks(ax.xaxis)
    ax.set_xlabel("step")
    key(ax, {"idle seconds of all ranks": "wait", "harvested": "harvest"})
    said = f"{number(harvested)} of {number(available)} idle seconds became {number(steps)} drafter"
    return Picture(
        "harvest",
        "Idle time, available and harvested",
        "Time between a rank's own end of rollout and the last rank's, and the part that trained.",
        f"{said} steps, for an overshoot of {number(overshoot)} s that others waited."
        if steps
        else f"{number(available)} idle seconds, and no drafter step in them.",
        figure,
    )


def draw_swaps(runs: list[Run]) -> Picture | None:
    """Accept length of a rollout before and after a fresher drafter came in."""
    swaps = [e for e in runs[0].of("swap_result") if e["accept_before"] and e["accept_after"]]
    if not swaps:
        return None
    figure, (ax,) = new_figure(2.6)
    xs, before, after = ([run[name] for run in swaps] for name in
                         ("step", "accept_before", "accept_after"))  # fmt: skip
    ax.vlines(xs, before, after, color=colour("wait"), linewidth=2)
    ax.plot(xs, before, "o", color=colour("muted"), markersize=5)
    ax.plot(xs, after, "o", color=colour("harvest"), markersize=5)
    integer_ticks(ax.xaxis)
    ax.margins(x=0.05, y=0.15)
    ax.set_xlabel("step")
    key(ax, {"accept length before": "muted", "after": "harvest"})
    better = sum(b < a for b, a in zip(before, after, strict=True))
    return Picture(
        "swaps",
        "Hot swaps",
        "Accept length of a rank's rollout before and after it took over a fresher drafter.",
        f"{better} of {len(swaps)} swaps raised it; on average it went from "
        f"{number(sum(before) / len(swaps))} to {number(sum(after) / len(swaps))}. The rows left "
        "after a swap are not those before it, so a single difference means little.",
        figure,
    )


Used = dict[tuple[str, int], list[float]]  # (arm, column) -> [steps, tokens, seconds]


def _arm_use(cells: list[tuple[str, int, Event]]) -> Used:
    """What arms did in the columns of a picture, summed."""
    used: Used = {}
    for arm, column, done in cells:
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


def _draw_cells(ax: Any, arms: list[str], num_columns: int, used: Used) -> None:
    """One square per arm and column; the darker, the larger its share of the column's time."""
    from matplotlib.patches import Rectangle

    ax.grid(visible=False)
    for x in range(num_columns):
        column = {arm: used.get((arm, x), [0.0, 0.0, 0.0])[2] for arm in arms}
        for y, arm in enumerate(arms):
            share = column[arm] / (sum(column.values()) or 1.0)
            tint = colour("muted" if arm == "off" else "harvest")
            for face, alpha in ((colour("grid"), 1.0), (tint, share)):
                square = ((x - 0.47, y - 0.44), 0.94, 0.88)
                ax.add_patch(Rectangle(*square, linewidth=0, facecolor=face, alpha=alpha))
    ax.set(xlim=(-0.5, num_columns - 0.5), ylim=(len(arms) - 0.5, -0.5))
    ax.set_yticks(range(len(arms)), arms)
    ax.spines["bottom"].set_visible(False)


def draw_arms(runs: list[Run]) -> Picture | None:
    """Which arm was used how much, by step and by active rows, and the regret."""
    rollouts = by_step(runs[0].events, "rollout_end")
    width = -(-len(rollouts) // 48) or 1  # steps that share a column
    firsts, ends = list(rollouts)[::width], list(enumerate(rollouts.values()))
    steps = _arm_use([(arm, i // width, done) for i, ranks in ends for end in ranks
                      for arm, done in end["arms"].items()])  # fmt: skip
    rows = _arm_use([(arm, int(least), done) for _, ranks in ends for end in ranks
                     for least, arms in end.get("arms_by_rows", {}).items()
                     for arm, done in arms.items()])  # fmt: skip
    seconds: dict[str, float] = {}
    for (arm, _), (_, _, spent) in steps.items():
        seconds[arm] = seconds.get(arm, 0.0) + spent
    if len(seconds) < 2:
        return None
    arms = sorted(seconds, key=lambda arm: -seconds[arm])
    buckets, total = sorted({least for _, least in rows}), sum(seconds.values())
    figure, axes = new_figure((0.95 + 0.34 * len(arms)) * (1 + bool(rows)), rows=1 + bool(rows))
    _draw_cells(axes[0], arms, len(firsts), steps)
    for y, arm in enumerate(arms):
        text = f"{seconds[arm] / total:.0%} of time"
        mark(axes[0], text, (1, y), (6, 0), x="axes", va="center")
    ticks = range(0, len(firsts), -(-len(firsts) // 8))
    axes[0].set_xticks(ticks, [str(firsts[x]) for x in ticks])
    axes[0].set_xlabel("step; the darker, the larger the share of time")
    if rows:
        by_column = {(arm, buckets.index(least)): done for (arm, least), done in rows.items()}
        _draw_cells(axes[1], arms, len(buckets), by_column)
        best = {buckets.index(least): arm for least, (arm, _) in best_arms(rows).items()}
        for (arm, x), (count, tokens, spent) in by_column.items():
            if count >= _LEAST_STEPS:
                weight = "bold" if best.get(x) == arm else "normal"
                style: dict[str, Any] = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 8,
                    "fontweight": weight,
                }
                mark(axes[1], number(tokens / spent), (x, arms.index(arm)), **style)
        axes[1].set_xticks(range(len(buckets)), map(_rows, buckets))
        axes[1].set_xlabel("rows still generating; in the squares tokens per second, best bold")
    return Picture(
        "arms",
        "What the bandit chose, and its regret",
        "Share of decoding time per arm: by step, and by the number of rows still generating.",
        f"Most used: {arms[0]} ({seconds[arms[0]] / total:.0%}). {_say_regret(rows)}",
        figure,
    )


def _rows(least: int) -> str:
    """The name of a bucket of active rows."""
    return "1" if least == 1 else f"{least}-{2 * least - 1}"


def _say_regret(rows: Used) -> str:
    lost, best = regret(rows), best_arms(rows)
    if lost is None:
        return "The log does not say at how many active rows, so the regret is unknown."
    plain = {
        b: rows["off", b] for b, (arm, _) in best.items() if arm != "off" and ("off", b) in rows
    }
    gains = [(best[b][1] * seconds / tokens, b) for b, (_, tokens, seconds) in plain.items()]
    said = "Plain decoding was not beaten where it was tried. "
    if gains:
        gain, bucket = max(gains)
        said = (
            f"At best, drafts were {gain:.1f} x as fast as plain decoding ({_rows(bucket)} rows). "
        )
    return said + (
        f"Regret: at most {lost:.1%} of the decoding time would have been saved by the best fixed "
        "arm of each number of rows, known in hindsight."
    )


def draw_throughput(runs: list[Run]) -> Picture | None:
    """Rollout tokens per second by step."""
    figure, (ax,) = new_figure(2.6)
    found = draw_lines(ax, runs, "tok_s", "generate")
    if not found:
        return None
    run_key(ax, runs)
    ax.set(title="tokens per second, all ranks", xlabel="step")
    ax.set_ylim(bottom=0)
    return Picture(
        "throughput",
        "Rollout speed",
        "Completion tokens of all ranks per second of the slowest rank's rollout, by step.",
        say_change(found, "rollout speed"),
        figure,
    )


def _drafter_losses(run: Run) -> list[tuple[float, float]]:
    """(drafter steps of a rank so far, loss)."""
    done: dict[int, int] = {}
    points = []
    for event in run.events:
        before = done.get(event["rank"], 0)
        if event["event"] == "harvest_step" and event["loss"] is not None:
            points.append((before + event["n"], event["loss"]))
        elif event["event"] == "harvest_end":
            done[event["rank"]] = before + event["drafter_steps"]
    return points


def draw_drafter_loss(runs: list[Run]) -> Picture | None:
    """Drafter loss against its training steps, with medians."""
    figure, (ax,) = new_figure(2.6)
    labels, said = [], []
    for index, run in enumerate(runs):
        points = _drafter_losses(run)
        if len(points) < 5:
            continue
        tint = run_colour(runs, index, "harvest")
        if len(runs) == 1:
            dots = zip(*spread(points, 500), strict=True)
            ax.plot(*dots, ".", color=tint, alpha=0.25, markersize=4)
        xs, smooth = bucket_medians(points, 30)
        ax.plot(xs, smooth, color=tint)
        labels.append((xs[-1], smooth[-1], number(smooth[-1]), tint))
        said.append(
            f"{f'{run.name} ' if len(runs) > 1 else ''}from {number(smooth[0])} to "
            f"{number(smooth[-1])} over {number(xs[-1])} steps of a rank"
        )
    if not labels:
        return None
    if len(runs) == 1:
        end_labels(ax, labels)
    run_key(ax, runs)
    ax.set(title="drafter loss", xlabel="drafter steps of a rank in idle windows")
    return Picture(
        "drafter_loss",
        "The drafter learns in idle time",
        "Loss of the drafter's training steps, medians"
        f"{' (line); the dots are single steps' if len(runs) == 1 else ''}.",
        f"Drafter loss: {'; '.join(said)}.",
        figure,
    )


PICTURES: tuple[Callable[[list[Run]], Picture | None], ...] = (
    draw_reward, draw_timeline, draw_accept_length, draw_acceptance, draw_lengths, draw_active_rows,
    draw_harvest, draw_drafter_loss, draw_swaps, draw_throughput, draw_arms,
)  # fmt: skip
COMPARED = {draw_reward, draw_accept_length, draw_lengths, draw_drafter_loss, draw_throughput}


def draw(runs: list[Run]) -> list[Picture]:
    """All pictures that the logs have data for; of several runs those that can be compared."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = [f(runs) for f in PICTURES if len(runs) == 1 or f in COMPARED]
    return [picture for picture in drawn if picture is not None]


def write_pngs(pictures: list[Picture], folder: Path) -> None:
    """Write each picture as `folder`/NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png())
