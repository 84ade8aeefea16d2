"""The Triton kernels against the definition: interpreted without a GPU, compiled with one.

Scratch memory is poisoned, tiles are small and odd, and every special case sits in one batch.
"""

import itertools

import pytest
import torch
from kernel_cases import VOCABS, assert_same, hard_batch, keys
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from minitlt import kernels as K  # noqa: E402
from minitlt import kernels_triton as KT  # noqa: E402
from minitlt import kernels_triton_model as KM  # noqa: E402
from minitlt.noise import SEEDS  # noqa: E402

# The interpreter computes both branches of a select in numpy, which warns of what is thrown away.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles_and_poisoned_scratch(monkeypatch: pytest.MonkeyPatch):
    def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        bad = torch.nan if dtype.is_floating_point else 2**31 - 1
        return torch.full(shape, bad, dtype=dtype, device=device)

    for module in (KT, KM):
        monkeypatch.setattr(module, "scratch", poisoned)
    monkeypatch.setattr(KT, "BLOCK", 2048)
    monkeypatch.setattr(KM, "KV_CHUNK", 32)
    monkeypatch.setattr(KM, "KV_BLOCK", 16)


def to_device(args: dict) -> dict:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in args.items()}


def triton_verify(batch: dict, **option) -> K.Verified:
    return KT.coupled_verify_triton(**to_device(batch), **to_device(option))


@triton.jit
def noise_kernel(
    keys_ptr, positions_ptr, hash_ptr, noise_ptr, V: tl.constexpr, SEED0: tl.constexpr,
    SEED1: tl.constexpr,
):  # fmt: skip
    row, ids = tl.program_id(0), tl.arange(0, V)
    key, position = tl.load(keys_ptr + row), tl.load(positions_ptr + row)
    words = KT._row_word(key, position, SEED0), KT._row_word(key, position, SEED1)
    bits = KT._token_bits(words[0], words[1], ids)
    tl.store(hash_ptr + row * V + ids, bits.to(tl.int64))
    tl.store(noise_ptr + row * V + ids, KT._gumbel(bits))


def test_noise_is_the_same_bits():
    k, positions = keys(4).to(DEVICE), torch.tensor([0, 1, 2**31, 2**40], device=DEVICE)
    hashes = torch.empty(4, 2048, dtype=torch.int64, device=DEVICE)
    noise = torch.empty(4, 2048, device=DEVICE)
    noise_kernel[(4,)](k, positions, hashes, noise, 2048, *SEEDS, enable_fp_fusion=False)
    ids = torch.arange(2048)
    assert torch.equal(hashes.cpu(), K.hash_bits(k.cpu(), positions.cpu(), ids))
    assert torch.equal(noise.cpu(), K.gumbel_noise(k.cpu(), positions.cpu(), ids))


@pytest.mark.parametrize("vocab", VOCABS)
def test_coupled_verify_equals_the_definition(vocab: int):
    batch = hard_batch(vocab)
    want = K.coupled_verify_ref(**batch, entropy=True)
    assert_same(triton_verify(batch, entropy=True), want)


@pytest.mark.parametrize("vocab", [2, 31, 1000])
def test_coupled_verify_options(vocab: int):
    batch = hard_batch(vocab, 1)
    batch["tokens_BT"][2, 2:], batch["parents_BT"][2, 2:] = -1, -1  # fewer drafts than the others
    option = {
        "thresholds_BT": torch.full((5, 4), 0.5),
        "sample_logits_BTV": batch["logits_BTV"].flip(-1),
        "limits_B": torch.tensor([1, 2, 4, 0, 9]),
        "stop_ids": (0, 1),
    }
    assert_same(triton_verify(batch, **option), K.coupled_verify_ref(**batch, **option))


def test_result_depends_neither_on_the_tiles_nor_on_the_batch(monkeypatch: pytest.MonkeyPatch):
    batch = {name: x[:3] for name, x in hard_batch(1025).items()}
    want = K.coupled_verify_ref(**batch)
    for block in (256, 4096):
        monkeypatch.setattr(KT, "BLOCK", block)
        assert_same(triton_verify(batch), want)
    order = torch.tensor([2, 0, 1])
    permuted, whole = triton_verify({n: x[order] for n, x in batch.items()}), triton_verify(batch)
    assert torch.equal(permuted.tokens_BD, whole.tokens_BD[order])
    assert torch.equal(permuted.logprobs_BD, whole.logprobs_BD[order])


def test_strided_logits_and_empty_batch():
    batch = hard_batch(31)
    wide = torch.full((5, 4, 40), 9.0)
    wide[..., :31] = batch["logits_BTV"]
    view = batch | {"logits_BTV": wide.to(DEVICE)[..., :31]}
    assert_same(triton_verify(view), K.coupled_verify_ref(**batch))
    out = triton_verify({name: x[:0] for name, x in batch.items()}, entropy=True)
    assert out.tokens_BD.shape == (0, 4)
    none = (torch.zeros(0, 9), keys(0).long(), keys(0).long(), torch.zeros(0))
    assert KT.gumbel_topk_triton(*none, 2).tokens_Nk.shape == (0, 2)


def test_zero_weight_outliers_do_not_hide_the_winner():
    """A single far outlier, and a row of equal logits: the bounds of the group search are tight."""
    logits = torch.zeros(2, 1, 1000)
    logits[0, 0, 7] = 30.0
    one, root = torch.zeros(2, 1, dtype=torch.int64), torch.full((2, 1), -1)
    for position in range(3):
        args = (logits, keys(2), torch.full((2,), position), torch.ones(2), one, root)
        got = KT.coupled_verify_triton(*(x.to(DEVICE) for x in args))
        assert_same(got, K.coupled_verify_ref(*args))


@pytest.mark.parametrize("vocab", VOCABS)
def test_topk_equals_the_definition(vocab: int):
    batch = hard_batch(vocab, 1)
    args = [batch["logits_BTV"][:, 0], *(batch[n] for n in ("keys_B", "positions_B"))]
    args.append(batch["temperatures_B"])
    for k, ids in ((1, None), (min(6, vocab), torch.arange(vocab) * 3 + 1)):
        want = K.gumbel_topk_ref(*args, k, ids)
        moved = [x.to(DEVICE) for x in args]
        got = KT.gumbel_topk_triton(*moved, k, None if ids is None else ids.to(DEVICE))
        for a, b in zip(got[:3], want[:3], strict=True):
            assert torch.equal(a.cpu(), b)
        torch.testing.assert_close(got[3].cpu(), want[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("num_nodes", "heads", "kv_heads"), [(1, 2, 2), (5, 6, 2), (64, 1, 1)])
def test_tree_attention_equals_the_definition(num_nodes: int, heads: int, kv_heads: int):
    gen = torch.Generator().manual_seed(0)
    width, length = 12, 150
    q = torch.randn(3, heads, num_nodes, width, generator=gen)
    k, v = torch.randn(2, 5, kv_heads, length, width, generator=gen)
    lengths = torch.tensor([40, -1, 0])
    bits = [1]
    for n in range(1, num_nodes):
        bits.append(bits[max(0, n - 1 - n % 3)] | (1 << n if n < 63 else -(2**63)))
    ancestors = torch.tensor([bits] * 3)
    args = (q, k, v, lengths, ancestors)
    want = K.tree_attention_ref(*args, 0.3)
    got = KM.tree_attention_triton(*(x.to(DEVICE) for x in args), 0.3).cpu()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert got[1].eq(0).all()
    with pytest.raises(ValueError, match="64 nodes"):
        KM.tree_attention_triton(torch.zeros(1, 1, 65, 4), k, v, lengths, ancestors, 1.0)


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_draft_loss_equals_the_definition(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(KM, "LOSS_BLOCK", 128)
    gen = torch.Generator().manual_seed(0)
    logits = (torch.randn(4, 301, generator=gen) * 2).to(DEVICE).requires_grad_()
    teacher = (torch.randn(4, 301, generator=gen) * 2).to(DEVICE)
    teacher[3, :50] = -torch.inf
    weight = torch.rand(4, generator=gen).to(DEVICE)
    results = []
    for loss in (KM.draft_loss_triton, K.draft_loss_ref):
        out = loss(logits, teacher, kind, 2.0)
        results.append((*out, torch.autograd.grad((out.loss_N * weight).sum(), logits)[0]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_dispatch_reaches_the_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MINITLT_KERNELS", "triton")
    seen = []
    for module, name in itertools.chain(
        ((KT, n) for n in ("coupled_verify", "gumbel_topk")),
        ((KM, n) for n in ("tree_attention", "draft_loss")),
    ):
        monkeypatch.setattr(module, f"{name}_triton", lambda *a, n=name, **k: seen.append(n))
        getattr(K, name)(torch.zeros(1, device=DEVICE))
    assert len(seen) == 4


@pytest.mark.slow
def test_a_whole_row_of_a_real_vocabulary():
    logits = torch.randn(1, 1, 49_152, generator=torch.Generator().manual_seed(0)) * 3
    args = (logits, keys(1), torch.zeros(1).long(), torch.ones(1))
    tree = torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), -1)
    got = KT.coupled_verify_triton(*(x.to(DEVICE) for x in (*args, *tree)))
    assert_same(got, K.coupled_verify_ref(*args, *tree))


# What only a GPU can show.

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def big_batch(dtype: torch.dtype) -> dict:
    gen = torch.Generator().manual_seed(0)
    logits = (torch.randn(8, 5, 151_936, generator=gen) * 3).to(dtype)
    temps = torch.tensor([1.0, 0.0, 0.6, 1.3, 1.0, 1e-5, 1.0, 0.9])
    batch = {"logits_BTV": logits, "keys_B": keys(8), "positions_B": torch.arange(8)}
    batch |= {"temperatures_B": temps, "parents_BT": torch.arange(-1, 4).repeat(8, 1)}
    batch["tokens_BT"] = torch.zeros(8, 5, dtype=torch.int64)
    for node in range(4):  # rows 0..3 draft what will be sampled, the others stop at once
        top = K.gumbel_topk(logits[:, node], keys(8), torch.arange(8) + node, temps, 1)
        batch["tokens_BT"][:4, node + 1] = top.tokens_Nk[:4, 0]
    return batch


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_draws_the_tokens_of_the_cpu(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    batch = big_batch(dtype)
    want = K.coupled_verify(**batch, entropy=True)
    assert want.num_emit_B[:4].tolist() == [5] * 4
    assert_same(K.coupled_verify(**to_device(batch), entropy=True), want)


@gpu
@needs_cuda
@pytest.mark.filterwarnings("default")  # the profiler speaks of its cycles
def test_gpu_graph_capture_and_two_launches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()  # poisoning scratch memory is a launch too
    batch = to_device(big_batch(torch.bfloat16))
    want = K.coupled_verify(**batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = K.coupled_verify(**batch)
    graph.replay()
    assert torch.equal(out.tokens_BD, want.tokens_BD)
    assert torch.equal(out.logprobs_BD, want.logprobs_BD)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        K.coupled_verify(**batch)
    assert sum(e.count for e in prof.key_averages() if "kernel" in e.key) == 2


@gpu
@needs_cuda
def test_gpu_offsets_behind_2_to_the_31(monkeypatch: pytest.MonkeyPatch):
    """2.2e9 logits (4.4 GB): the last row's offset needs 64 bits; it is what it is alone."""
    monkeypatch.undo()
    num, vocab = 2100, 2**20
    logits = torch.zeros(num, 1, vocab, dtype=torch.bfloat16, device=DEVICE)
    logits[-1] = torch.randn(vocab, generator=torch.Generator().manual_seed(0)) * 3
    roots = torch.zeros(num, 1, dtype=torch.int64)
    batch = {"keys_B": keys(num), "positions_B": torch.arange(num), "tokens_BT": roots}
    batch |= {"temperatures_B": torch.ones(num), "parents_BT": roots - 1}
    batch = {"logits_BTV": logits, **to_device(batch)}
    whole = K.coupled_verify(**batch)
    alone = K.coupled_verify(**{name: x[-1:].clone() for name, x in batch.items()})
    assert torch.equal(whole.tokens_BD[-1:], alone.tokens_BD)
    assert torch.equal(whole.logprobs_BD[-1:], alone.logprobs_BD)
    at = ("keys_B", "positions_B", "temperatures_B")
    tops = [K.gumbel_topk(logits[i:, 0], *(batch[n][i:] for n in at), 4) for i in (0, num - 1)]
    assert torch.equal(tops[0].tokens_Nk[-1], tops[1].tokens_Nk[0])


@gpu
@needs_cuda
def test_gpu_attention_and_loss_in_bf16():
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(4, 32, 9, 128, generator=gen).bfloat16().to(DEVICE)
    k, v = torch.randn(2, 4, 8, 2000, 128, generator=gen).bfloat16().to(DEVICE)
    lengths = torch.tensor([1500, 3, -1, 700], device=DEVICE)
    ancestors = torch.tensor([[(2 << n) - 1 for n in range(9)]] * 4, device=DEVICE)
    args = (q, k, v, lengths, ancestors, 128**-0.5)
    torch.testing.assert_close(
        K.tree_attention(*args), K.tree_attention_ref(*args), rtol=2e-2, atol=2e-2
    )
    pair_2NV = apart(torch.randn(2, 64, 32_000, generator=gen).bfloat16()).to(DEVICE)
    logits, teacher = pair_2NV[0].clone().requires_grad_(), pair_2NV[1]
    grads = []
    for loss in (K.draft_loss, K.draft_loss_ref):
        out = loss(logits, teacher)
        grads.append(torch.autograd.grad(out.loss_N.sum(), logits)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=2e-2, atol=1e-5)


def apart(pair_2NV: torch.Tensor) -> torch.Tensor:
    """Draft and teacher logits whose probabilities are nowhere equal but for rounding.

    The gradient of TV jumps where q = p; an entry on the last bit of it may fall to either side.
    """
    pair_2NV = pair_2NV.clone()

    def ratio_NV() -> torch.Tensor:
        logprobs_2NV = pair_2NV.double().log_softmax(-1)
        return (logprobs_2NV[0] - logprobs_2NV[1]).expm1().abs()

    for _ in range(3):  # moving some entries moves every other by a little
        pair_2NV[1] += 0.25 * (ratio_NV() < 1e-4)
    assert ratio_NV().min() > 2e-5
    return pair_2NV


def test_inputs_of_the_loss_are_apart():
    pair_2NV = torch.randn(2, 4, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    pair_2NV[1, 0, :] = pair_2NV[0, 0, :]
    moved_2NV = apart(pair_2NV)
    assert torch.equal(moved_2NV[0], pair_2NV[0])
    assert (moved_2NV[1, 0] != pair_2NV[1, 0]).all()
