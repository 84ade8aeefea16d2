"""Laws of short completions, by enumeration, and whether an engine's completions follow them."""

import itertools

import torch
from kernel_cases import chi_square, chi_square_limit
from transformers import GenerationConfig

from minitlt.kernels import row_key

OPTIONS = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"repetition_penalty": 1.5},
    {"min_new_tokens": 2, "stop_ids": (4, 2)},
    {"suppress_ids": (1, 6)},
    {
        "temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
        "min_new_tokens": 2, "stop_ids": (4,), "suppress_ids": (0,),
    },
]  # fmt: skip


def named(options):
    return "+".join(options) or "nothing"


def processors_law(model, prompt, params, vocab):
    """next_law of transformers: its model, its processors, in the order it builds them."""
    processors = model._get_logits_processor(
        GenerationConfig(
            do_sample=True,
            temperature=params.temperature,
            top_k=params.top_k or None,
            top_p=params.top_p,
            min_p=params.min_p or None,
            repetition_penalty=params.repetition_penalty,
            min_new_tokens=params.min_new_tokens or None,
            suppress_tokens=list(params.suppress_ids) or None,
            eos_token_id=list(params.stop_ids) or None,
            _eos_token_tensor=torch.tensor(params.stop_ids),
        ),
        input_ids_seq_length=len(prompt),
        device="cpu",
    )

    def law(prefix):
        if set(prefix) & set(params.stop_ids):  # nothing follows: token 0 stands for the pad
            return torch.eye(vocab)[0]
        ids = torch.tensor([prompt + prefix])
        with torch.no_grad():
            return processors(ids, model(ids).logits[:, -1].float())[0].softmax(-1)

    return law


def joint_law(next_law, vocab, length):
    """Probabilities of all completions of this length [vocab, ..]; next_law(prefix) -> [vocab]."""
    law = torch.ones(())
    for at in range(length):
        rows = [next_law(list(prefix)) for prefix in itertools.product(range(vocab), repeat=at)]
        law = law[..., None] * torch.stack(rows).double().view(*[vocab] * at, vocab)
    return law


def assert_follows(completions, law, factor=1.0):
    """Exact support, and chi-square over the cells that expect at least 5 (the rest is one)."""
    counts = count(completions, law)
    assert not counts[law == 0].any(), "a completion that cannot be"
    assert distance(counts, law) < factor


def count(completions, law):
    """How often each completion occurred; short ones are padded with token 0."""
    counts = torch.zeros_like(law)
    for completion in completions:
        counts[(*completion, *[0] * (law.dim() - len(completion)))] += 1
    return counts


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
