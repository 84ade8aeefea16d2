"""What the benchmarks share: how their options are read, and what every figure depends on (commit,
versions, processor, load), which they write down."""

import argparse
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parent.parent / "runs"  # where results go that nobody has asked to keep
_PACKAGES = ("torch", "transformers", "trl", "accelerate")


def parser(script: str, about: str | None, example: str) -> argparse.ArgumentParser:
    """Reads a script's options; `about` is its docstring, `example` what to write behind its name.

    Scripts call it before they load torch, which takes seconds that --help must not."""
    name = f"minitlt bench {Path(script).stem}"
    first = (about or "").split("\n")[0]
    return argparse.ArgumentParser(name, description=first, epilog=f"Example: {name} {example}")


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def about() -> dict[str, Any]:
    import torch

    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit,
        "versions": {"python": platform.python_version()} | {p: version(p) for p in _PACKAGES},
        "machine": {
            "processor": processor_name(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cores": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 2),
        },
    }


def processor_name() -> str:
    """Its model, and which of the instruction sets that matter here it has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    known = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f in flags]
    return " ".join([names[0] if names else platform.machine(), *known])
