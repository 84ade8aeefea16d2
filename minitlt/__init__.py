"""minitlt: GRPO on TRL whose rollouts are speculative, lossless, and pay for their own drafter.

The public names are re-exported lazily, so that `import minitlt` and `minitlt --help` cost
milliseconds. Read the modules in this order: noise, kernels, slots, target, sampling, bandit, spec
(inference); eagle3, drafter, distill, spot (the draft model and its idle-time training); rl (the
trainer).
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "coupled_verify": "kernels",
    "Target": "target",
    "RolloutEngine": "spec",
    "SamplingParams": "spec",
    "Rollout": "spec",
    "Eagle3Drafter": "eagle3",
    "NgramDrafter": "ngram",
    "SpotTrainer": "spot",
    "MiniTLTTrainer": "rl",
    "make_rollout_func": "rl",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(f"minitlt.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'minitlt' has no attribute {name!r}")
