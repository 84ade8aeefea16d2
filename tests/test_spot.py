"""Idle-time training: what the window holds, who takes over what, what faults do.

Two or three real processes (gloo, one TCP store) play the straggler and the lost rank;
degradation needs no second process. Run: pytest tests/test_spot.py
"""

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import own_worker
from spot_fakes import FakeTrainer, ListLog, everything, play_ranks, ranks_of_one_process

from minitlt import ranks
from minitlt.spot import INLINE, OFF, UPDATING, Receipt, SpotConfig, SpotTrainer

pytestmark = own_worker


def straggler(rank: int, store: dist.Store, folder: str) -> dict[str, Any]:
    """Rank 1 decodes 1.5 s longer than rank 0."""
    trainer, log = FakeTrainer(), ListLog()
    trainer.set_vocab([10 + rank, 20 + rank])
    config = SpotConfig(publish_seconds=0.3)
    trains = SpotTrainer(trainer, store, rank, 2, config, log, shared_dir=folder)
    trains.begin(5)
    dist.barrier()
    started, polls, swaps, vocab_at_swap = time.monotonic(), [], [], trainer.vocab.tolist()
    while rank == 1 and time.monotonic() - started < 1.5:
        before = time.perf_counter()
        taken = trains.poll()
        polls.append(time.perf_counter() - before)
        if taken:
            weight = float(trainer.weights["norm.weight"][0])
            swaps.append((taken.drafter_steps, trainer.version, weight))
            vocab_at_swap = trainer.vocab.tolist()
        time.sleep(0.002)
    trainer.limit = 0 if rank else trainer.limit  # its window is empty, give or take a thread
    own_end = time.monotonic() - started
    receipt = trains.harvest(5)
    modes = [oct(path.stat().st_mode & 0o777) for path in Path(folder).iterdir()]
    dist.barrier()
    trains.close()
    dist.barrier()
    return {
        "receipt": receipt,
        "own_end": own_end,
        "steps_taken": int(trainer.state["fc.weight/step"]),
        "swaps": swaps,
        "polls": sorted(polls),
        "log": log.lines,
        "state": everything(trainer),
        "version": trainer.version,
        "vocabs": (vocab_at_swap, trainer.vocab.tolist()),
        "modes": modes,
        "left": os.listdir(folder),
    }


def two_stragglers(rank: int, store: dist.Store, folder: str) -> dict[str, Any]:
    """Three ranks; rank r decodes for 0.8 r s and trains after it."""
    trainer, log = FakeTrainer(), ListLog()
    config = SpotConfig(publish_seconds=0.2)
    trains = SpotTrainer(trainer, store, rank, 3, config, log, shared_dir=folder)
    trains.begin(1)
    dist.barrier()
    started, swaps = time.monotonic(), []
    while time.monotonic() - started < 0.8 * rank:
        if taken := trains.poll():
            swaps.append(taken.drafter_steps)
        time.sleep(0.002)
    end = time.monotonic()
    receipt = trains.harvest(1)
    dist.barrier()
    trains.close()
    return {
        "end": end,  # one clock for all processes of a machine
        "receipt": receipt,
        "swaps": swaps,
        "merge": log.of("merge")[0],
        "state": everything(trainer),
    }


def lost_in_tail(rank: int, store: dist.Store, folder: str) -> dict[str, Any]:
    """Rank 1 is killed while it decodes; rank 0 harvests."""
    config = SpotConfig(lost_rank_seconds=1.0)
    trains = SpotTrainer(FakeTrainer(), store, rank, 2, config, shared_dir=folder)
    trains.begin(3)
    trains.poll()
    dist.barrier()
    if rank == 1:
        trains.checkpoint(Path(folder) / "drafter.safetensors").result()
        trains._publish(1)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        trains.harvest(3)
    took = time.monotonic() - started
    left = sorted(path.name for path in Path(folder).glob("minitlt-swap-*/*"))
    trains.close()
    with_next = SpotTrainer(FakeTrainer(), dist.HashStore(), 0, 1, shared_dir=folder)
    with_next.close()
    return {"error": str(caught.value), "took": took, "left": left, "after": os.listdir(folder)}


def lost_in_merge(rank: int, store: dist.Store, folder: str) -> dict[str, Any]:
    """Rank 1 is killed after it said that it is ready, before the all-reduce."""
    config = SpotConfig(lost_rank_seconds=5.0)
    trains = SpotTrainer(FakeTrainer(), store, rank, 2, config, shared_dir=folder)
    trains.begin(3)
    dist.barrier()
    if rank == 1:
        trains._make_equal = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        time.sleep(0.2)  # so that rank 0 has steps to merge
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        trains.harvest(3)
    took = time.monotonic() - started
    trains.close()
    return {"error": str(caught.value), "took": took}


@pytest.fixture(scope="module")
def tail(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return play_ranks(straggler, tmp_path_factory.mktemp("tail"))


def test_the_window_spans_the_tail(tail: dict[int, dict[str, Any]]) -> None:
    first, last = tail[0]["receipt"], tail[1]["receipt"]
    available = tail[1]["own_end"] - tail[0]["own_end"]
    assert first.available_s == pytest.approx(available, abs=0.1)
    assert first.drafter_steps > 10 and first.tokens == 8 * first.drafter_steps
    assert first.harvested_s <= first.available_s
    assert first.overshoot_s < 0.2  # one step of 10 ms on a busy machine
    assert first.loss_first == 1.0 and first.loss_last == 1 / first.drafter_steps
    assert 0.01 <= first.step_p50_s <= first.step_p95_s < 0.2 and math.isnan(last.step_p50_s)
    assert last.drafter_steps == 0 and last.available_s < 0.1 and last.harvested_s == 0


def test_no_step_is_taken_after_the_window(tail: dict[int, dict[str, Any]]) -> None:
    assert tail[0]["steps_taken"] == tail[0]["receipt"].drafter_steps


def test_straggler_takes_over_fresher_drafters(tail: dict[int, dict[str, Any]]) -> None:
    swaps = tail[1]["swaps"]
    assert len(swaps) >= 2 and tail[0]["receipt"].published >= 2
    assert [steps for steps, _, _ in swaps] == sorted({steps for steps, _, _ in swaps})
    for steps, version, weight in swaps:
        assert version == steps and weight == 1.0 + steps  # the weights of that very version
    assert [line["version"] for line in tail[1]["log"] if line["event"] == "swap"] == [
        version for _, version, _ in swaps
    ]


def test_first_rank_done_chooses_the_vocabulary(tail: dict[int, dict[str, Any]]) -> None:
    """Before its first train step; the straggler has it before it loads what was trained so."""
    assert tail[0]["vocabs"][1] == [10, 20]
    assert tail[1]["vocabs"] == ([10, 20], [10, 20])


def test_a_vocabulary_is_chosen_once_and_after_the_rank_counts_as_done(tmp_path: Path) -> None:
    done = []
    with ranks_of_one_process(tmp_path) as (first, straggler):
        store, trainer = first._ranks._store, first.trainable
        trainer.choose_vocab = lambda: done.append(store.check(["1/done"])) or [7, 9]  # type: ignore
        first._merge = straggler._merge = lambda receipt: receipt  # type: ignore
        straggler.trainable.choose_vocab = lambda: pytest.fail("chosen twice")  # type: ignore
        thread = threading.Thread(target=first.harvest, args=(1,))
        thread.start()
        while not trainer.version:
            time.sleep(0.01)
        straggler.harvest(1)
        thread.join()
        assert done == [True]
        assert trainer.vocab.tolist() == straggler.trainable.vocab.tolist() == [7, 9]


def test_choosing_a_vocabulary_may_outlive_the_window_too(
    alone: Callable[..., SpotTrainer],
) -> None:
    trainer = FakeTrainer()
    trainer.choose_vocab = lambda: time.sleep(0.3) or [3, 4]  # type: ignore[func-returns-value]
    trains = alone(trainer)
    trains.begin(0)
    receipt = trains.harvest(0)
    assert receipt.overshoot_s > 0.2 and receipt.harvested_s == receipt.drafter_steps == 0


def test_nothing_is_published_after_the_window(tmp_path: Path) -> None:
    """The last train step has outlived it, and publication is due."""
    with ranks_of_one_process(tmp_path) as (first, straggler):
        first._merge = straggler._merge = lambda receipt: receipt  # type: ignore
        step = first.trainable.train_step

        def last_step() -> dict[str, Any]:
            straggler._ranks.count_done()
            straggler._ranks.known("vocab")  # the count has been made
            first._next_publish = 0.0
            return step()

        first.trainable.train_step = last_step
        receipt = first.harvest(1)
        assert receipt.drafter_steps == 1 and receipt.published == 0


def test_a_drafter_that_has_learnt_keeps_its_vocabulary(alone: Callable[..., SpotTrainer]) -> None:
    trainer = FakeTrainer()
    trainer.choose_vocab = lambda: [8, 9]  # type: ignore[method-assign]
    trains = alone(trainer, inline_fraction=0.01)
    for version in (3, 0):  # resumed; and settled once per run
        trainer.version = version
        trains.begin(1)
        trains.inline(1, 1.0)
        assert trainer.vocab.tolist() == [0, 1]


def test_poll_costs_microseconds(tail: dict[int, dict[str, Any]]) -> None:
    polls = tail[1]["polls"]
    assert polls[len(polls) // 2] < 100e-6


def test_after_the_window_drafters_are_equal(tail: dict[int, dict[str, Any]]) -> None:
    assert tail[0]["state"] == tail[1]["state"] and tail[0]["version"] == tail[1]["version"]
    steps = tail[0]["receipt"].drafter_steps
    assert tail[0]["state"]["norm.weight"] == [1.0 + steps] * 4  # rank 0's own bits
    assert tail[1]["state"]["fc.weight/step"] == steps
    prints = [
        line["fingerprint"] for r in (0, 1) for line in tail[r]["log"] if "fingerprint" in line
    ]
    assert len(prints) == 2 and len(set(prints)) == 1


def test_log_events_and_states(tail: dict[int, dict[str, Any]]) -> None:
    fields = {line["event"]: set(line) - {"event"} for line in tail[0]["log"]}
    assert set(fields) == {"harvest_start", "harvest_step", "harvest_end", "publish", "merge"}
    assert fields["harvest_end"] == {
        "step", "available_s", "harvested_s", "overshoot_s", "drafter_steps", "tokens",
        "loss_first", "loss_last", "buffer_tokens", "step_p50_s", "step_p95_s",
    }  # fmt: skip
    assert fields["publish"] == {"step", "version", "seconds", "bytes"}
    assert fields["merge"] == {"step", "seconds", "steps_by_rank", "fingerprint", "wait_s"}


def test_files_are_private_and_go_with_close(tail: dict[int, dict[str, Any]]) -> None:
    assert set(tail[0]["modes"]) == {"0o700"}
    assert tail[0]["left"] == tail[1]["left"] == []


def test_a_straggler_among_three_takes_what_was_trained_on(tmp_path: Path) -> None:
    got = play_ranks(two_stragglers, tmp_path, 3)
    for rank in range(3):
        window = got[2]["end"] - got[rank]["end"]
        assert got[rank]["receipt"].available_s == pytest.approx(window, abs=0.1)
    assert got[1]["swaps"] and got[2]["swaps"]  # rank 1 trains on from what it has taken over
    assert got[2]["swaps"] == sorted(set(got[2]["swaps"]))
    steps = [got[rank]["receipt"].drafter_steps for rank in range(3)]
    assert got[0]["merge"]["steps_by_rank"] == steps and min(steps[:2]) > 0
    assert got[0]["state"] == got[1]["state"] == got[2]["state"]


@pytest.mark.gpu
def test_collective_of_nccl_is_bounded(alone: Callable[..., SpotTrainer]) -> None:
    """One GPU holds one NCCL rank: this shows that wait(timeout) returns, with the result."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    buffer = torch.ones(1000, device="cuda")
    alone(FakeTrainer(device="cuda"))._collective(dist.all_reduce, buffer)
    assert bool((buffer == 1).all())
    dist.destroy_process_group()


def test_rank_lost_in_the_tail_is_named(tmp_path: Path) -> None:
    answer = play_ranks(lost_in_tail, tmp_path)[0]
    assert "rank 1 is lost: last seen generating in step 3" in answer["error"]
    assert 1.0 < answer["took"] < 4.0
    assert "r1.safetensors" in answer["left"]  # killed
    assert answer["after"] == ["drafter.safetensors"]  # the next run has cleaned up


def test_rank_lost_in_the_merge_is_an_error(tmp_path: Path) -> None:
    answer = play_ranks(lost_in_merge, tmp_path)[0]
    assert "rank 0: a rank was lost in the merge of step 3" in answer["error"]
    assert answer["took"] < 10.0


def test_silent_rank_is_lost_within_the_bound(tmp_path: Path) -> None:
    started, lost = time.monotonic(), "rank 1 is lost: last seen generating in step 1"
    with ranks_of_one_process(tmp_path) as ranks, pytest.raises(RuntimeError, match=lost):
        ranks[0].harvest(1)
    assert 1.0 <= time.monotonic() - started < 3.0


def test_a_rank_in_a_long_prefill_is_not_lost(tmp_path: Path) -> None:
    with ranks_of_one_process(tmp_path) as ranks:
        started = time.monotonic()
        while time.monotonic() - started < 1.6:
            ranks[1].beat()
            ranks[0]._ranks.beat()
            ranks[0]._ranks.watch()
            time.sleep(0.02)
        ranks[1]._enter(UPDATING)
        beats = ranks[1]._ranks._beats
        ranks[1]._ranks._next_beat = 0.0
        ranks[1].beat()  # e.g. an evaluation
        assert ranks[1]._ranks._beats == beats


def test_a_rank_that_trains_inline_watches_the_others(tmp_path: Path) -> None:
    lost = "rank 1 is lost: last seen generating in step 1"
    with ranks_of_one_process(tmp_path) as ranks, pytest.raises(RuntimeError, match=lost):
        ranks[0]._merge = lambda receipt: receipt
        ranks[0].inline(1, 40.0)  # four seconds of training


def test_a_rank_that_trains_inline_is_not_lost(tmp_path: Path) -> None:
    with ranks_of_one_process(tmp_path) as ranks:
        ranks[0]._merge = lambda receipt: receipt
        trains = threading.Thread(target=ranks[0].inline, args=(1, 18.0))
        trains.start()
        while trains.is_alive():  # longer than a silent rank would live
            ranks[1]._ranks.beat()
            ranks[1]._ranks.watch()
            time.sleep(0.02)
        assert ranks[0].trainable.version > 10


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Callable[..., SpotTrainer]]:
    made: list[SpotTrainer] = []

    def make(trainer: FakeTrainer, store: dist.Store | None = None, **config: Any) -> SpotTrainer:
        options = SpotConfig(**config)
        shared = tmp_path / "shared"
        shared.mkdir(exist_ok=True)
        made.append(
            SpotTrainer(trainer, store or dist.HashStore(), 0, 1, options, ListLog(), shared)
        )
        return made[-1]

    yield make
    for trains in made:
        trains.close()
        trains.close()
    assert not (tmp_path / "shared").exists() or not os.listdir(tmp_path / "shared")


def test_inline_trains_for_a_fraction_of_the_rollout(alone: Callable[..., SpotTrainer]) -> None:
    trains = alone(FakeTrainer(pause=0.01), inline_fraction=0.1)
    assert trains.mode == INLINE
    trains.begin(0)
    receipt = trains.inline(0, 3.0)
    assert receipt.available_s == pytest.approx(0.3)
    assert 0 < receipt.drafter_steps <= 31 and 0.2 < receipt.harvested_s <= 0.3
    assert receipt.overshoot_s < 0.2


def test_off_does_nothing(alone: Callable[..., SpotTrainer]) -> None:
    trains = alone(FakeTrainer(), mode=OFF)
    trains.begin(0)
    assert trains.poll() is None
    assert trains.harvest(0).drafter_steps == trains.inline(0, 9.0).drafter_steps == 0
    assert trains.log.lines == [] and trains.trainable.version == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("could not create a memory"),
        RuntimeError("could not create a primitive"),
    ],
)
def test_out_of_memory_ends_harvesting_not_the_run(
    alone: Callable[..., SpotTrainer], error: Exception
) -> None:
    trainer = FakeTrainer(limit=100)
    trains = alone(trainer, inline_fraction=1.0)

    def fail() -> float:
        raise error

    trainer.fails = fail
    for step in range(3):
        trains.begin(step)
        assert trains.inline(step, 0.05).drafter_steps == 0
    assert trains.degraded == "out_of_memory" and trains.guards == {"out_of_memory": 1}
    assert trainer.freed == 1
    assert [line["name"] for line in trains.log.of("guard")] == ["out_of_memory"]


@pytest.mark.parametrize("where", ["choose_vocab", "tensors"])
def test_out_of_memory_outside_a_train_step(
    alone: Callable[..., SpotTrainer], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = alone(FakeTrainer(limit=30), inline_fraction=1.0)

    def fail() -> Any:
        raise MemoryError

    trains.begin(0)
    monkeypatch.setattr(trains.trainable, where, fail)
    if where == "tensors":  # what a publication reads
        trains._open(0)
        trains._next_publish = 0.0
        trains._publish_if_due(Receipt(0, 0))
    else:
        assert trains.inline(0, 0.2).drafter_steps == 0
        assert trains.trainable.vocab.tolist() == [0, 1]  # as it was
    assert trains.degraded == "out_of_memory" and trains.trainable.freed == 1


def test_loss_that_is_not_finite_ends_harvesting(alone: Callable[..., SpotTrainer]) -> None:
    trainer = FakeTrainer()
    trains = alone(trainer, inline_fraction=1.0)
    trainer.fails = lambda: math.inf
    trains.begin(0)
    receipt = trains.inline(0, 0.05)
    assert receipt.drafter_steps == 0 and math.isnan(receipt.loss_last)
    assert trains.degraded == "drafter_not_finite"


def test_other_errors_propagate(alone: Callable[..., SpotTrainer]) -> None:
    trainer = FakeTrainer()
    trains = alone(trainer, inline_fraction=1.0)

    def fail() -> float:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    trainer.fails = fail
    trains.begin(0)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        trains.inline(0, 0.05)


def test_long_train_steps_are_said(alone: Callable[..., SpotTrainer]) -> None:
    trainer = FakeTrainer(pause=0.02)
    trainer.budget_seconds = 0.0125
    trains = alone(trainer, inline_fraction=1.0)
    trains.begin(0)
    steps = trains.inline(0, 0.2).drafter_steps
    assert trains.guards == {"long_train_step": steps}
    counts = [line["count"] for line in trains.log.of("guard")]
    assert counts == [2**i for i in range(len(counts))]  # not a line per step


@pytest.fixture
def slow_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that takes 0.2 s for every answer."""
    read = ranks._read

    def slowly(store: dist.Store, keys: list[str]) -> list[bytes]:
        time.sleep(0.2)
        return read(store, keys)

    monkeypatch.setattr(ranks, "_read", slowly)


@pytest.mark.usefixtures("slow_answers")
def test_slow_store_does_not_hold_up_training(alone: Callable[..., SpotTrainer]) -> None:
    trains = alone(FakeTrainer(pause=0.01))
    trains.begin(0)
    receipt = trains.harvest(0)  # the window closes with the store's first answer, 0.2 s later
    assert receipt.drafter_steps > 3
    assert 0.1 < receipt.overshoot_s < 1.0  # and that is said


@pytest.mark.usefixtures("slow_answers")
def test_silent_store_is_an_error(alone: Callable[..., SpotTrainer]) -> None:
    trains = alone(FakeTrainer(), lost_rank_seconds=0.1)
    trains.begin(0)
    with pytest.raises(RuntimeError, match=r"store is silent for over 0\.1 s"):
        trains.harvest(0)


def test_unreachable_store_is_a_clear_error(alone: Callable[..., SpotTrainer]) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    trains = alone(FakeTrainer(), client, lost_rank_seconds=2.0)
    trains.begin(0)
    del server
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="store cannot be reached"):
        while time.monotonic() - started < 5.0:
            trains._next_look = 0.0
            trains.poll()
            time.sleep(0.01)
    assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_the_next_trainer_on_the_same_store_starts_anew(
    alone: Callable[..., SpotTrainer], tmp_path: Path, kind: str
) -> None:
    store = dist.HashStore() if kind == "hash" else dist.FileStore(str(tmp_path / "store"), 1)
    for _ in range(2):
        trains = alone(FakeTrainer(), store)
        for step in range(4):
            trains.begin(step)
            trains.harvest(step)
        trains.close()
    time.sleep(0.05)
    # Two of the trainers'; agreed, vocab, beat and two windows (done, full) each; no older ones.
    assert store.num_keys() <= 2 + 2 * (3 + 2 * 2)


@pytest.mark.parametrize(
    "field, value",
    [
        ("mode", "sometimes"),
        ("publish_seconds", 0.0),
        ("lost_rank_seconds", math.nan),
        ("inline_fraction", -0.1),
        ("steps_per_window", -1),
    ],
)
def test_bad_options_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"spot\.{field}"):
        SpotConfig(**{field: value})


def test_misuse_is_refused(alone: Callable[..., SpotTrainer], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rank 2 does not exist"):
        SpotTrainer(FakeTrainer(), dist.HashStore(), 2, 2)
    with pytest.raises(ValueError, match=r"torch\.distributed"):
        SpotTrainer(FakeTrainer(), dist.HashStore(), 0, 2)
    with pytest.raises(ValueError, match="does not exist here"):
        SpotTrainer(FakeTrainer(), dist.HashStore(), 0, 1, shared_dir=tmp_path / "missing")
    with pytest.raises(RuntimeError, match=r"begin\(\) comes before"):
        alone(FakeTrainer()).harvest(0)
