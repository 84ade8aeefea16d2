"""Write a synthetic but realistic run folder: long tails, an idle rank, a drafter that learns.

A small simulation of the rollout (rows that emit 1 to 5 tokens per verify step) decides every time
and count, so that the numbers in the log agree with each other as they do in a real run.

How to run: python tests/fake_run.py DIR [STEPS [RANKS]]
"""

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from minitlt.events import Event, EventLog, table

CAP = 256
ARMS = {"off": (0, 0.0), "ngram-3": (3, 0.8), "eagle-3": (3, 1.0), "eagle-5": (5, 1.0)}
HOSTILE = '<script>alert("x")</script> & <img src="http://example.com/a.png"> "tags"'
WORDS = ["the", "sum", "of", "12", "and", "7", "is", "19", "so", "first", "add", "carry", "digit"]


def check_event(event: Event) -> list[str]:
    """Say how `event` departs from metrics.md: unknown event, unknown field, missing field."""
    name = event.get("event", "")
    known = table(name)
    if not known:
        return [f"unknown event {name!r}"]
    found = set(event) - {"t", "rank", "event", "nonfinite"}
    required = {field for field, (text,) in known.items() if not text.startswith("optional")}
    unknown = [f"{name}: unknown field {field!r}" for field in sorted(found - set(known))]
    return unknown + [f"{name}: field {field!r} is missing" for field in sorted(required - found)]


class Clock:
    """A clock that the simulation moves."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def write_fake_run(
    run_dir: Path,
    steps: int = 12,
    ranks: int = 2,
    seed: int = 0,
    speculative: bool = True,
    summary: bool = True,
) -> Path:
    """Fill `run_dir` with an events.jsonl; returns its path. `speculative=False`: a plain run."""
    rng = random.Random(seed)
    clock = Clock(1_700_000_000.0)
    path = run_dir / "events.jsonl"
    logs = [EventLog(path, rank, clock) for rank in range(ranks)]
    logs[0].write(
        "run",
        config={
            "model": "SmolLM2-135M-Instruct",
            "task": "chain_sum",
            "num_generations": 8,
            "max_completion_length": CAP,
            "learning_rate": 2e-6,
            "spot": {"mode": "store" if speculative else "off"},
            "seed": seed,
        },
        versions={"minitlt": "0.1.0", "torch": "2.13.0", "trl": "1.16.0"},
        world_size=ranks,
        arms_served=list(ARMS),
        target={
            "name": "SmolLM2-135M",
            "layers": 30,
            "backend": "fused",
            "dtype": "float32",
            "decoder": "packed",
        },
        machine={"cpus": 2, "device": "cpu"},
    )
    logs[0].write("note", message="hidden states are taken after layers 2, 15 and 27")
    clock.now += 8.0
    fake = _Fake(rng, clock, logs, speculative)
    for step in range(1, steps + 1):
        fake.train_step(step, (step - 1) / max(steps - 1, 1))
    logs[0].write("guard", name="short rows", count=2, message="2 rows had an empty prompt tail")
    if summary:
        logs[0].write("summary", **_summary(path, speculative))
    for log in logs:
        log.close()
    # The simulation writes rank after rank; in a real log the ranks' lines are interleaved.
    lines = sorted(path.read_bytes().splitlines(), key=lambda line: json.loads(line)["t"])
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def _summary(path: Path, speculative: bool) -> dict[str, Any]:
    from minitlt.events import read_events
    from minitlt.report import summarize

    measured = {"tok_s_plain": 88.4, "tok_s_spec": 171.2, "token_mismatches": 0}
    return summarize(read_events(path)) | (measured if speculative else {})


class _Fake:
    def __init__(
        self, rng: random.Random, clock: Clock, logs: list[EventLog], speculative: bool
    ) -> None:
        self.rng, self.clock, self.logs, self.speculative = rng, clock, logs, speculative
        self.version = 0
        self.loss = 5.6

    def train_step(self, step: int, progress: float) -> None:
        """Write one step; `progress` runs from 0 to 1 over the run."""
        start, rng = self.clock.now, self.rng
        skill = 0.15 + 0.55 * (1 - math.exp(-3.0 * progress)) if self.speculative else 0.0
        ends = [self.rollout(rank, start, step, skill) for rank in range(len(self.logs))]
        close = max(end for end, _ in ends)
        window_steps = [
            self.harvest(rank, end, close, step) if self.speculative else 0
            for rank, (end, _) in enumerate(ends)
        ]
        if self.speculative:
            for rank, (end, _) in enumerate(ends):
                self.clock.now = close + 0.25
                self.logs[rank].write(
                    "merge",
                    step=step,
                    seconds=0.18,
                    steps_by_rank=window_steps,
                    fingerprint=f"{step:08x}",
                    wait_s=close - end if end == close else 0.03,
                )
        merged = close + 0.25
        lengths = [length for _, rows in ends for length in rows]
        reward = 0.08 + 0.55 / (1 + math.exp(-9 * (progress - 0.5))) + rng.gauss(0, 0.03)
        self.clock.now = merged + 0.4
        for row in range(2):
            self.row(step, row, reward, skill)
        self.clock.now = merged + rng.uniform(3.4, 4.2)
        self.logs[0].write(
            "update",
            step=step,
            seconds=self.clock.now - merged,
            reward=reward,
            reward_std=0.3,
            loss=rng.gauss(0, 0.02),
            grad_norm=rng.uniform(0.4, 1.1),
            mean_length=sum(lengths) / len(lengths),
            kl=0.002 * step,
            entropy=1.4 - 0.5 * progress,
            step_seconds=self.clock.now - start,
        )
        self.clock.now += 0.1

    def rollout(self, rank: int, start: float, step: int, skill: float) -> tuple[float, list[int]]:
        """Simulate one rank's rollout; returns when it ended and the lengths of its rows."""
        rng, log = self.rng, self.logs[rank]
        self.clock.now = start
        log.write("rollout_start", step=step, rows=16, version=step - 1)
        long = 5.0 if rank == step % len(self.logs) else 3.9
        lengths = [max(4, min(CAP, round(rng.lognormvariate(long, 0.7)))) for _ in range(16)]
        left = dict(enumerate(lengths))
        tokens = row_steps = forwards = 0
        accepted, drafted, told = [0] * 5, [0] * 5, (start, 0, 0)
        nothing = {"steps": 0, "row_steps": 0, "tokens": 0, "seconds": 0.0}
        arms = {name: dict(nothing) for name in ARMS}
        by_rows: dict[str, dict[str, dict[str, float]]] = {}
        trace, arm = [[0.0, 16]], "off"
        while left:
            if forwards % 16 == 0 and self.speculative:
                best = "eagle-5" if skill > 0.5 else "eagle-3" if skill > 0.3 else "ngram-3"
                arm = rng.choice(list(ARMS)) if rng.random() < 0.25 else best
            depth, factor = ARMS[arm]
            if arm.startswith("ngram"):
                factor = 0.28 / skill
            emitted, rows = 0, len(left)
            for row in list(left):
                hits = 0
                while hits < depth and rng.random() < min(0.9, skill * factor) * 0.94**hits:
                    hits += 1
                for i in range(hits):
                    accepted[i] += 1
                for i in range(depth):
                    drafted[i] += 1
                count = min(hits + 1, left[row])
                emitted, row_steps = emitted + count, row_steps + 1
                left[row] -= count
                if left[row] == 0:
                    del left[row]
                    trace.append([self.clock.now - start, len(left)])
            seconds = 0.030 + 0.0042 * len(left) * (1 + 0.22 * depth)
            self.clock.now += seconds
            forwards, tokens = forwards + 1, tokens + emitted
            here = by_rows.setdefault(str(1 << rows.bit_length() - 1), {})
            here.setdefault(arm, dict(nothing))
            cost = {"steps": 1, "row_steps": rows, "tokens": emitted, "seconds": seconds}
            for key, value in cost.items():
                arms[arm][key] += value
                here[arm][key] += value
            if self.clock.now - told[0] >= 1.0:
                log.write(
                    "rollout_progress",
                    step=step,
                    active=len(left),
                    done=16 - len(left),
                    tokens=tokens,
                    seconds=self.clock.now - start,
                    tok_s=(tokens - told[1]) / (self.clock.now - told[0]),
                    accept_len=(tokens - told[1]) / max(1, row_steps - told[2]),
                    arm=arm,
                )
                told = (self.clock.now, tokens, row_steps)
        log.write(
            "rollout_end",
            step=step,
            seconds=self.clock.now - start,
            rows=16,
            tokens=tokens,
            verify_steps=forwards,
            accept_len=tokens / row_steps,
            accept_by_position=[hit / n for hit, n in zip(accepted, drafted, strict=True) if n],
            drafts_by_position=[n for n in drafted if n],
            lengths=lengths,
            digest=f"{sum(lengths):016x}",
            truncated=sum(length == CAP for length in lengths),
            arms={name: counts for name, counts in arms.items() if counts["steps"]},
            arms_by_rows=by_rows,
            drafter_version=self.version,
            active_trace=trace,
        )
        return self.clock.now, lengths

    def harvest(self, rank: int, end: float, close: float, step: int) -> int:
        """The idle window of one rank; returns its drafter steps."""
        if end == close:
            return 0
        log, rng = self.logs[rank], self.rng
        self.clock.now, count, published, first = end + 0.05, 0, end, self.loss
        log.write("harvest_start", step=step)
        while self.clock.now < close:
            self.clock.now += 0.07
            count += 1
            self.loss = 1.3 + (self.loss - 1.3) * 0.997 + rng.gauss(0, 0.004)
            if count % 4 == 1:
                log.write(
                    "harvest_step",
                    step=step,
                    n=count,
                    seconds=0.07,
                    loss=self.loss + rng.gauss(0, 0.12),
                    tokens=512,
                    acceptance=min(0.9, 1.2 / self.loss),
                )
            if self.clock.now - published > 2.0:
                self.version, published = self.version + 1, self.clock.now
                log.write(
                    "publish", step=step, version=self.version, seconds=0.004, bytes=4_200_000
                )
                straggler = self.logs[step % len(self.logs)]
                straggler.write(
                    "swap",
                    step=step,
                    version=self.version,
                    source_rank=rank,
                    seconds=0.002,
                    drafter_steps=count,
                )
                straggler.write(
                    "swap_result",
                    step=step,
                    version=self.version,
                    accept_before=1.8,
                    accept_after=1.95,
                    row_steps_before=120,
                    row_steps_after=80,
                )
        log.write(
            "harvest_end",
            step=step,
            available_s=close - end,
            harvested_s=min(close, self.clock.now) - end - 0.05,
            overshoot_s=max(0.0, self.clock.now - close),
            drafter_steps=count,
            tokens=512 * count,
            loss_first=first,
            loss_last=self.loss,
            buffer_tokens=2048 * step,
            step_p50_s=0.2,
            step_p95_s=0.23,
        )
        return count

    def row(self, step: int, row: int, reward: float, skill: float) -> None:
        rng = self.rng
        texts = [" " + rng.choice(WORDS) for _ in range(rng.randrange(30, 90))]
        if row == 0:
            texts[3:3] = [HOSTILE, "\n"]
        flags = [int(rng.random() < skill) or 2 * (rng.random() < 0.5) for _ in texts]
        self.logs[0].write(
            "row",
            step=step,
            row=row,
            prompt="What is 12 + 7? <b>Think</b>, then answer.",
            completion="".join(texts),
            reward=round(reward),
            token_flags=flags,
            token_texts=texts,
        )


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[2:4]]
    print(write_fake_run(Path(sys.argv[1]), *numbers))
