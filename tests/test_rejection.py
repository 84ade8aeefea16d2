"""`verify="rejection"`: the ratio test in the engine, lossless in law, with its own streams."""

import functools
from dataclasses import replace

import pytest
import torch
from laws import (
    OPTIONS,
    assert_follows,
    count,
    distance,
    joint_law,
    many_keys,
    named,
    processors_law,
)
from models import random_prompts, tiny_model

from minitlt import kernels
from minitlt.draft import Draft, Drafter, chain_parents
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter, start_from_target
from minitlt.ngram import MergedDrafter, NgramDrafter
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

V, PROMPT, LENGTH = 7, [3, 5, 3, 1, 3, 5], 3


@functools.cache
def small():
    model = tiny_model(vocab_size=V, num_hidden_layers=2)
    return model, make_target(model)


class TableDrafter(Drafter):
    """Draws each token of a chain from a fixed law of its depth; or quotes the target itself."""

    name = "table"

    def __init__(self, model=None, seed=0):
        random = torch.Generator().manual_seed(seed)
        self.logits_KV = 2 * torch.randn(8, V, generator=random)
        self.model, self.keys, self.texts = model, [], {}

    def begin(self, slot, prompt, kept=0):
        self.texts[slot] = list(prompt)

    def observe(self, tokens, taps):
        for slot, new in enumerate(tokens):
            self.texts[slot] += new

    def move(self, src, dst):
        self.texts[dst] = self.texts.pop(src)

    def propose(self, rows, depth, width, nodes):
        self.keys += rows.keys_B.tolist()
        num, logits = len(rows.roots_B), []
        tokens_BT = rows.roots_B[:, None]
        for level in range(depth):
            logits_BV = self.logits_KV[level].expand(num, -1)
            if self.model is not None:
                texts = [self.texts[b] + tokens_BT[b, 1:].tolist() for b in range(num)]
                with torch.no_grad():
                    last = [self.model(torch.tensor([t])).logits[0, -1] for t in texts]
                logits_BV = torch.stack(last)
            at = rows.keys_B, rows.positions_B + level, rows.temperatures_B
            drawn = kernels.gumbel_topk(logits_BV, *at, 1)
            tokens_BT = torch.cat([tokens_BT, drawn.tokens_Nk], 1)
            logits.append(logits_BV)
        law = None if rows.coupled else torch.stack(logits, 1)
        return Draft(tokens_BT, chain_parents(depth).repeat(num, 1), law)


def sources(arm="off", seed=3):
    """What drafts for this arm, or everything; the draft model of the tiny target is bad on
    purpose."""
    model, target = small()
    config = DrafterConfig(draft_vocab_size=5)
    eagle = Eagle3Drafter(Eagle3Config.from_target(model.config, config), seed=seed)
    eagle.tie(target.embed_weight, target.head_weight)
    start_from_target(eagle, dict(model.named_parameters()))
    proposer, ngram = Eagle3Proposer(eagle, config), NgramDrafter(config)
    alone = {"table": [TableDrafter()], "eagle": [proposer], "ngram": [ngram]}
    merged = [proposer, ngram, MergedDrafter(proposer, ngram)]
    return alone.get(arm.partition("-")[0]) or [*alone["table"], *merged]


def engine_of(arm, drafters=None, max_rows=1000):
    bandit = Bandit([Arm.parse(arm)])
    return RolloutEngine(
        small()[1], drafters or sources(arm), bandit, verify="rejection", max_rows=max_rows
    )


def rollout(arm, params, num, seed=0, drafters=None):
    return engine_of(arm, drafters).generate([PROMPT] * num, params, many_keys(num, seed))


@functools.cache
def target_law(params, length=LENGTH):
    return joint_law(processors_law(small()[0], PROMPT, params, V), V, length)


ARMS = ["off", "table-1", "table-3", "eagle-2", "ngram-3", "ngram-2x2", "eagle-2x2", "merged-2x3b4"]
TREES = ["eagle-2x2", "merged-2x3b4"]  # slow with one option alone: of the last set they have all
LAWS = [(arm, OPTIONS[0]) for arm in ARMS] + [(arm, OPTIONS[-1]) for arm in TREES]
LAWS += [("table-3", options) for options in OPTIONS[1:]]
LAWS += [
    pytest.param(arm, options, marks=pytest.mark.slow) for options in OPTIONS[1:-1] for arm in TREES
]


@pytest.mark.parametrize(("arm", "options"), LAWS, ids=lambda x: x if x in ARMS else named(x))
def test_the_law_of_three_tokens_is_the_targets(arm, options):
    """All V^3 completions, whatever drafts: drawn, chosen, copied, as a chain or a tree."""
    params = SamplingParams(max_new_tokens=LENGTH, **options)
    got = rollout(arm, params, 4000)
    assert_follows(got.completion_ids, target_law(params))
    if arm != "off":
        assert got.stats.accepted[0] > 100  # drafts were accepted, and drafts were refused
        assert got.stats.drafted[0] - got.stats.accepted[0] > 100


@pytest.mark.parametrize("arm", ["table-2", "eagle-2x2"])
def test_the_law_belongs_to_each_row_in_waves_through_three_slots(arm):
    heats, num, params = [0.5, 1.0, 1.6], 250, SamplingParams(max_new_tokens=2, top_p=0.9)
    temperatures = heats * num
    got = engine_of(arm, max_rows=3).generate(
        [PROMPT] * len(temperatures), params, many_keys(3 * num), temperatures=temperatures
    )
    for i, heat in enumerate(heats):
        law = target_law(replace(params, temperature=heat), 2)
        assert_follows(got.completion_ids[i::3], law)


def test_the_test_of_the_law_notices_logits_of_another_branch():
    """Of a tree, whose first two nodes (both children of the root) exchange their logits."""
    engine, params = engine_of("eagle-2x2"), SamplingParams(max_new_tokens=LENGTH)
    verify = engine._verify

    def exchanged(logits_BTV, draft):
        order = [0, 2, 1, *range(3, logits_BTV.shape[1])][: logits_BTV.shape[1]]
        return verify(logits_BTV[:, order], draft)

    engine._verify = exchanged
    got, law = engine.generate([PROMPT] * 4000, params, many_keys(4000)), target_law(params)
    gap = distance(count(got.completion_ids, law), law)
    assert gap > 2, gap


def test_the_test_of_the_law_notices_a_one_hot_law_for_drawn_drafts():
    """Case B5, turned round: a draft that was drawn, handed over as if it had been chosen."""

    class Silent(TableDrafter):
        def propose(self, *args):
            draft = super().propose(*args)
            draft.logits_BKV = torch.zeros_like(draft.logits_BKV)
            return draft

    params = SamplingParams(max_new_tokens=LENGTH)
    got, law = rollout("table-2", params, 4000, drafters=[Silent()]), target_law(params)
    gap = distance(count(got.completion_ids, law), law)
    assert gap > 2, gap


def test_streams_are_disjoint(monkeypatch):
    """No key that draws drafts, coins or residuals is a row's own key, nor another stream's."""
    used = {"draft": set(), "accept": set(), "residual": set()}
    real = kernels.stream_keys

    def watch(keys, stream):
        out = real(keys, stream)
        used[stream] |= set(out.tolist())
        return out

    for name in ("minitlt.spec.stream_keys", "minitlt.kernels.stream_keys"):
        monkeypatch.setattr(name, watch)
    drafter = TableDrafter()
    rollout("table-2", SamplingParams(max_new_tokens=4), 50, drafters=[drafter])
    groups = [set(many_keys(50)), *used.values()]
    assert all(len(group) == 50 for group in groups)
    assert len(set.union(*groups)) == 200
    assert set(drafter.keys) == used["draft"]


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_equal_to_the_target_is_always_accepted(verify, temperature):
    """Case B16: only the ends of rows cut a block short."""
    params = SamplingParams(max_new_tokens=13, temperature=temperature)  # one without a draft
    engine = RolloutEngine(
        small()[1], [TableDrafter(small()[0])], Bandit([Arm.parse("table-2")]), verify=verify
    )
    stats = engine.generate([PROMPT] * 3, params, many_keys(3)).stats
    assert stats.accepted == stats.drafted and stats.accept_length == 3


@pytest.mark.parametrize("arm", ["table-3", "eagle-3", "ngram-3", "eagle-2x3", "merged-3x2"])
def test_greedy_is_argmax_in_either_mode(arm):
    params = SamplingParams(max_new_tokens=20, temperature=0.0, stop_ids=(2,))
    prompts, keys = random_prompts([1, 5, 9], vocab=V), many_keys(3)
    want = RolloutEngine(small()[1]).generate(prompts, params, keys)
    engine = RolloutEngine(
        small()[1], sources(), Bandit([Arm.parse(arm)]), verify="rejection", max_rows=2
    )
    got = engine.generate(prompts, params, keys)
    assert got.completion_ids == want.completion_ids
    assert got.finish_reasons == want.finish_reasons


def test_rejection_logprobs_stops_and_limits():
    """Logprobs are the target's under any option; rows end at stop ids and budgets."""
    model, params = small()[0], SamplingParams(
        max_new_tokens=9, temperature=0.8, top_k=5, repetition_penalty=1.2, stop_ids=(2,)
    )  # fmt: skip
    got = rollout("table-3", params, 40)
    assert {"stop", "length"} == set(got.finish_reasons)
    for tokens, logprobs, reason in zip(
        got.completion_ids, got.logprobs, got.finish_reasons, strict=True
    ):
        assert 2 not in tokens[:-1] and (tokens[-1] == 2) == (reason == "stop")
        assert len(tokens) == 9 or reason == "stop"
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
        want = (logits / 0.8).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-4, rtol=0)


def test_the_rule_has_two_names():
    with pytest.raises(ValueError, match="not one of coupled, rejection"):
        RolloutEngine(small()[1], verify="lossy")
