"""The samplers in C against the definitions: the noise's bits, and any shape and any logits.

The cases of `test_kernels.py` run through them as well (`way`)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_same, hard_batch, keys
from torch import Tensor

from minitlt import kernels as K
from minitlt import kernels_cpu, native, native_sampler
from minitlt.noise import MIX1, MIX2, SMALL_U, TOKEN

U32 = 0xFFFFFFFF
TEMPERATURES = (0.0, 1e-5, 0.3, 1.0, 2.5)
pytestmark = pytest.mark.skipif(native.library() is None, reason=native.status())


def ids_of(bits: Tensor, row0: int, row1: int) -> Tensor:
    """The token ids (mod 2^32) that have these hashes in a row: `token_bits` backwards."""

    def times_inverse(x: Tensor, factor: int) -> Tensor:
        inverse = pow(factor, -1, 2**32)  # by halves: a product of two 32-bit words needs 64 bits
        high = ((x >> 16) * inverse & U32) << 16
        return (high + (x & 0xFFFF) * inverse) & U32

    h = bits ^ (bits >> 16)
    h = times_inverse(h, MIX2)
    h = h ^ (h >> 13) ^ (h >> 26)
    h = times_inverse((h - row1) & U32, MIX1)
    h = h ^ (h >> 16)
    return times_inverse(h ^ row0, TOKEN)


def test_noise_is_the_definitions_bit_for_bit():
    """Of logits 0 and as many proposals as tokens, the scores are the noise itself."""
    gen, key, at = torch.Generator().manual_seed(0), keys(1), torch.tensor([3])
    edge = int(SMALL_U * 2**32)  # u has 24 bits: hashes 128 apart are neighbours there
    bits = torch.cat([
        torch.randint(0, 2**32, (100_000,), generator=gen),
        2 ** torch.randint(0, 32, (1000,), generator=gen),
        torch.arange(1000), U32 - torch.arange(1000), edge + 64 * torch.arange(-500, 500),
        int((1 - 0.5**0.5) * 2**32) + torch.arange(-1000, 1000),  # 1 - u next to sqrt(1/2)
        int((1 - 1 / 2.718281828) * 2**32) + torch.arange(-1000, 1000),  # E next to 1
    ])  # fmt: skip
    words = [int(word) for word in K.row_words(key, at)]
    for some in bits.split(256):
        ids = ids_of(some, *words)
        assert torch.equal(K.hash_bits(key, at, ids)[0], some)
        zeros = -torch.zeros(1, len(some))  # -0.0 + g is g, also where g is -0.0
        _, index, scores, _ = native_sampler.topk(zeros, key, at, torch.ones(1), len(some), ids)
        want = K.gumbel(some)[index].view(torch.int32)
        assert torch.equal(scores.view(torch.int32), want)


def test_no_close_race_is_lost():
    """Of two tokens the second one's hash is the next smaller: it wins by last bits, or ties."""
    gen, key, at = torch.Generator().manual_seed(0), keys(1), torch.tensor([3])
    words = [int(word) for word in K.row_words(key, at)]
    won = 0
    for bits in torch.randint(1000, 3_000_000, (2000,), generator=gen).tolist():
        ids = ids_of(torch.tensor([bits, bits - 1]), *words)
        for x in (0.0, 5000.0):
            args = torch.full((1, 2), x), key, at, torch.ones(1), 1, ids
            got, want = native_sampler.topk(*args), K.gumbel_topk_ref(*args)
            assert torch.equal(got[1], want.index_Nk)
            assert torch.equal(got[2], want.scores_Nk)
            won += int(got[1])
    assert won > 1000


@st.composite
def logits(draw: st.DrawFn, *sizes: int) -> Tensor:
    """Any of what makes a row hard: ties, huge and tiny numbers, order, NaN, both infinities."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(*sizes, generator=gen) * draw(st.sampled_from((0.0, 1.0, 8.0, 1e4, 1e30)))
    if draw(st.booleans()):
        x = x.round()
    if draw(st.booleans()):
        x = x.sort(-1).values  # every token beats the ones before it
    for value in draw(st.sets(st.sampled_from((torch.nan, torch.inf, -torch.inf)))):
        share = draw(st.sampled_from((0.01, 0.5, 1.0)))
        x = x.masked_fill(torch.rand(*sizes, generator=gen) < share, value)
    return x


def close(got: Tensor, want: Tensor, x: Tensor, temperatures: Tensor) -> None:
    """Up to the last bit of the largest number: at T = 1e-5 it may be worth more than 1."""
    heat = torch.where(temperatures > 0, temperatures, 1.0)
    most = (K.finite(x).masked_fill(x == -torch.inf, 0).abs().amax() / heat.amin()).nan_to_num()
    atol = 1e-5 + 2.0**-22 * float(most)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=atol)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_topk_is_the_definition(data: st.DataObject):
    num, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 1200))
    k = data.draw(st.sampled_from(sorted({1, min(vocab, 3), min(vocab, 256)})))
    x = data.draw(logits(num, vocab))
    if data.draw(st.booleans()):
        x = torch.stack([x, x * 0], dim=1)[:, 0]  # rows with something between them
    heat = torch.tensor(data.draw(st.lists(st.sampled_from(TEMPERATURES), min_size=num,
                                           max_size=num)))  # fmt: skip
    ids = torch.arange(vocab) * 5 + 2 if data.draw(st.booleans()) else None
    args = x, keys(num), torch.arange(num) + 2**32 - 2, heat, k, ids
    got, want = K.TopK(*native_sampler.topk(*args)), K.gumbel_topk_ref(*args)
    for name in ("tokens_Nk", "index_Nk", "scores_Nk"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    close(got.logprobs_Nk, want.logprobs_Nk, x, heat)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_verify_is_the_definition(data: st.DataObject):
    num, nodes = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    vocab = data.draw(st.integers(1, 6) | st.integers(250, 1100))
    x = data.draw(logits(num, nodes, vocab))
    heat = torch.tensor(data.draw(st.lists(st.sampled_from(TEMPERATURES), min_size=num,
                                           max_size=num)))  # fmt: skip
    parents = [-1] + [data.draw(st.integers(-1, n - 1)) for n in range(1, nodes)]
    k, positions, options = keys(num), torch.arange(num), {}
    options["entropy"] = data.draw(st.booleans())
    if data.draw(st.booleans()):
        options["sample_logits_BTV"] = data.draw(logits(num, nodes, vocab))
    if data.draw(st.booleans()):
        value = data.draw(st.sampled_from((-torch.inf, -1.0, 0.0, 2.0, torch.inf)))
        options["thresholds_BT"] = torch.full((num, nodes), value)
    if data.draw(st.booleans()):
        options["limits_B"] = torch.arange(num)
    # Drafts that the target chooses, where the tree has room for them; equal siblings among them.
    tokens = torch.full((num, nodes), -1)
    chain = {"parents_BT": torch.arange(-1, nodes - 1).expand(num, -1)}
    for n in range(1, nodes):
        if parents[n] >= 0 and data.draw(st.booleans()):
            at = [parents[n]]
            while parents[at[-1]] >= 0:
                at.append(parents[at[-1]])
            alone = {name: value[:, at[:1]] for name, value in options.items()
                     if name in ("sample_logits_BTV", "thresholds_BT")}  # fmt: skip
            root = {"tokens_BT": tokens[:, :1], "parents_BT": chain["parents_BT"][:, :1]}
            one = K.coupled_verify_ref(x[:, at[:1]], k, positions + len(at) - 1, heat, **root,
                                       **alone)  # fmt: skip
            tokens[:, n] = one.tokens_BD[:, 0]
    if data.draw(st.booleans()):
        options["stop_ids"] = tokens[:1, -1].tolist()
    args = x, k, positions, heat, tokens, torch.tensor(parents).expand(num, -1)
    want = K.coupled_verify_ref(*args, **options)
    got = kernels_cpu.coupled_verify_cpu(*args, **options)
    for name in ("tokens_BD", "num_emit_B", "nodes_BD", "num_nan_B"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    close(got.logprobs_BD, want.logprobs_BD, x, heat)
    if want.entropies_BD is not None:
        close(got.entropies_BD, want.entropies_BD, x, heat)


def test_no_bit_depends_on_threads_or_company():
    batch, threads = hard_batch(4097), torch.get_num_threads()
    whole = K.coupled_verify(**batch, entropy=True)
    try:
        torch.set_num_threads(2)
        both = K.coupled_verify(**batch, entropy=True)
    finally:
        torch.set_num_threads(threads)
    alone = [K.coupled_verify(**{name: x[b : b + 1] for name, x in batch.items()}, entropy=True)
             for b in range(5)]  # fmt: skip
    for name in ("tokens_BD", "logprobs_BD", "entropies_BD", "num_nan_B"):
        want = getattr(whole, name)
        assert torch.equal(getattr(both, name), want), name
        assert torch.equal(torch.cat([getattr(one, name) for one in alone]), want), name


def test_who_answers(monkeypatch: pytest.MonkeyPatch):
    """fp32 goes to C, and all else to NumPy: other dtypes, long lists, and no compiler."""
    x, one = torch.randn(1, 300), torch.ones(1)
    assert native_sampler.takes(x, one, None)
    assert not native_sampler.takes(x.bfloat16(), one)
    assert not native_sampler.takes(x, one.double())
    assert not native_sampler.takes(x, one, k=257)
    args = x, keys(1), torch.zeros(1).long(), one
    for k in (256, 257):
        got, want = K.gumbel_topk(*args, k), K.gumbel_topk_ref(*args, k)
        assert torch.equal(got.scores_Nk, want.scores_Nk)
    batch, calls = hard_batch(31), []
    monkeypatch.setattr(native_sampler, "verify", lambda *_: calls.append(1) or (None,) * 6)
    K.coupled_verify(**batch)
    assert calls == [1]
    monkeypatch.undo()
    want = K.coupled_verify(**batch)
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native_sampler, "verify", None)
    assert_same(K.coupled_verify(**batch), want)
