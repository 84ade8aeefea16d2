# %% [markdown]
# # 4. How deep to draft
#
# **Question.** How many tokens should one draft before asking the target?
#
# **The idea.** A deeper draft can win more tokens per pass, but every further draft is less
# likely to count: it is worth something only if all drafts before it were right. And it is not
# free, neither for the drafter nor for the target. So there is a best depth. It depends on the
# drafter's skill, on the machine, and on how many rows are active. Sometimes the best depth is 0.

# %%
import random
import sys

import torch

sys.path.append("..")
from course import AMBER, BLUE, GREEN, INK, Oracle, judge, picture, seconds_each, show
from toy import STOP, config, load_model, new_model, prompt

from minitlt.kernels import row_key
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

# %% [markdown]
# ## How many tokens a pass yields
#
# Suppose each drafted token is right with probability a, whatever came before. A pass with K drafts
# writes the right ones at the front plus one token of the target's own:
#
#     1 + a + a^2 + ... + a^K
#
# This is the *accept length*. Its limit for deep drafts is 1 / (1 - a): a drafter that is right
# half of the time can never do better than 2 tokens per pass.
#
# To see whether the engine agrees we need a drafter whose skill we can dial. `Oracle` has seen
# the plain completions and lies on purpose.

# %%
target = make_target(load_model())
params = SamplingParams(max_new_tokens=200, stop_ids=(STOP,))
prompts = [prompt(5) for _ in range(6)]
keys = [row_key(2, 0, i) for i in range(len(prompts))]
plain = RolloutEngine(target).generate(prompts, params, keys)


def accept_length(skill: float, depth: int) -> float:
    oracle = Oracle.of(plain, prompts, keys, skill)
    engine = RolloutEngine(target, [oracle], Bandit([Arm("oracle", depth)]))
    rollout = engine.generate(prompts, params, keys)
    assert rollout.completion_ids == plain.completion_ids  # always, by lesson 3
    return rollout.stats.accept_length


skills, depths = (0.5, 0.7, 0.9), (1, 2, 4, 8)
seen = {skill: [accept_length(skill, depth) for depth in depths] for skill in skills}
for skill in skills:
    print(f"skill {skill}:", "  ".join(f"{x:.2f}" for x in seen[skill]), f" at depths {depths}")


def expected(skill: float, depth: int) -> float:
    return sum(skill**i for i in range(depth + 1))


# %% [markdown]
# ## What a pass costs
#
# Now the other side. We time a model that is larger than the processor's cache (as in lesson 1)
# on passes with 0 to 8 drafts per row, with one active row and with eight. A draft itself costs
# the drafter something too. A drafter has one layer where this target has six, so we charge a
# sixth of a one-token pass per draft.

# %%
sizes = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
large = make_target(new_model(config(**sizes)))
large.reserve(8, 256)


def one_pass(num_rows: int, depth: int):
    tokens_BT = torch.ones(num_rows, depth + 1, dtype=torch.int64)
    lengths_B = torch.full((num_rows,), 100)
    return lambda: large.forward(tokens_BT, lengths_B)


tried = (0, 1, 2, 3, 5, 8)
seconds = {rows: seconds_each([one_pass(rows, k) for k in tried], rounds=3) for rows in (1, 8)}


def speed_up(rows: int, skill: float, i: int) -> float:
    """Tokens per second with depth tried[i], over tokens per second without drafts."""
    depth, plain_seconds = tried[i], seconds[rows][0]
    return expected(skill, depth) * plain_seconds / (seconds[rows][i] + depth * plain_seconds / 6)


# %%
figure, (left, right) = picture(2, width=9.6, height=3.4)
for skill, colour in zip(skills, (AMBER, GREEN, BLUE), strict=True):
    line = [expected(skill, k) for k in range(9)]
    left.plot(range(9), line, color=colour)
    left.plot(depths, seen[skill], "o", color=colour, markersize=5)
    left.annotate(f"skill {skill}", (8, line[-1]), (6, 0), "data", "offset points", va="center")
left.set(xlabel="drafts per pass", ylabel="tokens per pass", xlim=(0, 10.5))
left.set_title("Accept length: formula (lines) and engine (dots)")
for rows, style in ((1, "-"), (8, "--")):
    for skill, colour in ((0.7, GREEN), (0.9, BLUE)):
        line = [speed_up(rows, skill, i) for i in range(len(tried))]
        top = max(range(len(tried)), key=line.__getitem__)
        right.plot(tried, line, style, color=colour)
        right.plot(tried[top], line[top], "o", color=colour, markersize=6)
        name = f"{rows} row{'s' * (rows > 1)}, {skill}"
        right.annotate(name, (8, line[-1]), (6, 0), "data", "offset points", va="center")
right.plot([0, 8], [1, 1], color=INK, linewidth=0.8)
right.set(xlabel="drafts per pass", ylabel="speed-up over plain decoding", xlim=(0, 10.5))
right.set_xticks([0, 2, 4, 6, 8])
right.set_title("What it is worth on this machine (dots: best)")
show(figure, "04_depth")
for rows in (1, 8):
    gain = [speed_up(rows, 0.7, i) for i in range(len(tried))]
    best = gain.index(max(gain))
    print(f"{rows} row(s), skill 0.7: best depth {tried[best]}, {gain[best]:.2f} times plain speed")

# %% [markdown]
# **What the figure says.** Left: the engine does what the formula says. Right: there is a best
# depth, as a rule a larger one for the better drafter. When more rows share the pass the gain
# shrinks (the dashed lines), and on many machines the best depth with it, down to 0 where the dot
# sits on the left edge: a full batch has little slack to spend (lesson 1).
#
# ## Nobody has to know the best depth
#
# During a rollout the number of active rows falls, and the drafter's skill changes as it learns.
# So the engine measures. Every way to draft is an *arm* of a bandit, "off" is one of them, and
# for each range of active rows the bandit prefers the arm that lately gave the most tokens per
# second (BEG-MAB in TLT; `bandit.Bandit`). Here it has four arms. The toy's passes are so short
# that timings are rough, but watch where its steps go.

# %%
oracle = Oracle.of(plain, prompts, keys, skill=0.8)
arms = [Arm(), *(Arm("oracle", depth) for depth in (1, 3, 7))]
engine = RolloutEngine(target, [oracle], Bandit(arms, seed=1))
for _ in range(3):  # it remembers from rollout to rollout
    rollout = engine.generate(prompts, params, keys)
for name, used in sorted(rollout.stats.arms.items()):
    speed = used["tokens"] / used["seconds"]
    print(f"{name:>9}: {used['steps']:4.0f} passes, {speed:7,.0f} tokens per second")

# %% [markdown]
# ## Exercise: choose the depth
#
# `pass_seconds[k]` is the time of a pass with k drafts per row (k = 0: plain decoding), and a
# draft costs the drafter `draft_seconds`. Every draft is right with probability `skill`. Return
# the depth with the most tokens per second; among equals the smallest.


# %% exercise
def best_depth(skill: float, pass_seconds: list[float], draft_seconds: float) -> int:
    raise NotImplementedError


# %%
def check(answer) -> None:
    flat, steep = [1.0] * 9, [1.0 + k for k in range(9)]
    cases = [
        ((0.8, flat, 0.0), 8),  # extra tokens are free: as deep as possible
        ((0.8, steep, 0.0), 0),  # a pass grows faster than its yield: do not draft
        ((0.0, flat, 0.0), 0),  # useless drafts; 0 is the smallest of equals
        ((0.9, flat, 0.2), 7),  # in between
        ((1.0, steep, 0.0), 0),  # right drafts that cost as much as plain tokens
    ]
    for (skill, passes, draft), wanted in cases:
        got = answer(skill, passes, draft)
        assert got == wanted, (
            f"skill {skill}, draft {draft} s, passes {passes}: {got}, not {wanted}"
        )
    coin = random.Random(0)
    for _ in range(50):
        skill, draft = coin.random(), 0.3 * coin.random()
        passes = sorted(1 + coin.random() for _ in range(6))

        def rate(k: int, skill=skill, draft=draft, passes=passes) -> float:
            return sum(skill**i for i in range(k + 1)) / (passes[k] + k * draft)

        got, wanted = answer(skill, passes, draft), max(range(6), key=rate)
        assert got == wanted, f"skill {skill:.2f}: {got}, not {wanted}"


solved = judge(check, best_depth)

# %% [markdown]
# **If it went wrong.** Depth 0 must be among the candidates. The yield at depth k has k + 1
# terms.
#
# **Next.** Lesson 5 builds a drafter that deserves the depth.
