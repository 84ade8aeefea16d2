"""Rollout speed: ours plain and speculative, transformers' generate, vLLM, on the same prompts.

    python benchmarks/rollout.py [--quick] [--drafter DIR] [--threads 2] [--new 512] [--device cuda]
                                 [--peer vllm --peer-python VENV/bin/python] [--out FILE]

The default model on prompts of the default recipe's task, T = 1, real stop lengths. For every batch
size the systems take turns within each repeat, so that a machine that drifts hits all alike. A
repeat is as many rollouts in a row as give `--least` tokens: with few rows one is soon over.
- `hf`: transformers' generate as TRL's GRPOTrainer calls it on a CPU: fp32, left padding, sampled;
- `plain`: our engine without drafts;
- `spec`: our engine with drafts, a bandit choosing among `ARMS`, on the rollouts of
  `plain`. They are the same because the keys are: every token is compared, and `token_mismatches`
  counts the differences (with native code in either dtype; without it in fp32, up to near ties in
  trees). Without native code both replay the completions of `plain` in bf16 once more for their
  ratio, there is nothing to compare, and one rollout of `spec` that replays nothing is there for
  its exactness.
- `--peer vllm` (an interpreter of its own, `benchmarks/vllm_peer.py`, which decodes in bf16): no
  stops, so that both emit the same number of tokens; ours in bf16 too where this processor packs
  it (`vllm.our_dtype` says).

--dtype auto, the default, is what `rollout.dtype: auto` gives a run that trains in fp32: fp32.

The drafter is the one in --drafter (for instance RUN/drafter); without it the warm one that comes
with the package, or with --train-seconds one that is distilled here on rollouts of other prompts.
Before a size is timed the bandit sees one rollout of that size.

`exactness`, for every configuration that is timed, is the mean over emitted tokens of (-log p -
entropy) under the fp32 transformers module, with its standard error: exact sampling gives 0.
`step_ms` is the time of one forward for B rows of T tokens beside `floor_ms`, the time to read the
weights once at the machine's measured bandwidth, and `step_parts_ms` says where the rest goes (CPU
only; attention is in `rest of the forward` where native code decodes).

The last line is one JSON object with the figures that are quoted; --out has all of them, by default
under `runs/` (the committed ones were written with --out benchmarks/results/..). Timings mean
nothing while other work runs on the machine: `alone` is false if its load average was above 0.5
when this began. Left out: prefill on its own (short prompts here).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _machine import RUNS, about, device
from _machine import parser as options_of

HERE = Path(__file__).parent
ARMS = ["off", "ngram-3", "eagle-1", "eagle-2", "eagle-3x2b5", "eagle-4x3b9", "int8-5", "int8-12"]
QUOTED = ("plain_over_hf_b32", "plain_over_hf_b1", "spec_over_plain", "spec_over_hf_b16", "tok_s",
          "token_mismatches", "roofline_fraction_b1", "spec_over_vllm_b1", "spec_over_vllm_b16",
          "exactness", "dtype", "alone", "commit", "versions", "machine", "seeds")  # fmt: skip


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = options_of(__file__, __doc__, "--quick --drafter smollm2")
    add = parser.add_argument
    add("--quick", action="store_true", help="one repeat of short rows, under 5 minutes")
    add("--drafter", default="smollm2", help="a saved drafter, e.g. RUN/drafter")
    add("--train-seconds", type=float, default=0, help="distil one here instead")
    add("--dtype", choices=["auto", "fp32", "bf16"], default="auto",
        help="of the engine's weights; auto: as in a run that trains in fp32")  # fmt: skip
    add("--device", help="default: cuda where there is one")
    add("--threads", type=int, default=2, help="of torch")
    add("--new", type=int, default=0, help="tokens per row at most; 0: 512, quick: 24")
    add("--repeats", type=int, default=0, help="of each system; 0: 3, quick: 1")
    add("--least", type=int, default=0, help="tokens of a repeat at least; 0: 300, quick: 48")
    add("--sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32], help="rows per batch")
    add("--seed", type=int, default=0, help="of the timed rollouts' keys")
    add("--arms", nargs="+", help="ways to draft; default: " + " ".join(ARMS))
    add("--peer", choices=["vllm"], help="another engine to compare with")
    add("--peer-python", type=Path, help="the interpreter that has the peer; or $MINITLT_PEER")
    add("--out", type=Path, help="default: a file in runs/")
    options = parser.parse_args(argv)
    options.new = options.new or (24 if options.quick else 512)
    options.repeats = options.repeats or (1 if options.quick else 3)
    options.least = options.least or (48 if options.quick else 300)
    if options.train_seconds:
        options.drafter = "target"
    if options.peer and not options.peer_python:
        options.peer_python = Path(os.environ.get("MINITLT_PEER", ""))
        if not options.peer_python.is_file():
            parser.error("--peer vllm needs --peer-python VENV/bin/python (or $MINITLT_PEER)")
    return options


if __name__ == "__main__":
    parse()  # before torch is loaded: --help is quick, and so is word of what is wrong

import torch  # noqa: E402

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Rows = list[tuple[list[int], list[int]]]  # (prompt, completion)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.device = options.device or device()
    options.dtype = engine_dtype(options.dtype, torch.float32, options.device)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(options.threads)
    result = machine(options)  # first: it looks at the load
    bench = Bench(options)
    if options.device == "cpu":
        result |= bench.step_times()
    result |= bench.rollouts()
    if options.peer == "vllm":
        result |= bench.against_vllm()
    result["exactness"] = bench.exactness()
    out = options.out or RUNS / f"rollout_{options.device}{options.threads}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result) + "\n")
    print(json.dumps({name: result[name] for name in QUOTED if name in result}))
    return 0


def engine_dtype(wish: str, trains_in: torch.dtype, device: str) -> str:
    """fp32 or bf16, as the engine chooses."""
    from minitlt.linear import decoding_dtype

    chosen = decoding_dtype(wish, trains_in, torch.device(device))
    return next(name for name, dtype in DTYPES.items() if dtype == chosen)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on; other benchmarks ask with less than all options."""
    facts = about()
    facts["machine"]["threads"] = options.threads
    return {
        "benchmark": "rollout",
        **facts,
        "alone": facts["machine"]["load_average"] <= 0.5,
        "seeds": {"task": 1, "keys": getattr(options, "seed", 0), "torch": 0},
        "dtype": getattr(options, "dtype", "fp32"),
        "drafter": getattr(options, "drafter", ""),
        "new_tokens": options.new,
        "least_tokens": getattr(options, "least", 0),
        "repeats": options.repeats,
    }


class Bench:
    """The model, its prompts and systems of every kind."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from minitlt import native
        from minitlt.config import DEFAULT_RECIPE, find_recipe, load_config
        from minitlt.models import resolve_model
        from minitlt.tasks import encode_prompt, load_task

        self.options = options
        self.recipe = load_config(find_recipe(DEFAULT_RECIPE))
        self.folder = resolve_model(self.recipe.trl["model_name_or_path"])
        load: Any = AutoModelForCausalLM.from_pretrained
        self.device = torch.device(options.device)
        exact = options.dtype == "fp32" or native.runs(DTYPES[options.dtype], self.device)
        self.replays = not exact
        self.model = load(self.folder, dtype=torch.float32).to(self.device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        task = load_task(self.recipe.task["name"], **{**self.recipe.task["options"], "seed": 1})
        self.prompts = [encode_prompt(self.tokenizer, row["prompt"]) for row in task.rows[:96]]
        self.emitted: dict[str, Rows] = {}

    # The systems.

    def transformers(self, prompts: list[list[int]], seed: int) -> tuple[list[list[int]], float]:
        """(completions, seconds) of a batch as GRPOTrainer generates it."""
        from transformers import GenerationConfig

        longest, pad = max(map(len, prompts)), self.tokenizer.pad_token_id
        stop = self.tokenizer.eos_token_id
        ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]).to(ids)
        config = GenerationConfig(
            max_new_tokens=self.options.new,
            do_sample=True,
            pad_token_id=pad,
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=[stop],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            disable_compile=True,
        )
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            start = time.perf_counter()
            out = self.model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            seconds = time.perf_counter() - start
        rows = out[:, longest:].tolist()
        return [r[: r.index(stop) + 1] if stop in r else r for r in rows], seconds

    def engines(self, dtype: str) -> tuple[Any, Any]:
        """(plain, speculative) engines over one target; the second has a trained drafter."""
        from minitlt.config import RolloutConfig, build
        from minitlt.eagle3 import DrafterConfig
        from minitlt.rl import build_speculation
        from minitlt.spec import RolloutEngine
        from minitlt.spot import SpotConfig

        options = self.options
        arms = options.arms or ARMS
        settings = {**self.recipe.rollout, "dtype": dtype, "arms": arms}
        parts = build_speculation(
            self.model,
            build(RolloutConfig, settings, "rollout"),
            DrafterConfig(start=options.drafter),
            SpotConfig(mode="off"),
            device=self.device,
        )
        if options.train_seconds:
            prompts = self.prompts[64:96]
            parts.engine.generate(prompts, self.sampling(128), keys(len(prompts), 9))
            parts.trainer.refresh_vocab()
            end = time.perf_counter() + options.train_seconds
            while time.perf_counter() < end:
                parts.trainer.train_step()
            parts.proposer.reload()
        return RolloutEngine(parts.engine.target), parts.engine

    def sampling(self, new: int, stops: bool = True) -> Any:
        from minitlt.spec import SamplingParams

        stop_ids = (self.tokenizer.eos_token_id,) if stops else ()
        return SamplingParams(max_new_tokens=new, stop_ids=stop_ids)

    # What is measured.

    def rollouts(self) -> dict[str, Any]:
        """Tokens per second of the three systems by batch size, and their ratios."""
        plain, spec = self.engines(self.options.dtype)
        self.spec = spec
        rates: dict[str, float] = {}
        ratios: dict[str, float] = {}
        details: dict[str, Any] = {}
        mismatches = 0
        self.transformers(self.prompts[:1], 0)
        for num in self.options.sizes:
            spec.generate(self.prompts[:num], self.sampling(self.options.new), keys(num, 30))
            runs = [self.one_repeat(plain, spec, num, r) for r in range(self.options.repeats)]
            for name in runs[0]["rates"]:
                rates[f"{name}_b{num}"] = statistics.median(r["rates"][name] for r in runs)
            ratios[str(num)] = statistics.median(r["ratio"] for r in runs)
            mismatches += sum(r["mismatches"] for r in runs)
            row_steps = sum(r["row_steps"] for r in runs)
            details[str(num)] = {
                "accept_length": sum(r["step_tokens"] for r in runs) / row_steps,
                "arms": runs[-1]["arms"],
                "tokens": sum(r["tokens"] for r in runs),
                "ratios": [round(r["ratio"], 3) for r in runs],
            }
            shown = {k: f"{v:.1f}" for k, v in rates.items() if k.endswith(f"_b{num}")}
            print(f"B={num}: tok/s {shown}, spec/plain {ratios[str(num)]:.2f}, {details[str(num)]}",
                  flush=True)  # fmt: skip
        result: dict[str, Any] = {"tok_s": rates, "spec_over_plain": ratios, "speculation": details}
        # A replay has no tokens of its own to compare.
        result["token_mismatches"] = None if self.replays else mismatches
        for num in (1, 32):
            if f"hf_b{num}" in rates:
                result[f"plain_over_hf_b{num}"] = rates[f"plain_b{num}"] / rates[f"hf_b{num}"]
        if "hf_b16" in rates:
            result["spec_over_hf_b16"] = rates["spec_b16"] / rates["hf_b16"]
        return result

    def one_repeat(self, plain: Any, spec: Any, num: int, repeat: int) -> dict[str, Any]:
        """Rollouts of this size until there are enough tokens, the systems by turns."""
        sums: dict[str, list[float]] = {}  # of each system: tokens, seconds
        arms: Counter[str] = Counter()
        mismatches = row_steps = step_tokens = 0
        for turn in itertools.count():
            at = repeat + turn * self.options.repeats
            prompts = [self.prompts[(at * num + i) % 64] for i in range(num)]
            done, different = self.one_turn(plain, spec, prompts, at)
            for name, (tokens, seconds) in done.items():
                was = sums.get(name, [0, 0.0])
                sums[name] = [was[0] + tokens, was[1] + seconds]
            arms.update({name: int(arm["steps"]) for name, arm in spec.stats.arms.items()})
            row_steps += spec.stats.row_steps
            step_tokens += spec.stats.step_tokens
            mismatches += different
            if sums["spec"][0] >= self.options.least:
                break
        rates = {name: tokens / seconds for name, (tokens, seconds) in sums.items()}
        return {
            "rates": rates,
            "ratio": rates["spec"] / rates["plain_replayed" if self.replays else "plain"],
            "mismatches": mismatches,
            "row_steps": row_steps,
            "step_tokens": step_tokens,
            "arms": dict(arms),
            "tokens": int(sums["spec"][0]),
        }

    def one_turn(
        self, plain: Any, spec: Any, prompts: list[list[int]], at: int
    ) -> tuple[dict[str, tuple[int, float]], int]:
        """(tokens, seconds) of one rollout of these prompts by each system; tokens that differ."""
        from minitlt.run import count_mismatches

        num, done = len(prompts), dict[str, tuple[int, float]]()
        drawn = keys(num, 1000 + at, self.options.seed)
        same: Any = (prompts, self.sampling(self.options.new), drawn)
        if num in (1, 16, 32):
            texts, seconds = self.transformers(prompts, at)
            done["hf"] = sum(map(len, texts)), seconds
            self.keep(f"hf_b{num}", prompts, texts)
        want = plain.generate(*same)
        record = want.completion_ids
        self.keep(f"plain_b{num}", prompts, record)
        runs = {"plain": want}
        if self.replays:
            if at % self.options.repeats == 0:  # in the first repeat
                self.keep(f"spec_b{num}", prompts, spec.generate(*same).completion_ids)
            runs["plain_replayed"] = plain.generate(*same, replay=record)
            runs["spec"] = spec.generate(*same, replay=record)
        else:
            runs["spec"] = spec.generate(*same)
            self.keep(f"spec_b{num}", prompts, runs["spec"].completion_ids)
        done |= {name: (r.stats.tokens, r.stats.seconds) for name, r in runs.items()}
        return done, count_mismatches(record, runs["spec"].completion_ids)

    def against_vllm(self) -> dict[str, Any]:
        """Speculation over vLLM without it, equal numbers of tokens, stops ignored."""
        sizes = [n for n in (1, 2, 4, 16) if n in self.options.sizes]
        new = min(self.options.new, 256)
        job = {
            "model": str(self.folder),
            "prompts": self.prompts[: max(sizes)],
            "sizes": sizes,
            "new": new,
            "repeats": self.options.repeats,
        }
        peer = run_peer(self.options.peer_python, job, self.options.threads)
        if "error" in peer:
            print(f"vllm does not run here: {peer['error']}", flush=True)
            return {"vllm_error": peer["error"]}
        dtype = engine_dtype("auto", torch.bfloat16, self.options.device)
        spec = self.spec if dtype == self.options.dtype else self.engines(dtype)[1]
        result: dict[str, Any] = {"vllm": {k: peer[k] for k in ("version", "tok_s")}}
        result["vllm"]["our_dtype"] = dtype
        params = self.sampling(new, stops=False)
        for num in sizes:
            prompts = self.prompts[:num]
            spec.generate(prompts, params, keys(num, 60))
            own = [spec.generate(prompts, params, keys(num, 61 + r)) for r in range(3)]
            rate = statistics.median(r.stats.tokens_per_second for r in own)
            theirs = peer["tok_s"][str(num)]
            result[f"spec_over_vllm_b{num}"] = rate / theirs
            self.keep(f"vllm_b{num}", prompts, peer["completions"][str(num)])
            self.keep(f"spec_beside_vllm_b{num}", prompts, own[0].completion_ids)
            print(f"B={num}: ours ({dtype}) {rate:.1f}, vllm {theirs:.1f} tok/s", flush=True)
        return result

    def keep(self, name: str, prompts: list[list[int]], texts: list[list[int]]) -> None:
        self.emitted.setdefault(name, []).extend(zip(prompts, texts, strict=True))

    def exactness(self) -> dict[str, dict[str, float]]:
        """By configuration: mean of (-log p(token) - entropy) over tokens, its standard error."""
        limit = 300 if self.options.quick else 1200
        seen: dict[tuple[int, ...], torch.Tensor] = {}
        result = {}
        for name, rows in self.emitted.items():
            values: list[torch.Tensor] = []
            for prompt, tokens in rows:
                row = tuple(prompt + tokens)
                if sum(map(len, values)) < limit:
                    if row not in seen:
                        seen[row] = self.surprise(prompt, tokens)
                    values.append(seen[row])
            all_values = torch.cat(values)
            error = float(all_values.std()) / len(all_values) ** 0.5
            result[name] = {
                "mean": round(float(all_values.mean()), 4),
                "standard_error": round(error, 4),
                "tokens": len(all_values),
            }
            print(f"exactness {name:12}", result[name], flush=True)
        return result

    @torch.no_grad()
    def surprise(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([prompt + tokens], device=self.device)
        logp = torch.log_softmax(self.model(ids).logits[0, len(prompt) - 1 : -1], -1)
        entropy = -(logp.exp() * logp).sum(-1)
        return (-logp.gather(1, ids[0, len(prompt) :, None])[:, 0] - entropy).double().cpu()

    def step_times(self) -> dict[str, Any]:
        """v(B, T): one forward in milliseconds, beside the floor of reading the weights once."""
        from minitlt.target import make_target

        widths = (1, 4, 16) if self.options.quick else (1, 2, 4, 8, 16, 32, 64)
        dtype = DTYPES[self.options.dtype]
        target: Any = make_target(self.model, dtype=dtype)
        target.reserve(max(self.options.sizes), 384)
        bandwidth = read_bandwidth()
        floor = sum(p.numel() for p in self.model.parameters()) * dtype.itemsize / bandwidth * 1e3
        table: dict[str, dict[str, float]] = {}
        for num in self.options.sizes:
            lengths = torch.full((num,), 200)
            row = table[str(num)] = {}
            for width in widths:
                if num * width <= 2048:
                    tokens = torch.full((num, width), 9)
                    row[str(width)] = milliseconds(lambda: target.forward(tokens, lengths))  # noqa: B023
            free = [w for w, ms in row.items() if ms <= 1.15 * row["1"]]
            print(f"step ms B={num:<3} {row}; nearly free: T = {', '.join(free)}", flush=True)
        parts = {str(n): step_parts(target, n) for n in self.options.sizes if n in (1, 32)}
        print(f"floor {floor:.1f} ms at {bandwidth / 1e9:.1f} GB/s; parts of a step: {parts}")
        return {
            "step_ms": table,
            "step_parts_ms": parts,
            "floor_ms": floor,
            "read_gb_per_s": bandwidth / 1e9,
            "roofline_fraction_b1": floor / table["1"]["1"] if "1" in table else None,
        }


def step_parts(target: Any, num: int) -> dict[str, float]:
    """Where one step of `num` rows at length 200 spends its milliseconds."""
    from minitlt.kernels import coupled_verify

    tokens, lengths = torch.full((num, 1), 9), torch.full((num,), 200)
    shape = target.shape
    inputs = {"down": torch.randn(num, target.linears[0]["down"].num_inputs)}
    hidden = torch.randn(num, shape.hidden)
    ones, roots = torch.ones(num), torch.full((num, 1), -1)
    logits = torch.randn(num, 1, shape.vocab) * 3

    def products() -> None:
        for layer in target.linears:
            for name, linear in layer.items():
                linear(inputs.get(name, hidden))

    parts = {
        "forward": milliseconds(lambda: target.forward(tokens, lengths)),
        "layer products": milliseconds(products),
        "head product": milliseconds(lambda: target.head(hidden)),
    }
    if not target.native:  # where attention is a part of one call
        parts["attention"] = milliseconds(attention_of(target, num))
    parts["rest of the forward"] = round(2 * parts["forward"] - sum(parts.values()), 1)
    parts["verify"] = milliseconds(
        lambda: coupled_verify(logits, lengths, lengths, ones, tokens, roots)
    )
    return parts


def attention_of(target: Any, num: int) -> Callable[[], None]:
    """That of all layers, over `num` rows of length 200."""
    from minitlt.slots import attend, plan_step

    shape, lengths = target.shape, torch.full((num,), 200)
    step = plan_step(lengths[:, None], lengths, None, 0, target.cache, masked=True)
    step.stack_queries(shape, target.act_dtype)
    q = torch.randn(num, shape.num_heads, shape.head_dim)

    def attention() -> None:
        for i in range(shape.num_layers):
            attend(q, step.keys[i], step.values[i], step, (num, 1))

    return attention


def run_peer(python: Path, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """The peer's answer, or {"error": its own last words}."""
    extra = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # what it imports as `kernels` is not the script beside it
    }
    done = subprocess.run(
        [str(python), str(HERE / "vllm_peer.py")],
        input=json.dumps(job),
        env={**os.environ, **extra},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    words = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    signal = f"killed by signal {-done.returncode}; " if done.returncode < 0 else ""
    return {"error": signal + " | ".join(words[-3:])}


def keys(num: int, generation: int, seed: int = 0) -> list[int]:
    from minitlt.kernels import row_key

    return [row_key(seed, generation, i) for i in range(num)]


def milliseconds(run: Callable[[], Any]) -> float:
    """Median of 7, or of fewer where they are slow."""
    run()
    times: list[float] = []
    while len(times) < 3 or (len(times) < 7 and sum(times) < 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e3, 1)


def read_bandwidth() -> float:
    """Bytes read per second when a large tensor is summed: what streaming weights can reach."""
    block = torch.ones(64 * 2**20)
    block.sum()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - start)
    return block.numel() * block.itemsize / min(times)


if __name__ == "__main__":
    sys.exit(main())
