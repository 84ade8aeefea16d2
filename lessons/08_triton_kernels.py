# %% [markdown]
# # 8. The Triton kernels
#
# **Question.** How can 150,000 logits become one token if each may be read only once?
#
# **The idea.** Verification must find, for every row of logits, the winner of the race (lesson 3)
# and its log-probability. In PyTorch each step of that, dividing, hashing, adding, comparing,
# reads and writes a whole row. But a maximum can be taken piece by piece, and so can a softmax's
# denominator if each piece remembers its own maximum. So: cut the row into *tiles*, let one
# program per tile read its part once and leave a few numbers, and let a second, small launch
# combine them.
#
# No GPU is needed: Triton's interpreter runs the kernels on the CPU, slowly and readably.

# %%
import math
import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before the first kernel is defined
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append("..")
from course import BLUE, GREY, ORANGE, judge, picture, plain_ticks, show

from minitlt.draft import chain_parents
from minitlt.kernels import coupled_verify_ref, gumbel_topk, row_key
from minitlt.kernels_triton import BLOCK, coupled_verify_triton

device = "cuda" if torch.cuda.is_available() else "cpu"
print("kernels run", "on the GPU" if device == "cuda" else "in the interpreter")

# %% [markdown]
# ## Count the bytes
#
# A GPU verifies as fast as it can move bytes, so let us count them. The ledger below adds up what
# every PyTorch operation reads and writes, for one row with the vocabulary of Qwen2.5.


# %%
class Ledger(TorchDispatchMode):
    """Adds up the bytes of all tensors that go into and come out of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.is_view:
            return out
        touched = [*args, *(out if isinstance(out, tuple) else (out,))]
        self.bytes += sum(x.numel() * x.element_size() for x in touched if isinstance(x, Tensor))
        self.operations += 1
        return out


VOCAB = 151_936
logits = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
one = torch.tensor([1])
args = (one, one, torch.ones(1), torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[-1]]))

with Ledger() as reference:
    coupled_verify_ref(logits, *args)
with Ledger() as plain:  # ordinary sampling, nothing verified
    logp = (logits[0].float() / 1.0).log_softmax(-1)
    token = torch.multinomial(logp.exp(), 1)
    logp.gather(1, token)
num_tiles = math.ceil(VOCAB / BLOCK)
fused = 2 * VOCAB + 2 * 28 * num_tiles  # each bf16 logit once; 28 bytes per tile, out and in again

names = ["reference in PyTorch", "softmax and multinomial in PyTorch", "fused: tiles, then combine"]
megabytes = [x / 1e6 for x in (reference.bytes, plain.bytes, fused)]
launches = [reference.operations, plain.operations, 2]

# %%
figure, axes = picture(width=8.0, height=2.3)
axes.barh(names[::-1], megabytes[::-1], color=[BLUE, GREY, ORANGE], height=0.6)
for i, (mb, num) in enumerate(zip(megabytes[::-1], launches[::-1], strict=True)):
    axes.text(1.1 * mb, i, f"{mb:.1f} MB, {num} operations", va="center")
axes.set(xscale="log", xlabel="megabytes moved per row", xlim=(0.1, 60 * max(megabytes)))
plain_ticks(axes.xaxis, [0.1, 1, 10, 100])
axes.set_title(f"One row of {VOCAB:,} logits")
show(figure, "08_bytes")
times = [1e6 * mb / (2 * VOCAB) for mb in megabytes]
print(f"The logits are {2 * VOCAB / 1e6:.1f} MB. The reference moves {times[0]:.0f} times as much,")
print(f"plain sampling {times[1]:.0f} times, the fused kernel {times[2]:.2f} times.")

# %% [markdown]
# **What the figure says.** The reference is written to be read, and it pays for that in bytes.
# Even ordinary sampling reads and writes the row many times over. The fused kernel reads it once,
# and no verification can do with less.
#
# ## Same tokens as the reference
#
# Two definitions of one function are a test. The kernel hashes the same bits and rounds the same
# additions as the reference, so the tokens must be *equal*, whatever the vocabulary. (The tiles
# hold 8,192 logits; 9,001 makes two, the second one mostly empty.)

# %%
generator = torch.Generator().manual_seed(1)
B, K, V = 3, 2, 9_001
random_logits = 3 * torch.randn(B, K + 1, V, generator=generator)
keys = torch.tensor([row_key(0, 0, row) for row in range(B)])
positions, heat = torch.tensor([10, 20, 30]), torch.tensor([1.0, 0.7, 0.0])
drafts = torch.zeros(B, K + 1, dtype=torch.int64)
for i in range(K):  # row 0 drafts what is right, the others token 0
    drafts[:1, i + 1] = gumbel_topk(
        random_logits[:1, i], keys[:1], positions[:1] + i, heat[:1], 1
    ).tokens_Nk[0, 0]
parents = chain_parents(K).expand(B, -1).contiguous()
wanted = coupled_verify_ref(random_logits, keys, positions, heat, drafts, parents)
on_device = [x.to(device) for x in (random_logits, keys, positions, heat, drafts, parents)]
got = coupled_verify_triton(*on_device)
print("tokens per row:", got.num_emit_B.tolist())
print("equal tokens:  ", torch.equal(got.tokens_BD.cpu(), wanted.tokens_BD))
worst = (got.logprobs_BD.cpu() - wanted.logprobs_BD).abs().max()
print(f"largest difference of a log-probability: {worst:.1e}")

# %% [markdown]
# ## Why the noise is not -log(-log(u))
#
# That is the textbook formula. The race is won at u near 1, and there fp32 has only 24 bits. Look
# at the largest hashes:

# %%
hashes = torch.tensor([2**32 - 1 - 2**i for i in (4, 7, 10, 16)])
u = (hashes.float() + 0.5) * 2.0**-32
for h, textbook in zip(hashes.tolist(), -torch.log(-torch.log(u)), strict=True):
    print(f"u = 1 - {1 - (h + 0.5) / 2**32:.1e}: textbook noise {textbook:.2f}")
lost = int((torch.arange(2**32 - 1024, 2**32).float() * 2.0**-32 == 1).sum())
print(f"{lost} of 2^32 hashes are infinite: at {VOCAB:,} tokens per draw, "
      f"{1 - (1 - lost / 2**32) ** VOCAB:.2%} of all draws return a random token")  # fmt: skip

# %% [markdown]
# The library uses -log(-log(1 - u)) instead: then *small* u wins, where fp32 is at its best.
#
# ## Exercise: your first kernel
#
# Write launch 1 for the softmax's denominator. Program j owns the logits j * BLOCK to
# (j + 1) * BLOCK - 1 of a row. It stores
#
#     top[j]   = max of its logits
#     total[j] = sum of exp(logit - top[j])
#
# The last tile is not full: load with a mask, and -inf where there is nothing. Tiles that are
# -inf throughout must give total 0, not NaN. The second launch is written in PyTorch for you.


# %% exercise
@triton.jit
def tile_kernel(x_ptr, top_ptr, total_ptr, V, BLOCK: tl.constexpr):
    j = tl.program_id(0)
    tl.store(top_ptr + j, 0.0)
    tl.store(total_ptr + j, 0.0)


# %%
def logsumexp(kernel, x: Tensor, block: int = 64) -> float:
    num = triton.cdiv(len(x), block)
    top = torch.full((num,), math.nan, device=x.device)  # poisoned: every entry must be written
    total = top.clone()
    kernel[(num,)](x, top, total, len(x), BLOCK=block)
    highest = top.max()
    return float(highest + (total * (top - highest).exp()).sum().log())


def check(kernel) -> None:
    generator = torch.Generator().manual_seed(2)
    for length in (1, 63, 64, 65, 1000):
        x = 5 * torch.randn(length, generator=generator)
        x[x < -8] = -math.inf
        if length == 1000:
            x[64:200] = -math.inf  # two whole tiles
        got, wanted = logsumexp(kernel, x.to(device)), float(x.double().logsumexp(0))
        assert abs(got - wanted) < 1e-4, f"{length} logits: {got} instead of {wanted:.5f}"
    far = torch.tensor([1e4, 1e4])
    got = logsumexp(kernel, far.to(device))
    assert abs(got - 1e4 - math.log(2)) < 1e-2, f"large logits: {got}; subtract the maximum first"


solved = judge(check, tile_kernel)

# %% [markdown]
# **If it went wrong.** `tl.arange(0, BLOCK)` are the lanes of a tile. (-inf) - (-inf) is NaN:
# bound the maximum from below by a large negative number before you subtract.
#
# **Where to go from here.** `kernels.py` has the definitions and the reasons, `kernels_triton.py`
# the kernels: `_tiles_kernel` is your exercise plus the race, `_walk_kernel` the second launch.
