"""What the documents name exists: functions, files, commands; examples in docstrings run.

How to run: python -m pytest tests/test_docs.py
"""

import ast
import doctest
import importlib
import io
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tiny import save_tiny_model

from minitlt.cli import app
from minitlt.events import read_events

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob(".github/*.md")]
    if "node_modules" not in path.parts and ".venv" not in path.parts
)
MODULES = {path.stem for path in (ROOT / "minitlt").glob("*.py")}
WITH_EXAMPLES = sorted(p.stem for p in (ROOT / "minitlt").glob("*.py") if ">>> " in p.read_text())


def name_of(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_run(module):
    done = doctest.testmod(importlib.import_module(f"minitlt.{module}"))
    assert done.attempted and not done.failed


def test_several_modules_have_examples():
    assert len(WITH_EXAMPLES) >= 5


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target


def names_in(path: Path) -> set[str]:
    """Functions, classes, methods (Class.method), constants and imported names of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = [m.name for m in node.body if isinstance(m, ast.FunctionDef)]
            found |= {f"{node.name}.{name}" for name in inner} | set(inner)
        if isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def section(page: str, title: str) -> str:
    return page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_what_a_forker_is_sent_to_exists():
    """Loss, drafter, acceptance rule, task, kernel: each row of the README's table names code."""
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in section(readme, "Fork it").splitlines() if line.startswith("| ")][1:]
    for word in ("loss", "drafter", "acceptance rule", "task"):
        assert any(word in row.split("|")[1] for row in rows), word
    for row in rows:
        for named in re.findall(r"`([\w./]+)`", row.split("|")[2]):
            module, _, rest = named.partition(".")
            if module in MODULES and rest != "py":
                assert rest in names_in(ROOT / "minitlt" / f"{module}.py"), named
            elif "/" in named or named.endswith(".py"):
                assert any((base / named).exists() for base in (ROOT, ROOT / "minitlt")), named
    for row in section(readme, "Reading order").splitlines():
        files, code = (
            re.findall(r"`(?:minitlt/)?(\w+)\.py`", row),
            re.findall(r"`([\w.]+)` \| \d+ \|$", row),
        )
        if files and code:
            assert any(code[0] in names_in(ROOT / "minitlt" / f"{f}.py") for f in files), code


def code_lines(path: Path) -> int:
    """Lines with code on them: no docstrings, comments or blanks."""
    text, lines = path.read_text(), set()
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines -= {*range(node.lineno, node.end_lineno + 1)}
    return len(lines)


def test_minutes_of_the_reading_order_are_those_of_the_files():
    """15 lines of code a minute, give or take an eighth; the sum is said in hours."""
    order, total = section((ROOT / "README.md").read_text(), "Reading order"), 0
    for row in re.findall(r"^\| `minitlt/.*$", order, re.MULTILINE):
        files, minutes = row.split("|")[1], int(row.split("|")[4])
        names = re.findall(r"`(?:minitlt/)?(\w+\.py)`", files)
        expected = sum(code_lines(ROOT / "minitlt" / name) for name in names) / 15
        assert minutes == pytest.approx(expected, rel=0.125), (names, expected)
        total += minutes
    assert 270 <= total <= 300 and "under five hours in all" in order, total


@pytest.mark.filterwarnings("default")
def test_the_python_example_of_the_readme_trains(tmp_path, monkeypatch):
    """As it stands, but for a tiny model, a CPU and one short step."""
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = str(save_tiny_model(tmp_path / "model", max_position_embeddings=1024))
    small = "GRPOConfig(use_cpu=True, bf16=False, max_steps=1, max_completion_length=8, "
    changes = {'"Qwen/Qwen2.5-0.5B-Instruct"': repr(model), "GRPOConfig(": small}
    head, brace, rest = code.partition("trainer = ")
    for old, new in changes.items():
        assert rest.count(old) == 1
        rest = rest.replace(old, new)
    names: dict[str, Any] = {}
    exec(head + brace + rest, names)
    trainer, task = names["trainer"], names["task"]
    assert trainer.state.global_step == 1
    assert trainer.reward_weights.tolist() == pytest.approx(task.reward_weights)
    assert read_events(tmp_path / "runs" / "mine" / "events.jsonl")
    trainer.speculation.spot.close()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 250


def test_ci_runs_what_people_run():
    """The workflow calls one script, and the script nothing but targets of the Makefile; beside it,
    other compilers are tried, and known holes in what is installed are asked for."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    runs = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in jobs.items()}
    packages = "sudo apt-get install -y libomp-dev gcc-aarch64-linux-gnu"
    others = {"native": [packages, "make native"], "audit": ["make audit"]}
    assert runs == {"test": [".ci/run"], **others}
    script, makefile = ROOT / ".ci/run", (ROOT / "Makefile").read_text()
    assert script.stat().st_mode & 0o100
    targets = re.findall(r"^make (\w+)$", script.read_text(), re.MULTILINE)
    assert {"test", "lessons", "check"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_tests_of_losslessness_are_listed_once():
    listed = re.search(r"^LOSSLESS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    for name in listed.split():
        assert (ROOT / f"tests/test_{name}.py").is_file(), name
    for page in ("README.md", "CONTRIBUTING.md", ".github/pull_request_template.md"):
        assert "make lossless" in (ROOT / page).read_text(), page


def test_every_command_in_the_documents_exists():
    known = set(typer.main.get_command(app).commands)
    for page in PAGES:
        blocks = "".join(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL))
        used = re.findall(r"^(?:\.venv/bin/)?minitlt (\w+)", blocks, re.MULTILINE)
        assert set(used) <= known, page
