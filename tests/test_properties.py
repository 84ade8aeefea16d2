"""Whatever is asked for, in any order, with any drafter: plain decoding's tokens, whole caches."""

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import random_prompts, tiny_model

from drafters import ScriptedDrafter, oracle_then_wrong
from minitlt.draft import depths
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter, start_from_target
from minitlt.kernels import row_key
from minitlt.ngram import MergedDrafter, NgramDrafter
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

V = 23
CONFIG = DrafterConfig(draft_vocab_size=15, tap_dtype="float64")


@functools.cache
def house():
    """A target and a draft model in fp64, where trees too are exact; and a second target."""
    model = tiny_model(dtype=torch.float64, vocab_size=V, num_hidden_layers=4)
    target, fresh = (make_target(model, dtype=torch.float64) for _ in range(2))
    eagle = Eagle3Drafter(Eagle3Config.from_target(model.config, CONFIG), dtype=torch.float64)
    eagle.tie(target.embed_weight, target.head_weight)
    start_from_target(eagle, dict(model.named_parameters()))
    fresh.reserve(1, 128)
    return target, eagle, fresh


def sources():
    proposer, ngram = Eagle3Proposer(house()[1], CONFIG), NgramDrafter(CONFIG)
    return [proposer, ngram, MergedDrafter(proposer, ngram)]


def check_caches(engine):
    """The target's keys and values, and the drafter's, are those of a fresh prefill."""
    fresh, proposer = house()[2], engine.sources.get("eagle")
    for slot, row in enumerate(engine.active):
        tokens = torch.tensor(row.prompt + row.tokens)
        end = len(tokens) - 1
        if not end:
            continue
        _, taps = fresh.forward(tokens[None, :-1], torch.tensor([0]))
        for got, want in zip(engine.target.cache.layers, fresh.cache.layers, strict=True):
            torch.testing.assert_close(got[slot, :, :end], want[0, :, :end], atol=1e-9, rtol=0)
        if proposer in engine.drafters:
            kept, known = proposer._buffers, proposer._cached[slot]
            want = taps.features_BNF[0]
            torch.testing.assert_close(kept["features"][slot, :end], want, atol=1e-9, rtol=0)
            assert proposer._tapped[slot] == end and known <= end
            x_N2H = proposer.model.mix(tokens[1:], proposer.model.fuse(want))
            pairs = proposer.model.attention_inputs(x_N2H, torch.arange(end))[1:]
            for name, want in zip(("keys", "values"), pairs, strict=True):
                got = kept[name][slot, :known]
                torch.testing.assert_close(got, want[:known], atol=1e-9, rtol=0)


arms = st.builds(
    lambda source, depth, width, rest: Arm(
        source,
        depth,
        max(width, 2) if source == "merged" else width,
        depth + rest if width > 1 and rest else 0,
    ),
    st.sampled_from(["eagle", "ngram", "merged"]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
) | st.just(Arm())
options = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([1, 4]),
        "top_p": st.just(0.8),
        "min_p": st.just(0.1),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "min_new_tokens": st.just(4),
        "suppress_ids": st.just((3, 7)),
        "stop_strings": st.just(("ab", "q")),
    },
)


any_rollout = given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    group=st.integers(1, 3),
    max_new=st.integers(1, 16),
    stops=st.sets(st.integers(0, V - 1), max_size=3),
    heats=st.lists(st.sampled_from([0.0, 0.6, 1.0, 1.5]), min_size=12, max_size=12),
    extra=options,
    chosen=st.lists(arms, min_size=1, max_size=3),
    max_rows=st.integers(0, 4),
    chunk=st.integers(1, 8),
    common=st.sampled_from([0, 20]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)


def check_rollout(
    lengths, group, max_new, stops, heats, extra, chosen, max_rows, chunk, common, seed, data
):
    (start,) = random_prompts([common], vocab=V)
    prompts = [start + p for p in random_prompts(lengths, vocab=V, seed=seed) for _ in range(group)]
    params, heat = SamplingParams(max_new, stop_ids=tuple(stops), **extra), heats[: len(prompts)]
    keys = [row_key(seed, 0, i) for i in range(len(prompts))]

    def decode(tokens):
        return "".join(chr(97 + t) for t in tokens)

    plain = RolloutEngine(house()[0], decode=decode).generate(
        prompts, params, keys, temperatures=heat
    )
    order = data.draw(st.permutations(range(len(prompts))))
    engine = RolloutEngine(
        house()[0],
        sources(),
        Bandit(chosen, epsilon=0.5, seed=seed),
        max_rows=max_rows,
        prefill_chunk=chunk,
        decode=decode,
        on_step=check_caches,
    )
    for _ in range(2):  # the second time, the n-gram index knows every text
        turned = ([values[i] for i in order] for values in (prompts, keys, heat))
        texts, row_keys, row_heat = turned
        got = engine.generate(texts, params, row_keys, temperatures=row_heat)
        assert got.completion_ids == [plain.completion_ids[i] for i in order]
        assert got.finish_reasons == [plain.finish_reasons[i] for i in order]
        for i, logprobs in zip(order, got.logprobs, strict=True):
            want = torch.tensor(plain.logprobs[i])
            torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-5, rtol=0)
        assert [len(a) for a in got.accepted] == [len(c) for c in got.completion_ids]


test_any_rollout_equals_plain = settings(max_examples=12, deadline=None)(any_rollout(check_rollout))
test_many_rollouts_equal_plain = pytest.mark.slow(
    settings(max_examples=200, deadline=None)(any_rollout(check_rollout))
)


@functools.cache
def little():
    return make_target(tiny_model(num_hidden_layers=1, max_position_embeddings=64))


@pytest.mark.parametrize("max_rows", [pytest.param(1, marks=pytest.mark.slow), 48, 0])
def test_512_rows_in_one_slot_in_waves_and_at_once(max_rows):
    """Every row is what it would be alone; a prompt of context - 1 has room for one token."""
    lengths = [1 + 9 * i % 40 for i in range(509)] + [63, 62, 1]
    prompts = random_prompts(lengths)
    params = SamplingParams(max_new_tokens=6, stop_ids=(2, 5))
    keys = [row_key(1, 0, i) for i in range(512)]
    want = [
        RolloutEngine(little()).generate([prompts[i]], params, [keys[i]]).completion_ids[0]
        for i in (0, 100, 300, 509, 510, 511)
    ]
    plain = RolloutEngine(little(), max_rows=96).generate(prompts, params, keys).completion_ids
    pairs = zip(keys, prompts, plain, strict=True)
    known = {key: (len(prompt), completion) for key, prompt, completion in pairs}
    drafter = ScriptedDrafter(known, oracle_then_wrong)  # 0 to 3 of a row's drafts are right
    engine = RolloutEngine(
        little(), [drafter], Bandit([Arm.parse("scripted-3")]), max_rows=max_rows
    )
    got = engine.generate(prompts, params, keys).completion_ids
    assert [got[i] for i in (0, 100, 300, 509, 510, 511)] == want
    assert len(got) == 512 and len(got[509]) == 1 and all(1 <= len(c) <= 6 for c in got)
    assert got == plain
    if max_rows != 1:  # a row alone is row 0, whose drafts are all wrong
        assert engine.stats.accept_length > 1.8 and min(engine.stats.accepted) > 50


def test_a_budget_of_memory_makes_waves_and_counts_what_drafters_store():
    """Slots are as many as fit with the drafters' taps and keys; arms [off] feed nobody."""
    prompts, params = random_prompts([9] * 6, vocab=V), SamplingParams(max_new_tokens=12)
    keys = [row_key(2, 0, i) for i in range(6)]
    per_token = house()[0].cache_bytes_per_token
    widths = {}
    for arm in ("off", "eagle-2"):
        drafters = sources()
        engine = RolloutEngine(house()[0], drafters, Bandit([Arm.parse(arm)]))
        length = 9 + 12 + 1 + engine.bandit.arms[0].depth
        engine.cache_gb = 4.5 * length * per_token / 2**30
        most = []
        engine.on_step = lambda engine, most=most: most.append(len(engine.active))
        engine.generate(prompts, params, keys)
        widths[arm] = engine._num_slots
        assert engine._num_slots == int(
            4.5 * per_token / (per_token + (arm != "off") * drafters[0].bytes_per_token)
        )
        assert bool(drafters[0]._buffers) == (arm != "off") and max(most) <= widths[arm]
    assert widths["off"] == 4 > widths["eagle-2"] >= 1


def test_a_tree_is_the_best_part_of_a_larger_one():
    """EAGLE-2: shaped by the drafter's confidence. The nodes of a small budget are a subset of
    those of a larger one, and what is added last is trusted least by the drafter."""
    target, _, _ = house()
    prompts, seen = random_prompts([12, 7, 30], vocab=V), []

    class Watched(Eagle3Proposer):
        def propose(self, rows, depth, width, nodes):
            sizes = (2, 3, 5, 8, 12, 21)  # 3 + 9 + 9 are all there are
            trees = [super(Watched, self).propose(rows, 3, 3, n) for n in sizes]
            for b in range(len(rows.roots_B)):
                paths = [paths_of(tree, b) for tree in trees]
                assert [len(p) for p in paths] == list(sizes)
                for small, large in itertools.pairwise(paths):
                    assert small < large
                seen.append(tuple(sorted(map(len, paths[2]))))
            return trees[-1]

    def paths_of(tree, b):
        paths = [()]
        for token, parent in zip(
            tree.tokens_BT[b, 1:].tolist(), tree.parents_BT[b, 1:].tolist(), strict=True
        ):
            paths.append((*paths[parent], token))
        assert depths(tree.parents_BT)[b].tolist() == [len(p) for p in paths]
        return set(paths[1:])

    engine = RolloutEngine(target, [Watched(house()[1], CONFIG)], Bandit([Arm("eagle", 3, 3, 21)]))
    keys = [row_key(4, 0, i) for i in range(3)]
    engine.generate(prompts, SamplingParams(max_new_tokens=12), keys)
    assert len(set(seen)) > 2  # the shape follows the confidence, it is not one for all


def test_a_merged_tree_accepts_what_either_source_would():
    """Rows where both sources find something: the tree of both accepts more than the copied chain
    or the learned tree that are in it."""
    target = house()[0]
    prompts = [p for p in random_prompts([8, 9, 10], vocab=V, seed=5) for _ in range(4)]
    keys = [row_key(6, 0, i) for i in range(12)]
    params = SamplingParams(max_new_tokens=40, temperature=0.7, repetition_penalty=0.7)
    plain = RolloutEngine(target).generate(prompts, params, keys)
    accept = {}
    for arm in ("eagle-4x2b4", "ngram-4", "merged-4x2b8"):
        engine = RolloutEngine(target, sources(), Bandit([Arm.parse(arm)]), max_rows=4)
        got = engine.generate(prompts, params, keys)
        assert got.completion_ids == plain.completion_ids
        accept[arm.split("-")[0]] = got.stats.accept_length
    assert min(accept["ngram"], accept["eagle"]) > 1.05, accept
    assert accept["merged"] > max(accept["eagle"], accept["ngram"]), accept
