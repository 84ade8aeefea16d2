"""Drafting by copying, and joining a copied chain to a learned tree; all examples by hand."""

import torch

from minitlt.draft import Draft, RowState
from minitlt.eagle3 import DrafterConfig
from minitlt.ngram import NgramDrafter, merge_drafts


def play(drafter, *tokens):
    drafter.observe(list(tokens))


def ask(drafter, num, depth, width=1, nodes=16, stops=()):
    zeros, stop_ids = torch.zeros(num, dtype=torch.int64), torch.tensor(stops, dtype=torch.int64)
    rows = RowState(torch.arange(num) + 900, zeros, zeros, torch.ones(num), stop_ids)
    return drafter.propose(rows, depth, width, nodes)


def test_ngram_copies_what_followed_the_longest_match():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    # (2, 3) was followed by 4 and, later, by 5; (1, 2, 3) only by 4: the longer match wins.
    draft = ask(drafter, 1, 3)
    assert draft.tokens_BT.tolist() == [[900, 4, 9, 2]]
    assert draft.parents_BT.tolist() == [[-1, 0, 1, 2]]
    play(drafter, [7, 2, 3])
    # (7, 2, 3) is new; of the equally long matches of (2, 3) the newest is followed by 7.
    assert ask(drafter, 1, 2).tokens_BT.tolist() == [[900, 7, 2]]


def test_ngram_without_a_match_is_a_pad_and_rows_are_independent():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2, 3])
    drafter.begin(1, [5, 6, 7, 5, 6])
    draft = ask(drafter, 2, 2)
    assert draft.tokens_BT.tolist() == [[900, -1, -1], [901, 7, 5]]
    assert draft.parents_BT.tolist() == [[-1, -1, -1], [-1, 0, 1]]
    assert ask(drafter, 1, 2).tokens_BT.tolist() == [[900]]


def test_ngram_goes_on_where_its_source_ends():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2, 1, 2])
    assert ask(drafter, 1, 5).tokens_BT.tolist() == [[900, 1, 2, 1, 2, 1]]


def test_ngram_drafts_nothing_behind_a_stop_id():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 0, 1, 2])
    assert ask(drafter, 1, 5, stops=(0, 7)).tokens_BT.tolist() == [[900, 6, 7]]
    draft = ask(drafter, 1, 3, width=3, stops=(6, 5))
    assert draft.tokens_BT.tolist() == [[900, 6, 3, 5, 4, 1]]
    assert draft.parents_BT.tolist() == [[-1, 0, 0, 2, 2, 4]]


def test_ngram_reads_siblings_and_earlier_epochs_of_the_same_prompt():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2])
    drafter.begin(1, [1, 2])
    drafter.begin(2, [1, 3])
    play(drafter, [8, 9, 10], [8, 9], [8, 9])
    assert ask(drafter, 3, 1).tokens_BT.tolist() == [[900, -1], [901, 10], [902, -1]]
    for slot, prompt in ((2, [1, 3]), (1, [1, 2]), (0, [1, 2])):
        drafter.finish(slot, prompt, [])
    drafter.begin(0, [1, 2])  # the next epoch
    assert ask(drafter, 1, 3).tokens_BT.tolist() == [[900, 8, 9, 10]]


def test_ngram_move():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2])
    drafter.begin(1, [5, 6, 7, 5, 6])
    drafter.finish(0, [1, 2], [])
    drafter.move(1, 0)
    assert ask(drafter, 1, 1).tokens_BT.tolist() == [[900, 7]]


def test_ngram_tree_joins_equal_beginnings():
    drafter = NgramDrafter()
    drafter.begin(0, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 0, 1, 2])
    # Newest first: (6, 7, 0), then (3, 5, 1), then (3, 4, 1), which shares its 3 with the second.
    draft = ask(drafter, 1, 3, width=2, nodes=5)
    assert draft.tokens_BT.tolist() == [[900, 6, 7, 0, 3, 5]]  # five nodes at most
    assert draft.parents_BT.tolist() == [[-1, 0, 1, 2, 0, 4]]
    draft = ask(drafter, 1, 3, width=3)
    assert draft.tokens_BT.tolist() == [[900, 6, 7, 0, 3, 5, 1, 4, 1]]
    assert draft.parents_BT.tolist() == [[-1, 0, 1, 2, 0, 4, 5, 4, 7]]


def test_ngram_memory_is_bounded():
    drafter = NgramDrafter(DrafterConfig(ngram_tokens=100))
    for prompt in range(30):
        drafter.begin(0, [prompt, 1])
        play(drafter, list(range(20)))
        drafter.finish(0, [prompt, 1], list(range(20)))
    assert sum(c.num_tokens for c in drafter._corpora.values()) <= 100
    assert (29, 1) in drafter._corpora and (0, 1) not in drafter._corpora
    for row in range(300):  # one prompt for ever: the older half of its texts goes
        drafter.begin(0, [7, 7])
        play(drafter, [row, row + 1])
        drafter.finish(0, [7, 7], [row, row + 1])
    [corpus] = [c for k, c in drafter._corpora.items() if k == (7, 7)]
    assert corpus.num_tokens <= 102 and len(corpus.texts) <= 64
    assert len(corpus.places) <= corpus.num_tokens
    assert corpus.find([298, 299], 4) == []
    assert corpus.find([7, 297], 4)[0][0] == 2


def test_merge_by_hand():
    first = Draft(
        torch.tensor([[9, 1, 2, 3, -1], [9, 1, 2, -1, -1]]),
        torch.tensor([[-1, 0, 0, 1, -1], [-1, 0, 1, -1, -1]]),
    )
    chain = Draft(
        torch.tensor([[9, 1, 3, 4], [9, 5, 2, -1]]), torch.tensor([[-1, 0, 1, 2], [-1, 0, 1, -1]])
    )
    merged = merge_drafts(first, chain)
    # Row 0: 1 -> 3 is there already, 4 hangs on that 3. Row 1: 5 -> 2 is a branch of its own.
    # The first draft's last column held nothing and is gone.
    assert merged.tokens_BT.tolist() == [[9, 1, 2, 3, -1, -1, 4], [9, 1, 2, -1, 5, 2, -1]]
    assert merged.parents_BT.tolist() == [[-1, 0, 0, 1, -1, -1, 3], [-1, 0, 1, -1, 0, 4, -1]]
