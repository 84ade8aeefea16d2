"""Runs that end early and go on: what a signal, a fault or a policy that diverged leaves behind.

One rank, in place as under another launcher, in this process. What needs processes of its own is in
test_launch.py (no training) and test_faults.py (two ranks, slow).
"""

import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from ranks import PROCESSES, own_worker
from safetensors.torch import load_file
from tiny import save_tiny_model
from torch import nn
from typer.testing import CliRunner

from minitlt import launch, native, run, stop
from minitlt.cli import app
from minitlt.config import ConfigError
from minitlt.events import read_events
from minitlt.launch import RunFailed
from minitlt.stop import StopCallback, checkpoints, last_checkpoint

pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans
STEPS = 3
MADE = []  # trainers, the newest last


def poison_reward(completions, **_):
    """In step 2 of the first run the policy's weights become NaN."""
    trainer = MADE[-1]
    if trainer.state.global_step == 1 and len(MADE) == 1:
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(torch.nan)
    return [float(len(str(c)) % 7) for c in completions]


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    (folder / "data.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n' * 8)
    rewards = {"rewards": ["test_stop.poison_reward"]}
    return {
        "model_name_or_path": str(folder / "model"),
        "task": {"name": str(folder / "data.jsonl")},
        "max_steps": STEPS,  # of the 8 of an epoch
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "save_steps": 1,
        "gradient_checkpointing": False,
        "logging_steps": 1,
    }, {"name": str(folder / "data.jsonl"), "options": rewards}


@pytest.fixture
def train(values, tmp_path, monkeypatch):
    """train(folder, *words, **changes): begins the run or, with --resume, goes on with it."""
    make, claim = run._make_trainer, launch.open_run_folder

    def made(*args):
        MADE.append(make(*args))
        return MADE[-1]

    MADE.clear()
    monkeypatch.setattr(run, "_make_trainer", made)
    monkeypatch.setattr("minitlt.page.draw", lambda runs: [])  # seconds per run
    monkeypatch.setattr(launch, "open_run_folder", lambda *args: os.close(claim(*args)))
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(values[0]))

    def go(folder, *words, **changes):
        if changes:
            config.write_text(yaml.safe_dump(values[0] | changes))
        begin = ["--config", config, "--run-dir", folder]
        words = words if "--resume" in words else [*begin, *words]
        return CliRunner().invoke(app, ["train", *map(str, words)])

    return go


def policy(folder):
    return load_file(folder / "policy" / "model.safetensors")


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(t, right[n]) for n, t in left.items())


def names_of(folder):
    return [e["event"] for e in read_events(folder / "events.jsonl")]


def steps_of(folder):
    return [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "update"]


def test_a_run_stopped_in_its_end_or_already_done_is_not_trained_further(
    train, tmp_path, monkeypatch
):
    """transformers alone would train a fourth step. SIGTERM comes while the results are written:
    nobody waits for the comparison."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole).exit_code == 0
    write = run.save_drafter

    def interrupted(*args):
        write(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(run, "save_drafter", interrupted)
        patch.setattr(run, "compare_plain", lambda trainer: pytest.fail("compared"))
        done = train(cut)
    assert done.exit_code == 130
    assert f"stopped; --resume {cut} goes on from checkpoint-3" in done.stderr
    (cut / "policy" / "model.safetensors").unlink()
    starts = ["run", "run", "summary"]
    for _ in range(2):  # the second time the run is done already, and logs nothing
        done = train(cut, "--resume", cut)
        assert done.exit_code == 0, done.exception
        assert steps_of(cut) == [1, 2, 3]
        assert same(policy(cut), policy(whole))
        assert [e for e in names_of(cut) if e in ("run", "summary")] == starts
        assert names_of(cut)[-1] == "summary"
    assert train(cut, "--resume", cut, "--max_steps", "4").exit_code == 0
    assert steps_of(cut) == [1, 2, 3, 4]
    assert [e for e in names_of(cut) if e in ("run", "summary")] == [*starts, "run", "summary"]


def test_a_policy_that_diverged_is_not_saved_and_the_run_goes_on_from_before(
    train, values, tmp_path
):
    folder = tmp_path / "run"
    done = train(folder, task=values[1])
    assert done.exit_code == 1 and done.stderr.count("minitlt:") == 1, done.exception
    assert "Traceback" not in done.stderr
    assert "after step 2 the policy's weights are not finite" in done.stderr
    assert f"--resume {folder} goes on from checkpoint-1" in done.stderr
    assert [p.name for p in checkpoints(folder / "checkpoints")] == ["checkpoint-1"]
    assert train(folder, "--resume", folder).exit_code == 0
    assert steps_of(folder) == [1, 2, 3]
    assert all(tensor.isfinite().all() for tensor in policy(folder).values())


@pytest.mark.skipif(native.library() is None, reason=native.status())
def test_a_resume_that_decodes_in_another_way_says_so(train, tmp_path, monkeypatch, caplog):
    folder, native_way = tmp_path / "run", native.name()
    given = {"arms": ["off", "int8-5", "eagle-2"]}
    assert train(folder, max_steps=1, rollout=given).exit_code == 0
    assert train(folder, "--resume", folder, "--max_steps", "2").exit_code == 0
    assert "tokens came from" not in caplog.text
    monkeypatch.setattr(native, "library", lambda: None)
    assert train(folder, "--resume", folder, "--max_steps", "3").exit_code == 0
    assert f"tokens came from '{native_way}', and now come from 'packed'" in caplog.text
    runs = [e for e in read_events(folder / "events.jsonl") if e["event"] == "run"]
    assert [e["target"]["decoder"] for e in runs] == [native_way, native_way, "packed"]
    want = [given["arms"], given["arms"], ["off", "eagle-2"]]
    assert [e["arms_served"] for e in runs] == want


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_weight_is_found_if_it_is_trained(value, tmp_path):
    stop, control = StopCallback(tmp_path), SimpleNamespace(should_save=True)
    args, state = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=5)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(0, 1), nn.Linear(2, 2)])
    stop.on_step_end(args, state, control, model=model)
    with torch.no_grad():
        model[2].weight[1, 0] = value
    with pytest.raises(RunFailed, match="after step 5"):
        stop.on_step_end(args, state, control, model=model)
    model[2].requires_grad_(False)
    stop.on_step_end(args, state, control, model=model)
    assert vars(control) == {"should_save": True}


def test_a_run_without_a_checkpoint_goes_on_from_the_start(train, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train(whole).exit_code == 0

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "save_state", interrupted)
        done = train(cut)
    assert done.exit_code == 130
    assert f"--resume {cut} goes on from the start, as no checkpoint was whole" in done.stderr
    assert last_checkpoint(cut) is None and checkpoints(cut / "checkpoints")
    assert f"use --resume {cut}" in train(cut).stderr
    (cut / "checkpoints" / "checkpoint-7").mkdir()  # torn as well, of a step that never comes
    done = train(cut, "--resume", cut)
    assert done.exit_code == 0 and "from the start" in done.stdout, done.exception
    assert same(policy(cut), policy(whole))
    names = {p.name for p in checkpoints(cut / "checkpoints")}
    assert names == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seed", "9"], "--resume cannot change seed: it is its default in this run, not 9"),
        (["--nproc", "2"], "--resume cannot change nproc: it is 1 in this run, not 2"),
        (["--num_generations", "2"], "cannot change num_generations: it is 4 in this run, not 2"),
        (["--task", "chain_sum"], "cannot change task"),
        (["--model_name_or_path", "smollm2-135m"], "cannot change model_name_or_path"),
        (["--drafter.draft_vocab_size", "32"], "cannot change drafter.draft_vocab_size"),
        (["--smoke"], "leave --smoke out"),
    ],
)
def test_what_a_run_stands_on_cannot_be_changed_by_resume(train, values, tmp_path, words, message):
    config = tmp_path / "config.yaml"
    before = config.read_bytes()
    done = train(tmp_path, "--resume", tmp_path, *words)
    assert done.exit_code == 2 and message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert config.read_bytes() == before and list(tmp_path.iterdir()) == [config]


def test_checkpoints_without_an_optimizer_cannot_be_gone_on_from(train, tmp_path):
    folder = tmp_path / "run"
    assert train(folder, save_only_model=True, max_steps=1).exit_code == 0
    for words in ([], ["--save_only_model", "false"]):
        done = train(folder, "--resume", folder, *words)
        assert done.exit_code == 2 and "save_only_model" in done.stderr
    with pytest.raises(ConfigError, match="save_only_model left no optimizer"):
        last_checkpoint(folder)


def test_a_dry_run_runs_nothing_under_any_launcher(train, tmp_path, monkeypatch):
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    done = train(tmp_path / "run", "--dry-run")
    assert done.exit_code == 0, done.exception
    assert yaml.safe_load(done.stdout)["nproc"] == 2
    assert "2 ranks x per_device_train_batch_size 4" in done.stdout
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1")):
        monkeypatch.setenv(name, value)
    done = train(tmp_path / "run", "--dry-run")
    assert (done.exit_code, done.output) == (0, "")
    assert not (tmp_path / "run").exists()


def test_a_signal_that_comes_twice_at_once_is_one_wish(tmp_path):
    callback = StopCallback(tmp_path)
    callback.listen(lambda: None)
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):
        callback.obey(torch.device("cpu"))
    callback.asked -= 3.0
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_checkpoint_that_could_not_be_written_ends_the_run_at_the_next_step():
    callback = run.StateCallback(SimpleNamespace(args=SimpleNamespace(save_total_limit=2)))
    callback.on_step_end()
    callback.writing = Future()
    callback.on_step_end()  # not done yet: training goes on
    callback.writing.set_exception(OSError(28, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        callback.on_step_end()


def test_the_next_checkpoint_is_not_taken_for_a_torn_one(tmp_path):
    """Its step is over before the thread has made the last one whole."""
    callback = run.StateCallback(SimpleNamespace(args=SimpleNamespace(save_total_limit=2)))
    folders = [tmp_path / f"checkpoint-{step}" for step in (1, 2, 3, 4, 5)]
    for folder in folders:
        (folder / "minitlt").mkdir(parents=True)
        (folder / "file").write_text("x")
    run.seal(folders[0]), run.seal(folders[2])
    callback._complete(folders[3], {str(folders[3])})
    assert [folder.exists() for folder in folders] == [False, False, True, True, True]
    assert run.is_whole(folders[3])


def test_the_claim_on_the_folder_is_not_left_to_programs_that_a_rank_starts(train, monkeypatch):
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    monkeypatch.setenv("MINITLT_CLAIM", str(reader))
    monkeypatch.setenv("MINITLT_LAUNCHER", str(os.getppid()))
    assert train("/dev/null/run").exit_code == 2
    assert not os.get_inheritable(reader)
    os.close(reader), os.close(writer)


def leave_a_child(said):
    """A rank, whose parent is then killed. Also under accelerate, whose process is the ranks'
    parent (MINITLT_LAUNCHER 0)."""
    os.environ["MINITLT_LAUNCHER"] = "0"
    if os.fork():
        time.sleep(600)
    stop.ORPHAN_SECONDS = 0.5
    StopCallback(Path(".")).listen(lambda: time.sleep(600))  # a disk that hangs
    said.put(os.getpid())
    time.sleep(600)


@own_worker
def test_a_rank_whose_parent_is_gone_leaves_at_any_cost():
    said = PROCESSES.SimpleQueue()
    parent = PROCESSES.Process(target=leave_a_child, args=(said,))
    parent.start()
    try:
        orphan = psutil.Process(said.get())
    finally:
        parent.kill()
        parent.join()
    _, alive = psutil.wait_procs([orphan], timeout=30)
    for process in alive:
        process.kill()
    assert not alive
