"""Functions that score completions, with TRL's signature.

`resolve_rewards` turns reward names (ours, TRL's, dotted paths) into functions. Two rules hold for
every one of them. A function that raises or hangs does not end the run: the completion gets 0.0 and
is counted (`GuardedReward`), unless it hangs in native code that nothing can interrupt. And text
that a model wrote is never evaluated: some reasoning-gym scorers call `eval` or sympy on the
answer, so theirs see only answers that are plain literals or plain arithmetic (`is_harmless`).

Left out: reward models (TRL's own way of loading them works) and processes to run rewards in.
How to run: `pytest tests/test_tasks.py`.
"""

import ast
import asyncio
import contextlib
import faulthandler
import inspect
import logging
import math
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from minitlt.common import suggest

Reward = Callable[..., Sequence[float | None]]
NATIVE_SECONDS = 40.0  # that a reward which cannot be interrupted gets beyond its time limit
_AGAIN = 0.5  # seconds between two attempts to interrupt a reward
_log = logging.getLogger(__name__)


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

    def __call__(self, **columns: Any) -> list[float | None]:
        """TRL's call: prompts, completions, completion_ids and the data's columns, by name."""
        count = len(columns["completions"])
        try:
            scores = self._call(columns, self.time_limit)
        except (Exception, SystemExit) as error:
            self._note(error)
            return [self._score_row(columns, row, count) for row in range(count)]
        if len(scores) != count:
            raise ValueError(
                f"reward {self.__name__!r} returned {len(scores)} values for {count} completions; "
                "it must return one (a float or None) for each"
            )
        return [self._finite(score) for score in scores]

    def _call(self, columns: dict[str, Any], seconds: float) -> list[Any]:
        def score() -> list[Any]:
            scores = self.function(**columns)
            return list(asyncio.run(scores) if inspect.iscoroutine(scores) else scores)

        return _within(seconds, self.__name__, score)

    def _score_row(self, columns: dict[str, Any], row: int, count: int) -> float | None:
        one = {
            name: value[row : row + 1] if isinstance(value, list) and len(value) == count else value
            for name, value in columns.items()
        }
        try:
            (score,) = self._call(one, self.time_limit / count)
        except (Exception, SystemExit) as error:
            return self._failed(error)
        return self._finite(score)

    def _finite(self, score: Any) -> float | None:
        with contextlib.suppress(TypeError, ValueError):
            if score is None or math.isfinite(float(score)):
                return None if score is None else float(score)
        return self._failed(ValueError(f"score {score!r}"))

    def _failed(self, error: BaseException) -> float:
        self.failures += 1
        self._note(error)
        return 0.0

    def _note(self, error: BaseException) -> None:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        if said != self.last_error:
            _log.warning("reward %s failed and scores 0.0: %s", self.__name__, said)
        self.last_error = said


class _Overdue(BaseException):
    """Not an Exception, so that a reward that catches those does not swallow it."""


def _within(seconds: float, name: str, body: Callable[[], list[Any]]) -> list[Any]:
    """body(), or TimeoutError after `seconds`; no limit outside the main thread.

    The kernel's timer reaches code that never lets another thread run, such as a regular
    expression. But any `signal.alarm` in the body cancels it, and math-verify sets one, so a thread
    rings as well, by a signal of its own. Both ring until the body ends. Native code does not hear
    them: NATIVE_SECONDS later it ends the process, with a line that names the reward.
    """
    main, over = threading.main_thread(), threading.Event()
    if threading.current_thread() is not main:
        return body()

    def ring(*_: Any) -> None:
        if not over.is_set():
            raise _Overdue

    def watch() -> None:
        # Rings are counted, not seconds: a machine that was suspended meanwhile is no hang.
        for pause in (seconds + _AGAIN / 2, *[_AGAIN] * round(NATIVE_SECONDS / _AGAIN)):
            if over.wait(pause):
                return
            signal.pthread_kill(main.ident or 0, signal.SIGVTALRM)
        said = f"reward {name} hangs, and nothing interrupts it (native code?)"
        print(f"minitlt: {said}; give it a time limit of its own", file=sys.stderr, flush=True)
        os._exit(1)

    before = {number: signal.signal(number, ring) for number in (signal.SIGALRM, signal.SIGVTALRM)}
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    # Where no thread gets to run, this ends the process. It says where that was.
    faulthandler.dump_traceback_later(seconds + NATIVE_SECONDS + 5 * _AGAIN, exit=True, file=2)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
            return body()
        finally:
            over.set()
    except _Overdue:
        raise TimeoutError(f"no result within {seconds:.3g} s") from None
    finally:
        over.set()  # again: it may have rung in the line above
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        thread.join()  # it must not ring for the handlers of before
        for number, handler in before.items():
            signal.signal(number, handler)


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
        near = suggest(name, [*_OWN, *_TRL])
        raise ValueError(f"unknown reward {name!r}; {near}, or a dotted path to a function "
                         "(my_module.my_reward)")  # fmt: skip
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # of odd names ("..x"), and all that the file raises
        raise ValueError(
            f"reward {name!r}: cannot import {module_name!r} ({error}); give a module that can be "
            "imported from here, then the function"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value)]
        raise ValueError(f"reward {name!r}: {module_name!r} has no function {attribute!r}; "
                         f"{suggest(attribute, names)}")  # fmt: skip
    return function


def gym_reward(name: str, dataset: Any, entries: list[Any]) -> Reward:
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
