"""The draft model and what proposes with it: parity, the cache, trees, weights by reference."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from drafter_reference import Reference

from minitlt.draft import RowState, Taps, ancestor_bits, chain_parents, depths
from minitlt.drafter import (
    DrafterConfig,
    Eagle3Config,
    Eagle3Drafter,
    Eagle3Proposer,
    MergedDrafter,
    NgramDrafter,
    load_drafter,
    save_drafter,
    start_from_target,
)
from minitlt.eagle3 import Pack, choose_vocab, default_taps, product_dtype
from minitlt.kernels import gumbel_topk

H, W = 19, 61  # a prime hidden size and vocabulary: no width can pass for another
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def target_config(**changes):
    values = {
        "hidden_size": H,
        "intermediate_size": 29,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": W,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return SimpleNamespace(**{**values, **changes})


def make_drafter(vocab=0, dtype=torch.float64, seed=0, train_head=True, **changes):
    """A drafter with sizeable random weights, tied to a random embedding and head."""
    config = Eagle3Config.from_target(
        target_config(**changes), DrafterConfig(draft_vocab_size=vocab, train_head=train_head)
    )
    drafter = Eagle3Drafter(config, dtype=dtype)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
            parameter.copy_(noise * 0.3 if parameter.dim() == 2 else 1 + 0.3 * noise)
        if vocab:
            drafter.ids_V.copy_(torch.randperm(W, generator=random)[:vocab].sort().values)
    shape = (2, W, config.hidden_size)
    embed, head = torch.randn(shape, generator=random, dtype=torch.float64)
    drafter.tie(embed.to(dtype), head.to(dtype))
    return drafter


def reference(drafter):
    return Reference(drafter, drafter._target.embed, drafter.target_rows())


def random_row(length, seed):
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(W, (length,), generator=random).tolist()
    return tokens, torch.randn(length, 3 * H, generator=random, dtype=torch.float64)


def whole_rows(rows, steps):
    """A pack with every pair of every row as a query; tokens behind a row's end are 0."""
    tokens = [torch.tensor(t) for t, _ in rows]
    taps = [f[: len(t) - 1] for t, f in rows]
    later = [
        torch.stack([torch.nn.functional.pad(t[1 + s :], (0, s)) for s in range(steps)])
        for t in tokens
    ]
    sizes = [len(t) - 1 for t in tokens]
    return Pack(
        torch.cat(taps),
        torch.cat([t[1:] for t in tokens]),
        torch.cat([torch.arange(n) for n in sizes]),
        torch.arange(sum(sizes)),
        torch.cat(later, 1),
        [(n, n) for n in sizes],
    )


# The shared module.


def test_draft_module_by_hand():
    assert chain_parents(3).tolist() == [-1, 0, 1, 2]
    #        0          node 6 is a pad
    #      1   2
    #     3 4
    #     5
    parents = torch.tensor([[-1, 0, 0, 1, 1, 3, -1]])
    assert depths(parents).tolist() == [[0, 1, 1, 2, 2, 3, 0]]
    assert ancestor_bits(parents).tolist() == [
        [0b1, 0b11, 0b101, 0b1011, 0b10011, 0b101011, 0b1000000]
    ]


def test_draft_module_at_64_nodes():
    parents = chain_parents(63)[None]
    assert depths(parents).tolist() == [list(range(64))]
    assert ((ancestor_bits(parents)[0, 63] >> torch.arange(64)) & 1).sum() == 64
    with pytest.raises(ValueError, match="64 nodes"):
        ancestor_bits(chain_parents(64)[None])


# The model.


@pytest.mark.parametrize("vocab", [0, 23])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
        LLAMA3,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_unrolled_forward_equals_independent_reference(vocab, rope):
    drafter = make_drafter(vocab, rope_parameters=rope)
    rows, steps = [random_row(9, 1), random_row(4, 2)], 4
    drafter.reserve_positions(16)
    pack = whole_rows(rows, steps)
    got = [drafter.logits(state) for state in drafter.unroll(pack, steps)]
    first = 0
    for tokens, taps in rows:
        expected = reference(drafter).unroll(tokens, taps, steps)
        for s in range(steps):
            for t, logits in enumerate(expected[s]):
                torch.testing.assert_close(got[s][first + t], logits, rtol=1e-5, atol=1e-5)
        first += len(tokens) - 1
    if rope["rope_type"] == "yarn":
        assert drafter._rope_scale > 1.0  # the scale on cos and sin is applied, not lost


def test_rope_frequencies_are_the_targets():
    """The drafter rotates exactly as the target it reads from."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=48, num_attention_heads=6, num_hidden_layers=8, rope_parameters=LLAMA3
    )
    drafter = Eagle3Drafter(Eagle3Config.from_target(config))
    rotary = LlamaRotaryEmbedding(config)
    assert torch.equal(drafter._inv_freq, rotary.inv_freq)
    drafter.reserve_positions(40)
    cos, sin = rotary(torch.zeros(1, 1), torch.arange(40)[None])
    torch.testing.assert_close(drafter._cos_sin[0][:40], cos[0])
    torch.testing.assert_close(drafter._cos_sin[1][:40].abs(), sin[0].abs())


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_refuses_rope_that_depends_on_the_length(kind):
    with pytest.raises(ValueError, match=kind):
        make_drafter(rope_parameters={"rope_type": kind, "rope_theta": 1e4, "factor": 2.0})


def test_refuses_rope_by_layer_and_partial_rope():
    with pytest.raises(ValueError, match="differ by layer"):
        make_drafter(rope_parameters={"full_attention": {"rope_theta": 1e4}})
    with pytest.raises(ValueError, match="partial"):
        make_drafter(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})


def test_widths_are_checked_at_the_seams():
    drafter = make_drafter()
    with pytest.raises(AssertionError, match="3H"):
        drafter.fuse(torch.zeros(2, H, dtype=torch.float64))
    with pytest.raises(AssertionError, match="width H"):
        drafter.mix(torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3 * H, dtype=torch.float64))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.1)])
def test_packed_weights_change_nothing_but_speed(dtype, tolerance):
    drafter = make_drafter(23, torch.float32)
    pack = whole_rows([random_row(9, 1)], 3)
    if dtype == "bfloat16" and product_dtype("auto", drafter.fc) != torch.bfloat16:
        with pytest.raises(ValueError, match="no bfloat16 products"):
            drafter.serving_copy(dtype)
        return
    copy = drafter.serving_copy(dtype)
    for model in (drafter, copy):
        model.reserve_positions(16)
    assert not any(p.requires_grad for p in copy.parameters())
    with torch.no_grad():
        for own, other in zip(drafter.unroll(pack, 3), copy.unroll(pack, 3), strict=True):
            difference = (copy.logits(other) - drafter.logits(own)).abs().max()
            assert difference < tolerance * drafter.logits(own).abs().max()


def test_target_tensors_are_used_by_reference():
    """A policy update in place reaches the drafter; none of the drafter's own tensors move."""
    drafter = make_drafter(23, train_head=False)
    embed, head = drafter._target.embed, drafter._target.head
    assert not any(t is embed or t is head for t in drafter.state_dict().values())
    own = {k: v.clone() for k, v in drafter.state_dict().items()}
    copy = drafter.serving_copy()
    before = copy.target_rows().clone()
    head.mul_(2.0)
    embed.add_(1.0)
    assert torch.equal(copy.target_rows(), 2 * before)
    assert torch.equal(copy.target_rows(), head[drafter.ids_V])
    assert torch.equal(copy.embed(torch.tensor([3])), embed[3:4])
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, own[name])
    drafter.tie(embed + 1, head + 1)  # replaced tensors: one tie reaches the copies
    assert torch.equal(copy.target_rows(), head[drafter.ids_V] + 1)
    with pytest.raises(ValueError, match="lm head"):
        drafter.tie(embed, head[:, :-1])


def test_start_from_target_copies_what_the_target_knows():
    from models import tiny_model

    model = tiny_model()
    config = Eagle3Config.from_target(model.config, DrafterConfig(draft_vocab_size=31))
    drafter = Eagle3Drafter(config)
    drafter.tie(model.model.embed_tokens.weight, model.lm_head.weight)
    start_from_target(drafter, dict(model.named_parameters()))
    last = model.model.layers[-1]
    taps = torch.randn(5, 3 * config.hidden_size)
    torch.testing.assert_close(drafter.fuse(taps), taps[:, 2 * config.hidden_size :])
    x = torch.randn(5, config.hidden_size)
    normed = drafter._norm(x, drafter.norm_post)
    gate, up = (normed @ drafter.gate_up.T).chunk(2, -1)
    ours = (torch.nn.functional.silu(gate) * up) @ drafter.down.T
    torch.testing.assert_close(ours, last.mlp(last.post_attention_layernorm(x)))
    assert torch.equal(drafter.head, model.lm_head.weight[:31])
    with pytest.raises(ValueError, match="gate_proj"):
        start_from_target(drafter, {})


def test_default_taps():
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (2, 2, 1)
    assert default_taps(1) == (0, 0, 0)


def test_choose_vocab_by_hand():
    counts = torch.tensor([0, 5, 0, 9, 1, 0, 5, 0])
    assert choose_vocab(counts, 3).tolist() == [1, 3, 6]
    assert choose_vocab(counts, 5).tolist() == [0, 1, 3, 4, 6]  # filled with the lowest unseen id
    assert choose_vocab(counts, 5, torch.tensor([3, 5, 7])).tolist() == [1, 3, 4, 5, 6]
    assert choose_vocab(counts, 2, torch.tensor([6])).tolist() == [3, 6]  # a tie stays in use
    with pytest.raises(ValueError, match="8 tokens"):
        choose_vocab(counts, 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [("loss", "ce"), ("tap_dtype", "int8"), ("ttt_steps", 0), ("long_share", 2.0),
     ("draft_vocab_size", -1), ("ngram_max", 1)],
)  # fmt: skip
def test_config_names_the_bad_field(field, value):
    with pytest.raises(ValueError, match=field):
        DrafterConfig(**{field: value})
    assert all(f.metadata["help"] for f in dataclasses.fields(DrafterConfig))


def test_save_and_load(tmp_path):
    drafter = make_drafter(23, torch.float32)
    path = save_drafter(tmp_path / "new" / "folder", drafter)
    assert [p.name for p in path.parent.iterdir()] == ["drafter.safetensors"]
    loaded = load_drafter(path.parent)
    assert loaded.config == drafter.config
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    with pytest.raises(ValueError, match=r"drafter\.safetensors"):
        load_drafter(tmp_path)


def test_small_files_hold_the_weights_to_half_a_step(tmp_path):
    drafter = make_drafter(23, torch.float32)
    size = save_drafter(tmp_path / "whole", drafter).stat().st_size
    path = save_drafter(tmp_path / "small", drafter, small=True)
    assert path.stat().st_size < size
    loaded = load_drafter(path.parent)
    for name, tensor in drafter.state_dict().items():
        got = loaded.state_dict()[name]
        if tensor.dim() == 2:
            step = tensor.abs().amax(1, keepdim=True) / 127
            assert ((got - tensor).abs() <= 0.501 * step).all()
        else:
            assert torch.equal(got, tensor)


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = save_drafter(tmp_path, make_drafter(23, torch.float32))
    before = path.read_bytes()

    def broken(tensors, beside, metadata):
        beside.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("minitlt.eagle3.save_file", broken)
    with pytest.raises(OSError, match="disk full"):
        save_drafter(tmp_path, make_drafter(23, torch.float32, seed=1))
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


# The proposer.


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

    def state(self, temperature=1.0, coupled=True):
        rows = zip(self.rows, self.lengths, strict=True)
        roots = torch.tensor([row[0][n - 1] for row, n in rows])
        return RowState(roots, *self.noise(temperature), self.stop_ids, coupled)

    def propose(self, depth, width=1, temperature=1.0, nodes=16, coupled=True):
        return self.proposer.propose(self.state(temperature, coupled), depth, width, nodes)

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
    world.proposer.load_state({})  # new weights: everything is computed again
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
    with pytest.raises(ValueError, match="nonsense"):
        world.proposer.load_state({"nonsense": torch.zeros(1)})


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
