"""What passes between the rollout engine and a drafter: proposals one way, hidden states back.

A draft is a tree of proposed next tokens for each row. Node 0 is the *root*: the row's last
committed token, whose keys and values the target has not computed yet. Every other node names its
parent by index, parents come before children, and a chain is the tree whose node n hangs on n-1.
The engine and the drafters both import this module and never each other.

How to run: `pytest tests/test_eagle3.py -k draft_module`.

Shape suffixes: B rows, T tree nodes (root included), K = T - 1 drafts, N positions, F = 3H tapped
width, H hidden, V vocab.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # rotary types whose angles never change
MAX_NODES = 64  # ancestor sets are one int64 bit mask per node


@dataclass
class Draft:
    """One tree of drafts per row.

    tokens_BT: int64; node 0 is the root (already committed), pads are -1.
    parents_BT: int64; the index of each node's parent, always smaller than the node's own index;
        -1 for the root and for pads.
    logits_BKV: for a chain that was drawn at random: the draft's logits over the whole vocabulary,
        before the temperature (-inf for what it cannot say). None: the drafts were chosen. Only the
        ratio test reads it; coupled verification compares tokens.
    """

    tokens_BT: Tensor
    parents_BT: Tensor
    logits_BKV: Tensor | None = None


@dataclass
class Taps:
    """What the target's forward saw at some positions; detached, never part of a graph.

    features_BNF: the three tapped layers' outputs [low, mid, high], concatenated (F = 3H).
    hidden_BNH: the last hidden state AFTER the final norm, i.e. what the lm head consumes, so
        that `lm_head(hidden)` are the target's own logits.
    """

    features_BNF: Tensor
    hidden_BNH: Tensor

    def part(self, row: int, start: int, stop: int) -> Taps:
        """Some positions of one row, [1, stop - start]."""
        at = slice(row, row + 1), slice(start, stop)
        return Taps(self.features_BNF[at], self.hidden_BNH[at])

    def clone(self) -> Taps:
        return Taps(self.features_BNF.clone(), self.hidden_BNH.clone())

    def at(self, nodes_BD: Tensor) -> Taps:
        """Of some nodes of every row, e.g. those that decided each emitted token; -1 pads."""
        row_B1 = torch.arange(len(nodes_BD), device=nodes_BD.device)[:, None]
        at_BD = nodes_BD.clamp(min=0)
        return Taps(self.features_BNF[row_B1, at_BD], self.hidden_BNH[row_B1, at_BD])


@dataclass
class RowState:
    """The active rows, as a drafter needs them; row b lives in slot b.

    roots_B: int64, the last committed token. keys_B: int64, the noise keys to draft with.
    positions_B: int64, committed tokens L, so a child of the root is the token at index L.
    stop_ids: int64 [any], ids behind which nothing need be drafted.
    coupled: the keys are the target's own, so the likeliest draft is the one with the best noise.
        Otherwise a chain is drawn with them and hands over its logits, and a tree is chosen.
    least: log of the likelihood under which a node of a tree need not be drafted; a source that
        knows of none drafts all.
    """

    roots_B: Tensor
    keys_B: Tensor
    positions_B: Tensor
    temperatures_B: Tensor
    stop_ids: Tensor
    coupled: bool = True
    least: float = -math.inf


class Drafter:
    """Proposes trees; keeps its own state per slot, told of every committed token.

    A source that learns nothing from some of these calls leaves them out. The engine's memory
    budget counts bytes_per_token, what it stores per slot and token, and fixed_bytes, what it will
    ask for once.
    """

    name = ""
    needs_taps = False
    bytes_per_token = 0
    fixed_bytes = 0

    def propose(self, rows: RowState, depth: int, width: int, nodes: int) -> Draft:
        """A tree at most `depth` deep with at most `nodes` drafts; a chain if width is 1."""
        raise NotImplementedError

    def reserve(self, num_slots: int, length: int) -> None:
        """A rollout begins: so many slots of so many tokens; what was stored may be dropped."""

    def begin(self, slot: int, prompt: list[int], kept: int = 0) -> None:
        """A row enters a slot, whose last row had the same first `kept` tokens; taps of the rest
        of its prompt follow by `prefill` or `share`."""

    def prefill(self, slot: int, start: int, taps: Taps) -> None:
        """Taps [1, N] of a prompt's positions start, start + 1, ..; N may be 0."""

    def share(self, src: int, dst: int, length: int) -> None:
        """The row in dst begins with what is in src: its first `length` positions are the same."""

    def observe(self, tokens: list[list[int]], taps: Taps) -> None:
        """Row b emitted tokens[b] = x_L, x_{L+1}, ..; taps [B, N] are of the nodes that decided
        them (positions L - 1, L, ..; pads behind a row's own number)."""

    def move(self, src: int, dst: int) -> None:
        """The row in src goes on in dst."""

    def finish(self, slot: int, prompt: list[int], completion: list[int]) -> None:
        """The row in this slot is complete; the slot is free."""


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Which hidden states feed the drafter: EAGLE-3's [2, L // 2, L - 3] (HF indexing, so entry i
    is the input of layer i), clamped into 1..L-1 for models with fewer than 7 layers."""
    if num_layers < 7:
        logger.info("%d layers are fewer than EAGLE-3's taps expect: taps are clamped", num_layers)
    top = max(num_layers - 1, 0)
    low, mid, high = (min(max(i, 1), top) for i in (2, num_layers // 2, num_layers - 3))
    return low, mid, high


def chain_parents(num_drafts: int, device: torch.device | str | None = None) -> Tensor:
    """Parents of a chain of `num_drafts` behind the root: [-1, 0, .., num_drafts - 1]."""
    return torch.arange(-1, num_drafts, device=device)


def chain_of(columns: list[Tensor], rows: RowState, drawn_from: list[Tensor]) -> Draft:
    """A chain per row: the root and its drafts, [B, 1] each, up to a row's first stop id.

    drawn_from: the logits [B, V] of every draft, for the ratio test (`coupled` false).
    """
    tokens_BT = torch.cat(columns, 1)
    parents_BT = chain_parents(len(columns) - 1, tokens_BT.device).repeat(len(tokens_BT), 1)
    stop_BT = torch.isin(tokens_BT[:, 1:], rows.stop_ids).long()
    behind_BT = stop_BT.cumsum(1) - stop_BT > 0
    tokens_BT[:, 1:].masked_fill_(behind_BT, -1)
    parents_BT[:, 1:].masked_fill_(behind_BT, -1)
    return Draft(
        tokens_BT, parents_BT, None if rows.coupled else torch.stack(drawn_from, 1).float()
    )


def depths(parents_BT: Tensor) -> Tensor:
    """Distance of every node from its root, [.., T] int64. Roots and pads have depth 0.

    Node n at depth d decides the token at absolute index L + d of a row with L tokens, and its own
    position id is L - 1 + d. Pads sit at the root's position, which is always inside the cache.
    """
    depth, jump = (parents_BT >= 0).long(), parents_BT
    for _ in range(_num_jumps(parents_BT.shape[-1])):
        live, at = jump >= 0, jump.clamp(min=0)
        depth = depth + depth.gather(-1, at).masked_fill(~live, 0)
        jump = jump.gather(-1, at).masked_fill(~live, -1)
    return depth


def ancestor_bits(parents_BT: Tensor) -> Tensor:
    """Bit m of [.., n] is set iff node m is node n or one of its ancestors. int64, T <= 64.

    Bit 63 is the sign bit: test bits with `(bits >> m) & 1`, never with `> 0`. A pad sees only
    itself, so a softmax over its row is finite.
    """
    num_nodes = parents_BT.shape[-1]
    if num_nodes > MAX_NODES:
        raise ValueError(f"a draft tree has at most {MAX_NODES} nodes, got {num_nodes}")
    own = torch.ones(num_nodes, dtype=torch.int64, device=parents_BT.device)
    bits = (own << torch.arange(num_nodes, device=parents_BT.device)).expand(parents_BT.shape)
    jump = parents_BT
    for _ in range(_num_jumps(num_nodes)):
        live, at = jump >= 0, jump.clamp(min=0)
        bits = bits | bits.gather(-1, at).masked_fill(~live, 0)
        jump = jump.gather(-1, at).masked_fill(~live, -1)
    return bits


def _num_jumps(num_nodes: int) -> int:
    """Pointer doubling: after j jumps a node has heard from 2**j generations of ancestors."""
    return max(num_nodes - 1, 0).bit_length()
