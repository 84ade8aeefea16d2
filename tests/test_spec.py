"""Losslessness as equality: whatever is drafted, the tokens are the plain engine's."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import OTHERS, random_prompts
from models import tiny_model as model_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafters import SCRIPTS, ScriptedDrafter, oracle
from minitlt.draft import Draft
from minitlt.kernels import row_key
from minitlt.models import DEFAULT_MODEL, resolve_model
from minitlt.slots import _cgroup_room, free_bytes
from minitlt.spec import (
    Arm,
    Bandit,
    RolloutEngine,
    SamplingParams,
    SpecStats,
)
from minitlt.target import make_target

LENGTHS = [1, 9, 4, 17, 2, 9]
PARAMS = SamplingParams(max_new_tokens=24, stop_ids=(2, 5))
tiny_model = functools.partial(model_of, num_hidden_layers=4)


@functools.cache
def target(kind="llama", dtype=torch.float32, backend="auto"):
    return make_target(tiny_model(kind, dtype=dtype), dtype=dtype, backend=backend)


def keys(num, generation=0):
    return [row_key(7, generation, i) for i in range(num)]


def run(params, prompts, arm="off", drafters=(), which=None, max_rows=0, row_keys=None, heat=None):
    engine = RolloutEngine(which or target(), drafters, Bandit([Arm.parse(arm)]), max_rows=max_rows)
    return engine.generate(prompts, params, row_keys or keys(len(prompts)), temperatures=heat)


def known(prompts, rollout, row_keys=None):
    pairs = zip(row_keys or keys(len(prompts)), prompts, rollout.completion_ids, strict=True)
    return {key: (len(p), c) for key, p, c in pairs}


def params_at(temperature, **extra):
    return SamplingParams(max_new_tokens=24, stop_ids=(2, 5), temperature=temperature, **extra)


def assert_same(got, want):
    assert got.completion_ids == want.completion_ids
    assert got.finish_reasons == want.finish_reasons
    for a, b in zip(got.logprobs, want.logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-5, rtol=0)


@functools.cache
def greedy_of(kind):
    """The completions by transformers alone."""
    model, out = tiny_model(kind), []
    for prompt in random_prompts(LENGTHS):
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=[2, 5],
            pad_token_id=0,
        )
        out.append(ids[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(kind, backend) for kind in ("llama", "llama_yarn", "llama_linear", "qwen2", "qwen3")
     for backend in ("fused", "module")] + [(kind, "module") for kind in OTHERS],
)  # fmt: skip
def test_greedy_equals_transformers_generate(kind, backend):
    got = run(params_at(0.0), random_prompts(LENGTHS), which=target(kind, backend=backend))
    assert got.completion_ids == greedy_of(kind)


@pytest.mark.slow
def test_greedy_equals_transformers_generate_for_the_default_model():
    folder = resolve_model(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["Hi", "What is the capital of France?", "Count from one to twenty, please." * 3]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": t}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for t in texts
    ]
    stop = (tokenizer.eos_token_id,)
    params = SamplingParams(max_new_tokens=40, temperature=0.0, stop_ids=stop)
    got = run(params, prompts, which=make_target(model))
    for prompt, tokens in zip(prompts, got.completion_ids, strict=True):
        want = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40)
        assert tokens == want[0, len(prompt) :].tolist()


@functools.cache
def plain_at(temperature, dtype=torch.float32):
    return run(params_at(temperature), random_prompts(LENGTHS), which=target(dtype=dtype))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_speculation_changes_nothing(temperature, depth, script):
    prompts, plain = random_prompts(LENGTHS), plain_at(temperature)
    drafter = ScriptedDrafter(known(prompts, plain), SCRIPTS[script])
    got = run(params_at(temperature), prompts, f"scripted-{depth}", [drafter])
    assert_same(got, plain)
    assert drafter.calls > 0
    accept = got.stats.accept_length
    if script == "oracle":  # everything is accepted; only the ends of rows cut a block short
        assert accept > 0.6 * (depth + 1)
    if script == "anti_oracle":
        assert accept == 1.0


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("shape", ["2x3", "4x2", "3x4"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trees_change_nothing(temperature, shape, script):
    prompts, plain = random_prompts(LENGTHS), plain_at(temperature, torch.float64)
    which = target(dtype=torch.float64)
    drafter = ScriptedDrafter(known(prompts, plain), SCRIPTS[script])
    got = run(params_at(temperature), prompts, f"scripted-{shape}", [drafter], which=which)
    assert_same(got, plain)
    if script == "oracle":
        assert got.stats.accept_length > 1.5


@functools.cache
def target_by(way, kind, dtype):
    made = make_target(tiny_model(kind), dtype=dtype)
    assert made.native == (way == "native")
    return made


@pytest.mark.parametrize("shape", ["4", "2x3", "3x4"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_either_way_of_decoding_keeps_its_promise(way, dtype, kind, shape):
    """Trees and narrow weights change nothing where native code decodes, chains in fp32 nowhere."""
    if way == "packed" and (dtype, shape) != (torch.float32, "4"):
        pytest.skip("the law, not the token")
    which, prompts = target_by(way, kind, dtype), random_prompts(LENGTHS)
    for temperature in (0.0, 1.0):
        plain = run(params_at(temperature), prompts, which=which)
        for script in SCRIPTS.values():
            drafter = ScriptedDrafter(known(prompts, plain), script)
            got = run(params_at(temperature), prompts, f"scripted-{shape}", [drafter], which=which)
            assert_same(got, plain)
            if which.native:
                assert got.logprobs == plain.logprobs  # to the bit


@pytest.mark.parametrize("kind", OTHERS)
def test_speculation_changes_nothing_for_models_of_other_kinds(kind):
    prompts, which = random_prompts(LENGTHS), target(kind, torch.float64)
    plain = run(PARAMS, prompts, which=which)
    for arm in ("scripted-3", "scripted-3x2"):
        drafter = ScriptedDrafter(known(prompts, plain), SCRIPTS["oracle_then_wrong"])
        got = run(PARAMS, prompts, arm, [drafter], which=which, max_rows=4)
        assert_same(got, plain)
        assert got.stats.accept_length > 1.3


@pytest.mark.parametrize("max_rows", [1, 2, 4])
def test_waves_and_order_change_nothing(max_rows):
    """Fewer slots than rows, refilled as rows finish; and rows in another order."""
    prompts = random_prompts(LENGTHS)
    plain = run(PARAMS, prompts)
    drafter = ScriptedDrafter(known(prompts, plain), SCRIPTS["oracle_then_wrong"])
    assert_same(run(PARAMS, prompts, "scripted-3", [drafter], max_rows=max_rows), plain)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = run(
        PARAMS,
        [prompts[i] for i in order],
        max_rows=max_rows,
        row_keys=[keys(len(prompts))[i] for i in order],
    )
    assert shuffled.completion_ids == [plain.completion_ids[i] for i in order]


def test_siblings_share_a_prefill_and_differ():
    prompts = [p for p in random_prompts([12, 5]) for _ in range(4)]
    together = run(PARAMS, prompts)
    for i, prompt in enumerate(prompts):
        alone = run(PARAMS, [prompt], row_keys=[keys(8)[i]])
        assert alone.completion_ids[0] == together.completion_ids[i]
    assert len({tuple(c) for c in together.completion_ids[:4]}) == 4


@functools.cache
def families():
    """Three families of prompts that begin alike, three siblings in each; and their completions,
    each computed alone."""
    start, *rests = random_prompts([40, 6, 9, 3])
    prompts = [start + rest for rest in rests for _ in range(3)]
    alone = [run(PARAMS, [p], row_keys=[key]) for p, key in zip(prompts, keys(9), strict=True)]
    return prompts, [rollout.completion_ids[0] for rollout in alone]


@pytest.mark.parametrize("max_rows", [0, 1, 3])
def test_what_was_computed_once_is_not_computed_again(monkeypatch, max_rows):
    """The common beginning once, every prompt's rest once; also when its siblings have left."""
    prompts, want = families()
    fed, forward = [], target().forward

    def count(tokens_BT, *args, logits=True, **places):
        if not logits:
            fed.append(tokens_BT.numel())
        return forward(tokens_BT, *args, logits=logits, **places)

    monkeypatch.setattr(target(), "forward", count)
    got = run(PARAMS, prompts, max_rows=max_rows)
    assert got.completion_ids == want
    assert fed[0] == 40 and len(fed) == 2 + 2 * (max_rows > 0)
    # In one block up to the longest rest, last tokens too; or each without it: a step's root.
    assert sum(fed[1:]) == {0: 3 * 9, 1: 6 + 8 + 2, 3: 6 + 8 + 2}[max_rows]


@pytest.mark.parametrize(
    "extra",
    [
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 9},
        {"suppress_ids": (4, 11)},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.1, "min_new_tokens": 3},
    ],
)
@pytest.mark.parametrize("arm", ["scripted-3", "scripted-3x2"])
@pytest.mark.parametrize("heat", [[0.0] * 6, [0.8] * 6, [0.0, 1.5, 0.4, 1.0, 0.0, 0.8]], ids=str)
def test_every_sampling_option_with_and_without_speculation(extra, heat, arm):
    """As chain and tree, at one temperature and at one for each row; fewer slots than rows. Of the
    scripts, oracle_then_wrong has rows of every number of right drafts."""
    prompts, params = random_prompts(LENGTHS), params_at(1.0, **extra)
    which = target(dtype=torch.float64 if "x" in arm else torch.float32)
    plain = run(params, prompts, which=which, heat=heat)
    for script in ("oracle_then_wrong", "oracle", "random")[: 3 if len(set(heat)) > 1 else 1]:
        drafter = ScriptedDrafter(known(prompts, plain), SCRIPTS[script])
        got = run(params, prompts, arm, [drafter], which=which, max_rows=4, heat=heat)
        assert_same(got, plain)
        assert script == "random" or got.stats.accept_length > 1.5
    for completion in plain.completion_ids:
        assert not set(extra.get("suppress_ids", ())) & set(completion)
        assert len(completion) >= extra.get("min_new_tokens", 1)


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_logprobs_are_the_teacher_forced_scores(temperature):
    prompts = random_prompts(LENGTHS)
    plain = run(params_at(temperature), prompts)
    drafter = ScriptedDrafter(known(prompts, plain), oracle)
    got = run(params_at(temperature), prompts, "scripted-3", [drafter])
    for prompt, tokens, logprobs in zip(prompts, got.completion_ids, got.logprobs, strict=True):
        with torch.no_grad():
            logits = tiny_model()(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        scores = torch.log_softmax(logits / (temperature or 1.0), -1)
        want = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), want, atol=1e-4, rtol=0)


def test_budget_first_then_the_earliest_stop_inside_it():
    """A stop id in the middle of an accepted block ends the row; nothing follows it."""
    prompts = random_prompts([6])
    free = run(SamplingParams(max_new_tokens=20), prompts).completion_ids[0]
    for cut in range(1, 12):
        if free[cut] in free[:cut]:
            continue
        params = SamplingParams(max_new_tokens=20, stop_ids=(free[cut],))
        drafter = ScriptedDrafter({keys(1)[0]: (6, free)}, oracle)
        got = run(params, prompts, "scripted-4", [drafter])
        assert got.completion_ids[0] == free[: cut + 1]
        assert got.finish_reasons == ["stop"]
        capped = SamplingParams(max_new_tokens=cut, stop_ids=(free[cut],))
        got = run(capped, prompts, "scripted-4", [drafter])
        assert got.completion_ids[0] == free[:cut]
        assert got.finish_reasons == ["length"]


def test_only_the_target_can_end_a_row():
    """A drafted stop id that the target would not emit ends nothing."""
    prompts = random_prompts([6])
    plain = run(SamplingParams(max_new_tokens=12, stop_ids=(2,)), prompts)
    drafter = ScriptedDrafter(known(prompts, plain), lambda truth, row, n: 2)
    got = run(SamplingParams(max_new_tokens=12, stop_ids=(2,)), prompts, "scripted-3", [drafter])
    assert_same(got, plain)


def test_the_context_edge():
    small = make_target(tiny_model(max_position_embeddings=16))
    prompts = random_prompts([15, 13, 4])
    params = SamplingParams(max_new_tokens=50)
    plain = run(params, prompts, which=small)
    assert [len(c) for c in plain.completion_ids] == [1, 3, 12]
    drafter = ScriptedDrafter(known(prompts, plain), oracle)
    assert_same(run(params, prompts, "scripted-4", [drafter], which=small), plain)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[3], []], "prompt 1 is empty"),
        ([[3] * 512], "longest possible prompt has 511"),
        ([[3, 97]], "outside 0..96"),
        ([[-1]], "outside 0..96"),
    ],
)
def test_bad_prompts_are_named(prompts, message):
    with pytest.raises(ValueError, match=message):
        run(PARAMS, prompts)


def test_a_row_that_can_never_fit_is_named():
    engine = RolloutEngine(target(), cache_gb=1e-6)
    with pytest.raises(ValueError, match=r"prompt 1 needs .* rollout.cache_gb"):
        engine.generate(random_prompts([3, 9]), PARAMS, keys(2))


def test_no_prompts_is_an_empty_rollout():
    assert run(PARAMS, []).completion_ids == []


def test_the_global_generator_is_untouched():
    before = torch.get_rng_state()
    run(PARAMS, random_prompts([5]))
    assert torch.equal(before, torch.get_rng_state())


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=7),
    max_new=st.integers(1, 12),
    stops=st.sets(st.integers(0, 96), max_size=12),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.5]),
    depth=st.integers(1, 6),
    width=st.integers(1, 3),
    max_rows=st.integers(0, 4),
    script=st.sampled_from(sorted(SCRIPTS)),
    seed=st.integers(0, 2**31),
)
def test_equality_is_a_property(
    lengths, max_new, stops, temperature, depth, width, max_rows, script, seed
):
    prompts = random_prompts(lengths, seed=seed)
    params = SamplingParams(max_new, temperature, stop_ids=tuple(stops))
    row_keys = [row_key(seed, 0, i) for i in range(len(prompts))]
    which = target(dtype=torch.float64)
    plain = run(params, prompts, which=which, row_keys=row_keys)
    drafter = ScriptedDrafter(known(prompts, plain, row_keys), SCRIPTS[script])
    got = run(
        params,
        prompts,
        Arm("scripted", depth, width).name,
        [drafter],
        which=which,
        max_rows=max_rows,
        row_keys=row_keys,
    )
    assert_same(got, plain)
    assert [len(a) for a in got.accepted] == [len(c) for c in got.completion_ids]


def right_then_wrong(truth: int, row: int, n: int) -> int:
    return truth + (n > 0)


class Forked(ScriptedDrafter):
    """The right draft as a leaf beside a wrong one that goes deeper."""

    def propose(self, rows, depth, width, nodes):
        chain = super().propose(rows, 1, 1, 1).tokens_BT
        wrong = (chain[:, 1:] + 1) % self.vocab
        parents = torch.tensor([[-1, 0, 0, 2]] * len(chain))
        return Draft(torch.cat([chain, wrong, wrong], 1), parents)


@pytest.mark.parametrize(
    ("draft", "arm", "marks"),
    [
        (oracle, "off", [0] * 7),
        (oracle, "scripted-2", [1, 1, 0, 1, 1, 0, 0]),  # nothing is drafted for a last token
        (SCRIPTS["anti_oracle"], "scripted-2", [2, 2, 2, 2, 2, 2, 0]),
        (right_then_wrong, "scripted-3", [1, 2, 1, 2, 1, 2, 0]),
        (right_then_wrong, "scripted-3x2", [1, 2, 1, 2, 1, 2, 0]),
        (None, "scripted-2x2", [1, 0, 1, 0, 1, 0, 0]),
    ],
)
def test_every_token_says_whether_it_was_drafted_corrected_or_neither(draft, arm, marks):
    params, prompts = SamplingParams(max_new_tokens=8), random_prompts([4])
    plain = run(params, prompts)
    drafter = (ScriptedDrafter if draft else Forked)(known(prompts, plain), draft or oracle)
    got = run(params, prompts, arm, [drafter])
    assert_same(got, plain)
    assert got.accepted == [[0, *marks]]  # the first token comes with the prompt


def test_a_drafted_token_that_ends_the_row_is_an_accepted_one():
    params, prompts = SamplingParams(max_new_tokens=7), random_prompts([4])
    tokens = run(params, prompts).completion_ids[0]
    params = SamplingParams(max_new_tokens=7, stop_ids=(tokens[2],))
    plain = run(params, prompts)
    drafter = ScriptedDrafter(known(prompts, plain), oracle)
    got = run(params, prompts, "scripted-3", [drafter])
    assert got.completion_ids == [tokens[:3]] and got.accepted == [[0, 1, 1]]


def test_caches_equal_a_fresh_prefill_after_random_rounds():
    which = target(dtype=torch.float64)
    prompts = random_prompts([7, 3, 5])
    params = SamplingParams(max_new_tokens=14)
    plain = run(params, prompts, which=which)
    drafter = ScriptedDrafter(known(prompts, plain), SCRIPTS["oracle_then_wrong"])
    engine = RolloutEngine(which, [drafter], Bandit([Arm.parse("scripted-3x2")]))
    checked = 0

    def check(engine):
        nonlocal checked
        for slot, row in enumerate(engine.active):
            tokens = row.prompt + row.tokens
            fresh = make_target(tiny_model(dtype=torch.float64), dtype=torch.float64)
            fresh.reserve(1, 64)
            fresh.forward(torch.tensor([tokens[:-1]]), torch.tensor([0]))
            for got, want in zip(which.cache.layers, fresh.cache.layers, strict=True):
                end = len(tokens) - 1
                torch.testing.assert_close(got[slot, :, :end], want[0, :, :end], atol=1e-5, rtol=0)
            checked += 1

    engine.on_step = check
    engine.generate(prompts, params, keys(3))
    assert checked > 5


def test_every_chunk_of_a_prompt_is_told_of():
    """10 tokens are three chunks of 4, of two siblings once; 5 are two more."""
    prompts, told = random_prompts([10, 5]), []
    prompts = [prompts[0], prompts[0], prompts[1]]
    params = SamplingParams(max_new_tokens=4)
    engine = RolloutEngine(target(), prefill_chunk=4)
    want = engine.generate(prompts, params, keys(3))
    engine.on_prefill = lambda: told.append(len(engine.active))
    assert_same(engine.generate(prompts, params, keys(3)), want)
    assert told == [0] * 5


def test_arms_have_one_spelling():
    nodes = {"off": 0, "ngram-3": 3, "eagle-4": 4, "eagle-3x4": 12, "eagle-4x3b5": 5,
             "merged-4x2": 8, "eagle-32x32": 63}  # fmt: skip
    for text, num in nodes.items():
        assert Arm.parse(text).name == text and Arm.parse(text).nodes == num
    wrong = ("", "ngram", "ngram-", "ngram-0", "eagle-3x", "eagle-99", "on", "eagle-4b3",
             "eagle-4x3b", "eagle-4x3b3", "eagle-4x3b64", "merged-3")  # fmt: skip
    for text in wrong:
        with pytest.raises(ValueError, match="arm"):
            Arm.parse(text)
    with pytest.raises(ValueError, match="ngram"):
        RolloutEngine(target(), (), Bandit([Arm.parse("ngram-2")]))


@pytest.mark.parametrize(
    ("backend", "max_rows", "first"), [("auto", 0, 5), ("auto", 2, 2), ("module", 0, 0)]
)
def test_first_tokens_come_with_the_prompts_of_the_first_rows(backend, max_rows, first):
    """They take no step and are no part of the accept length. A module's own head may round or cap
    its logits in another way than it does in its forward, so there they take one."""
    which = target(backend=backend)
    got = run(PARAMS, random_prompts([4, 4, 9, 1, 6]), which=which, max_rows=max_rows).stats
    assert got.first_tokens == first and got.step_tokens == got.tokens - first
    assert got.row_steps == got.step_tokens and got.accept_length == 1.0
    ended = run(SamplingParams(max_new_tokens=1), random_prompts([4, 4]), which=which).stats
    assert ended.tokens == 2 and ended.verify_steps == (0 if first else 1)
    assert ended.active_trace[0][1] == 2


def test_accept_statistics_by_hand():
    stats = SpecStats()
    stats.count("eagle", [3, 1, 0], [2, 2, 1])
    stats.count("ngram", [2, 0], [3, 1])
    stats.count("ngram", [2], [1])
    assert stats.sources == {"eagle": [2, 2], "ngram": [2, 1]}
    assert stats.drafted == [4, 3, 1] and stats.accepted == [3, 1, 0]
    assert stats.row_steps == 6 and stats.tokens == 10 and stats.accept_length == 10 / 6


@pytest.mark.parametrize(
    "bad", [{"temperature": -1}, {"top_p": 0}, {"max_new_tokens": 0}, {"min_p": 1.0}]
)
def test_bad_sampling_options_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_the_default_budget_is_60_percent_of_what_is_free_and_ours_already(monkeypatch):
    """Without what the last rollout left, every rollout would get fewer slots than the one before.
    Three of six rows fit: their cache is taken from the free memory, and the next time too."""
    which = make_target(tiny_model())
    per_row = 128 * which.cache_bytes_per_token
    engine, widths = RolloutEngine(which), []
    engine.on_step = lambda engine: widths.append(engine._num_slots)
    prompts, params = random_prompts([100] * 6), SamplingParams(max_new_tokens=27)
    want = run(params, prompts).completion_ids
    for _ in range(3):
        free = 3.2 * per_row / 0.6 - which.cache.num_bytes
        monkeypatch.setattr("minitlt.spec.free_bytes", lambda device, free=free: free)
        assert engine.generate(prompts, params, keys(6)).completion_ids == want
        assert set(widths) == {3} and which.cache.num_bytes == 3 * per_row


def test_free_memory_is_this_ranks_part_and_inside_the_cgroups_limit(monkeypatch):
    memory = SimpleNamespace(available=8 * 2**30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr("minitlt.slots._cgroup_room", lambda: math.inf)
    cpu = torch.device("cpu")
    assert free_bytes(cpu) == 8 * 2**30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert free_bytes(cpu) == 4 * 2**30
    monkeypatch.setattr("minitlt.slots._cgroup_room", lambda: 2 * 2**30)
    assert free_bytes(cpu) == 2**30


def test_the_cgroups_room_is_the_least_of_its_parents_and_counts_no_cached_files(tmp_path):
    process = tmp_path / "process"
    assert _cgroup_room(tmp_path, process) == math.inf
    process.write_text("4:memory:/old\n0::/job/step\n")
    assert _cgroup_room(tmp_path, process) == math.inf
    for folder, limit in (("job/step", "max"), ("job", "1000")):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.max").write_text(f"{limit}\n")
        (place / "memory.current").write_text("700\n")
        (place / "memory.stat").write_text("anon 200\ninactive_file 150\nactive_file 9\n")
    assert _cgroup_room(tmp_path, process) == 1000 - 700 + 150
    (tmp_path / "job/step/memory.max").write_text("800\n")
    assert _cgroup_room(tmp_path, process) == 800 - 700 + 150


def test_a_tree_larger_than_depth_times_width_has_its_room():
    """A drafter may fill its node budget: 16 nodes behind a row that ends just below 128."""

    class Bushy(ScriptedDrafter):
        def propose(self, rows, depth, width, nodes):
            num = len(rows.roots_B)
            tokens = torch.cat([rows.roots_B[:, None], torch.full((num, nodes), 7)], 1)
            return Draft(tokens, torch.tensor([[-1] + [0] * nodes] * num))

    prompts = random_prompts([100])
    params = SamplingParams(max_new_tokens=27)
    plain = run(params, prompts)
    got = run(params, prompts, "scripted-2x4b16", [Bushy({}, oracle)])
    assert got.completion_ids == plain.completion_ids
