"""Whole GRPO steps: plain, with TLT, and stock TRL, on one task with one set of sizes.

    python benchmarks/step.py [RECIPE] [--steps 4] [--nproc 2] [--drafter DIR] [--any_field ..]

What is compared, each in processes of its own, with the recipe's model, data, seed and sizes:

    plain    our engine without drafts: rollout.arms [off], spot.mode off
    tlt      our engine as the recipe says: drafts, bandit, idle time harvested
    trl      TRL's GRPOTrainer with its own `generate`
    trl_cb   the same with use_transformers_continuous_batching, its cache and its batch bounded to
             what the rows need: by default each rank takes half of the memory, as for a GPU

plain and tlt draw with the same keys, so their completions are the same: that is asserted token by
token for every step, and their ratio has no length noise. TRL draws other completions of the same
law, so against it the rate counts: completion tokens per second.

A step is split along the slowest rank: rollout (until the last rank has its last token), harvest
(what idle windows, merge and bookkeeping add to that), reward, and the rest, which is the policy's
update. The first step pays for warming up and is left out of the medians. --drafter starts the
drafter of tlt from a folder (`minitlt warmup`) or a name (`smollm2`); without it it starts cold.

One JSON line per arm goes to runs/ (or --out, as the committed ones did); the last line printed is
a summary that names the parts where tlt did not help. The run log of an arm is in --keep DIR/ARM,
to be drawn by `minitlt report`. Timings mean nothing while other work runs on the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from _machine import RUNS, about
from _machine import parser as options_of

ARMS = ("plain", "tlt", "trl", "trl_cb")
OVERRIDES = {"plain": {"rollout.arms": ["off"], "spot.mode": "off"}, "tlt": {}}
PARTS = ("rollout_s", "harvest_s", "reward_s", "update_s")


def main(argv: list[str] | None = None) -> int:
    options, fields = parse(argv)
    if options.rank:
        return run_rank(options.rank, Path(options.keep))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.keep or scratch)
        results = run_arms(folder, options, fields)
    same = {"plain", "tlt"} <= results.keys()
    if same and results["plain"]["digests"] != results["tlt"]["digests"]:
        print("plain and tlt drew different completions; that is a bug", file=sys.stderr)
        return 1
    facts = {"benchmark": "step", "recipe": options.recipe, **about()}
    lines = [json.dumps(facts | {"arm": arm} | result) for arm, result in results.items()]
    out = options.out or RUNS / f"step_cpu{options.nproc}.jsonl"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(json.dumps(facts | {"identical_rollouts": same or None} | conclude(results)))
    return 0


def run_arms(folder: Path, options: Any, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each arm measured. One of others that fails is left out, and that is said."""
    from minitlt.launch import RunFailed

    results = {}
    for arm in options.arms:
        try:
            results[arm] = run_arm(arm, folder / arm, options, fields)
        except RunFailed as error:
            if arm in OVERRIDES or len(options.arms) == 1:
                raise
            print(f"{arm} is left out: {error}", file=sys.stderr, flush=True)
    return results


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Own options, and whatever else is given as overrides of the recipe."""
    parser = options_of(__file__, __doc__, "--steps 2 --drafter smollm2 --learning_rate 1e-5")
    parser.add_argument("recipe", nargs="?", default="01_smollm2_cpu", help="recipe or file")
    parser.add_argument("--steps", type=int, default=4, help="of each arm, the first not counted")
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--drafter", default="", help="where tlt's drafter starts: smollm2, DIR")
    parser.add_argument("--keep", type=Path, help="folder for the arms' run logs")
    parser.add_argument("--out", type=Path, help="default: a file in runs/")
    parser.add_argument("--rank", choices=ARMS, help=argparse.SUPPRESS)  # of a process we start
    options, rest = parser.parse_known_args(argv)
    from minitlt.config import parse_overrides

    if options.steps < 2:
        parser.error("--steps must be at least 2: the first is not counted")
    return options, parse_overrides(rest)


def run_arm(arm: str, folder: Path, options: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Runs the ranks of one arm and combines what they measured."""
    from minitlt.config import find_recipe, load_config
    from minitlt.launch import launch, open_run_folder

    own = OVERRIDES.get(arm, {})
    if arm == "tlt" and options.drafter:
        own = {"drafter.start": options.drafter}
    always = {"max_steps": options.steps, "nproc": options.nproc, "save_strategy": "no"}
    path = Path(options.recipe)
    config = load_config(path if path.is_file() else find_recipe(str(path)),
                         {**fields, **always, **own})  # fmt: skip
    open_run_folder(folder, config.as_yaml())
    command = [sys.executable, __file__, "--rank", arm, "--keep", str(folder)]
    print(f"{arm}: {options.steps} steps on {options.nproc} ranks", flush=True)
    launch(command, folder, options.nproc, options.steps)
    ranks = [json.loads((folder / f"rank{i}.json").read_text()) for i in range(options.nproc)]
    steps = [combine(step) for step in zip(*(rank["steps"] for rank in ranks), strict=True)]
    counted = steps[1:]
    middle = {name: median(step[name] for step in counted) for name in ("step_s", *PARTS)}
    rate = sum(s["tokens"] for s in counted) / sum(s["rollout_s"] for s in counted)
    print(f"{arm}: " + ", ".join(f"{k} {v:.2f}" for k, v in middle.items()) + f", {rate:.1f} tok/s",
          flush=True)  # fmt: skip
    return {
        "seed": ranks[0]["seed"], "nproc": options.nproc, "median": middle, "rollout_tok_s": rate,
        "drafter": (options.drafter or "cold") if arm == "tlt" else None,
        "steps": [{k: v for k, v in step.items() if k != "digests"} for step in steps],
        "digests": [step["digests"] for step in steps],
    }  # fmt: skip


def combine(ranks: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """One step of all ranks, along the slowest: see the module's docstring."""
    rollout = max(rank["generate_s"] for rank in ranks)
    harvest = max(rank["generate_s"] + rank["window_s"] for rank in ranks) - rollout
    reward, step = max(rank["reward_s"] for rank in ranks), max(rank["step_s"] for rank in ranks)
    return {
        "step_s": step, "rollout_s": rollout, "harvest_s": harvest, "reward_s": reward,
        "update_s": step - rollout - harvest - reward,
        "idle_s": sum(rollout - rank["generate_s"] for rank in ranks),
        "tokens": sum(rank["tokens"] for rank in ranks),
        "digests": [rank["digest"] for rank in ranks],
    }  # fmt: skip


def conclude(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios over the medians, and where they say that tlt does not help."""
    said: dict[str, Any] = {"median": {arm: r["median"] for arm, r in results.items()}}
    said["rollout_tok_s"] = {arm: round(r["rollout_tok_s"], 1) for arm, r in results.items()}
    if "tlt" not in results:
        return said
    tlt, against = results["tlt"], {}
    for arm, other in results.items():
        if arm != "tlt":
            against[arm] = {
                "rollout_rate": tlt["rollout_tok_s"] / other["rollout_tok_s"],
                "step": other["median"]["step_s"] / tlt["median"]["step_s"],
            }
    said["tlt_over"] = against
    share = tlt["median"]["rollout_s"] / tlt["median"]["step_s"]
    unhelpful = [f"rollout is only {share:.0%} of a step; the rest is not touched"] * (share < 0.6)
    for arm, ratios in against.items():
        unhelpful += [f"{name} over {arm}: {r:.2f} x" for name, r in ratios.items() if r < 1.02]
    return said | {"does_not_help": unhelpful}


def run_rank(arm: str, folder: Path) -> int:
    """One rank of one arm, in its own process: trains and writes rankN.json."""
    from transformers import TrainerCallback

    from minitlt.config import load_config
    from minitlt.events import EventLog
    from minitlt.run import _make_trainer, _write_run_event, prepare

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    prepared = prepare(load_config(folder / "config.yaml"), folder, world)
    clock = Clock()
    if arm in OVERRIDES:
        log = EventLog(folder / "events.jsonl", rank)
        trainer: Any = _make_trainer(prepared, log)
        if rank == 0:
            _write_run_event(log, prepared, trainer)
        spot = trainer.speculation.spot
        spot.harvest = clock.measured("window_s", spot.harvest)
        spot.inline = clock.measured("window_s", spot.inline)
    else:
        trainer = stock_trainer(prepared, continuous=arm == "trl_cb")
    trainer._generate_single_turn = clock.generation(trainer._generate_single_turn)
    trainer._calculate_rewards = clock.measured("reward_s", trainer._calculate_rewards)

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end()

    trainer.add_callback(Steps())
    trainer.train()
    if arm in OVERRIDES:
        trainer.speculation.spot.close()
    result = {"seed": prepared.args.seed, "steps": clock.steps}
    (folder / f"rank{rank}.json").write_text(json.dumps(result), encoding="utf-8")
    trainer.accelerator.end_training()
    return 0


def stock_trainer(prepared: Any, continuous: bool) -> Any:
    """TRL's GRPOTrainer with what MiniTLTTrainer would get."""
    from trl import GRPOTrainer, get_peft_config

    args, model = prepared.args, prepared.model
    args.model_init_kwargs = {"dtype": model.dtype, "attn_implementation": "sdpa"}
    args.reward_weights = args.reward_weights or prepared.task.reward_weights
    if continuous:
        rows = args.per_device_train_batch_size * args.steps_per_generation
        pages = rows * (2 + args.max_completion_length // 256)  # of 256 tokens each
        args.use_transformers_continuous_batching = True
        args.transformers_continuous_batching_config = {
            "num_blocks": pages, "max_batch_tokens": 1024, "max_requests_per_batch": rows
        }  # fmt: skip
    return GRPOTrainer(
        model=prepared.model_path,
        reward_funcs=list(prepared.task.reward_funcs),
        args=args,
        train_dataset=prepared.task.dataset,
        peft_config=get_peft_config(model),
    )


class Clock:
    """Seconds of a step's parts on this rank, and a hash of what it generated."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.now: dict[str, Any] = {}

    def begin(self) -> None:
        self.now = dict.fromkeys(("generate_s", "window_s", "reward_s"), 0.0)
        self.now |= {"tokens": 0, "digest": "", "step_s": time.perf_counter()}

    def end(self) -> None:
        self.now["step_s"] = time.perf_counter() - self.now["step_s"]
        self.now["generate_s"] -= self.now["window_s"]  # the window is inside the method
        self.steps.append(self.now)

    def measured(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.now[part] += time.perf_counter() - start

        return call

    def generation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        timed = self.measured("generate_s", function)

        def call(*args: Any, **kwargs: Any) -> Any:
            completions, logprobs = timed(*args, **kwargs)
            ids = [list(map(int, row)) for row in completions]
            self.now["tokens"] += sum(map(len, ids))
            text = self.now["digest"] + json.dumps(ids)
            self.now["digest"] = hashlib.sha256(text.encode()).hexdigest()
            return completions, logprobs

        return call


if __name__ == "__main__":
    sys.exit(main())
