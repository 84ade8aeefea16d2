"""Laws of short completions, by enumeration, and whether an engine's completions follow them."""

import itertools

import torch
from kernel_cases import chi_square, chi_square_limit

from minitlt.kernels import row_key


def joint_law(next_law, vocab, length):
    """Probabilities of all completions of this length [vocab, ..]; next_law(prefix) -> [vocab]."""
    law = torch.ones(())
    for at in range(length):
        rows = [next_law(list(prefix)) for prefix in itertools.product(range(vocab), repeat=at)]
        law = law[..., None] * torch.stack(rows).double().view(*[vocab] * at, vocab)
    return law


def assert_follows(completions, law, factor=1.0):
    """Exact support, and chi-square over the cells that expect at least 5 (the rest is one)."""
    counts = torch.zeros_like(law)
    for completion in completions:
        counts[tuple(completion)] += 1
    assert not counts[law == 0].any(), "a completion that cannot be"
    assert distance(counts, law) < factor


def distance(counts, law):
    """Chi-square over its limit: below 1 for a sample of this law."""
    expected = law * counts.sum()
    large = expected >= 5
    small = torch.stack([x[~large].sum() for x in (counts, law)])
    counts, law = torch.cat([counts[large], small[:1]]), torch.cat([law[large], small[1:]])
    seen = law > 0
    return chi_square(counts[seen], law[seen]) / chi_square_limit(int(seen.sum()))


def many_keys(num, seed=0):
    return [row_key(seed, 5, i) for i in range(num)]
