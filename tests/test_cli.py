"""The command line: bad input is one line and exit code 2 within seconds; --help is fast."""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
import yaml
from fake_run import write_fake_run
from safetensors.torch import save_file
from tiny import save_tiny_model
from trl import GRPOTrainer
from typer.testing import CliRunner

from minitlt.cli import _check_devices, app, main
from minitlt.compare import differences
from minitlt.config import (
    ConfigError,
    RolloutConfig,
    build,
    load_config,
    make_config,
    parse_overrides,
    recipe_paths,
)
from minitlt.doctor import check_seam
from minitlt.launch import last_line


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


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("[rank0]: Traceback (most recent call last):\n[rank0]: OSError: [Errno 28] No space\n"
         "/a/b.py:3: FutureWarning: x is old\n  warnings.warn(\n", "OSError: [Errno 28] No space"),
        ("minitlt: a reward is short\n[rank0]:[W11 Process.cpp] x\n", "minitlt: a reward is short"),
        ("torch.OutOfMemoryError: CUDA\n\n", "torch.OutOfMemoryError: CUDA"),
        ("Bus error\n/a/b.py:3: UserWarning: y\n", "Bus error"),
        ("/a/b.py:3: UserWarning: y\n", "no output"),
    ],
)  # fmt: skip
def test_the_last_error_of_a_rank_is_found_among_warnings(tmp_path, lines, said):
    (tmp_path / "rank0.log").write_text(lines)
    assert last_line(tmp_path / "rank0.log") == said
    assert last_line(tmp_path / "none.log") == "no output"


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
    for off in (False, [False]):  # YAML's reading of a bare off
        assert build(RolloutConfig, {"arms": off}, "rollout").arms == ["off"]
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


def commands():
    return list(typer.main.get_command(app).commands)


@pytest.mark.parametrize("command", commands())
def test_every_command_has_an_example(command):
    text = minitlt("bench" if command == "bench" else command, "--help").stdout
    assert "Example" in text and f"minitlt {command}" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["generate", "--promt", "x"], "No such option: --promt"),
        (["generate", "--top-k", "many"], "Invalid value for '--top-k'"),
        (["export", "x"], "Missing argument"),
        (["bench", "speed"], "no benchmark 'speed'; there are "),
        (["copy", "99", "x"], "no recipe '99'"),
        (["compare", "/no/a", "/no/b"], "/no/a/events.jsonl: no run log here"),
        (["simulate", "/no/a"], "/no/a/events.jsonl: no run log here"),
        (["simulate", "/no/a", "--nodes", "0"], "--nodes must be positive, not 0 and 0"),
        (["warmup", "--seconds", "-1"], "--seconds must be positive"),
        (["export", "/no/a", "/no/b", "--to", "tgi"], "--to: 'tgi' is not one of sglang, vllm"),
        (["train", "--resume", "/no/a"], "/no/a is not a run folder"),
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(monkeypatch, capsys, arguments, message):
    """Through `main`, the installed command, which sees click's own errors too."""
    monkeypatch.setattr("sys.argv", ["minitlt", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("minitlt: ") and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fsdp2", "accelerate_config fsdp2: needs GPUs"),
        ("zero3", "accelerate_config zero3: needs "),
        ("CPU", "accelerate starts one rank on a CPU; --nproc starts more"),
        ("nothing", "accelerate_config: no file 'nothing'"),
    ],
)
def test_accelerate_configs_that_cannot_run_here_say_so(
    config, tmp_path, monkeypatch, name, message
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    if name == "CPU":
        name = str(tmp_path / "cpu.yaml")
        Path(name).write_text("use_cpu: true\ndistributed_type: MULTI_CPU\n")
    done = minitlt(
        "train", "--config", config, "--accelerate-config", name, "--run-dir", tmp_path / "r"
    )
    assert done.exit_code == 2 and message in done.stderr
    assert not (tmp_path / "r").exists()


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(typer.Exit):
        _check_devices(4, on_cpu=False, accelerated=False)
    _check_devices(2, on_cpu=False, accelerated=False)
    _check_devices(4, on_cpu=True, accelerated=False)


def test_copy_keeps_what_is_there(tmp_path):
    done = minitlt("copy", "01", tmp_path)
    assert done.exit_code == 0
    copied = tmp_path / "01_smollm2_cpu.yaml"
    assert copied.read_text() == recipe_paths()["01_smollm2_cpu"].read_text()
    copied.write_text("mine")
    done = minitlt("copy", "01", tmp_path)
    assert done.exit_code == 2 and "File exists" in done.stderr and copied.read_text() == "mine"


def test_bench_runs_the_script_and_passes_its_exit_code(tmp_path, monkeypatch):
    package, scripts = tmp_path / "minitlt", tmp_path / "benchmarks"
    monkeypatch.setattr("minitlt.cli.__file__", str(package / "cli.py"))
    assert "come with the repository" in minitlt("bench", "kernels").stderr
    scripts.mkdir()
    assert "come with the repository" in minitlt("bench", "step").stderr
    (scripts / "kernels.py").write_text("import sys; sys.exit(len(sys.argv))")
    assert minitlt("bench", "kernels", "--vocab", "10").exit_code == 3
    assert "minitlt bench kernels --help" in minitlt("bench").stdout


def make_run(folder, **changes):
    """A run folder: a synthetic log and a policy of two tensors."""
    write_fake_run(folder, steps=3)
    (folder / "policy").mkdir()
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), **changes}
    save_file(tensors, folder / "policy" / "model.safetensors")
    return folder


def test_compare_finds_equal_runs_equal_and_one_bit_different(tmp_path):
    left = make_run(tmp_path / "left")
    right = make_run(tmp_path / "right")
    done = minitlt("compare", left, right, "--assert-equal")
    assert done.exit_code == 0 and "equal: completions" in done.stdout
    assert "reward_first" in done.stdout
    bit = torch.ones(2, 2, dtype=torch.bfloat16)
    bit[1, 1] = 1.0078125
    other = make_run(tmp_path / "other", b=bit)
    done = minitlt("compare", left, other)
    assert done.exit_code == 0 and "policy: 1 of 2 tensors differ, by 0.0078" in done.stdout
    assert minitlt("compare", left, other, "--assert-equal").exit_code == 1


@pytest.mark.parametrize(
    ("event", "field", "message"),
    [
        ("rollout_end", "lengths", "completion lengths: 1 of 6 differ, first at step 2, rank 0"),
        ("row", "completion", "sample completions and rewards: 2 of 6 differ, first at step 2"),
        ("update", "reward", "reward, loss and gradient norm: 1 of 3 differ, first at step 2"),
    ],
)
def test_compare_names_the_first_difference(tmp_path, event, field, message):
    left, right = make_run(tmp_path / "left"), make_run(tmp_path / "right")
    log = right / "events.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    for line in lines:
        if line["event"] == event and line["step"] == 2 and line["rank"] == 0:
            line[field] = [1] if field == "lengths" else "x" if field == "completion" else 9.0
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = differences(left, right)
    assert len(found) == 1 and found[0].startswith(message)


def test_compare_says_what_is_missing(tmp_path):
    left, right = make_run(tmp_path / "left"), make_run(tmp_path / "right")
    (right / "policy" / "model.safetensors").unlink()
    assert differences(left, right) == [f"policy: {right / 'policy'} holds no safetensors"]


def test_the_seam_contract_finds_a_changed_trl():
    class Renamed:
        def _generate_single_turn(self, prompts, images):
            return [], []

        def _generate(self, prompts):
            return self._generate_single_turn(prompts, None)

        def log(self):
            return self.use_vllm

    assert check_seam(GRPOTrainer) == []
    problems = check_seam(Renamed)
    assert "takes self, prompts, images" in problems[0]
    assert "does not take (completion_ids, logprobs)" in problems[1]
    assert "log" in problems[2]
    assert check_seam(object) == ["GRPOTrainer has no _generate_single_turn"]


def test_doctor_says_what_is_missing_and_how_to_get_it(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    done = minitlt("doctor")
    assert done.exit_code == 0, done.stdout
    for text in ("TRL seam", "kernels on cpu", "smollm2-135m", "Hugging Face Hub", "reasoning-gym"):
        assert text in done.stdout
    real = importlib.metadata.version
    versions = {"reasoning-gym": None, "trl": "1.99.0"}

    def version(name):
        found = versions.get(name, real(name))
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr("importlib.metadata.version", version)
    monkeypatch.setattr("minitlt.doctor.check_seam", lambda trainer: ["it moved"])
    done = minitlt("doctor")
    assert done.exit_code == 1 and "3 missing" in done.stdout
    assert 'pip install "reasoning-gym>=0.1.20"' in done.stdout
    assert "1.99.0 is outside" in done.stdout and "it moved" in done.stdout


def environment(**extra):
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "OMP_NUM_THREADS": "1", **extra}


@pytest.mark.slow
def test_accelerate_launches_and_a_file_stops(config, tmp_path):
    """Two ranks through accelerate's launcher; `stop` ends them after a step, resume goes on."""
    path, run = tmp_path / "two.yaml", tmp_path / "run"
    path.write_text("distributed_type: MULTI_GPU\nnum_machines: 1\nuse_cpu: false\n")
    command = [sys.executable, "-m", "minitlt.cli", "train", "--config", str(config)]
    command += ["--max_steps", "500", "--run-dir", str(run), "--accelerate-config", str(path)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not list(run.glob("checkpoints/checkpoint-2/minitlt/whole.json")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    (run / "stop").touch()
    assert process.wait(120) == 130
    last = max(int(p.name.split("-")[1]) for p in run.glob("checkpoints/checkpoint-*"))
    again = [sys.executable, "-m", "minitlt.cli", "train", "--resume", str(run)]
    again += ["--max_steps", str(last + 1)]
    done = subprocess.run(again, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] == last + 1


@pytest.mark.slow
def test_under_another_launcher_it_runs_in_place(config, tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command += ["minitlt.cli", "train", "--config", str(config), "--run-dir", str(run)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (run / "report.html").is_file() and (run / "config.yaml").is_file()
    assert json.loads((run / "summary.json").read_text())["token_mismatches"] == 0
