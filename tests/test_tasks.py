"""Tasks and rewards: sources, scorers, bad input, and that model text is never evaluated."""

import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from minitlt import rewards, tasks
from minitlt.rewards import GuardedReward, extract_answer, resolve_rewards
from minitlt.tasks import load_task


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def score(reward: Any, texts: list[str], **columns: Any) -> list[float]:
    completions = [said(text) for text in texts]
    return reward(prompts=["?"] * len(texts), completions=completions, **columns)


def test_import_is_light() -> None:
    code = "import sys, minitlt.tasks, minitlt.models; print({'torch', 'reasoning_gym', "
    code += "'transformers', 'datasets', 'sympy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=Path(tasks.__file__).parents[1],
        check=True,
    )
    assert done.stdout.strip() == "set()"


def test_reasoning_gym_task_scores_with_its_own_scorer() -> None:
    task = load_task("chain_sum", size=6, seed=3, min_terms=2, max_terms=2)
    again = load_task("reasoning_gym:chain_sum", size=6, seed=3, min_terms=2, max_terms=2)
    other = load_task("chain_sum", size=6, seed=4, min_terms=2, max_terms=2)
    assert task.rows == again.rows and task.rows != other.rows and len(task.rows) == 6
    assert task.reward_weights == [1.0, 0.2]
    right = [row["answer"] for row in task.rows]
    entry = [row["entry"] for row in task.rows]
    correct, form = task.reward_funcs
    assert (correct.__name__, form.__name__) == ("chain_sum", "answer_format")
    assert score(correct, [f"so\nAnswer: {a}" for a in right], entry=entry) == [1.0] * 6
    assert score(correct, [f"**Answer: {a}.**" for a in right], entry=entry) == [1.0] * 6
    assert max(score(correct, ["Answer: 7777"] * 6, entry=entry)) < 0.1
    assert score(correct, [f"it is {a}" for a in right], entry=entry) == [0.0] * 6  # no form
    plain = correct(prompts=[""], completions=[f"Answer: {right[2]}"], entry=[2])  # standard form
    assert plain == [1.0]


def test_partial_credit_is_kept() -> None:
    task = load_task("spell_backward", size=1, min_word_len=4, max_word_len=4)
    answer = task.rows[0]["answer"]
    wrong = answer[:2] + "##"
    assert score(task.reward_funcs[0], [f"Answer: {wrong}"], entry=[0]) == [0.5]


def test_prompts() -> None:
    task = load_task(
        "chain_sum",
        size=1,
        system="Be brief.",
        suffix="Say 'Answer: '.",
        example=("1 + 1 =", "Answer: 2"),
    )
    roles = [turn["role"] for turn in task.rows[0]["prompt"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert task.rows[0]["prompt"][1]["content"] == "1 + 1 =\nSay 'Answer: '."
    assert task.rows[0]["prompt"][3]["content"].endswith("=\nSay 'Answer: '.")
    plain = load_task("chain_sum", size=1, chat=False, suffix="").rows[0]["prompt"]
    assert isinstance(plain, str) and plain.endswith("=\n\n")
    assert [turn["role"] for turn in load_task("chain_sum", size=1).rows[0]["prompt"]] == ["user"]


def test_dataset_has_the_columns_that_rewards_need() -> None:
    task = load_task("letter_counting", size=3)
    assert list(task.rows[0]) == ["prompt", "answer", "entry"]


@pytest.mark.parametrize("name", ["chain_sum", "pool_matrix", "list_functions"])
def test_global_random_state_is_untouched_and_rows_depend_on_the_seed_alone(name: str) -> None:
    random.seed(1)
    np.random.seed(1)
    before, before_numpy = random.getstate(), np.random.get_state()
    rows = load_task(name, size=3, seed=5).rows
    assert random.getstate() == before
    assert all(map(np.array_equal, np.random.get_state(), before_numpy))
    random.seed(2)
    np.random.seed(2)
    assert load_task(name, size=3, seed=5).rows == rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "chain_sums"}, r"unknown task 'chain_sums'; did you mean 'chain_sum'"),
        ({"name": "reasoning_gym:lettercounting"}, r"did you mean 'letter_counting'"),
        ({"name": "gsm8"}, r"did you mean 'gsm8k'"),
        ({"name": "composite"}, r"unknown task"),
        ({"name": "chain_sum", "min_term": 2}, r"no option 'min_term'; did you mean 'min_terms'"),
        ({"name": "chain_sum", "min_terms": 5, "max_terms": 2}, r"cannot be generated.*max_terms"),
        ({"name": "chain_sum", "size": 0}, r"size must be at least 1"),
        ({"name": "chain_sum", "example": ["a"]}, r"a question and a reply"),
        ({"name": "chain_sum", "rewards": ["acuracy_reward"]}, r"did you mean 'accuracy_reward'"),
        ({"name": "chain_sum", "rewards": ["no_such_module.f"]}, r"cannot import 'no_such_module'"),
        ({"name": "chain_sum", "rewards": ["math.sqr"]}, r"no function 'sqr'; did you mean 'sqrt'"),
        ({"name": "chain_sum", "reward_weights": [1.0]}, r"1 reward_weights for 2 rewards"),
        ({"name": "gsm8k", "colum": "x"}, r"no option 'colum'"),
        ({"name": "none.jsonl"}, r"cannot read none.jsonl: No such file"),
    ],
)
def test_bad_calls_get_one_clear_line(call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_task(**call)
    assert "\n" not in str(caught.value)


def test_extract_answer() -> None:
    cases = {
        "Answer: 5": "5",
        "I think.\n\nThe **Answer:** 12 apples ": "12 apples",
        "Answer: 1\nno, wait\nanswer : 2\n": "2",
        "<answer> [1, 2] </answer> Answer: 3": "[1, 2]",
        "The answer is 5": None,
        "Answer:\n5": None,
        "": None,
    }
    assert {text: extract_answer(text) for text in cases} == cases
    bare = {"5.": "5", "**5**": "5", "$\\boxed{7}$": "7", '"sun"': "sun", "['1']": "['1']"}
    assert {text: rewards.bare_answer(text) for text in bare} == bare


def test_format_reward() -> None:
    good = ["4 and 1.\nAnswer: 5", "Answer: 5\n\n", "**Answer: 5**"]
    bad = ["Answer: 5\nBye", "Answer: 5\nAnswer: 5", "so Answer: 5", "Answer:", "5", ""]
    assert score(rewards.answer_format, good) == [1.0] * 3
    assert score(rewards.answer_format, bad) == [0.0] * 6


def test_exact_and_math_rewards() -> None:
    texts = ["Answer: 1/2", "Answer: 0.5", r"so $\boxed{\frac{1}{2}}$", "Answer: 2", "1/2"]
    wanted = ["1/2"] * 5
    assert score(rewards.exact_answer, texts, answer=wanted) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert score(rewards.math_answer, texts, answer=wanted) == [1.0, 1.0, 1.0, 0.0, 1.0]
    assert score(rewards.math_answer, ["Answer: red"], answer=["red"]) == [1.0]
    found: list[float] = []
    thread = threading.Thread(
        target=lambda: found.extend(  # no SIGALRM outside the main thread
            score(rewards.math_answer, texts[:2], answer=wanted[:2])
        )
    )
    thread.start()
    thread.join()
    assert found == [1.0, 1.0]


def test_power_towers_cost_no_time() -> None:
    began = time.monotonic()
    towers = [r"Answer: 9^9^9^9", r"\boxed{9^{9^{9^9}}}", "Answer: 9**9**9", "Answer: 2^99999"]
    assert score(rewards.math_answer, towers, answer=["5"] * 4) == [0.0] * 4
    assert time.monotonic() - began < 2


def test_reward_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "def length(completions, **_):\n    return [len(c[0]['content']) for c in completions]\n"
        "value = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = [
        "exact",
        "accuracy_reward",
        "reasoning_accuracy_reward",
        "think_format_reward",
        "get_soft_overlong_punishment",
        "my_rewards.length",
        lambda **_: [0.25],
    ]
    functions = resolve_rewards(names)
    assert score(functions[-2], ["abc"]) == [3.0] and score(functions[-1], ["abc"]) == [0.25]
    assert functions[-2].__name__ == "length"
    assert score(functions[1], [r"$\boxed{2}$"], solution=["2"]) == [1.0]
    assert score(functions[3], ["<think>\na\n</think>\nb"]) == [1.0]
    assert score(functions[4], ["abc"], completion_ids=[[1] * 1280]) == [-1.0]
    assert resolve_rewards(functions) == functions and len(resolve_rewards("exact")) == 1
    with pytest.raises(ValueError, match="no function 'value'"):
        resolve_rewards(["my_rewards.value"])
    for name, text in {"torn": "def f(:", "boom": "1 / 0", "leaves": "raise SystemExit(0)"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        with pytest.raises(ValueError, match=f"cannot import '{name}'"):
            resolve_rewards([f"{name}.f"])


def test_guarded_reward_scores_only_the_row_at_fault_zero() -> None:
    def picky(completions: list[Any], word: list[str], **_: Any) -> list[float | None]:
        if "bad" in word:
            raise SystemExit("boom\nsecond line")  # a function may not end the run that way either
        return [None if w == "skip" else float("nan") if w == "nan" else 1.0 for w in word]

    reward = GuardedReward(picky)
    words = ["a", "bad", "skip", "nan"]
    assert score(reward, ["x"] * 4, word=words, trainer_state=object()) == [1.0, 0.0, None, 0.0]
    assert reward.failures == 2 and "score nan" in reward.last_error
    assert score(reward, ["x"], word=["a"]) == [1.0] and reward.failures == 2
    with pytest.raises(ValueError, match="'short' returned 1 values for 2 completions"):

        def short(**_: Any) -> list[float]:
            return [1.0]

        score(GuardedReward(short), ["a", "b"])


def test_guarded_reward_awaits_and_takes_numbers_only() -> None:
    async def later(completions: list[Any], **_: Any) -> list[Any]:
        return [True, "no number", 0.5, None][: len(completions)]

    reward = GuardedReward(later)
    assert score(reward, ["a"] * 4) == [1.0, 0.0, 0.5, None]
    assert reward.failures == 1 and "score 'no number'" in reward.last_error


def test_guarded_reward_that_hangs_ends() -> None:
    def hang(completions: list[Any], **_: Any) -> list[float]:
        if any("slow" in c[0]["content"] for c in completions):
            time.sleep(30)
        return [1.0] * len(completions)

    reward = GuardedReward(hang, time_limit=0.2)
    began = time.monotonic()
    assert score(reward, ["slow", "fast"]) == [0.0, 1.0]
    assert time.monotonic() - began < 5 and "TimeoutError" in reward.last_error


def swallow(completions: list[Any], **_: Any) -> list[float]:
    """Goes on after any Exception for ever, and even after two of what is none."""
    for _ in range(2):
        with contextlib.suppress(BaseException):
            time.sleep(30)
    while True:
        with contextlib.suppress(Exception):
            time.sleep(30)


def math_then_hang(completions: list[Any], **_: Any) -> list[float]:
    """math-verify's own alarm replaces any that was set before."""
    rewards.math_answer(["?"], [f"{c[0]['content']} 1/2" for c in completions], answer=["0.5"])
    time.sleep(30)
    return [1.0]


def backtrack(completions: list[Any], **_: Any) -> list[float]:
    """Never gives up the interpreter: no other thread runs."""
    return [float(bool(re.match("(a+)+$", "a" * 60 + "b")))]


@pytest.mark.parametrize("function", [swallow, math_then_hang, backtrack])
def test_rewards_that_are_hard_to_interrupt_end(function: Any) -> None:
    numbers = signal.SIGALRM, signal.SIGVTALRM
    before = [signal.getsignal(number) for number in numbers]
    reward, began = GuardedReward(function, time_limit=0.4), time.monotonic()
    assert score(reward, ["x"]) == [0.0]
    assert time.monotonic() - began < 10 and "TimeoutError" in reward.last_error
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("library", "said"),
    [("CDLL", "minitlt: reward deadlock hangs, and nothing"), ("PyDLL", "in deadlock")],
)
def test_a_reward_that_hangs_in_native_code_ends_the_process(library: str, said: str) -> None:
    """PyDLL keeps the interpreter's lock: not even a thread can speak."""
    code = f"""
import ctypes
from minitlt import rewards

def deadlock(completions, **_):
    lock, library = ctypes.create_string_buffer(64), ctypes.{library}(None)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)

rewards.NATIVE_SECONDS = 0.5
rewards.GuardedReward(deadlock, time_limit=0.2)(completions=["x"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1 and said in done.stderr
    assert library == "PyDLL" or len(done.stderr.splitlines()) == 1


def test_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    messages = [{"role": "user", "content": "2+2?"}]
    lines = [
        {"prompt": "1+1?", "answer": 2, "level": 1},
        {"prompt": messages, "answer": "4", "level": 2},
    ]
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    task = load_task(str(path))
    assert task.rows[0]["prompt"][-1]["content"] == f"1+1?\n{tasks.SUFFIX}"
    assert task.rows[1] == {"prompt": messages, "answer": "4", "level": 2}
    assert list(task.rows[0]) == ["prompt", "answer", "level"]
    assert score(task.reward_funcs[0], ["Answer: 2", "Answer: 5"], answer=["2", "4"]) == [1.0, 0.0]
    assert len(load_task(str(path), size=1).rows) == 1
    assert load_task(str(path), rewards=["math"]).reward_weights == [1.0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 1}", "not JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": "a"}', "no 'answer'"),
        ('{"answer": "a"}', "no 'prompt'"),
        ('{"prompt": "", "answer": 1}', "must be text or a list"),
        ('{"prompt": [{"role": "user"}], "answer": 1}', "must be text or a list"),
        ('{"prompt": "a", "answer": [1]}', "'answer' must be text or a number, not list"),
        ('{"prompt": "a", "answer": 1, "completions": 2}', "'completions' is a name that TRL uses"),
        ('{"prompt": "a", "answer": 1, "more": 2}', "columns .* differ"),
        ("[" * 100000, "not JSON"),
        ('{"prompt": "a", "answer": "\\ud800"}', "surrogates not allowed"),
    ],
)
def test_bad_jsonl_rows_are_named_by_line(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "a", "answer": 1}\n\n' + line)
    with pytest.raises(ValueError, match=rf"d\.jsonl line 3: .*{message}"):
        load_task(str(path))


def test_unreadable_jsonl(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.jsonl").mkdir()
    cases = {"empty": "holds no rows", "latin": "cannot read", "folder": "cannot read"}
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            load_task(str(tmp_path / f"{name}.jsonl"))


KEYS = st.sampled_from(["prompt", "answer", "role", "content"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(JSON.map(json.dumps) | st.text(), max_size=3))
def test_any_jsonl_loads_or_gives_a_clear_error(tmp_path_factory: Any, lines: list[str]) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "d.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    try:
        task = load_task(str(path))
    except ValueError as error:
        assert str(path) in str(error)
    else:
        assert all(row["prompt"] and isinstance(row["answer"], str) for row in task.rows)


def test_hub_set_is_given_up_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("minitlt.models.hub_answers", lambda url, timeout: "the Hub is away")
    with pytest.raises(ValueError, match=r"'openai/gsm8k' cannot be loaded: the Hub is away"):
        load_task("gsm8k")


def test_hub_set(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    data = datasets.Dataset.from_list(
        [
            {"question": "How many?", "answer": "5 and 5.\n#### 1,234"},
            {"question": "b", "answer": "2"},
        ]
    )
    asked: list[Any] = []
    monkeypatch.setattr("minitlt.models.hub_answers", lambda url, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k)) or data)
    task = load_task("gsm8k", size=1, split="test")
    assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    assert len(task.rows) == 1 and task.rows[0]["answer"] == "1234"
    assert score(task.reward_funcs[0], ["Answer: 1,234"], answer=["1234"]) == [1.0]
    with pytest.raises(ValueError, match="no column 'query'"):
        load_task("hub:a/b", question="query")


ATTACKS = [
    "__import__('pathlib').Path('{}').touch()",
    "[__import__('pathlib').Path('{}').touch()]",
    "[open('{}', 'w')]",
    "open('{}', 'w')",
    "(lambda: open('{}', 'w'))()",
    "  open('{}', 'w')",
    "sqrt(open('{}', 'w'))",
    "x.__class__.__init__.__globals__['__builtins__']['open']('{}', 'w')",
    "1 if open('{}', 'w') else 2",
    "[c for c in open('{}', 'w').name]",
    "5 + open('{}', 'w').fileno()",
    "f\"{{open('{}', 'w')}}\"",
    "sympify(\"open('{}', 'w')\")",
]
EVALUATING = {"string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "number_sorting"}
SYMPY = {
    "countdown",
    "puzzle24",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
}


@pytest.mark.parametrize("name", sorted(EVALUATING | SYMPY))
def test_model_text_is_never_evaluated(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    task = load_task(name, size=1)
    texts = [
        form.format(attack.format(canary))
        for attack in ATTACKS
        for form in ("Answer: {}", "<answer>{}</answer>", "<answer>\n\t{}</answer>")
    ]
    scores = score(task.reward_funcs[0], texts, entry=[0] * len(texts))
    assert not canary.exists() and max(scores) < 0.5
    right = f"<answer>{task.rows[0]['answer']}</answer>"
    assert score(task.reward_funcs[0], [right], entry=[0]) == [1.0]
    began = time.monotonic()
    deep = "Answer: " + "(" * 400 + ")" * 400
    score(task.reward_funcs[0], ["Answer: 9**9**9**9", deep], entry=[0, 0])
    assert time.monotonic() - began < 3


def test_the_scorers_that_evaluate_are_known() -> None:
    """A new reasoning-gym release whose scorers evaluate more is caught here."""
    found: dict[str, set[str]] = {}
    for name, (cls, _) in reasoning_gym.factory.DATASETS.items():
        if danger := rewards._dangers(cls.__new__(cls)):
            found[name] = danger
    assert {name for name, danger in found.items() if "eval" in danger} == EVALUATING
    assert {name for name, danger in found.items() if "sympy" in danger} == SYMPY


def test_harmless() -> None:
    literals = ["['a', 'b']", "[[1, 2], [3, -4]]", "'x'", "{'a': 1}", "_ Q _ _"]
    arithmetic = ["x**2/2 + C", "3*x**4 - 2*x*y", "sin(2*x)/2", "(8 / (3 - 8 / 3))", "2.5e3 + pi"]
    for text in literals:
        assert rewards.is_harmless(text, {"eval"})
    for text in arithmetic:
        assert rewards.is_harmless(text, {"sympy"})
    bad = [
        "9**9**9",
        "(x**2)**3",
        "2**999",
        "f(x)",
        "x.y",
        "__name__",
        "abc",
        "x if y else z",
        "lambda: 1",
        "[1]*9",
        "sqrt(x=1)",
        "'a'",
        "not x",
        "x y",
        "1,2",
        "x[0]",
    ]
    for text in bad:
        assert not rewards.is_harmless(text, {"sympy"}), text
    assert not rewards.is_harmless(" 1", {"eval"}) and not rewards.is_harmless("1" * 600, {"eval"})


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="x1.9*()[]'\"_, +-/lambda:\n\\{}", max_size=30))
def test_harmless_text_evaluates_without_names_or_calls(text: str) -> None:
    """What passes for `eval` is a literal, arithmetic, or refused by the compiler."""
    if rewards.is_harmless(text, {"eval"}):
        try:
            names = compile(text, "answer", "eval").co_names
        except (SyntaxError, ValueError):
            return
        assert all(name in rewards._MATH_NAMES or len(name) == 1 for name in names)
        assert not re.search(r"\.[A-Za-z_]", text) or "'" in text or '"' in text
