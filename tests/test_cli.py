"""The command line: bad input is one line and exit code 2 within seconds; --help is fast."""

import subprocess
import sys
import time

import pytest
import yaml
from tiny import save_tiny_model
from typer.testing import CliRunner

from minitlt.cli import app
from minitlt.config import (
    ConfigError,
    RolloutConfig,
    build,
    load_config,
    make_config,
    parse_overrides,
    recipe_paths,
)


def minitlt(*arguments):
    """The command in this process: torch and TRL are imported once for all tests."""
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A valid tiny run; tests spoil one key each."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    (folder / "data.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n' * 8)
    values = {
        "model_name_or_path": str(folder / "model"),
        "nproc": 2,
        "task": {"name": str(folder / "data.jsonl")},
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "save_steps": 1,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_help_is_fast():
    start = time.perf_counter()
    command = [sys.executable, "-m", "minitlt.cli", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "train" in done.stdout
    assert time.perf_counter() - start < 2.0  # 0.1 s on an idle machine


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model_name_or_path", "smollm3-135m"], "did you mean 'smollm2-135m'"),
        (["--model_name_or_path", "/no/such/folder"], "no model at '/no/such/folder'"),
        (["--lerning_rate", "1e-5"], "did you mean 'learning_rate'"),
        (["--learning_rate", "fast"], "learning_rate: expected a number, not 'fast'"),
        (["--rollout.dtyp", "bf16"], "did you mean 'dtype'"),
        (["--rollout.dtype", "fp8"], "'fp8' is not one of auto, fp32, bf16"),
        (["--rolout.dtype", "bf16"], "did you mean 'rollout'"),
        (["--rollout.arms", "off,eagle"], "write off, SOURCE-DEPTH"),
        (["--rollout.arms", "off,medusa-3"], "has no drafter"),
        (["--drafter.loss", "mse"], "choose lk, kl, tv"),
        (["--spot.mode", "maybe"], "choose auto, spot, inline or off"),
        (["--task", "letter_countin"], "did you mean 'letter_counting'"),
        (["--task", "no.jsonl"], "no.jsonl"),
        (["--task.options.rewards", "exakt"], "did you mean 'exact'"),
        (["--per_device_train_batch_size", "6"], "a group of num_generations 4 would be split"),
        (["--num_generations", "3"], "num_generations"),
        (["extra", "--config", "x.yaml"], "give a recipe or --config, not both"),
        (["--use_vllm", "true"], "use_vllm: True cannot be used here"),
        (["stray"], "no recipe 'stray'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(config, tmp_path, monkeypatch, arguments, message):
    start = time.perf_counter()
    monkeypatch.chdir(tmp_path)
    own = not arguments[0].startswith("--")
    done = minitlt("train", *arguments, *([] if own else ["--config", config]), "--dry-run")
    assert done.exit_code == 2, done
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("minitlt:")]) == 1
    assert time.perf_counter() - start < 60
    assert not list(tmp_path.iterdir()), "a refused run leaves nothing behind"


def test_a_prompt_longer_than_the_context_is_named(config, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text(
        '{"prompt": "hi", "answer": "4"}\n{"prompt": "%s", "answer": "4"}\n' % ("x" * 600)
    )
    done = minitlt("train", "--config", config, "--task", data, "--dry-run")
    assert done.exit_code == 2
    assert "row 1" in done.stderr and "at most 511 would leave room" in done.stderr


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "is not a run folder"),
        (lambda folder: (folder / "config.yaml").write_text("nproc: ["), "not valid YAML"),
        (lambda folder: (folder / "config.yaml").write_text("CONFIG"), "no whole checkpoint"),
    ],
)
def test_resume_of_a_missing_or_half_written_run(config, tmp_path, make, message):
    make(tmp_path)
    path = tmp_path / "config.yaml"
    if path.exists() and path.read_text() == "CONFIG":
        path.write_text(config.read_text())
        (tmp_path / "checkpoints" / "checkpoint-1").mkdir(parents=True)
    done = minitlt("train", "--resume", tmp_path)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_the_config_and_the_batch_algebra(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = minitlt("train", "--config", config, "--dry-run", "--seed", "5")
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(done.stdout)["seed"] == 5
    assert "8 completions per generation" in done.stdout
    assert not list(tmp_path.iterdir())


def test_overrides_read_yaml_values():
    got = parse_overrides(
        [
            "--learning-rate",
            "1e-5",
            "--bf16",
            "--no_shuffle",
            "--seed=3",
            "--rollout.arms",
            "off",
            "a",
        ]
    )
    assert got == {
        "learning_rate": 1e-5,
        "bf16": True,
        "shuffle": False,
        "seed": 3,
        "rollout.arms": [False, "a"],
    }
    with pytest.raises(ConfigError, match="stands without a key"):
        parse_overrides(["5"])


def test_blocks_are_typed():
    assert build(RolloutConfig, {"arms": "off, ngram-2", "epsilon": 0}, "rollout").arms == [
        "off",
        "ngram-2",
    ]
    assert build(RolloutConfig, {"arms": [False]}, "rollout").arms == ["off"]
    for bad, message in [
        ({"window": 2.5}, "a whole number"),
        ({"window": True}, "a whole number"),
        ({"epsilon": 2}, "between 0 and 1"),
        ({"arms": 3}, "a list"),
    ]:
        with pytest.raises(ConfigError, match=message):
            build(RolloutConfig, bad, "rollout")


def test_every_recipe_is_a_mapping_with_a_title():
    assert recipe_paths()
    for path in recipe_paths().values():
        assert path.read_text().startswith("# ")
        load_config(path)


def test_a_new_task_name_drops_the_old_tasks_options():
    raw = {"task": {"name": "chain_sum", "options": {"min_terms": 2}}}
    assert make_config(raw, {"task": "letter_counting"}, "x").task == {"name": "letter_counting"}
    assert make_config(raw, {"task.options.min_terms": 3}, "x").task["options"] == {"min_terms": 3}
