"""Shared fixtures: one thread, no Hub, tiny models built from configs, never a download."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_collection() -> None:
    """In a worker, or in the only process: the controller of xdist has no use for torch."""
    gc.disable()
    import torch

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is first imported


def pytest_collection_finish() -> None:
    """Half a million objects of modules need not be looked through again and again."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind takes what is left for leaks


@pytest.fixture(autouse=True)
def _the_process_is_left_as_it_was() -> Iterator[None]:
    """Tests may seed the global generator and listen to signals; the next must not see it."""
    import torch

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before, handlers = torch.get_rng_state(), [signal.getsignal(n) for n in numbers]
    yield
    torch.set_rng_state(before)
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture(params=["native", "packed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a CPU decodes: by native code, and without it by oneDNN's packed products."""
    from minitlt import native

    if request.param == "packed":
        monkeypatch.setattr(native, "library", lambda: None)
    elif native.library() is None:
        pytest.skip(native.status())
    return request.param


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and its tokenizer on disk, for all who do not write there."""
    from tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that never was, for all who do not write its log."""
    from fake_run import write_fake_run

    run = tmp_path_factory.mktemp("fake") / "run"
    write_fake_run(run)
    return run
