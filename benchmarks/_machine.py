"""What every figure depends on: commit, versions, processor, load. The benchmarks write it down."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RUNS = Path(__file__).parent.parent / "runs"  # where results go that nobody has asked to keep
_PACKAGES = ("torch", "transformers", "trl", "accelerate")


def about() -> dict[str, Any]:
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
