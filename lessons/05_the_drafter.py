# %% [markdown]
# # 5. The drafter
#
# **Question.** What should a drafter look at, and how does it learn?
#
# **The idea.** The target computes hidden states at every position, and they say most of what
# will come next. EAGLE-3 (arXiv 2503.01840) reads three of them (a low, a middle and a high
# layer), fuses them into one *feature*, and puts a single decoder layer on top. That layer's
# output drafts the next token and is also the feature of the next step, so the drafter can
# run on by itself.
#
#     pair t = (token x_{t+1}, feature of position t)   ->   draft of x_{t+2}
#
# The rollout has computed these hidden states anyway. Kept in a buffer, they are training data
# that costs no further pass of the target.

# %%
import sys

import torch

sys.path.append("..")
from course import AMBER, BLUE, GREY, judge, picture, show
from toy import STOP, load_model, tail_of_prompts

from minitlt.distill import DrafterTrainer, ReplayBuffer, Window, make_pack
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter
from minitlt.kernels import row_key
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

# %% [markdown]
# ## A rollout fills the buffer
#
# `Eagle3Proposer` stands between the engine and the draft model: it is told about every token
# that is written, together with the hidden states ("taps") that decided it. Finished rows go to
# the replay buffer. The drafter is random still: its one draft per pass hardly ever counts. (Of six
# layers the middle and the high one coincide; larger models have three.)

# %%
model = load_model()
target = make_target(model)
params = SamplingParams(max_new_tokens=300, stop_ids=(STOP,))
settings = DrafterConfig(
    start="random",
    draft_vocab_size=0,  # the toy has few characters: all of them
    train_head=False,  # the target's own head is used
    ttt_steps=3,
    learning_rate=4e-3,
    pack_tokens=192,
    train_dtype="float32",
)
size = Eagle3Config.from_target(model.config, settings)
print(f"taps: the inputs of layers {size.tap_layers} of {size.num_target_layers}")


def new_drafter(sees_features: bool = True) -> Eagle3Drafter:
    drafter = Eagle3Drafter(size)
    drafter.tie(target.embed_weight, target.head_weight)  # by reference: no copy can go stale
    if not sees_features:  # fc is 0 and stays 0
        drafter.fc.requires_grad_(False).zero_()
    return drafter


def roll(proposer: Eagle3Proposer, depth: int, generation: int):
    prompts = tail_of_prompts(24, seed=generation)
    keys = [row_key(0, generation, i) for i in range(len(prompts))]
    arm = Arm(proposer.name, depth) if depth else Arm()
    return RolloutEngine(target, [proposer], Bandit([arm])).generate(prompts, params, keys)


buffer = ReplayBuffer(settings, vocab_size=size.vocab_size)
roll(Eagle3Proposer(new_drafter(), settings, buffer=buffer), depth=1, generation=0)
print(f"the buffer holds {len(buffer.rows)} rows, {buffer.num_tokens} tokens")

# %% [markdown]
# ## Learning to be accepted
#
# The teacher of a pair is the target's whole distribution p, not just the token that was drawn.
# Two distances from p to the drafter's q are in use. KL divergence has good gradients from the
# start. Total variation is what acceptance is made of: the best possible acceptance is sum_v
# min(p, q) = 1 - TV. The default loss `lk` begins as KL and turns into TV as acceptance grows
# (arXiv 2602.23881).
#
# We train three drafters on the same rows. The first sees the features. The second is blind: it
# gets the tokens alone. The third sees the features but is trained for one step only, while the
# others are *unrolled* for three steps on their own states, as they will have to run when they
# draft.

# %%
NUM_STEPS = 120


def train(drafter: Eagle3Drafter, ttt_steps: int = 3) -> list[float]:
    """Acceptance (the best possible) of the first draft, per train step."""
    config = DrafterConfig(**{**vars(settings), "ttt_steps": ttt_steps})
    trainer = DrafterTrainer(drafter, buffer, config)
    return [trainer.train_step()["acceptance"][0] for _ in range(NUM_STEPS)]


students = {
    "with features": (new_drafter(), 3, BLUE),
    "blind": (new_drafter(sees_features=False), 3, GREY),
    "with features, one step": (new_drafter(), 1, AMBER),
}
curves = {name: train(drafter, steps) for name, (drafter, steps, _) in students.items()}

# %% [markdown]
# The examination is a rollout with new prompts and new keys, with 4 drafts per pass.

# %%
plain = roll(Eagle3Proposer(new_drafter(), settings), depth=0, generation=1)
exams = {
    name: roll(Eagle3Proposer(drafter, settings), depth=4, generation=1)
    for name, (drafter, _, _) in students.items()
}
for name, exam in exams.items():
    same = exam.completion_ids == plain.completion_ids
    print(f"{name:>24}: {exam.stats.accept_length:.2f} tokens per pass, same text as plain: {same}")

# %%
figure, (left, right) = picture(2, width=9.6, height=3.4)
for name, (_, _, colour) in students.items():
    smooth = torch.tensor(curves[name]).unfold(0, 8, 1).mean(1)
    left.plot(range(4, 4 + len(smooth)), smooth, color=colour, label=name)
    places = range(1, 5)
    right.plot(places, exams[name].stats.accept_by_position, "o-", color=colour, label=name)
left.set(xlabel="train step", ylabel="acceptance", ylim=(0, 1))
left.set_title("The first draft, in training (mean of 8 steps)")
right.set(xlabel="draft", ylabel="share accepted this deep", ylim=(0, 1))
right.set_xticks(range(1, 5))
right.legend(fontsize=8.5)
right.set_title("In a rollout: how far the drafts carry")
show(figure, "05_drafter")

# %% [markdown]
# **What the figure says.** Left: with the target's features the drafter soon overtakes the one
# that sees only tokens, and the one-step drafter is best of all. Right: with the same features,
# unrolled training carries further. A drafter that never saw its own states in training does well
# with the first draft and loses the thread with the later ones.
#
# A drafter of this size can follow the policy: when the policy moves by one optimizer step, the
# drafter is a few train steps behind, not a whole training. That is why it can be trained in idle
# time (lesson 6), and why no pre-trained drafter is needed.
#
# ## Exercise: who teaches whom
#
# The mistake that ruins most drafters is off by one. A row has `num_tokens` tokens, x_0 to
# x_{num_tokens - 1}; the first `prompt_len` are the prompt. The target has read all but the last
# (nothing was decided behind it), so there is a teacher at the positions 0 to num_tokens - 2.
#
# At unrolled step s, pair t holds the token x_{t+1+s}. Its teacher is the target's distribution
# at the position of *that* token, because both have then read the same tokens. Only response
# tokens are supervised: prompts repeat, and nobody drafts them.
#
# Return (pair, teacher position) for all supervised pairs of one step, in order.


# %% exercise
def supervised(prompt_len: int, num_tokens: int, step: int) -> list[tuple[int, int]]:
    raise NotImplementedError


# %%
def check(answer) -> None:
    # by hand: x0 x1 | x2 x3 x4; the target has read x0..x3, so x2 and x3 teach
    assert answer(2, 5, 0) == [(1, 2), (2, 3)], f"prompt 2, 5 tokens, step 0: {answer(2, 5, 0)}"
    assert answer(2, 5, 1) == [(0, 2), (1, 3)], f"prompt 2, 5 tokens, step 1: {answer(2, 5, 1)}"
    for row in buffer.rows:  # and what the library's trainer does with real rows
        start, stop = max(0, row.prompt_len - 3), row.num_tokens - 2
        window = Window(row, 0, start, stop)
        _, _, teacher_SM = make_pack([window], 3, torch.device("cpu"))
        first = max(start + 1, row.prompt_len)  # the position of the first teacher
        for step in range(3):
            taught = enumerate(teacher_SM[step].tolist())
            wanted = [(start + m, first + j) for m, j in taught if j >= 0]
            got = answer(row.prompt_len, row.num_tokens, step)
            assert got == wanted, (
                f"prompt {row.prompt_len}, {row.num_tokens} tokens, step {step}: "
                f"{got[:3]}.. instead of {wanted[:3]}.."
            )


solved = judge(check, supervised)

# %% [markdown]
# **If it went wrong.** Go through the positions j that teach: response tokens that the target has
# read. Then the pair is t = j - 1 - s, and it must exist (t >= 0).
#
# **Next.** Lesson 6 finds the time for this training: for free.
