"""What proposes with the draft model: the cache, chains, trees, rows that move."""

import math
from types import SimpleNamespace

import pytest
import torch
from drafter_reference import H, make_drafter, random_row, reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from minitlt import drafter as definition
from minitlt import native
from minitlt.draft import RowState, Taps, depths
from minitlt.drafter import Eagle3Proposer
from minitlt.eagle3 import DrafterConfig
from minitlt.kernels import gumbel_topk
from minitlt.ngram import MergedDrafter, NgramDrafter


class World:
    """Rows with fixed texts and taps: plays the engine around a proposer, remembers what it did."""

    def __init__(self, drafter, lengths, *, chunk=3, config=None, stop_ids=(), **kwargs):
        config = config or DrafterConfig(tap_dtype="float64")
        self.stop_ids = torch.tensor(stop_ids, dtype=torch.int64)
        self.proposer = Eagle3Proposer(drafter, config, **kwargs)
        self.proposer.reserve(4, 300)
        self.rows, self.lengths, self.prompts = [], [], []
        for i, length in enumerate(lengths):
            self.admit(length, seed=10 + i, chunk=chunk)

    def admit(self, length, seed, chunk=3):
        slot = len(self.rows)
        tokens, taps = random_row(300, seed)
        self.rows.append((tokens, taps))
        self.lengths.append(length)
        self.prompts.append(length)
        self.proposer.begin(slot, tokens[:length])
        for start in range(0, length - 1, chunk):
            self.proposer.prefill(
                slot, start, self.taps(slot, start, min(start + chunk, length - 1))
            )

    def taps(self, slot, start, stop):
        features = self.rows[slot][1][None, start:stop]
        return Taps(features, features[..., :H])

    def emit(self, nums):
        """The engine commits this many of each row's own next tokens."""
        most = max(nums)
        tokens = []
        features = torch.full((len(nums), most, 3 * H), 7.0, dtype=torch.float64)  # pads: rubbish
        for b, num in enumerate(nums):
            start = self.lengths[b]
            tokens.append(self.rows[b][0][start : start + num])
            features[b, :num] = self.rows[b][1][start - 1 : start - 1 + num]
            self.lengths[b] += num
        self.proposer.observe(tokens, Taps(features, features[..., :H]))

    def noise(self, temperature=1.0):
        b = len(self.rows)
        return (
            torch.arange(b) * 977 + 5,
            torch.tensor(self.lengths),
            torch.full((b,), temperature),
        )

    def state(self, temperature=1.0, coupled=True, least=-math.inf):
        rows = zip(self.rows, self.lengths, strict=True)
        roots = torch.tensor([row[0][n - 1] for row, n in rows])
        return RowState(roots, *self.noise(temperature), self.stop_ids, coupled, least)

    def propose(self, depth, width=1, temperature=1.0, nodes=16, coupled=True, least=-math.inf):
        return self.proposer.propose(self.state(temperature, coupled, least), depth, width, nodes)

    def retire(self, slot):
        last = len(self.rows) - 1
        if slot != last:
            self.proposer.move(last, slot)
            for state in (self.rows, self.lengths, self.prompts):
                state[slot] = state[last]
        for state in (self.rows, self.lengths, self.prompts):
            state.pop()

    def check_cache(self):
        """The cache of every row equals a fresh teacher-forced prefill, element by element."""
        proposer, model = self.proposer, self.proposer.model
        for slot, length in enumerate(self.lengths):
            n = length - 1
            assert proposer._cached[slot] == n == proposer._tapped[slot]
            tokens, taps = self.rows[slot]
            h = model.fuse(taps[:n])
            _, k, v = model.attention_inputs(
                model.mix(torch.tensor(tokens[1:length]), h), torch.arange(n)
            )
            for name, fresh in (("keys", k), ("values", v)):
                kept = proposer._buffers[name][slot, :n]
                torch.testing.assert_close(kept, fresh, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("width", [1, 3])
def test_cache_equals_a_fresh_prefill_after_every_round(width):
    depth = 3
    world = World(make_drafter(23), [5, 12, 2])
    world.propose(depth, width)
    world.check_cache()
    for nums in ([4, 1, 2], [1, 4, 1], [1, 1, 1], [2, 3, 4]):  # all, none and some accepted
        world.emit(nums)
        world.propose(depth, width)
        world.check_cache()
    world.emit([3, 1, 2])
    world.emit([1, 2, 4])  # a step without speculation in between
    world.retire(0)
    world.propose(depth, width)
    world.check_cache()
    world.admit(9, seed=40)  # a refilled slot
    world.emit([40, 1, 2])  # much at once: filled before, not with, the first draft
    world.propose(depth, width)
    world.check_cache()
    world.emit([1, 2, 1])
    world.proposer.reload()  # new weights: everything is computed again
    assert world.proposer._cached[:3] == [0, 0, 0]
    world.propose(depth, width)
    world.check_cache()


def test_share_copies_the_prompt_of_a_sibling():
    drafter = make_drafter(23)
    world = World(drafter, [40])
    tokens, taps = world.rows[0]
    world.propose(2)
    world.emit([3])
    other, other_taps = random_row(300, 99)
    prompt = world.prompts[0]
    world.proposer.begin(1, tokens[:prompt])
    world.proposer.share(0, 1, prompt - 1)
    world.rows.append((tokens[:prompt] + other, torch.cat([taps[: prompt - 1], other_taps])))
    world.lengths.append(prompt)
    for nums in ([1, 1], [2, 3]):
        world.propose(2)
        world.check_cache()
        world.emit(nums)
    world.propose(2)
    world.check_cache()


def test_chain_equals_plain_decoding_with_the_rows_noise():
    """Every drafted token is the coupled sample of the reference's logits, keyed by target id."""
    drafter = make_drafter(23)
    world = World(drafter, [5, 12, 2])
    world.propose(3)
    world.emit([4, 1, 2])
    draft = world.propose(3, temperature=0.7)
    keys, positions, temperatures = world.noise(0.7)
    assert draft.parents_BT.tolist() == [[-1, 0, 1, 2]] * 3
    for b, (row, length) in enumerate(zip(world.rows, world.lengths, strict=True)):
        chain = draft.tokens_BT[b].tolist()
        assert chain[0] == row[0][length - 1]
        logits = reference(drafter).run(row[0][:length], row[1], chain[1:3])
        for i in range(3):
            best = gumbel_topk(
                logits[i][None].float(), keys[b : b + 1], positions[b : b + 1] + i,
                temperatures[b : b + 1], 1, drafter.ids_V,
            )[0]  # fmt: skip
            assert chain[1 + i] == best[0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tree_children_come_from_their_own_ancestors(temperature):
    """Each node is among the best of a separate linear forward over exactly its own path."""
    drafter = make_drafter(23)
    world = World(drafter, [5, 30])
    world.propose(3, 3)
    world.emit([2, 1])
    depth, width, budget = 3, 3, 12
    draft = world.propose(depth, width, temperature, nodes=budget)
    keys, positions, temperatures = world.noise(temperature)
    assert draft.tokens_BT.shape == (2, 1 + budget)
    for b in range(2):
        parents, tokens = draft.parents_BT[b].tolist(), draft.tokens_BT[b].tolist()
        level = depths(draft.parents_BT)[b].tolist()
        assert all(parents[n] < n for n in range(1, budget + 1)) and max(level) <= depth
        assert len({(p, t) for p, t in zip(parents, tokens, strict=True)}) == budget + 1
        for node in range(1, budget + 1):
            path, at = [], parents[node]
            while at > 0:
                path.insert(0, tokens[at])
                at = parents[at]
            row, length = world.rows[b], world.lengths[b]
            logits = reference(drafter).run(row[0][:length], row[1], path)[-1]
            best = gumbel_topk(
                logits[None].float(), keys[b : b + 1], positions[b : b + 1] + len(path),
                temperatures[b : b + 1], width, drafter.ids_V,
            )[0]  # fmt: skip
            assert tokens[node] in best[0].tolist()


def test_a_full_tree_is_every_combination():
    drafter = make_drafter(23)
    world = World(drafter, [5])
    draft = world.propose(2, 3, nodes=12)
    assert sorted(draft.parents_BT[0].tolist()) == [-1] + [0] * 3 + sorted([1, 2, 3] * 3)
    chain = world.propose(2)
    root_child = draft.tokens_BT[0, draft.parents_BT[0] == 0].tolist()
    assert chain.tokens_BT[0, 1] in root_child  # the chain's first draft is one of the tree's
    small = world.propose(2, 3, nodes=2)
    assert small.tokens_BT.shape == (1, 3)
    assert set(small.tokens_BT[0, small.parents_BT[0] == 0].tolist()) <= set(root_child)


def test_wide_tree_over_a_tiny_draft_vocabulary():
    draft = World(make_drafter(2), [5]).propose(2, 8)
    assert draft.tokens_BT.shape == (1, 7)  # 2 children, then 2 of each


def test_first_draft_depends_on_the_last_verified_token():
    drafter = make_drafter(23)
    drafts = []
    for last in (3, 4, 5, 6, 7):
        world = World(drafter, [6])
        world.rows[0][0][5] = last
        world.proposer.begin(0, world.rows[0][0][:6])
        world.proposer.prefill(0, 0, world.taps(0, 0, 5))
        drafts.append(int(world.propose(1, temperature=0.0).tokens_BT[0, 1]))
    assert len(set(drafts)) > 1


def test_nothing_is_drafted_behind_a_stop_token():
    drafter = make_drafter(23)
    free = World(drafter, [5, 7]).propose(4, temperature=0.0)
    stop = int(free.tokens_BT[0, 2])
    draft = World(drafter, [5, 7], stop_ids=[stop]).propose(4, temperature=0.0)
    assert draft.tokens_BT[0].tolist() == [*free.tokens_BT[0, :3].tolist(), -1, -1]
    assert draft.parents_BT[0].tolist() == [-1, 0, 1, -1, -1]
    tree = World(drafter, [5, 7], stop_ids=[stop]).propose(3, 3, temperature=0.0, nodes=10)
    tokens, parents = tree.tokens_BT[0].tolist(), tree.parents_BT[0].tolist()
    assert all(tokens[p] != stop for p in parents[1:] if p > 0)


@pytest.mark.parametrize("width", [1, 3])
def test_rows_without_a_pair_get_pads(width):
    world = World(make_drafter(23), [1, 4])
    draft = world.propose(2, width)
    assert (draft.tokens_BT[0, 1:] == -1).all() and (draft.parents_BT[0] == -1).all()
    assert (draft.tokens_BT[1] >= 0).all()
    world.emit([1, 1])
    assert (world.propose(2, width).tokens_BT >= 0).all()


def test_rows_seen_too_late_get_pads_and_no_training_data():
    rows = []
    world = World(make_drafter(23), [4], buffer=SimpleNamespace(add=lambda *a: rows.append(a)))
    tokens, _ = random_row(300, 5)
    world.proposer.begin(1, tokens[:6])  # no prefill
    world.rows.append(random_row(300, 5))
    world.lengths.append(6)
    world.emit([2, 2])
    draft = world.propose(2)
    assert (draft.tokens_BT[1, 1:] == -1).all() and (draft.tokens_BT[0] >= 0).all()
    world.proposer.finish(1, tokens[:6], tokens[6:8])
    assert not rows


def test_finish_hands_over_the_row_with_its_taps():
    rows = []
    world = World(make_drafter(23), [4, 3], buffer=SimpleNamespace(add=lambda *a: rows.append(a)))
    world.emit([2, 3])
    world.emit([1, 1])
    tokens, taps = world.rows[0]
    world.proposer.finish(0, tokens[:4], tokens[4:7])
    [(row, prompt_len, features, hidden)] = rows
    assert row == tokens[:7] and prompt_len == 4
    assert torch.equal(features, taps[:6]) and torch.equal(hidden, taps[:6, :H])


def test_reload_takes_over_weights_and_vocabulary():
    drafter = make_drafter(23)
    world = World(drafter, [8, 5])
    before = world.propose(3, temperature=0.0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(-1.5)
        drafter.ids_V.copy_(torch.arange(30, 53))
    assert torch.equal(world.propose(3, temperature=0.0).tokens_BT, before.tokens_BT)
    world.proposer.reload()
    after = world.propose(3, temperature=0.0)
    fresh = World(drafter, [8, 5]).propose(3, temperature=0.0)
    assert torch.equal(after.tokens_BT, fresh.tokens_BT)
    assert not torch.equal(after.tokens_BT, before.tokens_BT)
    assert (after.tokens_BT[:, 1:] >= 30).all()


def test_a_rows_draft_does_not_depend_on_its_company():
    drafter = make_drafter(23)
    together = World(drafter, [5, 60, 9]).propose(3, 2).tokens_BT
    alone = World(drafter, [5]).propose(3, 2).tokens_BT
    assert torch.equal(together[0], alone[0])


def test_proposing_leaves_the_global_generator_alone():
    world = World(make_drafter(23), [5])
    before = torch.get_rng_state()
    world.propose(3, 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("coupled", [True, False])
def test_merged_drafter_keeps_both_sources(coupled):
    world = World(make_drafter(23), [8])
    tokens = [5, 6, 7, 11, 4, 5, 6, 7]
    world.rows[0][0][:8] = tokens
    world.proposer.begin(0, tokens)
    world.proposer.prefill(0, 0, world.taps(0, 0, 7))
    ngram = NgramDrafter()
    ngram.begin(0, tokens)
    merged, state = MergedDrafter(world.proposer, ngram), world.state(coupled=coupled)
    for nodes in (16, 8, 4):
        draft = merged.propose(state, 3, 2, nodes)
        parents, got = draft.parents_BT[0].tolist(), draft.tokens_BT[0].tolist()
        assert len(got) <= 1 + nodes and draft.logits_BKV is None
        node = 0
        for token in (11, 4, 5):  # the copied chain is a path of the tree
            node = next(n for n in range(1, len(got)) if parents[n] == node and got[n] == token)
        learned = world.proposer.propose(state, 3, 2, nodes - 3)
        assert set(learned.tokens_BT[0].tolist()) <= set(got)
    assert merged.propose(state, 3, 2, 3).tokens_BT.shape[1] <= 4


@pytest.mark.parametrize("coupled", [True, False])
def test_what_is_not_likely_enough_is_not_drafted(coupled, monkeypatch):
    """The likely ones of a tree and nothing else, in its order; and of four levels the whole
    path that is likely, whose ancestors are likelier still."""
    world, trusts = World(make_drafter(23), [5, 40]), []
    most = definition._most_trusted
    monkeypatch.setattr(
        definition, "_most_trusted", lambda trust, num: trusts.append(trust) or most(trust, num)
    )
    world.proposer.model.native_trees = lambda: None
    whole, some = (world.propose(4, 3, nodes=12, coupled=coupled, least=least)
                   for least in (-math.inf, math.log(0.1)))  # fmt: skip
    likely = trusts[-1].sort(1, descending=True).values[:, :12] >= math.log(0.1)
    nums = likely.sum(1)
    assert 0 < nums.sum() < 24 and some.tokens_BT.shape == whole.tokens_BT.shape
    for row, num in enumerate(nums.tolist()):
        kept = paths(some, row)
        assert len(kept) == 1 + num and kept <= paths(whole, row)
        assert (some.tokens_BT[row, 1 + num :] == -1).all()
        assert (some.parents_BT[row, 1 + num :] == -1).all()


def paths(draft, row):
    """Tokens from the root to each node that is no pad."""
    tokens, parents = draft.tokens_BT[row].tolist(), draft.parents_BT[row].tolist()
    found = {0: (tokens[0],)}
    for node in range(1, len(tokens)):
        if tokens[node] >= 0:
            found[node] = (*found[parents[node]], tokens[node])
    return set(found.values())


class NearTies:
    """Whether a choice that the definition makes hangs on the last bits."""

    def __init__(self, monkeypatch):
        self.found = False
        self._best, self._most = definition.gumbel_topk, definition._most_trusted
        monkeypatch.setattr(definition, "gumbel_topk", self.best)
        monkeypatch.setattr(definition, "_most_trusted", self.most)

    def best(self, logits, keys, positions, heat, k, ids):
        more = self._best(logits, keys, positions, heat, min(k + 1, logits.shape[1]), ids)
        self.look(more.scores_Nk)
        return self._best(logits, keys, positions, heat, k, ids)

    def most(self, trust, num):
        if num < trust.shape[1]:  # where all are taken, their order does not matter
            self.look(trust.sort(1, descending=True).values[:, : num + 1])
        return self._most(trust, num)

    def look(self, best):
        gaps = best[:, :-1] - best[:, 1:]
        behind_stops = best[:, 1:] < -900  # so far down rounding makes ties, and breaks them
        self.found |= bool(((gaps > 0) & (gaps < 3e-5) | behind_stops & (gaps < 1e-3)).any())


@pytest.mark.skipif(native.library() is None, reason=native.status())
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_proposals_in_c_are_the_definitions(data):
    draw = data.draw
    vocab, tied = draw(st.sampled_from((0, 3, 23))), draw(st.booleans())
    depth, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    temperature = draw(st.sampled_from((0.0, 0.7, 1.0)))
    own_head, seed = draw(st.booleans()), draw(st.integers(0, 99))
    drafter = make_drafter(vocab, torch.float32, seed, own_head)
    if tied and drafter.head is not None:
        drafter.head.detach().round_()  # with T = 0 some are equal
        if draw(st.booleans()):
            drafter.head.detach().zero_()  # and now all
    stops = draw(
        st.sets(
            st.sampled_from(drafter.ids_V.tolist()), max_size=drafter.config.draft_vocab_size // 2
        )
    )
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    config = DrafterConfig(
        tap_dtype=draw(st.sampled_from(("bfloat16", "float32"))),
        serve_dtype="auto" if own_head else "float32",  # torch never narrows the target's head
    )
    in_c, plain = (World(drafter, lengths, config=config, stop_ids=sorted(stops)) for _ in range(2))
    plain.proposer.model.native_trees = lambda: None
    for world in (in_c, plain):  # a row whose prompt was never seen
        world.proposer.begin(len(lengths), random_row(9, 5)[0])
        world.rows.append(random_row(300, 5))
        world.lengths.append(9)
    with pytest.MonkeyPatch.context() as patch:
        ties = NearTies(patch)
        least = draw(st.sampled_from((-math.inf, math.log(0.2), math.log(0.5))))
        for nodes in draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)):
            want = plain.propose(depth, width, temperature, nodes, least=least)
            assume(not ties.found)
            got = in_c.propose(depth, width, temperature, nodes, least=least)
            assert torch.equal(got.tokens_BT, want.tokens_BT)
            assert torch.equal(got.parents_BT, want.parents_BT)
            for slot, length in enumerate(in_c.lengths[:-1]):
                for name in ("keys", "values"):
                    both = (w.proposer._buffers[name][slot, : length - 1] for w in (in_c, plain))
                    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
            nums = draw(st.lists(st.integers(1, 20), min_size=len(lengths) + 1,
                                 max_size=len(lengths) + 1))  # fmt: skip
            for world in (in_c, plain):
                world.emit(nums)


@pytest.mark.skipif(native.library() is None, reason=native.status())
def test_a_proposal_in_c_heeds_no_default_device_and_no_other_shape(monkeypatch):
    world = World(make_drafter(0, torch.float32, 0, True), [9, 4], config=DrafterConfig())
    trees, given = world.proposer.model.native_trees(), []
    monkeypatch.setattr(world.proposer.model, "native_trees", lambda: remember)

    def remember(*args):
        given.append(args)
        return trees(*args)

    draft = world.propose(3, 2, nodes=4)
    with torch.device("meta"):
        tokens, parents = trees(*given[0])
    assert torch.equal(tokens, draft.tokens_BT) and torch.equal(parents, draft.parents_BT)
    buffers, turns, rows, *rest = given[0]
    for i in range(len(rows)):
        with pytest.raises(AssertionError):
            trees(buffers, turns, [*rows[:i], rows[i][:, None], *rows[i + 1 :]], *rest)
