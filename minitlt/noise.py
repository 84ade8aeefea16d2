"""Noise that is a pure function of (row key, position, token id), the same bits on every device.

64 bits of row state, murmur3 of (key low word, key high word, position) under two seeds, meet the
token id in a short murmur3 finaliser and give 32 bits h (`hash_bits`). Then

    u = (h + 1/2) / 2^32,    E = -log(1 - u),    g = -log(E)    is standard Gumbel noise.

E is a waiting time: the winner is the token that waits least, so it is *small* u that decides, and
that is the end where fp32 is precise. The customary -log(-log(u)) puts the winner at u near 1,
where fp32 has 24 bits: one hash in 2^25 rounds to u = 1, an infinite score, and at V = 151,936
about 0.45 % of all draws return a random token. Here the largest noise, 22.9, is what 32 bits
give. Both logarithms are written out in separately rounded fp32 adds and multiplies (`gumbel`), so
that noise and scores, not only hashes, are the same bits on every device: equal logits draw equal
tokens on a laptop and on a GPU.

`token_bits` and `gumbel` take NumPy arrays as well, `row_words` also plain integers, and give the
same bits: a sampler on a CPU asks for a handful of scores, and a small operation of NumPy costs a
quarter of torch's.

Left out: float64 noise, generators with a state.
How to run: `pytest tests/test_noise.py`.

Letters: N rows, V vocabulary.
"""

from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Array = TypeVar("Array", bound=Any)  # a tensor, a NumPy array, an integer

TOKEN, MIX1, MIX2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35  # odd: multiplying by them is a bijection
SEEDS = (0x243F6A88, 0xB7E15162)  # first bits of pi and of e
STREAMS = {"coupled": 0, "draft": 1, "accept": 2, "residual": 3}
# log(1 + f) = f - f^2/2 + f^3 P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]: minimax, relative error 8e-8
LOG_POLY = (
    *(0.3333333134651184, -0.2500081956386566, 0.20001226663589478, -0.16623356938362122),
    *(0.14201758801937103, -0.13160182535648346, 0.12761574983596802, -0.07634492963552475),
)
LN2_HI, LN2_LO = 0.693359375, -2.12194440e-4
SQRT_HALF_BITS = 0x3F3504F3
SMALL_U = 0.29  # below it log(1 - u) is expanded around u = 0, where u has its full precision
_U32 = 0xFFFFFFFF


def _signed64(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def row_key(seed: int, generation: int, row: int) -> int:
    """The signed 64-bit noise key of one sequence: a hash of (run seed, generation, global row).

    Never derive a key from a batch slot, a rank or an engine step: the same completion must draw
    the same noise wherever it is decoded.
    """
    mask, state = (1 << 64) - 1, 0
    for word in (seed, generation, row):
        state = (state + (word & mask) + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return _signed64(state)


def stream_keys(keys: Tensor, stream: str) -> Tensor:
    """Keys of a disjoint noise stream: "draft", "accept" and "residual" of the ratio test."""
    return keys ^ _signed64((STREAMS[stream] * 0x9E3779B97F4A7C15) & ((1 << 64) - 1))


def row_words(keys_N: Array, positions_N: Array) -> tuple[Array, Array]:
    """Two 32-bit words of row state, as int64 [N] each: murmur3 under two seeds."""
    scrambled = []
    for word in (keys_N, keys_N >> 32, positions_N):  # only the low 32 bits of a product count
        k = ((word * 0xCC9E2D51) & _U32) << 15
        scrambled.append(((k | (k >> 32)) * 0x1B873593) & _U32)
    return _murmur(SEEDS[0], scrambled), _murmur(SEEDS[1], scrambled)


def _murmur(h: Any, scrambled: list[Array]) -> Array:
    for k in scrambled:
        h = (h ^ k) << 13
        h = ((h | (h >> 32)) * 5 + 0xE6546B64) & _U32
    h = ((h ^ (h >> 16)) * MIX1) & _U32
    h = ((h ^ (h >> 13)) * MIX2) & _U32
    return h ^ (h >> 16)


def token_bits(row0: Array, row1: Array, ids: Array) -> Array:
    """The 32-bit hash of token ids under a row's two words, as int64."""
    h = row0 ^ ((ids * TOKEN) & _U32)
    h = ((h ^ (h >> 16)) * MIX1 + row1) & _U32
    h = ((h ^ (h >> 13)) * MIX2) & _U32
    return h ^ (h >> 16)


def hash_bits(keys_N: Tensor, positions_N: Tensor, ids_V: Tensor) -> Tensor:
    """The 32-bit hash of every (key, position, token id), as int64 [N, V]; int64 inputs."""
    row0, row1 = row_words(keys_N, positions_N)
    return token_bits(row0[:, None], row1[:, None], ids_V[None, :])


def _lib(x: Any) -> Any:
    return torch if isinstance(x, Tensor) else np


def _log(f: Array, exponent: Array) -> Array:
    """log((1 + f) * 2^exponent), every add and multiply rounded on its own."""
    square = f * f
    poly: Any = LOG_POLY[-1]
    for coefficient in LOG_POLY[-2::-1]:
        poly = poly * f + coefficient
    tail = poly * f * square + exponent * LN2_LO - 0.5 * square
    return (f + tail) + exponent * LN2_HI


def _split(y: Array) -> tuple[Array, Array]:
    """y = (1 + f) * 2^e with 1 + f in [sqrt(1/2), sqrt(2)), exactly."""
    lib = _lib(y)
    bits = y.view(lib.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(lib.float32) - 1.0
    return f, lib.asarray(exponent, dtype=lib.float32)


def gumbel(bits: Array) -> Array:
    """Standard Gumbel noise of a 32-bit hash: -log(-log(1 - u)), u = (bits + 1/2) / 2^32; fp32."""
    lib = _lib(bits)
    u = (lib.asarray(bits, dtype=lib.float32) + 0.5) * 2.0**-32
    # 1 - u, with its own full precision
    rest = (lib.asarray(_U32 - bits, dtype=lib.float32) + 0.5) * 2.0**-32
    f, exponent = _split(rest)
    small = u < SMALL_U
    waiting = -_log(lib.where(small, -u, f), exponent * ~small)
    return -_log(*_split(waiting))


def gumbel_noise(keys_N: Tensor, positions_N: Tensor, ids_V: Tensor) -> Tensor:
    """The noise g(key, position, token id) that every sampler here adds, fp32 [N, V]."""
    return gumbel(hash_bits(keys_N, positions_N, ids_V))
