"""Train the drafter in the idle window of each rollout, and hand it to whoever still decodes.

The idea (TLT, arXiv 2511.16665, its "spot trainer"). A rollout ends on every rank at another
moment: a few very long completions hold up one rank while the others wait at the next collective.
The time between a rank's own end and the last rank's end is its *idle window*. In it, the rank
trains the drafter on hidden states that the rollout has computed anyway:

    GENERATING  begin(), then poll() between verify steps: a heartbeat, a fresher drafter
    HARVESTING  harvest(): train steps until the last rank is done; publish every few seconds
    MERGING     all ranks are done: step-weighted average of the drafters in one all-reduce
    UPDATING    the rest of the training step; nothing here runs

Three rules. The window really spans the tail: its end is a counter in the process group's store,
looked at between two train steps, so preemption costs at most one step. No collective runs while
any rank decodes: the all-reduce starts when every rank has said in the store that it is ready.
Nothing waits without a bound: ranks leave heartbeats, and a lost rank is an error that names it.

*Hot swap*: every few seconds a harvesting rank publishes its drafter in shared memory (swap.py);
ranks that still decode copy it into place between two verify steps. Under coupled verification any
drafter gives the same tokens. The same file, written to a disk by a thread, is the selective
asynchronous checkpoint: neither decoding nor training waits for it.

Left out against TLT: the ZeroMQ coordinator and its messages (a counter and one heartbeat key per
rank do the same); FSDP for the drafter (one layer fits everywhere, so every idle rank takes its own
steps and the merge is local-SGD averaging); swaps across machines; off-loading between windows.

How to try it: `pytest tests/test_spot.py` runs two processes, one of which decodes 1.5 s longer.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from minitlt import merge, swap
from minitlt.common import option, write_atomically
from minitlt.merge import Trainable
from minitlt.ranks import Ranks
from minitlt.tensorfile import fingerprint, write_tensors

AUTO, SPOT, INLINE, OFF = "auto", "spot", "inline", "off"
GENERATING, HARVESTING, MERGING, UPDATING = "generating", "harvesting", "merging", "updating"

LOOK_S = 0.2  # poll() looks at most this often; in between it compares two numbers
NAP_S = 0.01  # between two looks when there is nothing to train on
PUBLISH_SHARE = 0.05  # of the window, at most, goes into publishing
SWAP_SHARE = 0.02  # of a straggler's time, at most, goes into swapping
_NO_MEMORY = (
    r"t allocate memory|not enough memory|ALLOC_FAILED|create a (memory|primitive)(?! desc)"
)


class Log(Protocol):
    def write(self, event: str, **fields: Any) -> None: ...


@dataclass
class SpotConfig:
    """How idle time is used. ValueError names the field that is out of range."""

    mode: str = option(AUTO, "auto (spot with several ranks, else inline), spot, inline or off")
    publish_seconds: float = option(2.0, "seconds between two publications of a harvesting rank")
    inline_fraction: float = option(0.1, "inline: training time as a fraction of rollout time")
    steps_per_window: int = option(
        0,
        "train steps per window, whatever the clock says, and no swaps: with drafter.pack_tokens "
        "and one arm, a resumed run equals an uninterrupted one to the bit; 0 = by the clock",
    )
    lost_rank_seconds: float = option(
        60.0, "a rank silent for this long is lost; more than the longest pause between two polls"
    )

    def __post_init__(self) -> None:
        if self.mode not in (AUTO, SPOT, INLINE, OFF):
            raise ValueError(f"spot.mode is {self.mode!r}; choose auto, spot, inline or off")
        for name in ("publish_seconds", "lost_rank_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"spot.{name} must be positive, not {getattr(self, name)}")
        for name in ("inline_fraction", "steps_per_window"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"spot.{name} cannot be negative, but is {getattr(self, name)}")


@dataclass
class Receipt:
    """What one rank made of one idle window. Times in seconds.

    harvested_s is time in train steps inside the window: publishing, looking at the store and
    the part of the last step that outlived the window (overshoot_s) are not in it.
    """

    step: int
    rank: int
    available_s: float = 0.0  # from this rank's end to the last rank's (inline: the budget)
    harvested_s: float = 0.0
    overshoot_s: float = 0.0
    wait_s: float = 0.0  # from this rank's readiness to merge to the last rank's
    drafter_steps: int = 0
    tokens: int = 0
    loss_first: float = math.nan
    loss_last: float = math.nan
    published: int = 0
    merge_s: float = 0.0
    buffer_tokens: int = 0
    step_p50_s: float = math.nan  # of the train steps' seconds: what preemption waits for
    step_p95_s: float = math.nan


@dataclass
class Swap:
    """A drafter that poll() has taken over from another rank."""

    step: int
    version: int
    source_rank: int
    drafter_steps: int
    seconds: float


class SpotTrainer:
    """Coordinates one rank's idle-time training; see the module's docstring.

    Args:
        trainable: the drafter's trainer; its tensors are changed in place.
        store: a torch.distributed.Store that all ranks share. One thread of ours talks to it.
        log: anything with write(event, **fields), or None.
        shared_dir: where drafters are published; None is /dev/shm if it has room.
        clock: monotonic seconds.

    Raises:
        ValueError: options that cannot work. RuntimeError: a lost rank or store, from any method.
    """

    def __init__(
        self,
        trainable: Trainable,
        store: dist.Store,
        rank: int,
        world_size: int,
        config: SpotConfig | None = None,
        log: Log | None = None,
        shared_dir: str | Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} does not exist among {world_size} ranks")
        self.trainable, self.rank, self.world_size = trainable, rank, world_size
        self.config, self.log, self.clock = config or SpotConfig(), log, clock
        auto = SPOT if world_size > 1 else INLINE
        self.mode = auto if self.config.mode == AUTO else self.config.mode
        self.state, self.degraded = UPDATING, ""
        self.guards: dict[str, int] = {}  # what should not happen, and how often it did
        self._step = self._window = 0
        self._writer = ThreadPoolExecutor(1, "minitlt-checkpoint")  # starts with the first task
        self._closed, self._pid = False, os.getpid()
        if self.mode == OFF:
            return
        if world_size > 1 and not dist.is_initialized():
            raise ValueError("merging the drafters of several ranks needs torch.distributed")
        self._vocab_settled = False
        self._freshest = (0, 0)  # window and drafter steps of the drafter in place
        self._signatures: dict[int, Any] = {}  # of other ranks' files, as seen
        self._next_look = self._next_swap = -math.inf
        self._ranks = Ranks(store, rank, world_size, self.config.lost_rank_seconds, clock)
        try:
            self._files = swap.SharedFiles(*self._agree(shared_dir), rank, world_size)
        except BaseException:
            self._ranks.stop()
            raise
        atexit.register(self.close)
        self._enter(UPDATING)

    # The life of a rollout: begin, poll while decoding, then harvest (or inline).

    def begin(self, step: int) -> None:
        """A generation starts on this rank. Every rank calls it equally often."""
        if self.mode == OFF:
            return
        self._step, self._window = step, self._window + 1
        self._freshest = (self._window, 0)
        self._ranks.open_window(self._window)
        swap.sweep(self._files.directory)
        self._enter(GENERATING)

    def poll(self) -> Swap | None:
        """Between two verify steps: a heartbeat, and a fresher drafter if one is published.

        Costs a comparison, and every LOOK_S seconds a few stat calls.
        """
        if self.mode == OFF or (now := self.clock()) < self._next_look:
            return None
        if self.state != GENERATING:  # e.g. an evaluation: what is published is older than ours
            return None
        self._next_look = now + LOOK_S
        self._ranks.beat()
        return self._look_for_drafter() if now >= self._next_swap else None

    def beat(self) -> None:
        """Between two chunks of a prefill: a heartbeat and nothing else."""
        if self.mode != OFF and self.state == GENERATING:
            self._ranks.beat()

    def harvest(self, step: int) -> Receipt:
        """This rank's rows are done: train until the last rank's are, then merge."""
        receipt, stepped = self._open(step), False
        if self.mode == OFF:
            return receipt
        self._ranks.count_done()
        self._settle_vocab()
        while (end := self._ranks.window_end(self._opened)) is None or self._owes(receipt):
            self._ranks.beat()
            self._ranks.watch()
            if stepped:  # and the window was open a moment ago
                self._publish_if_due(receipt)
            wanted = not self.config.steps_per_window or self._owes(receipt)
            if stepped := wanted and self._train_step(receipt):
                continue
            if end is not None:  # steps are owed and there is nothing to train on
                break
            time.sleep(NAP_S)
        self._close_window(receipt, end)
        return self._merge(receipt)

    def _owes(self, receipt: Receipt) -> bool:
        return receipt.drafter_steps < self.config.steps_per_window

    def inline(self, step: int, rollout_seconds: float) -> Receipt:
        """Mode inline: train for `inline_fraction` of the rollout's seconds, then merge."""
        receipt = self._open(step)
        if self.mode == OFF:
            return receipt
        self._settle_vocab()
        end = self._opened + self.config.inline_fraction * rollout_seconds
        fixed = self.config.steps_per_window > 0
        while (self._owes(receipt) if fixed else self.clock() < end) and self._train_step(receipt):
            self._ranks.beat()  # other ranks may be done before, and wait for this one
            self._ranks.watch()
        self._close_window(receipt, self.clock() if fixed else end)
        return self._merge(receipt)

    def checkpoint(self, path: str | Path, then: Callable[[], Any] = lambda: None) -> Future[None]:
        """Writes the file that is published to `path`, without stopping training: a thread writes
        it beside `path`, flushes it to the disk, renames it and calls `then`. Errors (a full disk)
        come from the future's result()."""
        tensors, header = self.trainable.tensors(), self._header(0)
        snapshot = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}

        def write() -> None:
            write_atomically(Path(path), lambda beside: write_tensors(beside, snapshot, header))
            then()

        return self._writer.submit(write)

    def _header(self, drafter_steps: int) -> dict[str, str]:
        """drafter_steps: in this window, with those of the drafter that was taken over."""
        numbers = {"step": self._step, "window": self._window, "rank": self.rank}
        numbers |= {"version": self.trainable.version, "drafter_steps": drafter_steps}
        return self.trainable.header | {name: str(numbers[name]) for name in swap.NUMBERS}

    def close(self) -> None:
        """Finishes checkpoints, removes this rank's files, stops its thread. May be repeated."""
        if self._closed or os.getpid() != self._pid:  # a forked child owns none of it
            return
        self._closed = True
        self._writer.shutdown()
        if self.mode != OFF:
            atexit.unregister(self.close)
            self._ranks.stop()
            self._files.remove()

    def _agree(self, shared_dir: str | Path | None) -> tuple[Path, str]:
        """The directory and token that all ranks use."""
        size = sum(t.numel() * t.element_size() for t in self.trainable.tensors().values())
        directory = Path(shared_dir or swap.roomy_directory(2 * size * self.world_size)).absolute()
        wish = json.dumps([str(directory), secrets.token_hex(16)])
        agreed, token = json.loads(self._ranks.first("agreed", wish))
        return Path(agreed), token

    def _enter(self, state: str) -> None:
        self.state = state
        self._ranks.enter(state, self._step)

    # Harvesting.

    def _open(self, step: int) -> Receipt:
        if self.mode != OFF:
            if self.state != GENERATING:
                raise RuntimeError("begin() comes before harvest() or inline()")
            self._opened = self._busy_until = self.clock()
            self._next_publish = self._opened + self.config.publish_seconds
            self._next_sample = self._opened
            self._step = step
            self._enter(HARVESTING)
            self._seconds: list[float] = []  # of each train step in this window
            self._write("harvest_start", step=step)
        return Receipt(step, self.rank)

    def _settle_vocab(self) -> None:
        """Before the run's first train step all ranks take one draft vocabulary: that of the rank
        which is done first. Later ones come from all ranks' rows, after a merge."""
        if not self._vocab_settled and not self.trainable.version:
            if not (agreed := self._ranks.known("vocab")):  # choosing one takes a second of CPU
                mine = self._within_memory("the draft vocabulary", self.trainable.choose_vocab)
                mine = mine or merge.vocabulary(self.trainable).tolist()
                self._busy_until = self.clock()
                agreed = self._ranks.first("vocab", json.dumps(mine))
            self.trainable.set_vocab(json.loads(agreed))
        self._vocab_settled = True

    def _train_step(self, receipt: Receipt) -> bool:
        """One train step; False if none was taken (nothing to train on, or degraded)."""
        if self.degraded:
            return False
        started = self.clock()
        result = self._within_memory("the drafter's train step", self.trainable.train_step)
        if result is None or not result["tokens"]:
            return False
        loss, self._busy_until = float(result["loss"]), self.clock()
        if not math.isfinite(loss):
            return self._degrade(
                "drafter_not_finite", "the drafter's loss or gradient is not finite"
            )
        seconds = self._busy_until - started
        self._seconds.append(seconds)
        receipt.harvested_s += seconds
        receipt.drafter_steps += 1
        receipt.tokens += int(result["tokens"])
        receipt.buffer_tokens = int(result.get("buffer_tokens", 0))
        receipt.loss_first = loss if receipt.drafter_steps == 1 else receipt.loss_first
        receipt.loss_last = loss
        if self._busy_until >= self._next_sample:
            self._next_sample = self._busy_until + 1.0
            fields = {"n": receipt.drafter_steps, "tokens": int(result["tokens"])}
            self._write("harvest_step", step=self._step, loss=loss, seconds=seconds, **fields)
        wished = self.trainable.budget_seconds
        if seconds > 1.5 * wished:  # less is the clock's noise
            message = f"{seconds * 1e3:.0f} ms, {wished * 1e3:.0f} ms wished: preemption is slow"
            self._guard("long_train_step", message)
        return True

    def _close_window(self, receipt: Receipt, end: float) -> None:
        receipt.available_s = end - self._opened
        receipt.overshoot_s = max(0.0, self._busy_until - end)
        receipt.harvested_s = max(0.0, receipt.harvested_s - receipt.overshoot_s)
        if seconds := sorted(self._seconds):
            receipt.step_p50_s = seconds[len(seconds) // 2]
            receipt.step_p95_s = seconds[len(seconds) * 19 // 20]
        later = ("rank", "wait_s", "published", "merge_s")
        fields = {name: value for name, value in asdict(receipt).items() if name not in later}
        self._write("harvest_end", **fields)

    def _degrade(self, name: str, message: str) -> bool:
        """Ends harvesting on this rank for the run; it still merges, with no steps of its own."""
        if not self.degraded:
            self.degraded = name
            self._guard(name, f"{message}; harvesting is off on rank {self.rank} from here on")
        return False

    def _within_memory(self, what: str, work: Callable[[], Any]) -> Any:
        """What `work` returns; None, and no more harvesting, if there is no memory for it. A merge
        is not among the work: no rank can stay away from it, so there it is an error."""
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            message = f"{what}: {error}"
        self.trainable.free()  # the error is gone, and with it all that its frames held
        self._degrade("out_of_memory", message)
        return None

    # Hot swap.

    def _publish_if_due(self, receipt: Receipt) -> None:
        if (started := self.clock()) >= self._next_publish and not self.config.steps_per_window:
            work = partial(self._publish, receipt.drafter_steps)
            receipt.published += bool(self._within_memory("publishing the drafter", work))
            took = self.clock() - started
            pause = max(self.config.publish_seconds, took / PUBLISH_SHARE)
            self._next_publish = started + took + pause

    def _publish(self, drafter_steps: int) -> bool:
        """Writes the drafter where the other ranks of this machine see it."""
        started = self.clock()
        tensors = {name: tensor.detach().cpu() for name, tensor in self.trainable.tensors().items()}
        if not merge.all_finite(list(tensors.values())):
            return self._degrade("drafter_not_finite", "the drafter's weights are not finite")
        try:
            size = self._files.write(tensors, self._header(self._freshest[1] + drafter_steps))
        except OSError as error:
            # The drafter still reaches everyone in the merge; a swap in this rollout is missed.
            self._guard("publish_failed", str(error))
            return False
        fields = {"version": self.trainable.version, "seconds": self.clock() - started}
        self._write("publish", step=self._step, bytes=size, **fields)
        return True

    def _look_for_drafter(self) -> Swap | None:
        """Takes over the newest drafter published since the last look, by (window, steps)."""
        started, found = self.clock(), []
        for rank, path in self._files.others.items():
            info = self._try(path.lstat)
            signature = info and (info.st_ino, info.st_mtime_ns, info.st_size)
            if signature == self._signatures.get(rank):
                continue
            self._signatures[rank] = signature  # every publication is looked at once
            numbers = self._try(swap.read_numbers, path)
            if numbers and _freshness(numbers) > self._freshest:
                found.append((_freshness(numbers), rank))
        for _, rank in sorted(found, reverse=True):
            read = self._try(swap.read_drafter, self._files.others[rank], self.trainable.tensors())
            if read is None:
                continue
            tensors, numbers = read
            self.trainable.load(tensors, numbers["version"])
            self._freshest, seconds = _freshness(numbers), self.clock() - started
            self._next_swap = started + seconds / SWAP_SHARE
            taken = Swap(self._step, numbers["version"], rank, numbers["drafter_steps"], seconds)
            self._write("swap", **asdict(taken))
            return taken
        return None

    def _try(self, read: Callable[..., Any], *args: Any) -> Any:
        """What `read` returns, or None for a file that is not there, or that is not good."""
        try:
            return read(*args)
        except FileNotFoundError:
            return None
        except ValueError as error:
            self._guard("swap_file_skipped", str(error))
            return None

    # Merging.

    def _merge(self, receipt: Receipt) -> Receipt:
        """Averages the drafters, weighted by steps; afterwards all ranks hold the same bits. The
        store first carries every rank's step count: the all-reduce starts when all are there, and
        its weights are exact, so a rank that trained alone hands over its own bits."""
        self._enter(MERGING)
        if self.world_size > 1:
            record, started = self._record(receipt), self.clock()
            answers = self._ranks.exchange("ready", record)
            records = [json.loads(answer) for answer in answers]
            ready = self.clock()
            steps = [record["steps"] for record in records]
            common = self._make_equal(records, steps)
            receipt.wait_s, receipt.merge_s = ready - started, self.clock() - ready
            times = {"seconds": receipt.merge_s, "wait_s": receipt.wait_s}
            self._write("merge", step=self._step, steps_by_rank=steps, fingerprint=common, **times)
        self._enter(UPDATING)
        return receipt

    def _record(self, receipt: Receipt) -> str:
        """What the others must know of this rank before the merge, as JSON."""
        averaged, counters = merge.averaged(self.trainable), merge.counters(self.trainable)
        finite = merge.all_finite(averaged)
        if not finite:
            self._degrade("drafter_not_finite", "the drafter's weights are not finite")
        layout = repr([tuple(tensor.shape) for tensor in averaged]).encode()
        record = {
            "steps": receipt.drafter_steps if finite else 0,
            "finite": finite,
            "version": self.trainable.version,
            "counters": [int(counter) for counter in counters],
            "layout": zlib.crc32(layout),
        }
        return json.dumps(record)

    def _make_equal(self, records: list[dict[str, Any]], steps: list[int]) -> str:
        """One all-reduce; then checksums are compared through the store and returned. Drafters that
        still differ are a guard event, and are repaired from the lowest rank whose drafter is right
        (rank 0 as a rule): never silent."""
        if len({record["layout"] for record in records}) > 1:
            raise RuntimeError("the ranks' drafters differ in shapes: they cannot be merged")
        total = sum(steps)
        finite = [record for record in records if record["finite"]] or records
        version = max(record["version"] for record in finite) + (total > 0)
        counters = [max(values) for values in zip(*(r["counters"] for r in finite), strict=True)]
        if total:
            buffer = merge.flatten(self.trainable, steps[self.rank] / total)
            self._collective(dist.all_reduce, buffer)
            merge.unflatten(self.trainable, buffer, version, counters)
        prints = self._ranks.exchange("print", fingerprint(self.trainable.tensors()))
        if len(set(prints)) == 1:
            return prints[0]
        source = 0 if total else records.index(finite[0])
        self._guard("drafters_differ", f"{prints} after the merge: all take rank {source}'s")
        ids_V = merge.vocabulary(self.trainable).clone()
        self._collective(dist.broadcast, ids_V, source)
        self.trainable.set_vocab(ids_V.tolist())  # before the weights: it moves rows of the head
        buffer = merge.flatten(self.trainable, 1.0)
        self._collective(dist.broadcast, buffer, source)
        merge.unflatten(self.trainable, buffer, version + 1, counters)
        return fingerprint(self.trainable.tensors())

    def _collective(self, start: Callable[..., Any], *args: Any) -> None:
        """A collective that all ranks have announced; bounded, as one may die right here."""
        try:
            bound = timedelta(seconds=self.config.lost_rank_seconds)
            start(*args, async_op=True).wait(bound)
        except RuntimeError as error:
            message = f"rank {self.rank}: a rank was lost in the merge of step {self._step}"
            raise RuntimeError(f"{message}: {error}") from error

    def _guard(self, name: str, message: str) -> None:
        """Counts what should not happen; says it the 1st, 2nd, 4th, 8th ... time."""
        count = self.guards[name] = self.guards.get(name, 0) + 1
        if count & (count - 1) == 0:
            self._write("guard", name=name, count=count, message=message)

    def _write(self, event: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.write(event, **fields)


def _freshness(numbers: dict[str, int]) -> tuple[int, int]:
    return numbers["window"], numbers["drafter_steps"]


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a type for it, its allocator on a CPU and the libraries below only sentences."""
    typed = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return typed or re.search(_NO_MEMORY, str(error)) is not None
