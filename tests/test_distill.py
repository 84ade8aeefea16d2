"""Training the drafter: which pairs are taught what, packing, the buffer, checkpoints."""

import math

import pytest
import torch
from drafter_reference import H, W, make_drafter, random_row, reference
from models import tiny_model

from minitlt.distill import DrafterTrainer, ReplayBuffer, Window, choose_vocab, make_pack
from minitlt.eagle3 import DrafterConfig, Eagle3Config, Eagle3Drafter


def make_buffer(config=None, rows=((3, 9, 1), (5, 20, 2)), vocab_size=W):
    """Rows of (prompt length, length, seed) with random taps."""
    buffer = ReplayBuffer(config, vocab_size=vocab_size)
    for prompt_len, length, seed in rows:
        tokens, taps = random_row(length, seed)
        buffer.add(tokens, prompt_len, taps[:-1], taps[:-1, :H].contiguous())
    return buffer


def whole_state(trainer):
    return trainer.state_dict() | {f"own.{n}": t.clone() for n, t in trainer.tensors().items()}


def whole(row, steps=2):
    start, stop = max(0, row.prompt_len - steps), row.num_tokens - 2
    return Window(row, 0, start, stop)


def config(**changes):
    return DrafterConfig(
        **{"pack_tokens": 40, "tap_dtype": "float64", "draft_vocab_size": 23} | changes
    )


# What is supervised.


def test_supervised_pairs_of_a_one_token_prompt_by_hand():
    """x0 | x1 x2 x3, the target has read x0 x1 x2. Pair t = (x_{t+1}, taps of t).

    Step 0: pair 0 holds x1 and is taught by position 1, pair 1 holds x2 and is taught by 2; pair 2
    holds x3, which the target never read. Step 1: pair 0 holds x2 and is taught by 2; pair 1 holds
    x3. Step 2: pair 0 holds x3. Nothing is left.
    """
    buffer = make_buffer(rows=[(1, 4, 7)])
    row = buffer.rows[0]
    [window] = buffer.sample(10, 3, torch.Generator().manual_seed(0))
    assert (window.start, window.stop) == (0, 2)
    pack, hidden, teacher = make_pack([window], 3, torch.device("cpu"))
    assert torch.equal(pack.tokens_N, row.tokens_L[1:3])
    assert torch.equal(pack.tokens_SM[0], row.tokens_L[1:3])
    assert torch.equal(pack.tokens_SM[1], row.tokens_L[2:4])
    assert pack.tokens_SM[2].tolist() == [int(row.tokens_L[3]), 0]
    taught = [[int(j) for j in step] for step in teacher]
    assert taught == [[0, 1], [1, -1], [-1, -1]]
    assert torch.equal(hidden, row.hidden_NH[1:3])  # positions 1 and 2


def test_supervised_pairs_with_a_prompt_by_hand():
    """x0 x1 x2 | x3 x4 x5 x6, read up to x5: tokens x3, x4, x5 teach, at whatever step."""
    buffer = make_buffer(rows=[(3, 7, 7)])
    row = buffer.rows[0]
    [window] = buffer.sample(100, 3, torch.Generator().manual_seed(0))
    assert (window.context, window.start, window.stop) == (0, 0, 5)
    pack, hidden, teacher = make_pack([window], 3, torch.device("cpu"))
    #  pair:            0   1  2   3   4       step s: pair t holds x_{t+1+s}
    assert teacher.tolist() == [
        [-1, -1, 0, 1, 2],
        [-1, 0, 1, 2, -1],
        [0, 1, 2, -1, -1],
    ]
    assert torch.equal(hidden, row.hidden_NH[3:6])
    assert pack.query_M.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("step", "reached"),
    [(0, [[11, 12], [], []]), (1, [[11], [12], []]), (2, [[], [], []])],
)
def test_gradient_of_each_unrolled_step_by_hand(monkeypatch, step, reached):
    """For 10 | 11 12 13, through the trainer's loss, of which one unrolled step is left.

    Step 0 teaches the pairs (11, taps of 10) and (12, taps of 11). Step 1 teaches 12 behind the
    state that the pair of 11 has reached; the pair of 12 is behind its place, and its 13 was never
    read. Step 2 would be 13 as well. reached: the tokens of the pairs, step by step, whose
    embedding and whose hidden state get a gradient.
    """
    buffer = ReplayBuffer(vocab_size=W)
    _, taps = random_row(4, 7)
    buffer.add([10, 11, 12, 13], 1, taps[:-1], taps[:-1, :H].contiguous())
    trainer = DrafterTrainer(make_drafter(23), buffer, config(ttt_steps=3))

    def one_step(*args):
        pack, hidden, teacher_SM = make_pack(*args)
        teacher_SM[torch.arange(3) != step] = -1
        return pack, hidden, teacher_SM

    pairs, mix = [], trainer.student.mix

    def watched(tokens_N, h_NH):
        x_N2H = mix(tokens_N, h_NH)
        x_N2H.retain_grad()
        pairs.append((tokens_N, x_N2H))
        return x_N2H

    monkeypatch.setattr("minitlt.distill.make_pack", one_step)
    trainer.student.mix = watched
    trainer.loss(buffer.sample(10, 3, torch.Generator().manual_seed(0)))[0].backward()
    for half in (slice(H), slice(H, 2 * H)):
        found = []
        for tokens_N, x_N2H in pairs:
            grad = torch.zeros_like(x_N2H) if x_N2H.grad is None else x_N2H.grad
            found.append(tokens_N[grad[:, half].abs().sum(1) > 0].tolist())
        assert found == reached


def test_teacher_is_the_targets_own_law():
    """lm_head over the taps' last hidden state equals the model's logits: the final norm is in."""
    model = tiny_model()
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        out = model(tokens, output_hidden_states=True)
    drafter_config = Eagle3Config.from_target(model.config, config(draft_vocab_size=31))
    drafter = Eagle3Drafter(drafter_config)
    drafter.ids_V.copy_(torch.arange(40, 71))
    drafter.tie(model.model.embed_tokens.weight, model.lm_head.weight)
    teacher = out.hidden_states[-1][0] @ drafter.target_rows().T
    torch.testing.assert_close(teacher, out.logits[0, :, 40:71], rtol=1e-5, atol=1e-5)


def test_loss_equals_the_reference_by_hand():
    """sum_s decay^s * mean over supervised pairs, against the slow forward of a whole row."""
    drafter = make_drafter(23)
    row = make_buffer(rows=[(3, 9, 1)]).rows[0]
    trainer = DrafterTrainer(drafter, make_buffer(), config(loss="kl", ttt_steps=3, ttt_decay=0.5))
    loss, acceptance = trainer.loss([whole(row, 3)])
    logits = reference(drafter).unroll(row.tokens_L.tolist(), row.features_NF, 3)
    expected, accepted = 0.0, []
    for s in range(3):
        kl, overlap = [], []
        for t in range(row.num_tokens - 1 - s):
            j = t + 1 + s
            if row.prompt_len <= j <= row.num_tokens - 2:
                p = torch.softmax(drafter.target_rows() @ row.hidden_NH[j], 0)
                q = torch.softmax(logits[s][t], 0)
                kl.append((p * (p / q).log()).sum())
                overlap.append(torch.minimum(p, q).sum())
        expected += 0.5**s * torch.stack(kl).mean()
        accepted.append(torch.stack(overlap).mean())
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(acceptance.double(), torch.stack(accepted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", ["kl", "tv", "lk"])
@pytest.mark.parametrize("train_head", [True, False])
def test_gradient_never_reaches_the_target(loss, train_head):
    drafter = make_drafter(23, train_head=train_head)
    embed = torch.nn.Parameter(drafter._target.embed.clone())
    head = torch.nn.Parameter(drafter._target.head.clone())
    drafter.tie(embed, head)
    before = embed.detach().clone(), head.detach().clone()
    own = {k: v.detach().clone() for k, v in drafter.named_parameters()}
    trainer = DrafterTrainer(drafter, make_buffer(), config(loss=loss, train_head=train_head))
    for _ in range(3):
        assert trainer.train_step()["tokens"] > 0
    assert embed.grad is None and head.grad is None
    assert torch.equal(embed, before[0]) and torch.equal(head, before[1])
    # Nothing of the target's is trained or published.
    assert set(trainer.tensors()) == set(own) | {"ids_V"}
    for name, parameter in drafter.named_parameters():  # and everything of its own learns
        assert not torch.equal(parameter, own[name]), name


def test_later_steps_are_taken_by_fewer_windows():
    """Step s by the first 1 / (s + 1) of them, with the states that all would have there."""
    drafter = make_drafter(23)
    drafter.reserve_positions(32)
    windows = [whole(row, 3) for row in make_buffer(rows=[(3, 9, 1), (5, 20, 2), (1, 9, 3)]).rows]
    pack, _, _ = make_pack(windows, 3, torch.device("cpu"))
    queries = [w.stop - w.start for w in windows]
    thin, full = drafter.unroll(pack, 3, thin=True), drafter.unroll(pack, 3)
    assert [len(h) for h in thin] == [sum(queries), sum(queries[:2]), queries[0]]
    for part, every in zip(thin, full, strict=True):
        torch.testing.assert_close(part, every[: len(part)])


def test_packing_changes_nothing():
    """Two rows in one pack: same gradients as one after the other; positions stay the rows' own."""
    drafter = make_drafter(23)
    windows = [whole(row) for row in make_buffer(rows=[(3, 9, 1), (5, 20, 2), (1, 4, 3)]).rows]
    drafter.reserve_positions(32)

    def gradients(packs):
        total = 0.0
        for pack in packs:
            states = torch.stack(drafter.unroll(pack, 2))
            total = total + torch.tanh(drafter.logits(states)).sum()
        drafter.zero_grad()
        total.backward()
        return {name: p.grad.clone() for name, p in drafter.named_parameters()}

    device = torch.device("cpu")
    together = gradients([make_pack(windows, 2, device)[0]])
    apart = gradients([make_pack([w], 2, device)[0] for w in windows])
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-10, atol=1e-12)


def test_a_window_with_context_equals_the_whole_row():
    drafter = make_drafter(23)
    drafter.reserve_positions(32)
    row = make_buffer(rows=[(5, 20, 2)]).rows[0]
    full = drafter.unroll(make_pack([whole(row)], 2, torch.device("cpu"))[0], 2)
    part = drafter.unroll(make_pack([Window(row, 0, 9, 14)], 2, torch.device("cpu"))[0], 2)
    first = whole(row).start
    for whole_step, part_step in zip(full, part, strict=True):
        torch.testing.assert_close(part_step, whole_step[9 - first : 14 - first])


def test_teachers_of_a_window_reach_past_its_end_but_not_the_rows():
    row = make_buffer(rows=[(5, 20, 2)]).rows[0]
    _, hidden, teacher = make_pack([Window(row, 2, 9, 14)], 3, torch.device("cpu"))
    assert teacher.tolist() == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]]
    assert torch.equal(hidden, row.hidden_NH[10:17])
    _, hidden, teacher = make_pack([Window(row, 2, 15, 18)], 3, torch.device("cpu"))
    assert teacher.tolist() == [[0, 1, 2], [1, 2, -1], [2, -1, -1]]
    assert torch.equal(hidden, row.hidden_NH[16:19])


# Learning.


def test_the_drafter_is_the_running_average_of_what_is_trained():
    trainer = DrafterTrainer(make_drafter(23), make_buffer(), config(average=0.25))
    wanted = {name: p.detach().clone() for name, p in trainer.drafter.named_parameters()}
    for decay in (2 / 11, 0.25, 0.25):  # (1 + n) / (10 + n) after n steps, at most 0.25
        trainer.train_step()
        for name, raw in trainer.student.named_parameters():
            wanted[name] = decay * wanted[name] + (1 - decay) * raw.detach()
            torch.testing.assert_close(trainer.tensors()[name].detach(), wanted[name])
            assert torch.equal(trainer.optimizer_tensors()[f"{name}.raw"], raw)
            assert not torch.equal(wanted[name], raw)


def test_acceptance_recovers_after_the_target_moves():
    drafter = make_drafter(0, torch.float32)
    trainer = DrafterTrainer(
        drafter, make_buffer(), config(draft_vocab_size=0, learning_rate=5e-3, loss="lk")
    )
    for _ in range(60):
        before = trainer.train_step()["acceptance"][0]
    drafter._target.head.copy_(drafter._target.head.roll(7, 0))  # the policy is another one now
    moved = trainer.train_step()["acceptance"][0]
    for _ in range(60):
        after = trainer.train_step()["acceptance"][0]
    assert moved < before - 0.2 and after > moved + 0.2


def test_a_step_that_is_not_finite_leaves_the_weights_alone():
    buffer = make_buffer()
    buffer.rows[0].features_NF[:] = math.nan
    buffer.rows[1].features_NF[:] = math.nan
    trainer = DrafterTrainer(make_drafter(23), buffer, config())
    before = whole_state(trainer)
    result = trainer.train_step()
    assert not math.isfinite(result["loss"]) and trainer.version == 0
    for name, tensor in whole_state(trainer).items():
        if not name.startswith(("random", "buffer.")):
            assert torch.equal(tensor, before[name])


def test_an_infinite_gradient_is_no_step():
    """The loss is 0 and finite, but the gradient of a square root at 0 is not."""
    trainer = DrafterTrainer(make_drafter(23), make_buffer(), config())
    weight = trainer.student.fc
    trainer.loss = lambda windows: ((weight - weight.detach()).sum().sqrt(), torch.zeros(4))
    before = weight.detach().clone()
    assert math.isnan(trainer.train_step()["loss"]) and trainer.version == 0
    assert torch.equal(weight, before)


def test_an_empty_buffer_is_no_step():
    trainer = DrafterTrainer(make_drafter(23), ReplayBuffer(vocab_size=W), config())
    assert trainer.train_step()["tokens"] == 0 and trainer.version == 0


def test_step_size_follows_the_clock():
    trainer = DrafterTrainer(make_drafter(23), make_buffer(), config(pack_tokens=0))
    assert trainer.budget_seconds == 0.25
    trainer._size = 100.0
    trainer._adapt(100, 0.1)
    assert trainer._size == 125.0  # grows by a quarter at most
    trainer._adapt(125, 0.25)
    assert trainer._size == pytest.approx(100.0)  # aims at 80 %
    trainer._adapt(100, 10.0)
    assert trainer._size == 50.0
    trainer._adapt(20, 0.001)  # the buffer had no more: nothing learnt about speed
    assert trainer._size == 50.0
    trainer._adapt(40, 0.25)  # nor this time, but even so few take too long
    assert trainer._size == pytest.approx(32.0)
    for _ in range(4):
        trainer._adapt(int(trainer._size), 0.4)
    assert trainer._size == 8.0  # no smaller: a step's own cost would be most of it
    fixed = DrafterTrainer(make_drafter(23), make_buffer(), config(pack_tokens=7))
    fixed._adapt(7, 10.0)
    assert fixed._size == 7.0


def test_global_generator_is_left_alone():
    before = torch.get_rng_state()
    trainer = DrafterTrainer(make_drafter(23), make_buffer(), config())
    trainer.train_step()
    assert torch.equal(before, torch.get_rng_state())


# The draft vocabulary.


def test_vocabulary_refresh_keeps_trained_rows():
    drafter = make_drafter(4)
    drafter.ids_V.copy_(torch.tensor([2, 5, 8, 11]))
    trainer = DrafterTrainer(drafter, make_buffer(), config())
    trainer.train_step()
    trained, moments = drafter.head.detach().clone(), trainer.optimizer_tensors()
    average = moments["head.exp_avg"].clone()
    counts = torch.zeros(W, dtype=torch.int64)
    counts[[5, 8, 20, 3]] = torch.tensor([9, 8, 7, 6])
    assert trainer.refresh_vocab(counts)
    assert drafter.ids_V.tolist() == [3, 5, 8, 20]
    head, target = drafter.head.detach(), drafter._target.head
    assert torch.equal(head[1:3], trained[1:3])  # 5 and 8 stay
    assert torch.equal(head[0], target[3]) and torch.equal(head[3], target[20])
    assert torch.equal(moments["head.exp_avg"][1:3], average[1:3])
    assert not moments["head.exp_avg"][[0, 3]].any()
    assert torch.equal(drafter.target_rows(), target[[3, 5, 8, 20]])
    assert not trainer.refresh_vocab(counts)  # nothing to gain


def test_another_ranks_vocabulary_is_taken_whole():
    """What the first rank chose from its rows replaces what another would have chosen."""
    ours, theirs = (
        DrafterTrainer(make_drafter(23), make_buffer(rows=[(2, 40, seed)]), config(vocab_gain=0.0))
        for seed in (1, 2)
    )
    for trainer in (ours, theirs):
        with torch.no_grad():
            trainer.drafter.head.copy_(trainer.drafter.target_rows())
    assert ours.choose_vocab() != theirs.choose_vocab()
    theirs.set_vocab(ours.choose_vocab())
    assert torch.equal(theirs.drafter.ids_V, ours.drafter.ids_V)
    assert torch.equal(theirs.drafter.head, ours.drafter.head)


def test_vocabulary_is_not_changed_for_little():
    trainer = DrafterTrainer(make_drafter(4), make_buffer(), config(vocab_gain=0.1))
    trainer.drafter.ids_V.copy_(torch.tensor([2, 5, 8, 11]))
    counts = torch.zeros(W, dtype=torch.int64)
    counts[[2, 5, 8, 20]] = torch.tensor([40, 30, 25, 5])
    assert not trainer.refresh_vocab(counts)
    counts[20] = 15
    assert trainer.refresh_vocab(counts)
    full = DrafterTrainer(make_drafter(0), make_buffer(), config())
    assert not full.refresh_vocab()


def test_counts_are_of_response_tokens_and_fade():
    buffer = ReplayBuffer(vocab_size=W)
    taps = torch.zeros(19, 3 * H)
    buffer.add([7] * 4 + [9] * 16, 4, taps, taps[:, :H])
    for _ in range(2):  # a row counts once
        assert int(buffer.counts()[9]) == 16 * 1024 and int(buffer.counts()[7]) == 0
    buffer.next_step()
    assert int(buffer.counts()[9]) == 14 * 1024


def test_counts_are_what_the_target_expects():
    """With a head a position counts with its whole law, scaled to the number of tokens."""
    buffer = make_buffer(rows=[(3, 9, 1), (5, 20, 2)])
    head = torch.randn(W, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    buffer.target_head = lambda: head
    hidden = torch.cat([row.hidden_NH[row.prompt_len - 1 :] for row in buffer.rows])
    assert len(hidden) == 6 + 15
    expected = torch.softmax(hidden @ head.T, -1).sum(0)
    buffer.expect(512)
    torch.testing.assert_close(buffer.counts() / 1024, expected.float(), rtol=0, atol=2e-3)
    some = make_buffer(rows=[(3, 9, 1), (5, 20, 2)])
    some.target_head = lambda: head
    some.expect(4)  # every sixth position: 0 of the first row, 0, 6 and 12 of the second
    expected = torch.softmax(hidden[[0, 6, 12, 18]] @ head.T, -1).sum(0) * 21 / 4
    torch.testing.assert_close(some.counts() / 1024, expected.float(), rtol=0, atol=2e-3)
    assert DrafterTrainer(make_drafter(23), buffer, config()).buffer.target_head is not None


def test_laws_are_computed_in_the_window_and_nowhere_else():
    """The head is read once per step's rows, by the first train step; a rank that had no window
    counts what was drawn."""
    buffer, reads = make_buffer(), []
    trainer = DrafterTrainer(make_drafter(23), buffer, config())
    head = buffer.target_head()
    buffer.target_head = lambda: reads.append(1) or head
    buffer.counts()
    assert not reads
    tokens, taps = random_row(30, 9)
    buffer.add(tokens, 4, taps[:-1], taps[:-1, :H].contiguous())
    trainer.train_step()
    trainer.train_step()
    assert len(reads) == 1 and all(row.counted for row in buffer.rows)
    buffer.add(tokens, 4, taps[:-1], taps[:-1, :H].contiguous())
    before = buffer._counts_W.clone()
    own = torch.tensor(tokens[4:]).bincount(minlength=W)
    assert torch.equal(buffer.counts() - before, 1024 * own) and len(reads) == 1
    trainer.refresh_vocab()
    assert len(reads) == 1  # every row is counted once


# The buffer.


def test_buffer_keeps_the_longest_rows_of_earlier_steps():
    buffer = make_buffer(
        config(buffer_tokens=100), rows=[(2, 30, 1), (2, 10, 2), (2, 20, 3), (2, 40, 4)]
    )
    assert buffer.num_tokens == 100
    buffer.next_step()
    for seed, length in ((5, 25), (6, 8)):
        tokens, taps = random_row(length, seed)
        buffer.add(tokens, 2, taps[:-1], taps[:-1, :H])
    # 25 more push out the old rows of 10 and 20, 8 more the one of 30.
    assert sorted((row.step, row.num_tokens) for row in buffer.rows) == [(0, 40), (1, 8), (1, 25)]
    assert buffer.num_tokens == sum(row.num_tokens for row in buffer.rows)


def test_rows_of_a_full_step_leave_the_old_long_ones_their_share():
    """Of 100 tokens 50 are for earlier steps. Old rows 40 and 30, then 60 and 50: the 60 push out
    the 30, then the old ones hold 40 and it is the shortest new one that goes. It is counted."""
    buffer = ReplayBuffer(config(buffer_tokens=100, long_share=0.5), vocab_size=W)

    def add(length, token):
        taps = torch.zeros(length - 1, 3 * H)
        buffer.add([0, 0] + [token] * (length - 2), 2, taps, taps[:, :H])

    add(40, 1)
    add(30, 2)
    buffer.next_step()
    add(60, 3)
    assert [(row.step, row.num_tokens) for row in buffer.rows] == [(0, 40), (1, 60)]
    add(50, 4)
    assert [(row.step, row.num_tokens) for row in buffer.rows] == [(0, 40), (1, 60)]
    assert (buffer.counts()[1:5] // 1024).tolist() == [38, 28, 58, 48]
    windows = buffer.sample(1000, 2, torch.Generator().manual_seed(0))
    assert {window.row.step for window in windows} == {0, 1}
    buffer.next_step()
    add(90, 5)  # alone it is more than the share of this step
    assert [(row.step, row.num_tokens) for row in buffer.rows] == [(2, 90)]


def test_buffer_skips_rows_that_teach_nothing():
    buffer = make_buffer(rows=[(5, 6, 1)])  # one response token, which the target never read
    assert not buffer.rows and not buffer.counts().any()


def test_samples_mix_old_and_new_rows():
    buffer = make_buffer(config(long_share=0.5), rows=[(2, 40, i) for i in range(20)])
    buffer.next_step()
    for seed in range(20):
        tokens, taps = random_row(20, 50 + seed)
        buffer.add(tokens, 2, taps[:-1], taps[:-1, :H])
    random = torch.Generator().manual_seed(0)
    old = new = 0
    for _ in range(50):
        windows = buffer.sample(64, 2, random)
        assert sum(w.stop - w.start for w in windows) == 64
        assert len({id(w.row) for w in windows}) == len(windows)
        for w in windows:
            first = max(0, w.row.prompt_len - 2)
            assert first <= w.start < w.stop <= w.row.num_tokens - 2
            old, new = old + (w.row.step == 0), new + (w.row.step == 1)
    assert 0.4 < old / (old + new) < 0.6
    everything = buffer.sample(10_000, 2, random)  # no more than there is
    assert len(everything) == 40


def test_the_ends_of_a_row_are_taught_as_the_rest():
    """Pairs 0..198 in windows of 32: the first and the last no less than half as often as others,
    as a row's first drafts come from its first pairs."""
    buffer, random = make_buffer(rows=[(2, 201, 1)]), torch.Generator().manual_seed(0)
    seen = torch.zeros(199)
    for _ in range(2000):
        [window] = buffer.sample(32, 2, random)
        assert window.stop - window.start == 32
        seen[window.start : window.stop] += 1
    assert seen.sum() == 2000 * 32 and seen.min() > 0.4 * seen.mean()


# Checkpoints and merging.


def test_resume_equals_uninterrupted():
    def fresh(seed):
        return DrafterTrainer(make_drafter(23, seed=seed), make_buffer(), config(vocab_gain=0.0))

    def second_half(trainer):
        losses = [trainer.train_step()["loss"] for _ in range(2)]
        trainer.buffer.next_step()
        tokens, taps = random_row(15, 33)
        trainer.buffer.add(tokens, 2, taps[:-1], taps[:-1, :H])
        trainer.refresh_vocab()
        return losses + [trainer.train_step()["loss"] for _ in range(2)]

    straight = fresh(0)
    for _ in range(3):
        straight.train_step()
    state, drafter = straight.state_dict(), {n: t.clone() for n, t in straight.tensors().items()}
    assert all(isinstance(t, torch.Tensor) for t in state.values())
    expected = second_half(straight)
    resumed = fresh(0)
    for _ in range(2):
        resumed.train_step()  # another state, to be overwritten
    resumed.buffer.rows.clear()
    resumed.load(drafter, 3)
    resumed.load_state_dict(state)
    assert second_half(resumed) == expected
    assert resumed.version == straight.version == 7
    for name, tensor in whole_state(straight).items():
        assert torch.equal(whole_state(resumed)[name], tensor), name


def test_what_is_merged_is_complete_from_the_start():
    trainer = DrafterTrainer(make_drafter(23), make_buffer(), config())
    names = set(trainer.tensors()) - {"ids_V"}
    moments = trainer.optimizer_tensors()
    keys = ("step", "exp_avg", "exp_avg_sq", "raw")
    assert set(moments) == {f"{n}.{k}" for n in names for k in keys}
    assert not any(t.any() for n, t in moments.items() if not n.endswith(".raw"))
    trainer.train_step()
    assert int(trainer.optimizer_tensors()["fc.step"]) == trainer.version == 1
    assert moments["fc.exp_avg"].any()  # the tensors themselves, not copies
    other = DrafterTrainer(make_drafter(23, seed=5), make_buffer(), config())
    other.load({k: v.detach().clone() for k, v in trainer.tensors().items()}, 9)
    assert other.version == 9 and torch.equal(other.drafter.fc, trainer.drafter.fc)
    with pytest.raises(ValueError, match="fc"):
        other.load({}, 1)


def test_choose_vocab_by_hand():
    counts = torch.tensor([0, 5, 0, 9, 1, 0, 5, 0])
    assert choose_vocab(counts, 3).tolist() == [1, 3, 6]
    assert choose_vocab(counts, 5).tolist() == [0, 1, 3, 4, 6]  # filled with the lowest unseen id
    assert choose_vocab(counts, 5, torch.tensor([3, 5, 7])).tolist() == [1, 3, 4, 5, 6]
    assert choose_vocab(counts, 2, torch.tensor([6])).tolist() == [3, 6]  # a tie stays in use
    with pytest.raises(ValueError, match="8 tokens"):
        choose_vocab(counts, 9)
