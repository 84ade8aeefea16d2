"""Hot swaps and their files: who takes over what, torn files, killed writers, checkpoints.

No second rank as a process is needed. Run: pytest tests/test_swap.py
"""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from drafter_reference import make_drafter
from ranks import PROCESSES, own_worker
from spot_fakes import FakeTrainer, everything, ranks_of_one_process
from test_distill import make_buffer

from minitlt import spot, swap
from minitlt.distill import DrafterTrainer
from minitlt.eagle3 import load_drafter
from minitlt.spot import SpotConfig, SpotTrainer
from minitlt.tensorfile import read_tensors, write_tensors

NUMBERS = dict.fromkeys(swap.NUMBERS, "3")


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[SpotTrainer, SpotTrainer]]:
    with ranks_of_one_process(tmp_path) as (giver, taker):
        yield giver, taker


def poll(trains: SpotTrainer) -> spot.Swap | None:
    trains._next_look = trains._next_swap = 0.0
    return trains.poll()


def test_newest_by_steps_wins_and_old_windows_do_not(
    pair: tuple[SpotTrainer, SpotTrainer],
) -> None:
    giver, taker = pair
    giver.trainable.train_step()
    assert giver._publish(7)
    taken = poll(taker)
    assert taken and (taken.version, taken.source_rank, taken.drafter_steps) == (1, 0, 7)
    assert poll(taker) is None  # nothing new
    assert giver._publish(6) and poll(taker) is None  # fewer steps than the one in place
    assert giver._publish(9)
    taker.begin(2)
    assert poll(taker) is None  # of the window before: the merge has given more


def test_steps_that_were_taken_over_count_as_steps(tmp_path: Path) -> None:
    """Seven steps of rank 0 and one of rank 1 on top of them are fresher than the seven."""
    with ranks_of_one_process(tmp_path, 3) as (first, second, straggler):
        first.trainable.train_step()
        assert first._publish(7)
        assert poll(second) and poll(straggler)
        second.trainable.train_step()
        assert second._publish(1)
        taken = poll(straggler)
        assert taken and (taken.source_rank, taken.drafter_steps, taken.version) == (1, 8, 2)
        assert first._publish(8) and poll(straggler) is None
        assert first._publish(9) and poll(straggler)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _other_shape(path: Path) -> None:
    tensors, header = read_tensors(path)
    tensors["norm.weight"] = torch.ones(5)
    write_tensors(path.with_name("other"), tensors, header)
    path.with_name("other").replace(path)


@pytest.mark.parametrize(
    "harm",
    [
        _flip,
        _other_shape,
        lambda path: path.write_bytes(path.read_bytes()[:-7]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"\xff" * 4000),
        lambda path: path.write_bytes((2).to_bytes(8, "little") + b"{}"),
    ],
    ids=["flipped", "other_shape", "torn", "empty", "noise", "foreign"],
)
def test_bad_file_is_skipped_and_counted(
    pair: tuple[SpotTrainer, SpotTrainer], harm: Callable[[Path], Any]
) -> None:
    giver, taker = pair
    giver.trainable.train_step()
    assert giver._publish(1)
    harm(giver._files.own)
    before = everything(taker.trainable)
    assert poll(taker) is None and poll(taker) is None
    assert taker.guards == {"swap_file_skipped": 1}
    assert taker.log.of("guard")[0]["name"] == "swap_file_skipped"
    assert everything(taker.trainable) == before and taker.trainable.version == 0
    assert giver._publish(2) and poll(taker)  # the next one is good


def test_publishing_without_room_is_said(
    pair: tuple[SpotTrainer, SpotTrainer],
) -> None:
    giver, taker = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    giver._publish(1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert not giver._publish(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert giver.guards == {"publish_failed": 1}
    taken = poll(taker)
    assert taken and taken.drafter_steps == 1  # the one before is whole
    assert not list(giver._files.own.parent.glob("*.tmp"))


def _publish_for_ever(folder: str) -> None:
    files = swap.SharedFiles(Path(folder), "killed_run", 0, 2)
    tensors, count = {"weight": torch.zeros(500_000)}, 0
    while True:
        count += 1
        tensors["weight"].fill_(count)
        files.write(tensors, NUMBERS | {"version": str(count)})


@own_worker
def test_publisher_killed_while_writing(tmp_path: Path) -> None:
    like = {"weight": torch.zeros(500_000)}
    for wait in (0.0, 0.013, 0.029):
        process = PROCESSES.Process(target=_publish_for_ever, args=(str(tmp_path),))
        process.start()
        path, deadline = tmp_path / "minitlt-swap-killed_run/r0.safetensors", time.monotonic() + 120
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.001)
        mapped, numbers = swap.read_drafter(path, like)
        time.sleep(wait)
        process.kill()
        process.join()
        assert (mapped["weight"] == numbers["version"]).all()  # mapped before later versions
        tensors, numbers = swap.read_drafter(path, like)
        assert (tensors["weight"] == numbers["version"]).all()
    after = swap.SharedFiles(tmp_path, "next_run_1", 0, 1)
    assert sorted(os.listdir(tmp_path)) == ["minitlt-swap-next_run_1"]
    after.remove()


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    files = swap.SharedFiles(tmp_path, "every_type", 0, 1)
    tensors = {
        "half": torch.arange(3, dtype=torch.bfloat16),
        "turned": torch.nn.Parameter(torch.arange(6.0).view(2, 3).T),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "none": torch.zeros(0, 4, dtype=torch.float16),
        "count": torch.tensor([2**40]),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "small": torch.tensor([[-128], [127]], dtype=torch.int8),
        "mask": torch.tensor([True, False, True]),
    }
    size = files.write(tensors, NUMBERS)
    assert size == files.own.stat().st_size
    read = safetensors.torch.load_file(files.own)
    ours, numbers = swap.read_drafter(files.own, tensors)
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor) and torch.equal(ours[name], tensor)
    assert numbers == dict.fromkeys(swap.NUMBERS, 3)
    files.remove()


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    one = swap.SharedFiles(tmp_path, "run_number_1", 0, 2)
    one.write(FakeTrainer().tensors(), NUMBERS)
    two = swap.SharedFiles(tmp_path, "run_number_2", 1, 2)
    swap.sweep(tmp_path)
    assert one.own.exists() and not any(path.exists() for path in two.others.values())
    beside = swap.SharedFiles(tmp_path, "run_number_1", 1, 2)  # a rank of the same run
    one.remove()
    assert beside.own.parent.exists()
    beside.remove()
    two.remove()
    assert os.listdir(tmp_path) == []


def test_a_sweep_takes_only_what_is_ours(tmp_path: Path) -> None:
    mine = [tmp_path / name for name in ("minitlt-run/notes.txt", "minitlt-swap-old/notes.txt")]
    for path in mine:
        path.parent.mkdir(mode=0o700)
        path.write_text("keep")
    (tmp_path / "minitlt-swap-old/r0.safetensors").write_text("of a dead rank")
    swap.sweep(tmp_path)
    assert all(path.exists() for path in mine)
    assert len(list(tmp_path.glob("*/*"))) == 2


def test_folders_that_others_can_enter_are_not_used(tmp_path: Path) -> None:
    (tmp_path / "minitlt-swap-public").mkdir(mode=0o755)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "minitlt-swap-link").symlink_to(tmp_path / "elsewhere")
    for token in ("public", "link"):
        with pytest.raises(OSError):
            swap.SharedFiles(tmp_path, token, 0, 1)
    swap.sweep(tmp_path)  # and they are not ours to remove
    assert len(os.listdir(tmp_path)) == 3


def test_process_that_ends_without_close_leaves_nothing(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests'); import torch.distributed as dist\n"
        "from spot_fakes import FakeTrainer, SpotTrainer\n"
        f"s = SpotTrainer(FakeTrainer(), dist.HashStore(), 0, 1, shared_dir={str(tmp_path)!r})\n"
        f"s.begin(0); s._publish(1); import os; print(len(os.listdir({str(tmp_path)!r})))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.strip() == "1", run.stderr
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("mode", ["inline", "off"])
def test_checkpoint_is_the_published_file(tmp_path: Path, mode: str) -> None:
    trainer, path = FakeTrainer(), tmp_path / "drafter.safetensors"
    config = SpotConfig(mode=mode)
    trains = SpotTrainer(trainer, dist.HashStore(), 0, 1, config, shared_dir=tmp_path)
    trainer.train_step()
    seen: list[bool] = []
    written = trains.checkpoint(path, lambda: seen.append(path.exists()))
    trainer.train_step()  # goes on meanwhile
    written.result()
    assert seen == [True]
    tensors, numbers = swap.read_drafter(path, trainer.tensors())
    assert numbers["version"] == 1 and float(tensors["norm.weight"][0]) == 2.0
    assert tensors["ids_V"].tolist() == [0, 1]
    assert read_tensors(path)[1].items() >= trainer.header.items()
    with pytest.raises(FileNotFoundError):
        trains.checkpoint(tmp_path / "missing" / "drafter.safetensors").result()
    again = trains.checkpoint(path)
    trains.close()
    assert again.done() and swap.read_numbers(path)["version"] == 2
    assert os.listdir(tmp_path) == ["drafter.safetensors"]


def test_a_checkpoint_holds_what_is_the_drafters_own_and_loads_alone(tmp_path: Path) -> None:
    drafter = make_drafter(23, torch.float32)
    trainer = DrafterTrainer(drafter, make_buffer())
    trains = SpotTrainer(trainer, dist.HashStore(), 0, 1, SpotConfig(mode="off"))
    trains.checkpoint(tmp_path / "drafter.safetensors").result()
    trains.close()
    assert set(read_tensors(tmp_path / "drafter.safetensors")[0]) == set(drafter.state_dict())
    loaded = load_drafter(tmp_path)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
