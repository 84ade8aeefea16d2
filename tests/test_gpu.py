"""Rollouts, a drafter's training, a resume and GRPO on a GPU: `pytest -m gpu`."""

import pytest
import torch
from grpo import make_trainer
from test_drafters_in_engine import CONFIG, KEYS, PROMPTS, House
from test_drafters_in_engine import plain as plain  # a fixture: the tokens of plain decoding
from tiny import save_tiny_model

from minitlt.distill import DrafterTrainer
from minitlt.spec import Arm, Bandit, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ARMS = ["off", "ngram-3", "eagle-3", "eagle-3x2", "merged-3x2"]
OPTIONS = {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
           "min_new_tokens": 3, "suppress_ids": (5,), "stop_ids": (2, 4)}  # fmt: skip


def test_rollouts_training_and_resume(plain):
    """In fp32 the tokens are those of plain decoding on a CPU: no two of them nearly tie here."""
    house = House(ARMS, device="cuda")
    assert house.tokens() == plain
    assert house.target.num_graphs > 5
    trainer = DrafterTrainer(house.drafter, house.buffer, CONFIG)
    assert [trainer.train_step()["tokens"] > 0 for _ in range(3)] == [True] * 3
    assert torch.cuda.current_stream().query()  # a step's seconds hold all of its work
    house.eagle.reload()
    assert house.tokens() == plain
    resumed = House(ARMS, device="cuda")
    other = DrafterTrainer(resumed.drafter, resumed.buffer, CONFIG)
    other.load(trainer.tensors(), trainer.version)
    state = trainer.state_dict()
    other.load_state_dict(state)  # its rows are on the CPU from here on
    resumed.eagle.reload()
    assert resumed.tokens() == plain  # and new ones on the GPU beside them
    assert len(other.state_dict()["buffer.tokens"]) > len(state["buffer.tokens"])
    assert other.train_step()["tokens"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_every_sampling_option(verify, dtype):
    """Support in any dtype and mode; in fp32, coupled, the tokens of plain decoding."""
    house = House(ARMS, device="cuda", dtype=dtype)
    house.engine.verify = verify
    assert dtype == torch.float32 or house.eagle.model.fc.dtype == torch.bfloat16
    for options in (OPTIONS, {"temperature": 0.0}):
        params = SamplingParams(max_new_tokens=16, **options)
        done = house.engine.generate(PROMPTS, params, KEYS)
        for tokens, reason in zip(done.completion_ids, done.finish_reasons, strict=True):
            assert max(1, params.min_new_tokens) <= len(tokens) <= 16
            assert not set(tokens) & set(params.suppress_ids)
            ends = [n for n, token in enumerate(tokens, 1) if token in params.stop_ids]
            assert ends == ([len(tokens)] if reason == "stop" else [])
        if verify == "coupled" and dtype == torch.float32:
            plain = House(["off"], device="cuda").engine.generate(PROMPTS, params, KEYS)
            assert done.completion_ids == plain.completion_ids
    if verify == "coupled":
        house.engine.bandit = Bandit([Arm.parse("eagle-3x2")])
        again = house.engine.generate(PROMPTS, params, KEYS, replay=done.completion_ids)
        assert again.completion_ids == done.completion_ids


@pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans
def test_two_steps_of_grpo(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    trainer = make_trainer(model, tmp_path, arms=ARMS, steps=2, use_cpu=False, bf16=True)
    assert trainer.speculation.engine.target.device.type == "cuda" and trainer.use_vllm
    before = trainer.model.model.norm.weight.detach().clone()
    trainer.train()
    assert not torch.equal(trainer.model.model.norm.weight, before)
    assert trainer.speculation.trainer.version > 0
    trainer.speculation.spot.close()
