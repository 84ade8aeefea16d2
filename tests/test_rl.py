"""The seam to TRL: its contract, equal logprobs, equal runs, weights that follow the policy."""

import inspect
import json
import re
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from fake_run import check_event
from grpo import SHARED_PROMPTS, make_trainer, reward_short, train_on_a_rank
from ranks import own_worker, two_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from minitlt.config import ConfigError, RolloutConfig
from minitlt.events import EventLog, read_events, table
from minitlt.kernels import row_key
from minitlt.rl import Speculation, full_parameters, make_rollout_func, sampling_params
from minitlt.spec import RolloutEngine, SamplingParams
from minitlt.spot import SpotConfig
from minitlt.target import make_target

pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans


def test_the_seam_is_where_we_expect_it():
    """What `_generate_single_turn` gets, what its caller takes, and who else reads use_vllm."""
    names = list(inspect.signature(GRPOTrainer._generate_single_turn).parameters)
    assert names[:4] == ["self", "prompt_ids", "images", "multimodal_fields"]
    generate = inspect.getsource(GRPOTrainer._generate)
    assert re.search(r"completion_ids, logprobs = self\._generate_single_turn\(", generate)
    users = {
        name
        for name, method in vars(GRPOTrainer).items()
        if inspect.isfunction(method) and "self.use_vllm" in inspect.getsource(method)
    }
    assert users == {
        "__init__",
        "_generate_single_turn",
        "_tool_call_loop",
        "_generate",
        "_generate_and_score_completions",
        "_compute_loss",
    }


def test_logprobs_equal_the_trainers_own(model_dir, tmp_path):
    trainer = make_trainer(model_dir, tmp_path, temperature=0.7)
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [5, 6, 7], [20]]
    ids, logprobs = trainer._generate_single_turn(prompts, None, {}, 4)
    for prompt, tokens, got in zip(prompts, ids, logprobs, strict=True):
        full = torch.tensor([prompt + tokens])
        with torch.no_grad():
            want, _, _ = trainer._get_per_token_logps_and_entropies(
                trainer.model, full, torch.ones_like(full), len(tokens)
            )
        torch.testing.assert_close(torch.tensor(got), want[0], atol=1e-4, rtol=0)


def test_copied_drafts_prove_themselves_again_with_every_policy(model_dir, tmp_path):
    """What a policy repeats changes with it: an n-gram arm that lost is not shut out for good."""
    trainer = make_trainer(model_dir, tmp_path, arms=("off", "ngram-2"), length=12)
    bandit = trainer.speculation.engine.bandit
    for arm, seconds in zip(bandit.arms, (0.001, 0.0012), strict=True):
        for _ in range(40):
            bandit.record(4, arm, 4, seconds)
    assert all(bandit.choose(4).name == "off" for _ in range(20))
    trainer.model.train()
    trainer._generate_single_turn([[5, 6, 7]] * 4, None, {}, 4)
    assert "ngram-2" in trainer.last_rollout.stats.arms_by_rows["4"]


def test_speculation_on_and_off_give_the_same_run(way, model_dir, tmp_path):
    """Same completions, rewards and final policy weights after 3 optimizer steps."""
    results = []
    for name, arms in (("off", ["off"]), ("on", ["ngram-3", "eagle-2", "eagle-4"])):
        trainer = make_trainer(model_dir, tmp_path / name, arms=arms)
        seen = []
        generate = trainer._generate_single_turn

        def spy(*args, generate=generate, seen=seen, **kwargs):
            out = generate(*args, **kwargs)
            seen.append(out[0])
            return out

        trainer._generate_single_turn = spy
        trainer.train()
        rewards = [e["reward"] for e in trainer.state.log_history if "reward" in e]
        results.append((seen, rewards, {n: p.clone() for n, p in full_parameters(trainer.model)}))
        if name == "on":
            used = trainer.last_rollout.stats.arms.keys() - {"off"}  # where one token is left
            assert used <= {"ngram-3", "eagle-2", "eagle-4"}
    (seen_off, rewards_off, weights_off), (seen_on, rewards_on, weights_on) = results
    assert seen_off == seen_on and len(seen_off) == 3
    assert rewards_off == rewards_on
    for name, weight in weights_off.items():
        assert torch.equal(weight, weights_on[name]), name


def test_the_run_log_has_every_step_and_only_what_the_table_knows(model_dir, tmp_path):
    """TRL logs once in 4 steps; the run log has each step with its own reward."""
    log = EventLog(tmp_path / "events.jsonl", 0)
    trainer = make_trainer(model_dir, tmp_path, steps=4, logging_steps=3, beta=0.1, log=log)
    rewards, score = [], trainer._calculate_rewards

    def keep(*args):
        scored = score(*args)
        rewards.append(scored.mean().item())
        return scored

    trainer._calculate_rewards = keep
    trainer.train()
    events = read_events(log.path)
    assert [problem for event in events for problem in check_event(event)] == []
    updates = [event for event in events if event["event"] == "update"]
    assert [event["step"] for event in updates] == [1, 2, 3, 4]
    assert [event["reward"] for event in updates] == pytest.approx(rewards, rel=1e-5)
    assert len(set(rewards)) == 4 and all(event["kl"] is not None for event in updates)
    assert [event["loss"] is None for event in updates] == [True, True, False, True]
    logged = set().union(*trainer.state.log_history) - {"step"}
    known = table("Metrics in TRL's trackers")
    assert [name for name in logged if not any(fnmatch(name, one) for one in known)] == []
    ours = {name for name in known if name.startswith(("spec/", "spot/", "rollout/", "guard/"))}
    assert ours - {"spot/drafter_loss"} <= logged  # that one only where the drafter took a step


def test_an_evaluation_has_metrics_of_its_own_and_leaves_the_run_log_alone(model_dir, tmp_path):
    """Evaluated after steps 1 and 2; the log tells of two training rollouts, by their steps."""
    log = EventLog(tmp_path / "events.jsonl", 0)
    data = Dataset.from_dict({"prompt": ["say b", "count"]})
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": data}
    trainer = make_trainer(
        model_dir, tmp_path, steps=2, per_device_eval_batch_size=8, log=log, **evaluated
    )
    trainer.train()
    assert trainer.evaluations == 2
    evals = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert [entry["step"] for entry in evals] == [1, 2]
    known = table("Metrics in TRL's trackers")
    names = set().union(*evals) - {"step"}
    assert [name for name in names if not any(fnmatch(name, one) for one in known)] == []
    assert "eval_spec/accept_length" in names and "eval_spot/swaps" not in names
    events = read_events(log.path)
    for kind in ("rollout_start", "rollout_end"):
        assert [event["step"] for event in events if event["event"] == kind] == [1, 2]
    prompts = {event["prompt"] for event in events if event["event"] == "row"}
    assert prompts and not any("say b" in prompt for prompt in prompts)


def test_the_digest_of_a_step_covers_all_its_generations(model_dir, tmp_path):
    """Two generations per step: what compare reads, the last digest, depends on the first too."""
    digests = []
    for name, other in (("a", False), ("b", False), ("c", True)):
        log = EventLog(tmp_path / f"{name}.jsonl", 0)
        many = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}
        trainer = make_trainer(model_dir, tmp_path, steps=1, log=log, length=8, **many)
        if other:  # the first generation has other noise, the second the same
            keys = trainer._row_keys
            trainer._row_keys = lambda rows, training, keys=keys, trainer=trainer: [
                key + (trainer.generation == 1) for key in keys(rows, training)
            ]
        trainer.train()
        events = read_events(log.path)
        digests.append([e["digest"] for e in events if e["event"] == "rollout_end"])
        assert [e["step"] for e in events if e["event"] == "rollout_end"] == [1, 1]
    assert digests[0] == digests[1] and len(digests[0][0]) == 16
    assert digests[2][1] != digests[0][1]


def test_trackers_get_our_metrics_too(model_dir, tmp_path):
    """What `report_to` is handed, with a drafter that trains inline: sums over ranks."""
    seen = []

    class Tracker(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    log = EventLog(tmp_path / "events.jsonl", 0)
    spot = SpotConfig(mode="inline", inline_fraction=0.5, steps_per_window=2)
    trainer = make_trainer(model_dir, tmp_path, steps=2, arms=("eagle-2",), log=log, spot=spot)
    trainer.add_callback(Tracker())
    trainer.train()
    ends = [event for event in read_events(log.path) if event["event"] == "harvest_end"]
    assert len(ends) == 2 and all(end["drafter_steps"] == 2 for end in ends)
    for logs, end in zip(seen, ends, strict=False):
        assert logs["spot/drafter_steps"] == 2 and logs["spot/swaps"] == 0
        assert logs["spot/drafter_loss"] == pytest.approx(end["loss_last"], rel=1e-4)
        assert logs["spot/idle_seconds"] == pytest.approx(end["available_s"], rel=1e-4)
        assert logs["spot/harvested_seconds"] == pytest.approx(end["harvested_s"], rel=1e-4)


def test_samples_are_of_several_groups(model_dir, tmp_path):
    """8 rows in 2 groups of 4, three samples: rows 0 and 4, then 1; each with its own reward."""
    log = EventLog(tmp_path / "events.jsonl", 0)
    rollout = RolloutConfig(arms=["off"], sample_rows=3)
    # one generation serves two steps, and is sampled once
    trainer = make_trainer(model_dir, tmp_path, steps=2, log=log, rollout=rollout, num_iterations=2)
    trainer.train()
    rows = [event for event in read_events(log.path) if event["event"] == "row"]
    assert [(row["step"], row["row"]) for row in rows] == [(1, 0), (1, 4), (1, 1)]
    assert rows[0]["prompt"] == rows[2]["prompt"] != rows[1]["prompt"]
    for row in rows:
        assert row["reward"] == pytest.approx(reward_short([row["completion"]])[0], rel=1e-4)


def test_the_engine_follows_every_optimizer_step(model_dir, tmp_path):
    trainer = make_trainer(model_dir, tmp_path, steps=2)
    target = trainer.speculation.engine.target
    tokens = torch.tensor([[5, 6, 7, 8]])

    def logits():
        target.reserve(1, 8)
        return target.forward(tokens, torch.tensor([0]))[0]

    before = logits().clone()
    trainer.train()
    trainer.refresh_weights()
    after = logits()
    assert not torch.allclose(before, after, atol=1e-3)
    with torch.no_grad():
        want = trainer.model(tokens).logits
    torch.testing.assert_close(after, want, atol=1e-4, rtol=0)
    version = trainer.speculation.engine.policy_version
    trainer.refresh_weights()
    assert trainer.speculation.engine.policy_version == version  # nothing moved, nothing copied
    with torch.no_grad():
        next(trainer.model.parameters()).add_(0.1)  # e.g. a reloaded best model
    trainer.refresh_weights()
    assert trainer.speculation.engine.policy_version == version + 1


def test_importance_sampling_ratio_is_one_where_numerics_agree(model_dir, tmp_path):
    rollout = RolloutConfig(arms=["off", "ngram-2"], importance_sampling="on")
    trainer = make_trainer(model_dir, tmp_path, steps=1, rollout=rollout)
    trainer.train()
    log = next(e for e in trainer.state.log_history if "reward" in e)
    assert abs(log["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4
    assert log["spec/accept_length"] >= 1.0


def test_the_global_generators_are_left_alone(model_dir, tmp_path):
    trainer = make_trainer(model_dir, tmp_path, arms=["off", "eagle-2"])
    before = torch.get_rng_state()
    trainer._generate_single_turn([[5, 6, 7]] * 8, None, {}, 4)
    assert torch.equal(before, torch.get_rng_state())


def test_a_long_prefill_is_a_sign_of_life(model_dir, tmp_path):
    trainer, beats = make_trainer(model_dir, tmp_path), []
    trainer.speculation.spot._ranks.beat = lambda: beats.append(trainer.speculation.spot.state)
    trainer.speculation.engine.prefill_chunk = 2
    trainer.model.train()
    trainer._generate_single_turn([list(range(5, 30))] * 4, None, {}, 4)
    assert beats.count("generating") >= 12  # chunks of the one prompt


def test_lora_is_merged_out_of_place(model_dir, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = make_trainer(model_dir, tmp_path, peft_config=config)
    base = {n: p.clone() for n, p in trainer.model.named_parameters() if "lora_" not in n}
    engine = trainer.speculation.engine
    for _ in range(50):
        engine.target.refresh(full_parameters(trainer.model))
    for name, parameter in trainer.model.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
    tokens = torch.tensor([[5, 6, 7, 8]])
    engine.target.reserve(1, 8)
    got, _ = engine.target.forward(tokens, torch.tensor([0]))
    with torch.no_grad():
        torch.testing.assert_close(got, trainer.model(tokens).logits, atol=1e-4, rtol=0)
        with trainer.model.disable_adapter():
            assert not torch.allclose(got, trainer.model(tokens).logits, atol=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 2}, "num_beams is not supported"),
        ({"top_kk": 2}, "did you mean 'top_k'"),
    ],
)
def test_generation_settings_that_the_engine_lacks_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        sampling_params({"max_new_tokens": 4, "do_sample": True, **settings})


@pytest.mark.parametrize("wish", [False, None])
def test_greedy_by_do_sample_is_temperature_zero(wish):
    """As TRL decodes it: transformers looks at do_sample before any temperature."""
    settings = {"max_new_tokens": 4, "temperature": 0.7, "do_sample": True}
    assert sampling_params(settings).temperature == 0.7
    assert sampling_params({**settings, "do_sample": wish}).temperature == 0
    assert sampling_params({"max_new_tokens": 4}).temperature == 1


@own_worker
def test_a_short_rank_harvests_its_idle_window(model_dir, tmp_path):
    """Two processes; rank 0's rows are many times longer. Rank 1 trains the drafter while rank 0
    decodes, all of it inside its window, and both end with the same drafter. Before that, the two
    draw what one rank alone draws for the same rows: keys are (seed, generation, global row)."""
    two_ranks(train_on_a_rank, model_dir, tmp_path)
    events = read_events(tmp_path / "events.jsonl")
    ends = [e for e in events if e["event"] == "harvest_end" and e["rank"] == 1]
    assert len(ends) == 5  # one for the shared prompts, four for the steps
    assert sum(e["drafter_steps"] for e in ends[1:]) > 0
    for end in ends:
        assert end["harvested_s"] <= end["available_s"] + 1e-6
        assert end["available_s"] > 0
    stragglers = [e for e in events if e["event"] == "harvest_end" and e["rank"] == 0]
    assert sum(e["available_s"] for e in stragglers) < sum(e["available_s"] for e in ends)
    rollouts = [e for e in events if e["event"] == "rollout_end"]
    assert min(min(e["lengths"]) for e in rollouts if e["rank"] == 0 and e["step"] > 1) >= 120
    merges = [e for e in events if e["event"] == "merge"]
    prints = [[e["fingerprint"] for e in merges if e["rank"] == rank] for rank in (0, 1)]
    assert len(prints[0]) == 5 and prints[0] == prints[1]
    halves = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    alone = make_trainer(model_dir, tmp_path / "alone", length=12)
    alone.model.train()
    assert alone._generate_single_turn(SHARED_PROMPTS, None, {}, 4)[0] == halves[0] + halves[1]
    left, right = (
        load_file(next((tmp_path / f"drafter{rank}").glob("*.safetensors"))) for rank in (0, 1)
    )
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name
        assert tensor.any(), f"{name} came from rank 1, which had no weights"


def test_every_hot_swap_says_what_it_changed():
    """40 tokens in 20 row-steps, swap, 30 in 10, swap, 8 in 2."""
    stats = SimpleNamespace(step_tokens=78, row_steps=32)
    parts = Speculation(SimpleNamespace(stats=stats), None, None, None, None)
    parts.swaps = [(7, 40, 20), (9, 70, 30)]
    first, second = parts.swap_results()
    assert (first["version"], first["accept_before"], first["accept_after"]) == (7, 2.0, 3.0)
    assert (second["version"], second["accept_before"], second["accept_after"]) == (9, 3.0, 4.0)
    assert (second["row_steps_before"], second["row_steps_after"]) == (10, 2)
    assert parts.swap_results() == []


def test_a_stock_trainer_takes_an_engine_as_its_rollout_func(model_dir, tmp_path):
    """TRL's own trainer: its completions are the engine's, whose weights follow the policy."""
    target = make_target(AutoModelForCausalLM.from_pretrained(model_dir))
    params, seen = SamplingParams(max_new_tokens=8, stop_ids=(2,)), []

    def before(trainer):
        weights = {name: tensor.clone() for name, tensor in full_parameters(trainer.model)}
        target.refresh(weights.items())
        seen.append(weights)

    rollout_func = make_rollout_func(RolloutEngine(target), params, seed=5, before=before)

    def watched(prompts, trainer):
        seen.append(rollout_func(prompts, trainer))
        return seen[-1]

    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, max_steps=2, num_generations=4,
        per_device_train_batch_size=4, max_completion_length=8, learning_rate=1e-2,
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    GRPOTrainer(str(model_dir), [reward_short], args=args, rollout_func=watched,
                train_dataset=Dataset.from_dict({"prompt": ["count"] * 8})).train()  # fmt: skip
    for call, (weights, out) in enumerate(zip(seen[::2], seen[1::2], strict=True)):
        target.refresh(weights.items())
        keys = [row_key(5, call, i) for i in range(4)]
        again = RolloutEngine(target).generate(out["prompt_ids"], params, keys)
        assert again.completion_ids == out["completion_ids"]
        assert again.logprobs == out["logprobs"]
    assert any(not seen[0][name].equal(tensor) for name, tensor in seen[2].items())
