"""Serving from the command line: the same tokens with any drafter, rows neither lost nor doubled,
exports that load back, and a warm-up whose drafter RL can start from."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from disks import small_disk
from models import tiny_model
from tiny import tiny_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from minitlt import native
from minitlt.cli import app
from minitlt.config import ConfigError, RolloutConfig
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter, load_drafter, save_drafter
from minitlt.kernels import row_key
from minitlt.rl import build_speculation, start_drafter
from minitlt.run import _check_drafter
from minitlt.serve import (
    Printer,
    RowFile,
    export,
    generate,
    load_served,
    read_prompts,
    resolve_drafter,
    run_generate,
)
from minitlt.spec import SamplingParams
from minitlt.spot import SpotConfig
from minitlt.target import make_target
from minitlt.warmup import warm_up

pytestmark = pytest.mark.filterwarnings("default")
PROMPTS = [f"question {i}" for i in range(9)] + [[{"role": "user", "content": "hello"}]]
PARAMS = SamplingParams(max_new_tokens=24, temperature=0.9, stop_ids=(2,))


@pytest.fixture(scope="module")
def run_dir(model_dir, tmp_path_factory):
    """A run folder: the policy, and a drafter of reduced vocabulary with a head of its own."""
    folder = tmp_path_factory.mktemp("run")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    model.save_pretrained(folder / "policy")
    size = Eagle3Config.from_target(model.config, DrafterConfig(draft_vocab_size=40))
    drafter = Eagle3Drafter(size, seed=3)
    drafter.tie(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    save_drafter(folder / "drafter", drafter)
    return folder


def served(model_dir, run_dir=None, arms=("off",), **options):
    return load_served(str(model_dir), str(run_dir or ""), arms=arms, dtype="fp32", **options)


def complete(server, skip=()):
    rows = []
    generate(server, PROMPTS, PARAMS, rows.append, seed=5, skip=skip)
    return sorted(rows, key=lambda row: row["index"])


def test_what_drafts_unasked_changes_no_token(model_dir, run_dir):
    """The policy in 8 bits, where native code decodes it, and a draft model that is given."""
    want, known = complete(served(model_dir)), native.library() is not None
    for drafter, sources in (("", set()), (run_dir, {"eagle", "merged"})):
        server = load_served(str(model_dir), str(drafter), dtype="fp32")
        assert server.engine.sources.keys() - {"ngram"} == sources | ({"int8"} if known else set())
        assert complete(server) == want


def test_weights_that_are_bf16_numbers_are_read_as_such_for_the_same_tokens(model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    for folder in ("wide", "narrow"):
        shutil.copytree(model_dir, tmp_path / folder)
        model.save_pretrained(tmp_path / folder)
        model.bfloat16().float()  # in place: the next ones are bf16 numbers
        auto, wide = (load_served(str(tmp_path / folder), dtype=d) for d in ("auto", "fp32"))
        known = folder == "narrow" and native.library() is not None
        assert auto.engine.target.dtype == (torch.bfloat16 if known else torch.float32)
        assert auto.weights == wide.weights
        for a, b in zip(complete(auto), complete(wide), strict=True):
            assert a == b


@pytest.mark.parametrize("kind", ["olmo2", "phi3", "cohere"])
def test_models_that_their_own_module_decodes_are_read_as_they_were(kind, model_dir, tmp_path):
    """There arithmetic is that of the weights' dtype."""
    shutil.copytree(model_dir, tmp_path / "m")
    tiny_model(kind).bfloat16().save_pretrained(tmp_path / "m")
    assert load_served(str(tmp_path / "m")).engine.target.dtype == torch.float32


def test_the_policy_of_a_lora_run_is_its_adapter_merged(model_dir, tmp_path, monkeypatch):
    """Same tokens as the merged model saved whole; without peft one line says what is missing."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, lora)
    model.save_pretrained(tmp_path / "policy")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    tiny_tokenizer().save_pretrained(tmp_path / "merged")
    adapted = complete(served(tmp_path / "policy"))
    assert adapted == complete(served(tmp_path / "merged")) != complete(served(model_dir))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="is a LoRA adapter and needs peft: pip install peft"):
        served(tmp_path / "policy")


@pytest.fixture(scope="module")
def expected(model_dir):
    return complete(served(model_dir))


def test_rows_equal_the_engines_own(model_dir, expected):
    server = served(model_dir)
    texts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in PROMPTS]
    ids = [
        server.tokenizer.apply_chat_template(t, add_generation_prompt=True, return_dict=True)
        for t in texts
    ]
    keys = [row_key(5, 0, i) for i in range(len(PROMPTS))]
    rollout = server.engine.generate([x["input_ids"] for x in ids], PARAMS, keys)
    assert [row["completion_ids"] for row in expected] == rollout.completion_ids
    assert [row["finish_reason"] for row in expected] == rollout.finish_reasons
    assert [row["prompt"] for row in expected] == PROMPTS


@pytest.mark.parametrize("arms", [("off", "ngram-2", "eagle-3"), ("eagle-4",)])
@pytest.mark.parametrize("max_rows", [0, 3])
def test_a_drafter_changes_no_token(model_dir, run_dir, expected, arms, max_rows):
    assert complete(served(model_dir, run_dir, arms, max_rows=max_rows)) == expected
    assert complete(served(model_dir, run_dir, arms), skip=range(4)) == expected[4:]


def test_what_was_interrupted_is_taken_up(model_dir, run_dir, expected, tmp_path, capsys):
    """Interrupted after 4 rows, the 5th torn in the middle of its line: nothing lost, nothing
    doubled, and the second half may use a drafter."""
    out, server = tmp_path / "out.jsonl", served(model_dir)
    rows = RowFile(out, PROMPTS, "made so")
    with pytest.raises(KeyboardInterrupt):

        def write(row):
            if len(out.read_bytes().splitlines()) == 4:
                raise KeyboardInterrupt
            rows.write(row)

        generate(server, PROMPTS, PARAMS, write, seed=5)
    rows.close()
    first = [json.loads(line)["index"] for line in out.read_text().splitlines()]
    with out.open("a") as file:
        file.write('{"index": 9, "prompt": "quest')
    again = RowFile(out, PROMPTS, "made so")
    assert again.done == set(first) and len(first) == 4
    server = served(model_dir, run_dir, ("off", "eagle-2"))
    generate(server, PROMPTS, PARAMS, again.write, seed=5, skip=again.done)
    again.close()
    got = sorted(map(json.loads, out.read_text().splitlines()), key=lambda row: row["index"])
    assert [{k: v for k, v in row.items() if k != "settings"} for row in got] == expected
    assert RowFile(out, PROMPTS, "made so").done == set(range(len(PROMPTS)))


@pytest.mark.slow
def test_a_killed_process_is_taken_up(model_dir, tmp_path):
    """SIGKILL in the middle; the same command then completes the file."""
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(120)))
    command = [sys.executable, "-m", "minitlt.cli", "generate", "--model", str(model_dir)]
    command += ["--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "60"]
    command += ["--max-rows", "4"]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while not (out.exists() and out.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    done = out.read_bytes().count(b"\n")
    assert 0 < done < 120
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(120))


@pytest.mark.slow
def test_a_full_disk_is_said_and_with_more_room_the_rest_is_made(model_dir, tmp_path):
    prompts, folder = tmp_path / "in.jsonl", tmp_path / "disk"
    prompts.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(120)))
    folder.mkdir()
    with small_disk(folder, "16k") as disk:
        command = [*disk.before, sys.executable, "-m", "minitlt", "generate", "--max-rows", "4"]
        command += ["--model", str(model_dir), "--prompts", str(prompts)]
        command += ["--out", str(folder / "out.jsonl"), "--max-new-tokens", "60"]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if line.startswith("minitlt:")]
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert len(said) == 1 and "the disk is full; make room and start again" in said[0]
        *rows, torn = (disk.look / "out.jsonl").read_bytes().split(b"\n")
        assert 0 < len(rows) < 120 and torn, "a row was written in part"
        disk.grow("1m")
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        lines = (disk.look / "out.jsonl").read_bytes().splitlines()
    assert lines[: len(rows)] == rows
    assert sorted(json.loads(line)["index"] for line in lines) == list(range(120))


def test_a_file_made_otherwise_is_refused(model_dir, tmp_path):
    out = tmp_path / "out.jsonl"
    rows = RowFile(out, PROMPTS, "T=1")
    with pytest.raises(ValueError, match="being written by another process"):
        RowFile(out, PROMPTS, "T=1")
    rows.write({"index": 2, "prompt": PROMPTS[2]})
    rows.close()
    with pytest.raises(ValueError, match=r"line 1 was made from another model, seed or sampling"):
        RowFile(out, PROMPTS, "T=2")
    with pytest.raises(ValueError, match="line 1 was made from another prompt"):
        RowFile(out, ["other"] * 5, "T=1")
    with pytest.raises(ValueError, match="cannot write --out"):
        RowFile(tmp_path / "no" / "out.jsonl", PROMPTS, "T=1")
    other = tmp_path / "notes.jsonl"
    other.write_text('{"note": "mine"}\n')
    with pytest.raises(ValueError, match="line 1 is not a row of ours"):
        RowFile(other, PROMPTS, "T=1")
    assert other.read_text() == '{"note": "mine"}\n'
    for index in (-1, "0", None, [0]):
        other.write_text(out.read_text().replace(": 2,", f": {json.dumps(index)},", 1))
        with pytest.raises(ValueError, match=r"line 1 (is not a row of ours|was made from)"):
            RowFile(other, PROMPTS, "T=1")
    ours = out.read_text()
    for foreign in ("no newline at the end", "x", '{"note": "mine"}', ours + "[1, 2]", "\n" + ours):
        other.write_text(foreign)
        with pytest.raises(ValueError, match=r"(is not|does not end in) a row of ours"):
            RowFile(other, PROMPTS, "T=1")
        assert other.read_text() == foreign
    for torn in ("", "{", '{"index"', '{"index": ', ours[:-1]):
        other.write_text(ours + torn)
        RowFile(other, PROMPTS, "T=1").close()
        assert other.read_text() == ours
    for place in (tmp_path, Path("/dev/zero")):
        with pytest.raises(ValueError, match="is not a plain file"):
            RowFile(place, PROMPTS, "T=1")


def test_the_stamp_is_of_the_weights_themselves(model_dir, tmp_path):
    """Another train step in the same folder, or another dtype: other rows. A copy: the same."""
    own = served(model_dir).weights
    assert load_served(str(model_dir), arms=["off"], dtype="auto").weights == own  # fp32 on a CPU
    assert load_served(str(model_dir), arms=["off"], dtype="bf16").weights != own
    shutil.copytree(model_dir, tmp_path / "copy")
    assert served(tmp_path / "copy").weights == own
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight += 1e-3
    model.save_pretrained(tmp_path / "copy")
    out = tmp_path / "out.jsonl"
    run_generate(served(model_dir), ["a"], PARAMS, out, seed=0, raw=True, live=False)
    with pytest.raises(ValueError, match="made from another model, seed or sampling"):
        run_generate(served(tmp_path / "copy"), ["a"], PARAMS, out, seed=0, raw=True, live=False)


def test_prompts_are_encoded_as_their_turn_comes(model_dir, monkeypatch):
    """A bad prompt far behind does not cost the rows before it, nor a long file the memory."""
    monkeypatch.setattr("minitlt.serve._CHUNK", 2)
    rows = []
    with pytest.raises(ValueError, match=r"prompt 4 has \d+ tokens"):
        generate(served(model_dir), ["a", "b", "c", "d", "x" * 600], PARAMS, rows.append)
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("\n{\n", "line 2: not JSON"),
        ('{"prompt": "a"}\n{"text": "b"}\n', r"line 2: no 'prompt'; it has \['text'\]"),
        ('{"\\n": 1}', r"line 1: no 'prompt'; it has \['\\n'\]"),
        ('{"prompt": ""}', "line 1: the prompt must be text or messages"),
        ('{"prompt": [{"role": "user"}]}', "line 1: the prompt must be text or messages"),
        ("7", "line 1: the prompt must be text or messages"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, text, message):
    path = tmp_path / "in.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_prompt_that_leaves_no_room_is_named_by_its_own_index(model_dir):
    prompts = ["a", "b", "x" * 600]
    with pytest.raises(ValueError, match=r"prompt 2 has \d+ tokens; the model's context is 512"):
        generate(served(model_dir), prompts, PARAMS, print, skip=[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompt TEXT or --prompts FILE.jsonl"),
        (["--prompt", "a", "--temperature", "-1"], "temperature must be 0 or more"),
        (["--prompt", "a", "--model", "smollm2-135n"], "did you mean 'smollm2-135m'"),
        (["--prompt", "a", "--arms", "eagle-2"], "'eagle-2' needs a draft model"),
        (["--prompt", "a", "--arms", "medusa-2"], "'medusa-2' has no drafter"),
        (["--prompt", "a", "--drafter", "/no/such"], "no drafter at '/no/such'"),
        (["--prompt", "a", "--dtype", "fp8"], "'fp8' is not one of auto, fp32, bf16"),
        (["--prompts", "/no/such.jsonl"], "cannot read /no/such.jsonl: No such file"),
    ],
)
def test_bad_input_of_generate_is_one_line(model_dir, arguments, message):
    own = [] if "--model" in arguments else ["--model", str(model_dir)]
    done = CliRunner().invoke(app, ["generate", *arguments, *own])
    assert done.exit_code == 2, done
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_half_a_character_is_held_back(capsys):
    printer = Printer(None, live=True)
    for text in ("a", "a\ufffd", "a\u00e9", "a\u00e9b"):
        printer.show(text)
    printer.finish({"completion": "a\u00e9b!"})
    assert capsys.readouterr().out == "a\u00e9b!\n"


def test_one_prompt_is_shown_as_it_grows(model_dir, capsys):
    server = served(model_dir)
    run_generate(server, ["hello"], PARAMS, None, seed=0, raw=True, live=True)
    shown = capsys.readouterr()
    run_generate(server, ["hello"], PARAMS, None, seed=0, raw=True, live=False)
    row = json.loads(capsys.readouterr().out)
    assert shown.out == row["completion"] + "\n"
    assert "tokens/s, accept length 1.00" in shown.err


@pytest.mark.parametrize("layout", ["sglang", "vllm", "specforge", "speculators", "native"])
def test_exports_load_back_and_draft_again(model_dir, run_dir, expected, tmp_path, layout):
    lines = export(str(run_dir), tmp_path / layout, layout, check=True)
    assert "checked: loaded back strictly" in lines[1] and str(tmp_path) in lines[2]
    assert complete(served(model_dir, tmp_path / layout, ("eagle-3",))) == expected
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    target = make_target(model)
    started = start_drafter(model, target, DrafterConfig(start=str(tmp_path / layout)))
    own = load_drafter(run_dir / "drafter")
    assert torch.equal(started.ids_V, own.ids_V)
    assert torch.allclose(started.fc, own.fc, atol=1e-2)  # bf16 in the file of the engines


def test_what_cannot_be_exported_is_named(model_dir, run_dir, tmp_path):
    for arguments, message in [
        ((str(run_dir), tmp_path / "x", "mlx"), "--to: 'mlx' is not one of sglang, vllm"),
        ((str(tmp_path), tmp_path / "x", "vllm"), "no drafter at"),
        ((str(run_dir), run_dir / "drafter", "vllm"), "is the drafter itself"),
        ((str(run_dir / "drafter"), tmp_path / "x", "vllm"), "holds no policy/; give --model"),
    ]:
        with pytest.raises(ValueError, match=message):
            export(*arguments)
    wide = tmp_path / "wide"
    tiny_model("llama", hidden_size=128, vocab_size=100).save_pretrained(wide)
    with pytest.raises(ValueError, match=r"drafter '.*drafter': the drafter has hidden_size"):
        export(str(run_dir), tmp_path / "x", "vllm", model=str(wide))
    with pytest.raises(ConfigError, match=r"drafter.start: .* has hidden_size"):
        _check_drafter(str(run_dir), str(wide))
    assert not (tmp_path / "x").exists()


def test_drafters_on_the_hub_are_tried_only_by_id(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="neither a folder nor on the Hub"):
        resolve_drafter("someone/some-eagle3-head")


def test_warm_up_trains_a_drafter_that_runs_can_start_from(model_dir, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    parts = build_speculation(
        model,
        RolloutConfig(arms=["off", "eagle-2"]),
        DrafterConfig(draft_vocab_size=64, pack_tokens=64),
        SpotConfig(mode="off"),
        device=torch.device("cpu"),
    )
    before = {name: tensor.clone() for name, tensor in parts.trainer.tensors().items()}
    prompts, said = [[5 + i, 6, 7] for i in range(12)], []
    warm_up(
        parts, prompts, PARAMS, tmp_path / "warm",
        rows=4, seconds=60.0, steps=25, seed=1, say=said.append,
    )  # fmt: skip
    assert parts.trainer.version == 25, "it stops at --steps"
    saved = load_drafter(tmp_path / "warm")
    for name, tensor in parts.drafter.named_parameters():
        rounding = float(tensor.detach().abs().max()) / 253  # it is stored in int8
        got = dict(saved.named_parameters())[name]
        torch.testing.assert_close(got, tensor, rtol=0, atol=rounding if tensor.dim() == 2 else 0)
        assert not torch.equal(before[name], tensor), f"{name} was not trained"
    assert "acceptance there" in said[-1] and "25 train steps" in said[-1]
    started = start_drafter(model, parts.engine.target, DrafterConfig(start=str(tmp_path / "warm")))
    assert torch.equal(started.fc, saved.fc)


def test_warm_up_ends_in_time(model_dir, tmp_path, monkeypatch):
    """A round that would leave no time to train on it is not begun."""
    now = iter(range(10_000))
    monkeypatch.setattr("minitlt.warmup.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    parts = build_speculation(
        model, RolloutConfig(arms=["ngram-1"]), DrafterConfig(draft_vocab_size=64, pack_tokens=32),
        SpotConfig(mode="off"), device=torch.device("cpu"),
    )  # fmt: skip
    said = []
    warm_up(parts, [[5, 6]], PARAMS, tmp_path / "warm", rows=2, seconds=40.0, say=said.append)
    assert said and float(said[-1].split()[0]) <= 45


def test_the_shipped_drafter_is_small_and_fits_the_default_model():
    folder = resolve_drafter("smollm2")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6
    drafter = load_drafter(folder)
    c = drafter.config
    assert (c.hidden_size, c.vocab_size, c.tap_layers) == (576, 49_152, (2, 15, 27))
    assert c.draft_vocab_size == len(set(drafter.ids_V.tolist()))
    assert {name for name, _ in drafter.named_parameters()} >= {"fc", "qkv", "norm"}
    assert drafter.head is None  # that is the target's too
    assert "embed" not in drafter.state_dict()  # that is the target's
