"""The course: every lesson runs, its exercise can be solved and is not solved by its stub, and its
notebook holds the same cells.

Run: pytest tests/test_lessons.py (seconds); pytest -m slow tests/test_lessons.py (the rest).
"""

import inspect
import re
import sys
from pathlib import Path

import nbformat
import pytest

LESSONS = Path(__file__).parent.parent / "lessons"
sys.path.insert(0, str(LESSONS))
import build  # noqa: E402
import toy  # noqa: E402

from minitlt.rl import MiniTLTTrainer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans
SLOW = {"05", "06", "07"}  # three drafters; two processes; two training runs
MARKED = [
    pytest.param(lesson, id=lesson.stem, marks=[pytest.mark.slow] * (lesson.name[:2] in SLOW))
    for lesson in build.LESSONS
]


def test_there_are_eight_lessons_and_a_solution_for_each():
    assert [build.number_of(lesson) for lesson in build.LESSONS] == [f"0{n}" for n in range(1, 9)]
    assert all(build.solution_of(lesson).is_file() for lesson in build.LESSONS)
    readme = (LESSONS / "README.md").read_text()
    assert all(f"({lesson.name})" in readme for lesson in build.LESSONS)


@pytest.mark.parametrize("lesson", MARKED)
def test_a_lesson_runs_and_its_exercise_tells_a_solution_from_the_stub(lesson):
    cells, names = build.run_lesson(lesson, solve=True)
    assert names["solved"] is True, [cell.printed for cell in cells][-2:]
    assert sum(len(cell.pictures) for cell in cells) == 1
    [exercise] = [cell for cell in cells if cell.kind == build.EXERCISE]
    [judged] = [cell for cell in cells if "solved = judge(" in cell.source]
    for cell in (exercise, judged):
        build.execute(cell.source, lesson, cell.line, names)
    assert names["solved"] is False


@pytest.mark.parametrize("lesson", build.LESSONS, ids=lambda lesson: lesson.stem)
def test_a_notebook_is_in_step_with_its_lesson(lesson):
    """If this fails: python lessons/build.py NN."""
    path = build.notebook_path(lesson)
    assert path.stat().st_size < build.MOST_BYTES
    book, cells = nbformat.read(path, as_version=4), build.read_cells(lesson)
    assert [cell.source for cell in book.cells] == [cell.source for cell in cells]
    outputs = [out for cell in book.cells for out in cell.get("outputs", [])]
    assert sum(out.output_type == "display_data" for out in outputs) == 1
    assert any("Not " in out.get("text", "") for out in outputs), "the stub must not be solved"


def test_notebook_7_prints_the_librarys_own_source():
    """If this fails: python lessons/build.py 07."""
    book = nbformat.read(build.NOTEBOOKS / "07_grpo_on_trl.ipynb", as_version=4)
    printed = [out.get("text", "") for cell in book.cells for out in cell.get("outputs", [])]
    assert inspect.getsource(MiniTLTTrainer._generate_single_turn) + "\n" in printed


def test_the_size_of_the_toy_is_said_as_it_is():
    size = sum(parameter.numel() for parameter in toy.load_model().parameters())
    for name in ("toy.py", "02_the_long_tail.py", "README.md"):
        said = re.findall(r"([\d,]+) weights", (LESSONS / name).read_text())
        assert said == [f"{size:,}"], name


@pytest.mark.parametrize("lesson", build.LESSONS, ids=lambda lesson: lesson.stem)
def test_a_lesson_reads_well(lesson):
    """A title, a question, what the figure says; ASCII only; the answer is not in the lesson."""
    text = lesson.read_text()
    assert text.isascii() and text.startswith("# %% [markdown]\n# # ")
    for part in ("**Question.**", "**The idea.**", "**What the figure says.**", "## Exercise",
                 "**If it went wrong.**"):  # fmt: skip
        assert text.count(part) == 1, part


def test_an_unknown_kind_of_cell_is_an_error(tmp_path):
    lesson = tmp_path / "01_x.py"
    lesson.write_text("# %% exercize\n")
    with pytest.raises(ValueError, match="no kind of cell"):
        build.read_cells(lesson)
