"""From a configuration to a finished run folder, on one rank.

`prepare` checks everything that can be wrong before minutes are spent: keys, types, the batch
algebra, the model, the task. `train` runs MiniTLTTrainer, and rank 0 then generates a sample of
the run's rows again, plain and speculative, to state speed and equality on identical rollouts.

The run folder: config.yaml (as given), events.jsonl, checkpoints/, policy/, drafter/, summary.json,
report.html, pictures/. How to try it: `minitlt train --dry-run`, `minitlt train`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import shutil
import typing
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import takewhile, zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoTokenizer, TrainerCallback
from transformers.integrations import get_available_reporting_integrations
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, get_dataset, get_peft_config
from trl.scripts.grpo import GRPOScriptArguments

from minitlt.common import (
    by_piece,
    is_whole,
    one_line,
    reading,
    seal,
    suggest,
    version_of,
    write_atomically,
)
from minitlt.config import (
    BLOCKS,
    ConfigError,
    RolloutConfig,
    RunConfig,
    TaskConfig,
    batch_algebra,
    build,
    coerce,
)
from minitlt.eagle3 import FILE, DrafterConfig, Eagle3Config, save_drafter
from minitlt.events import EventLog, read_events
from minitlt.export import import_drafter
from minitlt.kernels import row_key
from minitlt.models import HubUnreachable, resolve_drafter, resolve_model
from minitlt.report import has_ended, summarize
from minitlt.rewards import resolve_rewards
from minitlt.rl import MiniTLTTrainer, refuse_bypasses, sampling_params
from minitlt.spec import OFF, SOURCES, Arm, RolloutEngine, SamplingParams
from minitlt.spot import SpotConfig
from minitlt.stop import AlreadyTrained, StopCallback, checkpoints, last_checkpoint
from minitlt.swap import read_drafter
from minitlt.tasks import Task, encode_prompt, load_task
from minitlt.tensorfile import read_tensors, write_tensors

_TRL_CLASSES = (GRPOConfig, ModelConfig, GRPOScriptArguments, DatasetMixtureConfig)
_log = logging.getLogger("minitlt")
_STATE = "minitlt"  # our part of a checkpoint folder
_PROOF_GENERATION = 1 << 41  # keys of the final comparison, never used by training


@dataclass
class Prepared:
    """A checked configuration, ready to train."""

    config: RunConfig
    args: GRPOConfig
    model: ModelConfig
    script: GRPOScriptArguments
    mixture: DatasetMixtureConfig
    rollout: RolloutConfig
    drafter: DrafterConfig
    spot: SpotConfig
    task: Task | None
    model_path: str
    algebra: list[str]


def prepare(
    config: RunConfig, run_dir: Path, world_size: int | None = None, *, lazy: bool = False
) -> Prepared:
    """Checks the whole configuration and loads what is cheap.

    lazy: what only the Hub could tell is noted as not checked when the Hub does not answer.
    Raises ConfigError (or another ValueError) with one line that says what would be right.
    """
    rollout = build(RolloutConfig, config.rollout, "rollout")
    drafter = build(DrafterConfig, config.drafter, "drafter")
    spot = build(SpotConfig, config.spot, "spot")
    for text in rollout.arms:
        if Arm.parse(text).source not in (OFF, *SOURCES):
            raise ConfigError(
                f"rollout.arms: {text!r} has no drafter; sources: {', '.join(SOURCES)}"
            )
    refuse_bypasses(config.trl)
    args, model, script, mixture, algebra = _trl_configs(
        config.trl, run_dir, world_size or config.nproc
    )
    if not model.model_name_or_path:
        raise ConfigError("model_name_or_path is missing; the default model is 'smollm2-135m'")
    fetch = partial(_fetch, algebra if lazy else None)
    model_path = fetch(model.model_name_or_path, resolve_model, model.model_name_or_path) or ""
    task = fetch(config.task.get("name"), _load_task, config, args.seed)
    if drafter.start not in ("random", "target") and world_size is None:
        fetch(drafter.start, _check_drafter, drafter.start, model_path)
    if not config.task and not (script.dataset_name or mixture.datasets):
        raise ConfigError("no data: give task.name, dataset_name or datasets")
    if args.eval_strategy != "no" and config.task:
        raise ConfigError("eval_strategy: a task has no test split; use dataset_name, or 'no'")
    if (script.dataset_streaming or mixture.streaming) and args.max_steps < 1:
        raise ConfigError("streaming: a stream has no length; give max_steps")
    _check_packages(args, model)
    if not config.task:
        resolve_rewards(script.reward_funcs or [])  # names are checked here, not in a rank
        algebra.append("data set: not checked, TRL loads it when training begins")
    prepared = Prepared(
        config, args, model, script, mixture, rollout, drafter, spot, task, model_path, algebra
    )
    planned_sampling(prepared)
    _check_prompts(prepared)
    return prepared


def _check_packages(args: GRPOConfig, model: ModelConfig) -> None:
    """What TRL's fields ask for and only a rank would find missing."""
    if model.load_in_4bit or model.load_in_8bit:
        raise ConfigError("load_in_4bit, load_in_8bit: quantised policies are not supported")
    if model.use_peft and not find_spec("peft"):
        raise ConfigError('use_peft: needs peft; pip install peft, or ".[lora]" in the clone')
    for name in args.report_to:
        if name not in get_available_reporting_integrations():
            raise ConfigError(f"report_to: {name!r} is not installed (pip install {name}), or is "
                              "no tracker that TRL knows")  # fmt: skip


def planned_sampling(prepared: Prepared, **more: Any) -> SamplingParams:
    """What TRL's fields say about sampling. ValueError for what the engine does not have."""
    args, names = prepared.args, ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    for name, value in vars(args).items():
        if name.endswith("_kwargs") and isinstance(value, str):
            raise ConfigError(f"{name}: expected a mapping, not {value!r}")
    if not args.temperature > 0:
        raise ConfigError(f"temperature: must be above 0 to train, not {args.temperature:g}")
    fields = {name: getattr(args, name) for name in names}
    fields |= {"max_new_tokens": args.max_completion_length, **(args.generation_kwargs or {})}
    return sampling_params(fields | more)


def _fetch(notes: list[str] | None, name: Any, get: Callable[..., Any], *args: Any) -> Any:
    """get(*args); with `notes`, a note and None if only the Hub could have told."""
    try:
        return get(*args)
    except HubUnreachable:
        if notes is None:
            raise
        notes.append(f"{name}: not checked: no Hub")
        return None


def _check_drafter(start: str, model_path: str) -> None:
    folder = resolve_drafter(start)
    if model_path:
        with reading(Path(model_path)):
            config = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
        try:
            size = Eagle3Config.from_target(config)
            import_drafter(folder, size)
        except ValueError as error:
            raise ConfigError(f"drafter.start: {start!r}: {error}") from error


def _trl_configs(values: dict[str, Any], run_dir: Path, world_size: int) -> tuple[Any, ...]:
    """TRL's four configuration objects from one flat mapping, and the batch algebra."""
    fields = {f.name: cls for cls in _TRL_CLASSES for f in dataclasses.fields(cls) if f.init}
    hints = {cls: typing.get_type_hints(cls) for cls in _TRL_CLASSES}
    sorted_values: dict[Any, dict[str, Any]] = {cls: {} for cls in _TRL_CLASSES}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"unknown key {key!r}; {suggest(key, [*fields, *BLOCKS, 'nproc'])}")
        cls = fields[key]
        sorted_values[cls][key] = coerce(value, hints[cls][key], key)
    grpo = sorted_values[GRPOConfig]
    if not torch.cuda.is_available():
        grpo.setdefault("use_cpu", True)
        grpo.setdefault("bf16", False)
    grpo.setdefault("report_to", "none")
    if grpo.get("resume_from_checkpoint"):
        raise ConfigError("resume_from_checkpoint: leave it out; `minitlt train --resume RUN` goes "
                          "on with a run folder")  # fmt: skip
    if (wish := grpo.get("output_dir")) and os.environ.get("RANK", "0") == "0":
        _log.warning("output_dir %s: not used, all output goes to %s (--run-dir)", wish, run_dir)
    grpo["output_dir"] = str(run_dir / "checkpoints")
    algebra = batch_algebra(_batch_sizes(grpo, world_size), world_size)  # TRL's message has none
    try:
        with warnings.catch_warnings():  # TRL fills in fields that transformers is renaming
            warnings.simplefilter("ignore", FutureWarning)
            made = [cls(**sorted_values[cls]) for cls in _TRL_CLASSES]
            filled = ", ".join(f"{name} {value}" for name, value in resolved(made[0]).items())
            return *made, [f"resolved: {filled}", *algebra]
    except Exception as error:  # whatever its many checks raise
        raise ConfigError(f"TRL: {one_line(error)}") from error


def resolved(args: GRPOConfig) -> dict[str, Any]:
    """Fields that are filled in where they are not given, by us for this machine or by TRL."""
    names = ("use_cpu", "bf16", "report_to", "max_completion_length", "num_generations",
             "per_device_train_batch_size", "steps_per_generation", "learning_rate", "beta",
             "temperature", "gradient_checkpointing", "save_strategy", "seed")  # fmt: skip
    values = {name: getattr(args, name) for name in names}
    return {name: getattr(value, "value", value) for name, value in values.items()}  # of enums


def _batch_sizes(given: dict[str, Any], world_size: int) -> SimpleNamespace:
    """The sizes that GRPOConfig would settle on, before it is built."""
    fields = dataclasses.fields(GRPOConfig)
    size = SimpleNamespace(**{f.name: given.get(f.name, f.default) for f in fields})
    if size.steps_per_generation is None:
        size.steps_per_generation = size.gradient_accumulation_steps
        if size.generation_batch_size:
            whole = max(size.per_device_train_batch_size * world_size, 1)
            size.steps_per_generation = size.generation_batch_size // whole
    return size


def _load_task(config: RunConfig, seed: int) -> Task | None:
    if not config.task:
        return None
    task = build(TaskConfig, config.task, "task")
    if not task.name:
        raise ConfigError("task.name is missing, e.g. task: {name: chain_sum}")
    hints: dict[str, Any] = typing.get_type_hints(load_task)
    options: dict[str, Any] = {"seed": seed}
    for key, value in task.options.items():
        if not isinstance(key, str) or key in ("name", "options"):
            raise ConfigError(f"task.options: {key!r} cannot be an option")
        options[key] = coerce(value, hints.get(key, Any), f"task.options.{key}")
    loaded = load_task(task.name, **options)
    loaded.dataset  # noqa: B018  built now: odd columns are found before a rank starts
    return loaded


def _check_prompts(prepared: Prepared) -> None:
    """The longest prompt must leave room in the context; said before any model is loaded."""
    if prepared.task is None or not prepared.model_path:
        return
    path, trusted = prepared.model_path, bool(prepared.args.trust_remote_code)
    with reading(Path(path)):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
        context = config.max_position_embeddings
    for i, row in enumerate(prepared.task.rows):
        ids = encode_prompt(tokenizer, row["prompt"])
        if len(ids) >= context:
            raise ConfigError(
                f"row {i} of task {prepared.task.name!r} has a prompt of {len(ids)} tokens; the "
                f"model's context is {context}, so at most {context - 1} would leave room"
            )


def train(prepared: Prepared, run_dir: Path, resume: bool = False) -> None:
    """Trains on this rank; `resume`: from the newest whole checkpoint, else from the start. Rank 0
    also writes the results. Raises KeyboardInterrupt when the run was asked to stop."""
    rank = int(os.environ.get("RANK", "0"))
    log = EventLog(run_dir / "events.jsonl", rank)
    stop = StopCallback(run_dir)
    trainer = _make_trainer(prepared, log)
    begin = partial(_write_run_event, log, prepared, trainer)
    stop.listen(trainer.speculation.spot.close)
    start = last_checkpoint(run_dir) if resume else None
    if start:
        load_state(trainer, start / _STATE)
    if resume and rank == 0:  # newer ones are torn; written over file by file they would seem whole
        for torn in takewhile(lambda path: path != start, checkpoints(run_dir / "checkpoints")):
            shutil.rmtree(torn, ignore_errors=True)
    trainer.add_callback(stop)  # first: it says when nothing is left to do
    trainer.add_callback(StateCallback(trainer, begin))
    try:
        try:
            trainer.train(resume_from_checkpoint=str(start) if start else None)
        except AlreadyTrained:
            if not has_ended(read_events(log.path)):  # it was stopped while it wrote its results
                begin()
            if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
                trainer._load_best_model()
        _finish(trainer, run_dir, log, stop)
    finally:
        trainer.speculation.spot.close()


def _make_trainer(prepared: Prepared, log: EventLog) -> MiniTLTTrainer:
    args, model = prepared.args, prepared.model
    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation or "sdpa",
        "dtype": model.dtype,
        "trust_remote_code": bool(args.trust_remote_code),
        "use_safetensors": True,
        "device_map": None,  # TRL's default would spread it over all GPUs that a rank can see
        **(args.model_init_kwargs or {}),
    }
    if prepared.task is not None:
        dataset: Any = prepared.task.dataset
        rewards: list[Any] = list(prepared.task.reward_funcs)
        args.reward_weights = args.reward_weights or prepared.task.reward_weights
    else:
        dataset = hub_dataset(prepared, prepared.script.dataset_train_split)
        rewards = list(resolve_rewards(prepared.script.reward_funcs or []))
        if prepared.script.reward_model_name_or_path:
            rewards.insert(0, prepared.script.reward_model_name_or_path)
    return MiniTLTTrainer(
        model=prepared.model_path,
        reward_funcs=rewards,
        args=args,
        train_dataset=dataset,
        eval_dataset=None
        if args.eval_strategy == "no"
        else hub_dataset(prepared, prepared.script.dataset_test_split),
        peft_config=get_peft_config(model),
        rollout=prepared.rollout,
        drafter=prepared.drafter,
        spot=prepared.spot,
        log=log,
    )


def hub_dataset(prepared: Prepared, split: str) -> Any:
    """A split of the data that TRL's own fields name (dataset_name or datasets)."""
    script = prepared.script
    if prepared.mixture.datasets:
        return get_dataset(prepared.mixture)[split]
    return load_dataset(
        script.dataset_name,
        name=script.dataset_config,
        split=split,
        streaming=script.dataset_streaming,
    )


def _write_run_event(log: EventLog, prepared: Prepared, trainer: MiniTLTTrainer) -> None:
    if log.rank:
        return
    names = ("minitlt", "torch", "transformers", "trl", "accelerate", "triton", "safetensors")
    versions = {name: version for name in names if (version := version_of(name))}
    target = trainer.speculation.engine.target
    runs = [event["target"] for event in read_events(log.path) if event["event"] == "run"]
    if runs and (before := runs[-1].get("decoder", target.decoder)) != target.decoder:
        _log.warning("this run's tokens came from %r, and now come from %r, which rounds in "
                       "another way: they may differ from an uninterrupted run's",
                       before, target.decoder)  # fmt: skip
    log.write(
        "run",
        config={"nproc": prepared.config.nproc, **prepared.config.trl, **resolved(prepared.args)}
        | {"task": prepared.config.task}
        | {name: dataclasses.asdict(getattr(prepared, name)) for name in BLOCKS[1:]},
        versions={"python": platform.python_version()} | versions,
        world_size=trainer.accelerator.num_processes,
        target={
            "name": prepared.model.model_name_or_path,
            "layers": target.shape.num_layers,
            "backend": target.backend,
            "dtype": str(target.dtype).removeprefix("torch."),
            "decoder": target.decoder,
        },
        arms_served=[arm.name for arm in trainer.speculation.engine.bandit.arms],
        machine={"cpus": os.cpu_count(), "device": str(trainer.accelerator.device)},
    )


def _finish(trainer: MiniTLTTrainer, run_dir: Path, log: EventLog, stop: StopCallback) -> None:
    """Saves policy and drafter, then rank 0 compares plain and speculative on the same rows."""
    stop.obey(trainer.args.device)
    trainer.refresh_weights()
    trainer.save_model(str(run_dir / "policy"))
    if trainer.accelerator.is_main_process:
        save_drafter(run_dir / "drafter", trainer.speculation.drafter)
    stop.obey(trainer.args.device)
    if trainer.accelerator.is_main_process and not has_ended(events := read_events(log.path)):
        same = trainer.rollout_config.verify == "coupled"  # plain would give these very tokens
        measured = compare_plain(trainer) if trainer.last_prompts and same else {}
        log.write("summary", **{**summarize(events), **measured})
    trainer.accelerator.wait_for_everyone()  # ranks of NCCL must end their group together
    trainer.accelerator.end_training()


def compare_plain(trainer: MiniTLTTrainer) -> dict[str, Any]:
    """Generates the last step's prompts again, with new keys, without and with drafts.

    Both get the same keys, so the rollouts are identical and their times can be compared.
    token_mismatches counts differing tokens (a length difference counts its tokens too).
    """
    engine, prompts = trainer.speculation.engine, trainer.last_prompts
    keys = [row_key(trainer.args.seed, _PROOF_GENERATION, i) for i in range(len(prompts))]
    engine.on_step = None
    # An engine without drafters: none of them watches, so none can copy what it has just seen.
    alone = RolloutEngine(
        engine.target, max_rows=engine.max_rows, cache_gb=engine.cache_gb, decode=engine.decode
    )
    plain = alone.generate(prompts, trainer.sampling, keys)
    speculative = engine.generate(prompts, trainer.sampling, keys)
    return {
        "tok_s_plain": plain.stats.tokens_per_second,
        "tok_s_spec": speculative.stats.tokens_per_second,
        "token_mismatches": count_mismatches(plain.completion_ids, speculative.completion_ids),
    }


def count_mismatches(left: list[list[int]], right: list[list[int]]) -> int:
    """Positions at which two lists of completions differ; missing tokens count."""
    pairs = [pair for a, b in zip(left, right, strict=True) for pair in zip_longest(a, b)]
    return sum(a != b for a, b in pairs)


class StateCallback(TrainerCallback):
    """Completes every checkpoint with what is ours, then removes old ones (`save_total_limit`).

    The trainer would remove the old ones before the new one is whole, so its own limit is lifted.
    The drafter is written, and all is made whole, by a thread: training goes on meanwhile.
    """

    def __init__(self, trainer: MiniTLTTrainer, begin: Callable[[], Any] = lambda: None) -> None:
        self.trainer, self.begin = trainer, begin
        self.limit, trainer.args.save_total_limit = trainer.args.save_total_limit, None
        self.writing: Future[None] | None = None

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on_train_end()
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        save_state(self.trainer, folder / _STATE)
        self.trainer.accelerator.wait_for_everyone()
        if self.trainer.accelerator.is_main_process:
            kept = {state.best_model_checkpoint, str(folder)} - {None}  # the newest always stays
            self.writing = self.trainer.speculation.spot.checkpoint(
                folder / _STATE / FILE, partial(self._complete, folder, kept)
            )

    def _complete(self, folder: Path, kept: set[str]) -> None:
        seal(folder)
        found = checkpoints(folder.parent)
        for path in found[found.index(folder) :]:  # a newer one may be in the writing
            if len(kept) < (self.limit or len(kept) + 1) and is_whole(path):
                kept.add(str(path))
            elif str(path) not in kept:
                shutil.rmtree(path)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """A checkpoint that could not be written ends the run now, not at the next one."""
        if self.writing and self.writing.done():
            self.writing.result()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """The last checkpoint is whole, or its error ends the run."""
        if self.writing:
            self.writing.result()


def save_state(trainer: MiniTLTTrainer, folder: Path) -> None:
    """This rank's part of a checkpoint: one file of tensors with a checksum, renamed into place.

    It holds the drafter's optimizer, replay buffer, n-gram index, bandit, counters and, in the
    middle of a generation, the batches that TRL has not trained on yet. The drafter, the same on
    all ranks, has a file of its own (`SpotTrainer.checkpoint`).
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank, parts = trainer.accelerator.process_index, trainer.speculation
    every = trainer.args.steps_per_generation * trainer.args.num_iterations
    batches = (trainer._buffered_inputs or []) if trainer._step % every else []
    pieces = {"trainer": parts.trainer.state_dict(), "ngram": parts.ngram.state_dict()}
    pieces |= {f"batch{i}": batch for i, batch in enumerate(batches)}
    tensors = {
        f"{piece}.{name}": value
        for piece, values in pieces.items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    plain = {
        "ranks": trainer.accelerator.num_processes,
        "counters": {name: getattr(trainer, name) for name in _COUNTERS},
        "policy_version": parts.engine.policy_version,
        "bandit": parts.engine.bandit.state_dict(),
        "batches": [
            {name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)}
            for batch in batches
        ],
    }
    tensors["plain"] = torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)
    path = folder / f"rank{rank}.safetensors"
    write_atomically(path, lambda beside: write_tensors(beside, tensors, {}))


_COUNTERS = ("generation", "evaluations", "_step")  # _step: TRL's, of micro batches


def load_state(trainer: MiniTLTTrainer, folder: Path) -> None:
    """Raises ValueError when the drafter or this rank's part of the checkpoint is missing, torn
    or foreign."""
    rank, parts = trainer.accelerator.process_index, trainer.speculation
    path, ranks = folder / f"rank{rank}.safetensors", trainer.accelerator.num_processes
    hint = "; remove that checkpoint to resume from the one before, or start a new run"
    tensors, _ = read_tensors(path, hint)
    drafter, numbers = read_drafter(folder / FILE, parts.trainer.tensors(), hint)
    with reading(path, hint):
        pieces = by_piece(tensors)
        plain = json.loads(pieces["plain"][""].numpy().tobytes())
    if plain["ranks"] != ranks:
        raise ConfigError(f"{folder}: the run had {plain['ranks']} ranks, not {ranks}")
    with reading(path, hint):
        for name in _COUNTERS:
            setattr(trainer, name, plain["counters"][name])
        parts.engine.policy_version = plain["policy_version"]
        parts.engine.bandit.load_state_dict(plain["bandit"])
        parts.trainer.load(drafter, numbers["version"])
        parts.trainer.load_state_dict(pieces["trainer"])
        parts.ngram.load_state_dict(pieces["ngram"])
        device = trainer.accelerator.device
        trainer._buffered_inputs = [
            {**batch, **{n: t.to(device) for n, t in pieces[f"batch{i}"].items()}}
            for i, batch in enumerate(plain["batches"])
        ] or None
    parts.proposer.reload()
