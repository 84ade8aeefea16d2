"""Captured forwards: buckets, padding and what stays valid, with a capture that any machine has."""

import pytest
import torch
from models import random_prompts, tiny_model

from minitlt import native
from minitlt.graphs import MAX_ROWS, CudaCapture, StepGraphs, row_bucket
from minitlt.ngram import NgramDrafter
from minitlt.spec import Arm, Bandit, RolloutEngine, SamplingParams
from minitlt.target import full_state, make_target


def replayed(run):
    """A capture that runs again where a GPU would replay: fixed inputs and outputs, as there."""
    outputs = run()

    def replay():
        for buffer, value in zip(outputs, run(), strict=True):
            buffer.copy_(value)

    return replay, outputs


def graphed(model, capture=replayed):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "library", lambda: None)  # a GPU has none either
        target = make_target(model)
    target.masks_short = False  # the kernel's path, as on a GPU
    target._graphs = StepGraphs(target._captured, capture)
    return target


def test_row_buckets():
    sizes = [1, 2, 3, 5, 9, 16, 17, 33, MAX_ROWS, MAX_ROWS + 1]
    assert [row_bucket(n) for n in sizes] == [1, 2, 4, 8, 16, 16, 32, 48, MAX_ROWS, MAX_ROWS + 1]
    assert all(row_bucket(n) >= n for n in range(1, 300))


def test_padding_changes_nothing_and_one_graph_serves_a_bucket():
    model, prompts = tiny_model(), random_prompts([9, 14, 6, 11, 8])
    want, target = make_target(model), graphed(model)
    want.reserve(5, 128)
    target.reserve(5, 128)
    assert target.cache.num_slots == 8
    for slot, prompt in enumerate(prompts):
        for t in (want, target):
            t.forward(torch.tensor([prompt]), torch.tensor([0]), first_slot=slot, logits=False)
    lengths = torch.tensor([len(p) for p in prompts])
    chain = torch.randint(3, 30, (5, 4), generator=torch.Generator().manual_seed(0))
    tree = torch.tensor([[-1, 0, 0, 1]] * 5)
    # Ever fewer rows, as in a rollout: what padding overwrites belongs to rows that have left.
    for num_rows, parents in [(5, None), (5, tree), (4, None), (3, tree), (1, None)]:
        args = chain[:num_rows], lengths[:num_rows], None if parents is None else parents[:num_rows]
        for got, right in zip(flat(target.forward(*args)), flat(want.forward(*args)), strict=True):
            torch.testing.assert_close(got, right, atol=1e-4, rtol=1e-4)
    assert sorted(target._graphs._graphs) == [(1, 4), (4, 4), (8, 4)]
    kept = [x for _, _, outputs in target._graphs._graphs.values() for x in outputs]
    assert model.config.vocab_size not in {x.shape[-1] for x in kept}  # logits would fill the GPU


@pytest.mark.parametrize("num_nodes", [1, 4])
@pytest.mark.parametrize("num_rows", [1, 3, 5, 9, 17, 33, 49])
def test_padding_writes_to_its_own_slots_and_nowhere_else(num_rows, num_nodes):
    """Every bucket up to 64 with the fewest rows: three steps leave a sentinel in every place but
    those behind the rows' cursors and the padding's own, which are the first of its slots."""
    target = graphed(tiny_model(num_hidden_layers=1))
    target.reserve(num_rows, 30)
    bucket = row_bucket(num_rows)
    assert target.cache.num_slots == bucket
    for layer in target.cache.layers:
        layer.fill_(7.0)
    lengths = torch.arange(num_rows) % 9 + 2
    own = torch.zeros(bucket, target.cache.length, dtype=torch.bool)
    own[num_rows:, :num_nodes] = True
    for step in range(3):
        at = lengths + step * num_nodes
        target.forward(torch.full((num_rows, num_nodes), 5), at)
        for row, start in enumerate(at.tolist()):
            own[row, start : start + num_nodes] = True
    for layer in target.cache.layers:
        touched = (layer != 7.0).transpose(1, 2).flatten(2).any(2)
        assert torch.equal(touched, own)


def test_the_bandit_is_not_told_of_steps_that_record():
    target, bandit = graphed(tiny_model()), Bandit([Arm(), Arm("ngram", 2)], window=1000)
    engine = RolloutEngine(target, [NgramDrafter()], bandit)
    records = [[5] * 9, [6] * 40, [7] * 20]  # ever fewer rows, and drafts that are right
    params = SamplingParams(max_new_tokens=40)
    stats = engine.generate(random_prompts([3, 9, 4]), params, [1, 2, 3], replay=records).stats
    timed = sum(map(len, bandit._seconds.values()))
    assert timed == stats.verify_steps - target.num_graphs and target.num_graphs > 2


def test_refresh_keeps_graphs_and_a_moved_cache_drops_them():
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    target, fresh = graphed(old), make_target(new)
    for t in (target, fresh):
        t.reserve(2, 128)
    step = torch.tensor([[4, 5], [6, 7]]), torch.zeros(2, dtype=torch.int64)
    target.forward(*step)
    places = [x.data_ptr() for norms in target.norms for x in norms.values()]
    target.refresh(full_state(new))
    assert places == [x.data_ptr() for norms in target.norms for x in norms.values()]
    got, want = target.forward(*step)[0], fresh.forward(*step)[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    target.reserve(2, 128)
    assert target._graphs._graphs
    target.reserve(2, 256)
    assert not target._graphs._graphs


def flat(result):
    logits, taps = result
    return logits, taps.features_BNF, taps.hidden_BNH


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "num_rows"), [(torch.float32, 3), (torch.bfloat16, 4)])
def test_gpu_graphs_equal_launches(dtype, num_rows):
    """In bf16 at a bucket's own size: with padding, other products round otherwise."""
    model = tiny_model(hidden_size=128, num_attention_heads=4, head_dim=32).cuda()
    graphs, eager = (make_target(model, dtype=dtype, device="cuda") for _ in range(2))
    assert isinstance(graphs._graphs._capture, CudaCapture)
    eager._graphs = None
    prompts = random_prompts([9, 14, 6, 11][:num_rows])
    for t in (graphs, eager):
        t.reserve(num_rows, 128)
        for slot, prompt in enumerate(prompts):
            at = {"first_slot": slot, "logits": False}
            t.forward(torch.tensor([prompt]).cuda(), torch.tensor([0]).cuda(), **at)
    lengths = torch.tensor([len(p) for p in prompts]).cuda()
    tree = torch.tensor([[-1, 0, 0, 1]] * num_rows).cuda()
    for num_nodes, parents in ((1, None), (4, None), (4, tree), (1, None)):
        step = torch.randint(3, 30, (num_rows, num_nodes)).cuda(), lengths, parents
        for got, want in zip(flat(graphs.forward(*step)), flat(eager.forward(*step)), strict=True):
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)
    assert graphs.num_graphs == 2
