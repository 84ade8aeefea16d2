"""GRPO on TRL with speculative rollouts: one overridden method.

`MiniTLTTrainer` is TRL's GRPOTrainer whose `_generate_single_turn` runs our engine. TRL keeps
rewards, advantages, loss, logging and checkpoints. One generation, per rank:

    refresh the engine's weights if the policy moved      (the only collective region)
    spot.begin; engine.generate; between verify steps spot.poll picks up fresher drafters
    spot.harvest: train the drafter until the last rank is done, then merge
    hand (completion ids, logprobs) back to TRL

Keys are hash(seed, generation, global row), so the same run on one rank or eight draws the same
completions.

Left out: images, TRL's own vLLM and continuous batching (refused with a reason).
How to try it: `minitlt train`, `pytest tests/test_rl.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import le
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from trl import GRPOTrainer

from minitlt import native
from minitlt.common import suggest
from minitlt.config import ConfigError, RolloutConfig
from minitlt.distill import DrafterTrainer, ReplayBuffer
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter, start_from_target
from minitlt.events import EventLog
from minitlt.export import import_drafter
from minitlt.guards import FEW_TOKENS, Guards, gap_limits
from minitlt.kernels import row_key
from minitlt.linear import decoding_dtype
from minitlt.models import resolve_drafter
from minitlt.ngram import MergedDrafter, NgramDrafter
from minitlt.quantized import with_int8
from minitlt.spec import Arm, Bandit, Rollout, RolloutEngine, SamplingParams
from minitlt.spot import INLINE, OFF, Receipt, SpotConfig, SpotTrainer
from minitlt.target import make_target
from minitlt.weights import full_parameters, weights_fingerprint

logger = logging.getLogger(__name__)
_CHECKED_TOKENS = 256  # of a completion, when logprobs are compared
_EVAL_GENERATION = 1 << 40  # evaluation draws from generations that training never reaches
_PASSED = {  # generation settings that the engine has, by TRL's name
    name: name
    for name in ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                 "min_new_tokens", "stop_strings")
} | {"suppress_tokens": "suppress_ids", "eos_token_id": "stop_ids"}  # fmt: skip
_TRL_METRICS = {  # what an `update` event takes from TRL's metrics, by TRL's name
    "reward": "reward",
    "reward_std": "reward_std",
    "mean_length": "completions/mean_length",
    "kl": "kl",
    "entropy": "entropy",
    "step_seconds": "step_time",
    "rollout": "rollout/seconds",
}
_SILENT = {"do_sample", "pad_token_id", "bos_token_id", "cache_implementation", "use_cache"}


@dataclass
class Speculation:
    """The engine with everything that drafts for it and learns in its idle time."""

    engine: RolloutEngine
    spot: SpotTrainer
    trainer: DrafterTrainer
    proposer: Eagle3Proposer
    ngram: NgramDrafter
    swaps: list[tuple[int, int, int]] = field(default_factory=list)  # version, tokens, row-steps

    @property
    def drafter(self) -> Eagle3Drafter:
        return self.proposer.drafter

    def between_steps(self, engine: RolloutEngine) -> None:
        """Runs after every verify step: a straggler takes over fresher drafters."""
        if taken := self.spot.poll():
            self.swaps.append((taken.version, engine.stats.step_tokens, engine.stats.row_steps))
            self.proposer.reload()
            engine.bandit.renew(self.proposer.name)

    def swap_results(self) -> list[dict[str, Any]]:
        """What each hot swap of this rollout changed: accept lengths since the swap before it (or
        the start), and up to the next one (or the end). Forgets them."""
        stats = self.engine.stats
        points = [(0, 0, 0), *self.swaps, (0, stats.step_tokens, stats.row_steps)]
        results = []
        for before, swap, after in zip(points, points[1:], points[2:], strict=False):
            old, new = ([b[i] - a[i] for i in (1, 2)] for a, b in ((before, swap), (swap, after)))
            results.append({
                "version": swap[0],
                "accept_before": old[0] / max(old[1], 1),
                "accept_after": new[0] / max(new[1], 1),
                "row_steps_before": old[1],
                "row_steps_after": new[1],
            })  # fmt: skip
        self.swaps = []
        return results


class MiniTLTTrainer(GRPOTrainer):
    """GRPOTrainer with lossless speculative rollouts and a drafter trained in idle time.

    Takes everything GRPOTrainer takes, and:
        rollout, drafter, spot: the configuration blocks of a recipe
        log: an EventLog, or None for no run log
    Raises ConfigError for TRL options that would bypass the engine.
    """

    def __init__(
        self,
        *args: Any,
        rollout: RolloutConfig | None = None,
        drafter: DrafterConfig | None = None,
        spot: SpotConfig | None = None,
        log: EventLog | None = None,
        **kwargs: Any,
    ) -> None:
        config = kwargs.get("args") or (args[2] if len(args) > 2 else None)
        refuse_bypasses(vars(config) if config else {})
        if kwargs.get("rollout_func") is not None:
            raise ConfigError("rollout_func cannot be used with MiniTLTTrainer; use GRPOTrainer")
        super().__init__(*args, **kwargs)
        self.rollout_config = rollout or RolloutConfig()
        self.event_log = log
        self.sampling = sampling_params(self.generation_kwargs)
        self.speculation = build_speculation(
            self.accelerator.unwrap_model(self.model),
            self.rollout_config,
            drafter or DrafterConfig(),
            spot or SpotConfig(),
            device=self.accelerator.device,
            trains_in=self.model.dtype,
            mixed=self.accelerator.mixed_precision,
            rank=self.accelerator.process_index,
            world_size=self.accelerator.num_processes,
            log=log,
        )
        self.speculation.engine.on_step = self._between_steps
        self.speculation.engine.on_prefill = self.speculation.spot.beat
        self.speculation.engine.decode = self._tokenizer.decode
        wish = self.rollout_config.importance_sampling
        narrower = self.speculation.engine.target.dtype != self.model.dtype
        if wish == "on" or (wish == "auto" and narrower):
            # With the method below overridden, this flag only switches TRL's importance-sampling
            # correction on; `args.use_vllm` stays false and no server is ever looked for.
            self.use_vllm, self.vllm_mode = True, "server"
        self.generation = 0
        self.evaluations = 0
        self._fingerprint: tuple[Any, ...] = ()
        self._tell_at = 0.0  # when the next progress event is due
        parts, learned = self.speculation, drafter and drafter.start not in ("random", "target")
        self.guards = Guards(self._write, [parts.proposer.name, MergedDrafter.name] * bool(learned))
        self._usual_gap = math.inf  # mean logprob gap of the first sound check
        self._digest = (0, "")  # step, hash of what this rank has drawn in it so far
        self.last_rollout: Rollout | None = None
        self.last_prompts: list[list[int]] = []
        self.add_callback(RunLogCallback(self))

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[list[int]], list[list[float]]]:
        """One completion per prompt, drawn by our engine; see the module's docstring."""
        if images is not None or multimodal_fields:
            raise ConfigError("minitlt generates text only; images need TRL's own GRPOTrainer")
        training = self.model.training
        prompts = [list(map(int, ids)) for ids in prompt_ids]
        self.refresh_weights()
        keys = self._row_keys(len(prompts), training)
        step = self.state.global_step + 1
        parts = self.speculation
        if training:
            parts.spot.begin(step)
            parts.engine.bandit.renew(parts.ngram.name)  # a policy that moved repeats other things
            version = parts.engine.policy_version
            self._write("rollout_start", step=step, rows=len(prompts), version=version)
        rollout = parts.engine.generate(prompts, self.sampling, keys)
        self.guards.rollout(keys, rollout)
        if training:  # the run log, idle time and checks are of training alone
            swaps = self._log_rollout(step, rollout)
            receipt = self._use_idle_time(step, rollout)
            every = self.rollout_config.check_every
            if every and (self.generation - 1) % every == 0 and self.sampling.temperature > 0:
                row = keys[0] % len(keys)
                self._check_logprobs(prompts[row], rollout, row)
            self._record_metrics("train", rollout, receipt, swaps)
            self.last_rollout, self.last_prompts = rollout, prompts
        else:
            self._record_metrics("eval", rollout)
        return rollout.completion_ids, rollout.logprobs

    def refresh_weights(self) -> None:
        """Copies the policy into the engine if it moved since the last time. Collective."""
        model = self.accelerator.unwrap_model(self.model_wrapped)
        fingerprint = weights_fingerprint(model, self.state.global_step)
        if fingerprint == self._fingerprint:
            return
        engine = self.speculation.engine
        engine.target.refresh(full_parameters(model))
        engine.policy_version += 1
        self._fingerprint = fingerprint

    def _check_logprobs(self, prompt: list[int], rollout: Rollout, row: int) -> None:
        """A row's logprobs against those of the trainer's own model, on every rank. Collective.

        If they differ, the engine gets its weights again and the row is drawn once more: that
        tells weights that were stale from two models that compute something different.
        """
        engine = self.speculation.engine
        narrow = torch.bfloat16 if self.accelerator.mixed_precision != "no" else torch.float32
        gaps = self._logprob_gaps(prompt, rollout.completion_ids[row], rollout.logprobs[row])
        limits = gap_limits([engine.target.dtype, self.model.dtype, narrow], self._usual_gap)
        for name, gap in zip(("guard/logprob_gap", "guard/logprob_gap_mean"), gaps, strict=True):
            self._metrics["train"][name].append(gap)
        if all(map(le, gaps, limits)):
            self._usual_gap = gaps[1] if self._usual_gap == math.inf else self._usual_gap
            return
        self._fingerprint = ()
        self.refresh_weights()
        again = engine.generate([prompt], self.sampling, [rollout.keys[row]])
        after = self._logprob_gaps(prompt, again.completion_ids[0], again.logprobs[0])
        seen, allowed, now = (f"{a:.3g} (mean {b:.3g})" for a, b in (gaps, limits, after))
        seen = f"a row's logprobs were {seen} nats off the trainer's, {allowed} allowed; "
        if all(map(le, after, limits)):
            self.guards.say("stale_weights", seen + "refreshing the engine's weights mended it")
        else:
            self.guards.say("logprobs_differ", f"{seen}{now} after a refresh of the weights")

    def _logprob_gaps(
        self, prompt: list[int], tokens: list[int], logprobs: list[float]
    ) -> tuple[float, float]:
        """Largest and mean difference of a token's logprob, the most of all ranks; no generator is
        touched."""
        tokens, training = tokens[:_CHECKED_TOKENS], self.model.training
        ids = torch.tensor([prompt + tokens], device=self.accelerator.device)
        self.model.eval()
        try:
            with torch.no_grad():
                own, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, ids, torch.ones_like(ids), len(tokens)
                )
        finally:
            self.model.train(training)
        gaps = (own[0].float() - own.new_tensor(logprobs[: len(tokens)]).float()).abs()
        gaps = torch.stack([gaps.max(), gaps.sum() / max(len(tokens), FEW_TOKENS)])
        gaps = torch.where(gaps.isnan(), torch.inf, gaps)
        largest, mean = self.accelerator.gather(gaps[None]).amax(0).tolist()
        return largest, mean

    def _row_keys(self, num_rows: int, training: bool) -> list[int]:
        if training:
            generation, self.generation = self.generation, self.generation + 1
        else:
            generation = _EVAL_GENERATION + self.evaluations
            self.evaluations += 1
        first = self.accelerator.process_index * num_rows
        seed = self.args.seed
        return [row_key(seed, generation, first + i) for i in range(num_rows)]

    def _use_idle_time(self, step: int, rollout: Rollout) -> Receipt:
        """Harvest until the last rank is done and merge; then all ranks agree on a vocabulary."""
        parts = self.speculation
        if parts.spot.mode == INLINE:
            receipt = parts.spot.inline(step, rollout.stats.seconds)
        else:
            receipt = parts.spot.harvest(step)
        if parts.spot.mode == OFF:
            return receipt
        counts = parts.trainer.buffer.counts()
        if self.accelerator.num_processes > 1:
            counts = counts.to(self.accelerator.device)
            dist.all_reduce(counts)
        parts.trainer.refresh_vocab(counts.cpu())
        parts.trainer.buffer.next_step()
        parts.proposer.reload()
        parts.engine.bandit.renew(parts.proposer.name)
        return receipt

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        for path in folder.glob("*.safetensors") if self.args.should_save else ():
            # The library makes them private, whatever the user's umask says.
            shutil.copymode(folder / TRAINING_ARGS_NAME, path)

    def _between_steps(self, engine: RolloutEngine) -> None:
        self.speculation.between_steps(engine)
        if (now := time.perf_counter()) < self._tell_at or not self.model.training:
            return
        self._tell_at = now + 1.0
        stats, active, seconds = engine.stats, len(engine.active), now - engine.started
        self._write(
            "rollout_progress",
            step=self.state.global_step + 1,
            active=active,
            done=engine.num_rows - active - len(engine.waiting),
            tokens=stats.tokens,
            seconds=seconds,
            tok_s=stats.tokens / seconds,
            accept_len=stats.accept_length,
            arm=engine.arm.name,
        )

    def _write(self, event: str, **fields: Any) -> None:
        if self.event_log is not None:
            self.event_log.write(event, **fields)

    def _log_rollout(self, step: int, rollout: Rollout) -> int:
        """Returns how many hot swaps the rollout had."""
        stats = rollout.stats
        before = self._digest[1] if self._digest[0] == step else ""
        text = before + json.dumps(rollout.completion_ids)
        self._digest = (step, hashlib.sha256(text.encode()).hexdigest()[:16])
        self._write(
            "rollout_end",
            step=step,
            seconds=stats.seconds,
            rows=len(rollout.completion_ids),
            tokens=stats.tokens,
            verify_steps=stats.verify_steps,
            accept_len=stats.accept_length,
            accept_by_position=stats.accept_by_position,
            drafts_by_position=stats.drafted,
            lengths=[len(c) for c in rollout.completion_ids],
            digest=self._digest[1],
            truncated=rollout.finish_reasons.count("length"),
            arms=stats.arms,
            arms_by_rows=stats.arms_by_rows,
            drafter_version=self.speculation.trainer.version,
            active_trace=[list(pair) for pair in stats.active_trace],
        )
        swaps = self.speculation.swap_results()
        for result in swaps:
            self._write("swap_result", step=step, **result)
        return len(swaps)

    def _record_metrics(
        self, mode: str, rollout: Rollout, receipt: Receipt | None = None, swaps: int = 0
    ) -> None:
        """TRL's own metrics get ours beside them, as sums over ranks (one gather)."""
        stats = rollout.stats
        mine = [float(stats.tokens), stats.step_tokens, stats.row_steps, stats.verify_steps]
        mine.append(stats.seconds)
        if receipt:
            trained = receipt.drafter_steps
            loss = receipt.loss_last * trained if trained else 0.0
            mine += [receipt.available_s, receipt.harvested_s, trained, loss, swaps]
        every = self.accelerator.gather(torch.tensor([mine], device=self.accelerator.device))
        tokens, step_tokens, row_steps, steps, _, *idle = every.sum(0).tolist()
        slowest = every[:, 4].max().item()
        metrics = {
            "spec/accept_length": step_tokens / max(row_steps, 1),
            "spec/verify_steps": steps,
            "rollout/seconds": slowest,
            "rollout/tokens_per_second": tokens / max(slowest, 1e-9),
        }
        names = ("idle_seconds", "harvested_seconds", "drafter_steps", "drafter_loss", "swaps")
        spot = dict(zip(names, idle, strict=False))  # an evaluation has none of them
        if spot.get("drafter_steps"):
            spot["drafter_loss"] /= spot["drafter_steps"]
        metrics |= {f"spot/{name}": x for name, x in spot.items() if x or name != "drafter_loss"}
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)


class RunLogCallback(TrainerCallback):
    """Writes rank 0's `update` and sample `row` events after every step; looks at rewards.

    TRL collects its metrics in lists that it empties when it logs. What a step has added to them
    is that step's own, whatever `logging_steps` says; the loss and the norm of its gradient are
    told only when TRL logs.
    """

    def __init__(self, trainer: MiniTLTTrainer) -> None:
        self.trainer = trainer
        self.fields: dict[str, Any] = {}
        self._read: dict[str, int] = {}  # how many values of TRL's lists earlier steps have added
        self._sampled: Rollout | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.guards.rewards(self.trainer.reward_funcs)
        metrics = self.trainer._metrics["train"]
        lists = {name: metrics.get(key, []) for name, key in _TRL_METRICS.items()}
        news = {name: values[self._read.get(name, 0) :] for name, values in lists.items()}
        self._read = {name: len(values) for name, values in lists.items()}
        mean = {name: sum(values) / len(values) for name, values in news.items() if values}
        seconds = mean.get("step_seconds", 0.0)
        update = max(seconds - sum(news["rollout"]), 0.0)  # of all its generations
        self.fields = {"step": state.global_step, "seconds": update, "step_seconds": seconds}
        self.fields |= {name: mean.get(name) for name in ("reward", "reward_std", "mean_length")}
        self.fields |= {name: mean[name] for name in ("kl", "entropy") if name in mean}
        if not control.should_log:
            self._write(loss=None, grad_norm=None)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs and "loss" in logs and self.fields.get("step") == state.global_step:
            self._read = {}
            self._write(loss=logs["loss"], grad_norm=logs.get("grad_norm"))

    def _write(self, **fields: Any) -> None:
        if self.trainer.accelerator.is_main_process:
            self.trainer._write("update", **self.fields, **fields)
            self._sample_rows(self.fields["step"])

    def _sample_rows(self, step: int) -> None:
        trainer = self.trainer
        rollout, tokenizer = trainer.last_rollout, trainer._tokenizer
        if rollout is None or rollout is self._sampled:  # a step on an earlier generation
            return
        self._sampled = rollout
        of_each_group = sorted(range(len(rollout.completion_ids)),
                               key=lambda i: i % trainer.args.num_generations)  # fmt: skip
        for i in of_each_group[: trainer.rollout_config.sample_rows]:
            tokens = rollout.completion_ids[i]
            trainer._write(
                "row",
                step=step,
                row=i,
                prompt=tokenizer.decode(trainer.last_prompts[i], skip_special_tokens=True),
                completion=tokenizer.decode(tokens, skip_special_tokens=True),
                reward=self._reward(i, len(rollout.completion_ids)),
                token_flags=rollout.accepted[i],
                token_texts=[tokenizer.decode([t]) for t in tokens],
            )

    def _reward(self, row: int, num_rows: int) -> float | None:
        """The weighted reward of rank 0's `row`, from TRL's log of all ranks' rows, in rank order;
        None where no function applied, or where two functions share a name and thereby a log."""
        trainer, names = self.trainer, self.trainer.reward_func_names
        at = row - trainer.accelerator.num_processes * num_rows
        values = [trainer._logs["rewards"][name][at] for name in names]
        weighted = zip(trainer.reward_weights.tolist(), values, strict=True)
        known = [weight * value for weight, value in weighted if not math.isnan(value)]
        return sum(known) if known and len(set(names)) == len(names) else None


def refuse_bypasses(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for TRL options that would generate without our engine."""
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if options.get(name):
            raise ConfigError(
                f"{name}: true cannot be used here; rollouts come from minitlt's engine"
            )


def sampling_params(generation: dict[str, Any]) -> SamplingParams:
    """TRL's merged generation settings as the engine's.

    Raises ConfigError for a setting that the engine does not have.
    """
    values: dict[str, Any] = {}
    for name, value in generation.items():
        if name in _SILENT or value is None:
            continue
        if name not in _PASSED:
            raise ConfigError(
                f"generation_kwargs.{name} is not supported by minitlt; {suggest(name, _PASSED)}"
            )
        values[_PASSED[name]] = value
    if not generation.get("do_sample", True):  # null too, as for transformers
        values["temperature"] = 0.0
    for name in ("stop_ids", "suppress_ids", "stop_strings"):
        given = values.get(name, ())
        values[name] = (given,) if isinstance(given, int | str) else tuple(given)
    return SamplingParams(**values)


def build_speculation(
    model: Any,
    rollout: RolloutConfig,
    drafter: DrafterConfig,
    spot: SpotConfig,
    *,
    device: torch.device,
    trains_in: torch.dtype = torch.float32,
    mixed: str = "no",
    rank: int = 0,
    world_size: int = 1,
    log: EventLog | None = None,
    seed: int = 0,
) -> Speculation:
    """Target replica, drafters, bandit and idle-time trainer for one rank."""
    if spot.steps_per_window and not drafter.pack_tokens:
        raise ConfigError("spot.steps_per_window needs drafter.pack_tokens, e.g. 256: otherwise "
                          "the size of a step follows the clock")  # fmt: skip
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    trains_in = torch.bfloat16 if mixed == "bf16" else trains_in
    if world_size > 1 and device.type == "cpu":
        native.agree(rank)
    dtype = decoding_dtype(rollout.dtype, trains_in, device)
    target = make_target(
        base, dtype=dtype, device=device, backend=rollout.backend, weights=full_parameters(model)
    )
    eagle = start_drafter(model, target, drafter)
    if world_size > 1:  # before FSDP shards it, the model may hold its weights on rank 0 alone
        for tensor in eagle.state_dict().values():
            dist.broadcast(tensor, 0)
    buffer = ReplayBuffer(drafter, vocab_size=base.config.vocab_size)
    proposer = Eagle3Proposer(eagle, drafter, buffer=buffer)
    trainer = DrafterTrainer(eagle, buffer, drafter)
    arms, quantized = with_int8([Arm.parse(text) for text in rollout.arms], target)
    if (
        device.type == "cpu"
        and not target.decoder.startswith("native")
        and any(arm.width > 1 for arm in arms)
    ):
        logger.warning(
            "without native code (minitlt doctor) a tree among rollout.arms may change a token "
            "where two nearly tie; the law stays"
        )
    bandit = Bandit(
        arms,
        epsilon=rollout.epsilon,
        window=rollout.window,
        seed=seed,
    )
    ngram = NgramDrafter(drafter)
    engine = RolloutEngine(
        target,
        [ngram, proposer, MergedDrafter(proposer, ngram), *quantized],
        bandit,
        verify=rollout.verify,
        max_rows=rollout.max_rows,
        cache_gb=rollout.cache_gb,
        prefill_chunk=rollout.prefill_chunk,
    )
    store = dist.distributed_c10d._get_default_store() if world_size > 1 else dist.HashStore()
    idle = SpotTrainer(trainer, store, rank, world_size, spot, log=log)
    return Speculation(engine, idle, trainer, proposer, ngram)


def start_drafter(model: Any, target: Any, settings: DrafterConfig) -> Eagle3Drafter:
    """A drafter from nothing, from the target's own weights, or from a saved one; tied."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    size = Eagle3Config.from_target(base.config, settings)
    if settings.start not in ("random", "target"):
        eagle = import_drafter(resolve_drafter(settings.start), size, device=target.device)
    else:
        eagle = Eagle3Drafter(size, device=target.device, seed=settings.seed)
    eagle.tie(target.embed_weight, target.head_weight)
    if settings.start == "target":
        last = f"layers.{eagle.config.num_target_layers - 1}."
        named = full_parameters(model)
        start_from_target(eagle, {n: t for n, t in named if last in n or n == "model.norm.weight"})
    return eagle


def make_rollout_func(
    engine: RolloutEngine,
    params: SamplingParams,
    *,
    seed: int = 0,
    before: Callable[[Any], None] | None = None,
) -> Callable[[Sequence[Any], Any], dict[str, Any]]:
    """A `rollout_func` for a stock GRPOTrainer, around an engine of your own.

    before(trainer) runs first; refresh the engine's weights there:
    `engine.target.refresh(full_parameters(trainer.accelerator.unwrap_model(trainer.model)))`.
    TRL gives this seam no importance sampling and no tools.
    """
    calls = 0

    def rollout_func(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        nonlocal calls
        if before is not None:
            before(trainer)
        prompt_ids, _, _ = trainer._tokenize_prompts(list(prompts))
        first = trainer.accelerator.process_index * len(prompt_ids)
        keys = [row_key(seed, calls, first + i) for i in range(len(prompt_ids))]
        calls += 1
        rollout = engine.generate([list(ids) for ids in prompt_ids], params, keys)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": rollout.completion_ids,
            "logprobs": rollout.logprobs,
        }

    return rollout_func
