"""Processes of tests, two ranks as torchrun would start them among them.

They are forked from a server that has imported TRL once: tests that use it are `own_worker`, so
that one worker of xdist has that server and no other.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minitlt.launch import free_port

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["minitlt.rl", "transformers.models.llama.modeling_llama"])
own_worker = pytest.mark.xdist_group("processes")


def _rank(
    main: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], said: Any
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        main(*arguments)
    except BaseException:
        said.put(traceback.format_exc()[-9999:])  # a pipe holds 64 kB
        raise


def two_ranks(main: Callable[..., Any], *arguments: Any, timeout: float = 600) -> None:
    """Runs `main(*arguments)` twice; both must end well. `timeout` in seconds, for each."""
    shared = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
    }
    said = PROCESSES.SimpleQueue()
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    ranks = [
        PROCESSES.Process(target=_rank, args=(main, arguments, environment, said))
        for environment in environments
    ]
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(timeout)
        failed = [] if said.empty() else [said.get()]
        assert [process.exitcode for process in ranks] == [0, 0], failed
    finally:
        for process in ranks:
            process.kill()
            process.join()
