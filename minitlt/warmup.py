"""A drafter before RL begins, trained on what the untrained policy writes.

The idea. A drafter that starts from nothing needs some steps of RL before it pays. The same data is
there before: rounds of generation on the task's own prompts, with the recipe's own sampling, each
followed by as many seconds of training on what it generated. The drafter drafts from its second
round on, so generation gets faster as it learns; learning rates fall to the end. It is saved (in
int8) after every round; what was saved begins RL with `drafter.start: FOLDER`, or another warm-up.
`drafters/smollm2`, which comes with the package, is such a folder.

Left out: several ranks (generation and training take turns on one device), prompts of other tasks.

How to run: `minitlt warmup 07_smollm2_warmup --seconds 2700 --out drafters/smollm2`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minitlt.distill import DrafterTrainer
from minitlt.eagle3 import save_drafter
from minitlt.kernels import row_key
from minitlt.rl import Speculation, build_speculation
from minitlt.run import Prepared, hub_dataset, planned_sampling
from minitlt.serve import stop_tokens
from minitlt.spec import SamplingParams
from minitlt.spot import SpotConfig
from minitlt.tasks import encode_prompt

_WARMUP_GENERATION = 1 << 42  # keys of warm-up rollouts, never used by training
_WIDER = 8  # rows of a round per row of a rank's rollout: no backward of the policy needs memory
_SIBLINGS = 4  # completions of each prompt: on a CPU its prefill costs as much as one of them


def run_warmup(prepared: Prepared, folder: Path, seconds: float, steps: int = 0) -> None:
    """`minitlt warmup`: model, prompts, sampling and drafter of a recipe, in one process."""
    args, path = prepared.args, prepared.model_path
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {str(folder)!r} is a file; choose a folder")
    on_cpu = args.use_cpu or not torch.cuda.is_available()
    device = torch.device("cpu" if on_cpu else "cuda")
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=prepared.model.dtype, trust_remote_code=False, use_safetensors=True
    ).to(device)
    parts = build_speculation(
        model,
        prepared.rollout,
        prepared.drafter,
        SpotConfig(mode="off"),
        device=device,
        trains_in=model.dtype,
        mixed="bf16" if args.bf16 else "no",
        seed=args.seed,
    )
    rows = (
        prepared.task.rows
        if prepared.task
        else hub_dataset(prepared, prepared.script.dataset_train_split)
    )
    params = planned_sampling(prepared, eos_token_id=stop_tokens(model, tokenizer))
    warm_up(
        parts,
        [encode_prompt(tokenizer, row["prompt"]) for row in rows],
        params,
        folder,
        rows=_WIDER * args.per_device_train_batch_size * args.steps_per_generation,
        seconds=seconds,
        steps=steps,
        seed=args.seed,
    )


def warm_up(
    parts: Speculation,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    folder: Path,
    *,
    rows: int,
    seconds: float,
    steps: int = 0,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> None:
    """Trains the drafter on completions of these prompts and saves it after every round.

    rows: completions per round, `_SIBLINGS` of each prompt. It ends after `seconds`, or after
    `steps` train steps if that is sooner; a round is not begun that would not leave time to train
    on it.
    """
    engine, trainer = parts.engine, parts.trainer
    if not engine.drafters:
        raise ValueError(
            "of rollout.arms only 'off' can draft here, so no drafter sees a rollout; add eagle-3"
        )
    started, round_seconds, num_round = time.monotonic(), 0.0, 0
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed)).tolist()
    steps, end = steps or sys.maxsize, started + seconds
    while trainer.version < steps and time.monotonic() + 2 * round_seconds < end:
        first = num_round * rows
        chosen = [prompts[order[(first + i) // _SIBLINGS % len(order)]] for i in range(rows)]
        keys = [row_key(seed, _WARMUP_GENERATION, first + i) for i in range(rows)]
        stats = engine.generate(chosen, params, keys).stats
        round_seconds, num_round = stats.seconds, num_round + 1
        trainer.refresh_vocab()
        until = time.monotonic() + round_seconds
        if end - until < 2 * round_seconds:  # no time for another round: train to the end
            until = end
        done = _train(trainer, until, steps, lambda: (end - time.monotonic()) / seconds)
        trainer.buffer.next_step()
        parts.proposer.reload()
        engine.bandit.renew(parts.proposer.name)
        save_drafter(folder, trainer.drafter, small=True)
        say(
            f"{time.monotonic() - started:.0f} s: round {num_round}, {stats.tokens} tokens, accept "
            f"length {stats.accept_length:.2f}; {trainer.version} train steps, acceptance there "
            + " ".join(f"{a:.2f}" for a in done.get("acceptance", []))
        )


def _train(
    trainer: DrafterTrainer, until: float, steps: int, left: Callable[[], float]
) -> dict[str, Any]:
    """Train steps until this time; what the last one said. The learning rates fall with the part
    of all time that is left."""
    done: dict[str, Any] = {}
    while time.monotonic() < until and trainer.version < steps:
        trainer.rate_scale = max(left(), 0.02)
        done = trainer.train_step()
        if not done["tokens"]:
            break
    return done
