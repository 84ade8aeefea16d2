"""What passes between the rollout engine and a drafter: proposals one way, hidden states back.

A draft is a tree of guesses for the next tokens of each row. Node 0 is the *root*: the row's last
committed token, whose keys and values the target has not computed yet. Every other node names its
parent by index, parents come before children, and a chain is the tree whose node n hangs on n-1.
The engine and the drafters both import this module and never each other.

Left out on purpose: draft probabilities. Coupled verification compares tokens, so it needs none.
How to run: `pytest tests/test_drafter.py -k draft_module`.

Shape suffixes: B rows, T tree nodes (root included), N positions, F = 3H tapped width, H hidden.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

logger = logging.getLogger(__name__)
MAX_NODES = 64  # ancestor sets are one int64 bit mask per node


@dataclass
class Draft:
    """One tree of guesses per row.

    tokens_BT: int64; node 0 is the root (already committed), pads are -1.
    parents_BT: int64; the index of each node's parent, always smaller than the node's own index;
        -1 for the root and for pads.
    """

    tokens_BT: Tensor
    parents_BT: Tensor


@dataclass
class Taps:
    """What the target's forward saw at some positions; detached, never part of a graph.

    features_BNF: the three tapped layers' outputs [low, mid, high], concatenated (F = 3H).
    hidden_BNH: the last hidden state AFTER the final norm, i.e. what the lm head consumes, so
        that `lm_head(hidden)` are the target's own logits.
    """

    features_BNF: Tensor
    hidden_BNH: Tensor


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Which hidden states feed the drafter: EAGLE-3's [2, L // 2, L - 3] (HF indexing, so entry i
    is the input of layer i), clamped into 1..L-1 for models with fewer than 7 layers."""
    if num_layers < 7:
        logger.info("%d layers are fewer than EAGLE-3's taps expect: taps are clamped", num_layers)
    top = max(num_layers - 1, 0)
    low, mid, high = (min(max(i, 1), top) for i in (2, num_layers // 2, num_layers - 3))
    return low, mid, high


def chain_parents(num_drafts: int, device: torch.device | str | None = None) -> Tensor:
    """Parents of a chain of `num_drafts` guesses behind the root: [-1, 0, .., num_drafts - 1]."""
    return torch.arange(-1, num_drafts, device=device)


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
