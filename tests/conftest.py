"""Shared fixtures: one thread, no Hub, tiny models built from configs, never a download."""

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported


@pytest.fixture(autouse=True)
def _global_rng_is_left_alone() -> Iterator[None]:
    """Tests may seed the global generator to build inputs; the next test must not see it."""
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)
