"""Run configuration: a recipe in YAML plus overrides, checked before minutes are spent.

A recipe is flat and speaks TRL's language: every field of GRPOConfig, ModelConfig and TRL's script
arguments under its own name, so that a plain TRL GRPO file runs unchanged. minitlt adds `nproc`
and the blocks `task:`, `rollout:`, `drafter:`, `spot:`; of what `trl grpo` takes beside the fields
it knows `env:`, `num_processes` (our `nproc`) and `accelerate_config`. The command line overrides
all of them: `--learning_rate 1e-5`, `--rollout.dtype bf16`. Unknown keys are errors that name the
nearest valid one; wrong types say what would be right.

Left out: environment-variable interpolation, config inheritance, Python in configs.
Try it: `minitlt train --dry-run`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from minitlt.common import counted, one_line, option, suggest

BLOCKS = ("task", "rollout", "drafter", "spot")
DEFAULT_RECIPE = "01_smollm2_cpu"


class ConfigError(ValueError):
    """The configuration is wrong; the message says where and what would be right."""


@dataclass
class TaskConfig:
    """What is trained on: a data set and its rewards."""

    name: str = option("", "reasoning-gym name, gsm8k, a Hub data set, or a .jsonl file")
    options: dict[str, Any] = option({}, "options of the data set, passed on as they are")


@dataclass
class RolloutConfig:
    """How completions are generated."""

    dtype: str = option("auto", "weights for decoding: auto (the trainer's), fp32, bf16")
    backend: str = option("auto", "forward: auto, fused (written out) or module (transformers)")
    arms: list[str] = option(
        ["off", "ngram-3", "eagle-2", "eagle-3", "eagle-4"],
        "ways to draft the bandit chooses from: off, SOURCE-DEPTH, SOURCE-DEPTHxWIDTH or "
        "SOURCE-DEPTHxWIDTHbNODES, and with pNN only drafts likely by NN %; sources: ngram, eagle, "
        "merged, int8 (chains by the policy in 8 bits, on a CPU with a C compiler)",
    )
    verify: str = option("coupled", "coupled (same tokens as plain), or rejection (same law)")
    epsilon: float = option(0.0, "share of steps with an arm at random; hope explores without it")
    window: int = option(40, "verify steps the bandit remembers per arm and bucket")
    max_rows: int = option(0, "rows decoded at once; 0 = all that fit the cache budget")
    cache_gb: float = option(0.0, "key/value cache budget in GiB; 0 = 60 % of a rank's free memory")
    prefill_chunk: int = option(512, "prompt tokens per prefill forward")
    importance_sampling: str = option(
        "auto", "TRL's correction for sampler/trainer differences: auto (on for bf16), on, off"
    )
    check_every: int = option(
        10, "generations between two checks of logprobs against the trainer's; 0 = never"
    )
    sample_rows: int = option(2, "completions per step kept in the log with their token marks")

    def __post_init__(self) -> None:
        choices = {
            "dtype": ("auto", "fp32", "bf16"),
            "backend": ("auto", "fused", "module"),
            "verify": ("coupled", "rejection"),
            "importance_sampling": ("auto", "on", "off"),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise ConfigError(f"rollout.{name}: {value!r} is not one of {', '.join(allowed)}")
        if not 0 <= self.epsilon <= 1:
            raise ConfigError(f"rollout.epsilon: {self.epsilon} is not between 0 and 1")
        least_of = {"window": 4, "prefill_chunk": 1, "check_every": 0, "max_rows": 0, "cache_gb": 0,
                    "sample_rows": 0}  # fmt: skip
        for name, least in least_of.items():
            if not least <= getattr(self, name) < float("inf"):
                raise ConfigError(f"rollout.{name}: must be at least {least}, and finite")


@dataclass
class RunConfig:
    """One run: TRL's fields as given, and minitlt's blocks as plain mappings or dataclasses."""

    trl: dict[str, Any]
    task: dict[str, Any]
    rollout: dict[str, Any]
    drafter: dict[str, Any]
    spot: dict[str, Any]
    nproc: int = 1
    accelerate_config: str = ""
    env: dict[str, str] = field(default_factory=dict)

    def as_yaml(self) -> str:
        flat: dict[str, Any] = {"nproc": self.nproc}
        if self.accelerate_config:
            flat["accelerate_config"] = self.accelerate_config
        flat |= ({"env": self.env} if self.env else {}) | self.trl
        flat |= {name: getattr(self, name) for name in BLOCKS if getattr(self, name)}
        return yaml.safe_dump(flat, sort_keys=False, allow_unicode=True)


def describe(name: str, block: Any) -> list[str]:
    """A line for each option of a block: its value and what it means."""
    return [f"{name}.{option.name}: {getattr(block, option.name)}  ({option.metadata['help']})"
            for option in fields(block)]  # fmt: skip


def recipe_paths() -> dict[str, Path]:
    """Recipe name -> file, for the recipes that come with the package."""
    here = Path(__file__).parent
    for folder in (here / "recipes", here.parent / "recipes"):
        if found := sorted(folder.glob("*.yaml")):
            return {path.stem: path for path in found}
    return {}


def find_recipe(name: str) -> Path:
    """The recipe's file, by name or unique prefix. Raises ConfigError with the nearest names."""
    recipes = recipe_paths()
    if name in recipes:
        return recipes[name]
    hits = [path for stem, path in recipes.items() if stem.startswith(name)]
    if len(hits) == 1:
        return hits[0]
    raise ConfigError(f"no recipe {name!r}; {suggest(name, recipes)}. `minitlt recipes` lists them")


def load_config(path: Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a recipe and applies overrides with dotted names for the blocks.

    Raises ConfigError for a file that cannot be read or is not a mapping. Key names are checked
    later, by `build` and by TRL's parser, which know the fields.
    """
    return make_config(read_mapping(path), overrides or {}, str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file of names and values. Raises ConfigError for any other."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read config {path}: {error.strerror}") from error
    raw = _read_yaml(text, f"{path} is not valid YAML")
    if not isinstance(raw, dict) or not all(isinstance(key, str) for key in raw):
        raise ConfigError(f"{path} must be a mapping of field names to values")
    return raw


def make_config(raw: dict[str, Any], overrides: Mapping[str, Any], source: str) -> RunConfig:
    """A RunConfig from a mapping; `overrides` win. Raises ConfigError as `load_config` does."""
    raw = dict(raw)
    blocks: dict[str, dict[str, Any]] = {}
    for name in BLOCKS:
        block = raw.pop(name, None)
        if name == "task" and isinstance(block, str):
            block = {"name": block}
        if block is not None and not isinstance(block, dict):
            raise ConfigError(f"{source}: block {name!r} must be a mapping, not {block!r}")
        blocks[name] = dict(block or {})
    for key, value in overrides.items():
        block_name, dot, rest = key.partition(".")
        if key == "task" and isinstance(value, str):
            if value != blocks["task"].get("name"):
                blocks["task"] = {"name": value}
        elif dot and block_name in BLOCKS:
            _set_nested(blocks[block_name], rest.split("."), value, key)
        elif dot:
            raise ConfigError(f"unknown block in {key!r}; {suggest(block_name, BLOCKS)}")
        else:
            raw[key] = value
    alias = raw.pop("num_processes", 1)
    nproc = raw.pop("nproc", alias)
    if not isinstance(nproc, int) or isinstance(nproc, bool) or nproc < 1:
        raise ConfigError(f"nproc must be a positive whole number, not {nproc!r}")
    env = raw.pop("env", None) or {}
    if not isinstance(env, dict):
        raise ConfigError(f"{source}: env must be a mapping of names to values, not {env!r}")
    return RunConfig(
        trl=raw,
        nproc=nproc,
        accelerate_config=coerce(raw.pop("accelerate_config", ""), str, "accelerate_config"),
        env={str(name): str(value) for name, value in env.items()},
        **blocks,
    )


def shrink(config: RunConfig, given: Iterable[str] = ()) -> None:
    """`--smoke`: two steps of a few short completions, to see that a whole run goes through.

    What is in `given` was asked for on the command line and stays.
    """
    small = {
        "max_steps": 2,
        "save_steps": 1,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "num_generations": 2,
        "max_completion_length": 32,
    }
    for name in ("steps_per_generation", "generation_batch_size"):  # they follow from the others
        config.trl.pop(name, None)
    config.trl |= {name: value for name, value in small.items() if name not in set(given)}
    options = config.task.setdefault("options", {}) if config.task else None
    if isinstance(options, dict):
        size = options.get("size")
        options["size"] = min(size, 8) if isinstance(size, int) else 8


_FIXED = ("nproc", "model_name_or_path", "task", "dataset_name", "datasets", "seed", "use_peft",
          "per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation",
          "generation_batch_size", "num_generations", "num_iterations", "save_only_model",
          "drafter.start", "drafter.draft_vocab_size", "drafter.train_head",
          "drafter.tap_dtype")  # fmt: skip


def refuse_changes(old: RunConfig, new: RunConfig) -> None:
    """Raises ConfigError for a value of `new` with which the checkpoints of a run that was begun
    with `old` cannot be gone on from, or would not go on with the same run."""
    before, after = ({"nproc": c.nproc, "task": c.task, **c.trl}
                     | {f"drafter.{name}": value for name, value in c.drafter.items()}
                     for c in (old, new))  # fmt: skip
    for name in _FIXED:
        was, wish = before.get(name, "its default"), after.get(name, "its default")
        if was != wish:
            raise ConfigError(f"--resume cannot change {name}: it is {was} in this run, not {wish}")


def accelerate_file(name: str) -> Path:
    """The file behind `accelerate_config`: a path, or the name of one that TRL brings."""
    if (path := Path(name).expanduser()).is_file():
        return path
    spec = importlib.util.find_spec("trl")
    places = (spec.submodule_search_locations if spec else None) or [""]
    own = Path(places[0]) / "accelerate_configs"
    known = sorted(p.stem for p in own.glob("*.yaml"))
    if name in known:
        return own / f"{name}.yaml"
    raise ConfigError(f"accelerate_config: no file {name!r}; {suggest(name, known)}")


def _set_nested(block: dict[str, Any], path: list[str], value: Any, key: str) -> None:
    for part in path[:-1]:
        block = block.setdefault(part, {})
        if not isinstance(block, dict):
            raise ConfigError(f"{key!r}: {part!r} is not a block")
    block[path[-1]] = value


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--flag`, `--no_flag`, with YAML values; dashes mean
    underscores in names. Several values after one key make a list.

    >>> parse_overrides(["--learning-rate", "1e-5", "--rollout.arms", "ngram-2", "eagle-3"])
    {'learning_rate': 1e-05, 'rollout.arms': ['ngram-2', 'eagle-3']}

    Raises ConfigError for a value without a key.
    """
    words: dict[str, list[str]] = {}
    key = ""
    for argument in arguments:
        if argument.startswith("--") and len(argument) > 2:
            key, equals, value = argument[2:].partition("=")
            key = key.replace("-", "_")
            words[key] = [value] if equals else []
        elif key:
            words[key].append(argument)
        else:
            raise ConfigError(f"{argument!r} stands without a key; write --key value")
    result: dict[str, Any] = {}
    for key, texts in words.items():
        values = [_read_yaml(text, f"--{key}: cannot read {text!r}") for text in texts]
        if values:
            result[key] = values[0] if len(values) == 1 else values
        else:
            result[key.removeprefix("no_")] = not key.startswith("no_")
    return result


def _read_yaml(text: str | bytes, complaint: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # nosec B506
    except Exception as error:  # !!bool x, 2024-13-45, [[[..: its readers raise what they like
        raise ConfigError(f"{complaint}: {one_line(error)}") from error


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-5 as text; everybody who writes a learning rate means a number. And it
    lets a key be given twice, which nobody means."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            if isinstance(key.value, str) and key.value in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"key {key.value!r} is there twice, again in line {line}")
            seen.add(str(key.value))
        return node


_FLOAT = re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def build(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    """An instance of dataclass `cls` from a mapping, with checked names and types.

    Raises ConfigError that names `where.key` and the nearest valid key or the wanted type.
    """
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    hints = typing.get_type_hints(cls)
    clean = {}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"unknown key {where}.{key}; {suggest(key, fields)}")
        clean[key] = coerce(value, hints[key], f"{where}.{key}")
    try:
        return cls(**clean)
    except ValueError as error:
        raise error if isinstance(error, ConfigError) else ConfigError(str(error)) from error


def coerce(value: Any, hint: Any, where: str) -> Any:
    """`value` as the annotated type, or ConfigError. An int will do for a float, not the reverse;
    types that YAML has no word for (enums, classes) are left to their owner."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        if value is None and len(kinds) < len(typing.get_args(hint)):
            return None
        for kind in kinds[:-1]:
            with suppress(ConfigError):
                return coerce(value, kind, where)
        return coerce(value, kinds[-1], where)
    kind = origin or hint
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in (str, list, tuple) and value is False:
        value = "off"  # YAML 1.1 reads a bare `off` as false
    if kind in (list, tuple):
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where}: expected a list, not {value!r}")
        inner = (typing.get_args(hint) or (Any,))[0]
        return kind(coerce(item, inner, where) for item in value)
    if kind not in _TYPE_NAMES:
        return value
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where}: expected {_TYPE_NAMES[kind]}, not {value!r}")
    if value != value or (kind is int and abs(value) >= 2**63):
        raise ConfigError(f"{where}: {value} is not a number that can be used")
    return value


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
}


def batch_algebra(args: Any, world_size: int) -> list[str]:
    """How TRL's batch settings multiply, as lines of text. `args` is a GRPOConfig.

    Raises ConfigError, with the algebra, when a group would be split across ranks: sibling drafts
    and shared prefills need a group's rows together.
    """
    per_device, steps = args.per_device_train_batch_size, args.steps_per_generation
    group, local = args.num_generations, per_device * steps
    accumulate = args.gradient_accumulation_steps
    if min(group, per_device, steps, args.num_iterations) < 1:
        raise ConfigError("per_device_train_batch_size, steps_per_generation, num_generations and "
                          "num_iterations must be at least 1")  # fmt: skip
    every = counted(world_size * local, "completion")
    lines = [
        f"{counted(world_size, 'rank')} x per_device_train_batch_size {per_device} x "
        f"steps_per_generation {steps} = {every} per generation",
        f"{counted(local, 'completion')} per rank / num_generations {group} = "
        f"{counted(local / group, 'prompt')} per rank",
        f"gradient_accumulation_steps {accumulate}: "
        f"{counted(accumulate / (steps * args.num_iterations), 'generation')} per optimizer step",
    ]
    if local % group:
        raise ConfigError(
            f"a group of num_generations {group} would be split across ranks: {lines[0]}; "
            f"{lines[1]}; choose per_device_train_batch_size x steps_per_generation as a multiple "
            f"of {group}"
        )
    return lines
