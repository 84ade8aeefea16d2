# %% [markdown]
# # 7. GRPO on TRL in one method
#
# **Question.** How much of a GRPO trainer must change to get all of this?
#
# **The idea.** One method. TRL's `GRPOTrainer` does rewards, advantages, loss, logging,
# checkpoints and distribution. It asks one method of its own for completions,
# `_generate_single_turn`, and wants token ids and their log-probabilities back. `MiniTLTTrainer`
# overrides that method. Because the completions are exactly those of plain sampling, nothing
# downstream can tell the difference.

# %%
import inspect
import os
import sys
import tempfile
import warnings

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig

sys.path.append("..")
from course import BLUE, GREEN, GREY, judge, picture, show
from toy import load_model, tokenizer

from minitlt.config import RolloutConfig
from minitlt.eagle3 import DrafterConfig
from minitlt.rl import MiniTLTTrainer
from minitlt.spot import SpotConfig

warnings.filterwarnings("ignore", category=FutureWarning)
logging.disable_progress_bar()
print(inspect.getsource(MiniTLTTrainer._generate_single_turn))

# %% [markdown]
# Read it from top to bottom: copy the weights if the policy moved; a key per row; open the idle
# window; generate; use the idle time; hand back. That is the whole seam.
#
# ## One step of GRPO
#
# Each prompt is answered G times. The reward of an answer is compared with its siblings only:
#
#     advantage = (reward - mean of the group) / (standard deviation of the group + 1e-4)
#
# and the policy is pushed towards answers with a positive advantage. No value model is needed. A
# group whose rewards are all equal teaches nothing.
#
# Our task: the toy shall tell stories about cats. The reward is the part of an answer's sentences
# with a cat in them.

# %%
NUM_STEPS, GROUP = 8, 8
rewards_seen: list[list[float]] = []


def cats(completions: list[str], **_) -> list[float]:
    stories = [text.split(".")[:-1] or [""] for text in completions]
    rewards = [sum(" cat " in s for s in sentences) / len(sentences) for sentences in stories]
    rewards_seen.append(rewards)
    return rewards


class Watched(MiniTLTTrainer):
    """Keeps what a lesson wants to look at: the advantages that TRL computed, accept lengths."""

    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        self.advantages.append(out["advantages"].clone())
        self.accept_lengths.append(self.last_rollout.stats.accept_length)
        self.texts.append(self.last_rollout.completion_ids)
        return out


def train(arms: list[str]) -> Watched:
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=3 * GROUP,
            num_generations=GROUP,
            max_completion_length=64,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=1,
        )
        trainer = Watched(
            model=load_model(),
            processing_class=tokenizer(),
            reward_funcs=[cats],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["tell 1:", "tell 2:"] * 24}),
            rollout=RolloutConfig(arms=arms),
            drafter=DrafterConfig(draft_vocab_size=0, train_head=False, pack_tokens=128),
            spot=SpotConfig(mode="inline", inline_fraction=0.5),
        )
        trainer.remove_callback(PrinterCallback)  # it would print every metric of every step
        trainer.advantages, trainer.accept_lengths, trainer.texts = [], [], []
        trainer.train()
        trainer.speculation.spot.close()
    return trainer


# %% [markdown]
# We train twice with the same seed: once without drafts, once with a drafter that starts from the
# target's own weights and learns on the way. There is one process here, hence no rank to wait
# for; the drafter trains for a share of the rollout's time instead (`mode="inline"`).

# %%
plain = train(["off"])
fast = train(["eagle-3"])
history = {
    name: [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    for name, trainer in (("plain", plain), ("speculative", fast))
}
weights = zip(plain.model.parameters(), fast.model.parameters(), strict=True)
print("same completions in every step:", plain.texts == fast.texts)
print("same rewards in every step:    ", history["plain"] == history["speculative"])
print("same weights at the end:       ", all(torch.equal(a, b) for a, b in weights))

# %%
figure, (left, right) = picture(2, width=9.0, height=3.2)
steps = range(1, NUM_STEPS + 1)
left.plot(steps, history["plain"], color=GREY, linewidth=7, label="plain")
left.plot(steps, history["speculative"], color=BLUE, label="speculative")
left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
left.legend()
left.set_title("The policy learns, and it learns the same")
right.plot(steps, fast.accept_lengths, "o-", color=GREEN, markersize=4)
right.axhline(1, color=GREY)
right.set(xlabel="step", ylabel="tokens per row and pass", ylim=(0.9, None))
right.set_title("The drafter follows the moving policy (grey: plain)")
show(figure, "07_grpo")
for name, trainer in (("plain", plain), ("speculative", fast)):
    seconds = trainer.last_rollout.stats.seconds
    passes = trainer.last_rollout.stats.verify_steps
    print(f"last rollout, {name}: {passes} passes, {seconds:.2f} s")

# %% [markdown]
# **What the figure says.** Left: the two curves are one curve, not two similar ones. Speculation
# is invisible to the training. Right: meanwhile the drafter gets better, although the policy that
# it imitates moves in every step.
#
# Look at the seconds as well. Fewer passes are not less time here: with 24 rows active and a
# target this small, the drafter costs about as much as the target. We fixed the depth to see the
# drafter at work. With `arms=["off", "eagle-3"]` the bandit of lesson 4 would draft only where it
# pays.
#
# ## Exercise: the advantages
#
# Compute them from one step's rewards, G siblings next to one another. The check compares with
# the numbers that TRL computed in the runs above. (TRL's standard deviation divides by G - 1.)


# %% exercise
def advantages(rewards: list[float], group: int) -> torch.Tensor:
    raise NotImplementedError


# %%
def check(answer) -> None:
    equal = answer([0.5] * 4, 2)
    assert equal.tolist() == [0.0] * 4, f"equal rewards teach nothing, got {equal.tolist()}"
    for step, (rewards, wanted) in enumerate(zip(rewards_seen, plain.advantages, strict=False)):
        got = answer(rewards, GROUP)
        assert got.shape == wanted.shape, f"the shape is {tuple(got.shape)}"
        worst = float((got - wanted).abs().max())
        assert worst < 1e-4, f"step {step + 1}: off by up to {worst:.4f}"


solved = judge(check, advantages)

# %% [markdown]
# **If it went wrong.** `view(-1, group)`, then mean and standard deviation along the last
# dimension, kept as a column.
#
# **To fork it.** Another reward is another function. Another loss is TRL's `loss_type`. A trainer
# that cannot inherit from ours takes `rollout_func=make_rollout_func(engine, params)` instead.
#
# **Next.** Lesson 8 goes down to the kernel that verifies.
