"""The pictures of a run, drawn from its log alone.

Idea: one function per picture takes one run, or several to compare, and returns a Picture: the
figure, one sentence that says what it shows, and one that says what to conclude, computed from the
same numbers; or None when the log has no data for it.

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
    new_figure,
    run_colour,
    run_key,
    say_change,
    spread,
)  # fmt: skip
from minitlt.events import Event
from minitlt.report import accept_thirds, by_step, number, ratio, thirds

MAX_STEPS_ON_TIMELINE = 12


def draw_reward(runs: list[Run]) -> Picture | None:
    """Mean reward against steps and against seconds."""
    figure, (top, bottom) = new_figure(4.2, rows=2)
    found = draw_lines(top, runs, "reward", "update")
    if not found:
        return None
    draw_lines(bottom, runs, "reward", "update", along="end_s")
    run_key(top, runs)
    top.set_title("mean reward")
    top.set_xlabel("step")
    bottom.set_title("mean reward")
    bottom.set_xlabel("seconds since the start")
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
    ax.annotate(
        "plain decoding: 1 token",
        (0, 1),
        xycoords=("axes fraction", "data"),
        xytext=(2, -3),
        textcoords="offset points",
        va="top",
        color=colour("muted"),
    )
    ends = [accept_thirds(run.events) for run, _ in found]
    ax.set_ylim(0.8, max(1.5, ax.get_ylim()[1]))
    run_key(ax, runs)
    ax.set_title("tokens per verify step and row")
    ax.set_xlabel("step")
    return Picture(
        "accept_length",
        "Accept length by step",
        "Tokens that one forward of the target yields per row, its own token included.",
        say_change(found, "accept length", ends),
        figure,
    )


def _acceptance(rollouts: list[list[Event]]) -> list[float]:
    """Acceptance by position over rollouts, weighted by their verify steps."""
    ends = [end for ranks in rollouts for end in ranks if end["accept_by_position"]]
    depth = max((len(end["accept_by_position"]) for end in ends), default=0)
    curve = []
    for i in range(depth):
        weighted = [
            (end["accept_by_position"][i] * end["verify_steps"], end["verify_steps"])
            for end in ends
            if i < len(end["accept_by_position"])
        ]
        curve.append(ratio(weighted) or 0.0)
    return curve


def draw_acceptance(runs: list[Run]) -> Picture | None:
    """How many verify steps accept at least i drafts."""
    figure, (ax,) = new_figure(2.6)
    curves: list[tuple[str, list[float], str]] = []
    for index, run in enumerate(runs):
        first, last = thirds(list(by_step(run.events, "rollout_end").values()))
        if len(runs) == 1:
            curves.append(("first third", _acceptance(first), colour("muted")))
            curves.append(("last third", _acceptance(last), colour("harvest")))
        else:
            curves.append((run.name, _acceptance(last), run_colour(runs, index, "harvest")))
    curves = [curve for curve in curves if curve[1]]
    if not curves:
        return None
    labels = []
    for name, values, tint in curves:
        xs = list(range(1, len(values) + 1))
        ax.plot(xs, [100 * value for value in values], color=tint, marker="o", markersize=4)
        labels.append((xs[-1], 100 * values[-1], name if len(runs) == 1 else "", tint))
    ax.set_ylim(-7, 100)  # a label at 0 % stands clear of the axis
    end_labels(ax, labels)
    run_key(ax, runs)
    integer_ticks(ax.xaxis)
    ax.set_title("% of verify steps with drafts")
    ax.set_xlabel("accepted at least this many drafts")
    _, values, _ = curves[-1]
    useful = [i for i, value in enumerate(values, start=1) if value >= 0.1]
    concludes = (
        f"In the last third, {values[0]:.0%} of verify steps accept the first draft and "
        f"{values[-1]:.0%} all {len(values)}. Drafting pays {len(useful)} deep here, if a draft "
        "accepted in one step of ten covers its cost."
    )
    if len(runs) > 1:
        firsts = [f"{name} {values[0]:.0%}" for name, values, _ in curves]
        concludes = f"The first draft is accepted in: {', '.join(firsts)} of verify steps."
    return Picture(
        "acceptance_by_position",
        "Acceptance by draft position",
        "How often at least so many drafts in a row equalled what the target sampled itself"
        f"{' (last third of the run)' if len(runs) > 1 else ''}.",
        concludes,
        figure,
    )


def _find(config: dict[str, Any], name: str) -> Any:
    """The value of `name` at any depth of a nested dict, else None."""
    if name in config:
        return config[name]
    inner = [_find(value, name) for value in config.values() if isinstance(value, dict)]
    return next((value for value in inner if value is not None), None)


def _cap(run: Run) -> int | None:
    """The completion length cap: from the config, else the longest row if any was cut; None when
    it is so far beyond the longest row that it would only squeeze the picture.
    """
    configs = [event["config"] for event in run.of("run")]
    known = _find(configs[-1], "max_completion_length") if configs else None
    cut = any(end["truncated"] for end in run.of("rollout_end"))
    longest = max((max(end["lengths"], default=0) for end in run.of("rollout_end")), default=0)
    cap = known or (longest if cut else None)
    return cap if cap and cap <= 1.5 * longest else None


def _mark_lengths(ax: Any, values: list[int], cap: int | None) -> None:
    """Vertical lines at the median, the 90th percentile and the cap, each named."""
    marks = [(median(values), "median", "left"), (quantiles(values, n=10)[-1], "90 %", "right")]
    marks += [(float(cap), "cap", "right")] if cap else []
    ax.set_ylim(0, ax.get_ylim()[1] * 1.35)
    for row, (x, text, side) in enumerate(marks):
        at = 1 - 0.09 * row  # each mark has its own line of text
        ax.axvline(
            x,
            ymax=at,
            color=colour("ink"),
            linewidth=1,
            linestyle="-" if text == "cap" else (0, (4, 3)),
        )
        ax.annotate(
            f"{text} {number(x)}",
            (x, at),
            xycoords=("data", "axes fraction"),
            xytext=(4 if side == "left" else -4, 0),
            textcoords="offset points",
            ha=side,
            va="top",
        )


def draw_lengths(runs: list[Run]) -> Picture | None:
    """Histogram of completion lengths with its median, 90th percentile and the cap."""
    rollouts = [
        [end for ends in by_step(run.events, "rollout_end").values() for end in ends]
        for run in runs
    ]
    lengths = [[length for end in ends for length in end["lengths"]] for ends in rollouts]
    if not all(lengths) or max(map(len, lengths)) < 2:
        return None
    figure, (ax,) = new_figure(2.8)
    edges = [max(map(max, lengths)) * i / 24 for i in range(25)]
    values = sorted(lengths[0])
    tail = values[-max(1, len(values) // 10) :]
    if len(runs) == 1:
        ax.hist(values, bins=edges, color=colour("generate"), rwidth=0.9)
        ax.set_title("completions")
        _mark_lengths(ax, values, _cap(runs[0]))
    else:
        for index, own in enumerate(lengths):
            ax.hist(
                own,
                bins=edges,
                weights=[100 / len(own)] * len(own),
                histtype="step",
                color=run_colour(runs, index, "generate"),
                linewidth=1.8,
            )
        run_key(ax, runs)
        ax.set_title("% of completions")
    ax.set_xlabel("completion length, tokens")
    cuts = [
        sum(end["truncated"] for end in ends) / len(own)
        for ends, own in zip(rollouts, lengths, strict=True)
    ]
    if len(runs) == 1:
        shows = "Lengths of all completions, with the median, the 90th percentile and the cap."
        concludes = (
            f"The longest tenth holds {sum(tail) / sum(values):.0%} of all tokens and the longest "
            f"completion is {number(values[-1] / median(values))} times the median: short rows and "
            f"their ranks wait. {cuts[0]:.0%} were cut by the cap."
        )
    else:
        shows = "Lengths of all completions of each run."
        said = [
            f"{run.name}: median {number(median(own))}, longest {max(own)}, {cut:.0%} cut"
            for run, own, cut in zip(runs, lengths, cuts, strict=True)
        ]
        concludes = f"{'; '.join(said)}."
    return Picture("lengths", "Response lengths", shows, concludes, figure)


def draw_active_rows(runs: list[Run]) -> Picture | None:
    """Rows still generating on each rank in the run's last rollout, and what the idle time did."""
    rollouts = by_step(runs[0].events, "rollout_end")
    rollouts = {
        step: ends for step, ends in rollouts.items() if all(end["active_trace"] for end in ends)
    }
    if not rollouts:
        return None
    step, ends = list(rollouts.items())[-1]
    windows = {
        event["rank"]: event for event in by_step(runs[0].events, "harvest_end").get(step, [])
    }
    shown = spread(sorted(ends, key=lambda end: end["seconds"]), 4)
    slowest = max(end["seconds"] for end in ends)
    figure, axes = new_figure(0.9 + 1.0 * len(shown), rows=len(shown), share_x=True)
    for ax, end in zip(axes, shown, strict=True):
        trace = spread(end["active_trace"], 300)
        xs, ys = [point[0] for point in trace], [point[1] for point in trace]
        ax.fill_between(
            xs + [end["seconds"]], ys + [0], step="post", linewidth=0, color=colour("generate")
        )
        window = windows.get(end["rank"])
        idle = slowest - end["seconds"]
        if idle > 0.02 * slowest:
            height = max(ys) * 0.3
            ax.broken_barh([(end["seconds"], idle)], (0, height), color=colour("wait"))
            text = f"waits {number(idle)} s"
            if window and window["harvested_s"] > 0:
                ax.broken_barh(
                    [(end["seconds"], min(window["harvested_s"], idle))],
                    (0, height),
                    color=colour("harvest"),
                )
                text = f"harvests {number(window['harvested_s'])} of {number(idle)} s"
            ax.annotate(
                text, (slowest, height), xytext=(0, 3), textcoords="offset points", ha="right"
            )
        ax.set_title(f"rank {end['rank']}: rows still generating")
        ax.set_ylim(0, max(ys) * 1.05)
        integer_ticks(ax.yaxis)
    axes[-1].set_xlim(0, slowest * 1.01)
    axes[-1].set_xlabel("seconds since the rollout started")
    rows = row_seconds = 0.0
    for end in ends:
        trace = [*end["active_trace"], [end["seconds"], 0]]
        rows += max(point[1] for point in trace)
        row_seconds += sum((b[0] - a[0]) * a[1] for a, b in pairwise(trace))
    return Picture(
        "active_rows",
        f"The long tail of one rollout (step {step})",
        "Rows still generating over one rollout, rank by rank; beneath, what a finished rank does.",
        f"On average only {row_seconds / (rows * slowest):.0%} of the rows are active: "
        "the batch empties long before the last row is done.",
        figure,
    )


def timeline_spans(run: Run, steps: list[int]) -> dict[int, list[tuple[str, float, float]]]:
    """Per rank the (phase, start, end) spans in seconds; later ones are drawn over earlier ones."""
    spans: dict[int, list[tuple[str, float, float]]] = {}
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
            ready = slowest
            if rank in merged:
                ready = run.at(merged[rank])
                mine.append(("merge", ready - merged[rank]["seconds"], ready))
            mine.append(("wait", at, ready - (merged[rank]["seconds"] if rank in merged else 0)))
            if rank in closed and closed[rank]["drafter_steps"]:
                begin = starts.get((step, rank), at)
                mine.append(("harvest", begin, run.at(closed[rank])))
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
        for phase in ("generate", "wait", "harvest", "merge", "update"):
            bars = [(begin, end - begin) for name, begin, end in mine if name == phase]
            ax.broken_barh(bars, (rank - 0.36, 0.72), color=colour(phase), linewidth=0)
    for step in steps:
        begin = min(run.at(end) - end["seconds"] for end in rollouts[step])
        ax.annotate(str(step), (begin, -0.42), va="bottom", color=colour("muted"), fontsize=8)
    ax.set_yticks(sorted(spans), [f"rank {rank}" for rank in sorted(spans)])
    ax.set_ylim(max(spans) + 0.5, -0.75)
    ax.margins(x=0.005)
    ax.set_xlabel("seconds since the start; small numbers: step")
    key(ax, {phase: phase for phase in ("generate", "harvest", "wait", "merge", "update")})
    idle = sum(
        max(run.at(e) for e in ends) - run.at(end) for ends in rollouts.values() for end in ends
    )
    total = sum(max(end["seconds"] for end in ends) * len(ends) for ends in rollouts.values())
    slowest = [max(ends, key=run.at)["rank"] for ends in rollouts.values()]
    worst = max(set(slowest), key=slowest.count)
    harvested = sum(event["harvested_s"] for event in run.of("harvest_end"))
    used = (
        f"drafter steps filled {min(harvested / idle, 1):.0%} of that"
        if idle and harvested
        else "no drafter step used it"
    )
    straggler = (
        f"Rank {worst} was last in {slowest.count(worst)} of {len(slowest)} rollouts. "
        if len(spans) > 1
        else ""
    )
    return Picture(
        "timeline",
        "Who does what, when",
        "Each rank's time: generating, harvesting idle time, waiting, merging drafters, updating.",
        f"{straggler}Ranks idled {idle / total:.0%} of the rollout time; {used}.",
        figure,
    )


def draw_harvest(runs: list[Run]) -> Picture | None:
    """Idle seconds available and harvested: by step for one run, totals for several."""
    totals = [
        (
            sum(row["idle_available_s"] or 0 for row in run.steps),
            sum(row["idle_harvested_s"] or 0 for row in run.steps),
        )
        for run in runs
    ]
    if not any(total[0] for total in totals):
        return None
    figure, (ax,) = new_figure(2.6 if len(runs) == 1 else 0.9 + 0.4 * len(runs))
    if len(runs) == 1:
        xs, available = runs[0].column("idle_available_s")
        ax.bar(xs, available, width=0.84, color=colour("wait"))
        ax.bar(*runs[0].column("idle_harvested_s"), width=0.5, color=colour("harvest"))
        integer_ticks(ax.xaxis)
        ax.set_xlabel("step")
        ax.set_xlim(xs[0] - 0.6, xs[-1] + 0.6)
    else:
        ys = range(len(runs))
        ax.barh(ys, [total[0] for total in totals], height=0.6, color=colour("wait"))
        ax.barh(ys, [total[1] for total in totals], height=0.3, color=colour("harvest"))
        ax.set_yticks(ys, [run.name for run in runs])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("idle seconds")
    key(ax, {"idle seconds of all ranks": "wait", "harvested": "harvest"})
    said = [
        f"{run.name + ': ' if len(runs) > 1 else ''}{number(total[1])} of {number(total[0])} "
        f"idle seconds"
        for run, total in zip(runs, totals, strict=True)
    ]
    overshoot = sum(row["overshoot_s"] or 0 for row in runs[0].steps)
    steps = sum(row["drafter_steps"] or 0 for row in runs[0].steps)
    if len(runs) == 1 and not steps:
        extra = ": there was no drafter step"
    else:
        extra = " became drafter steps"
        if len(runs) == 1:
            extra = (
                f" became {number(steps)} drafter steps, for an overshoot of "
                f"{number(overshoot)} s that others waited"
            )
    return Picture(
        "harvest",
        "Idle time, available and harvested",
        "Time between a rank's own end of rollout and the last rank's, and the part that trained.",
        f"{'; '.join(said)}{extra}.",
        figure,
    )


def _overstated_regret(ends: list[Event]) -> float | None:
    """Share of rollout time saved if each rollout had run at the rate of its fastest strategy."""
    spent = ideal = 0.0
    for end in ends:
        used = end["arms"].values()
        rates = [
            arm["tokens"] / arm["seconds"]
            for arm in used
            if arm["seconds"] > 0 and arm["steps"] >= 5
        ]
        if rates:
            spent += sum(arm["seconds"] for arm in used)
            ideal += sum(arm["tokens"] for arm in used) / max(rates)
    return 1 - ideal / spent if spent else None


def _arm_use(
    rollouts: list[list[Event]], width: int
) -> tuple[dict[tuple[str, int], float], dict[str, tuple[float, float]]]:
    """Seconds per (strategy, column of `width` steps), and (tokens, seconds) per strategy."""
    seconds: dict[tuple[str, int], float] = {}
    totals: dict[str, tuple[float, float]] = {}
    for index, ends in enumerate(rollouts):
        for end in ends:
            for arm, used in end["arms"].items():
                cell = (arm, index // width)
                seconds[cell] = seconds.get(cell, 0.0) + used["seconds"]
                before = totals.get(arm, (0.0, 0.0))
                totals[arm] = (before[0] + used["tokens"], before[1] + used["seconds"])
    return seconds, totals


def draw_arms(runs: list[Run]) -> Picture | None:
    """Which strategy was used how much in which step."""
    from matplotlib.patches import Rectangle

    rollouts = by_step(runs[0].events, "rollout_end")
    width = -(-len(rollouts) // 48) or 1  # steps that share a column
    firsts = list(rollouts)[::width]
    seconds, totals = _arm_use(list(rollouts.values()), width)
    if len(totals) < 2:
        return None
    arms = sorted(totals, key=lambda arm: totals[arm][1], reverse=True)
    figure, (ax,) = new_figure(0.95 + 0.34 * len(arms))
    ax.grid(visible=False)
    for y, arm in enumerate(arms):
        tint = colour("muted" if arm == "off" else "harvest")
        for x in range(len(firsts)):
            here = sum(seconds.get((other, x), 0.0) for other in arms)
            share = seconds.get((arm, x), 0.0) / here if here else 0.0
            for face, alpha in ((colour("grid"), 1.0), (tint, share)):
                ax.add_patch(
                    Rectangle(
                        (x - 0.47, y - 0.44), 0.94, 0.88, linewidth=0, facecolor=face, alpha=alpha
                    )
                )
        tokens, used_s = totals[arm]
        share = used_s / (sum(total[1] for total in totals.values()) or 1.0)
        text = f"{share:.0%}, {number(tokens / used_s if used_s else None)} tok/s"
        ax.annotate(
            text,
            (1, y),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    ax.set_xlim(-0.5, len(firsts) - 0.5)
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.set_yticks(range(len(arms)), arms)
    ticks = range(0, len(firsts), max(1, -(-len(firsts) // 8)))
    ax.set_xticks(ticks, [str(firsts[x]) for x in ticks])
    ax.spines["bottom"].set_visible(False)
    ax.set_xlabel("step; the darker, the larger the share of time")
    best = max(arms, key=lambda arm: totals[arm][0] / max(totals[arm][1], 1e-9))
    regret = _overstated_regret([end for ends in rollouts.values() for end in ends])
    said = (
        ""
        if regret is None
        else (
            f" At the rate of each rollout's fastest strategy the rollouts would have taken "
            f"{regret:.0%} less; that overstates the regret, since strategies are tried at "
            "different numbers of active rows."
        )
    )
    return Picture(
        "arms",
        "Strategies chosen",
        "Share of rollout time per strategy and step; at the right its share and rate in the run.",
        f"Most used: {arms[0]}; fastest: {best}.{said}",
        figure,
    )


def _rates_by_rows(run: Run) -> dict[str, dict[int, list[float]]]:
    """'plain' and 'speculative' -> upper end of a bucket of active rows -> tokens per second."""
    rates: dict[str, dict[int, list[float]]] = {"plain": {}, "speculative": {}}
    for event in run.of("rollout_progress"):
        if event["active"] > 0 and event["tok_s"]:
            bucket = 1 << (event["active"] - 1).bit_length()
            kind = "plain" if event["arm"] == "off" else "speculative"
            rates[kind].setdefault(bucket, []).append(event["tok_s"])
    # Two samples say nothing about a rate.
    return {
        kind: {bucket: rate for bucket, rate in buckets.items() if len(rate) >= 3}
        for kind, buckets in rates.items()
    }


def draw_throughput(runs: list[Run]) -> Picture | None:
    """Rollout tokens per second by step; for one run also against the number of active rows."""
    rates = _rates_by_rows(runs[0])
    with_rows = len(runs) == 1 and any(rates.values())
    figure, axes = new_figure(4.4 if with_rows else 2.6, rows=1 + with_rows)
    found = draw_lines(axes[0], runs, "tok_s", "generate")
    if not found:
        return None
    run_key(axes[0], runs)
    axes[0].set_title("tokens per second, all ranks")
    axes[0].set_xlabel("step")
    axes[0].set_ylim(bottom=0)
    said = ""
    if with_rows:
        labels = []
        buckets = sorted(rates["plain"].keys() | rates["speculative"].keys())
        for kind, tint in (("plain", colour("muted")), ("speculative", colour("generate"))):
            xs = [buckets.index(bucket) for bucket in sorted(rates[kind])]
            ys = [median(rates[kind][bucket]) for bucket in sorted(rates[kind])]
            if xs:
                axes[1].plot(xs, ys, color=tint, marker="o", markersize=4)
                labels.append((xs[-1], ys[-1], kind, tint))
        axes[1].set_ylim(bottom=0)
        end_labels(axes[1], labels)
        names = [f"{b // 2 + 1}-{b}" if b > 2 else str(b) for b in buckets]
        axes[1].set_xticks(range(len(buckets)), names)
        axes[1].set_title("tokens per second of one rank, median")
        axes[1].set_xlabel("rows still generating")
        both = [b for b in buckets if b in rates["plain"] and b in rates["speculative"]]
        gains = [median(rates["speculative"][b]) / median(rates["plain"][b]) for b in both]
        if gains:
            at = [
                f"{gain:.1f} x plain at a batch of {names[buckets.index(b)]}"
                for gain, b in zip(gains, both, strict=True)
            ]
            said = f" Speculation is {', '.join(dict.fromkeys((at[0], at[-1])))}."
    return Picture(
        "throughput",
        "Rollout speed",
        "Completion tokens generated per second, by step and against the rows still active."
        if with_rows
        else "Completion tokens generated per second of rollout, all ranks.",
        say_change(found, "rollout speed") + said,
        figure,
    )


def draw_drafter_loss(runs: list[Run]) -> Picture | None:
    """Drafter loss against its training steps, with medians."""
    figure, (ax,) = new_figure(2.6)
    labels, said = [], []
    for index, run in enumerate(runs):
        done: dict[int, int] = {}
        points = []
        for event in run.events:
            rank = event["rank"]
            if event["event"] == "harvest_step" and event["loss"] is not None:
                points.append((done.get(rank, 0) + event["n"], event["loss"]))
            elif event["event"] == "harvest_end":
                done[rank] = done.get(rank, 0) + event["drafter_steps"]
        if len(points) < 5:
            continue
        tint = run_colour(runs, index, "harvest")
        xs, smooth = bucket_medians(points, 30)
        if len(runs) == 1:
            dots = spread(points, 500)
            ax.plot(
                [x for x, _ in dots],
                [y for _, y in dots],
                ".",
                color=tint,
                alpha=0.25,
                markersize=4,
            )
        ax.plot(xs, smooth, color=tint)
        labels.append((xs[-1], smooth[-1], number(smooth[-1]), tint))
        prefix = f"{run.name} " if len(runs) > 1 else ""
        said.append(
            f"{prefix}from {number(smooth[0])} to {number(smooth[-1])} "
            f"over {number(xs[-1])} steps of a rank"
        )
    if not labels:
        return None
    if len(runs) == 1:
        end_labels(ax, labels)
    run_key(ax, runs)
    ax.set_title("drafter loss")
    ax.set_xlabel("drafter steps of a rank in idle windows")
    return Picture(
        "drafter_loss",
        "The drafter learns in idle time",
        "Loss of the drafter's training steps (dots) and their medians (line)."
        if len(runs) == 1
        else "Loss of the drafter's training steps, medians.",
        f"Drafter loss: {'; '.join(said)}.",
        figure,
    )


PICTURES: tuple[Callable[[list[Run]], Picture | None], ...] = (
    draw_reward,
    draw_timeline,
    draw_accept_length,
    draw_acceptance,
    draw_lengths,
    draw_active_rows,
    draw_harvest,
    draw_drafter_loss,
    draw_throughput,
    draw_arms,
)
ONE_RUN_ONLY = {draw_timeline, draw_active_rows, draw_arms}


def draw(runs: list[Run]) -> list[Picture]:
    """All pictures that the logs have data for; of several runs those that can be compared."""
    import matplotlib

    functions = [f for f in PICTURES if len(runs) == 1 or f not in ONE_RUN_ONLY]
    with matplotlib.rc_context(STYLE):
        drawn = [function(runs) for function in functions]
    return [picture for picture in drawn if picture is not None]


def write_pngs(pictures: list[Picture], folder: Path) -> None:
    """Write each picture as `folder`/NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png())
