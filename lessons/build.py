"""Turn lessons into notebooks that keep their outputs, and run lessons for the tests.

A lesson is a Python script in cells: `# %% [markdown]` (a comment), `# %%` (code), and one
`# %% exercise` (code: the stub that the reader replaces; `solutions/NN.py` is one answer). Cells
run in this process, in one namespace, compiled under the lesson's own path and line numbers, so
that tracebacks point into the script. A notebook holds the same cells in the same order, with what
they printed and drew. The stub is run, not the solution: the answer is not given away.

Left out: echoing a cell's last expression (lessons print), rich outputs other than PNG.

How to run: `python lessons/build.py` (all), `python lessons/build.py 03 05`.
"""

import ast
import base64
import contextlib
import io
import os
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import nbformat
import torch

HERE = Path(__file__).parent
LESSONS = sorted(HERE.glob("[0-9][0-9]_*.py"))
NOTEBOOKS = HERE / "notebooks"
MARKDOWN, CODE, EXERCISE = "markdown", "code", "exercise"
MOST_BYTES = 300_000

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for lesson 8; read when triton is imported
sys.path.insert(0, str(HERE))
import course  # noqa: E402


@dataclass
class Cell:
    kind: str
    source: str
    line: int  # of its first line in the script, from 1
    printed: str = ""
    pictures: list[bytes] = field(default_factory=list)


def read_cells(lesson: Path) -> list[Cell]:
    """The cells of a script. ValueError for text before the first one, or an unknown kind."""
    cells: list[Cell] = []
    lines: list[str] = []

    def close() -> None:
        if cells:
            while lines and not lines[0].strip():
                lines.pop(0)
                cells[-1].line += 1
            text = "\n".join(lines).strip("\n")
            if cells[-1].kind == MARKDOWN:
                text = "\n".join(
                    line.removeprefix("#").removeprefix(" ") for line in text.split("\n")
                )
            cells[-1].source = text
        elif any(line.strip() for line in lines):
            raise ValueError(f"{lesson.name} has text before its first cell")

    for number, line in enumerate(lesson.read_text().split("\n"), 1):
        if not line.startswith("# %%"):
            lines.append(line)
            continue
        close()
        kind = line.removeprefix("# %%").strip().strip("[]") or CODE
        if kind not in (MARKDOWN, CODE, EXERCISE):
            raise ValueError(f"{lesson.name}:{number}: no kind of cell is called {kind!r}")
        cells.append(Cell(kind, "", number + 1))
        lines = []
    close()
    return cells


def number_of(lesson: Path) -> str:
    return lesson.name[:2]


def solution_of(lesson: Path) -> Path:
    return HERE / "solutions" / f"{number_of(lesson)}.py"


def execute(source: str, path: Path, line: int, names: dict[str, Any]) -> None:
    tree = ast.parse(source)
    ast.increment_lineno(tree, line - 1)
    exec(compile(tree, str(path), "exec"), names)


def run_lesson(lesson: Path, solve: bool = False) -> tuple[list[Cell], dict[str, Any]]:
    """Runs all cells; returns them with what they printed and drew, and the lesson's namespace.

    solve: the solution takes the place of the exercise's stub. Exceptions of a cell pass through.
    """
    cells = read_cells(lesson)
    module = types.ModuleType(f"lesson_{number_of(lesson)}")
    module.__file__ = str(lesson)
    sys.modules[module.__name__] = module  # dataclasses and kernels look their module up
    shown: list[bytes] = []
    keep, course.show = course.show, lambda figure, name: shown.append(course.png(figure))
    try:
        for cell in cells:
            if cell.kind == MARKDOWN:
                continue
            out, shown[:] = io.StringIO(), []
            with contextlib.redirect_stdout(out), matplotlib.rc_context(course.STYLE):
                if solve and cell.kind == EXERCISE:
                    answer = solution_of(lesson)
                    execute(answer.read_text(), answer, 1, module.__dict__)
                else:
                    execute(cell.source, lesson, cell.line, module.__dict__)
            cell.printed, cell.pictures = out.getvalue(), list(shown)
    finally:
        course.show = keep
        del sys.modules[module.__name__]
    return cells, module.__dict__


def notebook(lesson: Path, cells: list[Cell]) -> nbformat.NotebookNode:
    v4 = nbformat.v4
    book = v4.new_notebook()
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for i, cell in enumerate(cells):
        if cell.kind == MARKDOWN:
            node = v4.new_markdown_cell(cell.source)
        else:
            node = v4.new_code_cell(cell.source)
            if cell.printed:
                node.outputs.append(v4.new_output("stream", name="stdout", text=cell.printed))
            for picture in cell.pictures:
                data = {"image/png": base64.b64encode(picture).decode()}
                node.outputs.append(v4.new_output("display_data", data=data))
            if cell.kind == EXERCISE:
                node.metadata.tags = [EXERCISE]
        node.id = f"{number_of(lesson)}-{i:02d}"
        book.cells.append(node)
    nbformat.validate(book)
    return book


def notebook_path(lesson: Path) -> Path:
    return NOTEBOOKS / f"{lesson.stem}.ipynb"


def main(wanted: list[str]) -> None:
    chosen = [lesson for lesson in LESSONS if not wanted or number_of(lesson) in wanted]
    if unknown := set(wanted) - {number_of(lesson) for lesson in chosen}:
        raise SystemExit(
            f"no lesson {', '.join(sorted(unknown))}; there are 01 to {len(LESSONS):02d}"
        )
    NOTEBOOKS.mkdir(exist_ok=True)
    for lesson in chosen:
        start = time.perf_counter()
        cells, _ = run_lesson(lesson)
        text = nbformat.writes(notebook(lesson, cells)) + "\n"
        if len(text) > MOST_BYTES:
            raise SystemExit(
                f"{lesson.name}: the notebook has {len(text)} bytes, above {MOST_BYTES}"
            )
        notebook_path(lesson).write_text(text)
        seconds = time.perf_counter() - start
        print(f"{notebook_path(lesson).name}: {seconds:.0f} s, {len(text) / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
