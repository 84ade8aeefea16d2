"""Whatever is in a file or on the command line: one clear line and exit code 2, never a traceback.

Hypothesis writes recipes, overrides, prompt files and spoiled checkpoints. The fast suite takes a
few of each; `pytest -m slow tests/test_fuzz.py` takes many more of the same.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
from unittest import mock

import pytest
import torch
import yaml
from grpo import make_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import save_tiny_model
from trl import GRPOConfig, ModelConfig

from minitlt import run
from minitlt.cli import main
from minitlt.config import BLOCKS, RolloutConfig
from minitlt.eagle3 import DrafterConfig, load_drafter, save_drafter
from minitlt.serve import RowFile, read_prompts
from minitlt.spot import SpotConfig
from minitlt.tensorfile import read_tensors, write_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
FEW, MANY = 25, 500
BOTH = [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
TEXT = st.text(max_size=12)
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUE = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
OURS = [
    f"{block}.{field.name}"
    for block, kind in (
        ("rollout", RolloutConfig),
        ("drafter", DrafterConfig),
        ("spot", SpotConfig),
    )
    for field in dataclasses.fields(kind)
]
# Not fuzzed: fields that make transformers write elsewhere or wait for a network.
OUTSIDE = ("hub", "push", "deepspeed", "fsdp", "report", "output", "logging_dir", "accelerator")
FIELDS = sorted(
    name
    for kind in (GRPOConfig, ModelConfig)
    for name in (f.name for f in dataclasses.fields(kind) if f.init)
    if not any(part in name for part in OUTSIDE)
)
KEYS = (
    st.sampled_from([*FIELDS, *OURS, "nproc", "env", "task", "task.options.size", *BLOCKS]) | TEXT
)


def fuzz(examples, strategy):
    """Runs the function below it with so many values; derandomized: a failure comes again."""

    def decorate(body):
        def once(value):
            with mock.patch.dict(os.environ):
                body(value)

        quiet = settings(max_examples=examples, deadline=None, derandomize=True, database=None,
                         suppress_health_check=list(HealthCheck))  # fmt: skip
        quiet(given(strategy)(once))()

    return decorate


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A valid configuration of a tiny run, as a mapping."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model", num_hidden_layers=2)
    (folder / "data.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n')
    return {
        "model_name_or_path": str(folder / "model"),
        "task": {"name": str(folder / "data.jsonl")},
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
    }


def refuses_or_takes(*arguments):
    """The installed command ends with 0, or with 2 and one line of its own."""
    stderr = io.StringIO()
    with (
        mock.patch("sys.argv", ["minitlt", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as end,
    ):
        main()
    said = stderr.getvalue()
    assert end.value.code in (0, 2), said
    own = [line for line in said.splitlines() if line.startswith("minitlt:")]
    assert len(own) == (end.value.code == 2), said
    assert "Traceback" not in said


@pytest.mark.parametrize("examples", BOTH)
def test_recipes_of_any_content(tiny, tmp_path, examples):
    path = tmp_path / "recipe.yaml"

    @fuzz(examples, st.dictionaries(KEYS.filter(lambda k: "." not in k), VALUE, max_size=3))
    def _(values):
        path.write_text(yaml.safe_dump({**tiny, **values}, allow_unicode=False))
        refuses_or_takes("train", "--config", path, "--dry-run")

    @fuzz(examples, st.text() | st.binary())
    def _(content):
        path.write_bytes(
            content if isinstance(content, bytes) else content.encode("utf-8", "replace")
        )
        refuses_or_takes("train", "--config", path, "--dry-run")


@pytest.mark.parametrize("examples", BOTH)
def test_overrides_of_any_content(tiny, tmp_path, examples):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny))
    value = SCALAR.map(str) | VALUE.map(lambda v: json.dumps(v))
    pair = st.tuples(KEYS.map(lambda key: f"--{key}"), value).map(list)

    @fuzz(examples, st.lists(pair | TEXT.map(lambda t: [t]), max_size=3))
    def _(pairs):
        words = [word.replace("\0", "0") for pair in pairs for word in pair]
        stops = {"--help", "--run-dir", "--resume", "--config"}
        words = [word for word in words if word.partition("=")[0] not in stops]
        refuses_or_takes("train", "--dry-run", "--config", path, *words)


@pytest.mark.parametrize("examples", BOTH)
def test_data_files_of_any_content(tiny, tmp_path, examples):
    data, config = tmp_path / "data.jsonl", tmp_path / "recipe.yaml"
    config.write_text(yaml.safe_dump({**tiny, "task": {"name": str(data)}}))
    message = st.fixed_dictionaries({"role": TEXT, "content": TEXT})
    prompt = TEXT | st.lists(message, max_size=2) | VALUE
    row = st.fixed_dictionaries({"prompt": prompt, "answer": SCALAR}, optional={"more": VALUE})
    line = row.map(json.dumps) | VALUE.map(json.dumps) | TEXT

    @fuzz(examples, st.lists(line, max_size=4))
    def _(lines):
        data.write_text("\n".join(lines), encoding="utf-8", errors="replace")
        refuses_or_takes("train", "--config", config, "--dry-run")
        for read in (lambda: read_prompts(data), lambda: RowFile(data, ["a"], "s").close()):
            try:
                read()
            except ValueError as error:
                assert str(data) in str(error) and "\n" not in str(error)


@st.composite
def harm(draw, size):
    """How a file of `size` bytes is spoiled: cut short, grown, or bits of it flipped."""
    kind = draw(st.sampled_from(["cut", "grow", "flip", "flip the header"]))
    if kind == "cut":
        return kind, draw(st.integers(0, size - 1))
    if kind == "grow":
        return kind, draw(st.binary(min_size=1, max_size=9))
    last = size - 1 if kind == "flip" else min(size - 1, 400)
    return kind, draw(st.dictionaries(st.integers(0, last), st.integers(1, 255), min_size=1))


def spoil(data, how):
    kind, what = how
    if kind == "cut":
        return data[:what]
    if kind == "grow":
        return data + what
    return bytes(byte ^ what.get(i, 0) for i, byte in enumerate(data))


def same(left, right):
    """A flipped blank of a header changes nothing; what is read must be what was written."""
    a, b = load_file(left), load_file(right)
    equal = a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a
    )
    with safe_open(left, "pt") as one, safe_open(right, "pt") as other:
        return equal and one.metadata() == other.metadata()


@pytest.fixture(scope="module")
def checkpoint(tiny, tmp_path_factory):
    """A trainer, and a run folder with one whole checkpoint of it."""
    folder = tmp_path_factory.mktemp("run")
    trainer = make_trainer(tiny["model_name_or_path"], folder, length=4, rows=4)
    trainer.model.train()
    trainer._generate_single_turn([[5, 6, 7]] * 4, None, {}, 4)
    (folder / "config.yaml").write_text(yaml.safe_dump(tiny))
    whole = folder / "checkpoints" / "checkpoint-1"
    run.save_state(trainer, whole / "minitlt")
    trainer.speculation.spot.checkpoint(whole / "minitlt" / "drafter.safetensors").result()
    (whole / "model.safetensors").write_bytes(b"x" * 50)
    run.seal(whole)
    save_drafter(folder / "drafter", trainer.speculation.drafter)
    yield trainer, folder
    trainer.speculation.spot.close()


@pytest.mark.parametrize("examples", BOTH)
def test_spoiled_checkpoints_are_refused(checkpoint, tmp_path, examples):
    trainer, folder = checkpoint
    part = folder / "checkpoints/checkpoint-1/minitlt/rank0.safetensors"
    whole, good = part.read_bytes(), tmp_path / "good.safetensors"
    good.write_bytes(whole)

    @fuzz(min(examples, 300), harm(len(whole)))
    def _(how):
        part.write_bytes(spoil(whole, how))
        try:
            run.load_state(trainer, part.parent)
        except ValueError as error:
            assert str(part) in str(error) and "\n" not in str(error)
        else:
            assert same(part, good), how

    part.write_bytes(whole)
    run.load_state(trainer, part.parent)
    seal = folder / "checkpoints/checkpoint-1/minitlt/whole.json"
    sealed = seal.read_bytes()

    @fuzz(examples, harm(len(sealed)) | VALUE.map(lambda v: ("", json.dumps(v).encode())))
    def _(how):
        seal.write_bytes(spoil(sealed, how) if how[0] else how[1])
        assert run.is_whole(seal.parents[1]) in (True, False)

    seal.write_bytes(sealed)
    assert run.last_checkpoint(folder).name == "checkpoint-1"


def test_every_digit_of_a_header_counts(tmp_path):
    """Numbers, shapes, places and the checksum itself."""
    path = tmp_path / "file"
    tensors = {"a": torch.arange(16).view(2, 8), "b": torch.zeros(5)}
    write_tensors(path, tensors, {"step": "12", "sizes": '{"heads": 8}'})
    assert read_tensors(path)[1] == {"step": "12", "sizes": '{"heads": 8}'}
    whole = path.read_bytes()
    start, end = 8, 8 + int.from_bytes(whole[:8], "little")
    spoiled = [whole.replace(b"[2, 8]", b"[8, 2]"), whole.replace(b'"step"', b'"stop"')]
    for place in range(start, end):
        if whole[place : place + 1].isdigit():
            spoiled += [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]]
    assert len(spoiled) > 25 and whole not in spoiled
    for data in spoiled:
        path.write_bytes(data)
        with pytest.raises(ValueError, match="torn or foreign"):
            read_tensors(path)


@pytest.mark.parametrize("examples", BOTH)
def test_spoiled_drafters_are_refused_or_whole(checkpoint, tiny, tmp_path, examples):
    _, folder = checkpoint
    whole = (folder / "drafter" / "drafter.safetensors").read_bytes()
    path, good = tmp_path / "drafter" / "drafter.safetensors", tmp_path / "good.safetensors"
    good.write_bytes(whole)
    shutil.copytree(folder / "drafter", path.parent)

    @fuzz(min(examples, 300), harm(len(whole)))
    def _(how):
        path.write_bytes(spoil(whole, how))
        try:
            load_drafter(path.parent)
        except ValueError as error:
            assert str(path) in str(error) and "\n" not in str(error)
        else:
            assert same(path, good), how

    path.write_bytes(whole[:-1])
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    refuses_or_takes("generate", "--model", tiny["model_name_or_path"], "--drafter", path.parent,
                     "--prompts", tmp_path / "p.jsonl")  # fmt: skip
