"""Faults for real: processes are killed, disks fill up, rewards misbehave.

Every case ends in one clear line and its exit code within a minute, leaves no process and no file
in shared memory, and `--resume` goes on where anything is left to go on with. All of it runs
`minitlt train` on a tiny model with two ranks, so it is slow; the rewards that follow are named in
its recipe. Run: pytest -m slow tests/test_faults.py
"""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
import yaml
from disks import small_disk
from tiny import save_tiny_model
from transformers import TrainerCallback

import minitlt.run
from minitlt.distill import DrafterTrainer
from minitlt.events import read_events
from minitlt.rl import MiniTLTTrainer
from minitlt.spec import RolloutEngine
from minitlt.stop import checkpoints, last_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
PATIENCE_S = 900.0  # for a phase to come, on a busy machine
END_S = 60.0  # promised from a fault to the end
GENERATE = RolloutEngine.generate


def plain_reward(completions, **_):
    return [float(len(str(c)) % 7) for c in completions]


def slow_reward(completions, **_):
    if marks := os.environ.get("MARKS"):  # a folder that tells which step has come to its reward
        step = the_trainer().state.global_step + 1
        Path(marks, f"{step}-{os.environ['RANK']}").touch()
    time.sleep(3.0)
    return plain_reward(completions)


def raising_reward(completions, **_):
    raise KeyError("no such answer")


def short_reward(completions, **_):
    return plain_reward(completions)[: None if "MENDED" in os.environ else 1]


def nan_reward(completions, **_):
    return [float("nan")] * len(completions)


def hanging_reward(completions, **_):
    time.sleep(3600)


def dawdling_reward(completions, **_):
    """From the second generation on the ranks take turns being late: each has an idle window."""

    def dawdle(engine, *args, **options):
        out = GENERATE(engine, *args, **options)
        time.sleep(3.0 * (engine.policy_version % 2 == int(os.environ["RANK"])))
        return out

    RolloutEngine.generate = dawdle
    return plain_reward(completions)


def starved_reward(completions, **_):
    """... and the drafter's train step asks for more memory than any machine has."""

    def starve(*_):
        return torch.empty(1 << 50)

    DrafterTrainer.train_step = starve
    return dawdling_reward(completions)


def the_trainer():
    (trainer,) = (o for o in gc.get_objects() if isinstance(o, MiniTLTTrainer))
    return trainer


def diverging_reward(completions, **_):
    """In step 2, once, the policy's weights become NaN."""
    trainer = the_trainer()
    mark = Path(trainer.args.output_dir).parent / f"poisoned{os.environ['RANK']}"
    if trainer.state.global_step == 1 and not mark.exists():
        mark.touch()
        with torch.no_grad():
            trainer.model.lm_head.weight.fill_(torch.nan)
    return plain_reward(completions)


def blinding_reward(completions, **_):
    """Between the steps 1 and 2 the policy's head becomes NaN, and with it all logits."""

    class Blind(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **_):
            if state.global_step == 1:
                model.lm_head.weight.data.fill_(torch.nan)

    if (trainer := the_trainer()).state.global_step == 0:
        trainer.add_callback(Blind())
    return plain_reward(completions)


def stalling_reward(completions, **_):
    """Rank 0 stops for good in step 2, inside what $STALL names: the optimizer's step, or a part
    of the checkpoint. Then there is a file `stalled` in the run folder."""
    trainer, where = the_trainer(), os.environ.get("STALL")
    if trainer.state.global_step == 1 and os.environ["RANK"] == "0" and where:

        def stall(*_args, **_kwargs):
            (Path(trainer.args.output_dir).parent / "stalled").touch()
            time.sleep(3600)

        owner, name = {
            "update": (trainer.optimizer.optimizer, "step"),
            "save": (trainer, "_save_optimizer_and_scheduler"),
            "seal": (minitlt.run, "seal"),
        }[where]
        setattr(owner, name, stall)
    return plain_reward(completions)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """Makes a config file of a tiny two-rank run; keyword arguments override."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model", num_hidden_layers=4)
    (folder / "data.jsonl").write_text('{"prompt": "2 + 2", "answer": "4"}\n' * 32)

    def make(reward="plain_reward", **extra):
        values = {
            "model_name_or_path": str(folder / "model"),
            "nproc": 2,
            "task": {
                "name": str(folder / "data.jsonl"),
                "options": {"rewards": [f"test_faults.{reward}"]},
            },
            "max_steps": 4,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 48,
            "learning_rate": 1e-4,
            "save_steps": 1,
            "save_total_limit": 2,
            "gradient_checkpointing": False,
            "logging_steps": 1,
            "drafter": {"draft_vocab_size": 64},
            **extra,
        }
        path = folder / f"{reward}-{len(list(folder.glob('*.yaml')))}.yaml"
        path.write_text(yaml.safe_dump(values))
        return path

    return make


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test():
    yield
    while Run.started:
        process = Run.started.pop()
        process.kill()  # its ranks notice
        process.wait()
        for pipe in (process.stdout, process.stderr):
            pipe.close()


class Run:
    """`minitlt train` in its own session, with what it leaves behind."""

    started = []  # noqa: RUF012 (one list for all)

    def __init__(self, folder, *arguments, before=(), **environment):
        self.folder, self.ranks, self.folders, self.hurt_at = folder, [], set(), None
        command = [sys.executable, "-m", "minitlt.cli", "train", *map(str, arguments)]
        self.process = subprocess.Popen(
            [*before, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=dict(os.environ, PYTHONPATH=str(Path(__file__).parent), **environment),
        )
        self.started.append(self.process)
        threading.Thread(target=self.see, daemon=True).start()

    def wait_for(self, name, rank=None, step=None):
        """Until the log holds such an event, and the ranks have been seen."""
        give_up = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up and self.process.poll() is None:
            log = self.folder / "events.jsonl"
            for event in read_events(log) if log.exists() else ():
                wanted = {"event": name, "rank": rank, "step": step}
                if self.folders and all(
                    event.get(k) == v for k, v in wanted.items() if v is not None
                ):
                    return
            time.sleep(0.02)
        pytest.fail(f"no {name} came: {self.end()}")

    def see(self):
        """Waits for the ranks' processes, by rank, and for their folder in shared memory."""
        while self.process.poll() is None and not self.folders:
            with contextlib.suppress(psutil.Error, OSError):
                children = psutil.Process(self.process.pid).children(recursive=True)
                ranks = [(c.environ()["RANK"], c) for c in children if "RANK" in c.environ()]
                opened = [fd for _, c in ranks for fd in Path(f"/proc/{c.pid}/fd").iterdir()]
                names = [os.readlink(fd) for fd in opened if fd.is_symlink()]
                if len(ranks) == 2:
                    self.ranks = [c for _, c in sorted(ranks, key=lambda pair: pair[0])]
                    self.folders = {
                        Path(name) for name in names if "/minitlt-swap-" in name and "/shm/" in name
                    }
            time.sleep(0.05)

    def hurt(self, *numbers, rank=None):
        """Sends signals to a rank, or to the launcher; from now on time is taken."""
        self.hurt_at = time.time()
        for number in numbers:
            (self.process if rank is None else self.ranks[rank]).send_signal(number)

    def check_nothing_is_left(self):
        """No process, no shared file, and less than a minute since the fault; for a fault inside
        the run that is the last thing in its log."""
        assert len(self.ranks) == 2 and len(self.folders) == 1, "nothing was seen of the ranks"
        _, alive = psutil.wait_procs(self.ranks, timeout=1)
        assert not alive
        assert not any(folder.exists() for folder in self.folders)
        if self.hurt_at is None and self.process.returncode:
            self.hurt_at = read_events(self.folder / "events.jsonl")[-1]["t"]
        if self.hurt_at is not None:
            assert time.time() - self.hurt_at < END_S

    def shared(self):
        """This run's files in shared memory."""
        return [path for folder in self.folders if folder.exists() for path in folder.iterdir()]

    def end(self, refused=False):
        """(exit code, stderr's own lines); nothing of the run is left."""
        started = time.monotonic()
        _, stderr = self.process.communicate(timeout=END_S if self.hurt_at else PATIENCE_S)
        print(f"ended after {time.monotonic() - started:.1f} s: {stderr.strip()}")
        assert "Traceback" not in stderr, stderr
        if not refused:
            self.check_nothing_is_left()
        self.said = stderr
        return self.process.returncode, [s for s in stderr.splitlines() if s.startswith("minitlt:")]


def resume(folder, *words, disk=None, **environment):
    """The run goes on to its end; returns the step at which it went on."""
    found = last_checkpoint(folder)
    before = read_events(folder / "events.jsonl")
    name, sees = (disk.folder, disk.before) if disk else (folder, ())
    again = Run(folder, "--resume", name, *words, before=sees, **environment)
    code, lines = again.end()
    assert code == 0, lines
    events = read_events(folder / "events.jsonl")
    step = int(found.name.split("-")[-1]) if found else 0
    steps = [e["step"] for e in events[len(before) :] if e["event"] == "update"]
    assert steps == list(range(step + 1, 5))
    assert len([e for e in events if e["event"] == "summary"]) == 1
    assert (folder / "policy" / "model.safetensors").exists()
    assert {p.name for p in checkpoints(folder / "checkpoints")} == {"checkpoint-3", "checkpoint-4"}
    return step


@pytest.mark.parametrize("phase", ["generating", "harvesting", "merging"])
def test_a_killed_rank_ends_the_run(recipe, tmp_path, phase):
    folder, rank = tmp_path / "run", 1
    config = recipe(
        max_completion_length=400 if phase == "generating" else 48,
        generation_kwargs={"min_new_tokens": 390 if phase == "generating" else 1},
        spot={"steps_per_window": 10_000 if phase == "harvesting" else 40}
        if phase in ("harvesting", "merging")
        else {},
        drafter={"draft_vocab_size": 64, "pack_tokens": 64},
    )
    run = Run(folder, "--config", config, "--run-dir", folder)
    if phase == "generating":
        run.wait_for("rollout_progress", rank)
    elif phase == "harvesting":
        run.wait_for("harvest_step", rank)
    else:  # rank 0 has ended its window and waits for rank 1's drafter
        run.wait_for("harvest_step", rank, step=2)
        run.ranks[rank].suspend()
        run.wait_for("harvest_end", 0, step=2)
        time.sleep(0.5)
    run.hurt(signal.SIGKILL, rank=rank)
    code, lines = run.end()
    assert code == 1
    assert len(lines) == 1 and f"rank {rank} was killed" in lines[0]
    quick = ["--max_completion_length", "48", "--generation_kwargs", "{min_new_tokens: 1}"]
    step = resume(folder, *quick, "--spot.steps_per_window", "40")
    assert step == (1 if phase == "merging" else 0)


@pytest.mark.parametrize("phase", ["update", "save", "seal"])
def test_a_rank_killed_in_an_update_or_a_checkpoint(recipe, tmp_path, phase):
    folder = tmp_path / "run"
    run = stalled_run(recipe, folder, phase)
    assert (folder / "checkpoints" / "checkpoint-2").exists() == (phase != "update")
    run.hurt(signal.SIGKILL, rank=0)
    code, lines = run.end()
    assert code == 1
    assert len(lines) == 1 and "rank 0 was killed" in lines[0]
    assert resume(folder) == 1


def stalled_run(recipe, folder, phase):
    run = Run(folder, "--config", recipe("stalling_reward"), "--run-dir", folder, STALL=phase)
    run.wait_for("rollout_end", step=2)
    give_up = time.monotonic() + PATIENCE_S
    while not (folder / "stalled").exists():
        assert time.monotonic() < give_up and run.process.poll() is None
        time.sleep(0.02)
    return run


def test_a_step_that_does_not_end_does_not_hold_up_ctrl_c(recipe, tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    folder = tmp_path / "run"
    run = stalled_run(recipe, folder, "update")
    run.hurt(signal.SIGINT)
    assert run.end() == (130, [])
    assert "the step was not done within 45 s" in run.said
    assert f"minitlt train --resume {folder} goes on from checkpoint-1" in run.said
    assert resume(folder) == 1


def test_a_killed_launcher_takes_its_ranks_along(recipe, tmp_path):
    """Steps of seconds: in those of a tiny model the run would be over before a rank looks."""
    folder = tmp_path / "run"
    run = Run(folder, "--config", recipe("slow_reward"), "--run-dir", folder)
    run.wait_for("update", step=2)
    run.hurt(signal.SIGKILL)
    psutil.wait_procs(run.ranks, timeout=END_S)
    run.end()
    newest, before = checkpoints(folder / "checkpoints")
    weights = newest / "model.safetensors"  # torn, as if the disk had lost the end of it
    os.truncate(weights, weights.stat().st_size // 2)
    assert resume(folder) == int(before.name.split("-")[1])


def test_a_torn_hot_swap_file_is_skipped(recipe, tmp_path):
    """While both ranks decode, rank 1's published drafter is replaced by noise."""
    folder = tmp_path / "run"
    config = recipe(
        max_steps=1, max_completion_length=300, generation_kwargs={"min_new_tokens": 290}
    )
    run = Run(folder, "--config", config, "--run-dir", folder)
    run.wait_for("rollout_start", 0)
    (shared,) = run.folders
    torn = shared / "r1.noise"
    torn.write_bytes(os.urandom(4000))
    torn.rename(torn.with_suffix(".safetensors"))
    assert run.end() == (0, [])
    guards = [e for e in read_events(folder / "events.jsonl") if e["event"] == "guard"]
    assert {e["name"] for e in guards if e["rank"] == 0} == {"swap_file_skipped"}
    assert "torn or foreign" in guards[0]["message"]


def test_a_drafter_without_memory_ends_harvesting_not_the_run(recipe, tmp_path):
    folder = tmp_path / "run"
    run = Run(folder, "--config", recipe("starved_reward"), "--run-dir", folder)
    assert run.end() == (0, [])
    events = read_events(folder / "events.jsonl")
    guards = [e for e in events if e["event"] == "guard" and e["name"] == "out_of_memory"]
    ends = [e for e in events if e["event"] == "harvest_end" and e["step"] > 1]
    assert sorted(e["rank"] for e in guards) == [0, 1]  # once on each
    assert all("harvesting is off" in e["message"] and e["count"] == 1 for e in guards)
    assert len(ends) == 6 and not any(e["drafter_steps"] for e in ends)
    assert max(e["step"] for e in events if e["event"] == "update") == 4


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        ("diverging_reward", ("after step 2 the policy's weights are not finite",
                              "goes on from checkpoint-1")),
        ("blinding_reward", ("all NaN",)),
    ],
)  # fmt: skip
def test_a_policy_that_diverged_ends_the_run_and_is_not_saved(recipe, tmp_path, reward, says):
    """Its weights, or only its logits."""
    folder = tmp_path / "run"
    run = Run(folder, "--config", recipe(reward), "--run-dir", folder)
    code, lines = run.end()
    assert code == 1 and len(lines) == 1
    assert all(part in lines[0] for part in says)
    assert [p.name for p in checkpoints(folder / "checkpoints")] == ["checkpoint-1"]
    assert resume(folder) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, "SIGTERM to all"])
def test_interrupts_save_and_resume(recipe, tmp_path, number):
    """`to all`: as systemd and slurm do it, so that the ranks hear of it twice."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    folder = tmp_path / "run"
    run = Run(folder, "--config", recipe(save_steps=100), "--run-dir", folder)
    run.wait_for("rollout_start", step=2)
    if number == "SIGTERM to all":
        number = signal.SIGTERM
        for rank in (0, 1):
            run.hurt(number, rank=rank)
    run.hurt(number)
    assert run.end() == (130, [])
    step = int(last_checkpoint(folder).name.split("-")[-1])
    assert step in (2, 3)
    assert f"minitlt train --resume {folder} goes on from checkpoint-{step}" in run.said
    again = Run(folder, "--resume", folder)
    assert again.end() == (0, [])
    steps = [e["step"] for e in read_events(folder / "events.jsonl") if e["event"] == "update"]
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("reward", "message"),
    [("raising_reward", "no such answer"), ("nan_reward", "score nan"),
     ("hanging_reward", "no result within")],
)  # fmt: skip
def test_a_bad_reward_scores_zero_and_is_said(recipe, tmp_path, reward, message):
    run = Run(tmp_path / "run", "--config", recipe(reward, max_steps=1),
              "--run-dir", tmp_path / "run")  # fmt: skip
    code, lines = run.end()
    assert (code, lines) == (0, [])
    events = read_events(tmp_path / "run" / "events.jsonl")
    guards = [e for e in events if e["event"] == "guard" and e["name"] == "reward_failed"]
    assert {e["rank"] for e in guards} == {0, 1}
    assert all(message in e["message"] and e["count"] == 4 for e in guards)
    assert [e["reward"] for e in events if e["event"] == "update"] == [0.0]


def test_a_reward_of_the_wrong_length_ends_the_run(recipe, tmp_path):
    run = Run(tmp_path / "run", "--config", recipe("short_reward"), "--run-dir", tmp_path / "run")
    code, lines = run.end()
    assert code == 1 and len(lines) == 1
    assert "'short_reward' returned 1 values for 4 completions" in lines[0]
    assert resume(tmp_path / "run", MENDED="1") == 0


def test_a_full_disk_ends_the_run_with_its_reason(recipe, tmp_path):
    """A checkpoint of some 2 MB fits, perhaps two, but not all; with more room the run goes on."""
    folder = tmp_path / "run"
    folder.mkdir()
    with small_disk(folder, "5m") as disk:
        run = Run(disk.look, "--config", recipe(), "--run-dir", folder, before=disk.before)
        code, lines = run.end()
        assert code == 1 and len(lines) == 1
        assert "No space left on device" in lines[0]
        disk.grow("64m")
        assert resume(disk.look, disk=disk) > 0


def test_a_log_without_room_does_not_hold_up_the_run(recipe, tmp_path):
    """The disk is full from step 2 until step 3, with all that the ranks have to say on it."""
    folder, marks = tmp_path / "run", tmp_path / "marks"
    folder.mkdir(), marks.mkdir()
    with small_disk(folder, "64m") as disk:
        run = Run(disk.look, "--config", recipe("slow_reward", save_steps=100), "--run-dir", folder,
                  before=disk.before, MARKS=str(marks))  # fmt: skip
        run.wait_for("update", step=1)
        filler, give_up = disk.fill(), time.monotonic() + PATIENCE_S
        while len(list(marks.glob("3-*"))) < 2:
            assert time.monotonic() < give_up and run.process.poll() is None
            time.sleep(0.02)
        filler.unlink()
        assert run.end() == (0, [])
        events = read_events(disk.look / "events.jsonl")
        assert [e["step"] for e in events if e["event"] == "update"] == [1, 3, 4]
        assert events[-1]["event"] == "summary" and events[-1]["steps"] == 4


def test_a_drafter_without_room_is_not_published_and_the_run_goes_on(recipe, tmp_path):
    folder = tmp_path / "run"
    config = recipe("dawdling_reward", spot={"publish_seconds": 0.2})
    with small_disk("/dev/shm", "64m") as disk:
        run = Run(folder, "--config", config, "--run-dir", folder, before=disk.before)
        run.wait_for("rollout_start", step=2)
        filler = disk.fill()
        assert run.end() == (0, [])
        assert list(disk.look.iterdir()) == [filler]
    events = read_events(folder / "events.jsonl")
    guards = [e for e in events if e["event"] == "guard"]
    assert {e["rank"] for e in guards if e["name"] == "publish_failed"} == {0, 1}
    assert all("No space left" in e["message"] for e in guards if e["name"] == "publish_failed")
    assert not [e for e in events if e["event"] == "publish" and e["step"] > 2]
    assert max(e["step"] for e in events if e["event"] == "update") == 4


def test_a_run_folder_that_cannot_be_written_is_refused_at_once(recipe, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    with small_disk(folder, "1m", ",ro") as disk:
        run = Run(disk.look, "--config", recipe(), "--run-dir", folder, before=disk.before)
        code, lines = run.end(refused=True)
    assert code == 2 and len(lines) == 1
    assert "cannot be written: Read-only file system" in lines[0]


def test_soak(recipe, tmp_path):
    """Memory flat within 2 % from step 300 to 400, no growth in files, threads, shared memory.

    Before that pools fill. oneDNN keeps the code of the last 1,024 products of different shapes;
    the drafter's packs have many shapes, so that one would fill for hours: here it is small.
    """
    folder, steps = tmp_path / "run", 400
    config = recipe(
        max_steps=steps,
        save_steps=20,
        save_total_limit=1,
        max_completion_length=32,
        drafter={"draft_vocab_size": 64, "buffer_tokens": 2048, "ngram_tokens": 4000},
    )
    run = Run(folder, "--config", config, "--run-dir", folder, ONEDNN_PRIMITIVE_CACHE_CAPACITY="64")
    run.wait_for("update", step=10)
    seen, sizes = [], []
    while run.process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            done = sum(e["event"] == "update" for e in read_events(folder / "events.jsonl"))
            seen.append((done, [look(run, rank) for rank in run.ranks]))
            files = [f.stat().st_size for f in (folder / "checkpoints").rglob("*") if f.is_file()]
            sizes.append(sum(files))
        time.sleep(0.5)
    code, lines = run.end()
    assert (code, lines) == (0, [])
    for rank in (0, 1):
        early, late = (
            [each[rank] for done, each in seen if first <= done < first + 50]
            for first in (300, 350)
        )
        before, after = ([median(each) for each in zip(*x, strict=True)] for x in (early, late))
        print(f"rank {rank}: bytes, files, threads, shared files: {before} then {after}")
        assert after[0] < 1.02 * before[0]
        assert after[1:] == before[1:]
    assert len(checkpoints(folder / "checkpoints")) == 1
    assert sizes[-1] < 2.2 * min(s for s in sizes if s)


def look(run, rank):
    """Bytes, open files, threads of a rank, and the run's files in shared memory."""
    return rank.memory_info().rss, rank.num_fds(), rank.num_threads(), len(run.shared())
