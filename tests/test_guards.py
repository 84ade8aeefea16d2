"""Every guard is tripped once: what must not go wrong in silence is counted and said."""

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest
import torch
from grpo import make_trainer
from spot_fakes import ListLog
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM

from minitlt import run
from minitlt.config import ConfigError, RolloutConfig
from minitlt.draft import Draft, chain_parents
from minitlt.eagle3 import DrafterConfig, save_drafter
from minitlt.guards import FP32_GAP, NARROW_GAP, NARROW_MEAN, Guards, gap_limits
from minitlt.rewards import GuardedReward
from minitlt.rl import build_speculation, start_drafter
from minitlt.spot import SpotConfig
from minitlt.target import make_target

pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans


def guards_of(log):
    return {event["name"]: event for event in log.of("guard")}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=2)


@pytest.fixture
def trainer(model_dir, tmp_path):
    made = make_trainer(model_dir, tmp_path, arms=("off",), log=ListLog(), length=12)
    made.model.train()
    yield made
    made.speculation.spot.close()


def generate(trainer, prompts=4):
    return trainer._generate_single_turn([[5, 6, 7]] * prompts, None, {}, 4)


def test_a_sound_rollout_trips_nothing(trainer):
    before = torch.get_rng_state()
    generate(trainer)
    assert torch.equal(before, torch.get_rng_state())
    assert trainer.model.training
    assert trainer.guards.counts == {}
    assert trainer._metrics["train"]["guard/logprob_gap"][0] < 1e-4


def test_stale_weights_are_said_and_mended(trainer):
    """The policy moves behind the engine's back: the first check sees it and refreshes."""
    trainer.refresh_weights()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.data.mul_(1.1)  # leaves the version counter that the fingerprint reads
    generate(trainer)
    assert trainer.guards.counts == {"stale_weights": 1}
    message = guards_of(trainer.event_log)["stale_weights"]["message"]
    assert "refreshing the engine's weights mended it" in message


def test_weights_a_few_steps_old_are_said_in_bf16(model_dir, tmp_path):
    """No token is off by a nat, which bf16 allows; the mean is what shows them."""
    rollout = RolloutConfig(arms=["off"], check_every=1, dtype="bf16")
    trainer = make_trainer(model_dir, tmp_path, rollout=rollout, length=80, bf16=True)
    trainer.model.train()
    trainer.sampling = dataclasses.replace(trainer.sampling, min_new_tokens=80)
    for _ in range(6):
        generate(trainer)
    gaps, means = (trainer._metrics["train"][f"guard/logprob_gap{end}"] for end in ("", "_mean"))
    assert max(gaps) < NARROW_GAP and 0.005 < max(means) < NARROW_MEAN / 1.5, "room on both sides"
    assert trainer.guards.counts == {}
    generator = torch.Generator().manual_seed(0)
    for parameter in trainer.model.parameters():
        moved = torch.empty_like(parameter).normal_(generator=generator)
        parameter.data.add_(moved, alpha=0.02 * parameter.data.std())  # behind the engine's back
    generate(trainer)
    assert gaps[-1] < NARROW_GAP and means[-1] > NARROW_MEAN
    assert trainer.guards.counts == {"stale_weights": 1}
    generate(trainer)
    assert trainer.guards.counts == {"stale_weights": 1}
    trainer.speculation.spot.close()


def test_every_row_is_looked_at_sooner_or_later(trainer, monkeypatch):
    engine = trainer.speculation.engine
    real = engine.generate

    def spoiled(prompts, *args):
        rollout = real(prompts, *args)
        if len(prompts) == 4:  # not the check's own
            rollout.logprobs[2][0] -= 0.1
        return rollout

    monkeypatch.setattr(engine, "generate", spoiled)
    trainer.rollout_config.check_every = 1
    for _ in range(20):
        generate(trainer)
    assert 1 <= trainer.guards.counts["stale_weights"] < 20


def test_an_engine_that_computes_something_else_is_said(trainer):
    target = trainer.speculation.engine.target
    forward = target.forward

    def wrong(*args, **kwargs):
        logits, taps = forward(*args, **kwargs)
        return (None if logits is None else logits * 1.01), taps

    target.forward = wrong
    generate(trainer)
    assert trainer.guards.counts == {"logprobs_differ": 1}
    trainer.rollout_config.check_every = 2  # generation 1 is not looked at, generation 2 is
    generate(trainer)
    assert trainer.guards.counts == {"logprobs_differ": 1}
    generate(trainer)
    assert trainer.guards.counts == {"logprobs_differ": 2}


def always(token):
    """A drafter's proposal: a chain of one token."""

    def propose(rows, depth, width, nodes):
        tokens_BT = torch.full((len(rows.roots_B), depth + 1), token)
        tokens_BT[:, 0] = rows.roots_B
        return Draft(tokens_BT, chain_parents(depth).expand_as(tokens_BT).contiguous())

    return propose


@pytest.mark.parametrize("saved", [False, True])
def test_drafts_that_are_accepted_no_more_are_said(model_dir, tmp_path, saved):
    """The policy says 50 again and again. The drafter does so too, then breaks; the bandit drops
    it at once, so it takes several rollouts until that is sure."""
    log, rollout, start = ListLog(), RolloutConfig(check_every=0), "target"
    if saved:  # then the run begins with a drafter that was a good one
        start = tmp_path / "saved"
        model = AutoModelForCausalLM.from_pretrained(model_dir)
        save_drafter(start, start_drafter(model, make_target(model), DrafterConfig()))
    trainer = make_trainer(model_dir, tmp_path, rollout=rollout, log=log, length=40, start=start)
    parts = trainer.speculation
    trainer.model.train()
    others = tuple(token for token in range(100) if token != 50)
    trainer.sampling = dataclasses.replace(trainer.sampling, suppress_ids=others)
    parts.proposer.propose = always(99)
    if not saved:
        for _ in range(20):
            generate(trainer, 8)
        assert trainer.guards.counts == {}, "it has never drafted well"
        parts.proposer.propose = always(50)
        for _ in range(20):
            generate(trainer, 8)
        assert trainer.guards.counts == {}
        parts.proposer.propose = always(99)
    generate(trainer, 8)
    assert trainer.guards.counts == {}
    for _ in range(20):
        generate(trainer, 8)
        if trainer.guards.counts:
            break
    assert trainer.guards.counts["drafts_refused"] >= 1
    message = guards_of(log)["drafts_refused"]["message"]
    assert message.startswith("of 2") and "drafts of eagle, which drafted well" in message
    parts.spot.close()


def test_some_nan_logits_are_counted_and_a_row_of_them_ends_the_run(trainer):
    target = trainer.speculation.engine.target
    logits_of, forward_of = target.logits, target.forward

    def spoil(rows):
        def spoiled(logits):
            if logits is not None:
                logits[:, :, rows] = torch.nan
            return logits

        def forward(*args, **kwargs):
            logits, taps = forward_of(*args, **kwargs)
            return spoiled(logits), taps

        target.logits = lambda hidden_BTH: spoiled(logits_of(hidden_BTH))
        target.forward = forward

    trainer.rollout_config.check_every = 0
    spoil(slice(90, 93))
    ids, _ = generate(trainer)
    expected = 3 * sum(map(len, ids))
    assert trainer.guards.counts == {"nan_logits": expected}
    assert len([e for e in trainer.event_log.lines if e["event"] == "guard"]) == 1
    spoil(slice(None))
    with pytest.raises(RuntimeError, match=r"all NaN \(row 0, token 0\): its weights"):
        generate(trainer)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.completion_ids.pop(),
        lambda r: r.completion_ids.append(r.completion_ids[0]),
        lambda r: (r.completion_ids[1].clear(), r.logprobs[1].clear()),
        lambda r: r.logprobs[2].pop(),
        lambda r: (r.completion_ids[0].pop(), r.logprobs[0].pop()),
        lambda r: r.keys.reverse(),
        lambda r: r.keys.__setitem__(1, r.keys[0]),
    ],
    ids=["lost", "doubled", "empty", "logprob", "token", "order", "twice"],
)
def test_lost_and_doubled_rows_end_the_run(trainer, monkeypatch, spoil):
    engine = trainer.speculation.engine
    real = engine.generate

    def spoiled(*args):
        rollout = real(*args)
        spoil(rollout)
        return rollout

    monkeypatch.setattr(engine, "generate", spoiled)
    with pytest.raises(RuntimeError, match="guard rows: "):
        generate(trainer)
    assert guards_of(trainer.event_log)["rows"]["count"] == 1


def test_padding_in_a_row_ends_the_run(trainer, monkeypatch):
    """The pad of a draft, -1, where a token should be."""
    engine = trainer.speculation.engine
    real = engine.generate

    def spoiled(*args):
        rollout = real(*args)
        rollout.completion_ids[1][-1] = -1
        return rollout

    monkeypatch.setattr(engine, "generate", spoiled)
    with pytest.raises(RuntimeError, match="guard padding: a row holds a padding token"):
        generate(trainer)
    assert guards_of(trainer.event_log)["padding"]["count"] == 1


def test_failures_of_rewards_are_counted():
    log, calls = ListLog(), []

    def flaky(prompts, completions, **_):
        calls.append(len(completions))
        if "bad" in completions:
            raise KeyError("bad")
        return [1.0 if c == "good" else float("inf") for c in completions]

    reward, guards = GuardedReward(flaky), Guards(log.write)
    columns = {"prompts": ["p"] * 3, "completions": ["good", "bad", "odd"]}
    assert reward(**columns) == [1.0, 0.0, 0.0]
    guards.rewards([reward, flaky])
    guards.rewards([reward, flaky])
    assert guards.counts == {"reward_failed": 2}
    assert "flaky" in guards_of(log)["reward_failed"]["message"]


def test_row_rewards_of_the_log_are_those_of_their_row(model_dir, tmp_path):
    """Two functions and a model between them; the log's rows have TRL's own weighted sum."""

    class Judge(torch.nn.Module):
        config = SimpleNamespace(_name_or_path="judge", to_dict=dict)

        def forward(self, input_ids, **_):
            return SimpleNamespace(logits=input_ids.float().mean(1, keepdim=True))

    def long(completions, **_):
        return [float(len(c)) for c in completions]

    log = ListLog()
    trainer = make_trainer(model_dir, tmp_path, log=log, steps=2)
    parts = trainer.speculation
    tokenizer = trainer._tokenizer
    trainer.reward_funcs, trainer.reward_weights = [Judge(), long], torch.tensor([1.0, 10.0])
    trainer.reward_func_names = ["judge", "long"]
    trainer.reward_processing_classes = [tokenizer, None]
    seen, score = [], trainer._calculate_rewards

    def spy(*args):
        seen.append(score(*args))
        return seen[-1]

    trainer._calculate_rewards = spy
    trainer.train()
    parts.spot.close()
    rows = [e for e in log.lines if e["event"] == "row"]
    assert len(rows) == 4 and len(seen) == 2
    for e in rows:
        want = seen[e["step"] - 1][e["row"]] @ torch.tensor([1.0, 10.0])
        assert e["reward"] == pytest.approx(want.item(), rel=1e-6)
    assert len({e["reward"] for e in rows}) > 1


def test_guards_speak_less_and_less_often():
    log = ListLog()
    guards = Guards(log.write)
    for _ in range(9):
        guards.say("x", "y")
    assert [e["count"] for e in log.lines] == [1, 2, 4, 8]
    guards.say("x", "y", times=100)
    assert log.lines[-1]["count"] == guards.counts["x"] == 109


def test_tolerance_follows_the_narrowest_dtype():
    assert gap_limits([torch.float32, torch.float64], usual=1.0) == (FP32_GAP, FP32_GAP)
    narrow = [torch.float32, torch.bfloat16]
    assert gap_limits(narrow, usual=0.01) == (NARROW_GAP, NARROW_MEAN)
    assert gap_limits(narrow, usual=0.1) == (NARROW_GAP, 0.2)


def test_fixed_steps_need_a_fixed_size(model_dir, tmp_path):
    with pytest.raises(ConfigError, match="steps_per_window needs drafter"):
        build_speculation(None, None, DrafterConfig(), SpotConfig(steps_per_window=1), device="cpu")


# Checkpoints: whole, torn, foreign.


@pytest.fixture
def checkpoint(trainer, tmp_path):
    """A run folder with one sealed checkpoint."""
    folder = tmp_path / "checkpoints" / "checkpoint-1"
    (tmp_path / "config.yaml").write_text("nproc: 1\n")
    generate(trainer)
    run.save_state(trainer, folder / "minitlt")
    trainer.speculation.spot.checkpoint(folder / "minitlt" / "drafter.safetensors").result()
    (folder / "model.bin").write_bytes(b"x" * 100)
    run.seal(folder)
    return folder


def test_a_torn_checkpoint_is_passed_over(checkpoint, tmp_path):
    torn = checkpoint.with_name("checkpoint-2")
    (torn / "minitlt").mkdir(parents=True)
    assert run.last_checkpoint(tmp_path) == checkpoint  # newer, but never sealed
    for name in ("model.bin", "minitlt/rank0.safetensors", "minitlt/drafter.safetensors"):
        size = (checkpoint / name).stat().st_size
        os.truncate(checkpoint / name, size - 1)
        assert run.last_checkpoint(tmp_path) is None
        with open(checkpoint / name, "ab") as file:
            file.write(b"x")
        assert run.last_checkpoint(tmp_path) == checkpoint
    for text in ("", "[1]", "{}", '{"files": {"gone.bin": 1}}'):
        (checkpoint / "minitlt" / "whole.json").write_text(text)
        assert not run.is_whole(checkpoint)


@pytest.mark.parametrize("name", ["rank0", "drafter"])
def test_a_spoiled_part_is_named(trainer, checkpoint, name):
    path = checkpoint / "minitlt" / f"{name}.safetensors"
    whole = path.read_bytes()
    for spoiled in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"", b"no such format"):
        path.write_bytes(spoiled)
        with pytest.raises(
            ValueError, match=rf"{name}\.safetensors is torn or foreign: .*; remove that checkpoint"
        ):
            run.load_state(trainer, path.parent)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}\.safetensors is torn or foreign: No such file"):
        run.load_state(trainer, path.parent)


def test_another_number_of_ranks_is_refused(trainer, checkpoint, monkeypatch):
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ConfigError, match="the run had 1 ranks, not 2"):
        run.load_state(trainer, checkpoint / "minitlt")


def test_old_checkpoints_go_when_the_new_one_is_whole(trainer, checkpoint, tmp_path):
    trainer.args.save_total_limit = 1
    keeper = run.StateCallback(trainer)
    assert trainer.args.save_total_limit is None
    trainer.state.global_step = 2
    trainer.args.output_dir = str(tmp_path / "checkpoints")
    keeper.on_save(trainer.args, trainer.state, trainer.control)
    keeper.on_train_end()
    assert [p.name for p in run.checkpoints(tmp_path / "checkpoints")] == ["checkpoint-2"]
    assert json.loads((tmp_path / "checkpoints/checkpoint-2/minitlt/whole.json").read_text())
