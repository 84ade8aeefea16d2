"""What the policy is trained on: prompts, and functions that score completions.

`load_task(name)` gives a `Task`: rows with a `prompt` and the columns that its rewards need, and
reward functions of TRL's signature. Three sources: any reasoning-gym data set by name, with its
own scorer; Hub data sets of mathematics, scored with math-verify; JSONL files. `resolve_rewards`
turns reward names (ours, TRL's, dotted paths) into functions.

Two rules hold for every reward here. A function that raises or hangs does not end the run: the
completion gets 0.0 and is counted (`GuardedReward`). And text that a model wrote is never
evaluated: some reasoning-gym scorers call `eval` or sympy on the answer, so theirs see only
answers that are plain literals or plain arithmetic (`is_harmless`).

Data sets are generated up front from an explicit seed; the global random state is left as it was.
Left out: mixtures of tasks, curricula, streaming. Use `load_dataset` and TRL for those.

    task = load_task("chain_sum", size=200, seed=1, max_terms=2)
    GRPOTrainer(..., train_dataset=task.to_dataset(), reward_funcs=task.reward_funcs)
"""

import ast
import asyncio
import contextlib
import dataclasses
import inspect
import logging
import math
import os
import random
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from minitlt.common import one_line, read_jsonl, suggest

Row = dict[str, Any]
Reward = Callable[..., Sequence[float | None]]

SUFFIX = "Think step by step. End with a line 'Answer: ' and the result."

_log = logging.getLogger(__name__)


@dataclass
class Task:
    """Rows to train on, the functions that score them, and the weights of their sum."""

    name: str
    rows: list[Row]
    reward_funcs: list["GuardedReward"]
    reward_weights: list[float]

    def to_dataset(self) -> Any:
        """The rows as a `datasets.Dataset`, as TRL's trainers take it."""
        return import_module("datasets").Dataset.from_list(self.rows)


@dataclass(frozen=True)
class PromptStyle:
    """How a question becomes a prompt.

    Attributes:
        system: system message; None leaves the chat template's default.
        suffix: added to the question on a line of its own.
        example: one solved example (question, reply), shown as an earlier turn.
        chat: False gives one plain string, for base models without a chat template.
    """

    system: str | None = None
    suffix: str = SUFFIX
    example: Sequence[str] | None = None
    chat: bool = True

    def prompt(self, question: str) -> str | list[dict[str, str]]:
        """The messages (or the plain string) for one question."""
        turns = [("system", self.system)] if self.system is not None else []
        if self.example is not None:
            turns += [("user", self._asked(self.example[0])), ("assistant", self.example[1])]
        turns.append(("user", self._asked(question)))
        if self.chat:
            return [{"role": role, "content": str(content)} for role, content in turns]
        return "\n\n".join(str(content) for _, content in turns) + "\n\n"

    def _asked(self, question: str) -> str:
        return f"{question.strip()}\n{self.suffix}" if self.suffix else question.strip()


def load_task(
    name: str,
    *,
    size: int = 500,
    seed: int = 0,
    system: str | None = None,
    suffix: str | None = None,
    example: list[str] | None = None,
    chat: bool = True,
    rewards: str | list[str | Reward] | None = None,
    reward_weights: list[float] | None = None,
    **options: Any,
) -> Task:
    """Load a task by name.

    Args:
        name: a reasoning-gym data set (`chain_sum` or `reasoning_gym:chain_sum`), a Hub set
            (`gsm8k`, `math500` or `hub:owner/name`), or a path that ends in `.jsonl`.
        size: rows at most (reasoning-gym: rows generated).
        seed: of generated rows.
        system, suffix, example, chat: see `PromptStyle`; `suffix` is None for the default.
            JSONL prompts that are messages are taken as they are.
        rewards: names or functions (see `resolve_rewards`) instead of the task's own.
        reward_weights: one per reward; default 1.0, and 0.2 for the format of the answer.
        options: the data set's own options; for Hub sets `config`, `split`, `question`, `answer`.

    Raises:
        ValueError: unknown task, option or reward, or a bad file; the line says what is right.
    """
    if size < 1:
        raise ValueError(f"task {name!r}: size must be at least 1, not {size}")
    if example is not None and len(example) != 2:
        raise ValueError(f"task {name!r}: example must be a question and a reply")
    style = PromptStyle(system, SUFFIX if suffix is None else suffix, example, chat)
    given = None if rewards is None else resolve_rewards(rewards)  # before anything is fetched
    own: list[str | Reward]
    if name.endswith(".jsonl"):
        rows, own = _jsonl_rows(Path(name), size, style, options), ["exact", "format"]
    elif name in HUB_SETS or name.startswith("hub:"):
        rows, own = _hub_rows(name, size, style, options), ["math", "format"]
    else:
        rows, scorer = _gym_rows(name, size, seed, style, options)
        own = [scorer, "format"]
    functions = resolve_rewards(own) if given is None else given
    names = [function.__name__ for function in functions]
    weights = reward_weights or [0.2 if name == "answer_format" else 1.0 for name in names]
    if len(weights) != len(names):
        raise ValueError(f"task {name!r}: {len(weights)} reward_weights for {len(names)} rewards "
                         f"({', '.join(names)})")  # fmt: skip
    return Task(name, rows, functions, [float(weight) for weight in weights])


def encode_prompt(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt as TRL sees it: text as it is, messages through the chat template.

    ValueError when the template is torn or refuses the messages.
    """
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    try:
        turns = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    except Exception as error:  # templates are programs
        raise ValueError(f"the model's chat template fails: {one_line(error)}") from error
    return list(turns["input_ids"])


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion in TRL's standard (str) or conversational (messages) form."""
    if isinstance(completion, str):
        return completion
    return "\n".join(
        str(turn.get("content") or "") for turn in completion if turn.get("role") == "assistant"
    )


_ANSWER_LINE = re.compile(r"^.*?\banswer\s*:[ \t*]*(\S.*?)\s*$", re.IGNORECASE | re.MULTILINE)
_ANSWER_TAG = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


def extract_answer(text: str) -> str | None:
    """The final answer in `text`: the last `<answer>` tag or `Answer:` line; None without one."""
    found = _ANSWER_TAG.findall(text) or _ANSWER_LINE.findall(text)
    return found[-1] if found else None


def bare_answer(answer: str) -> str:
    """`answer` without markdown, quotes, \\boxed{} and a final full stop: "**5.**" -> "5"."""
    answer = answer.strip().strip("*`$ ")
    if boxed := re.fullmatch(r"\\boxed\{(.*)\}\.?", answer):
        answer = boxed[1]
    answer = answer.removesuffix(".").strip("*`$ ")
    if len(answer) > 2 and answer[0] == answer[-1] and answer[0] in "\"'":
        answer = answer[1:-1]
    return answer


def answer_format(prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
    """1.0 if the last line that is not blank is an `Answer:` line, the only one, else 0.0."""
    scores = []
    for completion in completions:
        text = completion_text(completion).strip()
        last = text.rsplit("\n", 1)[-1]
        good = re.match(r"[*\s]*answer\s*:", last, re.IGNORECASE) and _ANSWER_LINE.match(last)
        scores.append(float(bool(good) and len(_ANSWER_LINE.findall(text)) == 1))
    return scores


def exact_answer(
    prompts: list[Any], completions: list[Any], answer: list[Any], **_: Any
) -> list[float]:
    """1.0 if the final answer (or the whole text, if none is marked) equals column `answer`."""
    pairs = zip(map(_final, completions), answer, strict=True)
    return [float(_is_equal(found, wanted)) for found, wanted in pairs]


def _final(completion: str | list[dict[str, Any]]) -> str:
    text = completion_text(completion)
    return extract_answer(text) or text


def _is_equal(found: str, wanted: Any) -> bool:
    return str(wanted).strip() in (found.strip(), bare_answer(found))


_POWER_TOWER = re.compile(r"(\^|\*\*)[\s{(]*[^\s+*/^]*(\^|\*\*)|(\^|\*\*)[\s{(]*\d{4}|\d{4}\s*!")


def math_answer(
    prompts: list[Any], completions: list[Any], answer: list[Any], **_: Any
) -> list[float]:
    """1.0 if math-verify finds the final answer equal to column `answer` (LaTeX or plain)."""
    math_verify: Any = import_module("math_verify")
    # math-verify keeps its time limits with SIGALRM, which only the main thread may set.
    limit = 3 if threading.current_thread() is threading.main_thread() else None
    if limit is None:
        for module in ("parser", "grader"):
            logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    scores = []
    for found, wanted in zip(map(_final, completions), answer, strict=True):
        if _is_equal(found, wanted):
            scores.append(1.0)
        elif _POWER_TOWER.search(found):  # 9^9^9^9 would only run into the time limit
            scores.append(0.0)
        else:
            gold = math_verify.parse(f"${wanted}$", parsing_timeout=limit)
            parsed = math_verify.parse(found, parsing_timeout=limit)
            scores.append(float(math_verify.verify(gold, parsed, timeout_seconds=limit)))
    return scores


class GuardedReward:
    """A reward function that cannot end a run: errors become 0.0 and are counted.

    If the function (an async one is awaited) raises, it is called again row by row, so that only
    the rows at fault score 0.0. NaN, infinities and what is no number become 0.0 too; None ("does
    not apply", TRL's rule) stays. In the main thread a call gets `time_limit` seconds, and as many
    again for the row-by-row pass.

    Attributes:
        failures: rows that got 0.0 for an error so far.
        last_error: what the last of them was.

    Raises:
        ValueError: the function returned a list of another length, which is a bug to fix.
    """

    def __init__(self, function: Reward, time_limit: float = 20.0) -> None:
        self.function = function
        self.time_limit = time_limit
        self.failures = 0
        self.last_error = ""
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(
        self, prompts: list[Any], completions: list[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        columns |= {"prompts": prompts, "completions": completions}
        columns["completion_ids"] = completion_ids
        count = len(completions)
        try:
            scores = self._call(columns, self.time_limit)
        except (Exception, SystemExit) as error:
            self._note(error)
            return [self._score_row(columns, row, count) for row in range(count)]
        if len(scores) != count:
            raise ValueError(f"reward {self.__name__!r} returned {len(scores)} values for {count} "
                             "completions; it must return one (a float or None) for each"
                             )  # fmt: skip
        return [self._finite(score) for score in scores]

    def _call(self, columns: dict[str, Any], seconds: float) -> list[Any]:
        with time_limit(seconds):
            scores = self.function(**columns)
            return list(asyncio.run(scores) if inspect.iscoroutine(scores) else scores)

    def _score_row(self, columns: dict[str, Any], row: int, count: int) -> float | None:
        one = {
            name: value[row : row + 1] if isinstance(value, list) and len(value) == count else value
            for name, value in columns.items()
        }
        try:
            (score,) = self._call(one, self.time_limit / count)
        except (Exception, SystemExit) as error:
            self.failures += 1
            self._note(error)
            return 0.0
        return self._finite(score)

    def _finite(self, score: Any) -> float | None:
        with contextlib.suppress(TypeError, ValueError):
            if score is None or math.isfinite(float(score)):
                return None if score is None else float(score)
        self.failures += 1
        self._note(ValueError(f"score {score!r}"))
        return 0.0

    def _note(self, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if said != self.last_error:
            _log.warning("reward %s failed and scores 0.0: %s", self.__name__, said)
        self.last_error = said


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the body after `seconds`; no limit outside the main thread."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def ring(*_: Any) -> None:
        raise TimeoutError(f"no result within {seconds:.3g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


_OWN: dict[str, Reward] = {"exact": exact_answer, "math": math_answer, "format": answer_format}
_TRL = ["accuracy_reward", "reasoning_accuracy_reward", "think_format_reward",
        "get_soft_overlong_punishment"]  # fmt: skip


def resolve_rewards(rewards: str | Sequence[str | Reward]) -> list[GuardedReward]:
    """Turn names into guarded reward functions.

    Names: `exact`, `math`, `format` (this module), the names that `trl grpo` knows (with the same
    parameters), or a dotted path to a function (`my_module.my_reward`; the working directory is
    searched too). Functions are taken as they are.

    Raises:
        ValueError: unknown name, with the nearest valid ones, or a path that cannot be imported.
    """
    named = [rewards] if isinstance(rewards, str) else rewards
    functions = [_reward_by_name(r) if isinstance(r, str) else r for r in named]
    if odd := [function for function in functions if not callable(function)]:
        raise ValueError(f"reward {odd[0]!r} is neither a name nor a function")
    return [f if isinstance(f, GuardedReward) else GuardedReward(f) for f in functions]


def _reward_by_name(name: str) -> Reward:
    if name in _OWN:
        return _OWN[name]
    if name in _TRL:
        function = getattr(import_module("trl.rewards"), name)
        if name == "get_soft_overlong_punishment":  # the parameters `trl grpo` gives it
            return function(max_completion_len=1280, soft_punish_cache=256)
        return function
    module_name, dot, attribute = name.rpartition(".")
    if not dot:
        raise ValueError(f"unknown reward {name!r}; {suggest(name, [*_OWN, *_TRL])}, or a dotted "
                         "path to a function (my_module.my_reward)")  # fmt: skip
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # of odd names ("..x"), and all that the file raises
        said = (
            f"cannot import {module_name!r} ({error}); give a module that can be imported from here"
        )
        raise ValueError(f"reward {name!r}: {said}, then the function") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ValueError(f"reward {name!r}: {module_name!r} has no function {attribute!r}; "
                         f"{suggest(attribute, names)}")  # fmt: skip
    return function


def _gym_rows(
    name: str, size: int, seed: int, style: PromptStyle, options: dict[str, Any]
) -> tuple[list[Row], Reward]:
    """Rows of a reasoning-gym data set and its scorer. Column `entry` is the row's index."""
    import_module("reasoning_gym")  # registers the data sets
    factory: Any = import_module("reasoning_gym.factory")
    known = sorted(set(factory.DATASETS) - {"composite"})  # a mixture, not a task
    short = name.removeprefix("reasoning_gym:")
    if short not in known:
        raise ValueError(f"unknown task {name!r}; {suggest(short, [*known, *HUB_SETS])} (a "
                         "reasoning-gym data set, gsm8k, math500, hub:owner/name or a .jsonl file)"
                         )  # fmt: skip
    _known_options(short, options, [f.name for f in dataclasses.fields(factory.DATASETS[short][1])])
    with _random_state(seed):
        try:
            dataset = factory.create_dataset(short, seed=seed, size=size, **options)
            entries = [dataset[index] for index in range(size)]
        except Exception as error:  # third-party generators raise anything, often AssertionError
            raise ValueError(
                f"task {short!r} cannot be generated with {options}: "
                f"{type(error).__name__}: {error}"
            ) from error
    rows = [
        {"prompt": style.prompt(entry["question"]), "answer": str(entry["answer"]), "entry": index}
        for index, entry in enumerate(entries)
    ]
    return rows, _gym_reward(short, dataset, entries)


def _known_options(name: str, options: dict[str, Any], valid: Sequence[str]) -> None:
    for option in options:
        if option not in valid:
            raise ValueError(f"task {name!r} has no option {option!r}; {suggest(option, valid)}")


def _gym_reward(name: str, dataset: Any, entries: list[Any]) -> Reward:
    dangers = _dangers(dataset)

    def scored(answer: str, entry: Any) -> float:
        if dangers and answer != entry["answer"] and not is_harmless(answer, dangers):
            return 0.0
        return float(dataset.score_answer(answer, entry))

    def gym_score(
        prompts: list[Any], completions: list[Any], entry: list[int], **_: Any
    ) -> list[float | None]:
        scores: list[float | None] = []
        for completion, index in zip(completions, entry, strict=True):
            found = extract_answer(completion_text(completion))
            tries = [] if found is None else {found.strip(), bare_answer(found)}
            scores.append(max((scored(answer, entries[index]) for answer in tries), default=0.0))
        return scores

    gym_score.__name__ = name
    return gym_score


def _dangers(dataset: Any) -> set[str]:
    """Which evaluators ("eval", "sympy") the scorer of a reasoning-gym data set calls."""
    try:
        source = inspect.getsource(type(dataset).score_answer)
    except OSError:  # no source to read: take the worst
        return {"eval", "sympy"}
    found = set()
    if re.search(r"\b(eval|exec)\(", source):
        found.add("eval")
    if re.search(r"\b(parse_expr|sympify)\(", source):
        found.add("sympy")
    return found


_MATH_NAMES = {"sqrt", "exp", "log", "ln", "sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos",
               "atan", "sinh", "cosh", "tanh", "Abs", "pi"}  # fmt: skip
_MATH_NODES = (ast.Expression, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow,
               ast.UnaryOp, ast.UAdd, ast.USub, ast.Load)  # fmt: skip


def is_harmless(answer: str, dangers: set[str]) -> bool:
    """True if evaluating `answer` can neither run code nor run away.

    Harmless are Python literals and arithmetic over numbers, one-letter names and common
    functions, with small, unstacked powers. Text that is no Python expression at all is harmless
    to `eval`, which refuses it, but not to sympy, which rewrites text before it evaluates it.
    """
    if len(answer) > 500 or answer != answer.strip():
        return False
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(answer, mode="eval")
    except SyntaxError:
        return "sympy" not in dangers
    except (ValueError, RecursionError, MemoryError):
        return False
    if "sympy" not in dangers:
        with contextlib.suppress(ValueError, TypeError, RecursionError, MemoryError):
            ast.literal_eval(tree)
            return True
    return all(_is_arithmetic(node) for node in ast.walk(tree))


def _is_arithmetic(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) in (int, float)
    if isinstance(node, ast.Name):
        return node.id in _MATH_NAMES or (len(node.id) == 1 and node.id.isalpha())
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _MATH_NAMES and not node.keywords
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        inner = [*ast.walk(node.left), *ast.walk(node.right)]
        numbers = [part.value for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
        return not any(isinstance(part, ast.Pow | ast.Call) for part in inner) and all(
            isinstance(n, int | float) and abs(n) <= 20 for n in numbers
        )
    return isinstance(node, _MATH_NODES)


@contextlib.contextmanager
def _random_state(seed: int) -> Iterator[None]:
    """Seed the global generators inside, restore them after.

    Most reasoning-gym generators carry their own `Random`, but two of them (pool_matrix,
    list_functions) draw from the global ones.
    """
    numpy: Any = import_module("numpy")
    before, before_numpy = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        numpy.random.set_state(before_numpy)


# Short names of Hub data sets: repository, config, split, question and answer columns.
HUB_SETS = {
    "gsm8k": ("openai/gsm8k", "main", "train", "question", "answer"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test", "problem", "answer"),
}


def _hub_rows(
    name: str, size: int, style: PromptStyle, options: dict[str, Any], hub_timeout: float = 5.0
) -> list[Row]:
    """Rows of a Hub data set; the Hub gets seconds to answer, not minutes of retries."""
    from minitlt.models import HubUnreachable, hub_answers

    path, config, split, question, answer = HUB_SETS.get(
        name, (name.removeprefix("hub:"), None, "train", "question", "answer")
    )
    given = {"config": config, "split": split, "question": question, "answer": answer}
    _known_options(name, options, list(given))
    given.update(options)
    constants: Any = import_module("huggingface_hub.constants")
    problem, kind = None, HubUnreachable if constants.HF_HUB_OFFLINE else ValueError
    if not constants.HF_HUB_OFFLINE:  # offline, `datasets` itself looks into its cache at once
        problem = hub_answers(f"{constants.ENDPOINT}/api/datasets/{path}", hub_timeout)
        if problem and not problem.startswith("the Hub says 4"):
            kind = HubUnreachable
    try:
        if problem:
            raise OSError(problem)
        load: Any = import_module("datasets").load_dataset
        dataset = load(path, given["config"], split=given["split"])
    except Exception as error:  # hub, network, parser and cache errors of many types
        said = problem or f"{type(error).__name__}: {one_line(error)}"
        hint = "set HF_HUB_OFFLINE=1 to use a copy, or take a reasoning-gym task or a .jsonl file"
        raise kind(f"data set {path!r} cannot be loaded: {said}; {hint}") from error
    columns = given["question"], given["answer"]
    for column in columns:
        if column not in dataset.column_names:
            there = dataset.column_names
            raise ValueError(f"data set {path!r} has no column {column!r} but {there}; set the "
                             "options question= and answer=")  # fmt: skip
    return [
        {"prompt": style.prompt(str(question)), "answer": _after_hashes(str(answer))}
        for row in dataset.select(range(min(size, len(dataset))))
        for question, answer in [[row[column] for column in columns]]
    ]


def _after_hashes(answer: str) -> str:
    """GSM8K's answers end in '#### 1,234'; others are left as they are."""
    return answer.rsplit("####", 1)[1].strip().replace(",", "") if "####" in answer else answer


# TRL calls rewards with these names; a data column of the same name would collide.
_RESERVED = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def _jsonl_rows(path: Path, size: int, style: PromptStyle, options: dict[str, Any]) -> list[Row]:
    """Rows of a JSON-lines file: `prompt` (text or messages), `answer`, and any other columns."""
    if options:
        raise ValueError(f"task {str(path)!r} takes no option {sorted(options)[0]!r}")
    rows: list[Row] = []
    for where, value in read_jsonl(path):
        rows.append(_jsonl_row(value, where, style))
        if rows[-1].keys() != rows[0].keys():
            raise ValueError(f"{where}: columns {sorted(rows[-1])} differ from the first row's "
                             f"{sorted(rows[0])}")  # fmt: skip
        if len(rows) == size:
            break
    if not rows:
        raise ValueError(f"{path} holds no rows; give one object with 'prompt' and 'answer' a line")
    return rows


def is_prompt(value: Any) -> bool:
    """Text, or messages with text under 'role' and 'content'."""
    if isinstance(value, str):
        return bool(value.strip())
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(
        isinstance(turn, dict) and isinstance(turn.get(key), str)
        for turn in turns
        for key in ("role", "content")
    )


def _jsonl_row(row: Any, where: str, style: PromptStyle) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object with 'prompt' and 'answer', not {row!r:.40}")
    for key in ("prompt", "answer"):
        if key not in row:
            raise ValueError(f"{where}: no {key!r}; it has {sorted(row)}")
    if taken := _RESERVED & row.keys():
        raise ValueError(f"{where}: column {sorted(taken)[0]!r} is a name that TRL uses; rename it")
    prompt, answer = row["prompt"], row["answer"]
    if not isinstance(answer, str | int | float):
        kind = type(answer).__name__
        raise ValueError(f"{where}: 'answer' must be text or a number, not {kind}")
    if not is_prompt(prompt):
        raise ValueError(f"{where}: 'prompt' must be text or a list of messages with text under "
                         "'role' and 'content'")  # fmt: skip
    prompt = style.prompt(prompt) if isinstance(prompt, str) else prompt
    return {**row, "prompt": prompt, "answer": str(answer)}
