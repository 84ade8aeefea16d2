"""The engine's weights are the trainer's after every optimizer step, however they are held.

Logits of both are compared after each step: plain, tied and LoRA models, a resumed run, a best
model loaded again, two ranks under DDP and under FSDP2 (gloo, on CPUs), ZeRO-3 with a fake
deepspeed.
"""

import sys
import types
from contextlib import contextmanager

import pytest
import torch
from grpo import make_trainer
from models import tiny_model
from ranks import own_worker, two_ranks
from tiny import save_tiny_model
from transformers import AutoModelForCausalLM, TrainerCallback

from minitlt.config import ConfigError
from minitlt.launch import RunFailed
from minitlt.rl import full_parameters
from minitlt.stop import StopCallback
from minitlt.target import make_target

pytestmark = pytest.mark.filterwarnings("default")  # TRL and torch warn about their own plans
TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10]])


def logits_of(target):
    target.reserve(1, 16)
    return target.forward(TOKENS, torch.tensor([0]))[0].clone()


def own_logits(model):
    training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(TOKENS).logits
    model.train(training)
    return logits


class Watch(TrainerCallback):
    """After every optimizer step: the engine's logits equal the trainer's, and they have moved."""

    def __init__(self, trainer):
        self.trainer, self.seen = trainer, [logits_of(trainer.speculation.engine.target)]

    def on_step_end(self, *_, **__):
        self.trainer.refresh_weights()
        self.seen.append(logits_of(self.trainer.speculation.engine.target))
        want = own_logits(self.trainer.model)
        torch.testing.assert_close(self.seen[-1], want, atol=1e-4, rtol=0)
        assert not torch.allclose(self.seen[-1], self.seen[-2], atol=1e-3)


def watched(model_dir, out_dir, *, resume=None, **extra):
    """A trained trainer and the engine's logits before each step and after the last."""
    trainer = make_trainer(model_dir, out_dir, length=8, **extra)
    watch = Watch(trainer)
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=resume)
    trainer.speculation.spot.close()
    return trainer, watch.seen


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "llama_tied", "qwen2"):
        save_tiny_model(folder / kind, kind, num_hidden_layers=3)
    return folder


def lora(**extra):
    peft = pytest.importorskip("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **extra)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2"])
@pytest.mark.parametrize("adapter", ["none", "lora", "lora_and_head"])
def test_the_engine_equals_the_trainer_after_every_step(folders, tmp_path, kind, adapter):
    if adapter == "none":
        extra = {}
    elif adapter == "lora":
        extra = {"peft_config": lora()}
    elif kind == "llama":
        extra = {"peft_config": lora(modules_to_save=["lm_head"])}
    else:
        pytest.skip("one kind is enough")
    _, seen = watched(folders / kind, tmp_path, **extra)
    assert len(seen) == 4


def test_a_lora_base_is_untouched_by_fifty_refreshes_between_steps(folders, tmp_path):
    """Bytes of the base weights, while the adapter is trained and refreshed from 50 times."""
    trainer, _ = watched(folders / "llama_tied", tmp_path, steps=1, peft_config=lora())
    before = AutoModelForCausalLM.from_pretrained(folders / "llama_tied").state_dict()
    for step in range(50):
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if "lora_B" in name:
                    parameter.add_(0.01)
        trainer.refresh_weights()
        if step % 10 == 9:
            got = logits_of(trainer.speculation.engine.target)
            torch.testing.assert_close(got, own_logits(trainer.model), atol=1e-4, rtol=1e-4)
    names = 0
    for name, parameter in trainer.model.named_parameters():
        if "lora_" not in name:
            clean = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
            assert parameter.numpy(force=True).tobytes() == before[clean].numpy().tobytes(), name
            names += 1
    assert names > 20


def test_resumed_weights_reach_the_engine(folders, tmp_path):
    whole, _ = watched(folders / "llama", tmp_path / "a", save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "a" / "checkpoints" / "checkpoint-2"
    again, seen = watched(folders / "llama", tmp_path / "b", resume=str(checkpoint))
    assert len(seen) == 2  # one step was left
    assert again.state.global_step == whole.state.global_step == 3


def test_a_reloaded_best_model_reaches_the_engine(folders, tmp_path):
    """What `load_best_model_at_end` does at the end: weights go back, at the same global step."""
    trainer, seen = watched(folders / "llama", tmp_path, save_strategy="steps", save_steps=1)
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoints" / "checkpoint-1")
    trainer._load_best_model()
    trainer.refresh_weights()
    got = logits_of(trainer.speculation.engine.target)
    torch.testing.assert_close(got, own_logits(trainer.model), atol=1e-4, rtol=0)
    torch.testing.assert_close(got, seen[1], atol=1e-4, rtol=0)
    assert not torch.allclose(got, seen[3], atol=1e-3)


def with_lora(kind):
    """A tiny model under an adapter that does something, and the model."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(kind, num_hidden_layers=2), lora())
    return model, model.get_base_model()


def test_lora_that_would_be_lost_is_refused():
    peft = pytest.importorskip("peft")
    for kind, extra, message in [
        ("llama_tied", {"target_modules": ["lm_head"]}, "LoRA on a weight that is tied"),
        ("llama", {"target_modules": ["q_proj"], "use_dora": True}, "DoRA and other variants"),
        ("llama", {"target_modules": ["embed_tokens"]}, "LoRA on embeddings"),
        ("qwen2", {"target_modules": ["q_proj"], "lora_bias": True}, "its bias"),
    ]:
        model = peft.get_peft_model(tiny_model(kind), peft.LoraConfig(r=4, **extra))
        with pytest.raises(ConfigError, match=message):
            list(full_parameters(model))


@pytest.fixture
def partition(monkeypatch):
    """The contract with deepspeed: a partitioned parameter (`ds_id`) is empty outside of
    GatheredParameters([parameter]) and whole inside; every rank enters it equally often. A LoRA
    layer's A and B are gathered with its weight.

    partition(model): the whole tensors by id, and the ids in the order of their gathering."""
    whole, entered, inside = {}, [], []

    @contextmanager
    def gathered(params, modifier_rank=None, fwd_module=None, enabled=True):
        assert modifier_rank is None and not inside  # read only, and never two at a time
        assert len(params) in (1, 3)
        for parameter in params:
            inside.append(parameter)
            entered.append(parameter.ds_id)
            parameter.data = whole[parameter.ds_id]
        yield
        while inside:
            inside.pop().data = torch.empty(0)

    fake = types.ModuleType("deepspeed")
    fake.zero = types.SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", fake)

    def go(model):
        for number, parameter in enumerate(model.parameters()):
            parameter.ds_id, whole[number] = number, parameter.detach()
            parameter.data = torch.empty(0)
        return whole, entered

    return go


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "lora"])
def test_zero3_parameters_are_gathered_one_at_a_time(partition, kind):
    model = base = tiny_model(kind, num_hidden_layers=2) if kind != "lora" else None
    if kind == "lora":
        model, base = with_lora("llama")
    target = make_target(base, weights=full_parameters(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    want = own_logits(model)
    whole, entered = partition(model)
    target.refresh(full_parameters(model))
    assert sorted(entered) == list(range(len(whole)))
    torch.testing.assert_close(logits_of(target), want, atol=1e-4, rtol=1e-4)
    assert all(p.numel() == 0 for p in model.parameters())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_zero3_weights_that_diverged_are_neither_saved_nor_drawn_with(partition, tmp_path, value):
    """No rank sees them unless they are gathered: before a checkpoint, and in the refresh. All
    ranks gather to the end, so none is left waiting in a collective."""
    model = tiny_model("llama", num_hidden_layers=2)
    target = make_target(model)
    whole, entered = partition(model)
    stop, args = StopCallback(tmp_path), types.SimpleNamespace(device=torch.device("cpu"))
    state, control = types.SimpleNamespace(global_step=5), types.SimpleNamespace(should_save=False)
    ends = stop.on_step_end, stop.on_epoch_end

    def saved(end):
        entered.clear()
        try:
            end(args, state, control, model=model)
        except RunFailed as error:
            assert "after step 5 the policy's weights are not finite" in str(error)
            assert sorted(entered) == list(range(len(whole)))
            return False
        return True

    assert all(map(saved, ends)) and not entered
    control.should_save = True
    assert all(map(saved, ends)) and sorted(entered) == list(range(len(whole)))
    target.refresh(full_parameters(model))
    whole[3].flatten()[1] = value
    assert not any(map(saved, ends))
    entered.clear()
    with pytest.raises(FloatingPointError, match="it has diverged"):
        target.refresh(full_parameters(model))
    assert sorted(entered) == list(range(len(whole)))
    (tmp_path / "stop").touch()  # a wish to stop saves as well
    control.should_save = False
    assert not saved(stop.on_step_end)


def test_a_delta_that_does_not_fit_ends_the_run():
    """Of A and B that are shards, say: [0] or a part of the rows."""
    model, _ = with_lora("llama")
    factor = next(p for name, p in model.named_parameters() if "lora_B" in name)
    factor.data = factor.data[:1]
    with pytest.raises(RuntimeError, match=r"is \(48, 48\) and its LoRA delta is \(1, 48\)"):
        list(full_parameters(model))


def run_ddp(model_dir, out_dir):
    """TRL's own trainer under DDP."""
    trainer, seen = watched(model_dir, out_dir, rows=4)
    assert trainer.accelerator.num_processes == 2 and len(seen) == 4
    assert type(trainer.model_wrapped).__name__ == "DistributedDataParallel"
    torch.distributed.destroy_process_group()


def run_fsdp2(model_dir, out_dir):
    """Models sharded over two ranks by fully_shard; accelerate itself refuses FSDP on CPUs."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for kind in ("llama", "llama_tied", "lora"):
        if kind == "lora":
            torch.manual_seed(0)  # the adapter is drawn: the same on both ranks
            model, base = with_lora("llama")
        else:
            model = base = AutoModelForCausalLM.from_pretrained(model_dir.with_name(kind))
        target = make_target(base, weights=full_parameters(model))
        for layer in base.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(p.to_local().numel() < p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        last = logits_of(target)
        for step in range(3):
            rank = torch.distributed.get_rank()
            model(TOKENS + rank, labels=TOKENS + rank + step).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            target.refresh(full_parameters(model))
            got = logits_of(target)
            torch.testing.assert_close(got, own_logits(model), atol=1e-4, rtol=0)
            assert not torch.allclose(got, last, atol=1e-3)
            last = got
        both = [torch.empty_like(last) for _ in range(2)]
        torch.distributed.all_gather(both, last)
        assert torch.equal(*both)
    torch.distributed.destroy_process_group()


@own_worker
@pytest.mark.parametrize("run", [run_ddp, run_fsdp2])
def test_two_ranks_hold_the_trainers_weights(folders, tmp_path, run):
    two_ranks(run, folders / "llama", tmp_path)
