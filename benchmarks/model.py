"""What the GPU recipes should take: modelled from sizes and a machine's two rates, not run.

    python benchmarks/model.py [--bandwidth 3.35 --tflops 989] [--accept 2.0] [RECIPE ..]

For somebody who wants to know whether a recipe is minutes or days before renting the machine. Rows
decode together, as in `minitlt simulate`, but a token of depth costs what the machine says:

    plain    HOST + max(bytes / (READ * bandwidth), flops / (MATH * peak)), where bytes are the
             weights once and the keys and values of the active rows, flops 2 per weight and row
    verify   the same with DRAFTS + 1 tokens a row, and for each draft DRAFT_HOST and the bytes of
             twice a layer; it yields --accept tokens a row. The cheaper of both counts.
    update   5 forwards (for logprobs, forward, again for checkpointing, two for the gradients; 4
             with LoRA, whose weights have none) of rows * longest tokens, 2 flops per weight and
             2 * layers * width * longest for attention, at MATH of the peak
    harvest  one rank: inline_fraction of the rollout; several: what they wait for the last one

Lengths are lognormal (LENGTHS: median and sigma) and cut at the recipe's cap; the means are over
DRAWS steps. All capitals are guesses. Left out: rewards, prefill, weights gathered by FSDP and
copied to the engine, checkpoints, lengths and acceptance that change while the policy learns.
Expect to be off by a factor of two. A run says more: `minitlt simulate RUN`.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from _machine import parser as options_of

from minitlt.config import load_config, recipe_paths
from minitlt.report import number
from minitlt.simulate import depth_by_rows

READ, MATH = 0.6, 0.35  # parts of the peak rates that are reached
HOST, DRAFT_HOST = 6e-3, 1e-3  # seconds of the host per forward and per draft
DRAFTS, DRAFTER_MS = 4, 50.0  # of an arm; of a drafter step on a GPU
DRAWS = 200


@dataclass
class Model:
    """weights: read per forward (input embeddings are not); kv: bytes of one token."""

    weights: float
    layers: int
    width: int
    kv: int


MODELS = {
    "Qwen/Qwen2.5-0.5B-Instruct": Model(0.49e9, 24, 896, 24 * 2 * 2 * 64 * 2),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Model(1.54e9, 28, 1536, 28 * 2 * 2 * 128 * 2),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Model(7.07e9, 28, 3584, 28 * 2 * 4 * 128 * 2),
}
MACHINES = {"02": (1.0, 165), "03": (1.0, 165), "04": (3.35, 989), "05": (4.8, 989),
            "06": (4.8, 989)}  # recipe -> TB/s and dense bf16 TFLOP/s of its GPU  # fmt: skip
LENGTHS = {"gsm8k": (200, 0.5), "hub:agentica-org/DeepScaleR-Preview-Dataset": (4500, 0.8)}


@dataclass
class Machine:
    """Its peak rates, in bytes and flops per second."""

    bandwidth: float
    peak: float

    def forward(self, model: Model, rows: int, depth: float, tokens: int = 1) -> float:
        """Seconds of a forward of `tokens` tokens for each of `rows` rows of length `depth`."""
        read = (2 * model.weights + rows * depth * model.kv) / (READ * self.bandwidth)
        return HOST + max(read, 2 * model.weights * rows * tokens / (MATH * self.peak))

    def token(self, model: Model, rows: int, depth: float, accept: float) -> tuple[float, float]:
        """Seconds per token of depth, (plain, with drafts where they pay)."""
        plain = self.forward(model, rows, depth)
        layer = 2 * model.weights / model.layers / (READ * self.bandwidth)
        drafts = DRAFTS * (DRAFT_HOST + 2 * layer)
        return plain, min(plain, (self.forward(model, rows, depth, DRAFTS + 1) + drafts) / accept)

    def rollout(self, model: Model, lengths: Sequence[int], accept: float) -> tuple[float, float]:
        """Seconds of a rank's rollout, (plain, with drafts)."""
        plain = drafted = depth = 0.0
        for rows, tokens in depth_by_rows(lengths, len(lengths)).items():
            each = self.token(model, rows, depth + tokens / 2, accept)
            plain, drafted = plain + tokens * each[0], drafted + tokens * each[1]
            depth += tokens
        return plain, drafted

    def update(self, model: Model, rows: int, longest: int, passes: int) -> float:
        """Seconds of the policy's update on one rank, padded to the longest row."""
        a_token = 2 * model.weights + 2 * model.layers * model.width * longest
        return passes * rows * longest * a_token / (MATH * self.peak)


@dataclass
class Expected:
    """Means of a step, in seconds; idle is summed over the ranks."""

    plain: float
    tlt: float
    rollout: float
    idle: float
    minutes: float
    drafter_steps: float

    def __str__(self) -> str:
        plain, tlt, idle = (number(s, 2) for s in (self.plain, self.tlt, self.idle))
        return (
            f"a step {plain} s plain, {tlt} s with drafts ({self.plain / self.tlt:.2f} x), of the "
            f"plain one {self.rollout / self.plain:.0%} rollout"
            + f"; {idle} s idle over all ranks" * bool(self.idle)
            + f"; {number(self.drafter_steps, 1)} drafter steps in it"
        )


def expect(name: str, machine: Machine, accept: float) -> Expected:
    """What the recipe should take on GPUs of this kind."""
    config = load_config(recipe_paths()[name])
    trl, rng = config.trl, random.Random(0)
    model, (median, sigma) = MODELS[trl["model_name_or_path"]], LENGTHS[config.task["name"]]
    rows = trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"]
    alone = config.spot["inline_fraction"] if config.nproc == 1 else 0.0

    def length() -> int:
        drawn = median * rng.lognormvariate(0.0, sigma)
        return max(1, min(trl["max_completion_length"], round(drawn)))

    steps = []
    for _ in range(DRAWS):
        ranks = [[length() for _ in range(rows)] for _ in range(config.nproc)]
        plain, drafted = zip(*(machine.rollout(model, r, accept) for r in ranks), strict=True)
        update = machine.update(model, rows, max(map(max, ranks)), 4 if trl.get("use_peft") else 5)
        idle = sum(max(drafted) - seconds for seconds in drafted)
        learning = idle + alone * max(drafted)
        steps.append((max(plain) + update, max(drafted) * (1 + alone) + update, max(plain), idle,
                      learning * 1000 / DRAFTER_MS))  # fmt: skip
    plain_s, tlt_s, rollout_s, idle_s, learnt = map(mean, zip(*steps, strict=True))
    return Expected(plain_s, tlt_s, rollout_s, idle_s, tlt_s * trl["max_steps"] / 60, learnt)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__file__, __doc__, "04_eight_gpus_math_1b5 --bandwidth 4.8 --accept 2.5")
    gpu = [name for name in recipe_paths() if name[:2] in MACHINES]
    parser.add_argument("recipes", nargs="*", default=gpu, metavar="RECIPE", help="default: 02..06")
    parser.add_argument("--bandwidth", type=float, help="TB/s; default: of the recipe's hardware")
    parser.add_argument("--tflops", type=float, help="dense bf16; default: the same")
    parser.add_argument("--accept", type=float, default=2.0, help="tokens per verify step and row")
    options = parser.parse_args(argv)
    if odd := set(options.recipes) - set(gpu):
        parser.error(f"{', '.join(sorted(odd))}: choose from {', '.join(gpu)}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    for name in options.recipes:
        bandwidth, tflops = MACHINES[name[:2]]
        machine = Machine((options.bandwidth or bandwidth) * 1e12,
                          (options.tflops or tflops) * 1e12)  # fmt: skip
        found = expect(name, machine, options.accept)
        print(f"{name}: {found.minutes:.0f} minutes; {found}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
