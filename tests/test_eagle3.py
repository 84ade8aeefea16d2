"""The draft model: parity, rope, weights by reference, vocabulary, options, files."""

import dataclasses

import pytest
import torch
from drafter_reference import (
    LLAMA3,
    H,
    make_drafter,
    random_row,
    reference,
    whole_rows,
)

from minitlt.draft import ancestor_bits, chain_parents, depths
from minitlt.eagle3 import (
    DrafterConfig,
    Eagle3Config,
    Eagle3Drafter,
    default_taps,
    load_drafter,
    product_dtype,
    save_drafter,
    start_from_target,
)

# The shared module.


def test_draft_module_by_hand():
    assert chain_parents(3).tolist() == [-1, 0, 1, 2]
    #        0          node 6 is a pad
    #      1   2
    #     3 4
    #     5
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, -1]])
    assert depths(parents).tolist() == [[0, 1, 1, 2, 2, 3, 0]]
    assert ancestor_bits(parents).tolist() == [
        [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b101011, 0b1000000]
    ]


def test_draft_module_at_64_nodes():
    parents = chain_parents(63)[None]
    assert depths(parents).tolist() == [list(range(64))]
    assert ((ancestor_bits(parents)[0, 63] >> torch.arange(64)) & 1).sum() == 64
    with pytest.raises(ValueError, match="64 nodes"):
        ancestor_bits(chain_parents(64)[None])


# The model.


@pytest.mark.parametrize("vocab", [0, 23])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        LLAMA3,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_unrolled_forward_equals_independent_reference(vocab, rope):
    drafter = make_drafter(vocab, rope_parameters=rope)
    rows, steps = [random_row(9, 1), random_row(4, 2)], 4
    drafter.reserve_positions(16)
    pack = whole_rows(rows, steps)
    got = [drafter.logits(state) for state in drafter.unroll(pack, steps)]
    first = 0
    for tokens, taps in rows:
        expected = reference(drafter).unroll(tokens, taps, steps)
        for s in range(steps):
            for t, logits in enumerate(expected[s]):
                torch.testing.assert_close(got[s][first + t], logits, rtol=1e-5, atol=1e-5)
        first += len(tokens) - 1
    if rope["rope_type"] == "yarn":
        assert drafter._rope_scale > 1.0  # the scale on cos and sin is applied, not lost


def test_rope_frequencies_are_the_targets():
    """The drafter rotates exactly as the target it reads from."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_hidden_layers=8, rope_parameters=LLAMA3
    )
    drafter = Eagle3Drafter(Eagle3Config.from_target(config))
    rotary = LlamaRotaryEmbedding(config)
    assert torch.equal(drafter._inv_freq, rotary.inv_freq)
    drafter.reserve_positions(40)
    cos, sin = rotary(torch.zeros(1, 1), torch.arange(40)[None])
    torch.testing.assert_close(drafter._cos_sin[0][:40], cos[0])
    torch.testing.assert_close(drafter._cos_sin[1][:40].abs(), sin[0].abs())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refuses_rope_that_depends_on_the_length(kind):
    with pytest.raises(ValueError, match=kind):
        make_drafter(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


def test_refuses_rope_by_layer_and_partial_rope():
    with pytest.raises(ValueError, match="differ by layer"):
        make_drafter(rope_parameters={"full_attention": {"rope_theta": 1e4}})
    with pytest.raises(ValueError, match="partial"):
        make_drafter(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_widths_are_checked_at_the_seams():
    drafter = make_drafter()
    with pytest.raises(AssertionError, match="3H"):
        drafter.fuse(torch.zeros(2, H, dtype=torch.float64))
    with pytest.raises(AssertionError, match="width H"):
        drafter.mix(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3 * H, dtype=torch.float64))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_packed_weights_change_nothing_but_speed(dtype, tolerance):
    drafter = make_drafter(23, torch.float32)
    pack = whole_rows([random_row(9, 1)], 3)
    if dtype == "bfloat16" and product_dtype("auto", drafter.fc) != torch.bfloat16:
        with pytest.raises(ValueError, match="no bfloat16 products"):
            drafter.serving_copy(dtype)
        return
    copy = drafter.serving_copy(dtype)
    for model in (drafter, copy):
        model.reserve_positions(16)
    assert not any(p.requires_grad for p in copy.parameters())
    with torch.no_grad():
        for own, other in zip(drafter.unroll(pack, 3), copy.unroll(pack, 3), strict=True):
            difference = (copy.logits(other) - drafter.logits(own)).abs().max()
            assert difference < tolerance * drafter.logits(own).abs().max()


def test_target_tensors_are_used_by_reference():
    """A policy update in place reaches the drafter; none of the drafter's own tensors move."""
    drafter = make_drafter(23, train_head=False)
    embed, head = drafter._target.embed, drafter._target.head
    assert not any(t is embed or t is head for t in drafter.state_dict().values())
    own = {k: v.clone() for k, v in drafter.state_dict().items()}
    copy = drafter.serving_copy()
    before = copy.target_rows().clone()
    head.mul_(2.0)
    embed.add_(1.0)
    assert torch.equal(copy.target_rows(), 2 * before)
    assert torch.equal(copy.target_rows(), head[drafter.ids_V])
    assert torch.equal(copy.embed(torch.tensor([3])), embed[3:4])
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, own[name])
    drafter.tie(embed + 1, head + 1)  # replaced tensors: one tie reaches the copies
    assert torch.equal(copy.target_rows(), head[drafter.ids_V] + 1)
    with pytest.raises(ValueError, match="lm head"):
        drafter.tie(embed, head[:, :-1])


def test_start_from_target_copies_what_the_target_knows():
    from models import tiny_model

    model = tiny_model()
    config = Eagle3Config.from_target(model.config, DrafterConfig(draft_vocab_size=31))
    drafter = Eagle3Drafter(config)
    drafter.tie(model.model.embed_tokens.weight, model.lm_head.weight)
    start_from_target(drafter, dict(model.named_parameters()))
    last = model.model.layers[-1]
    taps = torch.randn(5, 3 * config.hidden_size)
    torch.testing.assert_close(drafter.fuse(taps), taps[:, 2 * config.hidden_size :])
    x = torch.randn(5, config.hidden_size)
    normed = drafter._norm(x, "norm_post")
    gate, up = (normed @ drafter.gate_up.T).chunk(2, -1)
    ours = (torch.nn.functional.silu(gate) * up) @ drafter.down.T
    torch.testing.assert_close(ours, last.mlp(last.post_attention_layernorm(x)))
    assert torch.equal(drafter.head, model.lm_head.weight[:31])
    with pytest.raises(ValueError, match="gate_proj"):
        start_from_target(drafter, {})


def test_default_taps():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (2, 2, 1)
    assert default_taps(1) == (0, 0, 0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss", "ce"), ("tap_dtype", "int8"), ("ttt_steps", 0), ("long_share", 2.0),
     ("draft_vocab_size", -1), ("ngram_max", 1)],
)  # fmt: skip
def test_config_names_the_bad_field(field, value):
    with pytest.raises(ValueError, match=field):
        DrafterConfig(**{field: value})
    assert all(f.metadata["help"] for f in dataclasses.fields(DrafterConfig))


def test_save_and_load(tmp_path):
    drafter = make_drafter(23, torch.float32)
    path = save_drafter(tmp_path / "new" / "folder", drafter)
    assert [p.name for p in path.parent.iterdir()] == ["drafter.safetensors"]
    loaded = load_drafter(path.parent)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    with pytest.raises(ValueError, match=r"drafter\.safetensors"):
        load_drafter(tmp_path)


def test_small_files_hold_the_weights_to_half_a_step(tmp_path):
    drafter = make_drafter(23, torch.float32)
    size = save_drafter(tmp_path / "whole", drafter).stat().st_size
    path = save_drafter(tmp_path / "small", drafter, small=True)
    assert path.stat().st_size < size
    loaded = load_drafter(path.parent)
    for name, tensor in drafter.state_dict().items():
        got = loaded.state_dict()[name]
        if tensor.dim() == 2:
            step = tensor.abs().amax(1, keepdim=True) / 127
            assert ((got - tensor).abs() <= 0.501 * step).all()
        else:
            assert torch.equal(got, tensor)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = save_drafter(tmp_path, make_drafter(23, torch.float32))
    before = path.read_bytes()

    def broken(beside, tensors, header):
        beside.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("minitlt.eagle3.write_tensors", broken)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(tmp_path, make_drafter(23, torch.float32, seed=1))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
