# %% [markdown]
# # 6. Harvesting idle ranks
#
# **Question.** What can a rank do with the seconds in which it waits for the others?
#
# **The idea.** Train the drafter. The rank that is done early has just computed hidden states for
# all of its completions, so it has data; it is waiting, so it has time; and the rank that still
# decodes is running nearly alone, so it can use a better drafter at once. This is the "spot
# trainer" of TLT (arXiv 2511.16665).
#
#     GENERATING   between two passes: is there a fresher drafter? take it
#     HARVESTING   my rows are done: train steps until the last rank is done; publish now and then
#     MERGING      all are done: average the drafters, then the policy's update as always
#
# Swapping the drafter in the middle of a sentence is safe, because with coupled verification no
# drafter changes the text (lesson 3).

# %%
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append("..")
import course
from course import AMBER, BLUE, GREEN, GREY, judge, picture, show

from minitlt.events import read_events
from minitlt.launch import free_port

# %% [markdown]
# Two real processes, `two_ranks.py`, run three rollouts each. Rank 0 has the long stories. The
# drafter starts from random weights and nobody trains it beforehand. Everything that happens is
# appended to one file, a JSON line per event.

# %%
script = Path(course.__file__).with_name("two_ranks.py")
place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
with tempfile.TemporaryDirectory() as folder:
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), folder],
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        if rank.returncode:
            raise RuntimeError(errors[-2000:])
    events = read_events(Path(folder) / "events.jsonl")

zero = min(e["t"] for e in events if e["event"] == "rollout_start")
for event in events[:8]:
    print(f"{event['t'] - zero:6.2f} s  rank {event['rank']}  {event['event']}")


# %%
def spans(rank: int, first: str, last: str) -> list[tuple[float, float]]:
    """(start, length) in seconds between two kinds of events of one rank."""
    starts = [e["t"] - zero for e in events if e["event"] == first and e["rank"] == rank]
    ends = [e["t"] - zero for e in events if e["event"] == last and e["rank"] == rank]
    return [(a, b - a) for a, b in zip(starts, ends, strict=True)]


def times(kind: str) -> list[float]:
    return [e["t"] - zero for e in events if e["event"] == kind]


figure, (top, below) = picture(1, 2, width=8.4, height=4.4, sharex=True, height_ratios=[1, 1])
for rank, level in ((0, 1), (1, 0)):
    top.broken_barh(spans(rank, "rollout_start", "rollout_end"), (level, 0.7), color=BLUE)
    top.broken_barh(spans(rank, "harvest_start", "harvest_end"), (level, 0.7), color=GREEN)
top.plot(times("publish"), [0.35] * len(times("publish")), "^", color="white", markersize=5)
top.plot(times("swap"), [1.35] * len(times("swap")), "v", color=AMBER, markersize=7)
top.set_yticks([1.35, 0.35], ["rank 0", "rank 1"])
top.set_title("Blue: decodes. Green: trains the drafter. White: publishes. Amber: swaps it in")
progress = [e for e in events if e["event"] == "rollout_progress" and e["rank"] == 0]
below.plot(
    [e["t"] - zero for e in progress],
    [e["accept_len"] for e in progress],
    "o-",
    color=BLUE,
    ms=4,
    linewidth=0.8,
)
for start, _ in spans(0, "rollout_start", "rollout_end")[1:]:
    below.axvline(start, color=GREY, linewidth=1.5, linestyle="--")
below.set(xlabel="seconds", ylabel="tokens per pass", ylim=(0.9, None))
below.set_title("Accept length of rank 0, the straggler (dashed: the next rollout starts)")
show(figure, "06_harvest")

receipts = [e for e in events if e["event"] == "harvest_end" and e["rank"] == 1]
for receipt in receipts:
    part = receipt["harvested_s"] / receipt["available_s"]
    print(
        f"step {receipt['step']}: rank 1 had {receipt['available_s']:.1f} s of idle time and "
        f"trained in {part:.0%} of it ({receipt['drafter_steps']} train steps)"
    )
for end in (e for e in events if e["event"] == "rollout_end" and e["rank"] == 0):
    print(
        f"rollout {end['step']} of rank 0: {end['verify_steps']} passes for {end['tokens']} "
        f"tokens, {end['accept_len']:.2f} per row and pass"
    )

# %% [markdown]
# **What the figure says.** The grey blocks of lesson 2 are green now. Within the very first
# rollout the straggler swaps in what the other rank has just learned, its passes yield more
# tokens, and everyone waits less for it. The better the drafter, the shorter the window in which
# it can learn: the two balance each other.
#
# Three rules make this safe in a real job. No collective operation runs while any rank decodes;
# the end of the window is a counter in the process group's store. A train step is short, so a
# rank leaves the window within a fraction of a second. And nothing waits without a bound: ranks
# leave heartbeats.
#
# ## Exercise: the merge
#
# After the window every rank has its own drafter. They are averaged, weighted by the train steps
# that each rank took, in one all-reduce. Write it for lists:
#
# - a rank that trained alone hands over exactly its own numbers;
# - a rank with no steps has no say, even if its numbers are not finite;
# - if nobody took a step, rank 0's drafter stays.


# %% exercise
def merge(drafters: list[dict[str, torch.Tensor]], steps: list[int]) -> dict[str, torch.Tensor]:
    raise NotImplementedError


# %%
def check(answer) -> None:
    def drafter(*values: float) -> dict[str, torch.Tensor]:
        return {"fc": torch.tensor(values), "norm": torch.tensor([2 * v for v in values])}

    cases = [
        ("equal steps", [drafter(0, 4), drafter(2, 0)], [5, 5], drafter(1, 2)),
        ("3 steps to 1", [drafter(0, 4), drafter(4, 0)], [3, 1], drafter(1, 3)),
        ("one trained alone", [drafter(7, 7), drafter(0.1, 0.3)], [0, 9], drafter(0.1, 0.3)),
        ("not finite, no steps", [drafter(float("nan"), 1), drafter(1, 2)], [0, 4], drafter(1, 2)),
        ("nobody trained", [drafter(3, 4), drafter(5, 6)], [0, 0], drafter(3, 4)),
    ]
    for name, drafters, steps, wanted in cases:
        got = answer(drafters, steps)
        assert set(got) == set(wanted), f"{name}: the names are {sorted(got)}"
        for key, tensor in wanted.items():
            assert torch.equal(got[key], tensor), f"{name}: {key} is {got[key].tolist()}"


solved = judge(check, merge)

# %% [markdown]
# **If it went wrong.** 0 times NaN is NaN, so leave ranks without steps out of the sum. For
# exactness compute weight times tensor, with weight = steps / total.
#
# **Next.** Lesson 7 puts all of this into a training run.
