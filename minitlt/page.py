"""One self-contained HTML page for a run, or for several runs to compare.

Idea: a page that opens from a file, anywhere, years later: no script, no request (a content policy
forbids both), pictures as inline SVG that follow the reader's light or dark setting, one column
that fits a phone. `page.html` is the page as a Jinja template, which escapes whatever a model wrote
and marks each of its tokens as drafted and accepted, as corrected, or as the target's own; here is
computed what goes into it.

Left out: a web server, search, and every row of a run (`row` events are samples).

How to run: `minitlt report RUN...`
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minitlt.charts import COLOURS, Picture, Run
from minitlt.common import counted, write_atomically
from minitlt.events import Event, table
from minitlt.pictures import draw, write_pngs
from minitlt.report import duration, mean, number, summarize, summary_rows, thirds

SAMPLES_OF_A_STEP = 3
HERE = Path(__file__).parent


def _style() -> str:
    """The style sheet; colours are variables with a light and a dark value."""
    extra = {"paper": ("#ffffff", "#15181c"), "drafted": ("#d5efe5", "#12402f"),
             "corrected": ("#fbe9cf", "#4a3210")}  # fmt: skip
    light, dark = (
        "".join(f"--{name}:{pair[side]};" for name, pair in (COLOURS | extra).items())
        for side in (0, 1)
    )
    font = "--font:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    css = (HERE / "page.css").read_text(encoding="utf-8")
    return (
        f":root{{color-scheme:light dark;{font}{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{css}"
    )


def _headline(run: Run) -> str:
    """Model, ranks and time in one line."""
    target = run.opened.get("target", {}).get("name", "unknown model")
    ranks = run.opened.get("world_size", 1)
    wall = duration(run.at(run.events[-1]))
    return f"{target}, {counted(ranks, 'rank')}, {counted(len(run.steps), 'step')} in {wall}"


def _summary(runs: list[Run]) -> dict[str, list[Any]]:
    """Line of the summary table -> per run its value and what the value is."""
    tables = [{name: cell for name, *cell in summary_rows(summarize(run.events))} for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: [table.get(name, ["-"]) for table in tables] for name in names}


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dict -> dotted key -> JSON value."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat


def _differences(runs: list[Run]) -> dict[str, list[Any]]:
    """Field of the configuration that is not the same in all runs -> per run its value."""
    configs = [_flat(run.opened.get("config", {})) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    values = {name: [config.get(name, "-") for config in configs] for name in names}
    return {name: [[v] for v in own] for name, own in values.items() if len(set(own)) > 1}


def _samples(run: Run) -> list[Event]:
    """A few completions of the last and of the first step that have samples."""
    rows = run.of("row")
    steps = dict.fromkeys(row["step"] for row in rows[-1:] + rows[:1])
    by_step = [[row for row in rows if row["step"] == step] for step in steps]
    return [row for of_step in by_step for row in of_step[:SAMPLES_OF_A_STEP]]


def _messages(run: Run) -> list[str]:
    """What the guards and notes said; of each guard the latest word."""
    guards = {event["name"]: event for event in run.of("guard")}
    said = [f"{name} ({counted(e['count'], 'time')}): {e['message']}" for name, e in guards.items()]
    return said + [event["message"] for event in run.of("note")][-20:]


def _measured(run: Run) -> dict[str, str]:
    """What `benchmarks/drafter.py` measured on this run, its simulated tables left out."""
    path = run.path / "benchmark.json"
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        found = _flat(json.loads(text, parse_float=lambda digits: float(f"{float(digits):.4g}")))
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not what benchmarks/drafter.py writes: {error}") from error
    return {name: value for name, value in found.items() if not value.startswith('["')}


def _metrics(run: Run) -> dict[str, list[Any]]:
    """Metric of a step -> mean of the first and of the last third, then its row of metrics.md."""
    known = {name: (run.column(name)[1], about) for name, about in
             table("Metrics of a step").items() if name != "step"}  # fmt: skip
    return {name: [*map(mean, thirds(ys)), *about] for name, (ys, about) in known.items() if ys}


def page_html(runs: list[Run], pictures: list[Picture]) -> str:
    """The whole page as text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, UndefinedError

    jinja = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    jinja.globals.update(number=number, flat=_flat, headline=_headline)
    one = runs[0] if len(runs) == 1 else None
    values = {
        "title": f"Run {one.name}" if one else f"Comparison of {len(runs)} runs",
        "style": _style(),
        "runs": runs,
        "many": not one,
        "summary": _summary(runs),
        "differences": _differences(runs),
        "pictures": pictures,
        "samples": _samples(one) if one else [],
        "messages": _messages(one) if one else [],
        "metrics": _metrics(one) if one else {},
        "measured": _measured(one) if one else {},
    }
    try:
        return jinja.get_template("page.html").render(values)
    except UndefinedError as error:
        raise KeyError(f"an event lacks a field: {error}") from error


def render_report(run_dirs: Sequence[str | Path], out_html: str | Path) -> Path:
    """Write one page about the runs, and each picture as PNG; returns the page's path.

    One run: the PNGs go to RUN/pictures. Several: to a folder named after the page. Raises
    ValueError when a folder has no run log or nothing in it.
    """
    if not run_dirs:
        raise ValueError("no run folder given; a run folder holds events.jsonl")
    runs = [Run.read(path) for path in run_dirs]
    names = [run.name for run in runs]
    for index, run in enumerate(runs):
        run.label = chr(ord("A") + index % 26) * (index // 26 + 1)  # .., Z, AA, BB, ..
        if names.count(run.name) > 1:  # a/run and b/run
            run.name = "/".join(run.path.resolve().parts[-2:])
    out = Path(out_html)
    pictures = draw(runs)
    folder = runs[0].path / "pictures" if len(runs) == 1 else out.with_name(out.stem + "_pictures")
    write_pngs(pictures, folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_atomically(out, page_html(runs, pictures))
