"""Merges: what the average of several ranks is, and what happens to drafters that differ.

Two or three real processes (gloo, one TCP store). Run: pytest tests/test_merge.py
"""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drafter_reference import make_drafter
from ranks import own_worker
from spot_fakes import FakeTrainer, ListLog, everything, play_ranks
from test_distill import config as drafter_config
from test_distill import make_buffer

from minitlt.distill import DrafterTrainer
from minitlt.spot import INLINE, Receipt, SpotConfig, SpotTrainer

pytestmark = own_worker


def merges(rank: int, store: dist.Store, folder: str, device: str = "cpu") -> dict[str, Any]:
    """Merges in a row: 3, 5 (and 2) steps, none at all, and drafters that differ unnoticed."""
    trainer, log = FakeTrainer((0.25, 0.7, 0.4)[rank], pause=0.0, device=device), ListLog()
    config, size = SpotConfig(mode=INLINE, inline_fraction=1.0), dist.get_world_size()
    trains = SpotTrainer(trainer, store, rank, size, config, log, shared_dir=folder)
    out: dict[str, Any] = {"before": everything(trainer)}

    def window(step: int, limit: int) -> Receipt:
        trains.begin(step)
        trainer.limit = limit
        return trains.inline(step, 5.0)

    out["unequal"] = window(0, (3, 5, 2)[rank]), everything(trainer), trainer.version
    out["zero"] = window(1, 0), everything(trainer), trainer.version
    if rank == 1:
        trainer.weights["fc.weight"][0, 0] += 1
        trainer.set_vocab([5, 6])
    out["differ"] = window(2, 0), everything(trainer), dict(trains.guards)
    trainer.fails = (lambda: math.nan) if rank == 0 else None
    if rank == 0:
        trainer.weights["fc.weight"].fill_(math.nan)
        trainer.state["norm.weight/exp_avg_sq"].fill_(math.inf)
    out["nan_zero"] = window(3, (1, 0, 0)[rank]), everything(trainer), trains.degraded
    if rank == 0:
        trainer.weights["norm.weight"].fill_(math.nan)
    out["nan_some"] = window(4, (1, 2, 0)[rank]), everything(trainer), trains.degraded
    out["log"] = log.lines
    dist.barrier()
    trains.close()
    return out


def real_drafters_differ(rank: int, store: dist.Store, folder: str) -> dict[str, Any]:
    """Rank 1's drafter has another vocabulary and other weights; then both train one step."""
    trainer = DrafterTrainer(make_drafter(23), make_buffer(), drafter_config())
    trainer.version = 1  # not the first window: no vocabulary is settled
    if rank:
        trainer.set_vocab(list(range(23)))
        trainer.drafter.fc.detach().add_(1)
    config = SpotConfig(mode=INLINE)
    trains = SpotTrainer(trainer, store, rank, 2, config, ListLog(), shared_dir=folder)
    trains.begin(0)
    trains.inline(0, 0.0)
    guards, vocab = dict(trains.guards), trainer.student.ids_V.tolist()
    step = trainer.train_step()
    dist.barrier()
    trains.close()
    return {"guards": guards, "vocab": vocab, "loss": step["loss"]}


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return play_ranks(merges, tmp_path_factory.mktemp("merged"))


def test_merge_is_the_step_weighted_average(merged: dict[int, dict[str, Any]]) -> None:
    # Rank 0 takes 3 steps of 0.25 and rank 1 takes 5 of 0.7, from the same start:
    # start + (3 * 3 * 0.25 + 5 * 5 * 0.7) / 8 = start + 2.46875
    start = merged[0]["before"]
    receipt, state, version = merged[0]["unequal"]
    assert receipt.drafter_steps == 3 and merged[1]["unequal"][0].drafter_steps == 5
    assert state == merged[1]["unequal"][1]
    for name in ("fc.weight", "norm.weight", "fc.weight/exp_avg", "norm.weight/exp_avg_sq"):
        expected = torch.tensor(start[name]) + 2.46875
        torch.testing.assert_close(torch.tensor(state[name]), expected, rtol=1e-6, atol=1e-6)
    assert state["fc.weight/step"] == 5.0  # the maximum
    assert version == merged[1]["unequal"][2] == 6
    log = [line for line in merged[0]["log"] if line["event"] == "merge"]
    assert log[0]["steps_by_rank"] == [3, 5]


def test_three_ranks_merge_by_steps(tmp_path: Path) -> None:
    # start + (3 * 3 * 0.25 + 5 * 5 * 0.7 + 2 * 2 * 0.4) / 10 = start + 2.135
    got = play_ranks(merges, tmp_path, 3)
    _, state, version = got[0]["unequal"]
    expected = torch.tensor(got[0]["before"]["fc.weight"]) + 2.135
    torch.testing.assert_close(torch.tensor(state["fc.weight"]), expected, rtol=1e-6, atol=1e-6)
    assert state["fc.weight/step"] == 5.0 and version == 6
    for rank in range(3):
        for name in ("unequal", "zero", "differ", "nan_zero", "nan_some"):
            assert got[rank][name][1] == got[0][name][1], (rank, name)
        assert got[rank]["differ"][2] == {"drafters_differ": 1}
        assert got[rank]["log"][-1]["steps_by_rank"] == [0, 2, 0]  # of window nan_some
    moved = torch.tensor(got[0]["nan_some"][1]["norm.weight"]) - 1 - 2.135
    torch.testing.assert_close(moved, torch.full((4,), 1.4), rtol=1e-6, atol=1e-6)


def test_a_repaired_drafter_is_taught_its_own_vocabulary(tmp_path: Path) -> None:
    """All of it: the twin that is trained has the ids too, so the ranks' next steps are equal."""
    first, second = play_ranks(real_drafters_differ, tmp_path).values()
    assert first["guards"] == second["guards"] == {"drafters_differ": 1}
    assert first["vocab"] == second["vocab"] != list(range(23))
    assert first["loss"] == second["loss"]


def test_merge_without_steps_changes_nothing(merged: dict[int, dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert merged[rank]["zero"][1:] == merged[rank]["unequal"][1:]


def test_differing_drafters_are_said_and_repaired(merged: dict[int, dict[str, Any]]) -> None:
    for rank in (0, 1):
        assert merged[rank]["differ"][1] == merged[0]["zero"][1]
        assert merged[rank]["differ"][2] == {"drafters_differ": 1}


def test_a_poisoned_drafter_does_not_spread(merged: dict[int, dict[str, Any]]) -> None:
    good = merged[1]["differ"][1]
    assert merged[0]["nan_zero"][1] == merged[1]["nan_zero"][1] == good
    assert merged[0]["nan_zero"][2] == "drafter_not_finite" and merged[1]["nan_zero"][2] == ""
    state = merged[0]["nan_some"][1]
    assert state == merged[1]["nan_some"][1]
    expected = torch.tensor(good["norm.weight"]) + 0.7 + 0.7  # rank 1's two steps
    assert state["norm.weight"] == expected.tolist()


@pytest.mark.gpu
def test_merges_of_cuda_tensors(merged: dict[int, dict[str, Any]], tmp_path: Path) -> None:
    on_gpu = play_ranks(functools.partial(merges, device="cuda"), tmp_path)
    for name in ("unequal", "zero", "differ", "nan_zero", "nan_some"):
        for rank in (0, 1):
            assert on_gpu[rank][name][1:] == merged[rank][name][1:]
