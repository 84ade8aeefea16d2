# %% [markdown]
# # 3. Exact speculation
#
# **Question.** How can drafting ahead make a model faster and change nothing of what it says?
#
# **The idea.** Let the target draw *its own* token at every position, with noise that belongs to
# the position and not to the attempt:
#
#     s = argmax_v ( logits[v] / T + g(key, position, v) )          g: Gumbel noise
#
# A drafted token is accepted exactly when it equals s, and s is written either way. The text is
# then a function of the key and the target alone. The drafter decides only how fast it appears.
#
# This is Gumbel-max coupling (Daliri, Musco and Suresh, arXiv 2408.07978). We put the classic
# rule of speculative sampling (Leviathan et al., arXiv 2211.17192) beside it.

# %%
import sys

import torch
from torch import Tensor

sys.path.append("..")
from course import BLUE, GREEN, GREY, INK, ORANGE, Oracle, judge, picture, show
from toy import STOP, decode, load_model, tail_of_prompts

from minitlt.draft import chain_parents
from minitlt.kernels import (
    coupled_verify,
    gumbel_noise,
    gumbel_topk,
    rejection_verify,
    row_key,
    stream_keys,
)
from minitlt.ngram import NgramDrafter
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import make_target

# %% [markdown]
# ## Sampling is a race
#
# Why is the argmax of "logits plus noise" a sample of the softmax at all? Give every token v a
# waiting time E_v / p_v, where E_v is a standard exponential variable. The first to arrive is v
# with probability p_v. Take minus the logarithm: log p_v - log E_v, and -log E_v is Gumbel noise.
# The largest score wins the race.
#
# In `minitlt` the noise is a hash: a pure function of (key, position, token id). Draw the same
# position twice and you get the same token. Draw 20,000 positions and you get the law:

# %%
NUM = 20_000
keys = torch.tensor([row_key(1, 0, i) for i in range(NUM)])
positions = torch.zeros(NUM, dtype=torch.int64)
ones = torch.ones(NUM)
target_logits = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5])
draft_logits = torch.tensor([1.0, 2.0, 0.8, 0.8, -0.5, 0.2])  # a drafter with its own opinion
p, q = target_logits.softmax(0), draft_logits.softmax(0)

noise = gumbel_noise(keys, positions, torch.arange(6))
samples = (target_logits + noise).argmax(1)
print("softmax  ", [f"{x:.3f}" for x in p])
print("the race ", [f"{x:.3f}" for x in samples.bincount(minlength=6) / NUM])

# %% [markdown]
# ## Two ways to check a draft
#
# **Coupled.** The drafter proposes with the *same* noise, d = argmax(its logits + g). When its
# law is close to the target's, the same token tends to win both races. The target's sample is
# written whatever the drafter said.
#
# **Classic.** The drafter draws d from its law q with noise of its own. Accept with probability
# min(1, p(d) / q(d)); after a rejection draw from max(p - q, 0), normalised. The law comes out as
# p as well, and no rule can accept more often: a draft is accepted with probability
# sum_v min(p(v), q(v)).
#
# **A trap.** Keep the coupled sample only when the draft was right and draw again otherwise. That
# looks harmless and is biased: tokens that the drafter likes are kept more often.


# %%
def spread(row: Tensor, num_tokens: int) -> Tensor:
    """The same logits for every key, and for each of `num_tokens` positions: [NUM, tokens, V]."""
    return row.expand(NUM, num_tokens, -1)


chain = chain_parents(1).expand(NUM, -1)
proposed = gumbel_topk(spread(draft_logits, 1)[:, 0], keys, positions, ones, 1).tokens_Nk
root = torch.zeros(NUM, 1, dtype=torch.int64)
coupled = coupled_verify(
    spread(target_logits, 2), keys, positions, ones, torch.cat([root, proposed], 1), chain
)
own_noise = stream_keys(keys, "draft")
drawn = gumbel_topk(spread(draft_logits, 1)[:, 0], own_noise, positions, ones, 1).tokens_Nk
classic = rejection_verify(
    spread(target_logits, 2), spread(draft_logits, 1), drawn, keys, positions, ones
)
laws = {
    "softmax of the target": (p, GREY),
    "coupled": (coupled.tokens_BD[:, 0].bincount(minlength=6) / NUM, BLUE),
    "classic": (classic.tokens_BD[:, 0].bincount(minlength=6) / NUM, GREEN),
}
right = coupled.tokens_BD[:, 0][coupled.num_emit_B == 2]
laws["trap: right drafts only"] = (right.bincount(minlength=6) / len(right), ORANGE)


# %% [markdown]
# And how often are drafts accepted? We make a drafter worse and worse by adding random errors to
# the target's logits (vocabulary 200), and count.


# %%
def acceptance(error: float) -> tuple[float, float, float, float]:
    """(best possible, classic, coupled, drafter and target draw independently)."""
    generator = torch.Generator().manual_seed(0)
    truth = 2 * torch.randn(NUM // 10, 200, generator=generator)
    blurred = truth + error * torch.randn(truth.shape, generator=generator)
    n = len(truth)
    k, at, t = keys[:n], positions[:n], ones[:n]
    law_p, law_q = truth.softmax(1), blurred.softmax(1)
    shared = gumbel_topk(blurred, k, at, t, 1).tokens_Nk
    own = gumbel_topk(blurred, stream_keys(k, "draft"), at, t, 1).tokens_Nk
    logits = truth[:, None].expand(-1, 2, -1)
    tokens = torch.cat([root[:n], shared], 1)
    by_match = coupled_verify(logits, k, at, t, tokens, chain[:n]).num_emit_B == 2
    by_ratio = rejection_verify(logits, blurred[:, None], own, k, at, t).num_emit_B == 2
    best = torch.minimum(law_p, law_q).sum(1)
    alone = (law_p * law_q).sum(1)
    return tuple(x.float().mean().item() for x in (best, by_ratio, by_match, alone))


errors = [0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0]
best, by_ratio, by_match, alone = zip(*map(acceptance, errors), strict=True)

# %%
figure, (left, middle) = picture(2, width=9.6, height=3.4)
for i, (name, (law, colour)) in enumerate(laws.items()):
    left.bar([v + 0.2 * (i - 1.5) for v in range(6)], law.tolist(), 0.19, color=colour, label=name)
left.set(xlabel="token", ylabel="probability")
left.legend(fontsize=8.5)
left.set_title("Two rules give the target's law, the trap does not")
middle.plot(errors, best, color=INK, linewidth=1, linestyle="--")
for name, line, colour in (
    ("classic (the optimum, dashed)", by_ratio, GREEN),
    ("coupled", by_match, BLUE),
    ("independent draws", alone, GREY),
):
    middle.plot(errors, line, "o-", color=colour, markersize=4, label=name)
middle.set(xlabel="error of the drafter's logits", ylabel="drafts accepted", ylim=(0, 1.03))
middle.legend(fontsize=8.5)
middle.set_title("Coupling accepts nearly as often as possible")
show(figure, "03_rules")
gap = max(b - m for b, m in zip(best, by_match, strict=True))
print(f"Coupling accepts at most {gap:.3f} less than the optimum in this experiment.")

# %% [markdown]
# **What the figure says.** Left: both rules are exact, and the tempting shortcut is not. Right:
# coupling costs a little acceptance against the optimum, and without shared noise acceptance
# would be poor. What do we buy with that little?
#
# ## The text does not depend on the drafter
#
# Use the same keys with two drafters, and count the positions at which the written token differs.

# %%
other_logits = draft_logits.flip(0)
other_shared = gumbel_topk(spread(other_logits, 1)[:, 0], keys, positions, ones, 1).tokens_Nk
other_own = gumbel_topk(spread(other_logits, 1)[:, 0], own_noise, positions, ones, 1).tokens_Nk
again = coupled_verify(
    spread(target_logits, 2), keys, positions, ones, torch.cat([root, other_shared], 1), chain
)
classic_again = rejection_verify(
    spread(target_logits, 2), spread(other_logits, 1), other_own, keys, positions, ones
)
print(
    "coupled:", int((coupled.tokens_BD[:, 0] != again.tokens_BD[:, 0]).sum()), "of", NUM, "differ"
)
print("classic:", int((classic.tokens_BD[:, 0] != classic_again.tokens_BD[:, 0]).sum()), "differ")

# %% [markdown]
# The classic rule promises a *law*. To test it you need statistics. The coupled rule promises a
# *text*, so the test is an equality. Here it is on a whole rollout: plain decoding, a drafter
# that copies earlier text, and one that is right six times out of ten.

# %%
target = make_target(load_model())
params = SamplingParams(max_new_tokens=200, stop_ids=(STOP,))
prompts = tail_of_prompts(12)
row_keys = [row_key(7, 0, i) for i in range(len(prompts))]
plain = RolloutEngine(target).generate(prompts, params, row_keys)
print(decode(plain.completion_ids[0]))
for drafter in (NgramDrafter(), Oracle.of(plain, prompts, row_keys, skill=0.6)):
    engine = RolloutEngine(target, [drafter], Bandit([Arm(drafter.name, depth=4)]))
    fast = engine.generate(prompts, params, row_keys)
    print(
        f"{drafter.name:>6}: same tokens {fast.completion_ids == plain.completion_ids}, "
        f"{fast.stats.accept_length:.2f} tokens per row and pass instead of 1"
    )

# %% [markdown]
# ## Exercise: verify a chain
#
# The target has scored a chain of K drafts: row i of `logits_TV` (T = K + 1) follows i of them,
# and decides the token at `position + i`. Return the tokens that are written. Use `gumbel_noise`.
# At temperature 0 there is no noise. You write between 1 and K + 1 tokens.


# %% exercise
def verify_chain(
    logits_TV: Tensor, drafts: list[int], key: int, position: int, temperature: float
) -> list[int]:
    raise NotImplementedError


# %%
def check(answer) -> None:
    generator = torch.Generator().manual_seed(5)
    lengths = set()
    for case in range(60):
        num, temperature = case % 5, (0.0, 0.7, 1.0)[case % 3]
        logits = 2 * torch.randn(1, num + 1, 7, generator=generator)
        key, at = torch.tensor([row_key(3, 1, case)]), torch.tensor([case])
        heat, drafts = torch.tensor([temperature]), []
        for i in range(num):  # a drafter that is right half of the time
            true = gumbel_topk(logits[:, i], key, at + i, heat, 1).tokens_Nk.item()
            drafts.append((true + int(torch.randint(2, (), generator=generator))) % 7)
        tokens = torch.tensor([[0, *drafts]])
        wanted = coupled_verify(logits, key, at, heat, tokens, chain_parents(num)[None])
        written = wanted.tokens_BD[0, : wanted.num_emit_B[0]].tolist()
        got = answer(logits[0], drafts, int(key), case, temperature)
        assert got == written, f"drafts {drafts} at T = {temperature}: {got} instead of {written}"
        lengths.add((num, len(written)))
    assert len(lengths) > 10, "the cases should differ in how many drafts are accepted"


solved = judge(check, verify_chain)

# %% [markdown]
# **If it went wrong.** The last token written is never a draft: it is either the target's
# correction of a wrong one, or its own token behind a chain that was right throughout. Row i uses
# the noise of `position + i`. `gumbel_noise` wants tensors of keys and positions.
#
# **Next.** Lesson 4: how many tokens should one draft?
