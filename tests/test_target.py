"""The target's logits, taps and cache against the transformers module they stand for."""

import logging

import pytest
import torch
from models import KINDS, OTHERS, SIZES, random_prompts, tiny_model
from transformers import NanoChatConfig, NanoChatForCausalLM

from minitlt import native, slots
from minitlt.draft import default_taps
from minitlt.linear import Linear, Residual, decoding_dtype, fewest_rows, norm_factor, put
from minitlt.slots import SlotCache, TargetShape
from minitlt.target import (
    LlamaTarget,
    ModuleTarget,
    full_state,
    make_target,
    refuse_unsupported,
)

BOTH_WAYS = pytest.mark.usefixtures("way")
EVERY_PATH = pytest.mark.parametrize(
    ("kind", "backend"), [("llama", "fused"), ("llama", "module"), *((k, "module") for k in OTHERS)]
)


def feed(target, prompts, first_slot=0):
    """Prefills ragged prompts row by row; returns their logits and taps."""
    out = []
    for row, prompt in enumerate(prompts):
        tokens = torch.tensor([prompt])
        out.append(target.forward(tokens, torch.tensor([0]), first_slot=first_slot + row))
    return out


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "backend"), [*((k, "fused") for k in KINDS), *((k, "module") for k in KINDS | OTHERS)]
)
def test_logits_and_taps_equal_the_module(kind, backend, dtype):
    model = tiny_model(kind, dtype=dtype)
    target = make_target(model, dtype=dtype, backend=backend)
    target.reserve(3, 64)
    for prompt in random_prompts([1, 2, 17]):
        logits, taps = target.forward(torch.tensor([prompt]), torch.tensor([0]), first_slot=1)
        with torch.no_grad():
            want = model(torch.tensor([prompt]), output_hidden_states=True)
        tolerance = 1e-4  # in fp64 too, since transformers' norms are fp32
        torch.testing.assert_close(logits, want.logits, atol=tolerance, rtol=0)
        features = torch.cat([want.hidden_states[i] for i in (2, 4, 5)], -1)
        torch.testing.assert_close(taps.features_BNF, features, atol=tolerance, rtol=1e-5)
        torch.testing.assert_close(
            model.get_output_embeddings()(taps.hidden_BNH), want.logits, atol=tolerance, rtol=1e-5
        )


@EVERY_PATH
def test_ragged_steps_equal_a_fresh_prefill(kind, backend):
    """Rows of different lengths, fed in uneven pieces, see exactly their own context."""
    model = tiny_model(kind, dtype=torch.float64)
    target = make_target(model, dtype=torch.float64, backend=backend)
    target.reserve(4, 64)
    rows = random_prompts([9, 14, 6, 11])
    lengths = torch.tensor([3, 8, 1, 5])
    feed(target, [row[:n] for row, n in zip(rows, lengths, strict=True)])
    block = torch.tensor([row[n : n + 4] for row, n in zip(rows, lengths, strict=True)])
    logits, _ = target.forward(block, lengths)
    for row, n, got in zip(rows, lengths, logits, strict=True):
        want = model(torch.tensor([row[: n + 4]])).logits[0, n:]
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@EVERY_PATH
def test_a_tree_node_sees_its_ancestors_and_nothing_else(kind, backend):
    model = tiny_model(kind, dtype=torch.float64)
    target = make_target(model, dtype=torch.float64, backend=backend)
    target.reserve(2, 64)
    prompts = random_prompts([7, 4])
    feed(target, prompts)
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, -1, -1, -1]])
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4], [-1, 0, 0, -1, -1, -1]])
    lengths = torch.tensor([7, 4])
    logits, _ = target.forward(tokens, lengths, parents)
    for b, n in [(0, 0), (0, 3), (0, 4), (0, 5), (1, 1), (1, 2)]:
        path, at = [], n
        while at >= 0:
            path.insert(0, int(tokens[b, at]))
            at = int(parents[b, at])
        want = model(torch.tensor([prompts[b] + path])).logits[0, -1]
        torch.testing.assert_close(logits[b, n], want, atol=1e-5, rtol=0)
    # Accept root -> 2 -> 4 -> 5 in row 0 and root -> 2 in row 1, then go on behind them.
    target.compact(lengths, torch.tensor([[0, 2, 4, 5], [0, 2, -1, -1]]))
    after, _ = target.forward(torch.tensor([[20], [21]]), torch.tensor([11, 6]))
    for b, path in [(0, [5, 7, 9, 10, 20]), (1, [11, 13, 21])]:
        want = model(torch.tensor([prompts[b] + path])).logits[0, -1]
        torch.testing.assert_close(after[b, 0], want, atol=1e-5, rtol=0)


def large_target(dtype=torch.float32):
    """Two layers of SmolLM2's sizes, where unpacked products do differ."""
    model = tiny_model(
        vocab_size=1024,
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_hidden_layers=2,
        max_position_embeddings=1024,
    )
    target = make_target(model, dtype=dtype, backend="fused")
    if not target.head.packs:
        pytest.skip("this processor cannot pack weights of this dtype")
    narrow = target.head.packed and dtype == torch.bfloat16
    if narrow and not all(map(keeps_bits, products_of(target))):
        pytest.skip("this processor's bf16 products do not, and nothing is promised of them")
    return target


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shortest", [130, 300])
def test_a_rows_bits_do_not_depend_on_its_company(dtype, shortest):
    """The reason why speculation changes nothing: same bits alone, in a batch, and in a chain.

    Company may be longer, so that more is read; 11 and 22 nodes leave one and two query rows
    for the last block of the attention.
    """
    target = large_target(dtype)
    target.reserve(33, 700)
    lengths = shortest + 9 * torch.arange(33)
    random = torch.Generator().manual_seed(1)
    for layer in target.cache.layers:  # as if rows had been read
        layer.normal_(generator=random)
    chain = torch.randint(3, 1024, (33, 22), generator=random)
    alone, _ = target.forward(chain[:1, :1], lengths[:1])
    shapes = [(1, 2), (1, 3), (1, 9), (1, 11), (1, 22), (2, 1), (5, 4), (17, 1), (33, 1), (33, 9)]
    for num_rows, num_nodes in shapes:
        logits, _ = target.forward(chain[:num_rows, :num_nodes], lengths[:num_rows])
        assert torch.equal(logits[0, 0], alone[0, 0]), (num_rows, num_nodes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [24, 37, 576, 1024, 4096])
def test_norms_are_rms_norms_and_keep_bits(width, dtype):
    random = torch.Generator().manual_seed(0)
    h, size = (torch.randn(100, n, dtype=dtype, generator=random) for n in (width, 1))
    h *= size.exp() * 1e-2  # small ones too, where eps counts
    weight = torch.rand(width, dtype=dtype, generator=random) + 0.5

    def normed(h):
        return Residual(h, 1e-5).normed(weight * norm_factor(width, h.device))

    whole = normed(h)
    want = torch.nn.functional.rms_norm(h, (width,), weight, 1e-5)
    torch.testing.assert_close(whole, want, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0)
    for num in (*range(1, 40), 64):
        assert torch.equal(normed(h[-num:]), whole[-num:]), num
    elsewhere = Residual(h, 1e-5)
    elsewhere._fused = True  # as on a GPU, where weights stay what they are
    assert torch.equal(elsewhere.normed(weight), want)
    assert norm_factor(width, torch.device("cuda")) == 1.0


@pytest.mark.parametrize("sizes", [(9, 3, 64), (4, 2, 12), (14, 2, 64), (32, 8, 128), (12, 12, 64)])
def test_attention_here_keeps_bits(sizes):
    shape = TargetShape(1, 576, 97, *sizes, 1024, (1, 1, 1))
    assert slots.attention_keeps_bits(shape, torch.float32)


@BOTH_WAYS
@pytest.mark.parametrize("length", [20, 105, 130, 300])
def test_a_prompt_has_the_same_bits_in_any_pieces(length):
    target = large_target()
    target.reserve(2, 600)
    prompt = torch.tensor(random_prompts([length], vocab=1024))
    want, _ = target.forward(prompt, torch.tensor([0]))
    for cut in {1, 2, 19, length // 2, 129, length - 1} & set(range(length)):
        pieces = [prompt[:, :cut], prompt[:, cut:]]
        starts = [torch.tensor([0]), torch.tensor([cut])]
        got = [target.forward(*at, first_slot=1)[0] for at in zip(pieces, starts, strict=True)]
        assert torch.equal(torch.cat(got, 1), want), cut
        for layer in target.cache.layers:
            assert torch.equal(layer[0, :, :length], layer[1, :, :length]), cut


def packed_weights(target):
    linears = [w for layer in getattr(target, "linears", ()) for w in layer.values()]
    return [w.panels.panels_PKW if w.panels else w.weight for w in linears]


@BOTH_WAYS
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "qwen2"])
@pytest.mark.parametrize("backend", ["fused", "module"])
def test_refresh_equals_a_new_target_and_keeps_references(kind, backend):
    old, new = tiny_model(kind, seed=0), tiny_model(kind, seed=1)
    target = make_target(old, backend=backend)
    embed = target.embed_weight
    packed = packed_weights(target)
    target.refresh(reversed(list(full_state(new))))
    fresh = make_target(new, backend=backend)
    tokens = torch.tensor([[4, 5, 6]])
    for t in (target, fresh):
        t.reserve(1, 8)
    got, _ = target.forward(tokens, torch.tensor([0]))
    want, _ = fresh.forward(tokens, torch.tensor([0]))
    assert torch.equal(got, want)
    assert target.embed_weight.data_ptr() == embed.data_ptr()
    assert torch.equal(embed, new.get_input_embeddings().weight)
    if backend == "fused":  # packed weights too are written over, not made anew
        assert packed and all(a is b for a, b in zip(packed_weights(target), packed, strict=True))


@pytest.mark.parametrize("backend", ["fused", "module"])
def test_refresh_names_what_is_missing_or_foreign(backend):
    model = tiny_model()
    target = make_target(model, backend=backend)
    named = list(full_state(model))
    with pytest.raises(ValueError, match=r"lack .*4 in all"):
        target.refresh(named[:-4])
    with pytest.raises(ValueError, match="no place"):
        target.refresh([*named, ("model.layers.0.self_attn.extra.weight", torch.zeros(1))])


@BOTH_WAYS
def test_a_row_that_leaves_its_slot_is_an_error():
    target = make_target(tiny_model())
    target.reserve(1, 100)
    with pytest.raises(ValueError, match="only 128 are reserved"):
        target.forward(torch.zeros(1, 4, dtype=torch.long), torch.tensor([125]))


def test_models_that_cannot_roll_back_are_refused():
    config = tiny_model().config
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        refuse_unsupported(config)
    sliding = tiny_model("mistral").config
    sliding.sliding_window = 16
    assert not LlamaTarget.supports(sliding)
    with pytest.raises(ValueError, match="sliding window of 16"):
        refuse_unsupported(sliding)


LONG_ROPE = {
    "dynamic": {},
    "longrope": {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6,
                 "original_max_position_embeddings": 64},
}  # fmt: skip


@pytest.mark.parametrize("kind", LONG_ROPE)
def test_rope_that_turns_with_the_longest_row_is_refused(kind):
    """Why: transformers chooses frequencies by the batch's largest position; a row beside a long
    one is not what it is alone."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **LONG_ROPE[kind]}
    model = tiny_model(rope_parameters=rope, max_position_embeddings=64)
    row, long = (torch.tensor(random_prompts([n])) for n in (9, 90))
    with torch.no_grad():
        alone = model(row, position_ids=torch.arange(9)[None]).logits[0]
        both = torch.cat([row, long[:, :9]])
        far = torch.stack([torch.arange(9), torch.arange(80, 89)])
        beside = model(both, position_ids=far).logits[0]
    assert not torch.allclose(alone, beside, atol=1e-3)
    for backend in ("auto", "module"):
        with pytest.raises(ValueError, match=f"rope type '{kind}'"):
            make_target(model, backend=backend)
    config = tiny_model().config
    config.rope_parameters = {"full_attention": rope}
    with pytest.raises(ValueError, match=f"rope type '{kind}'"):
        refuse_unsupported(config)
    refuse_unsupported(tiny_model("llama3_rope").config)


def test_taps_are_eagle3s_and_clamped_for_shallow_models():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(2) == (1, 1, 1)
    assert default_taps(1) == (0, 0, 0)


def test_slot_cache_states_its_size():
    shape = TargetShape.from_config(tiny_model().config)
    cache = SlotCache(shape, torch.float32, torch.device("cpu"))
    cache.reserve(2, 100)
    assert cache.bytes_per_token == 2 * 8 * 2 * 12 * 4
    assert cache.length == 128 and cache.layers[0].shape == (2, 4, 128, 12)


def test_backends_are_chosen_by_what_is_exact(caplog, way):
    decoder = native.name() if way == "native" else "packed"
    with caplog.at_level(logging.INFO, logger="minitlt.target"):
        assert isinstance(make_target(tiny_model("qwen3")), LlamaTarget)
        assert isinstance(make_target(tiny_model(hidden_act="gelu")), ModuleTarget)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.INFO] == [
        f"target: qwen3 runs fused, in torch.float32 ({decoder})",
        "target: llama runs module, in torch.float32 (torch)",
    ]


def test_soft_capped_logits_teach_no_drafter():
    """A drafter's teacher is lm_head(hidden). (A scale is in it for Granite and Cohere: above.)"""
    config = NanoChatConfig(**SIZES, final_logit_softcapping=15.0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NanoChatForCausalLM(config).eval()
    target = make_target(model)
    target.reserve(1, 8)
    assert target.forward(torch.tensor([[4, 5]]), torch.tensor([0]))[0].isfinite().all()
    with pytest.raises(ValueError, match="soft-capped"):
        target.head_weight  # noqa: B018


def test_the_trainers_own_model_is_left_as_it_was():
    model = tiny_model()
    model.set_attn_implementation("eager")
    make_target(model, backend="module")
    assert model.config._attn_implementation == "eager"


def test_rotary_frequencies_stay_wide_in_a_bf16_module():
    target = make_target(tiny_model(), dtype=torch.bfloat16, backend="module")
    assert target.module.model.rotary_emb.inv_freq.dtype == torch.float32
    assert next(target.module.parameters()).dtype == torch.bfloat16


def test_a_long_chunk_equals_short_ones_where_a_kernel_reads_ancestor_bits(monkeypatch):
    """The path of a GPU, on a CPU: chunks longer than a tree's 64 nodes use the mask."""
    monkeypatch.setattr(native, "library", lambda: None)
    model = tiny_model()
    prompt = torch.tensor(random_prompts([100]))
    want = make_target(model)
    want.reserve(1, 128)
    logits, _ = want.forward(prompt, torch.tensor([0]))
    target = make_target(model)
    target.reserve(1, 128)
    target.masks_short = False
    got, _ = target.forward(prompt, torch.tensor([0]))
    torch.testing.assert_close(got, logits, atol=1e-4, rtol=0)
    target.forward(prompt[:, :90], torch.tensor([0]))
    tail, _ = target.forward(prompt[:, 90:], torch.tensor([90]))
    torch.testing.assert_close(tail[0], logits[0, 90:], atol=1e-4, rtol=0)


@BOTH_WAYS
def test_auto_decodes_in_the_dtype_of_training_where_that_is_fast():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert decoding_dtype("auto", torch.float32, cpu) == torch.float32
    assert decoding_dtype("auto", torch.bfloat16, gpu) == torch.bfloat16
    packs = Linear(torch.bfloat16, cpu).packs
    want = torch.bfloat16 if packs else torch.float32
    assert decoding_dtype("auto", torch.bfloat16, cpu) == want
    assert decoding_dtype("bf16", torch.float32, cpu) == torch.bfloat16


# A row's bits, further: the products one by one, and what is said where they do not hold.


def products_of(target):
    return [target.head, *target.linears[0].values()]


def keeps_bits(linear):
    x = torch.randn(300, linear.num_inputs, generator=torch.Generator().manual_seed(2))
    whole = linear(x)
    alone = torch.cat([linear(row[None]) for row in x])
    return torch.equal(alone, whole) and all(
        torch.equal(linear(x[:n]), whole[:n]) for n in (2, 3, 4, 9, 17, 33, 100)
    )


class Moody(Linear):
    """Products of fewer than `few` rows end in another bit."""

    def __init__(self, few, dtype=torch.float32):
        super().__init__(dtype, torch.device("cpu"))
        self.few = few
        self.load(torch.eye(8))

    def __call__(self, x_NH):
        return x_NH + 1e-6 * (len(x_NH) < self.few)


@pytest.mark.parametrize("few", [0, 2, 4, 5, 17])
def test_a_processor_whose_products_need_more_than_four_rows_is_named(few, caplog):
    assert fewest_rows(Moody(few)) == (4 if few else 1)
    assert [r.levelname for r in caplog.records] == ["WARNING"] * (few > 4)
    caplog.clear()
    assert fewest_rows(Moody(few, torch.bfloat16)) == (4 if few else 1) and not caplog.records


def test_weights_are_kept_in_the_order_that_c_reads():
    weight = torch.arange(6.0).view(2, 3).T
    kept = put(None, weight)
    assert kept.is_contiguous() and torch.equal(kept, weight)


def test_no_rows_need_no_company(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    linear = Linear(torch.float32, torch.device("cpu"))
    linear.load(torch.eye(8))
    linear.fewest = 4
    assert linear(torch.zeros(0, 8)).shape == (0, 8)


def test_attention_that_depends_on_company_is_noticed_and_named(monkeypatch, caplog):
    """An attention whose last bit depends on how much is read, or on how many nodes are asked."""
    monkeypatch.setattr(native, "library", lambda: None)  # it has an attention of its own
    shape, real = TargetShape.from_config(tiny_model().config), slots.attend
    for part in (0, 1):

        def moody(q, keys, values, step, size, part=part):
            return real(q, keys, values, step, size) + 1e-6 * (step.read, size[1])[part]

        monkeypatch.setattr(slots, "attend", moody)
        assert not slots.attention_keeps_bits(shape, torch.float32)
    for keeps in (True, False):
        monkeypatch.setattr("minitlt.target.attention_keeps_bits", lambda *_, keeps=keeps: keeps)
        caplog.clear()
        make_target(tiny_model())
        said = ["attention rounds" in r.getMessage() for r in caplog.records]
        assert said == [True] * (not keeps)
