"""The noise: an independent implementation, frozen bits, its law, and independence across keys."""

import itertools
import math

import numpy as np
import pytest
import torch
from kernel_cases import assert_same, chi_square, chi_square_limit, hard_batch, keys

from minitlt import kernels as K
from minitlt import kernels_cpu
from minitlt.noise import SMALL_U

U32 = 0xFFFFFFFF
FROZEN_HASHES = [3378496765, 691471828, 344745690]
FROZEN_KEY = 7702586659592502839


def python_hash(key: int, position: int, token: int) -> int:
    """The hash in plain Python, from its description: murmur3, then the token's finaliser."""

    def rotl(x: int, r: int) -> int:
        return ((x << r) | (x >> (32 - r))) & U32

    def finalise(h: int, between: int = 0) -> int:
        h = ((h ^ (h >> 16)) * 0x85EBCA6B + between) & U32
        h = ((h ^ (h >> 13)) * 0xC2B2AE35) & U32
        return h ^ (h >> 16)

    rows = []
    for seed in (0x243F6A88, 0xB7E15162):
        h = seed
        for word in (key & U32, (key >> 32) & U32, position & U32):
            h ^= rotl(word * 0xCC9E2D51 & U32, 15) * 0x1B873593 & U32
            h = (rotl(h, 13) * 5 + 0xE6546B64) & U32
        rows.append(finalise(h))
    return finalise(rows[0] ^ (token * 0x9E3779B1 & U32), rows[1])


def test_hash_equals_an_independent_implementation_and_never_changes():
    key_list = [0, 1, -1, 2**63 - 1, -(2**63), K.row_key(1, 2, 3)]
    positions, ids = [0, 1, 77, 2**31, 2**32 + 5], [0, 1, 2, 49_151, 151_935, 2**31]
    for key, position in itertools.product(key_list, positions):
        got = K.hash_bits(torch.tensor([key]), torch.tensor([position]), torch.tensor(ids))
        assert got.tolist() == [[python_hash(key, position, token) for token in ids]]
    frozen = K.hash_bits(torch.tensor([1]), torch.tensor([2]), torch.arange(3))
    assert frozen.tolist() == [FROZEN_HASHES]
    assert K.row_key(1, 2, 3) == FROZEN_KEY


def test_row_keys_differ_in_every_argument():
    all_keys = {K.row_key(a, b, c) for a in range(8) for b in range(8) for c in range(8)}
    assert len(all_keys) == 512
    assert all(-(2**63) <= key < 2**63 for key in all_keys)


def test_noise_is_the_float64_formula_even_at_the_ends():
    gen = torch.Generator().manual_seed(0)
    bits = torch.cat([
        torch.randint(0, 2**32, (20_000,), generator=gen),
        torch.arange(64), U32 - torch.arange(64), 2 ** torch.arange(32),
        int(SMALL_U * 2**32) + torch.arange(-64, 64),
    ])  # fmt: skip
    u = (bits.double() + 0.5) / 2**32
    exact = -torch.log(-torch.log1p(-u))
    torch.testing.assert_close(K.gumbel(bits).double(), exact, rtol=3e-7, atol=3e-7)
    assert 22.8 < float(K.gumbel(torch.tensor([0]))) < 22.9  # nothing is ever infinite


def test_fast_bits_are_the_hash_and_dtype_default_does_not_matter():
    k, positions = keys(3), torch.tensor([0, 9, 2**40])
    words = np.array(list(map(K.row_words, k.tolist(), positions.tolist())))
    h, shifted = np.empty((2, 3, 1000), dtype=np.uint32)
    kernels_cpu._fast_bits(words, kernels_cpu._token_half(1000), h, shifted)
    want_bits = K.hash_bits(k, positions, torch.arange(1000))
    assert h.tolist() == want_bits.tolist()
    # NumPy arrays give the noise that tensors give.
    token_bits = K.token_bits(words[:, :1], words[:, 1:], np.arange(1000))
    assert token_bits.tolist() == want_bits.tolist()
    noise = torch.from_numpy(K.gumbel(token_bits))
    assert torch.equal(noise.view(torch.int32), K.gumbel(want_bits).view(torch.int32))
    batch = hard_batch(31)
    want = K.coupled_verify(**batch)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(K.coupled_verify(**batch), want)
        assert K.coupled_verify(**batch).logprobs_BD.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_uniformity_and_both_tails():
    noise = K.gumbel_noise(keys(32), torch.arange(32), torch.arange(65_536)).flatten()
    n = noise.numel()
    for c in (-2.0, -1.0, 0.0, 2.0, 6.0, 9.0):
        law = 1 - math.exp(-math.exp(-c))
        z = (int((noise > c).sum()) - n * law) / math.sqrt(n * law * (1 - law))
        assert abs(z) < 4, (c, z)
    bits = K.hash_bits(keys(4), torch.arange(4), torch.arange(65_536))
    for shift in (0, 8, 16, 24):
        counts = torch.bincount(((bits >> shift) & 255).flatten(), minlength=256)
        assert chi_square(counts, torch.full((256,), 1 / 256)) < chi_square_limit(256)


@pytest.mark.parametrize("other", ["position", "row", "token", "stream"])
def test_noise_is_independent_across(other: str):
    n, k, positions, ids = 20_000, keys(1).expand(20_000), torch.arange(20_000), torch.arange(4)
    a = K.gumbel_noise(k, positions, ids)
    if other == "position":
        b = K.gumbel_noise(k, positions + 1, ids)
    elif other == "row":
        b = K.gumbel_noise(keys(2)[1:].expand(n), positions, ids)
    elif other == "token":
        b = K.gumbel_noise(k, positions, ids + 1)[:, [3, 0, 1, 2]]
    else:
        b = K.gumbel_noise(K.stream_keys(k, "draft"), positions, ids)
    pair = a.argmax(1) * 4 + b.argmax(1)
    if other != "token":  # shifted token ids share three of four draws
        assert chi_square(torch.bincount(pair, minlength=16), torch.full((16,), 1 / 16)) < 50
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.015
    fresh = torch.stack([a[:, 0], b[:, 0]]) if other == "token" else torch.stack([a[:, 0], a[:, 1]])
    assert abs(float(torch.corrcoef(fresh)[0, 1])) < 0.03


def test_samples_follow_the_softmax():
    logits, n = torch.linspace(-2, 2, 16), 40_000
    token = K.gumbel_topk(
        logits.expand(n, -1), keys(1).expand(n), torch.arange(n), torch.full((n,), 0.7), 1
    ).tokens_Nk[:, 0]
    law = (logits.double() / 0.7).softmax(0)
    assert chi_square(torch.bincount(token, minlength=16), law) < chi_square_limit(16)
