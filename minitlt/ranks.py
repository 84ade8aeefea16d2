"""What ranks tell each other while some of them still decode: a few keys in the store.

The idea: collectives would stop whoever decodes, so everything that happens before the merge goes
through the torch.distributed store that the process group has anyway. Three things are said there:
who is alive (one heartbeat key per rank), that the last rank is done (a counter, and the moment of
its last count), and small records that all ranks must know (`exchange`, `first`). One thread does
the talking, so a slow store never holds up decoding or training. Waiting is bounded: a silent rank
or store is a RuntimeError that names it.

Left out: a coordinator process, messages, election of a leader. How to run: spot.py uses this;
tests/test_spot.py.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

PATIENCE_S = 0.02  # an answer that comes later is not waited for
NAP_S = 0.002  # between two looks at an exchange
KINDS = ("ready", "print")  # of exchange, per window


class Ranks:
    """This rank's view of all ranks.

    Args:
        store: shared by all ranks. May serve several Ranks, made in the same order on every rank.
        lost_s: seconds after which a rank or the store that has not moved is lost.
        clock: monotonic seconds.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, lost_s: float, clock: Callable[[], float]
    ) -> None:
        self.rank, self.size, self._lost_s, self._clock = rank, size, lost_s, clock
        self._beat_s = min(1.0, lost_s / 10)
        self._state, self._step, self._beats, self._window = "new", -1, 0, 0
        self._next_beat = self._next_watch = -math.inf
        self._seen: dict[int, tuple[bytes, float]] = {}  # rank: its beat, since when unchanged
        self._link = _Link(lost_s, clock)
        made = self._link.call(lambda: store.add(f"minitlt/made/{rank}", 1))
        self._store = dist.PrefixStore(f"minitlt/{made}", store)

    def first(self, key: str, value: str) -> str:
        """The value of the rank that came first. Nobody waits for another rank."""
        return str(self._link.call(lambda: self._store.compare_set(key, "", value)).decode())

    def known(self, key: str) -> str:
        """The value of the rank that came first; "" while none has come."""
        return str(self._link.call(lambda: _read(self._store, [key])[0]).decode())

    def enter(self, state: str, step: int) -> None:
        """Writes this rank's state to the store."""
        self._state, self._step, self._next_beat = state, step, -math.inf
        self.beat()

    def beat(self) -> None:
        """A sign of life, at most one per second: state, step and a count."""
        if (now := self._clock()) >= self._next_beat:
            self._next_beat, self._beats = now + self._beat_s, self._beats + 1
            text = f"{self._state} {self._step} {self._beats}"
            self._link.post(lambda: self._store.set(f"beat/{self.rank}", text))

    def watch(self) -> None:
        """RuntimeError if a rank's heartbeat has stood still for too long.

        Ages are taken on this rank's clock, between two readings of the same beat, and start with
        the window: no two clocks are compared, and a pause of this rank makes nobody older.
        """
        if self._clock() < self._next_watch:
            return
        if (answer := self._link.ask("beats", self._read_beats, PATIENCE_S)) is None:
            return
        beats, asked = answer
        self._next_watch = asked + self._beat_s / 2
        for rank, beat in enumerate(beats):
            before, since = self._seen.setdefault(rank, (beat, asked))
            if beat != before:
                self._seen[rank] = (beat, asked)
            elif rank != self.rank and asked - since > self._lost_s:
                state, step = _state(beat)
                raise RuntimeError(
                    f"rank {rank} is lost: last seen {state} in step {step}, no sign of life "
                    f"for {asked - since:.1f} s (noticed by rank {self.rank}, {self._state})"
                )

    def open_window(self, window: int) -> None:
        """Starts window number `window`; rank 0 forgets one that every rank has left."""
        self._window, self._seen = window, {}
        if self.rank == 0 and window > 2:
            kinds = ["done", "full", *(f"{k}/{r}" for k in KINDS for r in range(self.size))]
            keys = [f"{window - 2}/{kind}" for kind in kinds]
            self._link.post(lambda: [self._store.delete_key(key) for key in keys])

    def count_done(self) -> None:
        """Counts this rank as done; the last one leaves the time of its end for the others.

        Nobody waits for the answer: the thread keeps the order of requests.
        """
        stamp, done, full = repr(time.time()), f"{self._window}/done", f"{self._window}/full"

        def count() -> None:
            if self._store.add(done, 1) == self.size:
                self._store.set(full, stamp)

        self._link.post(count)

    def window_end(self, opened: float) -> float | None:
        """When the last rank was done, on this rank's clock; None while one still decodes."""
        full = f"{self._window}/full"
        answer = self._link.ask("full", lambda: _read(self._store, [full])[0], PATIENCE_S)
        if not answer or not answer[0]:
            return None
        # Wall clocks of two machines may differ; the end lies inside the window all the same.
        now = self._clock()
        return min(max(now - (time.time() - float(answer[0])), opened), now)

    def exchange(self, kind: str, value: str) -> list[str]:
        """Every rank's value, by rank. Waits for all of them, with an eye on lost ranks."""
        assert kind in KINDS
        keys = [f"{self._window}/{kind}/{rank}" for rank in range(self.size)]
        self._link.post(lambda: self._store.set(keys[self.rank], value))
        while True:
            answer = self._link.ask(kind, lambda: _read(self._store, keys), PATIENCE_S)
            if answer and all(answer[0]):
                return [text.decode() for text in answer[0]]
            self.beat()
            self.watch()
            time.sleep(NAP_S)

    def stop(self) -> None:
        self._link.stop()

    def _read_beats(self) -> list[bytes]:
        return _read(self._store, [f"beat/{rank}" for rank in range(self.size)])


class _Link:
    """All traffic with the store, in order, on one thread. An error is raised at the next call."""

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._asked: dict[str, tuple[Future[Any], float]] = {}
        self._busy_since: float | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="minitlt-store", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._busy_since = self._clock()
            try:
                job[1].set_result(job[0]())
            except Exception as error:  # raised in the caller's thread, by _check
                self._error = error
                job[1].set_result(None)
            self._busy_since = None

    def _check(self) -> None:
        since = self._busy_since
        if self._error is not None:
            message = "the process group's store cannot be reached; its rank has probably ended"
            raise RuntimeError(f"{message} ({self._error})") from self._error
        if since is not None and self._clock() - since > self._limit_s:
            raise RuntimeError(f"the process group's store is silent for over {self._limit_s} s")

    def post(self, function: Callable[[], Any]) -> None:
        """Runs `function` when its turn comes."""
        self._check()
        self._jobs.put((function, Future()))

    def ask(
        self, name: str, function: Callable[[], Any], patience_s: float
    ) -> tuple[Any, float] | None:
        """The answer and when it was asked for; None while it is under way (ask again).

        Only the first to ask waits, so a slow store costs `patience_s` per answer, not per call.
        """
        self._check()
        if is_new := name not in self._asked:
            self._asked[name] = (Future(), self._clock())
            self._jobs.put((function, self._asked[name][0]))
        future, since = self._asked[name]
        try:
            answer = future.result(timeout=patience_s if is_new else 0.0)
        except TimeoutError:
            return None
        del self._asked[name]
        self._check()
        return answer, since

    def call(self, function: Callable[[], Any]) -> Any:
        """The answer, waited for as long as a rank may be silent."""
        if (answer := self.ask("call", function, self._limit_s)) is None:
            raise RuntimeError(f"the process group's store is silent for over {self._limit_s} s")
        return answer[0]

    def stop(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)  # a store that hangs is left to its daemon thread


def _read(store: dist.Store, keys: list[str]) -> list[bytes]:
    """The values of keys, b"" for those not set; never waits for one to be set."""
    if store.check(keys):
        return list(store.multi_get(keys))
    return [store.get(key) if store.check([key]) else b"" for key in keys]


def _state(beat: bytes) -> tuple[str, int]:
    state, step, _ = (beat.decode() or "unknown -1 0").split()
    return state, int(step)
