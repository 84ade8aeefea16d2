"""Who may import whom. The order is the reading order; nothing imports what comes after it."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "minitlt"
ALLOWED = {
    "__init__": set(),
    # what anyone may use
    "common": set(),
    "config": set(),
    "tensorfile": set(),
    "swap": {"tensorfile"},
    # inference
    "draft": set(),
    "noise": set(),
    "kernels": {"kernels_cpu", "kernels_triton", "noise"},
    "kernels_cpu": {"kernels", "native_sampler", "noise"},
    "kernels_triton": {"kernels", "noise"},
    "kernels_triton_model": {"kernels", "kernels_cpu", "kernels_triton"},
    "native_sampler": {"native"},
    "slots": {"draft", "kernels"},
    "module_target": {"draft", "slots"},
    "graphs": set(),
    "native": {"models"},
    "linear": {"native"},
    "target": {"draft", "graphs", "linear", "module_target", "native", "slots"},
    "bandit": {"draft"},
    "sampling": {"draft", "kernels"},
    "spec": {"bandit", "draft", "kernels", "sampling", "slots"},
    # the drafter and its training; spec and drafter never import each other
    "eagle3": {"draft", "kernels", "linear", "native", "tensorfile"},
    "ngram": {"draft", "eagle3"},
    "drafter": {"draft", "kernels", "eagle3", "ngram"},
    "quantized": {"bandit", "draft", "kernels", "native", "slots", "target"},
    "distill": {"kernels", "eagle3"},
    "export": {"eagle3", "drafter"},
    "ranks": set(),
    "merge": {"tensorfile"},
    "spot": {"merge", "ranks", "swap", "tensorfile"},
    # data, configuration, the log and what is drawn from it: no torch at import
    "models": set(),
    "rewards": set(),
    "tasks": {"models", "rewards"},
    "events": set(),
    "report": {"events"},
    "charts": {"events", "report"},
    "pictures": {"events", "report", "charts"},
    "page": {"events", "report", "charts", "pictures"},
    # training
    "guards": {"spec"},
    "weights": {"config"},
    "rl": {"config", "distill", "draft", "drafter", "eagle3", "events", "export", "guards",
           "kernels", "linear", "models", "native", "ngram", "quantized", "spec", "spot",
           "target", "weights"},
    "launch": {"report", "page", "swap"},
    "stop": {"config", "launch", "weights"},
    "run": {"config", "distill", "drafter", "eagle3", "export", "events", "kernels", "models",
            "report", "rewards", "rl", "spec", "spot", "stop", "swap", "tasks", "tensorfile"},
    # commands
    "simulate": {"events", "report"},
    "compare": {"events", "report"},
    "doctor": {"kernels", "models", "native"},
    "serve": {"config", "draft", "drafter", "eagle3", "export", "kernels", "models", "native",
              "ngram", "quantized", "slots", "spec", "target", "tasks", "tensorfile"},
    "warmup": {"distill", "eagle3", "kernels", "rl", "run", "serve", "spec", "spot", "tasks"},
    "cli": {"compare", "config", "doctor", "launch", "models", "page", "report", "run", "serve",
            "simulate", "spec", "stop", "warmup"},
    "__main__": {"cli"},
}  # fmt: skip
LIGHT = ["config", "models", "rewards", "tasks", "events", "report", "charts", "pictures", "page",
         "simulate", "compare", "doctor", "cli", "__main__"]  # fmt: skip


def imports(path):
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("minitlt"):
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "minitlt" and len(parts) > 1}
    return found - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_modules_import_only_what_comes_before_them(path):
    assert path.stem in ALLOWED, f"{path.name} has no place in the house yet"
    extra = imports(path) - ALLOWED[path.stem] - {"common"}
    assert not extra, f"{path.name} may not import {sorted(extra)}"


def test_no_module_imports_one_that_imports_it():
    """But for the forms of one kernel, which look each other up when they run."""

    def node(name):
        return "kernels" if name.startswith("kernels_") else name

    graph: dict[str, set[str]] = {}
    for path in PACKAGE.glob("*.py"):
        found = {node(name) for name in imports(path)} - {node(path.stem)}
        graph.setdefault(node(path.stem), set()).update(found)
    order = list(TopologicalSorter(graph).static_order())  # CycleError names the circle
    assert order.index("spec") < order.index("rl") < order.index("cli")


def test_light_modules_do_not_load_torch():
    names = ", ".join(f"minitlt.{name}" for name in LIGHT)
    code = f"import minitlt, {names}, sys; print([m for m in ('torch', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_exist():
    import minitlt

    for name in minitlt.__all__:
        assert getattr(minitlt, name) is not None
