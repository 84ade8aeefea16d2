"""A plain TRL GRPO file through `minitlt train`: a real run, and the keys that need care.

How to run: python -m pytest tests/test_plain_trl.py
"""

import json

import pytest
import yaml
from datasets import IterableDataset
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from minitlt import run
from minitlt.cli import app
from minitlt.config import ConfigError, make_config
from minitlt.events import read_events
from minitlt.rl import MiniTLTTrainer

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """What `trl grpo --config` takes, with a data set on the disk."""
    folder = tmp_path_factory.mktemp("plain")
    save_tiny_model(folder / "model")
    (folder / "data").mkdir()
    for split, num in (("train", 16), ("test", 2)):
        rows = [{"prompt": f"say {i}", "solution": str(i)} for i in range(num)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "data" / f"{split}.jsonl").write_text(text)
    return {
        "model_name_or_path": str(folder / "model"),
        "dataset_name": str(folder / "data"),
        "reward_funcs": ["think_format_reward"],
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 1,
        "gradient_checkpointing": False,
    }


def prepared(values, folder, **more):
    config = make_config({**values, "save_strategy": "no", **more}, {}, "plain")
    return run.prepare(config, folder)


def test_a_plain_file_trains_on_two_ranks(values, tmp_path):
    """The whole way: launcher, two ranks, evaluation, checkpoints, proof, report. `--smoke` makes
    it two steps."""
    path, out = tmp_path / "grpo.yaml", tmp_path / "run"
    more = {"num_processes": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 50}
    path.write_text(yaml.safe_dump({**values, **more, "output_dir": str(tmp_path / "elsewhere")}))
    words = ["train", "--config", str(path), "--run-dir", str(out), "--smoke"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 2 and summary["token_mismatches"] == 0
    assert "What happened" in done.stdout and (out / "report.html").is_file()
    assert not (tmp_path / "elsewhere").exists()
    assert (out / "checkpoints" / "checkpoint-2" / "minitlt" / "whole.json").is_file()
    AutoModelForCausalLM.from_pretrained(out / "policy")
    rollouts = [e for e in read_events(out / "events.jsonl") if e["event"] == "rollout_end"]
    assert sorted((e["step"], e["rank"]) for e in rollouts) == [(1, 0), (1, 1), (2, 0), (2, 1)]


def test_output_dir_is_said_to_be_the_run_folder(values, tmp_path, caplog):
    made = prepared(values, tmp_path / "run", output_dir="mine")
    assert made.args.output_dir == str(tmp_path / "run" / "checkpoints")
    assert f"output_dir mine: not used, all output goes to {tmp_path / 'run'}" in caplog.text


def test_resume_from_checkpoint_points_at_resume(values, tmp_path):
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint: .* --resume RUN"):
        prepared(values, tmp_path, resume_from_checkpoint="mine/checkpoint-4")


def trained(made, folder, monkeypatch):
    """A whole run in this process; its trainer."""
    kept, make = [], run._make_trainer
    monkeypatch.setattr(run, "_make_trainer", lambda *args: kept.append(make(*args)) or kept[0])
    run.train(made, folder)
    return kept[0]


def test_dataset_streaming_streams(values, tmp_path, monkeypatch):
    made = prepared(values, tmp_path, dataset_streaming=True, rollout={"epsilon": 0.5})
    trainer = trained(made, tmp_path, monkeypatch)
    assert isinstance(trainer.train_dataset, IterableDataset)
    assert len(set(map(tuple, trainer.last_prompts))) == 1  # a group of four
    with pytest.raises(ConfigError, match="a stream has no length; give max_steps"):
        prepared({**values, "max_steps": -1}, tmp_path, dataset_streaming=True)
    [event] = [e for e in read_events(tmp_path / "events.jsonl") if e["event"] == "run"]
    config = event["config"]  # what held, given or not
    assert config["steps_per_generation"] == 1 and config["max_completion_length"] == 8
    assert config["rollout"]["epsilon"] == 0.5 and config["rollout"]["window"] == 40
    assert config["drafter"]["ttt_steps"] == made.drafter.ttt_steps


def test_push_to_hub_pushes_the_final_policy(values, tmp_path, monkeypatch):
    pushed = []
    monkeypatch.setattr(MiniTLTTrainer, "init_hf_repo", lambda self, token=None: None)
    monkeypatch.setattr(MiniTLTTrainer, "push_to_hub", lambda self, **how: pushed.append(how))
    made = prepared(values, tmp_path, push_to_hub=True, hub_model_id="me/mine")
    trained(made, tmp_path, monkeypatch)
    assert len(pushed) == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"use_peft": True}, 'use_peft: needs peft; pip install peft, or ".[lora]"'),
        ({"report_to": "tensorboard"}, "'tensorboard' is not installed (pip install tensorboard)"),
        ({"report_to": ["tensorbord"]}, "'tensorbord' is not installed"),
    ],
)
def test_packages_that_a_rank_would_miss_are_named_by_the_dry_run(
    values, tmp_path, monkeypatch, more, message
):
    monkeypatch.setattr("minitlt.run.find_spec", lambda name: None)
    monkeypatch.setattr("minitlt.run.get_available_reporting_integrations", list)
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump({**values, **more}))
    done = CliRunner().invoke(app, ["train", "--config", str(path), "--dry-run"])
    assert done.exit_code == 2 and message in done.stderr, done
    assert len(done.stderr.splitlines()) == 1


def test_the_dry_run_says_what_was_filled_in(values, tmp_path):
    path = tmp_path / "grpo.yaml"
    path.write_text(yaml.safe_dump(values))
    done = CliRunner().invoke(app, ["train", "--config", str(path), "--dry-run"])
    [line] = [x for x in done.stdout.splitlines() if x.startswith("# resolved: ")]
    for text in ("steps_per_generation 1", "report_to []", "beta 0.0", "max_completion_length 8"):
        assert text in line
