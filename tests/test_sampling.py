"""Every sampling option: the law of transformers' processors, and the ends of rows by text."""

import functools
from types import SimpleNamespace

import pytest
import torch
from laws import OPTIONS, assert_follows, joint_law, many_keys, named, processors_law
from models import tiny_model

from drafters import SCRIPTS, ScriptedDrafter, oracle
from minitlt import spec
from minitlt.draft import Draft
from minitlt.kernels import row_key
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

V, PROMPT = 7, [3, 5, 3, 1]


@functools.cache
def small(dtype=torch.float32):
    model = tiny_model(dtype=dtype, vocab_size=V, num_hidden_layers=2, eos_token_id=2)
    return model, make_target(model, dtype=dtype)


@pytest.mark.parametrize("options", OPTIONS, ids=named)
def test_plain_decoding_follows_the_law_of_transformers_processors(options):
    """Support exactly, frequencies by chi-square, over all completions of three tokens."""
    params = SamplingParams(max_new_tokens=3, **options)
    law = joint_law(processors_law(small()[0], PROMPT, params, V), V, 3)
    engine, num = RolloutEngine(small()[1], max_rows=1000), 4000
    done = engine.generate([PROMPT] * num, params, many_keys(num)).completion_ids
    assert_follows(done, law)


def test_thresholds_are_of_what_is_fed(monkeypatch):
    """Root and drafts: pads' logits may be anything."""
    engine, given, real = RolloutEngine(small()[1]), [], spec.sampling_thresholds
    engine.params = SamplingParams(top_k=3, top_p=0.9)
    engine.rows = SimpleNamespace(temperatures_B=torch.tensor([0.5, 1.5]))
    monkeypatch.setattr(
        spec, "sampling_thresholds", lambda x, *rest: given.append(len(x)) or real(x, *rest)
    )
    draft = Draft(torch.tensor([[-1, 4, -1], [2, 3, 5]]), torch.tensor([[-1, 0, -1], [-1, 0, 1]]))
    logits = torch.randn(2, 3, V)
    want = real(logits.flatten(0, 1), torch.tensor([0.5, 1.5]).repeat_interleave(3), 3, 0.9)
    logits[0, 2] = torch.nan
    _, thresholds = engine._law(logits, draft)
    want[2] = -torch.inf
    assert given == [5] and torch.equal(thresholds.flatten(), want)


def test_temperatures_belong_to_rows():
    _, target = small()
    params = SamplingParams(max_new_tokens=8)
    keys, heat = many_keys(3), [0.0, 0.7, 1.4]
    got = RolloutEngine(target).generate([PROMPT] * 3, params, keys, temperatures=heat)
    for i, t in enumerate(heat):
        alone = SamplingParams(max_new_tokens=8, temperature=t)
        want = RolloutEngine(target).generate([PROMPT], alone, keys[i : i + 1])
        assert got.completion_ids[i] == want.completion_ids[0]


# Stop strings. Token i of the tiny model reads as WORDS[i].
WORDS = ["a", "b", "ab", "<", "end", ">", "é"]


def text(tokens):
    return "".join(WORDS[t] for t in tokens)


KEYS = [row_key(9, 0, i) for i in range(6)]


@functools.cache
def plain_rows(params):
    engine = RolloutEngine(small(torch.float64)[1], decode=text)
    return engine.generate([PROMPT] * 6, params, KEYS)


@pytest.mark.parametrize("stop", ["ba", "<e", "d>", "bab", "é", "never said"])
@pytest.mark.parametrize("script", sorted(SCRIPTS))
@pytest.mark.parametrize("arm", ["scripted-4", "scripted-4x2"])
def test_stop_strings_end_rows_alike_with_and_without_speculation(stop, script, arm):
    """The row ends with the token that completes the text, wherever token borders lie."""
    params = SamplingParams(max_new_tokens=24, stop_strings=(stop, "absent"))
    free, plain = plain_rows(SamplingParams(max_new_tokens=24)), plain_rows(params)
    for whole, tokens, reason in zip(
        free.completion_ids, plain.completion_ids, plain.finish_reasons, strict=True
    ):
        ends = [n for n in range(1, 25) if stop in text(whole[:n])]
        assert tokens == whole[: ends[0] if ends else 24]
        assert reason == ("stop" if ends else "length")
    known = {k: (len(PROMPT), c) for k, c in zip(KEYS, free.completion_ids, strict=True)}
    drafter = ScriptedDrafter(known, SCRIPTS[script], vocab=V)
    bandit, target = Bandit([Arm.parse(arm)]), small(torch.float64)[1]
    engine = RolloutEngine(target, [drafter], bandit, decode=text, max_rows=4)
    got = engine.generate([PROMPT] * 6, params, KEYS)
    assert got.completion_ids == plain.completion_ids
    assert got.finish_reasons == plain.finish_reasons
    assert [len(x) for x in got.logprobs] == [len(x) for x in got.completion_ids]


def test_stop_strings_need_a_decoder_and_texts():
    with pytest.raises(ValueError, match=r"tokenizer\.decode"):
        RolloutEngine(small()[1]).generate([PROMPT], SamplingParams(stop_strings=("x",)), [1])
    for wrong in ("text", ("",)):
        with pytest.raises(ValueError, match="stop_strings must be"):
            SamplingParams(stop_strings=wrong)


# Replay.


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.0}, {"top_k": 2}, {"repetition_penalty": 1.4, "suppress_ids": (3,)}],
    ids=str,
)
@pytest.mark.parametrize("arm", ["off", "scripted-3", "scripted-3x2"])
def test_replay_emits_the_record_whatever_the_target_would_sample(options, arm, monkeypatch):
    """Random texts, that no target would have written; logprobs are the target's own, a draft
    stands iff it is the record, and every step runs the verifier on all of its logits."""
    model, target = small()
    random = torch.Generator().manual_seed(4)
    records = [torch.randint(V, (n,), generator=random).tolist() for n in (1, 9, 24, 17)]
    prompts, keys = [PROMPT, [1], PROMPT, [2, 2]], many_keys(4)
    known = {k: (len(p), r) for k, p, r in zip(keys, prompts, records, strict=True)}
    params = SamplingParams(max_new_tokens=24, **options)
    drafter = ScriptedDrafter(known, oracle, vocab=V)
    engine = RolloutEngine(target, [drafter], Bandit([Arm.parse(arm)]), max_rows=3)
    shapes, real = [], engine._verify.__globals__["coupled_verify"]

    def verify(logits_BTV, *args, **kwargs):
        shapes.append(logits_BTV.shape)
        return real(logits_BTV, *args, **kwargs)

    monkeypatch.setattr("minitlt.spec.coupled_verify", verify)
    got = engine.generate(prompts, params, keys, replay=records)
    assert got.completion_ids == records and set(got.finish_reasons) == {"length"}
    assert len(shapes) == 1 + got.stats.verify_steps  # first tokens come with the prompts
    if arm != "off":
        assert got.stats.accept_length > 2 and max(shape[1] for shape in shapes) > 3
    heat = params.temperature or 1.0
    for prompt, tokens, logprobs in zip(prompts, records, got.logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        want = (logits / heat).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-4, rtol=0)


def test_replay_of_ones_own_rollout_is_that_rollout():
    _, target = small()
    params = SamplingParams(max_new_tokens=20, stop_ids=(2,))
    prompts, keys = [PROMPT] * 5, many_keys(5)
    want = RolloutEngine(target).generate(prompts, params, keys)
    for which in (target, small(torch.float64)[1]):
        got = RolloutEngine(which).generate(prompts, params, keys, replay=want.completion_ids)
        assert got.completion_ids == want.completion_ids
        assert got.finish_reasons == want.finish_reasons
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("replay", "verify", "message"),
    [([[1]], "coupled", "as many records"), ([[1], []], "coupled", "record 1 is empty"),
     ([[1], [99]], "coupled", "outside 0..6"), ([[1], [2]], "rejection", "verify='coupled'")],
)  # fmt: skip
def test_bad_records_are_named(replay, verify, message):
    engine = RolloutEngine(small()[1], verify=verify)
    with pytest.raises(ValueError, match=message):
        engine.generate([PROMPT] * 2, SamplingParams(), [1, 2], replay=replay)
