"""Other engines' files: strict names, d2t offsets, round trips per layout, refusals."""

import json

import pytest
import torch
from drafter_reference import H, W, make_drafter, random_row, whole_rows
from safetensors.torch import load_file, save_file

from minitlt.eagle3 import Eagle3Config
from minitlt.export import check_export, export_drafter, import_drafter

NAMES = {
    "fc.weight": (H, 3 * H),
    "layers.0.input_layernorm.weight": (H,),
    "layers.0.hidden_norm.weight": (H,),
    "layers.0.post_attention_layernorm.weight": (H,),
    "layers.0.self_attn.q_proj.weight": (48, 2 * H),
    "layers.0.self_attn.k_proj.weight": (16, 2 * H),
    "layers.0.self_attn.v_proj.weight": (16, 2 * H),
    "layers.0.self_attn.o_proj.weight": (H, 48),
    "layers.0.mlp.gate_proj.weight": (29, H),
    "layers.0.mlp.up_proj.weight": (29, H),
    "layers.0.mlp.down_proj.weight": (H, 29),
    "norm.weight": (H,),
}


def export(drafter, folder, layout, **kwargs):
    return export_drafter(drafter, folder, layout, target="some/model", **kwargs)


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def rewrite(folder, change_config=lambda c: None, change_tensors=lambda t: None):
    config, tensors = read(folder)
    change_config(config)
    change_tensors(tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("layout", ["sglang", "vllm", "speculators"])
@pytest.mark.parametrize("vocab", [0, 23])
def test_names_and_shapes_are_the_published_ones(tmp_path, layout, vocab):
    drafter = make_drafter(vocab, torch.float32)
    config, tensors = read(export(drafter, tmp_path, layout))
    wanted = NAMES | {"lm_head.weight": (vocab or W, H)}
    if vocab:  # an extra tensor would break vLLM's loader for a full vocabulary
        wanted |= {"d2t": (vocab,), "t2d": (W,)}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == wanted
    assert {t.dtype for n, t in tensors.items() if n not in ("d2t", "t2d")} == {torch.bfloat16}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    if vocab:
        d2t, t2d = tensors["d2t"], tensors["t2d"]
        assert d2t.dtype == torch.int64 and t2d.dtype == torch.bool
        ids = d2t + torch.arange(vocab)  # offsets, not ids
        assert torch.equal(ids, t2d.nonzero()[:, 0]) and torch.equal(ids, drafter.ids_V)
        assert (ids.diff() > 0).all() and int(ids.max()) < W
    assert config["draft_vocab_size"] == (vocab or W)
    assert config["tie_word_embeddings"] is False


def test_engine_config(tmp_path):
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    config, _ = read(
        export(make_drafter(23, torch.float32, rope_parameters=rope), tmp_path, "vllm")
    )
    assert config == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": 29,
        "num_hidden_layers": 1,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": W,
        "draft_vocab_size": 23,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def test_speculators_config(tmp_path):
    config, _ = read(export(make_drafter(23, torch.float32), tmp_path, "speculators"))
    assert "model_type" not in config  # vLLM picks its reader by that
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False  # absent means true to vLLM
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["model_type"] == "llama"
    method = config["speculators_config"]["proposal_methods"][0]
    assert method["speculative_tokens"] == 3
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/model"
    with pytest.raises(ValueError, match="target's name"):
        export_drafter(make_drafter(), tmp_path, "speculators")


@pytest.mark.parametrize("layout", ["sglang", "vllm", "specforge", "speculators", "native"])
@pytest.mark.parametrize("vocab", [0, 23])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_over_three_recurrent_steps(tmp_path, layout, vocab, dtype):
    drafter = make_drafter(vocab, torch.float32)
    export(drafter, tmp_path, layout, dtype=dtype)
    assert max(check_export(drafter, tmp_path)) < 1e-4
    loaded = import_drafter(tmp_path, drafter.config)
    if dtype == torch.float32 or layout == "native":
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.config == drafter.config


def test_a_head_that_is_the_targets_is_written_out(tmp_path):
    drafter = make_drafter(23, torch.float32, train_head=False)
    _, tensors = read(export(drafter, tmp_path, "sglang", dtype=torch.float32))
    assert torch.equal(tensors["lm_head.weight"], drafter.target_rows())
    assert max(check_export(drafter, tmp_path)) < 1e-4


def test_specforge_calls_the_layer_midlayer(tmp_path):
    config, tensors = read(export(make_drafter(23, torch.float32), tmp_path, "specforge"))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    wanted = {name.replace("layers.0", "midlayer") for name in NAMES}
    assert set(tensors) == wanted | {"lm_head.weight", "d2t", "t2d"}


@pytest.mark.parametrize("ids", [None, [1, 3, 4], [2, 4, 5]])  # outputs and inputs of 8 layers
def test_a_public_head_is_read_as_it_is(tmp_path, ids):
    """Its config.json has the keys of the first published EAGLE-3 heads: no rope, no head_dim. The
    layers' ids, where trained heads name them, are EAGLE-3's own in either counting."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    drafter = make_drafter(23, torch.float32, hidden_size=48, rope_parameters=rope)
    export(drafter, tmp_path, "specforge", dtype=torch.float32)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02,
        "intermediate_size": 29, "max_position_embeddings": 512, "model_type": "llama",
        "num_attention_heads": 6, "num_key_value_heads": 2, "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.28.1", "use_cache": True, "vocab_size": W,
        "draft_vocab_size": 23,
    }  # fmt: skip
    if ids:
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert import_drafter(tmp_path, drafter.config).config == drafter.config
    assert max(check_export(drafter, tmp_path)) < 1e-4


def test_other_spellings_are_accepted(tmp_path):
    drafter = make_drafter(23, torch.float32)
    export(drafter, tmp_path, "sglang", dtype=torch.float32)

    def midlayer(tensors):  # as SpecForge and the first EAGLE-3 heads call it
        for name in list(tensors):
            tensors[name.replace("layers.0", "midlayer")] = tensors.pop(name)
        assert "midlayer.hidden_norm.weight" in tensors

    rewrite(tmp_path, change_tensors=midlayer)
    check_export(drafter, tmp_path)

    def prefix(tensors):
        for name in list(tensors):
            if name not in ("d2t", "t2d", "lm_head.weight"):
                tensors["model." + name] = tensors.pop(name)
        tensors["embed_tokens.weight"] = torch.zeros(W, H)

    def old_rope(config):
        del config["rope_parameters"]
        config["rope_scaling"] = None

    rewrite(tmp_path, old_rope, prefix)
    check_export(drafter, tmp_path)


def test_custom_taps_mean_outputs_to_sglang_and_inputs_to_vllm(tmp_path):
    """Layer i's output is hidden_states[i + 1]: the same tensors, two numbers."""
    from dataclasses import replace

    drafter = make_drafter(23, torch.float32)
    drafter.config = replace(drafter.config, tap_layers=(1, 3, 6))
    for layout, ids in (("sglang", [0, 2, 5]), ("vllm", [1, 3, 6])):
        config, _ = read(export(drafter, tmp_path / layout, layout))
        assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == ids
        assert max(check_export(drafter, tmp_path / layout, layout=layout)) < 1e-4
        with pytest.raises(ValueError, match="which layout"):
            import_drafter(tmp_path / layout, drafter.config)
        with pytest.raises(ValueError, match="tap_layers"):
            import_drafter(tmp_path / layout, make_drafter(23).config, layout=layout)
    check_export(drafter, export(drafter, tmp_path / "spec", "speculators"))


@pytest.mark.parametrize(
    ("change_config", "change_tensors", "message"),
    [
        (lambda c: c.update(norm_before_residual=True), lambda t: None, "norm_before_residual"),
        (lambda c: c.update(norm_output=True), lambda t: None, "norm_output"),
        (lambda c: c.update(num_hidden_layers=2), lambda t: None, "one layer"),
        (lambda c: c.update(hidden_act="gelu"), lambda t: None, "gelu"),
        (lambda c: c.update(vocab_size=W + 1), lambda t: None, "vocab_size"),
        (lambda c: c.update(target_hidden_size=H + 1), lambda t: None, "hidden size"),
        (lambda c: c.update(intermediate_size=30), lambda t: None, "do not fit"),
        (lambda c: None, lambda t: t.pop("fc.weight"), r"missing \['fc.weight'\]"),
        (lambda c: None, lambda t: t.update(q_norm=torch.ones(8)), r"unknown \['q_norm'\]"),
        (lambda c: None, lambda t: t["d2t"].add_(1), "d2t"),
        (lambda c: None, lambda t: t.update(d2t=t["d2t"] + torch.arange(23)), "d2t"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, change_config, change_tensors, message):
    drafter = make_drafter(23, torch.float32)
    export(drafter, tmp_path, "sglang")
    rewrite(tmp_path, change_config, change_tensors)
    with pytest.raises(ValueError, match=message):
        import_drafter(tmp_path, drafter.config)


def test_check_export_sees_a_wrong_weight(tmp_path):
    drafter = make_drafter(23, torch.float32)
    export(drafter, tmp_path, "sglang")
    rewrite(tmp_path, change_tensors=lambda t: t["layers.0.self_attn.v_proj.weight"].mul_(1.1))
    with pytest.raises(ValueError, match="differs"):
        check_export(drafter, tmp_path)


def test_missing_files_and_layouts(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        import_drafter(tmp_path, make_drafter().config)
    with pytest.raises(ValueError, match="choose sglang"):
        export_drafter(make_drafter(), tmp_path, "trtllm")


def test_facts_of_an_exported_drafter_come_from_its_own_config(tmp_path):
    """max_position_embeddings and rope are the drafter's; only the fit is checked."""
    rope = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    drafter = make_drafter(23, torch.float32, rope_parameters=rope)
    export(drafter, tmp_path, "vllm")
    loaded = import_drafter(tmp_path, make_drafter(23).config)
    assert loaded.config.rope == rope
    assert isinstance(loaded.config, Eagle3Config)


@pytest.mark.parametrize("vocab", [0, 23])
def test_the_speculators_package_agrees_over_three_steps(tmp_path, vocab):
    """Load our export with the package's own classes and compare unrolled logits."""
    pytest.importorskip("speculators")
    from models import tiny_model
    from speculators import SpeculatorModel, SpeculatorModelConfig

    target = tiny_model(
        hidden_size=24, intermediate_size=29, num_attention_heads=6, head_dim=4, vocab_size=W
    )
    target.save_pretrained(tmp_path / "target")
    rope = target.config.rope_parameters
    drafter = make_drafter(vocab, torch.float32, hidden_size=24, head_dim=4, rope_parameters=rope)
    drafter.tie(target.model.embed_tokens.weight, target.lm_head.weight)
    export_drafter(
        drafter, tmp_path / "head", "speculators", target=str(tmp_path / "target"),
        dtype=torch.float32,
    )  # fmt: skip
    their_config = SpeculatorModelConfig.from_pretrained(tmp_path / "head")
    their_config.transformer_layer_config._attn_implementation = "eager"
    theirs = SpeculatorModel.from_pretrained(tmp_path / "head", config=their_config).float()
    # The package fills in the target's table only where it sees NaN, which not every version of
    # transformers leaves in tensors that the file lacks.
    theirs.embed_tokens.weight.data.copy_(target.model.embed_tokens.weight)
    logits = []
    theirs.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    tokens, _ = random_row(14, 3)
    taps = torch.randn(14, 3 * 24, generator=torch.Generator().manual_seed(1))
    pack = whole_rows([(tokens, taps)], 3)
    with torch.no_grad():
        theirs(
            pack.features_NF[None], pack.tokens_N[None], torch.zeros(1, 13, dtype=torch.int64),
            ttt_steps=3,
        )  # fmt: skip
    drafter.reserve_positions(16)
    ours = [drafter.logits(state) for state in drafter.unroll(pack, 3)]
    for step in range(3):
        torch.testing.assert_close(logits[step], ours[step], rtol=1e-5, atol=1e-5)
