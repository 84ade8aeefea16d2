"""A model behind the command line: generate with drafts, export a drafter.

`generate` is the rollout engine with a file on each side. A row's noise is keyed by (seed, row
index), so a row's text does not depend on the drafter, on the rows beside it or on where an earlier
call was killed. Every finished row is one line of the output, written at once with one `write`;
the next call reads them, cuts a torn last line off and makes only the rows that are missing.

`export` writes a run's drafter for another engine, and checks it.

Left out: a server, stop strings, several devices (the policy of a run is small enough for one).

How to run: `minitlt generate --help`, `minitlt export --help`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import operator
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from minitlt import native
from minitlt.common import counted, read_jsonl, reading
from minitlt.config import RolloutConfig
from minitlt.draft import Drafter
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import Eagle3Config, Eagle3Drafter
from minitlt.export import check_export, export_drafter, import_drafter
from minitlt.kernels import row_key
from minitlt.models import resolve_drafter, resolve_model
from minitlt.ngram import MergedDrafter, NgramDrafter
from minitlt.quantized import INT8_ARMS, int8_drafts, with_int8
from minitlt.slots import Target
from minitlt.spec import OFF, SOURCES, Arm, Bandit, RolloutEngine, Row, SamplingParams, SpecStats
from minitlt.target import LlamaTarget, make_target
from minitlt.tasks import encode_prompt, is_prompt
from minitlt.tensorfile import fingerprint

_CHUNK = 1024  # prompts handed to the engine at once; it refills its slots from them
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ADAPTER = "adapter_config.json"  # what a LoRA run's policy has in the place of config.json
_NO_CODE = {"trust_remote_code": False}  # left out, transformers would ask on the terminal
_SAFE = {**_NO_CODE, "use_safetensors": True}  # of weights: no pickles
_ROW = b'{"index": '  # what every line of the output begins with
Prompt = str | list[dict[str, Any]]


@dataclass
class Served:
    """A model, loaded, with everything that drafts for it; weights: a fingerprint of them."""

    weights: str
    engine: RolloutEngine
    tokenizer: Any
    stop_ids: tuple[int, ...]


def load_served(
    model: str,
    drafter: str = "",
    *,
    arms: Sequence[str] = (),
    dtype: str = "auto",
    max_rows: int = 0,
) -> Served:
    """Loads a model for generation. ValueError names the argument that is wrong.

    model: folder (a LoRA adapter's, too), Hub id or the default model's name. drafter: see
    `resolve_drafter`; "" for none. arms: ways to draft (`spec.Arm.parse`); none: what there is.
    dtype: fp32, bf16, or auto: bf16 on a GPU, and on a CPU where that gives the same tokens.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ValueError(f"--dtype: {dtype!r} is not one of auto, {', '.join(_DTYPES)}")
    if max_rows < 0:
        raise ValueError(f"--max-rows must be 0 (all that fit) or more, not {max_rows}")
    usual = RolloutConfig().arms if drafter else [OFF]
    chosen = [Arm.parse(text) for text in arms or usual]
    for arm in chosen:
        if arm.source not in (OFF, *SOURCES):
            raise ValueError(f"--arms: {arm.name!r} has no drafter; sources: {', '.join(SOURCES)}")
        if arm.source in ("eagle", "merged") and not drafter:
            raise ValueError(f"--arms: {arm.name!r} needs a draft model; give --drafter DIR")
    adapter = Path(model).expanduser()
    of_lora = (adapter / _ADAPTER).is_file()
    path = resolve_model(_under(adapter) if of_lora else model)
    folder = resolve_drafter(drafter) if drafter else None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = _DTYPES.get(dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    with reading(Path(path)):
        config = AutoConfig.from_pretrained(path, **_NO_CODE)
        tokenizer = AutoTokenizer.from_pretrained(path, **_NO_CODE)
    eagle = _read_drafter(folder, config, weights, device) if folder else None
    with reading(Path(path)):
        module = AutoModelForCausalLM.from_pretrained(path, dtype=weights, **_SAFE).to(device)
    if of_lora:
        module = _merged(module, adapter)
    stop_ids = stop_tokens(module, tokenizer)
    if dtype == "auto" and device.type == "cpu" and _is_narrow(module):
        weights = torch.bfloat16
    target = make_target(module, dtype=weights, device=device)
    if not arms and int8_drafts(target):
        chosen += map(Arm.parse, INT8_ARMS)
    chosen, drafters = with_int8(chosen, target)
    engine = RolloutEngine(
        target,
        drafters + _others(chosen, eagle, target),
        Bandit(chosen),
        max_rows=max_rows,
        decode=tokenizer.decode,
    )
    # The start of each tensor tells another model, dtype or train step; not where the files lie.
    parts = {name: tensor.detach().flatten()[:256] for name, tensor in module.named_parameters()}
    return Served(fingerprint(parts), engine, tokenizer, stop_ids)


def _others(arms: list[Arm], eagle: Eagle3Drafter | None, target: Target) -> list[Drafter]:
    """The drafters behind these arms, but for int8."""
    ngram, used = NgramDrafter(), {arm.source for arm in arms}
    drafters: list[Drafter] = [ngram] if used & {"ngram", "merged"} else []
    if eagle is not None:
        eagle.tie(target.embed_weight, target.head_weight)
        proposer = Eagle3Proposer(eagle)
        drafters += [proposer, MergedDrafter(proposer, ngram)]
    return drafters


def _is_narrow(module: Any) -> bool:
    """Whether native code would decode it in bf16 to the same bits: all products' weights are bf16
    numbers already. It then reads half the bytes."""
    if not native.runs(torch.bfloat16, torch.device("cpu")):
        return False
    matrices = (p for p in module.parameters() if p.dim() == 2)
    return LlamaTarget.supports(module.config) and all(
        torch.equal(p, p.bfloat16().float()) for p in matrices
    )


def _merged(module: Any, adapter: Path) -> Any:
    """The model with a LoRA adapter's weights in its own. ValueError without peft."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(f"{str(adapter)!r} is a LoRA adapter and needs peft: pip install peft"
                         ) from error  # fmt: skip
    with reading(adapter):
        return PeftModel.from_pretrained(module, str(adapter)).merge_and_unload()


def _under(adapter: Path) -> str:
    """The model under a LoRA adapter."""
    with reading(adapter / _ADAPTER):
        return str(json.loads((adapter / _ADAPTER).read_text())["base_model_name_or_path"])


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a completion: the generation config's, and the tokenizer's, as TRL does."""
    ids = model.generation_config.eos_token_id
    ids = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids:
        ids.insert(0, tokenizer.eos_token_id)
    return tuple(ids)


def _read_drafter(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, layout: str = ""
) -> Eagle3Drafter:
    """The drafter in `folder`, checked against the target's config, not yet tied."""
    try:
        size = Eagle3Config.from_target(config)
        return import_drafter(folder, size, layout=layout, dtype=dtype, device=device)
    except ValueError as error:
        raise ValueError(f"drafter {str(folder)!r}: {error}") from error


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSONL file: per line a text, a list of messages, or an object with a
    `prompt` that is one of these. ValueError names the line."""
    prompts = [_prompt(value, where) for where, value in read_jsonl(path)]
    if not prompts:
        raise ValueError(f"{path} holds no prompts; give one JSON object with 'prompt' per line")
    return prompts


def _prompt(value: Any, where: str) -> Prompt:
    if isinstance(value, dict):
        if "prompt" not in value:
            raise ValueError(f"{where}: no 'prompt'; it has {sorted(value)}")
        value = value["prompt"]
    if not is_prompt(value):
        raise ValueError(f"{where}: the prompt must be text or messages with role and content")
    prompt: Prompt = value
    return prompt


class RowFile:
    """Finished rows as JSON lines, in the order in which they finish; one write per row.

    settings: a text that says how rows are made. Rows that are there already (`done`) must have
    been made the same way from the same prompts, otherwise ValueError names the line.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], settings: str) -> None:
        self.path, self.done = path, set[int]()
        self.settings = hashlib.sha256(settings.encode()).hexdigest()[:12]
        if path.exists() and not path.is_file():  # a device may never end
            raise ValueError(f"--out {path} is not a plain file")
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--out {path} is being written by another process") from None
        except OSError as error:
            raise ValueError(f"cannot write --out {path}: {error.strerror}") from error
        data = path.read_bytes()
        whole, newline, torn = data.rpartition(b"\n")
        try:
            lines = whole.split(b"\n") if newline else []
            for number, line in enumerate(lines, 1):
                self._recall(line, prompts, number)
            if torn[: len(_ROW)] != _ROW[: len(torn)]:  # somebody else's: not ours to cut off
                raise ValueError(f"--out {path} does not end in a row of ours; choose another file")
        except ValueError:
            self.close()
            raise
        os.ftruncate(self._fd, len(whole + newline))  # what a kill tore is made again

    def _recall(self, line: bytes, prompts: Sequence[Prompt], number: int) -> None:
        where = f"--out {self.path} line {number}"
        try:
            row = json.loads(line)
            index, same = operator.index(row["index"]), row["settings"] == self.settings
            prompt = row["prompt"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"{where} is not a row of ours; choose another file") from None
        if not same or not 0 <= index < len(prompts) or prompt != prompts[index]:
            what = "prompt" if same else "model, seed or sampling options"
            raise ValueError(f"{where} was made from another {what}; choose another file")
        self.done.add(index)

    def write(self, row: dict[str, Any]) -> None:
        line = json.dumps({**row, "settings": self.settings}, ensure_ascii=False) + "\n"
        data = line.encode("utf-8", "surrogatepass")
        try:
            whole = os.write(self._fd, data) == len(data)
        except OSError:
            whole = False
        if not whole:
            raise ValueError(f"--out {self.path}: the disk is full; make room and start again")

    def close(self) -> None:
        os.close(self._fd)


class Meter:
    """Speed and accept length on stderr while the engine works: in place, or a line every 10 s."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self.live = total, 0, sys.stderr.isatty()
        self.over = SpecStats()  # sums over the engine's calls that are over
        self.started = self.told = time.perf_counter()

    def step(self, engine: RolloutEngine) -> None:
        """Runs after every verify step."""
        if time.perf_counter() - self.told >= (0.5 if self.live else 10.0):
            self.told = time.perf_counter()
            self.say(f", {len(engine.active)} active", engine.stats, "" if self.live else "\n")

    def add(self, stats: SpecStats) -> None:
        self.over = self._with(stats)

    def _with(self, stats: SpecStats) -> SpecStats:
        names = ("tokens", "first_tokens", "row_steps")
        return SpecStats(**{n: getattr(self.over, n) + getattr(stats, n) for n in names})

    def say(self, now: str = "", stats: SpecStats | None = None, end: str = "\n") -> None:
        all_ = self._with(stats) if stats else self.over
        seconds = time.perf_counter() - self.started
        text = f"{self.done} of {self.total} rows{now}, {counted(all_.tokens, 'token')} in "
        text += f"{seconds:.1f} s: {all_.tokens / seconds:.1f} tokens/s, "
        text += f"accept length {all_.accept_length:.2f}"
        print(f"\r{text:<78}" if self.live else text, end=end, file=sys.stderr, flush=True)


def generate(
    served: Served,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    on_row: Callable[[dict[str, Any]], None],
    *,
    seed: int = 0,
    raw: bool = False,
    skip: Iterable[int] = (),
    on_step: Callable[[RolloutEngine], None] | None = None,
) -> None:
    """Completes every prompt whose index is not in `skip`; on_row gets each row as it finishes.

    raw: text prompts go in as they are, not as a user's message through the chat template.
    Prompts are encoded as their turn comes. Raises ValueError for one that does not fit the model's
    context; the rows before it are done then.
    """
    left = sorted(set(range(len(prompts))) - set(skip))
    engine, meter = served.engine, Meter(len(left))
    engine.on_step = on_step or meter.step
    for start in range(0, len(left), _CHUNK):
        chunk = left[start : start + _CHUNK]

        def finish(row: Row, chunk: list[int] = chunk) -> None:
            index = chunk[row.index]
            meter.done += 1
            text = served.tokenizer.decode(row.tokens, skip_special_tokens=True)
            done = {"completion": text, "completion_ids": row.tokens}
            done |= {"finish_reason": row.finish_reason}
            on_row({"index": index, "prompt": prompts[index]} | done)

        engine.on_finish = finish
        ids = [_encode(served, prompts[i], raw, i) for i in chunk]
        keys = [row_key(seed, 0, i) for i in chunk]
        meter.add(engine.generate(ids, params, keys).stats)
    meter.say()


def _encode(served: Served, prompt: Prompt, raw: bool, index: int) -> list[int]:
    template = served.tokenizer.chat_template
    if isinstance(prompt, str) and not raw and template:
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str) and not template:
        raise ValueError(f"prompt {index} is a list of messages and the model has no chat template")
    ids, context = encode_prompt(served.tokenizer, prompt), served.engine.target.shape.context
    if not 0 < len(ids) < context:
        raise ValueError(
            f"prompt {index} has {len(ids)} tokens; the model's context is {context}, so 1 to "
            f"{context - 1} would leave room"
        )
    return ids


class Printer:
    """Rows on the screen: as JSON lines, or (live) the text of the only row, as it grows."""

    def __init__(self, tokenizer: Any, live: bool) -> None:
        self.tokenizer, self.live, self.shown = tokenizer, live, ""

    def step(self, engine: RolloutEngine) -> None:
        if engine.active:
            self.show(self.tokenizer.decode(engine.active[0].tokens, skip_special_tokens=True))

    def show(self, text: str) -> None:
        if not text.endswith("\ufffd"):  # half a character is shown when the rest of it has come
            print(text[len(self.shown) :], end="", flush=True)
            self.shown = text

    def finish(self, row: dict[str, Any]) -> None:
        rest = row["completion"][len(self.shown) :]
        print(rest if self.live else json.dumps(row, ensure_ascii=False), flush=True)


def run_generate(
    served: Served,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    out: Path | None,
    *,
    seed: int,
    raw: bool,
    live: bool,
) -> None:
    """`minitlt generate`: rows to a file that can be resumed, or to the screen."""
    if out is None:
        printer = Printer(served.tokenizer, live)
        on_step = printer.step if live else None
        generate(served, prompts, params, printer.finish, seed=seed, raw=raw, on_step=on_step)
        return
    decoder = served.engine.target.decoder
    rows = RowFile(out, prompts, repr((served.weights, decoder, seed, raw, astuple(params))))
    try:
        if rows.done:
            print(f"{len(rows.done)} of {len(prompts)} rows are in {out}", file=sys.stderr)
        generate(served, prompts, params, rows.write, seed=seed, raw=raw, skip=rows.done)
    finally:
        rows.close()


# Export.

_LAUNCH = {
    "sglang": "sglang serve --model-path {target} --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path {folder} --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4",
    "vllm": "vllm serve {target} --speculative-config "
    '\'{{"method": "eagle3", "model": "{folder}", "num_speculative_tokens": 3}}\'',
    "speculators": "vllm serve {folder}",
    "native": "minitlt generate --model {target} --drafter {folder} --prompt ..",
}
_LAUNCH |= {"specforge": _LAUNCH["sglang"]}  # which reads either name of the layer


def export(
    source: str, folder: Path, to: str, *, model: str = "", read_as: str = "", check: bool = False
) -> list[str]:
    """Writes the drafter of a run (or of a drafter folder) for another engine; lines to print.

    model: the target; default the run's policy. read_as: sglang or vllm, for a foreign drafter
    with tap layers of its own. check: load it back strictly and compare 3 recurrent steps.
    """
    if to not in _LAUNCH:
        raise ValueError(f"--to: {to!r} is not one of {', '.join(_LAUNCH)}")
    if read_as not in ("", "sglang", "vllm"):
        raise ValueError(f"--read-as: {read_as!r} is neither sglang nor vllm")
    origin = resolve_drafter(source)
    if folder.resolve() == origin.resolve():
        raise ValueError(f"DEST {str(folder)!r} is the drafter itself; choose another folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"DEST {str(folder)!r} is a file; choose a folder")
    target = resolve_model(model or _policy_of(source))
    with reading(Path(target)):
        module = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, **_SAFE)
    drafter = _read_drafter(origin, module.config, torch.float32, torch.device("cpu"), read_as)
    drafter.tie(module.get_input_embeddings().weight, module.get_output_embeddings().weight)
    where = str(Path(target).resolve()) if Path(target).is_dir() else target
    architecture = (module.config.architectures or ["LlamaForCausalLM"])[0]
    export_drafter(drafter, folder, to, target=where, target_architecture=architecture)
    lines = [f"wrote {folder} ({to})"]
    if check:
        layout = "sglang" if to == "specforge" else to
        found = ", ".join(f"{x:.1e}" for x in check_export(drafter, folder, layout=layout))
        lines.append(f"checked: loaded back strictly; largest logit difference per step: {found}")
    return [*lines, "serve it: " + _LAUNCH[to].format(target=where, folder=folder.resolve())]


def _policy_of(run: str) -> str:
    """The trained model of a run folder; for a LoRA run the model under the adapter, whose
    embedding and head are the same."""
    policy = Path(run).expanduser() / "policy"
    if (policy / "config.json").is_file():
        return str(policy)
    if (policy / _ADAPTER).is_file():
        return _under(policy)
    raise ValueError(f"{run!r} holds no policy/; give --model, what the drafter drafts for")
