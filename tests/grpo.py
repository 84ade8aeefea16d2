"""A tiny GRPO run in this process, for tests of the trainer; also a rank of a two-rank run."""

import dataclasses
import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig

from minitlt import rl
from minitlt.config import RolloutConfig
from minitlt.eagle3 import DrafterConfig, save_drafter
from minitlt.events import EventLog
from minitlt.rl import MiniTLTTrainer
from minitlt.spot import SpotConfig

SHARED_PROMPTS = [[5 + i, 7, 9] for i in range(8)]  # drawn by one rank and by two
PROMPTS = ["count", "spell it", "add two and two", "say a"]


def reward_short(completions, **_):
    """Shorter is better, vowels are good: graded, so groups differ."""
    return [sum(c.count(v) for v in "aeiou") - 0.02 * len(c) for c in completions]


def make_trainer(model_dir, out_dir, *, rows=8, steps=3, length=24, arms=("off",), **extra):
    sizes = {"draft_vocab_size": 64, "pack_tokens": 64, "buffer_tokens": 4096}
    drafter = DrafterConfig(**sizes, start=str(extra.pop("start", "target")))
    ours = ("rollout", "log", "spot", "peft_config", "eval_dataset")
    given = {name: extra.pop(name) for name in ours if name in extra}
    args = GRPOConfig(
        output_dir=str(Path(out_dir) / "checkpoints"),
        use_cpu=extra.pop("use_cpu", True),
        bf16=extra.pop("bf16", False),
        max_steps=steps,
        per_device_train_batch_size=rows,
        num_generations=4,
        max_completion_length=length,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        beta=extra.pop("beta", 0.0),
        gradient_checkpointing=False,
        logging_steps=extra.pop("logging_steps", 1),
        save_strategy=extra.pop("save_strategy", "no"),
        report_to="none",
        seed=3,
        disable_tqdm=True,
        **extra,
    )
    return MiniTLTTrainer(
        model=str(model_dir),
        reward_funcs=[reward_short],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
        drafter=drafter,
        **{"rollout": RolloutConfig(arms=list(arms)), "spot": SpotConfig(mode="auto"), **given},
    )


def empty_drafter(*args, start=rl.start_drafter):
    """As under FSDP, where the model has no weights on this rank when its drafter is made."""
    drafter = start(*args)
    drafter.load_state_dict({k: torch.zeros_like(v) for k, v in drafter.state_dict().items()})
    return drafter


def train_on_a_rank(model_dir, out_dir):
    rank = int(os.environ["RANK"])
    log = EventLog(out_dir / "events.jsonl", rank)
    if rank:
        rl.start_drafter = empty_drafter
    trainer = make_trainer(
        model_dir, out_dir, rows=4, arms=("off", "eagle-2"), length=12, steps=4, log=log
    )
    trainer.model.train()
    shard = SHARED_PROMPTS[rank * 4 : rank * 4 + 4]
    drawn, _ = trainer._generate_single_turn(shard, None, {}, 4)
    if rank == 0:  # this rank's rows are many times longer: it is the straggler
        trainer.sampling = dataclasses.replace(
            trainer.sampling, max_new_tokens=140, min_new_tokens=120
        )
    trainer.train()
    save_drafter(out_dir / f"drafter{rank}", trainer.speculation.drafter)
    (out_dir / f"rank{rank}.json").write_text(json.dumps(drawn))
    trainer.speculation.spot.close()
    trainer.accelerator.end_training()
