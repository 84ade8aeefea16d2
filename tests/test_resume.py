"""A run that was interrupted and resumed equals one that was not, to the last bit (CPU, fp32).

Policy, optimizer, drafter, replay buffer, n-gram index, bandit, counters and completions. The
engine's clock is replaced by one that counts calls: the bandit chooses by measured seconds, and
those repeat only there. One rank in this process; two ranks as processes (slow).
"""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from grpo import make_trainer
from ranks import own_worker, two_ranks
from transformers import TrainerCallback

from minitlt import run, spec
from minitlt.spot import SpotConfig
from minitlt.tensorfile import read_tensors

pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans
STEPS, STOP_AT = 5, 3


class StopAt(TrainerCallback):
    """What StopCallback does after a signal, at a step of the test's choice."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(model_dir, folder, *, stop_at=0, resume=None, **extra):
    """(trainer, completions of every generation) of a tiny run with fixed harvest steps."""
    ticks = iter(range(1 << 30))
    spec.time = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    trainer = make_trainer(
        model_dir, folder, steps=STEPS, rows=4 if "RANK" in os.environ else 8,
        arms=("off", "ngram-3", "eagle-2"), spot=SpotConfig(steps_per_window=2), **extra,
    )  # fmt: skip
    # The first vocabulary is that of the rank which is done first: a matter of the clock.
    trainer.speculation.trainer.choose_vocab = lambda: list(range(64))
    if resume is not None:
        run.load_state(trainer, resume / "minitlt")
    trainer.add_callback(run.StateCallback(trainer))
    trainer.add_callback(StopAt(stop_at))
    completions, generate = [], trainer._generate_single_turn

    def spy(*args, **kwargs):
        out = generate(*args, **kwargs)
        completions.append(out[0])
        return out

    trainer._generate_single_turn = spy
    try:
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    finally:
        trainer.speculation.spot.close()
    return trainer, completions


def state_of(trainer):
    """Everything that must be equal, as a flat dict."""
    parts = trainer.speculation
    state = {f"policy.{n}": p.detach() for n, p in trainer.model.named_parameters()}
    for name, values in trainer.optimizer.optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{name}.{key}": value for key, value in values.items()}
    own = parts.trainer.state_dict() | parts.trainer.tensors()
    state |= {f"drafter.{n}": t for n, t in own.items()}
    state["drafter_version"] = parts.trainer.version
    state |= {f"ngram.{n}": t for n, t in parts.ngram.state_dict().items()}
    state["bandit"] = json.dumps(parts.engine.bandit.state_dict())
    logs = [e for e in trainer.state.log_history if "reward" in e]
    state["log"] = [(e["reward"], e["loss"], e["grad_norm"]) for e in logs]
    state["counters"] = (trainer.generation, trainer.evaluations, trainer._step)
    state["policy_version"] = parts.engine.policy_version
    return state


def compare(model_dir, folder, stop_at=STOP_AT, **extra):
    """Runs three times; asserts that the resumed half ends where the whole one does."""
    whole, drawn = train(model_dir, folder / "whole", **extra)
    cut, first = train(model_dir, folder / "cut", stop_at=stop_at, **extra)
    assert cut.state.global_step == stop_at
    checkpoint = folder / "cut" / "checkpoints" / f"checkpoint-{stop_at}"
    if "RANK" in os.environ:
        torch.distributed.barrier()  # rank 0 seals it
    assert run.is_whole(checkpoint) and (checkpoint / "minitlt" / "drafter.safetensors").exists()
    again, rest = train(model_dir, folder / "cut", resume=checkpoint, **extra)
    assert first + rest == drawn and len(set(map(str, drawn))) == len(drawn)
    want, got = state_of(whole), state_of(again)
    assert want.keys() == got.keys()
    for name, value in want.items():
        same = torch.equal(value, got[name]) if torch.is_tensor(value) else value == got[name]
        assert same, name
    assert whole.speculation.trainer.version > STEPS
    used = {arm for _, arm, _ in json.loads(want["bandit"])["seconds"]}
    assert used == {"off", "ngram-3", "eagle-2"}
    return checkpoint


@pytest.fixture(autouse=True)
def _real_clock():
    time = spec.time
    yield
    spec.time = time


def test_a_resumed_run_equals_an_uninterrupted_one(model_dir, tmp_path):
    compare(model_dir, tmp_path)


def test_resume_in_the_middle_of_a_generation(model_dir, tmp_path):
    """Two optimizer steps per generation: step 3 trains on rows that were drawn before step 2."""
    checkpoint = compare(model_dir, tmp_path, num_iterations=2)
    assert "batch0.completion_ids" in read_tensors(checkpoint / "minitlt" / "rank0.safetensors")[0]


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [1, 2, 4])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_resume_from_any_other_step(model_dir, tmp_path, stop_at, num_iterations):
    compare(model_dir, tmp_path, stop_at=stop_at, num_iterations=num_iterations)


def compare_on_a_rank(model_dir, folder):
    compare(model_dir, folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@own_worker
@pytest.mark.slow
def test_a_resumed_run_of_two_ranks_equals_an_uninterrupted_one(model_dir, tmp_path):
    two_ranks(compare_on_a_rank, model_dir, tmp_path)
