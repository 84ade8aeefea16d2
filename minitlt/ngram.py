"""Drafting by copying: what followed the last time, in this row or in one with the same prompt.

The idea. Reasoning text repeats itself: a row restates numbers and formulas of its prompt and of
its own beginning, GRPO siblings answer the same prompt, and the same prompt comes back every epoch.
So the draft is what followed the longest earlier match of the row's last tokens (prompt lookup
decoding; the memory across rollouts is "Beat the long tail", MLSys 2026). All texts of one prompt
share one index: a dict from every `min_match` consecutive tokens to the last few places where they
ended. A look-up compares those few places backwards to find the longest match, so nothing is ever
searched and appending a token costs one dict entry.

`merge_drafts` adds such a chain to a learned drafter's tree; nodes that say the same are one node.

Left out: a suffix automaton (it finds matches whose last tokens are frequent and far back, at ten
times the memory); counts of how often each continuation occurred.

How to run: `pytest tests/test_ngram.py`.

Shape suffixes: B rows, T nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor

from minitlt.draft import Draft, Drafter, RowState, Taps
from minitlt.eagle3 import DrafterConfig

_PLACES = 8  # remembered per n-gram, newest last
_HALVE_AT = 64  # texts of one prompt; the older half is then forgotten

Tree = list[tuple[int, int]]  # (token, parent node), node i + 1 at entry i; node 0 is the root


class _Corpus:
    """All texts of one prompt. Text 0 is the prompt alone; the others begin with it."""

    def __init__(self, prompt: list[int], min_match: int) -> None:
        self.min_match, self.num_live = min_match, 0
        self.texts: dict[int, list[int]] = {}
        self.places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self.prompt_len, self.next_text = len(prompt), 0
        self._index(self.open(list(prompt)), 0)

    @property
    def num_tokens(self) -> int:
        rows = len(self.texts) - 1
        return sum(map(len, self.texts.values())) - rows * self.prompt_len

    def open(self, tokens: list[int]) -> int:
        self.texts[self.next_text] = tokens
        self.next_text += 1
        return self.next_text - 1

    def append(self, text: int, tokens: list[int]) -> None:
        start = len(self.texts[text])
        self.texts[text].extend(tokens)
        self._index(text, start)

    def _index(self, text: int, start: int) -> None:
        """Enters every n-gram that is followed by a token at `start` or later."""
        for at in range(max(start, self.min_match), len(self.texts[text])):
            self.enter(text, at)

    def enter(self, text: int, at: int) -> None:
        places = self.places.setdefault(tuple(self.texts[text][at - self.min_match : at]), [])
        places.append((text, at))
        if len(places) > _PLACES:
            del places[0]

    def find(self, tail: list[int], longest: int) -> list[tuple[int, int, int]]:
        """Places where the tail occurred: (match length up to `longest`, text, index of what
        followed), longest match first, the newest first among equals."""
        found = []
        for text, at in reversed(self.places.get(tuple(tail[-self.min_match :]), ())):
            tokens, length = self.texts[text], self.min_match
            most = min(longest, len(tail), at)
            while length < most and tokens[at - 1 - length] == tail[-1 - length]:
                length += 1
            found.append((length, text, at))
        found.sort(key=lambda place: -place[0])
        return found

    def forget_half(self, live: set[int]) -> None:
        """Drops the older half of the finished texts and builds the index again."""
        done = [text for text in self.texts if text and text not in live]
        for text in done[: (len(done) + 1) // 2]:
            del self.texts[text]
        self.places.clear()
        for text in self.texts:
            self._index(text, self.prompt_len if text else 0)


class NgramDrafter(Drafter):
    """Look-ups alone; the taps are not used.

    config: ngram_min, ngram_max and ngram_tokens are read. Above `ngram_tokens` whole prompts are
    forgotten, longest unused first; a prompt that is alone loses its older texts.
    """

    name = "ngram"

    def __init__(self, config: DrafterConfig | None = None) -> None:
        config = config or DrafterConfig()
        self.min_match, self.longest = config.ngram_min, config.ngram_max
        self.max_tokens = config.ngram_tokens
        self._corpora: OrderedDict[tuple[int, ...], _Corpus] = OrderedDict()
        self._slots: dict[int, tuple[_Corpus, int]] = {}
        self._stops: set[int] = set()

    def begin(self, slot: int, prompt: list[int], kept: int = 0) -> None:
        """Siblings and earlier epochs are found by the prompt itself."""
        key = tuple(prompt)
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = self._corpora[key] = _Corpus(prompt, self.min_match)
        self._corpora.move_to_end(key)
        corpus.num_live += 1
        self._slots[slot] = (corpus, corpus.open(list(prompt)))

    def observe(self, tokens: list[list[int]], taps: Taps | None = None) -> None:
        for slot, new in enumerate(tokens):
            corpus, text = self._slots[slot]
            corpus.append(text, new)

    def move(self, src: int, dst: int) -> None:
        self._slots[dst] = self._slots.pop(src)

    def finish(self, slot: int, prompt: list[int], completion: list[int]) -> None:
        """The row stays in the index, for its siblings and for the next epoch."""
        corpus, _ = self._slots.pop(slot)
        corpus.num_live -= 1
        excess = sum(c.num_tokens for c in self._corpora.values()) - self.max_tokens
        for key, old in list(self._corpora.items()):
            if excess <= 0:
                break
            if old is not corpus and not old.num_live:
                excess -= self._corpora.pop(key).num_tokens
        if excess > 0 or len(corpus.texts) - corpus.num_live > _HALVE_AT:
            corpus.forget_half({text for other, text in self._slots.values() if other is corpus})

    def state_dict(self) -> dict[str, Tensor]:
        """The whole index, between two rollouts, as int32 tensors: per prompt [length, next text,
        texts, places], per text [number, length], all tokens, per place [text, index]."""
        assert not self._slots, "rows are still being generated"
        corpora = self._corpora.values()
        texts = [item for c in corpora for item in c.texts.items()]
        places = [place for c in corpora for found in c.places.values() for place in found]
        sizes = [
            [c.prompt_len, c.next_text, len(c.texts), sum(map(len, c.places.values()))]
            for c in corpora
        ]
        lengths = [[number, len(tokens)] for number, tokens in texts]
        values = {"prompts": sizes, "texts": lengths, "places": places}
        state = {name: torch.tensor(v, dtype=torch.int32) for name, v in values.items()}
        flat = [token for _, tokens in texts for token in tokens]
        return {**state, "tokens": torch.tensor(flat, dtype=torch.int32)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The order of places is kept, so every later look-up finds the same."""
        texts, tokens, places = (iter(state[k].tolist()) for k in ("texts", "tokens", "places"))
        self._corpora.clear()
        for prompt_len, next_text, num_texts, num_places in state["prompts"].tolist():
            corpus = _Corpus([], self.min_match)
            corpus.prompt_len, corpus.next_text = prompt_len, next_text
            for number, length in islice(texts, num_texts):
                corpus.texts[number] = list(islice(tokens, length))
            for text, at in islice(places, num_places):
                corpus.enter(text, at)
            self._corpora[tuple(corpus.texts[0])] = corpus

    def propose(self, rows: RowState, depth: int, width: int, nodes: int) -> Draft:
        """A chain of copied tokens, or for width > 1 up to `width` of them in one tree. Rows
        without a match get pads."""
        num_rows, device = len(rows.roots_B), rows.roots_B.device
        self._stops = set(rows.stop_ids.tolist())
        trees = [self._tree(*self._slots[slot], depth, width, nodes) for slot in range(num_rows)]
        most = max(map(len, trees))
        padded = [tree + [(-1, -1)] * (most - len(tree)) for tree in trees]
        drafts = torch.tensor(padded, dtype=torch.int64, device=device).view(num_rows, most, 2)
        root_B1 = rows.roots_B[:, None]
        return Draft(
            torch.cat([root_B1, drafts[..., 0]], 1),
            torch.cat([torch.full_like(root_B1, -1), drafts[..., 1]], 1),
        )

    def _tree(self, corpus: _Corpus, text: int, depth: int, width: int, nodes: int) -> Tree:
        tail = corpus.texts[text][-self.longest :]
        if width == 1:
            return [(token, i) for i, token in enumerate(self._chain(corpus, tail, depth))]
        tree: Tree = []
        child: dict[tuple[int, int], int] = {}
        num_chains = 0
        for _, other, at in corpus.find(tail, self.longest):
            node, before = 0, len(tree)
            for token in self._until_stop(corpus.texts[other][at : at + depth]):
                if (node, token) not in child:
                    if len(tree) >= nodes:
                        break
                    tree.append((token, node))
                    child[node, token] = len(tree)
                node = child[node, token]
            num_chains += len(tree) > before
            if num_chains == width:
                break
        return tree

    def _chain(self, corpus: _Corpus, tail: list[int], depth: int) -> list[int]:
        """Copies on; where the source ends, the text copied so far is looked up again."""
        copied: list[int] = []
        while len(copied) < depth:
            found = corpus.find((tail + copied)[-self.longest :], self.longest)
            if not found:
                break
            _, text, at = found[0]
            copied += corpus.texts[text][at : at + depth - len(copied)]
        return self._until_stop(copied)

    def _until_stop(self, tokens: list[int]) -> list[int]:
        """Up to the first stop id: behind it nothing can be accepted."""
        ends = (i for i, token in enumerate(tokens, 1) if token in self._stops)
        return tokens[: next(ends, None)]


def merge_drafts(first: Draft, chain: Draft) -> Draft:
    """`first` with `chain` (a chain per row, both with the same roots) hung on its root.

    Where the chain says what a child of the same node says already, they are one node. Columns that
    are pads in every row are dropped.
    """
    num_nodes, tokens_BT = first.tokens_BT.shape[1], first.tokens_BT
    extra = chain.tokens_BT.shape[1] - 1
    pads_BE = torch.full_like(chain.tokens_BT[:, 1:], -1)
    tokens, parents = torch.cat([tokens_BT, pads_BE], 1), torch.cat([first.parents_BT, pads_BE], 1)
    node_B = torch.zeros_like(tokens_BT[:, 0])
    for level in range(extra):
        token_B = chain.tokens_BT[:, level + 1]
        same_BT = (first.parents_BT == node_B[:, None]) & (tokens_BT == token_B[:, None])
        known_B, at_B = same_BT.any(1), same_BT.long().argmax(1)
        new_B = ~known_B & (token_B >= 0)
        tokens[:, num_nodes + level] = torch.where(new_B, token_B, -1)
        parents[:, num_nodes + level] = torch.where(new_B, node_B, -1)
        node_B = torch.where(known_B, at_B, num_nodes + level)
    used_T = (tokens >= 0).any(0)
    used_T[0] = True
    place_T = used_T.long().cumsum(0) - 1
    tokens, parents = tokens[:, used_T], parents[:, used_T]
    return Draft(tokens, torch.where(parents < 0, -1, place_T[parents.clamp(min=0)]))


class MergedDrafter(Drafter):
    """One tree from two sources, both of which the engine feeds as drafters of their own.

    The copied chain takes the nodes it needs, the learned tree gets the rest.
    """

    name = "merged"

    def __init__(self, learned: Drafter, ngram: NgramDrafter) -> None:
        self.learned, self.ngram = learned, ngram

    def propose(self, rows: RowState, depth: int, width: int, nodes: int) -> Draft:
        copied = self.ngram.propose(rows, min(depth, nodes - 1), 1, nodes - 1)
        rest = nodes + 1 - copied.tokens_BT.shape[1]
        return merge_drafts(self.learned.propose(rows, depth, width, rest), copied)
