"""What every lesson uses besides the library: pictures, the judge of the exercises, an oracle.

How to use: `from course import picture, show, judge`; in a notebook, after `sys.path.append("..")`.
"""

import io
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure

from minitlt.charts import COLOURS, STYLE
from minitlt.draft import Draft, Drafter, RowState, chain_parents

BLUE, GREEN, AMBER, PURPLE, GREY, INK, ORANGE = (
    COLOURS[name][0] for name in ("generate", "harvest", "merge", "update", "wait", "ink", "run2")
)
FIGURES = Path(__file__).resolve().parent.parent / "runs" / "lessons"

torch.set_num_threads(1)  # so that numbers compare between machines
matplotlib.rcParams.update(STYLE)


# Pictures.


def picture(
    columns: int = 1, rows: int = 1, width: float = 8.0, height: float = 3.2, **options: Any
) -> Any:
    """(figure, axes) with the library's colours; `axes` is one Axes, or an array of them."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, **options)


def plain_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """These ticks, written as plain numbers, and no others; for logarithmic axes."""
    axis.set_ticks(list(ticks), [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    return file.getvalue()


def show(figure: Figure, name: str) -> None:
    """Under the cell in a notebook; as a file whose path is printed in a script."""
    if in_notebook():
        from IPython.display import Image, display

        display(Image(png(figure)))
        return
    FIGURES.mkdir(parents=True, exist_ok=True)
    path = FIGURES / f"{name}.png"
    path.write_bytes(png(figure))
    print(f"figure: {path}")


def in_notebook() -> bool:
    try:
        return get_ipython() is not None  # type: ignore[name-defined]
    except NameError:
        return False


# Exercises.


def judge(check: Callable[..., None], *answers: Any) -> bool:
    """Runs an exercise's check and says how it went. True if it is solved; never raises."""
    try:
        check(*answers)
    except NotImplementedError:
        print("Not solved yet: the exercise is still a stub.")
    except Exception as error:  # whatever the reader's code does, the lesson goes on
        print(f"Not yet. {type(error).__name__}: {error}")
    else:
        print("Correct.")
        return True
    return False


# Measuring.


def seconds_each(functions: Sequence[Callable[[], Any]], rounds: int = 7) -> list[float]:
    """Median seconds of each function. They take turns, so that a busy moment hits all alike."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(rounds + 1):
        for function, mine in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            if turn:  # the first turn only warms up
                mine.append(time.perf_counter() - start)
    return [median(mine) for mine in times]


class Oracle(Drafter):
    """A drafter that has seen the answers, and misquotes them at will; for experiments only.

    It knows the completions that plain decoding gives (`answers`: row key -> (prompt length,
    tokens)), and each of its drafts is right with probability `skill`.
    """

    name = "oracle"

    def __init__(self, answers: dict[int, tuple[int, list[int]]], skill: float, vocab: int) -> None:
        self.answers, self.skill, self.vocab = answers, skill, vocab

    @classmethod
    def of(cls, rollout: Any, prompts: list[list[int]], keys: list[int], skill: float) -> "Oracle":
        """The oracle that knows this rollout."""
        pairs = zip(prompts, rollout.completion_ids, strict=True)
        answers = {key: (len(p), tokens) for key, (p, tokens) in zip(keys, pairs, strict=True)}
        return cls(answers, skill, vocab=1 + max(max(t) for _, t in answers.values()))

    def propose(self, rows: RowState, depth: int, width: int, nodes: int) -> Draft:
        drafts = []
        for root, key, at in zip(
            rows.roots_B.tolist(), rows.keys_B.tolist(), rows.positions_B.tolist(), strict=True
        ):
            prompt_len, tokens = self.answers[key]
            coin = random.Random(key ^ at)
            truth = (tokens[at - prompt_len :] + [0] * depth)[:depth]
            lies = [coin.random() >= self.skill for _ in truth]
            drafts.append(
                [root] + [(t + lie) % self.vocab for t, lie in zip(truth, lies, strict=True)]
            )
        return Draft(torch.tensor(drafts), chain_parents(depth).expand(len(drafts), -1))
