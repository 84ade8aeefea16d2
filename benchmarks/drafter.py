"""The drafter and its idle time, measured on a run of the product.

    python benchmarks/drafter.py [--quick] [--steps 36] [--run DIR] [--parts log ..] [--out FILE]

1. `minitlt train` runs the default recipe: 2 ranks of one thread, SmolLM2, a drafter from nothing
   (--run takes a finished run instead; it must have checkpoints, one of its first half too). From
   its log alone: the part of the idle windows that was harvested, how long train steps outlived
   them, accept lengths before and after hot swaps, and the simulator's error (costs from the odd
   steps, replayed on the even).
2. Fresh rollouts of the final policy, the same for all, once with the run's drafter, once with the
   copy of it that was saved after a third of the run, once with n-grams: tokens must be equal.
3. Acceptance at position 1 on fresh tokens at T = 1: the coupled chain, eight children, and
   the optimum 1 - TV; of the run's drafter, of one that learns from nothing for 2 CPU-minutes
   on the rollouts in the run's own replay buffers, and of the shipped warm drafter, before and
   after the same minutes.
4. Two ranks decode fixed rows twice, with harvesting on and off: what it costs the straggler, and
   what a hot swap brings it: the accept length of the same tokens, those behind the first swap,
   with the drafter from before it and with the swaps. (In a run's log the rows behind a swap are
   others than those before it, and so are the arms: `log_accept_*` says little.)

The last line is one JSON object. What has been measured is kept in RUN/benchmark.json, so with
--run and --parts the rest can follow later. Timings (parts 1 and 4) mean nothing while other work
runs on the machine; 2 and 3 count tokens and CPU seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # for what is beside this file
from _machine import parser as options_of

Event = dict[str, Any]
DRAWS = 4  # noise draws per fresh position
CHILDREN = 8
TASK_SEED = 1001  # of fresh prompts; the recipe's are drawn with another
PAIR_TOKENS = 160  # of the straggler's rows in part 4
LAB = ["by_position", "best_tree", "cold", "warm", "storage", "packing"]
PARTS = ["log", "pair", *LAB]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__file__, __doc__, "--quick")
    parser.add_argument("--quick", action="store_true", help="few steps, few rows")
    parser.add_argument("--steps", type=int, default=0, help="RL steps; 0: 36, quick: 3")
    parser.add_argument("--run", type=Path, help="a finished run folder with checkpoints")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--model", default="smollm2-135m", help="a small one tries the script out")
    parser.add_argument("--out", type=Path, help="beside RUN/benchmark.json")
    parser.add_argument("--pair", type=Path, help=argparse.SUPPRESS)  # one rank of part 4
    options = parser.parse_args(argv)
    options.steps = options.steps or (3 if options.quick else 36)
    options.rows = 8 if options.quick else 48
    options.seconds = 10.0 if options.quick else 120.0
    options.rounds = 2 if options.quick else 6
    return options


if __name__ == "__main__":
    parse()  # before torch is loaded: --help is quick, and so is word of what is wrong

import torch  # noqa: E402


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.pair:
        return pair_rank(options)
    from minitlt.events import read_events
    from minitlt.page import render_report

    torch.set_num_threads(1)
    run = options.run or train(options)
    events, lab = read_events(run / "events.jsonl"), Lab(run, options)
    if "by_position" in options.parts:
        lab.frozen()  # says now what is missing, not after the parts before it
    measure = {
        "log": lambda: {"run": facts(events), **idle(events), **swaps(events), **simulator(events)},
        "pair": lambda: pair(options),
        **{name: getattr(lab, name) for name in LAB},
    }
    kept, text = run / "benchmark.json", "{}"
    for name in options.parts:
        values = measure[name]()
        print(name, json.dumps(values), flush=True)
        before = json.loads(kept.read_text()) if kept.exists() else {}  # others may add to it
        text = json.dumps({**before, **machine(options), **values})
        kept.write_text(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")
    render_report([run], run / "report.html")  # it shows what was measured
    print(text)
    return 0


def machine(options: argparse.Namespace) -> dict[str, Any]:
    import rollout

    facts = rollout.machine(argparse.Namespace(threads=1, new=0, repeats=1))
    return {name: facts[name] for name in ("commit", "versions", "machine")} | {
        "benchmark": "drafter",
        "ranks": 2,
        "steps": options.steps,
        "quick": options.quick,
        "seeds": {"run": 7, "fresh_task": TASK_SEED, "keys": 0, "drafter": 0},
    }


def train(options: argparse.Namespace) -> Path:
    """The run itself, through the command line; returns its folder."""
    folder = Path(tempfile.mkdtemp(prefix="drafter-bench-")) / "run"
    third = max(options.steps // 3, 1)
    command = [
        sys.executable, "-m", "minitlt", "train", "01_smollm2_cpu", "--run-dir", str(folder),
        "--nproc", "2", "--max_steps", str(options.steps), "--save_steps", str(third),
        "--save_total_limit", "9", "--save_only_model", "true",
        "--model_name_or_path", options.model,
    ]  # fmt: skip
    if options.quick:
        command += ["--max_completion_length", "48"]
    started = time.perf_counter()
    with open(folder.parent / "train.log", "w") as log:
        subprocess.run(command, check=True, stdout=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{' '.join(command[2:])}: {time.perf_counter() - started:.0f} s", flush=True)
    return folder


# From the log. Pure functions of its events.


def facts(events: list[Event]) -> dict[str, Any]:
    """What kind of run this was."""
    from minitlt.report import accept_pairs, ratio

    ends = [e for e in events if e["event"] == "rollout_end"]
    updates = [e for e in events if e["event"] == "update"]
    third = max(len(updates) // 3, 1)
    steps = sorted({e["step"] for e in ends})
    first, last = steps[:third], steps[-third:]

    def accept(which: list[int]) -> float | None:
        return ratio(accept_pairs(e for e in ends if e["step"] in which))

    return {
        "steps": len(updates),
        "tokens": sum(e["tokens"] for e in ends),
        "reward_first_third": mean(e["reward"] for e in updates[:third]),
        "reward_last_third": mean(e["reward"] for e in updates[-third:]),
        "accept_first_third": accept(first),
        "accept_last_third": accept(last),
        "step_seconds": mean(e["step_seconds"] for e in updates),
    }


def idle(events: list[Event]) -> dict[str, Any]:
    """Harvested over available seconds; overshoot over the length of a train step, median."""
    ends = [e for e in events if e["event"] == "harvest_end"]
    worked = [e for e in ends if e["drafter_steps"]]
    step_s = [(e["harvested_s"] + e["overshoot_s"]) / e["drafter_steps"] for e in worked]
    available = sum(e["available_s"] for e in ends)
    return {
        "harvest_fraction": sum(e["harvested_s"] for e in ends) / available if available else 0.0,
        "overshoot_over_step_median": median(
            e["overshoot_s"] / s for e, s in zip(worked, step_s, strict=True)
        ),
        "idle_available_s": available,
        "idle_harvested_s": sum(e["harvested_s"] for e in ends),
        "drafter_steps": sum(e["drafter_steps"] for e in ends),
        "drafter_step_seconds": mean(step_s),
    }


def swaps(events: list[Event]) -> dict[str, Any]:
    """Accept length of the straggler's verify steps before a hot swap and after it, summed over
    all swaps that have both; also how many there were and how long decoding paused."""
    results = [
        e for e in events
        if e["event"] == "swap_result" and e["row_steps_before"] and e["row_steps_after"]
    ]  # fmt: skip
    pauses = [e["seconds"] for e in events if e["event"] == "swap"]

    def accept(side: str) -> float:
        weights = [e[f"row_steps_{side}"] for e in results]
        values = [e[f"accept_{side}"] for e in results]
        return sum(w * v for w, v in zip(weights, values, strict=True)) / max(sum(weights), 1)

    return {
        "log_accept_before_swap": accept("before"),
        "log_accept_after_swap": accept("after"),
        "swaps": len(pauses),
        "swap_seconds": mean(pauses) if pauses else 0.0,
    }


def simulator(events: list[Event]) -> dict[str, Any]:
    """Out of sample: relative error of the mean step's seconds."""
    from minitlt.simulate import foretell, simulate

    told, seen = foretell(events)
    table = simulate(events, ranks=8, nodes=1) + simulate(events, ranks=8, nodes=8)
    return {"simulator_error": abs(told - seen) / seen, "simulated": table}


# On fresh tokens.


@torch.no_grad()
def acceptance(drafter: Any, rows: list[Any], children: int = CHILDREN) -> dict[str, float]:
    """Of the first draft at T = 1, over all response positions of these rows (with their taps).

    chain: the coupled chain's draft is the target's token. children: one of the best `children`
    drafts is. optimum: sum_v min(p, q), 1 - TV. coverage: the target's mass on the draft's tokens.
    """
    from minitlt.distill import Window, make_pack
    from minitlt.kernels import gumbel_topk, row_key

    head = drafter.target_head().float()
    sums, total = dict.fromkeys(("chain", "children", "optimum", "coverage"), 0.0), 0
    drafter.reserve_positions(max(row.num_tokens for row in rows) + 2)
    for index, row in enumerate(rows):
        start, stop = row.prompt_len - 1, row.num_tokens - 2  # pairs that hold a response token
        pack, hidden_JH, _ = make_pack([Window(row, 0, start, stop)], 1, head.device)
        logits_NV = drafter.logits(drafter.unroll(pack, 1)[0])
        target_NW = hidden_JH.float() @ head.T
        p_NV = target_NW.softmax(-1)[:, drafter.ids_V]
        sums["optimum"] += float(torch.minimum(p_NV, logits_NV.softmax(-1)).sum())
        sums["coverage"] += float(p_NV.sum())
        at_N, ones_N = torch.arange(start + 2, stop + 2), torch.ones(stop - start)
        for draw in range(DRAWS):
            keys_N = torch.full_like(at_N, row_key(0, draw, index))
            token_N1 = gumbel_topk(target_NW, keys_N, at_N, ones_N, 1)[0]
            drafts_Nk = gumbel_topk(logits_NV, keys_N, at_N, ones_N, children, drafter.ids_V)[0]
            hit_Nk = drafts_Nk == token_N1
            sums["chain"] += float(hit_Nk[:, 0].sum()) / DRAWS
            sums["children"] += float(hit_Nk.any(1).sum()) / DRAWS
        total += stop - start
    return {name: value / total for name, value in sums.items()} | {"tokens": total}


class Lab:
    """The run's final policy, its drafters, and fresh rows that none of them has seen."""

    def __init__(self, run: Path, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from minitlt.config import DEFAULT_RECIPE, find_recipe, load_config
        from minitlt.tasks import encode_prompt, load_task

        self.run, self.options = run, options
        self._fresh: list[Any] = []
        self.model = AutoModelForCausalLM.from_pretrained(run / "policy", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(run / "policy")
        self.stop = tokenizer.eos_token_id
        recipe = load_config(find_recipe(DEFAULT_RECIPE))
        task = {**recipe.task["options"], "seed": TASK_SEED, "size": 64}
        rows = load_task(recipe.task["name"], **task).rows
        self.prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows]

    @property
    def fresh(self) -> list[Any]:
        """Rows with taps that no drafter has seen."""
        self._fresh = self._fresh or self.rows_of(self.prompts[: self.options.rows])
        return self._fresh

    def parts(self, start: str, arms: list[str], **drafter: Any) -> Any:
        from minitlt.config import RolloutConfig
        from minitlt.eagle3 import DrafterConfig
        from minitlt.rl import build_speculation
        from minitlt.spot import SpotConfig

        return build_speculation(
            self.model,
            RolloutConfig(dtype="fp32", arms=arms),
            DrafterConfig(start=start, **{"buffer_tokens": 10**6, **drafter}),
            SpotConfig(mode="off"),
            device=torch.device("cpu"),
        )

    def params(self, tokens: int = 0) -> Any:
        from minitlt.spec import SamplingParams

        most = tokens or (48 if self.options.quick else 128)
        return SamplingParams(max_new_tokens=most, stop_ids=(self.stop,))

    def keys(self, num: int, generation: int) -> list[int]:
        from minitlt.kernels import row_key

        return [row_key(0, generation, i) for i in range(num)]

    def rows_of(self, prompts: list[list[int]]) -> list[Any]:
        """Completions of the policy with their taps, 32 rows at a time."""
        parts = self.parts("target", ["eagle-1"])  # with `off` alone no drafter is fed
        parts.engine.max_rows = 32
        parts.engine.generate(prompts, self.params(), self.keys(len(prompts), 1))
        return list(parts.trainer.buffer.rows)

    def checkpoint(self, which: int) -> Path:
        """Our part of a checkpoint, which is also a drafter's folder: 0 the newest, -1 the
        oldest."""
        from minitlt.run import checkpoints

        return checkpoints(self.run / "checkpoints")[which] / "minitlt"

    def frozen(self) -> Path:
        """The drafter's folder of a checkpoint in the run's first half. ValueError: there is none,
        as when a run has kept its last checkpoint only (save_total_limit)."""
        oldest, newest = (
            int(self.checkpoint(which).parent.name.rpartition("-")[2]) for which in (-1, 0)
        )
        if 2 * oldest > newest:
            raise ValueError(
                f"{self.run}: the oldest checkpoint is of step {oldest} of {newest}, so it is no "
                "frozen drafter; train with --save_steps and --save_total_limit that keep an "
                "early one, or leave out the part by_position"
            )
        return self.checkpoint(-1)

    def buffers(self) -> list[Any]:
        """The ranks' replay buffers at the end of the run."""
        from minitlt.distill import ReplayBuffer
        from minitlt.tensorfile import read_tensors

        buffers, name = [], "trainer.buffer."
        for path in sorted(self.checkpoint(0).glob("rank*.safetensors")):
            state = read_tensors(path)[0].items()
            buffers.append(ReplayBuffer(vocab_size=self.model.config.vocab_size))
            buffers[-1].load_state_dict(
                {n.removeprefix(name): t for n, t in state if n.startswith(name)}
            )
        return buffers

    def by_position(self) -> dict[str, Any]:
        """Identical fresh rollouts, one engine per drafter."""
        sources = {
            "adaptive": (str(self.run / "drafter"), "eagle-4"),
            "frozen": (str(self.frozen()), "eagle-4"),
            "ngram": ("target", "ngram-4"),
        }
        num = 8 if self.options.quick else 24
        # Groups of eight, as in training: n-grams live from siblings.
        prompts = [p for p in self.prompts[: num // 8] for _ in range(8)]
        positions: dict[str, list[float]] = {}
        lengths, texts = {}, []
        for name, (start, arm) in sources.items():
            engine = self.parts(start, [arm]).engine
            engine.max_rows = 8
            rollout = engine.generate(prompts, self.params(), self.keys(num, 2))
            positions[name] = rollout.stats.accept_by_position
            lengths[name] = rollout.stats.accept_length
            texts.append(rollout.completion_ids)
        assert texts[0] == texts[1] == texts[2], "the drafters' rollouts differ"
        return {"accept_by_position": positions, "accept_length": lengths}

    def best_tree(self) -> dict[str, Any]:
        """Accept length of the run's drafter at batch 1, by the tree's shape."""
        num = 2 if self.options.quick else 8
        found = {}
        for arm in ("eagle-4", "eagle-3x4b16", "eagle-4x8b40", "eagle-5x8b63"):
            engine = self.parts(str(self.run / "drafter"), [arm]).engine
            engine.max_rows = 1
            rollout = engine.generate(self.prompts[:num], self.params(), self.keys(num, 3))
            found[arm] = rollout.stats.accept_length
        return {"best_tree_accept_length": max(found.values()), "trees": found}

    def harvest(self, start: str) -> dict[str, Any]:
        """Trains a drafter on all that the run's replay buffers hold at its end, for `seconds` of
        CPU; its acceptance on fresh tokens before and after."""
        parts = self.parts(start, ["off"])
        trainer, buffer = parts.trainer, parts.trainer.buffer
        for one in self.buffers():
            for row in one.rows:
                buffer.add(row.tokens_L.tolist(), row.prompt_len, row.features_NF, row.hidden_NH)
        before = acceptance(parts.drafter, self.fresh)
        trainer.refresh_vocab()
        started = time.process_time()
        while time.process_time() - started < self.options.seconds:
            trainer.train_step()
        return {
            "start": before,
            **acceptance(parts.drafter, self.fresh),
            "cpu_seconds": self.options.seconds,
            "train_steps": trainer.version,
            "response_tokens": sum(r.num_tokens - r.prompt_len for r in buffer.rows),
        }

    def cold(self) -> dict[str, Any]:
        run = self.parts(str(self.run / "drafter"), ["off"]).drafter
        return {
            "acceptance_pos1_run": acceptance(run, self.fresh),
            "acceptance_pos1_cold": self.harvest("target"),
        }

    def warm(self) -> dict[str, Any]:
        return {"acceptance_pos1_warm": self.harvest("smollm2")}

    def storage(self) -> dict[str, Any]:
        """Replay buffer at the end of the run; the drafter's file in a run's checkpoints (what
        training waits for, and until it is on the disk) against one of all that a drafter and its
        optimizer hold, the target's two matrices included, for which training waits."""
        from minitlt.common import write_atomically
        from minitlt.tensorfile import write_tensors

        buffer = self.buffers()[0]
        parts = self.parts(str(self.run / "drafter"), ["off"])
        path, everything = self.run / "selective.safetensors", self.run / "full.safetensors"
        started = time.perf_counter()
        written = parts.spot.checkpoint(path)
        blocked = time.perf_counter() - started
        written.result()
        selective = time.perf_counter() - started
        parts.spot.close()
        full = {**parts.trainer.tensors(), **parts.trainer.optimizer_tensors()}
        full |= {"embed": self.model.get_input_embeddings().weight.clone()}
        full |= {"lm_head": self.model.get_output_embeddings().weight.clone()}
        started = time.perf_counter()
        write_atomically(everything, lambda beside: write_tensors(beside, full, {}))
        return {
            "buffer_bytes": sum(r.features_NF.nbytes + r.hidden_NH.nbytes for r in buffer.rows),
            "buffer_tokens": buffer.num_tokens,
            "checkpoint_full_seconds": time.perf_counter() - started,
            "checkpoint_full_bytes": everything.stat().st_size,
            "checkpoint_selective_seconds": selective,
            "checkpoint_selective_blocked_seconds": blocked,
            "checkpoint_selective_bytes": path.stat().st_size,
        }

    def packing(self) -> dict[str, Any]:
        """A train step over rows as they are against the same rows padded to the longest."""
        from minitlt.distill import Row, Window

        rows = self.fresh[:16]
        longest = max(row.num_tokens for row in rows)

        def padded(row: Any) -> Any:
            more = longest - row.num_tokens

            def pad(tensor: torch.Tensor) -> torch.Tensor:
                return torch.cat([tensor, tensor[-1:].expand(more, *tensor.shape[1:])])

            return Row(pad(row.tokens_L), row.prompt_len, pad(row.features_NF),
                       pad(row.hidden_NH), 0)  # fmt: skip

        trainer, seconds = self.parts("target", ["off"]).trainer, {}
        for name, batch in (("packed", rows), ("padded", [padded(row) for row in rows])):
            windows = [Window(r, 0, r.prompt_len - 2, r.num_tokens - 2) for r in batch]
            times = []
            for _ in range(3):
                started = time.perf_counter()
                trainer.loss(windows)[0].backward()
                times.append(time.perf_counter() - started)
            seconds[name] = min(times)
        return {
            "packing_seconds": seconds,
            "packing_speedup": seconds["padded"] / seconds["packed"],
            "padded_batch_fill": sum(r.num_tokens for r in rows) / (len(rows) * longest),
        }


# Two ranks, the same rows with harvesting on and off.


def pair(options: argparse.Namespace) -> dict[str, Any]:
    """Starts both ranks of part 4 and returns what rank 1, the straggler, measured."""
    from minitlt.launch import free_port

    folder = Path(tempfile.mkdtemp(prefix="drafter-pair-"))
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
           "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "--pair", str(folder), "--model", options.model]
    command += ["--quick"] * options.quick
    ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(2)]
    try:
        if any(rank.wait(timeout=900) for rank in ranks):
            raise RuntimeError("a rank of part 4 failed; its error is above")
    finally:
        for rank in ranks:
            rank.kill()
    return dict(json.loads((folder / "straggler.json").read_text()))


def pair_rank(options: argparse.Namespace) -> int:
    """Rank 0 is done after 16 tokens, rank 1 after 160; every pair of rounds has equal rows.

    With the arm `off` the difference in seconds is the price of harvesting (a neighbour that
    computes, publishes and is swapped in); with a chain the drafter begins each round as the
    target's copy, and the accept length says what the swaps were worth.
    """
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    rounds = PairRounds(rank, options.model)
    rounds.play("off", 0, harvest=True)  # the buffers fill, everything is touched once
    seconds = {True: 0.0, False: 0.0}
    for number in range(options.rounds):
        order = (True, False) if number % 2 else (False, True)
        for harvest in order:
            seconds[harvest] += rounds.play("off", 1 + number, harvest=harvest).seconds
    old = rounds.play("eagle-3", 99, harvest=False)
    new = rounds.play("eagle-3", 99, harvest=True)
    if rank == 1:
        (options.pair / "straggler.json").write_text(json.dumps({
            "straggler_slowdown": seconds[True] / seconds[False] - 1,
            "straggler_seconds": {"harvesting": seconds[True], "idle": seconds[False]},
            "same_rows_accept_length": {"swaps": new.accept_length, "no_swaps": old.accept_length},
            **same_tokens(old, new, rounds.parts.swaps),
        }))  # fmt: skip
    rounds.parts.spot.close()
    dist.barrier()
    dist.destroy_process_group()
    return 0


def same_tokens(old: Any, new: Any, swaps: list[tuple[int, int, int]]) -> dict[str, float]:
    """Accept lengths of what came behind the first swap, in a rollout that had none and in one
    that had them. Up to there the two are the same, step by step."""
    if not swaps:
        return {"swap_accept_before": 0.0, "swap_accept_after": 0.0}
    _, tokens, row_steps = swaps[0]
    before, after = ((s.step_tokens - tokens) / (s.row_steps - row_steps) for s in (old, new))
    return {"swap_accept_before": before, "swap_accept_after": after}


class PairRounds:
    """One rank's engine, rows and drafter for part 4."""

    def __init__(self, rank: int, model_name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from minitlt.config import DEFAULT_RECIPE, RolloutConfig, find_recipe, load_config
        from minitlt.eagle3 import DrafterConfig
        from minitlt.models import resolve_model
        from minitlt.rl import build_speculation
        from minitlt.spot import SpotConfig
        from minitlt.tasks import encode_prompt, load_task

        recipe = load_config(find_recipe(DEFAULT_RECIPE))
        folder = resolve_model(model_name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.parts = build_speculation(
            model, RolloutConfig(dtype="fp32", arms=["off", "eagle-3"]), DrafterConfig(),
            SpotConfig(), device=torch.device("cpu"), rank=rank, world_size=2,
        )  # fmt: skip
        self.rank, tensors = rank, self.parts.trainer.tensors()
        self.start = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        rows = load_task(recipe.task["name"], **recipe.task["options"]).rows
        self.prompts = [encode_prompt(tokenizer, row["prompt"]) for row in rows[:4]]

    def play(self, arm: str, number: int, *, harvest: bool) -> Any:
        """One rollout and, with `harvest`, the idle window behind it; the rollout's stats."""
        import torch.distributed as dist

        from minitlt.kernels import row_key
        from minitlt.spec import Arm, Bandit, SamplingParams

        parts = self.parts
        # The head has the rows of the vocabulary chosen since.
        later = {"ids_V": parts.drafter.ids_V, "head": parts.drafter.target_rows()}
        parts.trainer.load({**self.start, **later}, 0)
        for name, moment in parts.trainer.optimizer_tensors().items():
            if not name.endswith(".raw"):
                moment.zero_()
        parts.proposer.reload()
        parts.swaps.clear()
        parts.engine.bandit = Bandit([Arm.parse(arm)])
        parts.engine.on_step = parts.between_steps if harvest else None
        tokens = PAIR_TOKENS if self.rank else 16
        keys = [row_key(0, 50 + number, 4 * self.rank + i) for i in range(4)]
        dist.barrier()
        if harvest:
            parts.spot.begin(number + 1)
        stats = parts.engine.generate(self.prompts, SamplingParams(tokens), keys).stats
        if harvest:
            parts.spot.harvest(number + 1)
        dist.barrier()
        return stats


if __name__ == "__main__":
    sys.exit(main())
