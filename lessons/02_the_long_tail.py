# %% [markdown]
# # 2. The long tail
#
# **Question.** Four ranks generate the completions of one GRPO step. Where does the time go?
#
# **The idea.** Completions differ in length, and the difference is not small: most are short, a
# few are many times longer. A rollout ends when its *longest* completion ends. Until then the
# batch gets emptier and emptier, and ranks that are done wait for the one that is not.

# %%
import itertools
import sys
from collections.abc import Callable

sys.path.append("..")
from course import BLUE, GREY, judge, picture, show
from toy import STOP, decode, load_model, tail_of_prompts

from minitlt.kernels import row_key
from minitlt.spec import RolloutEngine, SamplingParams
from minitlt.target import make_target

# %% [markdown]
# Our policy is a toy with 129,072 weights that was trained to tell very short stories (`toy.py`).
# A prompt says how many sentences it should have, from 1 to 9, and small numbers are common. One
# character is one token. The engine below is the one that the library trains with; so far it
# drafts nothing.

# %%
engine = RolloutEngine(make_target(load_model()))
params = SamplingParams(max_new_tokens=300, stop_ids=(STOP,))


def roll(rank: int, num_rows: int = 16):
    prompts = tail_of_prompts(num_rows, seed=rank)
    keys = [row_key(0, 0, rank * num_rows + i) for i in range(num_rows)]  # all of the randomness
    return engine.generate(prompts, params, keys)


engine.generate(tail_of_prompts(1), SamplingParams(max_new_tokens=8), [0])  # a first run is slow
rollouts = [roll(rank) for rank in range(4)]
print(decode(rollouts[0].completion_ids[0]))
lengths = sorted(len(tokens) for rollout in rollouts for tokens in rollout.completion_ids)
print(
    f"{len(lengths)} completions: median {lengths[len(lengths) // 2]} tokens, longest {lengths[-1]}"
)

# %% [markdown]
# We ran the four ranks one after the other and now lay their clocks side by side. The engine kept
# a trace of how many rows were active when (`stats.active_trace`).

# %%
ends = [rollout.stats.seconds for rollout in rollouts]
last = max(ends)
figure, axes = picture(width=7.2, height=3.6)
for rank, rollout in enumerate(rollouts):
    times = [t for t, _ in rollout.stats.active_trace] + [ends[rank]]
    active = [0.8 * n / 16 for _, n in rollout.stats.active_trace] + [0]
    floor = 3 - rank
    axes.fill_between(
        times, floor, [floor + a for a in active], step="post", color=BLUE, linewidth=0
    )
    axes.barh(floor + 0.4, last - ends[rank], 0.8, ends[rank], color=GREY, alpha=0.4)
    if last - ends[rank] > 0.12 * last:
        axes.text((ends[rank] + last) / 2, floor + 0.4, "idle", ha="center", va="center")
axes.set_yticks([3.4, 2.4, 1.4, 0.4], [f"rank {rank}" for rank in range(4)])
axes.set(xlim=(0, last), xlabel="seconds")
axes.set_title("Active rows of each rank (blue, full height = 16) until the last rank ends")
show(figure, "02_tail")
idle = sum(last - end for end in ends) / (last * len(ends))
passes = sum(rollout.stats.verify_steps for rollout in rollouts)
filled = sum(rollout.stats.step_tokens for rollout in rollouts) / (16 * passes)
print(f"{idle:.0%} of the ranks' seconds are idle;")
print(f"while a rank decodes, {filled:.0%} of its 16 rows are active on average.")

# %% [markdown]
# **What the figure says.** Two kinds of capacity are lost. The grey blocks are ranks with nothing
# left to do; lesson 6 fills them. The white above the blue shapes is emptiness inside a rank: its
# last rows run nearly alone. There a pass takes almost as long as with all rows, and it is
# exactly where reading a few tokens ahead is cheap (lesson 1).
#
# How badly do the last rows use the machine? The trace tells.

# %%
spent: dict[int, list[float]] = {}  # active rows -> [seconds, tokens]
for rollout in rollouts:
    trace = rollout.stats.active_trace + [(rollout.stats.seconds, 0)]
    for (start, active), (end, _) in itertools.pairwise(trace):
        bucket = 1 << (active.bit_length() - 1)  # 1, 2-3, 4-7, 8-15, 16
        spent.setdefault(bucket, [0.0, 0.0])[0] += end - start
for rollout in rollouts:
    longest = max(len(tokens) for tokens in rollout.completion_ids)
    for step in range(1, longest):  # first tokens came with their prompts
        active = sum(len(tokens) > step for tokens in rollout.completion_ids)
        spent[1 << (active.bit_length() - 1)][1] += active
total = sum(seconds for seconds, _ in spent.values())
print("active rows   part of the time   tokens per second")
for bucket, (seconds, tokens) in sorted(spent.items()):
    rows = str(bucket) if bucket in (1, 16) else f"{bucket}-{2 * bucket - 1}"
    print(f"{rows:>11} {seconds / total:>18.0%} {tokens / seconds:>19,.0f}")

# %% [markdown]
# In real RL runs with long chains of thought it is no different in kind, only larger: in the runs
# that TLT describes (arXiv 2511.16665) about 85 % of a step's time is rollout, and a few
# completions go on to the length limit long after most have ended.
#
# ## Exercise: predict the idle share
#
# You know how many tokens each completion will have, per rank, and how many seconds a pass takes
# when `n` rows are active. All rows of a rank start together and each pass gives every active row
# one token. What part of all rank-seconds is idle, from the start to the end of the last rank?


# %% exercise
def idle_share(lengths_by_rank: list[list[int]], pass_seconds: Callable[[int], float]) -> float:
    raise NotImplementedError


# %%
def check(answer) -> None:
    def flat(active: int) -> float:
        return 2.0

    def linear(active: int) -> float:
        return 1.0 + active

    cases = [
        ([[3], [3]], flat, 0.0),
        ([[4], [1]], flat, 3 / 8),  # 8 s and 2 s: 6 of 16
        ([[4, 1], [1]], flat, 3 / 8),  # a short row beside a long one does not matter here
        ([[2, 1], [1]], linear, 3 / 10),  # 3 + 2 = 5 s and 2 s: 3 of 10
        ([[5], [2], [1], [1]], flat, (0 + 6 + 8 + 8) / 40),
    ]
    for lengths, seconds, wanted in cases:
        got = answer(lengths, seconds)
        assert abs(got - wanted) < 1e-9, f"{lengths} with {seconds.__name__}: {got}, not {wanted}"


solved = judge(check, idle_share)

# %% [markdown]
# **If it went wrong.** A rank's time is a sum over passes. In pass number k (from 0) the rows
# with more than k tokens are active. (The engine above has first tokens from the prompts' pass.)
#
# **Next.** Lesson 3 makes reading ahead *exact*: a wrong draft must never change the text.
