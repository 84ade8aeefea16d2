"""One rank of lesson 6: rollouts of a toy, the library's idle-time training, a run log.

Rank 0 gets the long stories and is the straggler; rank 1 gets the short ones. Every pass of either
is stretched by PASS_SECONDS, about what a model a hundred times larger would need; the processor is
free meanwhile, as it would be if each rank had its own.

Started by the lesson, once per rank: RANK=0 .. python two_ranks.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from toy import STOP, load_model, prompt

from minitlt.distill import DrafterTrainer, ReplayBuffer
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter
from minitlt.events import EventLog
from minitlt.kernels import row_key
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.spot import SpotConfig, SpotTrainer
from minitlt.target import make_target

PASS_SECONDS = 0.02
NUM_STEPS = 3
STORIES = {0: [9, 9, 9, 8], 1: [1, 2, 2, 3] * 4}  # sentences per row


class Diary:
    """Runs between two passes: stretches them, looks for a fresher drafter, notes the progress."""

    def __init__(self, log: EventLog, spot: SpotTrainer, proposer: Eagle3Proposer) -> None:
        self.log, self.spot, self.proposer = log, spot, proposer
        self.step = self.tokens = self.row_steps = 0

    def between_passes(self, engine: RolloutEngine) -> None:
        time.sleep(PASS_SECONDS)
        if self.spot.poll():
            self.proposer.reload()
        stats = engine.stats
        if stats.verify_steps % 10 == 0:
            tokens = stats.step_tokens - self.tokens
            row_steps = stats.row_steps - self.row_steps
            self.log.write(
                "rollout_progress", step=self.step, accept_len=tokens / row_steps, tokens=tokens
            )
            self.tokens, self.row_steps = stats.step_tokens, stats.row_steps

    def open(self, step: int) -> None:
        self.step, self.tokens, self.row_steps = step, 0, 0


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    store = dist.distributed_c10d._get_default_store()
    log = EventLog(folder / "events.jsonl", rank)
    model = load_model()
    target = make_target(model)
    settings = DrafterConfig(
        draft_vocab_size=0, train_head=False, learning_rate=4e-3, pack_tokens=128,
        train_dtype="float32",
    )  # fmt: skip
    drafter = Eagle3Drafter(Eagle3Config.from_target(model.config, settings))
    drafter.tie(target.embed_weight, target.head_weight)
    buffer = ReplayBuffer(settings, vocab_size=drafter.config.vocab_size)
    proposer = Eagle3Proposer(drafter, settings, buffer=buffer)
    trainer = DrafterTrainer(drafter, buffer, settings)
    spot = SpotTrainer(trainer, store, rank, 2, SpotConfig(publish_seconds=1.0), log)
    diary = Diary(log, spot, proposer)
    bandit = Bandit([Arm(proposer.name, depth=3)])
    engine = RolloutEngine(target, [proposer], bandit, on_step=diary.between_passes)
    params = SamplingParams(max_new_tokens=300, stop_ids=(STOP,))
    prompts = [prompt(sentences) for sentences in STORIES[rank]]
    dist.barrier()
    for step in range(1, NUM_STEPS + 1):
        diary.open(step)
        spot.begin(step)
        log.write("rollout_start", step=step, rows=len(prompts), version=trainer.version)
        keys = [row_key(0, step, rank * len(prompts) + i) for i in range(len(prompts))]
        rollout = engine.generate(prompts, params, keys)
        stats = rollout.stats
        sums = {"tokens": stats.tokens, "verify_steps": stats.verify_steps}
        log.write("rollout_end", step=step, accept_len=stats.accept_length, **sums)
        spot.harvest(step)
        buffer.next_step()
        proposer.reload()
    spot.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
