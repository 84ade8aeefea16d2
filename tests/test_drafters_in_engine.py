"""Real drafters in the real engine: the same tokens as without them, and rows for training."""

import functools

import pytest
import torch
from models import random_prompts, tiny_model

from minitlt.distill import DrafterTrainer, ReplayBuffer
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter, start_from_target
from minitlt.export import check_export, export_drafter
from minitlt.kernels import row_key
from minitlt.ngram import MergedDrafter, NgramDrafter
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

PROMPTS = [p for p in random_prompts([1, 5, 9, 30, 2]) for _ in range(2)]
KEYS = [row_key(0, 0, i) for i in range(len(PROMPTS))]
CONFIG = DrafterConfig(draft_vocab_size=60, pack_tokens=64)


class House:
    """A tiny target with every kind of drafter, and fewer slots than rows."""

    def __init__(
        self, arms, on_step=None, *, slots=3, device="cpu", dtype=torch.float32, kind="llama",
        config=CONFIG,
    ):  # fmt: skip
        model = tiny_model(kind)
        self.target = make_target(model, device=device, dtype=dtype)
        size = Eagle3Config.from_target(model.config, config)
        self.drafter = Eagle3Drafter(size, device=self.target.device)
        self.drafter.tie(self.target.embed_weight, self.target.head_weight)
        start_from_target(self.drafter, dict(model.named_parameters()))
        self.buffer = ReplayBuffer(config, vocab_size=model.config.vocab_size)
        self.eagle = Eagle3Proposer(self.drafter, config, buffer=self.buffer)
        ngram = NgramDrafter(config)
        self.engine = RolloutEngine(
            self.target,
            [self.eagle, ngram, MergedDrafter(self.eagle, ngram)],
            Bandit([Arm.parse(arm) for arm in arms]),
            max_rows=slots,
            on_step=on_step and (lambda engine: on_step(self)),
        )

    def tokens(self):
        params = SamplingParams(max_new_tokens=24, stop_ids=(2,))
        return self.engine.generate(PROMPTS, params, KEYS).completion_ids


@pytest.fixture(scope="module")
def plain():
    return House(["off"]).tokens()


@pytest.mark.parametrize(
    "arms",
    [["eagle-3"], ["eagle-3x4"], ["eagle-4x3b5"], ["merged-4x2b5"], ["ngram-4"], ["ngram-4x3"],
     ["merged-3x3"], ["eagle-2", "off", "eagle-3x2", "ngram-3", "merged-2x2"]],
    ids=" ".join,
)  # fmt: skip
def test_same_tokens_with_any_drafter(plain, arms):
    """And some drafts are right: copied ones the second time, when the index knows every text."""
    house = House(arms)
    for again in (False, True):
        assert house.tokens() == plain
        if len(arms) == 1 and (again or "ngram" not in arms[0]):  # of several the clock chooses
            assert sum(house.engine.stats.accepted) > 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_tokens_either_way_of_decoding(way, dtype):
    """In chains; in trees and with narrow weights too where native code decodes."""
    exact = way == "native"
    if dtype == torch.bfloat16 and not exact:
        pytest.skip("oneDNN's narrow products promise the law, not the token")
    arms = [["eagle-3"], ["ngram-4"], *([["eagle-4x3b5"], ["merged-3x3"]] if exact else [])]
    want = House(["off"], dtype=dtype).tokens()
    for arm in arms:
        house = House(arm, dtype=dtype)
        assert house.target.native == exact
        assert house.tokens() == want == house.tokens(), arm
        assert sum(house.engine.stats.accepted) > 8


@functools.cache
def at_temperature(arm, temperature):
    params = SamplingParams(max_new_tokens=16, stop_ids=(2,), temperature=temperature)
    return House([arm], slots=6).engine.generate(PROMPTS, params, KEYS)


@pytest.mark.parametrize("source", ["ngram", "eagle"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_same_tokens_and_logprobs_at_every_depth_and_temperature(temperature, depth, source):
    want, got = at_temperature("off", temperature), at_temperature(f"{source}-{depth}", temperature)
    assert got.completion_ids == want.completion_ids
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=0)


def test_same_tokens_when_the_weights_are_swapped_in_mid_rollout(plain):
    random = torch.Generator().manual_seed(0)

    def disturb(house):
        with torch.no_grad():
            for parameter in house.drafter.parameters():
                noise = torch.randn(parameter.shape, generator=random)
                parameter.add_(0.05 * noise)
        house.eagle.reload()

    assert House(["eagle-3x2"], disturb).tokens() == plain


def coverage(trainer):
    """The part of the expected response tokens that the drafter can propose at all."""
    counts = trainer.buffer.counts()
    return int(counts[trainer.drafter.ids_V].sum()) / int(counts.sum())


def test_rollouts_are_training_data(plain):
    idle = House(["off"])
    idle.tokens()
    assert not idle.buffer.rows and not idle.eagle._buffers  # without drafts nobody is fed
    house = House(["ngram-1"])
    house.tokens()
    rows = {tuple(r.tokens_L.tolist()) for r in house.buffer.rows}
    done = [(*p, *c) for p, c in zip(PROMPTS, plain, strict=True) if len(c) >= 2]
    assert rows == set(done)
    with torch.no_grad():  # the kept hidden states are the target's own: they give its logits
        row = house.buffer.rows[0]
        logits, _ = house.target.forward(row.tokens_L[None, :-1], torch.tensor([0]))
        ours = row.hidden_NH.float() @ house.target.head_weight.T
        torch.testing.assert_close(ours, logits[0], rtol=0.02, atol=0.1)  # kept in bfloat16
    trainer = DrafterTrainer(house.drafter, house.buffer, CONFIG)
    before = coverage(trainer)
    assert trainer.refresh_vocab() and coverage(trainer) > before
    losses = [trainer.train_step()["loss"] for _ in range(30)]
    assert sum(losses[-5:]) < sum(losses[:5])


# Seeds of prompts in whose greedy completions no two best logits are within 0.05 of each other:
# there a last bit of the training would decide which of them is drafted.
CLEAR = {"llama": 396, "llama_tied": 131, "qwen2": 149, "qwen3": 173}
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("llama", "qwen2")]


@pytest.mark.parametrize("kind", ["llama_tied", "qwen3", *SLOW])
def test_a_drafter_learns_a_fixed_target_by_heart(kind, tmp_path):
    """Taught one greedy completion, it drafts it again in the engine: more than 95 % of its first
    and second drafts are accepted. Its export is the same drafter."""
    config = DrafterConfig(
        draft_vocab_size=90,
        pack_tokens=512,  # the whole row in every step
        loss="kl",
        ttt_steps=2,
        learning_rate=1e-2,
        head_learning_rate=1e-2,
        clip=1.0,
        average=0.9,
        serve_dtype="float32",
    )
    house = House(["eagle-2"], kind=kind, config=config)
    params = SamplingParams(max_new_tokens=60, temperature=0.0)
    prompts = random_prompts([9], seed=CLEAR[kind])
    untrained = house.engine.generate(prompts, params, KEYS[:1])
    row = torch.tensor([prompts[0] + untrained.completion_ids[0]])
    best = house.target.forward(row, torch.tensor([0]))[0][0, 8:-1].topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 0.05
    house.buffer.rows[0].prompt_len = 1  # the prompt is learnt too, as the first draft follows it
    trainer = DrafterTrainer(house.drafter, house.buffer, config)
    trainer.refresh_vocab()
    for step in range(300):
        trainer.rate_scale = 1 - step / 300
        trainer.train_step()
    house.eagle.reload()
    trained = house.engine.generate(prompts, params, KEYS[:1])
    assert trained.completion_ids == untrained.completion_ids
    assert max(untrained.stats.accept_by_position) < 0.5
    assert len(trained.stats.accept_by_position) == 2
    assert min(trained.stats.accept_by_position) > 0.95, trained.stats.accept_by_position
    for layout in ("sglang", "vllm", "native"):
        folder = export_drafter(house.drafter, tmp_path / layout, layout)
        assert max(check_export(house.drafter, folder)) < 1e-3
