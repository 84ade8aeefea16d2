"""The command line: bad input is one line and exit code 2 within seconds; --help is fast."""

import importlib.metadata
import json
import os
import re
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
from minitlt.launch import open_run_folder


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


BENCHMARKS = ("rollout", "step", "kernels", "drafter", "match_rate", "model")


@pytest.mark.parametrize(
    "command", ["", "train", "generate", *(f"bench {name}" for name in BENCHMARKS)]
)  # train and generate have most options
def test_help_is_fast(command):
    """Under half a second of one core, whatever else the machine does meanwhile."""
    words = [sys.executable, "-m", "minitlt", *command.split(), "--help"]
    before = os.times()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    after = os.times()
    assert "Example" in done.stdout or not command
    assert command in done.stdout
    used = after.children_user - before.children_user
    assert used + after.children_system - before.children_system < 0.5  # 0.2 s on an idle machine


INSTALLED = "from minitlt.__main__ import main; main()"  # as pip's own script does it


@pytest.mark.parametrize("start", [["-m", "minitlt"], ["-c", INSTALLED]])
def test_ctrl_c_is_heard_while_the_command_itself_is_loaded(tmp_path, start):
    """It comes in the first of its many imports."""
    (tmp_path / "typer.py").write_text(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(60)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *start, "recipes"],
        env=environment(PYTHONPATH=path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("redirect", "code"), [("<&- >&- 2>&-", 0), (">/dev/full", 2), ("| true", 0), ("| cat", 0)]
)
def test_output_that_goes_nowhere(redirect, code):
    command = f"PYTHONIOENCODING=ascii {sys.executable} -m minitlt.cli recipes {redirect}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Exception" not in done.stderr and len(done.stderr.splitlines()) == (code > 0)


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
        (["--use_vllm", "true"], "use_vllm: true cannot be used here"),
        (["stray"], "no recipe 'stray'"),
        (["--seed", "!!bool x"], "--seed: cannot read '!!bool x'"),
        (["--seed", "2024-13-45"], "--seed: cannot read '2024-13-45': month must be"),
        (["--learning_rate", ".nan"], "learning_rate: nan is not a number that can be used"),
        (["--seed", str(2**63)], "is not a number that can be used"),
        (["--rollout.cache_gb", ".inf"], "rollout.cache_gb: must be at least 0, and finite"),
        (["--max_completion_length", "0"], "max_new_tokens must be at least 1"),
        (["--top_p", "7"], "top_p must be in (0, 1]"),
        (["--temperature", "0"], "temperature: must be above 0 to train"),
        (["--model_init_kwargs", "x"], "model_init_kwargs: expected a mapping, not 'x'"),
        (["--generation_kwargs", "{zebra: 1}"], "generation_kwargs.zebra is not supported"),
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "max_steps: 1\nnproc: 1\nmax_steps: 2\n",
            "key 'max_steps' is there twice, again in line 3",
        ),
        ("rollout: {dtype: fp32, dtype: bf16}", "key 'dtype' is there twice, again in line 1"),
        ("task:\n\tname: x\n", "character '\\t' that cannot start any token"),
        ("seed: !!bool x", "not valid YAML"),
        ("seed: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("a: " + "[" * 5000, "not valid YAML"),
        ("- 1", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_files_that_are_not_yaml_mappings(config, tmp_path, content, message):
    """As a recipe and as accelerate's file."""
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    for words in (["--config", path], ["--config", config, "--accelerate-config", path]):
        done = minitlt("train", "--dry-run", *words)
        assert done.exit_code == 2 and message in done.stderr, done
        assert str(path) in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_folder_with_a_run_in_it_is_left_alone(config, tmp_path, monkeypatch):
    """A finished one, also under another launcher; one that is alive, also by --resume."""
    (tmp_path / "events.jsonl").touch()
    done = minitlt("train", "--config", config, "--run-dir", tmp_path)
    assert done.exit_code == 2 and "already holds a run" in done.stderr
    with monkeypatch.context() as other:
        for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
            other.setenv(name, value)
        done = minitlt("train", "--config", config, "--run-dir", tmp_path)
    assert done.exit_code == 2 and "already holds a run" in done.stderr
    assert not (tmp_path / "config.yaml").exists()
    claim = open_run_folder(tmp_path, config.read_text())
    with pytest.raises(ValueError, match=r"a run is alive in .*; wait for its end, or end it"):
        open_run_folder(tmp_path, "nproc: 7")
    assert (tmp_path / "config.yaml").read_text() == config.read_text()
    child = subprocess.Popen(["sleep", "60"], pass_fds=(claim,))  # as a rank that outlives us
    os.close(claim)
    with pytest.raises(ValueError, match="a run is alive"):
        open_run_folder(tmp_path, "nproc: 7")
    child.kill()
    child.wait()
    os.close(open_run_folder(tmp_path, "nproc: 7"))


def test_columns_of_several_kinds_and_torn_models_are_found_before_a_rank_starts(config, tmp_path):
    data, model = tmp_path / "d.jsonl", tmp_path / "model"
    row = {"prompt": "a", "answer": 1}
    data.write_text("".join(json.dumps(row | {"more": more}) + "\n" for more in (1, "x")))
    done = minitlt("train", "--config", config, "--task", data, "--dry-run")
    assert done.exit_code == 2 and "a column holds values of several kinds" in done.stderr
    for name, text in (("config.json", "[]"), ("config.json", '{"model_type": "llama", '
                       '"hidden_size": "x"}'), ("chat_template.jinja", "{% for %}")):  # fmt: skip
        save_tiny_model(model)
        (model / name).write_text(text)
        for words in (["train", "--config", config, "--dry-run", "--model_name_or_path", model],
                      ["generate", "--model", model, "--prompt", "a"]):  # fmt: skip
            done = minitlt(*words)
            assert done.exit_code == 2 and "Traceback" not in done.stderr, done
            assert "is torn or foreign" in done.stderr or "chat template fails" in done.stderr
    save_tiny_model(model)
    (model / "model.safetensors").write_bytes(b"torn")
    done = minitlt("generate", "--model", model, "--prompt", "a")
    assert done.exit_code == 2 and f"{model} is torn or foreign" in done.stderr


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
    ],
)
def test_resume_of_a_missing_or_half_written_run(tmp_path, make, message):
    make(tmp_path)
    done = minitlt("train", "--resume", tmp_path)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.stderr


def test_dry_run_prints_the_config_and_the_batch_algebra(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = minitlt("train", "--config", config, "--dry-run", "--seed", "5")
    assert done.exit_code == 0, done.stderr
    assert yaml.safe_load(done.stdout)["seed"] == 5
    assert "8 completions per generation" in done.stdout
    for option in ("rollout.epsilon: 0.0", "drafter.ttt_steps: ", "spot.publish_seconds: 2.0"):
        assert f"# {option}" in done.stdout  # every option of our blocks, and what it means
    assert "(share of steps with an arm at random; hope explores without it)" in done.stdout
    assert "save_strategy steps, seed 5" in done.stdout  # no name of an enum
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
        ({"window": 3}, "at least 4"),  # said before a model is loaded: the bandit needs as many
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
        (["train", "--resume", "/no/a", "--run-dir", "b"], "goes on in /no/a; leave --run-dir out"),
        (["generate", "--prompt", "\udce4"], "--prompt holds bytes that are not UTF-8"),
        (["generate", "--prompt", "a", "--max-rows", "-1"], "--max-rows must be 0"),
        (["copy", "01", "/dev/full"], "cannot write /dev/full"),
        (["report", "/no/a"], "/no/a/events.jsonl: no run log here"),
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


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(typer.Exit):
        _check_devices(2, on_cpu=False, accelerated=False)
    assert "has 1 GPU; " in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(typer.Exit):
        _check_devices(4, on_cpu=False, accelerated=False)
    page = re.search(r"or see (\S+)", capsys.readouterr().err)[1]
    assert (Path(__file__).parent.parent / page).is_file()
    _check_devices(2, on_cpu=False, accelerated=False)
    _check_devices(4, on_cpu=True, accelerated=False)
    with pytest.raises(typer.Exit):
        _check_devices(10**9, on_cpu=True, accelerated=False)


@pytest.mark.parametrize(
    "event",
    [
        '{"t":1,"rank":0,"event":"update"}',
        '{"t":1,"rank":0,"event":"update","step":"x","reward":1}',
        '{"t":"x","rank":0,"event":"update","step":1}',
        '{"t":1,"event":"update","step":1}',
        '{"t":1,"rank":0,"event":"rollout_end","step":1}',
        '{"t":' + "[" * 100_000,
    ],
)
def test_logs_with_odd_events_are_one_line(tmp_path, event):
    write_fake_run(tmp_path, steps=2)
    log = tmp_path / "events.jsonl"
    log.write_text(f"{log.read_text()}{event}\n")
    for words in (["report", tmp_path], ["compare", tmp_path, tmp_path], ["simulate", tmp_path]):
        done = minitlt(*words)
        assert done.exit_code in (0, 2) and "Traceback" not in done.stderr
        if done.exit_code:
            assert f"the log of {tmp_path}" in done.stderr, done
            assert "is torn or foreign" in done.stderr


def test_a_torn_policy_and_a_page_that_cannot_be_written_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("minitlt.page.draw", lambda runs: [])
    write_fake_run(tmp_path)
    done = minitlt("report", tmp_path, "--out", tmp_path / "events.jsonl" / "page.html")
    assert done.exit_code == 2 and "events.jsonl'" in done.stderr, done
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"torn")
    done = minitlt("compare", tmp_path, tmp_path)
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1, done


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
    assert done.stdout.startswith(f"A  {left}\nB  {right}\n")  # whole, however long
    (guards,) = [line for line in done.stdout.splitlines() if line.startswith("guards")]
    assert guards.count("short rows") == 2  # those that spoke, in either run
    bit = torch.ones(2, 2, dtype=torch.bfloat16)
    bit[1, 1] = 1.0078125
    other = make_run(tmp_path / "other", b=bit)
    done = minitlt("compare", left, other)
    assert done.exit_code == 0 and "policy: 1 of 2 tensors differ, by 0.0078" in done.stdout
    assert minitlt("compare", left, other, "--assert-equal").exit_code == 1


@pytest.mark.parametrize(
    ("event", "field", "message"),
    [
        ("rollout_end", "lengths", "completions: 1 of 6 differ, first at step 2, rank 0"),
        ("rollout_end", "digest", "completions: 1 of 6 differ, first at step 2, rank 0"),
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
    for run in (left, right):
        log = tmp_path / run.name / "events.jsonl"
        lines = [line for line in log.read_text().splitlines() if '"rollout_end"' not in line]
        log.write_text("\n".join(lines) + "\n")
    assert differences(left, right) == ["completions: neither run has logged any"]
    left, right = make_run(tmp_path / "a"), make_run(tmp_path / "b")
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
    assert re.search(r"ok  minitlt +\d", done.stdout)  # a bug report needs it
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
