"""A drafter's trainer and a log that tests of idle time look into; ranks as processes or in one."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import PROCESSES

from minitlt.spot import SpotConfig, SpotTrainer


class FakeTrainer:
    """Adds `slope` to every weight and to every moment per step; the loss is 1 / steps."""

    def __init__(
        self, slope: float = 1.0, pause: float = 0.01, limit: int = 10**9, device: str = "cpu"
    ) -> None:
        ramp = torch.arange(12.0).view(3, 4) / 7
        self.weights = {"fc.weight": ramp.to(device), "norm.weight": torch.ones(4, device=device)}
        self.state = {
            "fc.weight/exp_avg": torch.zeros(3, 4, device=device),
            "norm.weight/exp_avg_sq": torch.zeros(4, device=device),
            "fc.weight/step": torch.tensor(0.0),
        }
        self.version, self.slope, self.pause, self.limit = 0, slope, pause, limit
        self.fails: Callable[[], float] | None = None  # the loss of the next step, or an error
        self.vocab, self.budget_seconds = torch.tensor([0, 1], device=device), 0.25
        self.header, self.freed = {"sizes": "3 x 4"}, 0

    def train_step(self) -> dict[str, Any]:
        if self.limit <= 0:
            return {"loss": 0.0, "tokens": 0}
        time.sleep(self.pause)
        if self.fails:
            return {"loss": self.fails(), "tokens": 8}
        self.limit -= 1
        self.version += 1
        for tensor in (*self.weights.values(), *self.state.values()):
            tensor += self.slope if tensor.dim() else 1
        return {"loss": 1 / self.version, "tokens": 8, "buffer_tokens": 100}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.weights | {"ids_V": self.vocab}

    def optimizer_tensors(self) -> dict[str, torch.Tensor]:
        return self.state

    def load(self, tensors: dict[str, torch.Tensor], version: int) -> None:
        assert set(tensors) == set(self.tensors())
        for name, tensor in tensors.items():
            self.tensors()[name].copy_(tensor)
        self.version = version

    def choose_vocab(self) -> list[int]:
        return self.vocab.tolist()

    def set_vocab(self, ids: list[int]) -> None:
        self.vocab.copy_(torch.tensor(ids))

    def free(self) -> None:
        self.freed += 1


class ListLog:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


def everything(trainer: FakeTrainer) -> dict[str, list[Any]]:
    return {name: t.tolist() for name, t in (trainer.tensors() | trainer.state).items()}


@contextmanager
def ranks_of_one_process(tmp_path: Path, num_ranks: int = 2) -> Iterator[list[SpotTrainer]]:
    """Rank 0 (harvests) and others (decode) of a run in this process. They cannot merge."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    store, config = dist.HashStore(), SpotConfig(lost_rank_seconds=1.0)
    ranks = [
        SpotTrainer(FakeTrainer(), store, rank, num_ranks, config, ListLog(), tmp_path)
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.begin(1)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()
        dist.destroy_process_group()


def _rank_main(
    play: Callable[..., Any], rank: int, size: int, port: int, folder: str, answers: Any
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
    group = dist.PrefixStore("gloo", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=size)
    answers.put((rank, play(rank, store, folder)))
    answers.close()
    answers.join_thread()
    os._exit(0)  # the group's other rank may be dead: no orderly goodbye


def play_ranks(play: Callable[..., Any], folder: Path, size: int = 2) -> dict[int, dict[str, Any]]:
    """Runs `play(rank, store, folder)` in `size` processes; the answers of those that lived."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = PROCESSES.Queue()
    ranks = [
        PROCESSES.Process(
            target=_rank_main, args=(play, rank, size, server.port, str(folder), answers)
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    got: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + 120  # the first has to wait for the server
    while len(got) < size and time.monotonic() < deadline:
        if not answers.empty():
            rank, answer = answers.get()
            got[rank] = answer
        elif not any(process.is_alive() for process in ranks):
            break
        time.sleep(0.01)
    for process in ranks:
        process.kill()
        process.join()
    assert got, "no rank answered"
    return got
