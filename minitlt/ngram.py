"""Drafting by copying: what followed the last time, in this row or in one with the same prompt.

The idea. Reasoning text repeats itself: a row restates numbers and formulas of its prompt and of
its own beginning, GRPO siblings answer the same prompt, and the same prompt comes back every epoch.
So the guess is what followed the longest earlier match of the row's last tokens (prompt lookup
decoding; the memory across rollouts is "Beat the long tail", MLSys 2026). All texts of one prompt
share one index: a dict from every `min_match` consecutive tokens to the last few places where they
ended. A look-up compares those few places backwards to find the longest match, so nothing is ever
searched and appending a token costs one dict entry.

`merge_drafts` adds such a chain to a learned drafter's tree; nodes that say the same are one node.

Left out: a suffix automaton (it finds matches whose last tokens are frequent and far back, at ten
times the memory); counts of how often each continuation occurred.

How to run: `pytest tests/test_drafter.py -k "ngram or merge"`.

Shape suffixes: B rows, T nodes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from minitlt.draft import MAX_NODES, Draft, Taps
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


class NgramDrafter:
    """Fulfils the engine's Drafter protocol with look-ups alone; the taps are not used.

    config: ngram_min, ngram_max, ngram_tokens and tree_nodes are read. Above `ngram_tokens` whole
    prompts are forgotten, longest unused first; a prompt that is alone loses its older texts.
    """

    name = "ngram"
    needs_taps = False

    def __init__(self, config: DrafterConfig | None = None) -> None:
        config = config or DrafterConfig()
        self.min_match, self.longest = config.ngram_min, config.ngram_max
        self.max_tokens, self.tree_nodes = config.ngram_tokens, config.tree_nodes
        self._corpora: OrderedDict[tuple[int, ...], _Corpus] = OrderedDict()
        self._slots: dict[int, tuple[_Corpus, int]] = {}

    def begin(self, slot: int, prompt: list[int], group: int) -> None:
        """Siblings and earlier epochs are found by the prompt itself, so `group` is not needed."""
        key = tuple(prompt)
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = self._corpora[key] = _Corpus(prompt, self.min_match)
        self._corpora.move_to_end(key)
        corpus.num_live += 1
        self._slots[slot] = (corpus, corpus.open(list(prompt)))

    def prefill(self, slot: int, start: int, taps: Taps) -> None:
        """Nothing: the prompt was indexed at `begin`."""

    def share(self, src: int, dst: int, length: int) -> None:
        """Nothing: siblings share their index already."""

    def observe(
        self, slots: list[int], tokens_BN: Tensor, num_B: Tensor, taps: Taps | None
    ) -> None:
        rows = zip(slots, tokens_BN.tolist(), num_B.tolist(), strict=True)
        for slot, tokens, num in rows:
            corpus, text = self._slots[slot]
            corpus.append(text, tokens[:num])

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

    def propose(
        self,
        slots: list[int],
        roots_B: Tensor,
        keys_B: Tensor,
        positions_B: Tensor,
        temperatures_B: Tensor,
        depth: int,
        width: int,
    ) -> Draft:
        """A chain of at most `depth` copied tokens, or for width > 1 up to `width` of them in one
        tree. Rows without a match get pads."""
        trees = [self._tree(*self._slots[slot], depth, width) for slot in slots]
        num_nodes = 1 + max((len(tree) for tree in trees), default=0)
        tokens, parents = [], []
        for root, tree in zip(roots_B.tolist(), trees, strict=True):
            pads = [-1] * (num_nodes - 1 - len(tree))
            tokens.append([root, *(token for token, _ in tree), *pads])
            parents.append([-1, *(parent for _, parent in tree), *pads])
        device = roots_B.device
        return Draft(torch.tensor(tokens, device=device), torch.tensor(parents, device=device))

    def _tree(self, corpus: _Corpus, text: int, depth: int, width: int) -> Tree:
        tail = corpus.texts[text][-self.longest :]
        if width == 1:
            return [(token, i) for i, token in enumerate(self._chain(corpus, tail, depth))]
        tree: Tree = []
        child: dict[tuple[int, int], int] = {}
        num_chains = 0
        for _, other, at in corpus.find(tail, self.longest):
            node, before = 0, len(tree)
            for token in corpus.texts[other][at : at + depth]:
                if len(tree) >= min(self.tree_nodes, MAX_NODES - 1) and (node, token) not in child:
                    break
                if (node, token) not in child:
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
        return copied


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


class MergedDrafter:
    """One tree from two sources: `learned` (anything whose `propose` takes a budget) and `ngram`.

    The copied chain may take `depth` of the nodes, the learned tree gets the rest. At width 1 there
    is no room for two guesses: the learned chain is used, and the copied one where there is none.
    shared: the engine drives both sources itself already; nothing is then passed on twice.
    """

    name = "merged"

    def __init__(self, learned: Any, ngram: NgramDrafter, *, shared: bool = False) -> None:
        self.learned, self.ngram = learned, ngram
        self.tree_nodes: int = learned.tree_nodes
        self.needs_taps = not shared
        self._told: tuple[Any, ...] = () if shared else (learned, ngram)

    def begin(self, slot: int, prompt: list[int], group: int) -> None:
        for source in self._told:
            source.begin(slot, prompt, group)

    def prefill(self, slot: int, start: int, taps: Taps) -> None:
        for source in self._told:
            source.prefill(slot, start, taps)

    def share(self, src: int, dst: int, length: int) -> None:
        for source in self._told:
            source.share(src, dst, length)

    def observe(self, slots: list[int], tokens_BN: Tensor, num_B: Tensor, taps: Taps) -> None:
        for source in self._told:
            source.observe(slots, tokens_BN, num_B, taps)

    def move(self, src: int, dst: int) -> None:
        for source in self._told:
            source.move(src, dst)

    def finish(self, slot: int, prompt: list[int], completion: list[int]) -> None:
        for source in self._told:
            source.finish(slot, prompt, completion)

    def propose(
        self,
        slots: list[int],
        roots_B: Tensor,
        keys_B: Tensor,
        positions_B: Tensor,
        temperatures_B: Tensor,
        depth: int,
        width: int,
    ) -> Draft:
        noise = (keys_B, positions_B, temperatures_B)
        copied = self.ngram.propose(slots, roots_B, *noise, depth, 1)
        budget = max(self.tree_nodes - (copied.tokens_BT.shape[1] - 1), 1)
        learned = self.learned.propose(slots, roots_B, *noise, depth, width, budget)
        if width > 1:
            return merge_drafts(learned, copied)
        silent_B = (learned.tokens_BT[:, 1:] < 0).all(1)
        short = learned.tokens_BT.shape[1] - copied.tokens_BT.shape[1]
        pad = torch.nn.functional.pad
        tokens, parents = (
            pad(t, (0, short), value=-1) for t in (copied.tokens_BT, copied.parents_BT)
        )
        return Draft(
            torch.where(silent_B[:, None], tokens, learned.tokens_BT),
            torch.where(silent_B[:, None], parents, learned.parents_BT),
        )
