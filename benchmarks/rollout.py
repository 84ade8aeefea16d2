"""Rollout speed: ours plain, ours speculative, and transformers' generate, on the same prompts.

    python benchmarks/rollout.py [--quick] [--drafter DIR] [--threads 2] [--out FILE]

What is compared, for the default model on the default recipe's task, T = 1, real stop lengths:
- `transformers.generate` as TRL's GRPOTrainer calls it on a CPU: fp32, left padding, sampled;
- our engine without drafts (fp32 and, where the processor has it, bf16 weights);
- our engine with drafts, the bandit choosing, against plain *on identical rollouts*: in fp32 the
  tokens are equal, which is checked (`token_mismatches`), so the ratio has no length noise.

The drafter is the one in --drafter (for instance RUN/drafter), or one trained here for a minute.

`exactness` is the mean over emitted tokens of (-log p - entropy) under the fp32 model, with its
standard error: exact sampling gives 0. `step_ms` is the time of one forward for B rows of T tokens;
`floor_ms` the time to read the weights once at the machine's measured copy bandwidth.

The last line is one JSON object. Timings mean nothing while other work runs on the machine.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(options.threads)
    bench = Bench(options)
    result: dict[str, Any] = {"benchmark": "rollout", **machine(options)}
    result |= bench.against_transformers()
    result |= bench.speculation()
    result |= bench.step_times()
    text = json.dumps(result)
    out = options.out or RESULTS / f"rollout_cpu{options.threads}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n")
    print(text)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one repeat, short, under 5 minutes")
    parser.add_argument("--drafter", type=Path, help="a saved drafter, e.g. RUN/drafter")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--new", type=int, default=0, help="tokens per row; 0: 128, quick: 64")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    options.new = options.new or (64 if options.quick else 128)
    options.repeats = 1 if options.quick else 3
    options.sizes = [1, 8] if options.quick else [1, 2, 4, 8, 16, 32]
    return options


def machine(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    import transformers

    return {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": options.threads,
        "load_average": os.getloadavg()[0],
        "new_tokens": options.new,
        "repeats": options.repeats,
        "seed": 0,
    }


class Bench:
    """The model, its prompts and engines of every kind."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from minitlt.config import DEFAULT_RECIPE, find_recipe, load_config
        from minitlt.models import resolve_model
        from minitlt.spec import SamplingParams
        from minitlt.tasks import encode_prompt, load_task

        self.options = options
        recipe = load_config(find_recipe(DEFAULT_RECIPE))
        folder = resolve_model(recipe.trl["model_name_or_path"])
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        task = load_task(recipe.task["name"], **{**recipe.task["options"], "seed": 1})
        self.prompts = [encode_prompt(self.tokenizer, row["prompt"]) for row in task.rows[:64]]
        self.params = SamplingParams(
            max_new_tokens=options.new, stop_ids=(self.tokenizer.eos_token_id,)
        )
        self.recipe = recipe
        self.dtypes = ["fp32"] + (["bf16"] if can_bf16() else [])

    def speculation_parts(self, dtype: str) -> Any:
        from minitlt.config import RolloutConfig, build
        from minitlt.eagle3 import DrafterConfig
        from minitlt.rl import build_speculation
        from minitlt.spot import SpotConfig

        rollout = build(RolloutConfig, {**self.recipe.rollout, "dtype": dtype}, "rollout")
        start = str(self.options.drafter) if self.options.drafter else "target"
        parts = build_speculation(
            self.model,
            rollout,
            DrafterConfig(start=start),
            SpotConfig(mode="off"),
            device=torch.device("cpu"),
        )
        if not self.options.drafter:
            self.train_drafter(parts)
        return parts

    def train_drafter(self, parts: Any) -> None:
        """A minute of distillation on fresh rollouts of this very model."""
        seconds = 30.0 if self.options.quick else 60.0
        parts.engine.generate(self.prompts[32:48], self.params, self.keys(16, 9))
        parts.trainer.refresh_vocab()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            parts.trainer.train_step()
        parts.proposer.reload()

    def keys(self, num: int, generation: int) -> list[int]:
        from minitlt.kernels import row_key

        return [row_key(0, generation, i) for i in range(num)]

    def hugging_face(self, num: int, repeat: int) -> tuple[int, float]:
        """(tokens, seconds) of a batch as GRPOTrainer generates it."""
        rows = self.prompts[:num]
        longest = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (longest - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
        with torch.random.fork_rng():
            torch.manual_seed(repeat)
            start = time.perf_counter()
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=self.options.new,
                eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=pad,
            )
            seconds = time.perf_counter() - start
        stop = self.tokenizer.eos_token_id
        tokens = 0
        for row in out[:, longest:].tolist():
            tokens += row.index(stop) + 1 if stop in row else len(row)
        return tokens, seconds

    def plain(self, engine: Any, num: int, generation: int) -> Any:
        """Without drafts, by an engine that no drafter watches."""
        from minitlt.spec import RolloutEngine

        alone = RolloutEngine(engine.target)
        return alone.generate(self.prompts[:num], self.params, self.keys(num, generation))

    def against_transformers(self) -> dict[str, Any]:
        """Our plain path over transformers' generate: tokens per second, medians of repeats."""
        from minitlt.spec import RolloutEngine
        from minitlt.target import make_target

        sizes = [1, 8] if self.options.quick else [1, 32]
        rates: dict[str, float] = {}
        emitted = []
        self.hugging_face(1, 0)
        for num in sizes:
            # Sampled lengths differ between the two, so the rates are of equal work per token:
            # several batches are pooled.
            runs = [self.hugging_face(num, r) for r in range(self.options.repeats + (num == 1) * 4)]
            rates[f"transformers_fp32_b{num}"] = sum(t for t, _ in runs) / sum(s for _, s in runs)
        for dtype in self.dtypes:
            engine = RolloutEngine(make_target(self.model, dtype=DTYPES[dtype]))
            self.plain(engine, 1, 99)
            for num in sizes:
                repeats = self.options.repeats + (num == 1) * 4
                runs = [self.plain(engine, num, 10 + r) for r in range(repeats)]
                tokens, seconds = (
                    sum(r.stats.tokens for r in runs),
                    sum(r.stats.seconds for r in runs),
                )
                rates[f"plain_{dtype}_b{num}"] = tokens / seconds
                if dtype == "fp32":
                    emitted += [
                        (self.prompts[i], c) for r in runs for i, c in enumerate(r.completion_ids)
                    ]
        for name, rate in rates.items():
            print(f"{name:28} {rate:8.1f} tok/s", flush=True)
        ratios = {
            f"plain_over_hf_b{num}": rates[f"plain_fp32_b{num}"]
            / rates[f"transformers_fp32_b{num}"]
            for num in sizes
        }
        print("plain over transformers, fp32:", {k: round(v, 2) for k, v in ratios.items()})
        return {"tok_s": rates, **ratios, "exactness": self.exactness(emitted[:64])}

    def exactness(self, rows: list[tuple[list[int], list[int]]]) -> dict[str, float]:
        """Mean of (-log p(token) - entropy) over tokens, and its standard error."""
        values = []
        for prompt, tokens in rows:
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            logp = torch.log_softmax(logits.double(), -1)
            entropy = -(logp.exp() * logp).sum(-1)
            values.append(-logp.gather(1, torch.tensor(tokens)[:, None])[:, 0] - entropy)
        all_values = torch.cat(values)
        return {
            "mean": all_values.mean().item(),
            "standard_error": (all_values.std() / len(all_values) ** 0.5).item(),
            "tokens": len(all_values),
        }

    def speculation(self) -> dict[str, Any]:
        """Speculative over plain on identical rollouts, fp32, by batch size."""
        parts = self.speculation_parts("fp32")
        engine = parts.engine
        ratios: dict[str, float] = {}
        accept: dict[str, float] = {}
        mismatches = 0
        for num in self.options.sizes:
            engine.generate(self.prompts[:num], self.params, self.keys(num, 30))  # the bandit looks
            pairs = []
            for repeat in range(self.options.repeats + (2 if num <= 2 else 0)):
                want = self.plain(engine, num, 40 + repeat)
                got = engine.generate(self.prompts[:num], self.params, self.keys(num, 40 + repeat))
                mismatches += sum(
                    a != b for a, b in zip(want.completion_ids, got.completion_ids, strict=True)
                )
                pairs.append((want.stats, got.stats))
            seconds = [(p.seconds, s.seconds) for p, s in pairs]
            ratios[str(num)] = sum(p for p, _ in seconds) / sum(s for _, s in seconds)
            accept[str(num)] = statistics.mean(s.accept_length for _, s in pairs)
            arms = pairs[-1][1].arms
            print(
                f"B={num:<3} speculative over plain {ratios[str(num)]:.2f}, accept length "
                f"{accept[str(num)]:.2f}, arms { ({k: v['steps'] for k, v in arms.items()}) }",
                flush=True,
            )
        return {"spec_over_plain": ratios, "accept_length": accept, "token_mismatches": mismatches}

    def step_times(self) -> dict[str, Any]:
        """v(B, T): one forward in milliseconds, beside the floor of reading the weights once."""
        from minitlt.target import make_target

        table: dict[str, dict[str, float]] = {}
        floors: dict[str, float] = {}
        bandwidth = copy_bandwidth()
        parameters = sum(p.numel() for p in self.model.parameters())
        for dtype in self.dtypes:
            target = make_target(self.model, dtype=DTYPES[dtype])
            target.reserve(max(self.options.sizes), 512)
            floors[dtype] = parameters * DTYPES[dtype].itemsize / bandwidth * 1e3
            for num in self.options.sizes:
                for width in (1, 2, 4, 8, 16):
                    tokens = torch.full((num, width), 100)
                    lengths = torch.full((num,), 200)
                    times = []
                    for _ in range(6):
                        start = time.perf_counter()
                        target.forward(tokens, lengths)
                        times.append(time.perf_counter() - start)
                    ms = statistics.median(times[1:]) * 1e3
                    table.setdefault(f"{dtype}_b{num}", {})[str(width)] = round(ms, 1)
        for name, row in table.items():
            print(f"step ms {name:10}", row, flush=True)
        first = table["fp32_b1"]["1"]
        return {
            "step_ms": table,
            "floor_ms": floors,
            "copy_gb_per_s": bandwidth / 1e9,
            "roofline_fraction_b1": floors["fp32"] / first,
        }


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def can_bf16() -> bool:
    from minitlt.target import can_pack

    return can_pack(torch.bfloat16)


def copy_bandwidth() -> float:
    """Bytes read per second when a large tensor is summed: what streaming weights can reach."""
    block = torch.ones(64 * 2**20)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - start)
    return block.numel() * block.itemsize / min(times)


if __name__ == "__main__":
    sys.exit(main())
