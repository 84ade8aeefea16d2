"""Nothing that is read is run: no eval, exec or pickle, no remote code; files are private.

Tested elsewhere: text of a model in the reward (test_tasks.py) and in the report (test_report.py),
hash and paths of the fetched wheel (test_models.py), modes of shared files (test_swap.py).
`make check` runs bandit, `make audit` pip-audit. Run: pytest tests/test_security.py
"""

import ast
import json
import os
import pickle
import re
import stat
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from grpo import make_trainer
from safetensors.torch import load_file
from tiny import save_tiny_model
from typer.testing import CliRunner

from minitlt.cli import app
from minitlt.eagle3 import load_drafter, save_drafter
from minitlt.events import EventLog
from minitlt.export import export_drafter
from minitlt.launch import open_run_folder
from minitlt.spot import SpotTrainer
from minitlt.swap import SharedFiles

PACKAGE = Path(__file__).parent.parent / "minitlt"
RUNS_CODE = {"eval", "exec", "compile", "__import__", "breakpoint"}
UNSAFE = re.compile(
    r"pickle|shelve|marshal|torch\.load|os\.(system|popen)|yaml\.(unsafe_|full_)?load$"
)
pytestmark = pytest.mark.filterwarnings("default")


def calls(path):
    """(dotted name, call) of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.stem)
def test_no_module_runs_what_it_reads(path):
    for name, call in calls(path):
        words = {k.arg: ast.unparse(k.value) for k in call.keywords}
        assert name not in RUNS_CODE, name
        if UNSAFE.search(name):
            assert name == "yaml.load" and words["Loader"] == "_Loader"  # a yaml.SafeLoader
        assert words.get("shell", "False") == "False"
        assert words.get("trust_remote_code", "False") != "True"
    imported = {
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert not imported & {"pickle", "marshal", "shelve", "cloudpickle", "dill"}


def test_the_yaml_loader_makes_plain_values_only(tmp_path):
    canary = tmp_path / "canary"
    path = tmp_path / "evil.yaml"
    path.write_text(f"model_name_or_path: !!python/object/apply:os.mkdir ['{canary}']\n")
    done = CliRunner().invoke(app, ["train", "--config", str(path), "--dry-run"])
    assert done.exit_code == 2 and "not valid YAML" in done.stderr
    assert not canary.exists()


@pytest.fixture
def foreign(tmp_path):
    """A model folder whose config asks for code of its own, which would leave a file behind."""
    folder = save_tiny_model(tmp_path / "foreign")
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w')\nfrom transformers import LlamaConfig as C\n"
    (folder / "configuration_foreign.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "foreign", "auto_map": {"AutoConfig": "configuration_foreign.C"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "in.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    return folder, canary


@pytest.mark.parametrize("command", ["train", "generate", "export"])
def test_remote_code_is_off_unless_asked_for(foreign, tmp_path, command):
    folder, canary = foreign
    data = str(folder / "in.jsonl")
    arguments = {
        "train": ["--model_name_or_path", str(folder), "--task", data, "--dry-run"],
        "generate": ["--model", str(folder), "--prompts", data],
        "export": [str(tmp_path), str(tmp_path / "out"), "--model", str(folder)],
    }[command]
    (tmp_path / "drafter.safetensors").write_bytes(b"")
    done = CliRunner().invoke(app, [command, *arguments], input="y\n")  # if it asked
    assert done.exit_code == 2, done
    assert "trust_remote_code" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not canary.exists()


@pytest.mark.parametrize("command", ["train", "generate"])
def test_weights_that_are_pickles_are_refused(tmp_path, command):
    folder = save_tiny_model(tmp_path / "model", num_hidden_layers=2)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    (tmp_path / "in.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    data = str(tmp_path / "in.jsonl")
    arguments = {
        "train": ["--model_name_or_path", str(folder), "--task", data, "--dry-run"],
        "generate": ["--model", str(folder), "--prompts", data],
    }[command]
    done = CliRunner().invoke(app, [command, *arguments])
    assert done.exit_code == 2 and "holds its weights as pickles" in done.stderr, done
    assert len(done.stderr.splitlines()) == 1


def test_weights_are_never_read_from_pickles():
    """Every place that loads a model's weights asks for safetensors."""
    for path in PACKAGE.glob("*.py"):
        for name, call in calls(path):
            if name == "AutoModelForCausalLM.from_pretrained":
                words = {k.arg: ast.unparse(k.value) for k in call.keywords}
                assert words.get("use_safetensors") == "True" or words.get(None) == "_SAFE", path
    assert '"use_safetensors": True' in (PACKAGE / "run.py").read_text()


def test_a_checkpoint_cannot_run_code(tmp_path):
    """The policy's optimizer is TRL's to save and load: a pickle put in its place is not run."""

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "canary"),)

    model = save_tiny_model(tmp_path / "model", num_hidden_layers=2)
    trainer = make_trainer(model, tmp_path, steps=2, length=8, save_steps=1, save_strategy="steps")
    trainer.train()
    checkpoint = tmp_path / "checkpoints" / "checkpoint-1"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        whole = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(pickle.dumps(Evil()))
        with pytest.raises(pickle.UnpicklingError, match=r"[Ww]eights.only"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        (checkpoint / name).write_bytes(whole)
    assert not (tmp_path / "canary").exists()
    trainer.speculation.spot.close()
    folder = save_drafter(tmp_path / "drafter", trainer.speculation.drafter).parent
    (folder / "drafter.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"drafter\.safetensors"):
        load_drafter(folder)
    assert not (tmp_path / "canary").exists()


class Weight:
    version = 0

    def tensors(self):
        return {"w": torch.zeros(4)}

    optimizer_tensors = tensors


def test_names_in_shared_memory_cannot_be_guessed(tmp_path):
    names = set()
    for _ in range(2):
        made = SpotTrainer(Weight(), dist.HashStore(), 0, 1, shared_dir=tmp_path)
        (folder,) = tmp_path.iterdir()
        assert re.fullmatch(r"minitlt-swap-[0-9a-f]{32}", folder.name)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        names.add(folder.name)
        made.close()
    assert len(names) == 2


def test_files_of_a_run_have_the_users_permissions(tmp_path):
    """What the umask says, no more and no less; model weights and logs can be private this way."""
    before = os.umask(0o077)
    try:
        open_run_folder(tmp_path / "run", "nproc: 1\n")
        log = EventLog(tmp_path / "run" / "events.jsonl", 0)
        log.write("guard", name="x", count=1, message="y")
        log.close()
    finally:
        os.umask(before)
    found = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "run").iterdir()}
    assert found == {"config.yaml": 0o600, "events.jsonl": 0o600, "logs": 0o700}


def test_weights_have_the_users_permissions_too(tmp_path):
    """safetensors makes its files private; ours in shared memory are private whatever the umask."""
    before = os.umask(0o022)
    try:
        model = save_tiny_model(tmp_path / "model", num_hidden_layers=2)
        trainer = make_trainer(model, tmp_path, save_steps=1, save_strategy="steps", steps=1)
        trainer.train()
        trainer.save_model(tmp_path / "policy")
        parts = trainer.speculation
        drafter = save_drafter(tmp_path / "drafter", parts.drafter)
        export_drafter(parts.drafter, tmp_path / "exported", "vllm")
        files = SharedFiles(tmp_path, "token", 0, 1)
        files.write({"w": torch.zeros(4)}, {})
    finally:
        os.umask(before)
    saved = tmp_path / "checkpoints" / "checkpoint-1", tmp_path / "policy", tmp_path / "exported"
    for path in [drafter, *(folder / "model.safetensors" for folder in saved)]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o644, path
    assert stat.S_IMODE(files.own.stat().st_mode) == 0o600
    files.remove()
    parts.spot.close()
