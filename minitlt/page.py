"""One self-contained HTML page for a run, or for several runs to compare.

Idea: a page that opens from a file, anywhere, years later: no script, no request (a content policy
forbids both), pictures as inline SVG that follow the reader's light or dark setting, one column
that fits a phone. Whatever a model wrote is escaped, and each of its tokens is marked as drafted
and accepted or as the target's own.

Left out: a web server, search, and every row of a run (`row` events are samples).

How to run: `minitlt report RUN...`
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from minitlt.charts import COLOURS, Picture, Run
from minitlt.common import write_atomically
from minitlt.events import Event, table
from minitlt.pictures import draw, write_pngs
from minitlt.report import duration, mean, number, summarize, summary_rows, thirds

MAX_SAMPLES = 6
MAX_TOKENS_SHOWN = 400
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
CSS = Path(__file__).with_name("page.css")


def _style() -> str:
    """The style sheet; colours are variables with a light and a dark value."""
    extra = {"paper": ("#ffffff", "#15181c"), "drafted": ("#d5efe5", "#12402f")}
    light, dark = (
        "".join(f"--{name}:{pair[side]};" for name, pair in (COLOURS | extra).items())
        for side in (0, 1)
    )
    font = "--font:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;"
    return (
        f":root{{color-scheme:light dark;{font}{light}}}"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}{CSS.read_text(encoding='utf-8')}"
    )


def _table(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> str:
    """Rows of cells that are HTML already; the first cell of each row is its header."""
    top = f"<tr>{''.join(f'<th scope=col>{cell}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(
        f"<tr><th scope=row>{row[0]}</th>"
        + "".join(f"<td class=value>{cell}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table>{top}{body}</table>"


def _details(title: str, body: str) -> str:
    return f"<details class=keys><summary>{escape(title)}</summary>{body}</details>"


def _summary_html(runs: list[Run]) -> str:
    """The summary table: values with their meaning for one run, one column per run for several."""
    tables = [summary_rows(summarize(run.events)) for run in runs]
    if len(runs) == 1:
        return _table(
            (escape(name), f"{_arrow(value)}<small>{_arrow(meaning)}</small>")
            for name, value, meaning in tables[0]
        )
    by_name = [{name: value for name, value, _ in table} for table in tables]
    names = dict.fromkeys(name for table in tables for name, _, _ in table)
    return _table(
        ([escape(name), *(_arrow(table.get(name, "-")) for table in by_name)] for name in names),
        ["", *(escape(run.name) for run in runs)],
    )


def _arrow(text: str) -> str:
    return escape(text).replace("-&gt;", "&rarr;")


def _figure_html(picture: Picture) -> str:
    return (
        f"<figure><h3>{escape(picture.title)}</h3>{picture.svg()}<figcaption>"
        f"<p>{escape(picture.shows)}</p><p>{escape(picture.concludes)}</p></figcaption></figure>"
    )


def _tokens_html(row: Event) -> str:
    """The completion, token by token."""
    pairs = list(zip(row["token_texts"], row["token_flags"], strict=True))
    parts = [
        f"<mark>{escape(text)}</mark>" if drafted else f"<span>{escape(text)}</span>"
        for text, drafted in pairs[:MAX_TOKENS_SHOWN]
    ]
    if len(pairs) > MAX_TOKENS_SHOWN:
        parts.append(f"<span class=muted> ... and {len(pairs) - MAX_TOKENS_SHOWN} more</span>")
    return f"<div class=tokens>{''.join(parts)}</div>"


def _samples_html(run: Run) -> str:
    """A few completions of the first and the last step that have samples."""
    rows = run.of("row")
    if not rows:
        return ""
    steps = sorted({row["step"] for row in rows})
    chosen = []
    for step in dict.fromkeys((steps[-1], steps[0])):
        chosen += [row for row in rows if row["step"] == step][: MAX_SAMPLES // 2]
    cards = []
    for row in chosen:
        share = mean(row["token_flags"])
        head = (
            f"step {row['step']}, row {row['row']}: reward {number(row['reward'])}, "
            f"{len(row['token_flags'])} tokens, {0 if share is None else share:.0%} drafted"
        )
        prompt = _details("prompt", f"<pre>{escape(row['prompt'])}</pre>")
        cards.append(f"<article><p class=muted>{head}</p>{_tokens_html(row)}{prompt}</article>")
    return (
        "<h2>Sample completions</h2><p>Token by token: <mark>drafted and accepted</mark>, or the "
        "target's own (a correction, or a step without drafts). The text is the same either way."
        "</p>" + "".join(cards)
    )


def _flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dict -> dotted key -> JSON value."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = json.dumps(value)
    return flat


def _config_differences(runs: list[Run]) -> str:
    configs = [_flat((run.of("run") or [{"config": {}}])[-1]["config"]) for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = [
        [escape(name), *(escape(config.get(name, "-")) for config in configs)]
        for name in names
        if len({config.get(name) for config in configs}) > 1
    ]
    if not rows:
        return "<h2>What differs</h2><p>The runs have the same configuration.</p>"
    head = ["", *(escape(run.name) for run in runs)]
    return f"<h2>What differs</h2><div class=keys>{_table(rows, head)}</div>"


def _messages_html(run: Run) -> str:
    """What the guards and notes said; of each guard the latest word."""
    guards = {event["name"]: event for event in run.of("guard")}
    lines = [
        f"{name} ({event['count']} times): {event['message']}" for name, event in guards.items()
    ]
    lines += [event["message"] for event in run.of("note")][-20:]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<h2>Warnings and notes</h2><ul>{items}</ul>" if items else ""


def _steps_html(run: Run) -> str:
    """Metrics: mean of the first and last third, meaning and healthy range."""
    rows = []
    for name, (unit, meaning, healthy) in table("Metrics of a step").items():
        ys = run.column(name)[1]
        if name == "step" or not ys:
            continue
        first, last = (number(mean(part)) for part in thirds(ys))
        note = f"{meaning}. Healthy: {healthy}."
        value = f"{first} &rarr; {last} {escape(unit)}<small>{escape(note)}</small>"
        rows.append((f"<code>{escape(name)}</code>", value))
    return _details("Every metric, first third to last third", _table(rows))


def _about_html(run: Run) -> str:
    opened = run.of("run")
    if not opened:
        return ""
    parts = [
        ("Configuration", "config"),
        ("Package versions", "versions"),
        ("Target model", "target"),
        ("Machine", "machine"),
    ]
    body = "".join(
        f"<h3>{title}</h3>"
        + _table((escape(key), escape(value)) for key, value in _flat(opened[-1][name]).items())
        for title, name in parts
    )
    return _details(f"Configuration, versions and machine of {run.name}", body)


def _headline(run: Run) -> str:
    """Model, ranks and time in one line."""
    opened = run.of("run")
    target = opened[-1]["target"].get("name", "?") if opened else "unknown model"
    ranks = opened[-1]["world_size"] if opened else len({event["rank"] for event in run.events})
    wall = duration(run.at(run.events[-1]))
    return f"{target}, {ranks} rank{'s' * (ranks != 1)}, {len(run.steps)} steps in {wall}"


def page_html(runs: list[Run], pictures: list[Picture]) -> str:
    """The whole page as text."""
    one = len(runs) == 1
    title = f"Run {runs[0].name}" if one else f"Comparison of {len(runs)} runs"
    lines = [
        f"<p class=muted>{escape(('' if one else run.name + ': ') + _headline(run))}</p>"
        for run in runs
    ]
    parts = [f"<h1>{escape(title)}</h1>", *lines, "<h2>Summary</h2>", _summary_html(runs)]
    if not one:
        parts.append(_config_differences(runs))
    parts += ["<h2>Pictures</h2>", *(_figure_html(picture) for picture in pictures)]
    if not pictures:
        parts.append("<p>No step has ended yet: nothing to draw.</p>")
    if one:
        parts += [_samples_html(runs[0]), _messages_html(runs[0])]
    parts += ["<h2>Details</h2>", *(_steps_html(run) for run in runs[:1] if one)]
    parts += [_about_html(run) for run in runs]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def render_report(run_dirs: Sequence[str | Path], out_html: str | Path) -> Path:
    """Write one page about the runs, and each picture as PNG; returns the page's path.

    One run: the PNGs go to RUN/pictures. Several: to a folder named after the page. Raises
    ValueError when a folder has no run log or nothing in it.
    """
    if not run_dirs:
        raise ValueError("no run folder given; a run folder holds events.jsonl")
    runs = [Run.read(path) for path in run_dirs]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:  # a/run and b/run
            run.name = "/".join(run.path.resolve().parts[-2:])
    out = Path(out_html)
    pictures = draw(runs)
    folder = runs[0].path / "pictures" if len(runs) == 1 else out.with_name(out.stem + "_pictures")
    write_pngs(pictures, folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_atomically(out, page_html(runs, pictures))
