"""What the policy is trained on: prompts, and which functions score their completions.

`load_task(name)` gives a `Task`: rows with a `prompt` and the columns that its rewards need, and
reward functions (`minitlt.rewards`). Three sources: any reasoning-gym data set by name, with its
own scorer; Hub data sets of mathematics, scored with math-verify; JSONL files. Data sets are
generated up front from an explicit seed; the global random state is left as it was.

Left out: mixtures of tasks, curricula, streaming. Use `load_dataset` and TRL for those.
Try it: `minitlt train --task chain_sum --dry-run`, or

    task = load_task("chain_sum", size=200, seed=1, max_terms=2)
    GRPOTrainer(..., train_dataset=task.dataset, reward_funcs=task.reward_funcs)
"""

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from minitlt.common import one_line, read_jsonl, suggest
from minitlt.rewards import GuardedReward, Reward, gym_reward, resolve_rewards

Row = dict[str, Any]

SUFFIX = "Think step by step. End with a line 'Answer: ' and the result."


@dataclass
class Task:
    """Rows to train on, the functions that score them, and the weights of their sum."""

    name: str
    rows: list[Row]
    reward_funcs: list[GuardedReward]
    reward_weights: list[float]

    @cached_property
    def dataset(self) -> Any:
        """The rows as a `datasets.Dataset`; ValueError where a column is of several kinds."""
        from datasets import Dataset

        try:
            return Dataset.from_list(self.rows)
        except Exception as error:  # pyarrow raises what it likes
            kinds = f"a column holds values of several kinds ({one_line(error)})"
            raise ValueError(f"task {self.name!r}: {kinds}; make them all one kind") from error


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
                f"{type(error).__name__}: {one_line(error)}"
            ) from error
    rows = [
        {"prompt": style.prompt(entry["question"]), "answer": str(entry["answer"]), "entry": index}
        for index, entry in enumerate(entries)
    ]
    return rows, gym_reward(short, dataset, entries)


def _known_options(name: str, options: dict[str, Any], valid: Sequence[str]) -> None:
    for option in options:
        if option not in valid:
            raise ValueError(f"task {name!r} has no option {option!r}; {suggest(option, valid)}")


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


def _hub_rows(name: str, size: int, style: PromptStyle, options: dict[str, Any]) -> list[Row]:
    """Rows of a Hub data set; the Hub gets seconds to answer, not minutes of retries."""
    from minitlt.models import HubUnreachable, hub_answers

    path, *places = HUB_SETS.get(
        name, (name.removeprefix("hub:"), None, "train", "question", "answer")
    )
    given = dict(zip(("config", "split", "question", "answer"), places, strict=True))
    _known_options(name, options, list(given))
    given |= options
    constants: Any = import_module("huggingface_hub.constants")
    problem, answers = None, not constants.HF_HUB_OFFLINE
    if answers:  # offline, `datasets` itself looks into its cache at once
        problem = hub_answers(f"{constants.ENDPOINT}/api/datasets/{path}", 5.0)
        answers = problem is None or problem.startswith("the Hub says 4")
    try:
        if problem:
            raise OSError(problem)
        load: Any = import_module("datasets").load_dataset
        dataset = load(path, given["config"], split=given["split"])
    except Exception as error:  # hub, network, parser and cache errors of many types
        said = problem or f"{type(error).__name__}: {one_line(error)}"
        hint = "set HF_HUB_OFFLINE=1 to use a copy, or take a reasoning-gym task or a .jsonl file"
        kind = ValueError if answers else HubUnreachable
        raise kind(f"data set {path!r} cannot be loaded: {said}; {hint}") from error
    columns = [str(given["question"]), str(given["answer"])]
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
