# %% [markdown]
# # 1. Why decoding is slow
#
# **Question.** A language model writes one token per pass. How much more would it cost to *read*
# several tokens in the same pass?
#
# **The idea.** To write one token, the model fetches every one of its weights from memory and
# does two operations with each: a multiplication and an addition. A processor can do far more
# than two operations in the time in which memory delivers one number. So memory sets the pace,
# and the arithmetic units wait. If several tokens go through in one pass, the same fetch serves
# them all. That spare arithmetic is what this whole course spends.
#
# You need to know PyTorch and what a key/value cache is. Everything below runs on one thread. Where
# this course says *pass*, the library says *verify step*: one forward of the target.

# %%
import sys
from dataclasses import dataclass

import torch

sys.path.append("..")
from course import AMBER, BLUE, GREY, judge, picture, plain_ticks, seconds_each, show
from toy import config, new_model

from minitlt.target import make_target

# %% [markdown]
# A model with random weights says nothing sensible, but it takes exactly as long as a trained
# one. This one must be larger than the processor's cache, or there would be nothing to fetch.
#
# `make_target` puts a Hugging Face model behind *slots*: one row of the batch, one slot of the
# key/value cache. `forward(tokens_BT, lengths_B)` reads T new tokens per row behind the
# `lengths_B` tokens that each row has already.

# %%
sizes = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
model = new_model(config(**sizes))
target = make_target(model)
target.reserve(16, 256)
used_per_pass = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
print(
    f"{used_per_pass / 1e6:.0f} million weights per pass, {4 * used_per_pass / 1e6:.0f} MB in fp32"
)

# %% [markdown]
# ## The measurement
#
# One row that holds 100 tokens reads T more in one pass, for T from 1 to 64. Nothing else
# changes.


# %%
def one_pass(num_rows: int, num_tokens: int):
    tokens_BT = torch.ones(num_rows, num_tokens, dtype=torch.int64)
    lengths_B = torch.full((num_rows,), 100)
    return lambda: target.forward(tokens_BT, lengths_B)


counts = [1, 2, 4, 8, 16, 32, 64]
measured = seconds_each([one_pass(1, num) for num in counts])
for num, seconds in zip(counts, measured, strict=True):
    print(f"{num:3d} tokens: {1e3 * seconds:6.1f} ms, {1e3 * seconds / num:5.1f} ms per token")

# %%
figure, axes = picture(width=6.4)
milliseconds = [1e3 * seconds for seconds in measured]
one_by_one = [milliseconds[0] * num for num in counts]
axes.plot(counts, one_by_one, color=GREY)
axes.plot(counts, milliseconds, "o-", color=BLUE)
axes.fill_between(counts, milliseconds, one_by_one, color=AMBER, alpha=0.15, linewidth=0)
axes.annotate(
    "one pass per token", (8, one_by_one[3]), (-8, 0), "data", "offset points", ha="right"
)
axes.annotate("all in one pass", (16, milliseconds[4]), (4, -14), "data", "offset points")
axes.set(xscale="log", yscale="log", xlabel="tokens read", ylabel="milliseconds")
plain_ticks(axes.xaxis, counts)
low, high = 0.7 * min(milliseconds), one_by_one[-1]
plain_ticks(axes.yaxis, [t for t in (1, 3, 10, 30, 100, 300, 1000, 3000) if low < t < high])
axes.set_ylim(low)
axes.set_title("The shaded area is what reading ahead can save")
show(figure, "01_passes")
cheap = measured[counts.index(4)] / measured[0]
print(f"A pass over 4 tokens took {cheap:.1f} times as long as a pass over 1, not 4 times.")

# %% [markdown]
# **What the figure says.** The blue line starts almost flat and the grey one does not. Up to a
# handful of tokens a pass costs little more than a pass over one token, because fetching the
# weights is what takes the time. Further right arithmetic takes over and the blue line turns up.
# Where doubling the tokens doubles the time, it runs parallel to the grey one: nothing is spare.
#
# ## Who has this slack, and who has not
#
# A token of another *row* shares the fetch just as well. A full batch has therefore used up the
# slack already. So look at what four extra tokens per row cost when more rows are active.

# %%
for num_rows in (1, 4, 16):
    short, long = seconds_each([one_pass(num_rows, 1), one_pass(num_rows, 5)], rounds=5)
    print(
        f"{num_rows:2d} rows: 5 tokens per row instead of 1 cost {long / short:4.1f} times as much"
    )

# %% [markdown]
# With one row the extra tokens cost little. The more rows, the more they cost. Keep this in mind:
# lesson 2 shows that the last rows of a rollout run nearly alone.
#
# ## Why it is allowed to read tokens that may be wrong
#
# To read ahead the tokens must be drafted. If a draft is wrong, the cache holds keys and values
# that should not be there. Here nothing needs to be cleaned up. The *caller* owns the length of
# each row; entries behind it are masked, and the next pass writes over them. Rolling back is
# moving a cursor:

# %%
text = torch.tensor([[5, 6, 7, 8]])
clean, _ = target.forward(text, torch.tensor([0]))
target.forward(torch.tensor([[5, 99, 98, 97]]), torch.tensor([0]))  # three wrong drafts behind 5
again, _ = target.forward(text[:, 1:], torch.tensor([1]))  # the cursor goes back to length 1
print("same logits, bit for bit:", torch.equal(clean[:, 1:], again))

# %% [markdown]
# ## Exercise: the roofline
#
# Write down how long a pass takes, without running it. A pass must
#
# - fetch all weights once, and the cached keys and values of every row's context;
# - do two operations per weight for every token it reads (attention is small; leave it out).
#
# Memory and arithmetic work at the same time, so the pass takes as long as the slower of the two.


# %%
@dataclass
class Machine:
    bytes_per_second: float
    operations_per_second: float


@dataclass
class Shape:
    num_weights: float
    bytes_per_weight: float
    cache_bytes_per_token: float  # keys and values of all layers, for one token of context


# %% exercise
def pass_seconds(
    machine: Machine, shape: Shape, num_rows: int, tokens_per_row: int, context: int
) -> float:
    raise NotImplementedError


# %%
def check(answer) -> None:
    h200 = Machine(bytes_per_second=4.8e12, operations_per_second=990e12)
    shape = Shape(num_weights=8e9, bytes_per_weight=2, cache_bytes_per_token=131_072)
    cases = {  # rows, tokens per row, context -> milliseconds, worked out by hand
        (1, 1, 0): 16 / 4.8,  # 16 GB of weights
        (1, 5, 0): 16 / 4.8,  # the same: the extra tokens are free
        (32, 1, 8192): (16 + 32 * 8192 * 131_072 / 1e9) / 4.8,  # the caches weigh more
        (512, 1, 0): 2 * 8e9 * 512 / 990e12 * 1e3,  # arithmetic is the limit
    }
    for (rows, tokens, context), milliseconds in cases.items():
        got = 1e3 * answer(h200, shape, rows, tokens, context)
        assert abs(got - milliseconds) < 1e-6 * milliseconds, (
            f"{rows} rows, {tokens} tokens per row, context {context}: "
            f"{got:.3f} ms instead of {milliseconds:.3f} ms"
        )


solved = judge(check, pass_seconds)

# %% [markdown]
# Once it is solved, ask it: at what number of tokens does an H200 with this 8-billion-weight
# model stop giving extra tokens away? (Its answer should be close to 206. Divide the two rates.)
#
# **If it went wrong.** Times that jump around mean that other programs are running; run the cell
# again. If the blue line is not flat at all, your processor's cache holds the whole model: raise
# `hidden_size`.
#
# **Next.** Lesson 2 asks where in a rollout the slack is.
