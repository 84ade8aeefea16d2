"""Scripted drafters. They know the plain completions by row key, so acceptance can be dictated."""

from collections.abc import Callable

import torch

from minitlt.draft import Draft, Drafter, chain_parents


class ScriptedDrafter(Drafter):
    """Chains whose n-th draft is `draft(truth, row, n)`; truth is the plain engine's next token.

    With `width` > 1 a tree: every node gets `width` children, one of them (which, by turns) the
    scripted draft and the others wrong, and the scripted child alone goes on growing.
    """

    def __init__(
        self,
        known: dict[int, tuple[int, list[int]]],
        draft: Callable[[int, int, int], int],
        *,
        name: str = "scripted",
        vocab: int = 97,
    ) -> None:
        self.known, self.draft, self.name, self.vocab = known, draft, name, vocab
        self.calls = 0

    def propose(self, rows, depth, width, nodes):
        self.calls += 1
        tokens = [[int(root)] for root in rows.roots_B]
        parents = [-1]
        keys_and_places = zip(rows.keys_B.tolist(), rows.positions_B, strict=True)
        for row, (key, position) in enumerate(keys_and_places):
            prompt_length, completion = self.known[key]
            parents, spine = [-1], 0
            for n in range(depth):
                at = int(position) - prompt_length + n
                truth = completion[at] if at < len(completion) else 0
                draft = self.draft(truth, row, n) % self.vocab
                turn = n % width
                children = [(draft + 1 + i) % self.vocab for i in range(width)]
                children[turn] = draft
                parents += [spine] * width
                spine = len(tokens[row]) + turn
                tokens[row] += children
        if width == 1:
            parents = chain_parents(depth).tolist()
        return Draft(torch.tensor(tokens), torch.tensor([parents] * len(tokens)))


def oracle(truth: int, row: int, n: int) -> int:
    return truth


def anti_oracle(truth: int, row: int, n: int) -> int:
    return truth + 1


def oracle_then_wrong(truth: int, row: int, n: int) -> int:
    """Row r is right for r % 4 drafts, so rows accept different counts in one step."""
    return truth + (n >= row % 4)


def random_draft(seed: int = 0) -> Callable[[int, int, int], int]:
    generator = torch.Generator().manual_seed(seed)
    return lambda truth, row, n: int(torch.randint(0, 97, (1,), generator=generator))


SCRIPTS = {
    "oracle": oracle,
    "anti_oracle": anti_oracle,
    "oracle_then_wrong": oracle_then_wrong,
    "random": random_draft(),
}
