"""What is derived from the run log, the live display and the HTML page.

How to run: python -m pytest tests/test_report.py
"""

import html
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_run import HOSTILE, write_fake_run

import minitlt.events
from minitlt.charts import COLOURS, Run
from minitlt.events import EventLog, read_events, table
from minitlt.page import page_html, render_report
from minitlt.pictures import (
    PICTURES,
    _acceptance,
    _active_share,
    best_arms,
    draw,
    regret,
    timeline_spans,
)
from minitlt.report import (
    Board,
    accept_pairs,
    duration,
    guard_counts,
    number,
    print_summary,
    ratio,
    run_seconds,
    step_table,
    summarize,
    summary_rows,
    watch,
)

PACKAGE = Path(minitlt.events.__file__).parent


@pytest.fixture(scope="module")
def page(fake: Path) -> str:
    return render_report([fake], fake / "report.html").read_text()


def test_import_is_light():
    heavy = ("torch", "matplotlib", "rich", "numpy", "transformers")
    code = (
        "import sys, minitlt.page, minitlt.report;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


# Numbers.


def tiny_log(path: Path) -> list[dict]:
    """Three steps on two ranks; step 2 is done again after a resume an hour later."""
    now = [100.0]
    logs = [EventLog(path, rank, clock=lambda: now[0]) for rank in range(2)]

    def at(t: float, rank: int, event: str, **fields: object) -> None:
        now[0] = t
        logs[rank].write(event, **fields)

    def step(number: int, start: float, accept: float, reward: float) -> None:
        common = {"step": number, "arms": {}, "active_trace": [], "accept_by_position": []}
        for rank, seconds in ((0, 2.0), (1, 6.0)):
            at(start + seconds, rank, "rollout_end", seconds=seconds, tokens=60, truncated=rank,
               accept_len=accept, rows=2, lengths=[20, 40], verify_steps=30, drafter_version=0,
               **common)  # fmt: skip
        at(start + 6, 0, "harvest_end", step=number, available_s=4.0, harvested_s=3.0,
           overshoot_s=0.1, drafter_steps=10, tokens=100, loss_first=2.0, loss_last=1.0,
           buffer_tokens=5)  # fmt: skip
        at(start + 8, 0, "update", step=number, seconds=2.0, reward=reward, reward_std=0.1,
           loss=0.0, grad_norm=1.0, mean_length=30.0, step_seconds=8.0)  # fmt: skip

    run = {"config": {}, "versions": {}, "world_size": 2, "target": {}, "machine": {}}
    at(100, 0, "run", **run)
    step(1, 100, 1.5, 0.0)
    step(2, 108, 9.0, 9.0)
    at(3716, 0, "run", **run)
    step(2, 3716, 2.0, 0.5)
    step(3, 3724, 3.0, 1.0)
    return read_events(path)


def test_summary_by_hand(tmp_path):
    events = tiny_log(tmp_path / "e.jsonl")
    assert summarize(events) == {
        "reward_first": 0.0, "reward_last": 1.0, "accept_first": 1.5, "accept_last": 3.0,
        "idle_available_s": 12.0, "idle_harvested_s": 9.0, "drafter_steps": 30, "steps": 3,
        "guards": {}, "ranks": 2, "wall_s": 32.0,  # 16 s before the pause and 16 s after it
    }  # fmt: skip
    rows = step_table(events)
    assert [row["reward"] for row in rows] == [0.0, 0.5, 1.0]
    assert [row["tok_s"] for row in rows] == [20.0] * 3
    assert [row["end_s"] for row in rows] == [8.0, 24.0, 32.0]
    assert run_seconds(events)[-1] == 32.0


def test_guards_are_counted_over_ranks_and_resumes(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", rank=0)
    for rank, count in ((0, 1), (0, 2), (1, 1), (0, 5), (0, 1), (0, 2)):  # rank 0 was resumed
        log.rank = rank
        log.write("guard", name="rows", count=count, message="")
    log.write("guard", name="padding", count=3, message="")
    assert guard_counts(read_events(tmp_path / "e.jsonl")) == {"rows": 8, "padding": 3}


def test_accept_length_is_a_ratio_of_sums(tmp_path):
    log = EventLog(tmp_path / "e.jsonl", rank=0)
    for rank, (tokens, accept) in enumerate(((30, 3.0), (90, 1.0))):
        log.rank = rank
        log.write("rollout_end", step=1, seconds=1.0, tokens=tokens, accept_len=accept, truncated=0)
    # 30 tokens in 10 row-steps and 90 in 90: 120 / 100, not (3 + 1) / 2
    assert step_table(read_events(tmp_path / "e.jsonl"))[0]["accept_len"] == pytest.approx(1.2)


def test_saved_seconds_by_hand(tmp_path):
    """A plain token of 4 rows costs 30 s / 60 = 0.5 s over all ranks. Rank 0 drafts 40 tokens in
    12 s: 8 s saved; rank 1 drafts 10 in 7 s: 2 s lost. With 8 rows plain was never used."""
    log = EventLog(tmp_path / "e.jsonl", rank=0)
    arms = [
        {"4": {"off": {"tokens": 20, "seconds": 9.0}, "eagle-3": {"tokens": 40, "seconds": 12.0}}},
        {"4": {"off": {"tokens": 40, "seconds": 21.0}, "ngram-2": {"tokens": 10, "seconds": 7.0}},
         "8": {"eagle-3": {"tokens": 90, "seconds": 1.0}}},
    ]  # fmt: skip
    common = {"step": 1, "seconds": 1.0, "tokens": 10, "accept_len": 1.0, "truncated": 0}
    for log.rank in (0, 1):
        log.write("rollout_end", **common, arms_by_rows=arms[log.rank])
    assert step_table(read_events(log.path))[0]["saved_s"] == pytest.approx(6.0)


def test_the_drafters_loss_is_the_mean_over_its_windows(tmp_path):
    """Step 1: 4 and 2 on rank 0, 3 on rank 1, after a first try that a resume took back; step 2
    has logged no drafter step, only how its window ended."""
    log = EventLog(tmp_path / "e.jsonl", rank=0)
    for rank, losses in ((0, [9.0]), (0, [4.0, 2.0]), (1, [3.0])):
        log.rank = rank
        log.write("harvest_start", step=1)
        for n, loss in enumerate(losses, 1):
            log.write("harvest_step", step=1, n=n, seconds=0.1, loss=loss, tokens=8)
    for step, loss in ((1, 2.0), (2, 1.5)):
        log.write(
            "harvest_end",
            step=step,
            available_s=1.0,
            harvested_s=1.0,
            overshoot_s=0.0,
            drafter_steps=2,
            tokens=16,
            loss_first=4.0,
            loss_last=loss,
            buffer_tokens=8,
        )
        log.write("update", step=step, step_seconds=1.0)  # fmt: skip
    rows = step_table(read_events(tmp_path / "e.jsonl"))
    assert [row["drafter_loss"] for row in rows] == [3.0, 1.5]


def test_what_the_benchmark_measured_is_on_the_page(tmp_path):
    write_fake_run(tmp_path)
    assert "Measured on this run" not in page_html([Run.read(tmp_path)], [])
    found = {"straggler_slowdown": 0.0218, "accept_length": {"adaptive": 3.43, "<b>": 1}}
    (tmp_path / "benchmark.json").write_text(json.dumps(found))
    text = page_html([Run.read(tmp_path)], [])
    for words in ("Measured on this run", "straggler_slowdown", "0.0218", "accept_length.adaptive"):
        assert words in text
    assert "accept_length.&lt;b&gt;" in text
    for bad in ("{", "[1]"):
        (tmp_path / "benchmark.json").write_text(bad)
        with pytest.raises(ValueError, match=r"benchmark\.json is not what"):
            page_html([Run.read(tmp_path)], [])


def test_measured_keys_come_from_the_summary_event(fake):
    summary = summarize(read_events(fake / "events.jsonl"))
    assert set(summary) == set(table("summary"))
    assert summary["accept_last"] > summary["accept_first"] > 1
    assert 0 < summary["idle_harvested_s"] <= summary["idle_available_s"]


def test_summary_of_an_empty_log():
    summary = summarize([])
    assert summary["steps"] == 0 and summary["reward_first"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0"), (0.12345, "0.123"), (1.5, "1.50"), (99.96, "100.0"),
     (1234.5, "1,234"), (-0.5, "-0.500"), (1e-7, "0.0000")],
)  # fmt: skip
def test_number(value, text):
    assert number(value) == text


def test_duration():
    assert [duration(s) for s in (None, 0, 187, 3787)] == ["-", "0:00", "3:07", "1:03:07"]


def test_print_summary_lists_the_files_that_exist(fake, page, capsys):
    print_summary(summarize(read_events(fake / "events.jsonl")), fake)
    said = capsys.readouterr().out
    assert "Reward" in said and "Drafter steps" in said and "1.94 x" in said
    assert "report.html, pictures/, events.jsonl" in said and "summary.json" not in said


def test_one_rank_is_never_idle(tmp_path):
    """Its drafter takes time of its own: no word of waiting, in the table, live or on the page."""
    events = []
    for event in read_events(write_fake_run(tmp_path, steps=6, ranks=1)):
        events.append(event)
        if event["event"] == "rollout_end":
            window = {"available_s": 2.0, "harvested_s": 1.5, "overshoot_s": 0.0}
            trained = {"event": "harvest_end", "drafter_steps": 5, "loss_last": 1.0}
            events.append({**event, **window, **trained})
    board, run = Board(6), Run("one", tmp_path, events, step_table(events))
    said = [line for event in events for line in board.feed(event)]
    assert sum("drafter 1.50 s" in line for line in said) == 6
    said += [" ".join(row) for row in summary_rows(summarize(events))]
    assert "Drafter's time 9 s its own: one rank never waits" in said
    said += [made.title + made.concludes for made in draw([run])]
    assert not re.search("(?i)idle time|idle [0-9]|harvested", " ".join(said))


# The live display.


def test_watch_prints_plain_lines_for_a_recorded_log(fake, capsys):
    stop = threading.Event()
    stop.set()
    watch(fake / "events.jsonl", 12, stop)
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert len(steps) == 12 and steps[-1].startswith("step 12/12")
    for word in ("reward", "accept length", "tok/s", "idle", "harvested", "left 0:00"):
        assert word in steps[-1]
    assert len(lines) < 20


def test_watch_follows_a_growing_log_and_stops(tmp_path, fake, capsys):
    path, stop = tmp_path / "events.jsonl", threading.Event()
    data = (fake / "events.jsonl").read_bytes()
    thread = threading.Thread(target=watch, args=(path, 12, stop))
    thread.start()
    cut = len(data) // 2 + 17  # in the middle of a line
    with path.open("ab") as file:
        for part in (data[:cut], data[cut:]):
            file.write(part)
            file.flush()
            time.sleep(0.35)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert capsys.readouterr().out.count("reward") == 12


@pytest.mark.parametrize("plain", [True, False])
def test_watch_never_raises(tmp_path, capsys, plain):
    stop = threading.Event()
    stop.set()
    EventLog(tmp_path / "e.jsonl", rank=0).write("run", surprise=1)
    watch(tmp_path / "e.jsonl", 3, stop, plain=plain)
    assert "'run' is not as expected" in capsys.readouterr().out
    watch(tmp_path, 3, stop, plain=plain)  # a folder
    assert "the run goes on" in capsys.readouterr().err


def test_board_knows_what_each_rank_does(fake):
    board, seen, lines = Board(12), set(), []
    for event in read_events(fake / "events.jsonl"):
        board.feed(event)
        seen |= set(board.doing.values())
        lines += board.status()
    assert seen == {"starting", "generating", "waiting", "harvesting", "merging", "updating"}
    rows = {re.sub(r"[\d.,]+", "#", line) for line in lines}
    assert "rank # generating# # of # rows done# # tok/s# accept length #" in rows
    assert "rank # harvesting# # drafter steps" in rows
    assert any(line.endswith(", 1 drafter step") for line in lines)
    assert board.seconds_left() == 0


# Pictures and the page.


class References(HTMLParser):
    """Collects everything on a page that could make a browser fetch or run something."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            value = value or ""
            outside = name.rpartition(":")[2] in ("src", "href", "srcset", "data", "action")
            if name.startswith("on") or (outside and not value.startswith("#")):
                self.found.append(f"{tag} {name}={value}")
            self.found += [use for use in re.findall(r"url\([^)]*\)", value) if "url(#" not in use]


def test_page_refers_to_nothing_outside_itself(page):
    parser = References()
    parser.feed(page)
    assert parser.found == []
    assert not {"script", "link", "iframe", "img", "object", "embed", "base"} & parser.tags
    style = page[page.index("<style>") : page.index("</style>")]
    assert "@import" not in style and "url(" not in style
    assert 'content="width=device-width, initial-scale=1"' in page
    assert "default-src 'none'" in page


def test_model_text_is_escaped(page):
    assert HOSTILE not in page and "<script" not in page
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt; &amp; &lt;img" in page
    assert "&lt;b&gt;Think&lt;/b&gt;" in page


def test_run_and_arm_names_are_escaped(tmp_path, fake):
    odd = tmp_path / "_a<i>&$x$"
    odd.mkdir()
    (odd / "events.jsonl").write_bytes(
        (fake / "events.jsonl").read_bytes().replace(b"eagle-5", b"<u>$k$")
    )
    run = Run.read(odd)
    text = page_html([run], draw([run]))
    assert "<i>&" not in text and "<u>" not in text
    assert "&lt;u&gt;$k$" in text


def test_page_shows_every_picture_with_both_sentences(fake, page):
    pictures = draw([Run.read(fake)])
    assert len(pictures) == len(PICTURES) == page.count("<svg") == page.count("<figure>")
    for picture in pictures:
        assert picture.shows.endswith(".") and picture.concludes.endswith(".")
        png = fake / "pictures" / f"{picture.name}.png"
        assert png.read_bytes().startswith(b"\x89PNG")


BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
MEASURE = """<body><iframe width={width} height=800 style="border:0" srcdoc="{page}"></iframe>
<p id=said></p><script>onload = () => {{
  const inner = window.frames[0], root = inner.document.documentElement;
  const wide = [...inner.document.querySelectorAll("*")]
    .filter(e => e.getBoundingClientRect().right > inner.innerWidth + 1).map(e => e.outerHTML);
  document.getElementById("said").textContent =
    JSON.stringify([inner.innerWidth, root.scrollWidth, wide.map(e => e.slice(0, 80))]);
}}</script>"""


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason="needs chromium or Chrome")
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_a_phone_and_a_desk(fake, tmp_path, width, many):
    """Nothing is wider than the window, details opened, one run or two with long names."""
    other = tmp_path / "01_smollm2_cpu-20260101-120000"
    write_fake_run(other, steps=4, seed=1)
    page = render_report([fake, other][: 1 + many], tmp_path / "page.html").read_text()
    page = page.replace("<details", "<details open")
    shown = MEASURE.format(width=width, page=html.escape(page))
    (tmp_path / "frame.html").write_text(shown, encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", (tmp_path / "frame.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = html.unescape(re.search(r'<p id="said">(.*?)</p>', done.stdout)[1])
    inner, scroll, too_wide = json.loads(said)
    assert inner in (width, width - 15)  # less a scroll bar
    assert scroll <= inner and too_wide == []


def test_svg_is_text_with_colour_variables(fake):
    (picture,) = [p for p in draw([Run.read(fake)]) if p.name == "accept_length"]
    svg = picture.svg()
    assert "tokens per verify step and row</text>" in svg
    assert "var(--harvest)" in svg and "<metadata>" not in svg and "http" not in svg
    left = set(re.findall(r"#[0-9a-f]{6}\b", svg)) & {pair[0] for pair in COLOURS.values()}
    assert left == set()
    assert svg == draw([Run.read(fake)])[PICTURES_BY_NAME["accept_length"]].svg()


PICTURES_BY_NAME = {function.__name__[5:]: i for i, function in enumerate(PICTURES)}


def test_drafted_tokens_are_marked(fake, page):
    rows = [event for event in read_events(fake / "events.jsonl") if event["event"] == "row"]
    shown = [row for row in rows if row["step"] in (1, 12)]
    flags = [flag for row in shown for flag in row["token_flags"]]
    assert page.count("<mark>") == flags.count(1) + 1  # and the word in the legend
    assert page.count("<mark class=corrected>") == flags.count(2) + 1 > 1
    share = f"{100 * shown[0]['token_flags'].count(1) / len(shown[0]['token_flags']):.0f}"
    assert f"{share}% were" in page


def test_regret_by_hand():
    """1 row: eagle makes 20 tokens/s, off 10; 8 rows: off 80, eagle 40; too few steps: not best."""
    used = {
        ("off", 1): [50, 100, 10.0], ("eagle-2", 1): [50, 100, 5.0], ("ngram-3", 1): [9, 30, 1.0],
        ("off", 8): [50, 800, 10.0], ("eagle-2", 8): [10, 80, 2.0],
    }  # fmt: skip
    assert best_arms(used) == {1: ("eagle-2", 20.0), 8: ("off", 80.0)}
    # at the best rates: 230 tokens at 20/s and 880 at 80/s, against 16 s and 12 s
    assert regret(used) == pytest.approx(1 - (11.5 + 11) / (16 + 12))
    assert regret({}) is None


def test_acceptance_by_position_weighs_drafts_not_steps():
    """Place 1: (8 + 1) of 20; place 2: 6 of 10 by the one rollout that went so deep."""
    deep = {"accept_by_position": [0.8, 0.6], "drafts_by_position": [10, 10], "verify_steps": 1}
    flat = {"accept_by_position": [0.1], "drafts_by_position": [10], "verify_steps": 99}
    none = {"accept_by_position": [], "drafts_by_position": [], "verify_steps": 50}
    assert _acceptance([[deep, flat], [none]]) == pytest.approx([0.45, 0.6])
    assert _acceptance([[none]]) == []


def test_conclusions_say_what_the_log_shows(fake):
    """A cliff is the drafter's only at its depth, drafts may cost time, equal rows never wait."""
    run = Run.read(fake)
    for end in run.of("rollout_end"):
        rates = {"accept_by_position": [0.5, 0.4, 0.02], "drafts_by_position": [9, 9, 9]}
        end |= rates | {"lengths": [7, 8, 7, 7]}
    for row in run.steps:
        row["saved_s"] = -0.5
    for depth in (2, 4):
        run.opened["config"]["drafter"] = {"ttt_steps": depth}
        said = {made.name: made.concludes for made in draw([run])}
        assert ("cliff after 2" in said["acceptance_by_position"]) == (depth == 2)
    assert "50% of the time, and 3 in a row 2%" in said["acceptance_by_position"]
    assert "of every source, cost the rollouts 6 s." in said["harvest"]
    assert "1.14 x the median. " in said["lengths"]


def test_active_share_by_hand():
    """Ranks of 2 rows; 10 s: 2 + 2 (prompts, 1 s) + 2 x 9, then 2 x 4 + 1 x 5 row-seconds of 40."""
    ends = [
        {"seconds": 10.0, "active_trace": [[1.0, 2]]},
        {"seconds": 10.0, "active_trace": [[1.0, 2], [5.0, 1]]},
    ]
    assert _active_share(ends) == pytest.approx((20 + 10 + 5) / 40)


def test_a_long_run_shows_the_steps_with_most_idle_time(tmp_path):
    """20 steps, idle in 12 and 13: eight in a row that hold both, the first such."""
    log = EventLog(tmp_path / "events.jsonl", rank=0, clock=lambda: now)
    for step in range(1, 21):
        for rank, seconds in ((0, 1.0), (1, 5.0 if step in (12, 13) else 1.0)):
            now, log.rank = 100.0 * step + seconds, rank
            log.write("rollout_end", step=step, seconds=seconds, rows=1, tokens=9, verify_steps=9,
                      accept_len=1.0, accept_by_position=[], lengths=[9], truncated=0, arms={},
                      arms_by_rows={}, drafter_version=0, active_trace=[])  # fmt: skip
    (timeline,) = [made for made in draw([Run.read(tmp_path)]) if made.name == "timeline"]
    shown = {text.get_text() for text in timeline.figure.axes[0].texts}
    assert shown == set(map(str, range(6, 14)))
    assert "Rank 0 was last in 18 of 20 rollouts" in timeline.concludes  # ties go to it


def test_swaps_of_a_rollout_are_one_point(tmp_path):
    """Before 2.0; after (1.0 x 10 + 3.0 x 30) / 40 = 2.5."""
    log = EventLog(tmp_path / "events.jsonl", rank=0)
    for before, after, steps in ((2.0, 1.0, 10), (1.0, 3.0, 30)):
        log.write("swap_result", step=1, version=1, accept_before=before, accept_after=after,
                  row_steps_before=20, row_steps_after=steps)  # fmt: skip
    (swaps,) = draw([Run.read(tmp_path)])
    assert swaps.concludes.startswith(
        "Higher after the swap in 1 of 1 rollout; the mean went from 2 to 2.50."
    )


def test_timeline_spans_do_not_overlap_where_they_must_not(fake):
    spans = timeline_spans(Run.read(fake), list(range(1, 13)))
    assert set(spans) == {0, 1}
    for mine in spans.values():
        for phase in ("generate", "harvest", "update"):
            bars = sorted(span[1:] for span in mine if span[0] == phase)
            assert all(end > begin for begin, end in bars)
            assert all(a[1] <= b[0] for a, b in pairwise(bars))


def test_comparison_has_a_series_per_run_and_what_differs(tmp_path, fake):
    plain = tmp_path / "elsewhere" / "run"
    write_fake_run(plain, steps=4, seed=1, speculative=False)
    out = render_report([fake, plain], tmp_path / "compare.html")
    text = out.read_text()
    assert "Comparison of 2 runs" in text and "elsewhere/run" in text
    assert "spot.mode" in text and "&#34;off&#34;" in text
    assert (tmp_path / "compare_pictures" / "reward.png").exists()
    parser = References()
    parser.feed(text)
    assert parser.found == []


def test_long_names_of_runs_leave_the_pictures_their_room(tmp_path, fake):
    """Six names of a hundred characters: keys within the figure, axes as high as without."""
    runs = [Run.read(fake)]
    for letter in "BCDEF":
        path = tmp_path / f"{letter * 50}{'x' * 50}{letter}"
        write_fake_run(path, steps=2)
        runs.append(Run.read(path))
    out = render_report([run.path for run in runs], tmp_path / "compare.html")
    text = out.read_text()
    for letter, run in zip("ABCDEF", runs, strict=True):
        assert f"<b>{letter}</b> {run.name}:" in text and f">{letter}</th>" in text
        run.label = letter
    single = {made.name: made.figure for made in draw(runs[:1])}
    for made in draw(runs):
        for figure in (made.figure, single[made.name]):
            figure.draw_without_rendering()
        for ax, alone in zip(made.figure.axes, single[made.name].axes, strict=True):
            assert ax.get_window_extent().height > 0.8 * alone.get_window_extent().height
        key, box = made.figure.axes[0].get_legend().get_window_extent(), made.figure.bbox
        assert box.x0 <= key.x0 and key.x1 <= box.x1 and key.y1 <= box.y1


def test_one_step_of_very_long_rows_looks_right(tmp_path):
    """Whole numbers on axes of steps, 1 rollout, and the lengths' text within the picture."""
    run = Run.read(write_fake_run(tmp_path, steps=1).parent)
    run.opened["config"]["max_completion_length"] = 16384
    for end in run.of("rollout_end"):
        end["lengths"] = [min(64 * n, 16384) for n in end["lengths"]]
    pictures = {made.name: made for made in draw([run])}
    assert " of 1 rollout. " in pictures["timeline"].concludes
    for made in pictures.values():
        made.figure.draw_without_rendering()
        for ax in made.figure.axes:
            if ax.get_xlabel() == "step":
                assert all(tick == int(tick) for tick in ax.get_xticks()), made.name
    [ax] = pictures["lengths"].figure.axes
    assert "cap 16,384" in ax.get_title("left") and not ax.get_title("right")
    assert ax._left_title.get_window_extent().x1 < ax.figure.bbox.x1


@pytest.mark.parametrize("keep", [1, 3, 84, 90])
def test_a_run_that_has_just_begun_can_be_shown(tmp_path, fake, keep):
    lines = (fake / "events.jsonl").read_bytes().splitlines(keepends=True)[:keep]
    (tmp_path / "events.jsonl").write_bytes(b"".join(lines) + b'{"t":17000')
    run = Run.read(tmp_path)
    text = page_html([run], draw([run]))
    assert "Summary" in text
    assert "1 times" not in text and ("Rollouts take" in text) == (keep == 90)  # a step has ended
    assert ("nothing to draw" in text) == (keep <= 3)


def test_report_user_errors(tmp_path):
    with pytest.raises(ValueError, match="no run folder given"):
        render_report([], tmp_path / "x.html")
    with pytest.raises(ValueError, match="no run log here"):
        render_report([tmp_path / "nowhere"], tmp_path / "x.html")
    (tmp_path / "events.jsonl").write_text("")
    with pytest.raises(ValueError, match="the log is empty"):
        render_report([tmp_path], tmp_path / "x.html")


def test_accept_lengths_are_ratios_of_sums_without_first_tokens():
    """2 tokens, the first with its prompt, in 1 step; 10, the first with its prompt, in 3."""
    ends = [
        {"tokens": 2, "accept_len": 1.0, "arms": {"off": {"tokens": 1}}},
        {"tokens": 10, "accept_len": 3.0, "arms": {"off": {"tokens": 1}, "eagle-4": {"tokens": 8}}},
    ]
    assert ratio(accept_pairs(ends)) == 10 / 4


def test_the_draft_models_accept_length_is_that_of_its_own_steps(tmp_path):
    """Two ranks, three steps: 9 tokens in 6 row-steps, then 20 in 8; not what others drafted."""
    log = EventLog(tmp_path / "e.jsonl", rank=0)
    parts = {1: ([(4, 3)], [(5, 3)]), 2: ([], []), 3: ([(8, 4), (6, 2)], [(6, 2)])}
    for step, ranks in parts.items():
        for rank, pairs in enumerate(ranks):
            log.rank = rank
            arms = {
                f"eagle-{i + 2}": {"steps": 1, "row_steps": n, "tokens": tokens, "seconds": 1.0}
                for i, (tokens, n) in enumerate(pairs)
            } | {"int8-5": {"steps": 1, "row_steps": 1, "tokens": 6, "seconds": 1.0}}
            log.write(
                "rollout_end", step=step, seconds=1.0, tokens=9, accept_len=2.0, truncated=0,
                arms=arms, accept_by_position=[],
            )  # fmt: skip
    events = read_events(log.path)
    assert [row["drafter_accept_len"] for row in step_table(events)] == [1.5, None, 2.5]
    summary = summarize(events)
    assert (summary["drafter_accept_first"], summary["drafter_accept_last"]) == (1.5, 2.5)
    (line,) = [row for row in summary_rows(summary) if "draft model" in row[0]]
    assert line[1] == "1.50 -> 2.50"
