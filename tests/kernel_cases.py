"""Inputs and checks shared by the kernel tests."""

import torch
from torch import Tensor

from minitlt import kernels as K

VOCABS = (1, 2, 31, 1000, 1025, 4097)
TREE = [-1, 0, 0, 1]  # root, two children, and a child of the first


def keys(num: int, generation: int = 0) -> Tensor:
    return torch.tensor([K.row_key(7, generation, i) for i in range(num)])


def hard_batch(vocab: int, seed: int = 0) -> dict:
    """Five rows that between them hold every special case: ties, -inf, NaN, +inf, T = 0, tiny T.

    Children of node 0 are likely tokens, so that walks of several lengths occur.
    """
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 4, vocab, generator=gen) * 3
    logits[1] = logits[1].round()  # ties, at T = 0
    logits[2, :, vocab // 2 :] = -torch.inf
    logits[2, :, 0] = torch.nan
    logits[3] = (logits[3] * 4).round()  # ties that survive a tiny T
    logits[4, 1:] = -torch.inf  # rows of -inf, of NaN, and with +inf
    logits[4, 2] = torch.nan
    logits[4, 3, vocab // 3] = torch.inf
    batch = {
        "logits_BTV": logits,
        "keys_B": keys(5),
        "positions_B": torch.tensor([5, 6, 7, 8, 2**33 + 9]),
        "temperatures_B": torch.tensor([1.0, 0.0, 0.6, 1e-5, 2.0]),
        "tokens_BT": torch.zeros(5, 4, dtype=torch.int64),
        "parents_BT": torch.tensor([TREE] * 5),
    }
    first = K.coupled_verify_ref(**batch).tokens_BD[:, 0]
    batch["tokens_BT"] = torch.stack([first * 0, (first + 1) % vocab, first, first], dim=1)
    batch["parents_BT"][:3, 3] = 2  # in the last two rows node 3 hangs where no walk goes
    return batch


def assert_same(got: K.Verified, want: K.Verified) -> None:
    for name in ("tokens_BD", "num_emit_B", "nodes_BD", "num_nan_B"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
    pairs = [(got.logprobs_BD, want.logprobs_BD)]
    assert (got.entropies_BD is None) == (want.entropies_BD is None)
    if want.entropies_BD is not None:
        pairs.append((got.entropies_BD, want.entropies_BD))
    for a, b in pairs:
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-5)


def chi_square(counts: Tensor, law: Tensor) -> float:
    expected = law.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_limit(cells: int) -> float:
    """Exceeded by chance once in 10,000 (Wilson-Hilferty)."""
    df = cells - 1
    return df * (1 - 2 / (9 * df) + 3.719 * (2 / (9 * df)) ** 0.5) ** 3
