"""Whether two runs did the same thing: their completions, rewards and final policies.

Speculation must not change a run, so a run with it and a run without it are equal in everything
but time. `differences` finds where they are not, from the two run folders alone: the completions (a
hash of all token ids), the sample texts, the rewards, losses and gradient norms of every step, and
every tensor of the final policy, bit by bit. Drafters, speeds and receipts may differ.

Left out: runs on different numbers of ranks, whose rows stand elsewhere in the log.

How to run: `minitlt compare RUN_A RUN_B --assert-equal`.
"""

from __future__ import annotations

from pathlib import Path

from minitlt.events import Event, read_events
from minitlt.report import number, summarize

_FACTS = {  # event -> what must be equal in it: in words, and by field
    "rollout_end": ("completions", ("digest", "lengths")),
    "row": ("sample completions and rewards", ("prompt", "completion", "reward")),
    "update": (
        "reward, loss and gradient norm",
        ("reward", "reward_std", "loss", "grad_norm", "mean_length"),
    ),
}


def differences(left: Path, right: Path) -> list[str]:
    """One line per kind of difference, with the first place where it shows; empty if equal.

    Raises ValueError when a folder holds no run log.
    """
    logs = [read_events(folder / "events.jsonl") for folder in (left, right)]
    found = [_first_difference(name, *logs) for name in _FACTS]
    found.append(_policy_difference(left / "policy", right / "policy"))
    return [line for line in found if line]


def _first_difference(name: str, left: list[Event], right: list[Event]) -> str:
    """Where the events called `name` differ first; "" if they are equal.

    Two runs that have logged none are not equal: nothing shows it.
    """
    words, fields = _FACTS[name]

    def facts(events: list[Event]) -> dict[tuple[int, int, int], dict[str, object]]:
        """(step, rank, row) -> what must be equal; after a resume the later event counts."""
        own = [event for event in events if event["event"] == name]
        return {(e["step"], e["rank"], e.get("row", -1)): {f: e[f] for f in fields} for e in own}

    a, b = facts(left), facts(right)
    every = sorted(a.keys() | b.keys())
    if not every and name != "row":  # samples may be switched off
        return f"{words}: neither run has logged any"
    odd = [key for key in every if a.get(key) != b.get(key)]
    if not odd:
        return ""
    step, rank, _ = odd[0]
    one, two = (str(side.get(odd[0], "nothing"))[:120] for side in (a, b))
    where = f"{len(odd)} of {len(every)} differ, first at step {step}, rank {rank}"
    return f"{words}: {where}: {one} against {two}"


def _policy_difference(left: Path, right: Path) -> str:
    from safetensors import safe_open

    sides = [
        {name: file for path in sorted(folder.glob("*.safetensors"))
         for file in [safe_open(path, "pt")] for name in file.keys()}  # noqa: SIM118
        for folder in (left, right)
    ]  # fmt: skip
    for folder, side in zip((left, right), sides, strict=True):
        if not side:
            return f"policy: {folder} holds no safetensors"
    if other := sorted(sides[0].keys() ^ sides[1].keys()):
        return f"policy: tensors differ: {', '.join(other[:5])}"
    odd, largest = [], 0.0
    for name in sides[0]:  # one at a time, so that big policies fit
        one, two = (side[name].get_tensor(name) for side in sides)
        if one.shape != two.shape or one.dtype != two.dtype:
            return f"policy: {name} has another shape or dtype"
        if not one.equal(two):
            odd.append(name)
            largest = max(largest, float((one.float() - two.float()).abs().max()))
    if not odd:
        return ""
    count = f"{len(odd)} of {len(sides[0])}"
    return f"policy: {count} tensors differ, by {largest:.2g} at most ({odd[0]})"


def table(left: Path, right: Path) -> list[str]:
    """The summary numbers of both runs side by side."""
    summaries = [summarize(read_events(folder / "events.jsonl")) for folder in (left, right)]
    names = list(summaries[0] | summaries[1])
    width = max(len(name) for name in names)
    lines = [f"A  {left}", f"B  {right}", f"{'':{width}}  {'A':>20}  {'B':>20}"]
    for name in names:
        values = [summary.get(name) for summary in summaries]
        a, b = (" ".join(v) or "-" if isinstance(v, dict) else number(v) for v in values)
        lines.append(f"{name:{width}}  {a:>20}  {b:>20}")
    return lines
