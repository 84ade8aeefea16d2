"""The CPU path against the definition, and every verification rule by enumeration."""

import importlib.util
import itertools
import json
import logging
import math
import sys
from pathlib import Path

import pytest
import torch
from kernel_cases import VOCABS, assert_same, chi_square, chi_square_limit, hard_batch, keys
from torch import Tensor

from minitlt import kernels as K
from minitlt import kernels_cpu
from minitlt.noise import MIX1, TOKEN

U32 = 0xFFFFFFFF


# Coupled verification: the CPU path is the definition.


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.usefixtures("way")
def test_cpu_path_equals_the_definition(vocab: int):
    for seed in range(2):
        batch = hard_batch(vocab, seed)
        options: list[dict] = [
            {"entropy": True},
            {"thresholds_BT": torch.full((5, 4), 0.5), "stop_ids": (0, 1)},
            {
                "sample_logits_BTV": batch["logits_BTV"].flip(-1),
                "limits_B": torch.tensor([1, 2, 0, 9, 4]),
            },
        ]
        for option in options:
            assert_same(
                kernels_cpu.coupled_verify_cpu(**batch, **option),
                K.coupled_verify_ref(**batch, **option),
            )
        for dtype in (torch.bfloat16, torch.float64):
            low = batch | {"logits_BTV": batch["logits_BTV"].to(dtype)}
            assert_same(kernels_cpu.coupled_verify_cpu(**low), K.coupled_verify_ref(**low))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.usefixtures("way")
def test_cpu_topk_equals_the_definition(vocab: int):
    batch = hard_batch(vocab, 1)
    ids = torch.arange(vocab) * 3 + 1
    for k, ids_V in itertools.product({1, min(4, vocab), min(70, vocab)}, (None, ids)):
        args = [batch["logits_BTV"].flatten(0, 1)]
        args += [batch[n].repeat_interleave(4) for n in ("keys_B", "positions_B", "temperatures_B")]
        got, want = K.gumbel_topk(*args, k, ids_V), K.gumbel_topk_ref(*args, k, ids_V)
        for a, b in zip(got[:3], want[:3], strict=True):
            assert torch.equal(a, b)
        torch.testing.assert_close(got[3], want[3], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("way")
def test_greedy_and_ties_go_to_the_lowest_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]]).expand(2, -1)
    flat = torch.zeros(2, 4)
    for x, want in ((logits, [1, 1]), (flat, [0, 0]), (flat - torch.inf, [0, 0])):
        top = K.gumbel_topk(x, keys(2), torch.arange(2), torch.zeros(2), 4)
        assert top.tokens_Nk[:, 0].tolist() == want
    assert top.tokens_Nk.tolist() == [[0, 1, 2, 3]] * 2
    assert top.logprobs_Nk.isinf().all()
    # Equal scores at T > 0: +inf logits swallow the noise.
    huge = torch.full((1, 4), torch.inf)
    assert K.gumbel_topk(huge, keys(1), torch.arange(1), torch.ones(1), 2).tokens_Nk.tolist() == [
        [0, 1]
    ]


def hash_inverse(h_zero_for: Tensor, row0: Tensor, row1: Tensor) -> Tensor:
    """The token id (mod 2^32) whose hash is 0 under the given row words."""
    inv_mix, inv_token = (pow(m, -1, 2**32) for m in (MIX1, TOKEN))
    y = (-row1 * inv_mix) & U32
    h = y ^ (y >> 16)
    return ((h ^ row0) * inv_token) & U32 | h_zero_for * 0


@pytest.mark.usefixtures("way")
def test_a_hash_of_zero_is_seen_by_the_race():
    vocab, positions = 49_152, torch.arange(300_000)
    key = keys(1)
    ids = hash_inverse(positions, *K.row_words(key.expand(len(positions)), positions))
    at = int((ids < vocab).nonzero()[0])
    token = int(ids[at])
    assert int(K.hash_bits(key, torch.tensor([at]), torch.tensor([token]))) == 0
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(0))
    for value, wins in ((0.0, True), (-torch.inf, False), (-200.0, False)):
        logits[0, token] = value
        args = (logits, key, torch.tensor([at]), torch.ones(1), 3)
        got, want = K.gumbel_topk(*args), K.gumbel_topk_ref(*args)
        assert torch.equal(got.tokens_Nk, want.tokens_Nk)
        assert (int(got.tokens_Nk[0, 0]) == token) is wins


@pytest.mark.usefixtures("way")
def test_rows_do_not_depend_on_their_batch():
    batch = hard_batch(1000)
    whole, order = K.coupled_verify(**batch), torch.tensor([3, 0, 4, 2, 1])
    permuted = K.coupled_verify(**{name: x[order] for name, x in batch.items()})
    assert torch.equal(permuted.tokens_BD, whole.tokens_BD[order])
    for b in range(5):
        alone = K.coupled_verify(**{name: x[b : b + 1] for name, x in batch.items()})
        assert torch.equal(alone.tokens_BD[0], whole.tokens_BD[b])
        assert torch.equal(alone.logprobs_BD[0], whole.logprobs_BD[b])


def chain(logits_BTV: Tensor, drafts: list[list[int]], **kw) -> K.Verified:
    """Verify chains of drafts; -1 pads a row that has fewer."""
    num, nodes = logits_BTV.shape[:2]
    tokens = torch.tensor([[0, *row] for row in drafts])
    parents = torch.where(tokens < 0, -1, torch.arange(-1, nodes - 1))
    defaults = {"temperatures_B": torch.zeros(num)}
    args = {"keys_B": keys(num), "positions_B": torch.arange(num)} | defaults | kw
    return K.coupled_verify(logits_BTV, tokens_BT=tokens, parents_BT=parents, **args)


def one_hot(rows: list[list[int]], vocab: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(rows), vocab).float()


@pytest.mark.usefixtures("way")
def test_walk_accepts_cuts_and_pads():
    logits = one_hot([[1, 2, 3]] * 6, 5)
    limits = torch.tensor([3, 3, 3, 2, 0, 3])
    out = chain(
        logits, [[1, 2], [1, 4], [0, 2], [1, 2], [1, 2], [1, -1]], limits_B=limits, stop_ids=[3]
    )
    assert out.num_emit_B.tolist() == [3, 2, 1, 2, 0, 2]
    assert out.tokens_BD[0].tolist() == [1, 2, 3]
    assert out.tokens_BD[2].tolist() == [1, -1, -1]
    assert out.nodes_BD[3].tolist() == [0, 1, -1]
    assert out.tokens_BD[4].tolist() == [-1] * 3
    assert out.logprobs_BD[4].tolist() == [0.0] * 3
    stopped = chain(logits[:1], [[1, 2]], stop_ids=(2, 7))  # in the middle of accepted drafts
    assert stopped.tokens_BD.tolist() == [[1, 2, -1]]
    # A drafted stop id that the target does not choose ends nothing.
    assert chain(logits[:1], [[1, 4]], stop_ids=(4,)).tokens_BD.tolist() == [[1, 2, -1]]
    # Of equal siblings the lowest node wins.
    tree = K.coupled_verify(
        logits[:1, [0, 1, 2, 2]], keys(1), torch.zeros(1).long(), torch.zeros(1),
        torch.tensor([[0, 1, 1, 2]]), torch.tensor([[-1, 0, 0, 1]]),
    )  # fmt: skip
    assert tree.nodes_BD.tolist() == [[0, 1, 3, -1]]


@pytest.mark.usefixtures("way")
def test_empty_batch_and_bad_arguments():
    empty = {name: x[:0] for name, x in hard_batch(31).items()}
    for verify in (K.coupled_verify, K.coupled_verify_ref):
        out = verify(**empty, entropy=True)
        assert out.tokens_BD.shape == (0, 4)
        assert out.num_emit_B.shape == (0,)
    none = (torch.zeros(0, 9), keys(0).long(), keys(0).long(), torch.zeros(0))
    assert K.gumbel_topk(*none, 2).tokens_Nk.shape == (0, 2)
    for top in (K.gumbel_topk, K.gumbel_topk_ref):
        with pytest.raises(ValueError, match="k must be"):
            top(torch.zeros(1, 3), keys(1), torch.zeros(1).long(), torch.ones(1), 4)


@pytest.mark.usefixtures("way")
def test_logprobs_are_those_of_the_deciding_row():
    batch = hard_batch(1000)
    batch["temperatures_B"][3] = 0.7
    out = K.coupled_verify(**batch, entropy=True)
    for b, i in itertools.product(range(4), range(2)):
        if i < out.num_emit_B[b]:
            t = float(batch["temperatures_B"][b]) or 1.0
            row = batch["logits_BTV"][b, out.nodes_BD[b, i]].nan_to_num(nan=-torch.inf) / t
            law = row.double().softmax(0)
            assert float(out.logprobs_BD[b, i].exp()) == pytest.approx(
                float(law[out.tokens_BD[b, i]]), rel=2e-5
            )
            want = float(-(law * law.clamp_min(1e-300).log()).sum())
            assert float(out.entropies_BD[b, i]) == pytest.approx(want, abs=2e-5)
    assert out.num_nan_B.tolist() == [0, 0, int(out.num_emit_B[2]), 0, 1000]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.usefixtures("way")
def test_self_draft_is_always_accepted(width: int):
    """The drafter's logits equal the target's: every best draft stands, in a tree too, where each
    node on the way has a second child; children come in falling order, so the best is the last."""
    gen, num, depth = torch.Generator().manual_seed(3), 64, 4
    table = torch.randn(50, 50, generator=gen) * 2
    k, positions, temps = keys(num), torch.arange(num), torch.rand(num, generator=gen) + 0.3
    tokens = [torch.randint(0, 50, (num, 1), generator=gen)]
    parents, spine = [-1], [0]
    for level in range(depth):
        top = K.gumbel_topk(table[tokens[-1][:, -1]], k, positions + level, temps, width)
        tokens.append(top.tokens_Nk.flip(1))
        parents += [spine[-1]] * width
        spine.append(len(parents) - 1)
    tokens_BT = torch.cat(tokens, dim=1)
    parents_BT = torch.tensor(parents).expand(num, -1)
    out = K.coupled_verify(table[tokens_BT], k, positions, temps, tokens_BT, parents_BT)
    assert (out.num_emit_B == depth + 1).all()
    assert torch.equal(out.tokens_BD[:, :depth], tokens_BT[:, spine[1:]])
    assert out.nodes_BD[:, : depth + 1].tolist() == [spine] * num


# The laws, by enumeration: V = 3, K = 2. Nothing is left to chance.


def toy_laws(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """p(x1), p(x2 | x1), p(x3 | x1 x2) and a different q(x1), q(x2 | x1), in float64."""
    gen = torch.Generator().manual_seed(seed)

    def law(*shape: int) -> Tensor:
        return (torch.randn(*shape, 3, generator=gen, dtype=torch.float64) * 1.3).softmax(-1)

    return law(), law(3), law(3, 3), law(), law(3)


def joint(p1: Tensor, p2: Tensor, p3: Tensor) -> Tensor:
    return p1[:, None, None] * p2[:, :, None] * p3


def finish(laws: tuple[Tensor, ...], emitted: tuple[int, ...], weight: float) -> Tensor:
    """The law of three tokens that begins with `emitted` and goes on from the target."""
    out = torch.zeros(3, 3, 3, dtype=torch.float64)
    at = emitted[:3]
    tail = joint(*laws[:3])[at]
    out[at] = weight * tail / tail.sum()
    return out


def ratio_law(laws: tuple[Tensor, ...], block: bool, drawn: bool, **broken) -> Tensor:
    """The law of the first three tokens under the ratio test, over all drafts and all coins.

    broken: rules to put in the place of the library's, to see that the enumeration notices.
    """
    p1, p2, p3, q1, q2 = laws
    residual = broken.get("residual", K.residual)
    accepted = broken.get("num_accepted", K.num_accepted)
    total = torch.zeros(3, 3, 3, dtype=torch.float64)
    for d1, d2 in itertools.product(range(3), range(3)):
        chance_of_drafts = float(q1[d1] * q2[d1, d2]) if drawn else float((d1, d2) == (1, 2))
        if chance_of_drafts == 0:
            continue
        p = torch.stack([p1, p2[d1], p3[d1, d2]])
        one = torch.eye(3, dtype=torch.float64)
        q = torch.stack([q1, q2[d1], one[0] * 0] if drawn else [one[d1], one[d2], one[0] * 0])
        ratio = torch.stack([p[0, d1] / q[0, d1], p[1, d2] / q[1, d2]])[None]

        def mass(carry: Tensor, p: Tensor = p, q: Tensor = q) -> Tensor:
            return (carry[..., None] * p[1:] - q[1:]).clamp(min=0).sum(-1)

        chance, carry = K.accept_chances(ratio, torch.tensor([2]), mass if block else None)
        for coins in itertools.product((False, True), repeat=2):
            passed = torch.tensor([coins])
            odds = torch.where(passed, chance.clamp(max=1), 1 - chance.clamp(max=1)).prod()
            tau = int(accepted(passed, block))
            weights = residual(p[tau : tau + 1], q[tau : tau + 1], carry[0, tau : tau + 1])[0]
            for x, share in enumerate((weights / weights.sum()).tolist()):
                weight = chance_of_drafts * float(odds) * share
                if weight > 0:
                    total += finish(laws, ((d1, d2)[:tau] + (x,)), weight)
    return total


@pytest.mark.parametrize("drawn", [True, False], ids=["q", "one-hot"])
@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
def test_ratio_rules_keep_the_law(block: bool, drawn: bool):
    for seed in range(5):
        laws = toy_laws(seed)
        torch.testing.assert_close(
            ratio_law(laws, block, drawn), joint(*laws[:3]), rtol=0, atol=1e-12
        )


def test_enumeration_notices_a_broken_ratio_rule():
    def gap(block: bool, **broken) -> float:
        gaps = [
            (ratio_law(laws, block, True, **broken) - joint(*laws[:3])).abs().sum()
            for laws in map(toy_laws, range(5))
        ]
        return float(max(gaps))

    assert gap(False, residual=lambda p, q, carry: p) > 0.01
    assert gap(True, residual=lambda p, q, carry: K.residual(p, q, carry * 0 + 1)) > 0.001
    assert gap(True, num_accepted=lambda passed, block: K.num_accepted(passed, False)) > 0.01


def coupled_law(laws: tuple[Tensor, ...], broken: bool = False) -> Tensor:
    """The law under coupled verification: every outcome of the target's three samples, for every
    draft, goes through `coupled_verify` itself as one-hot logits at T = 0."""
    p1, p2, p3, q1, q2 = laws
    cases = list(itertools.product(range(3), repeat=5))
    drafts = [[d1, d2] for d1, d2, *_ in cases]
    out = chain(one_hot([list(s) for _, _, *s in cases], 3), drafts)
    total = torch.zeros(3, 3, 3, dtype=torch.float64)
    for b, (d1, d2, s1, s2, s3) in enumerate(cases):
        weight = float(q1[d1] * q2[d1, d2] * p1[s1] * p2[d1, s2] * p3[d1, d2, s3])
        emitted = tuple(out.tokens_BD[b, : out.num_emit_B[b]].tolist())
        if broken and s1 != d1:  # throw the sample away on a mismatch, and draw afresh
            for x in range(3):
                total += finish(laws, (x,), weight * float(p1[x]))
        else:
            total += finish(laws, emitted, weight)
    return total


def test_coupled_rule_keeps_the_law_and_the_enumeration_notices_a_broken_one():
    laws = toy_laws(1)
    torch.testing.assert_close(coupled_law(laws), joint(*laws[:3]), rtol=0, atol=1e-12)
    assert float((coupled_law(laws, broken=True) - joint(*laws[:3])).abs().sum()) > 0.01


# The ratio test with real noise.


def ratio_inputs(num: int, vocab: int, num_drafts: int, stream: str = "draft"):
    gen = torch.Generator().manual_seed(1)
    p = (torch.randn(1, num_drafts + 1, vocab, generator=gen) * 1.5).expand(num, -1, -1)
    q = p[:, :num_drafts] + torch.randn(1, num_drafts, vocab, generator=gen)
    k, positions, temps = keys(1).expand(num), torch.arange(num) * 8, torch.full((num,), 0.8)
    drafts = [
        K.gumbel_topk(q[:, i], K.stream_keys(k, stream), positions + i, temps, 1).tokens_Nk
        for i in range(num_drafts)
    ]
    return p, q, torch.cat(drafts, dim=1), k, positions, temps


@pytest.mark.parametrize("block", [False, True])
def test_ratio_test_draws_the_target_law_and_shared_noise_would_not(block: bool):
    num = 20_000
    for stream, good in (("draft", True), ("residual", False)):
        p, q, *rest = ratio_inputs(num, 4, 2, stream)
        out = K.rejection_verify(p, q, *rest, block=block)
        counts = torch.bincount(out.tokens_BD[:, 0], minlength=4)
        stat = chi_square(counts, (p[0, 0].double() / 0.8).softmax(-1))
        assert (stat < chi_square_limit(4)) is good, (stream, stat)


@pytest.mark.parametrize("block", [False, True])
def test_ratio_test_of_chosen_drafts_draws_the_target_law(block: bool):
    """Drafts that were chosen, not drawn: q is one-hot, so a draft d is accepted with p(d)."""
    num = 20_000
    p, q, _, *rest = ratio_inputs(num, 4, 2)
    law = (p[0, 0].double() / 0.8).softmax(-1)
    chosen = q.argmax(-1)
    out = K.rejection_verify(p, None, chosen, *rest, block=block)
    counts = torch.bincount(out.tokens_BD[:, 0], minlength=4)
    assert chi_square(counts, law) < chi_square_limit(4)
    accepted = (out.tokens_BD[:, 0] == chosen[:, 0]) & (out.num_emit_B > 1)
    want = law[chosen[0, 0]].item()
    error = (want * (1 - want) / num) ** 0.5
    assert abs(accepted.double().mean().item() - want) < 5 * error


def test_ratio_test_self_draft_short_rows_greedy_and_cuts():
    _, q, drafts, k, positions, temps = ratio_inputs(200, 9, 3)
    same = torch.cat([q, q[:, :1]], dim=1)
    for verify in (K.rejection_verify, K.block_verify):
        assert (verify(same, q, drafts, k, positions, temps).num_emit_B == 4).all()
        short = drafts.clone()
        short[:, 1:] = -1
        assert (verify(same, q, short, k, positions, temps).num_emit_B == 2).all()
        none = verify(same, q, drafts * 0 - 1, k, positions, temps)
        assert (none.num_emit_B == 1).all()
        greedy = verify(same, q, q.argmax(-1), k, positions, temps * 0, stop_ids=(99,))
        assert torch.equal(greedy.tokens_BD, same.argmax(-1))
        cut = verify(same, q, drafts, k, positions, temps, limits_B=torch.full((200,), 2))
        assert (cut.num_emit_B == 2).all()
        ended = verify(same, q, drafts, k, positions, temps, stop_ids=drafts[0, :1].tolist())
        assert ended.num_emit_B[0] == 1
    x = same[0, 0].double() / 0.8
    out = K.rejection_verify(same, q, drafts, k, positions, temps)
    want = x.log_softmax(-1)[out.tokens_BD[0, 0]]
    assert float(out.logprobs_BD[0, 0]) == pytest.approx(float(want), abs=1e-5)


def test_ratio_test_of_no_rows_and_of_no_drafts():
    args = [x[:0] for x in ratio_inputs(2, 9, 3)]
    assert K.rejection_verify(*args).tokens_BD.shape == (0, 4)
    with pytest.raises(ValueError, match="needs a column"):
        K.rejection_verify(args[0][:, :1], None, args[2][:, :0], *args[3:])


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("drawn", [True, False])
def test_ratio_test_of_hard_logits(vocab: int, drawn: bool):
    """NaN, -inf, +inf, ties, T = 0 and tiny T, one token in all: what is emitted can be, and its
    logprob is the target's. A row of -inf yields token 0, as for the coupled rule."""
    batch = hard_batch(vocab)
    logits, temps = batch["logits_BTV"], batch["temperatures_B"]
    k, positions = batch["keys_B"], batch["positions_B"]
    law = K.scaled(logits.flatten(0, 1), temps.repeat_interleave(4)).view(logits.shape)
    quoted = [logits[:, i] for i in (3, 0, 1)]  # the second draft quotes the target's first row
    if drawn:
        noise = K.stream_keys(k, "draft")
        places = [(noise, positions + i, temps, 1) for i in range(3)]
        drafts = [K.gumbel_topk(q, *at).tokens_Nk for q, at in zip(quoted, places, strict=True)]
    else:
        drafts = [law[:, i].argmax(-1, keepdim=True) for i in range(3)]
    args = torch.cat(drafts, 1), k, positions, temps
    for verify in (K.rejection_verify, K.block_verify):
        out = verify(logits, torch.stack(quoted, 1) if drawn else None, *args)
        assert (out.num_emit_B >= 1).all()
        for b, i in itertools.product(range(5), range(4)):
            if i >= out.num_emit_B[b]:
                assert out.tokens_BD[b, i] == -1
                continue
            row, token = law[b, i], int(out.tokens_BD[b, i])
            if row.max() == -torch.inf:
                assert token == 0 and out.logprobs_BD[b, i] == -torch.inf
                continue
            want = row.double().log_softmax(0)[token]
            assert want > -torch.inf
            last_bit = 2.0**-23 * float(row.max().abs())  # at T = 1e-5, of numbers around 1e6
            assert float(out.logprobs_BD[b, i]) == pytest.approx(float(want), abs=1e-5 + last_bit)
            assert temps[b] > 0 or token == int(row.argmax())
        live = out.nodes_BD >= 0
        assert out.num_nan_B.tolist() == (logits.isnan().sum(-1) * live).sum(1).tolist()


def test_strict_coins_and_empty_residuals(monkeypatch: pytest.MonkeyPatch):
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]).log()[None]
    args = (torch.tensor([[0]]), keys(1), torch.tensor([0]), torch.ones(1))
    monkeypatch.setattr(K, "coins", lambda keys, positions, num: torch.zeros(1, num))
    assert K.rejection_verify(p, p[:, :1] * 0, *args).tokens_BD.tolist() == [[1, -1]]
    top = 1 - 2.0**-24
    monkeypatch.setattr(K, "coins", lambda keys, positions, num: torch.full((1, num), top))
    same = torch.tensor([[[3.0, 0.0, 0.0], [0.0, 9.0, 0.0]]])
    assert int(K.rejection_verify(same, same[:, :1], *args).num_emit_B) == 2
    law = torch.tensor([[0.7, 0.2, 0.1]])
    assert torch.equal(K.residual(law, law, torch.ones(1)), law)
    monkeypatch.undo()
    u = K.coins(keys(1).expand(50_000), torch.arange(50_000), 2)
    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1


# Thresholds: the kept set of transformers' processors.


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (20, 0.9, 0.05), (1, 0.1, 1.0),
     (5000, 0.999, 0.001)],
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.6, 1.0, 3.0])
def test_thresholds_keep_what_transformers_keeps(top_k, top_p, min_p, temperature):
    from transformers.generation import logits_process as hf

    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(5)) * 4
    scores = hf.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = hf.TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = hf.TopPLogitsWarper(top_p)(None, scores)
    if min_p:
        scores = hf.MinPLogitsWarper(min_p)(None, scores)
    temps = torch.full((6,), temperature)
    threshold = K.sampling_thresholds(logits, temps, top_k, top_p, min_p)
    assert torch.equal(logits >= threshold[:, None], scores > -torch.inf)
    assert K.sampling_thresholds(logits, temps * 0, top_k, top_p, min_p).eq(-torch.inf).all()


def test_a_rows_threshold_is_the_same_alone_and_for_any_number_of_threads():
    """A lone row of more than 32,768 logits is one that torch sums by parts."""
    logits = torch.randn(240, 49_152, generator=torch.Generator().manual_seed(1)) * 2
    temps, before = torch.ones(240), torch.get_num_threads()
    found = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for num in (1, 5):
            parts = zip(logits.split(num), temps.split(num), strict=True)
            found.append(torch.cat([K.sampling_thresholds(*part, top_p=0.9) for part in parts]))
    torch.set_num_threads(before)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.usefixtures("way")
def test_thresholds_only_mask_the_sample():
    batch = hard_batch(1000)
    batch["temperatures_B"][:] = 1.0
    flat = batch["logits_BTV"].flatten(0, 1)
    thresholds = K.sampling_thresholds(flat, torch.ones(20), top_k=1).view(5, 4)
    out, plain = K.coupled_verify(**batch, thresholds_BT=thresholds), hard_batch(1000)
    plain["temperatures_B"][:] = 0.0
    assert torch.equal(out.tokens_BD[:3], K.coupled_verify(**plain).tokens_BD[:3])
    assert (out.logprobs_BD[0, :1] < 0).all()  # of the whole law, not of the kept token
    for bad in ({"top_k": -1}, {"top_p": 0.0}, {"min_p": 2.0}):
        with pytest.raises(ValueError, match="need top_k"):
            K.sampling_thresholds(flat, torch.ones(20), **bad)


# Attention and the loss.


def test_tree_attention_is_masked_attention():
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 3, 8, generator=gen)
    k, v = torch.randn(2, 5, 2, 12, 8, generator=gen)
    lengths = torch.tensor([6, -1, 0])
    bits = torch.tensor([[1, 3, 5]] * 3)
    out = K.tree_attention(q, k, v, lengths, bits, 0.3)
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    for b, length in ((0, 6), (2, 0)):
        mask = torch.cat([torch.ones(3, length).bool(), seen], dim=1)
        keys_, values = (x[b, :, : length + 3].repeat_interleave(2, 0) for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            q[b], keys_, values, attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(out[b], want)
    assert out[1].eq(0).all()


def test_draft_loss_by_hand():
    """p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2): KL = ln 2, TV = 1/2, acceptance 1/2."""
    teacher = torch.tensor([[0.5, 0.5, 0.0]]).log()
    logits = torch.tensor([[0.25, 0.25, 0.5]]).log().requires_grad_()
    for kind, want, grad in (
        ("kl", math.log(2), [-0.25, -0.25, 0.5]),  # q - p
        ("tv", 0.5, [-0.125, -0.125, 0.25]),  # q ([q > p] - 1/2)
    ):
        loss, acceptance = K.draft_loss(logits, teacher, kind)
        assert float(loss.detach()) == pytest.approx(want, rel=1e-6)
        assert float(acceptance) == pytest.approx(0.5, rel=1e-6)
        got = torch.autograd.grad(loss.sum(), logits)[0]
        torch.testing.assert_close(got, torch.tensor([grad]))
    w = math.exp(-1.5)
    loss = K.draft_loss(logits, teacher, "lk").loss_N
    assert float(loss.detach()) == pytest.approx(w * math.log(2) + (1 - w) * 0.5, rel=1e-6)


@pytest.mark.parametrize("kind", ["kl", "tv", "lk"])
def test_draft_loss_gradient_equals_autograd_of_the_naive_form(kind: str):
    gen = torch.Generator().manual_seed(0)
    logits = (torch.randn(150, 700, generator=gen) * 2).requires_grad_()
    teacher = torch.randn(150, 700, generator=gen) * 2
    teacher[3, :100] = -torch.inf
    weight = torch.rand(150, generator=gen)
    grads = []
    for loss in (K.draft_loss, K.draft_loss_ref):
        out = loss(logits, teacher.clone().requires_grad_(), kind, 2.0)
        assert not out.acceptance_N.requires_grad
        grads.append(torch.autograd.grad((out.loss_N * weight).sum(), logits)[0])
        values = out if loss is K.draft_loss else values  # noqa: F821
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(values.loss_N, out.loss_N, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values.acceptance_N, out.acceptance_N, rtol=1e-5, atol=1e-6)


def test_draft_loss_of_nothing_and_of_an_unknown_kind():
    empty = torch.zeros(0, 5, requires_grad=True)
    K.draft_loss(empty, empty.detach()).loss_N.sum().backward()
    with pytest.raises(ValueError, match=r"kl, tv, lk do.*set MINITLT_KERNELS=ref"):
        K.draft_loss(torch.zeros(1, 5), torch.zeros(1, 5), "ce")


# Dispatch.


def test_dispatch_obeys_the_environment_and_says_so_once(monkeypatch, caplog):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    cases = [("auto", cpu, "cpu"), ("auto", cuda, "triton")]
    cases += [("ref", cuda, "ref"), ("triton", cuda, "triton")]
    for wish, device, want in cases:
        monkeypatch.setenv("MINITLT_KERNELS", wish)
        if want != "triton" or K._have_triton():
            assert K.backend(device)[0] == want
    monkeypatch.setenv("MINITLT_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="MINITLT_KERNELS=triton"):
        K.backend(cpu)
    monkeypatch.setenv("MINITLT_KERNELS", "fast")
    with pytest.raises(ValueError, match="auto, ref or triton"):
        K.backend(cpu)
    monkeypatch.setenv("MINITLT_KERNELS", "ref")
    K._say_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="minitlt.kernels"):
        for _ in range(3):
            K.coupled_verify(**hard_batch(2))
    said = [r.getMessage() for r in caplog.records]
    assert said == ["kernels: coupled_verify runs as ref (MINITLT_KERNELS=ref)"]


def test_benchmark_reports_no_speed_behind_a_failed_gate(tmp_path, monkeypatch, capsys):
    path = Path(__file__).parent.parent / "benchmarks" / "kernels.py"
    monkeypatch.syspath_prepend(path.parent)  # for _machine.py beside it
    spec = importlib.util.spec_from_file_location("kernel_benchmark", path)
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_benchmark", bench)
    spec.loader.exec_module(bench)
    small = bench.Size(300, 2, 1, 100, 3, torch.float32)
    monkeypatch.setattr(bench, "CPU", small)
    monkeypatch.setattr(bench, "forward_us", lambda seconds: 1e6)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda *_: 1e9)
    out = tmp_path / "result.json"
    arguments = ["--device", "cpu", "--seconds", "0.01", "--out", str(out)]
    assert bench.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads(out.read_text())
    assert report["commit"] and report["versions"]["torch"] and report["seed"] == 0
    assert report["machine"]["processor"] and report["machine"]["threads"]
    assert all(op["gate"] == "passed" and op["us"] > 0 for op in report["ops"].values())
    assert 0 < report["cpu_verify_share_of_forward"] < 1
    broken = K.gumbel_topk_ref(torch.zeros(2, 100), keys(2), torch.arange(2), torch.zeros(2), 1)
    monkeypatch.setattr(K, "gumbel_topk", lambda *a: broken)
    assert bench.main(arguments) == 1
    ops = json.loads(out.read_text())["ops"]
    assert ops["gumbel_topk"]["gate"].startswith("failed")
    assert "us" not in ops["gumbel_topk"]
    assert "us" in ops["draft_loss"]
