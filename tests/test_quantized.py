"""The policy in 8 bits as a drafter: nearly always right, and no token changes when it is not."""

import functools
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import KINDS, random_prompts, tiny_model

from minitlt import native
from minitlt.draft import RowState
from minitlt.kernels import gumbel_topk, row_key
from minitlt.quantized import QuantizedDrafter, with_int8
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import full_state, make_target

needs_c = pytest.mark.skipif(native.library() is None, reason=native.status())
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@functools.cache
def target(kind="llama", dtype=torch.float32):
    return make_target(tiny_model(kind), dtype=dtype)


def keys(num, seed=0):
    return [row_key(seed, 0, i) for i in range(num)]


def engine(which, *arms, **options):
    bandit = Bandit([Arm.parse(arm) for arm in arms], epsilon=0.5)
    return RolloutEngine(which, [QuantizedDrafter(which)], bandit, **options)


def weights(product):
    """What a product multiplies by: its outputs for unit vectors, [O, K]."""
    return product(torch.eye(product.matrix.inputs)).T


# The weights.


@needs_c
@DTYPES
@pytest.mark.parametrize("sizes", [(1, 1), (31, 5), (33, 64), (97, 65), (160, 200)])
def test_a_weight_is_rounded_to_a_whole_part_of_its_groups_largest(sizes, dtype):
    weight = torch.randn(*sizes, generator=torch.Generator().manual_seed(0)) * 3
    weight[0] = 0
    wide, narrow = native.Panels(dtype), native.Panels(torch.int8)
    wide.load(weight)
    narrow.load_int8(wide)
    for exact, rounded in zip(
        weights(wide).split(64, 1), weights(narrow).split(64, 1), strict=True
    ):
        scale_O1 = exact.abs().amax(1, keepdim=True) / 127
        assert ((rounded - exact).abs() <= 0.5001 * scale_O1).all()
        wholes = rounded / scale_O1.clamp(min=1e-30)
        torch.testing.assert_close(wholes, wholes.round(), atol=1e-3, rtol=0)
        assert (rounded[0] == 0).all()


@needs_c
def test_a_bias_is_added_once_and_not_rounded():
    weight, bias_O = torch.randn(33, 7), torch.randn(33)
    wide, narrow = native.Panels(torch.float32), native.Panels(torch.int8)
    wide.load(weight, bias_O)
    narrow.load_int8(wide)
    assert torch.equal(narrow(torch.zeros(3, 7)), bias_O.expand(3, -1))


@needs_c
def test_a_rows_product_has_the_same_bits_in_any_company():
    wide, narrow = native.Panels(torch.float32), native.Panels(torch.int8)
    wide.load(torch.randn(97, 37), torch.randn(97))
    narrow.load_int8(wide)
    x = torch.randn(30, 37)
    alone = torch.cat([narrow(row[None]) for row in x])
    assert all(torch.equal(narrow(x[:n]), alone[:n]) for n in range(1, 31))


# The drafts.


@needs_c
@DTYPES
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_changes_no_token_of_any_kind_of_model_and_is_nearly_always_right(kind, dtype):
    which, prompts = target(kind, dtype), random_prompts([1, 9, 30, 2, 9])
    params = SamplingParams(max_new_tokens=24, stop_ids=(2,))
    want = RolloutEngine(which).generate(prompts, params, keys(5))
    spec = engine(which, "int8-4", max_rows=3)
    for _ in range(2):
        got = spec.generate(prompts, params, keys(5))
        assert got.completion_ids == want.completion_ids
        assert got.logprobs == want.logprobs
    assert got.stats.accepted[0] > 0.8 * got.stats.drafted[0] > 15


@needs_c
def test_its_drafts_are_what_plain_decoding_with_its_weights_draws():
    """So it reads the target's cache, writes behind it, and the noise is the target's."""
    which = make_target(tiny_model())
    drafter = QuantizedDrafter(which)
    (prompt,) = random_prompts([12])
    which.reserve(1, 64)
    which.forward(torch.tensor([prompt[:-1]]), torch.tensor([0]))
    rows = RowState(
        torch.tensor(prompt[-1:]), torch.tensor(keys(1)), torch.tensor([12]), torch.ones(1),
        torch.tensor([2]),
    )  # fmt: skip
    before = which.cache.whole[..., :11, :].clone()
    draft = drafter.propose(rows, 5, 1, 5)
    assert torch.equal(which.cache.whole[..., :11, :], before)
    copy, text = drafter._copy, list(prompt)
    for n in range(5):  # the whole text again, one forward per token, over the exact beginning
        fed = torch.tensor([text[11:]])
        logits = copy(fed, torch.tensor([11]), None, *which.place(0), True)[2]
        noise = torch.tensor(keys(1)), torch.tensor([12 + n]), torch.ones(1)
        text.append(int(gumbel_topk(logits[:, -1], *noise, 1).tokens_Nk))
    assert draft.tokens_BT[0].tolist() == text[11:]
    assert draft.parents_BT.tolist() == [[-1, 0, 1, 2, 3, 4]]


@needs_c
def test_it_drafts_nothing_behind_a_stop_and_ends_when_all_rows_have_one():
    which = make_target(tiny_model())
    drafter = QuantizedDrafter(which)
    which.reserve(2, 64)
    every = torch.arange(97)
    rows = RowState(*(torch.tensor(x) for x in ([3, 4], keys(2), [1, 1], [1.0, 1.0])), every)
    assert drafter.propose(rows, 6, 1, 6).tokens_BT.shape == (2, 2)
    first = drafter.propose(rows, 1, 1, 1).tokens_BT[0, 1:]
    rows.stop_ids = first
    tokens = drafter.propose(rows, 6, 1, 6).tokens_BT
    assert tokens[0, 1] == first and (tokens[0, 2:] == -1).all() and (tokens[1] >= 0).sum() > 2


@needs_c
@DTYPES
def test_after_a_refresh_it_drafts_with_the_new_weights(dtype):
    which, other = make_target(tiny_model(), dtype=dtype), tiny_model(seed=5)
    spec, prompts = engine(which, "int8-3"), random_prompts([4, 9])
    params = SamplingParams(max_new_tokens=20)
    spec.generate(prompts, params, keys(2))
    which.refresh(full_state(other))
    got = spec.generate(prompts, params, keys(2))
    fresh = engine(make_target(other, dtype=dtype), "int8-3").generate(prompts, params, keys(2))
    assert got.completion_ids == fresh.completion_ids and got.accepted == fresh.accepted
    assert got.stats.accepted[0] > 0.8 * got.stats.drafted[0]


@needs_c
def test_the_cache_equals_a_fresh_prefill_after_every_step():
    which, fresh = make_target(tiny_model()), make_target(tiny_model())
    fresh.reserve(1, 64)
    checked = 0

    def check(engine):
        nonlocal checked
        for slot, row in enumerate(engine.active):
            tokens = torch.tensor([row.prompt + row.tokens])
            end = tokens.shape[1] - 1
            fresh.forward(tokens[:, :-1], torch.tensor([0]))
            for got, want in zip(which.cache.layers, fresh.cache.layers, strict=True):
                assert torch.equal(got[slot, :, :end], want[0, :, :end])
            checked += 1

    spec = engine(which, "int8-3", "int8-1", "off", max_rows=2, on_step=check)
    spec.generate(random_prompts([7, 3, 5, 7]), SamplingParams(max_new_tokens=14), keys(4))
    assert checked > 15


@needs_c
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    group=st.integers(1, 3),
    max_new=st.integers(1, 16),
    stops=st.sets(st.integers(0, 96), max_size=3),
    heats=st.lists(st.sampled_from([0.0, 0.6, 1.5]), min_size=12, max_size=12),
    depths=st.sets(st.integers(1, 20), min_size=1, max_size=3),
    max_rows=st.integers(0, 4),
    narrow=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_equality_is_a_property(
    lengths, group, max_new, stops, heats, depths, max_rows, narrow, seed
):
    which = target("qwen3", torch.bfloat16 if narrow else torch.float32)
    prompts = [p for p in random_prompts(lengths, seed=seed) for _ in range(group)]
    params, heat = SamplingParams(max_new, stop_ids=tuple(stops)), heats[: len(prompts)]
    given_to = prompts, params, keys(len(prompts), seed)
    want = RolloutEngine(which).generate(*given_to, temperatures=heat)
    spec = engine(which, "off", *(f"int8-{depth}" for depth in depths), max_rows=max_rows)
    got = spec.generate(*given_to, temperatures=heat)
    assert got.completion_ids == want.completion_ids
    assert got.logprobs == want.logprobs and got.finish_reasons == want.finish_reasons


@needs_c
def test_the_ratio_test_sees_the_logits_that_a_chain_was_drawn_from():
    """With equal logits a draft is always accepted; rounded ones are nearly equal."""
    which = target()
    spec = engine(which, "int8-4", verify="rejection")
    params = SamplingParams(max_new_tokens=40, stop_ids=(2,))
    stats = spec.generate(random_prompts([3, 8, 5, 2]), params, keys(4)).stats
    assert stats.accepted[0] > 0.8 * stats.drafted[0] > 15


@needs_c
@pytest.mark.parametrize("depth", [3, 32])
def test_rows_that_fill_the_context_and_share_a_beginning(depth):
    which = make_target(tiny_model(max_position_embeddings=48))
    (start,) = random_prompts([20])
    prompts = [start + p for p in random_prompts([1, 27, 9, 26, 9], seed=3)]
    params = SamplingParams(max_new_tokens=64)
    want = RolloutEngine(which).generate(prompts, params, keys(5))
    got = engine(which, f"int8-{depth}", max_rows=2).generate(prompts, params, keys(5))
    assert [len(p) + len(c) for p, c in zip(prompts, got.completion_ids, strict=True)] == [48] * 5
    assert got.completion_ids == want.completion_ids and got.logprobs == want.logprobs


@needs_c
def test_the_budget_counts_the_copy_until_it_is_there(monkeypatch):
    which = make_target(tiny_model())
    spec = engine(which, "int8-2")
    (drafter,) = spec.drafters
    matrices = [p for p in tiny_model().parameters() if p.dim() == 2]
    assert drafter.fixed_bytes == sum(p.numel() for p in matrices) - 97 * 48  # not the embedding
    monkeypatch.setattr("minitlt.spec.free_bytes", lambda device: 10**6)
    assert spec._fair_budget() == pytest.approx(0.6 * (10**6 - drafter.fixed_bytes))
    spec.generate([[1, 2]], SamplingParams(max_new_tokens=3), keys(1))
    assert drafter.fixed_bytes == 0


@needs_c
def test_only_the_ratio_test_keeps_the_logits(monkeypatch):
    which, kept = make_target(tiny_model()), []
    whole = QuantizedDrafter.propose

    def propose(self, *args):
        kept.append(whole(self, *args).logits_BKV)
        return whole(self, *args)

    monkeypatch.setattr(QuantizedDrafter, "propose", propose)
    for verify in ("coupled", "rejection"):
        spec = engine(which, "int8-2", verify=verify)
        spec.generate(random_prompts([3]), SamplingParams(max_new_tokens=9), keys(1))
        assert kept and all((logits is None) == (verify == "coupled") for logits in kept)
        kept.clear()


# Where it cannot draft.


def test_without_native_code_its_arms_are_left_out_and_that_is_said(monkeypatch, caplog):
    why = "MINITLT_NATIVE=0"
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "status", lambda: why)
    which = make_target(tiny_model())
    arms = [Arm.parse(text) for text in ("off", "int8-4", "eagle-2")]
    with caplog.at_level(logging.WARNING):
        left, drafters = with_int8(arms, which)
    assert [arm.name for arm in left] == ["off", "eagle-2"] and drafters == []
    assert f"arms of int8 are left out: they need native code on a CPU; here: {why}" in caplog.text
    assert with_int8(arms[1:2], which) == ([Arm()], [])  # plain decoding is always possible


def test_arms_without_it_stay_as_they_are():
    arms = [Arm(), Arm("eagle", 2)]
    assert with_int8(arms, target()) == (arms, [])


def test_it_drafts_chains_only():
    with pytest.raises(ValueError, match="int8 drafts chains"):
        Arm.parse("int8-4x2")
    with pytest.raises(ValueError, match="leave bN out"):
        Arm.parse("int8-4x1b9")
