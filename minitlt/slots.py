"""Slots: the key/value cache with one cursor per row, a forward's place in it; what a target is.

What it is. A row of the batch owns a *slot*. A forward writes the keys and values of a small tree
of tokens (a chain is the plainest tree, one token the plainest chain) behind the row's cursor, and
every node attends to the committed context and to its own ancestors. Nothing is committed by that:
`lengths` belong to the caller, so rolling back a rejected draft is not moving the cursor, and stale
entries behind it are masked now and overwritten later. There is no left padding.

Left out: paged memory (slots are plain, lazily touched tensors; what rows have in common is copied
by `copy_slot`, not shared), sliding windows.

`Target` is what the engine needs of a target; target.py and module_target.py compute one. The cache
serves both. `plan_step` and `attend` are of those that PyTorch computes: native
code finds its places and attends by itself.

How to try it: `pytest tests/test_target.py`.

Shape suffixes: B rows, T query tokens, N = B*T, S cached positions read, K key/value heads, G query
heads per key/value head, D head dim.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitlt.draft import Taps, ancestor_bits, default_taps, depths
from minitlt.kernels import tree_attention

# A row of the CPU attention has the same bits with 6, 12, 18 or 24 query rows (kernels take 6 at a
# time; more than 32 are cut), and if of every 512 positions all are read or at most half (more are
# summed in two parts, cut in the middle). Other sizes take other paths.
_QUERY_STEP, _MOST_QUERIES = 6, 24
_READ_STEP, _BLOCK = 32, 512
Named = Iterable[tuple[str, Tensor]]  # weights under the checkpoint's names


def reach(length: int) -> int:
    """How many positions are read for the sake of the first `length`."""
    whole, rest = length // _BLOCK * _BLOCK, length % _BLOCK
    return whole + (_BLOCK if rest > _BLOCK // 2 else -(-rest // _READ_STEP) * _READ_STEP)


@dataclass(frozen=True)
class TargetShape:
    """Size facts of the target, read from its config. `context` is the largest total length."""

    num_layers: int
    hidden: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    tap_layers: tuple[int, int, int]  # HF hidden_states indices: the input of layer i

    @classmethod
    def from_config(cls, config: Any) -> TargetShape:
        heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            context=config.max_position_embeddings,
            tap_layers=default_taps(config.num_hidden_layers),
        )


class SlotCache:
    """Keys and values, [layers, slots, 2K, length, D]: K key heads, then K value heads.

    Pages are touched only when written. One indexed copy per layer writes keys and values.
    """

    def __init__(self, shape: TargetShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._all = torch.empty(0)
        self._flat: list[Tensor] = []  # by layer, as [.., D]
        self.num_slots = self.length = 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Room for this many rows of this many tokens; what was stored may be dropped."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        self.num_slots = num_slots
        # On a CPU, where pages that are not touched cost nothing, no read is ever cut short.
        self.length = reach(length) if self.device.type == "cpu" else -(-length // 128) * 128
        s = self.shape
        # The old block is free before a new one is asked for.
        self._flat, self._all = [], torch.empty(0)
        size = (s.num_layers, self.num_slots, 2 * s.num_kv_heads, self.length, s.head_dim)
        self._all = torch.zeros(size, dtype=self.dtype, device=self.device)
        self._flat = list(self._all.view(s.num_layers, -1, s.head_dim))

    @property
    def whole(self) -> Tensor:
        return self._all

    @property
    def layers(self) -> tuple[Tensor, ...]:
        return self._all.unbind()

    @property
    def num_bytes(self) -> int:
        """What is reserved now."""
        return self.num_slots * self.length * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """All layers, key and value."""
        s = self.shape
        return 2 * s.num_layers * s.num_kv_heads * s.head_dim * self.dtype.itemsize

    def write(self, index: int, step: Step, kv_MD: Tensor) -> None:
        """New keys and values of layer `index`, [tokens * 2K, D], to the step's places."""
        self._flat[index].index_copy_(0, step.write_M, kv_MD)

    def views(self, first_slot: int, num_rows: int, read: int) -> tuple[tuple[Tensor, ...], ...]:
        """(keys, values) of some rows: of every layer a view [B, K, S, D]."""
        rows = self._all[:, first_slot : first_slot + num_rows, :, :read]
        keys, values = rows.chunk(2, dim=2)
        return keys.unbind(), values.unbind()

    def copy_slot(self, src: int, dst: int, length: int) -> None:
        self._all[:, dst, :, :length] = self._all[:, src, :, :length]

    def compact(self, lengths_B: Tensor, nodes_BD: Tensor) -> None:
        """Moves the accepted path behind the cursor: entry length + nodes[b, i] to length + i.

        nodes_BD is `Verified.nodes_BD` (-1 pads). A chain's path is already in place.
        """
        depth = torch.arange(nodes_BD.shape[1], device=nodes_BD.device)
        row, at = torch.nonzero((nodes_BD >= 0) & (nodes_BD != depth), as_tuple=True)
        if not row.numel():
            return
        base = lengths_B.to(nodes_BD.device)[row]
        src, dst = base + nodes_BD[row, at], base + at
        # The right side is a copy: overlaps are safe.
        self._all[:, row, :, dst] = self._all[:, row, :, src]


@dataclass
class Step:
    """One forward's geometry, computed once and used by every layer."""

    keys: tuple[Tensor, ...]  # of each layer [B, K, S, D]
    values: tuple[Tensor, ...]
    write_M: Tensor  # where keys and values of the new tokens go: rows of a layer as [.., D]
    position_BT: Tensor
    mask_BTS: Tensor | None  # True = may attend; None when the kernel reads ancestor bits
    bits_BT: Tensor | None
    lengths_B: Tensor
    read: int  # S
    # Where attention needs a mask: the place of a layer's queries [B, T, K, G, D], and the same as
    # blocks of rows [B, K, .., D], G * T and pads in all, each with its mask [B, 1, .., S].
    queries: Tensor | None = None
    blocks: tuple[tuple[Tensor, Tensor], ...] = ()

    def stack_queries(self, shape: TargetShape, dtype: torch.dtype) -> None:
        """The G query heads of a key/value head as further rows; pads are 0 and see everything."""
        if self.mask_BTS is None:
            return
        num_rows, num_nodes, read = self.mask_BTS.shape
        size = (shape.num_kv_heads, shape.num_heads // shape.num_kv_heads, num_nodes)
        num_queries = size[1] * num_nodes
        padded = -(-num_queries // _QUERY_STEP) * _QUERY_STEP
        mask = self.mask_BTS.new_zeros((num_rows, 1, padded, read), dtype=dtype)
        queries = mask.new_zeros(num_rows, size[0], padded, shape.head_dim)
        heads = mask[:, 0, :num_queries].unflatten(1, size[1:])
        heads.masked_fill_(~self.mask_BTS[:, None], -torch.inf)
        self.queries = queries[:, :, :num_queries].unflatten(2, size[1:]).permute(0, 3, 1, 2, 4)
        most = _MOST_QUERIES if mask.device.type == "cpu" else padded
        self.blocks = tuple(zip(queries.split(most, 2), mask.split(most, 2), strict=True))


def plan_step(
    tokens_BT: Tensor,
    lengths_B: Tensor,
    parents_BT: Tensor | None,
    first_slot: int,
    cache: SlotCache,
    *,
    masked: bool,
    whole: bool = False,
) -> Step:
    """Positions, write places and who sees whom. `parents_BT` None means a chain.

    whole: read all of the cache and do not look at `lengths_B` on the host, as a captured graph
    must; the caller vouches for the room. Raises ValueError when a row would leave the cache.
    """
    num_rows, num_nodes = tokens_BT.shape
    device = tokens_BT.device
    node_T = torch.arange(num_nodes, device=device)
    if parents_BT is None:
        depth_BT, bits_BT = node_T.expand(num_rows, -1), None
    else:
        depth_BT, bits_BT = depths(parents_BT), ancestor_bits(parents_BT)
    read = cache.length
    if not whole:
        longest = int(lengths_B.max()) + num_nodes
        if longest > cache.length:
            raise ValueError(
                f"a row needs {longest} cache positions, only {cache.length} are reserved"
            )
        read = min(reach(longest), cache.length)
    head_J = torch.arange(2 * cache.shape.num_kv_heads, device=device)
    slot_B = torch.arange(first_slot, first_slot + num_rows, device=device)
    lane_BJ = (slot_B[:, None] * len(head_J) + head_J) * cache.length
    write_BTJ = lane_BJ[:, None] + (lengths_B[:, None] + node_T)[:, :, None]
    mask_BTS = None
    if masked:
        mask_BTS = _attention_mask(lengths_B, bits_BT, num_nodes, read)
    elif bits_BT is None:
        bits_BT = ((2 << node_T) - 1).expand(num_rows, -1)
    position_BT = lengths_B[:, None] + depth_BT
    keys, values = cache.views(first_slot, num_rows, read)
    write_M = write_BTJ.reshape(-1)
    return Step(keys, values, write_M, position_BT, mask_BTS, bits_BT, lengths_B, read)


def _attention_mask(lengths_B: Tensor, bits_BT: Tensor | None, num_nodes: int, read: int) -> Tensor:
    """[B, T, S] bool: the committed context, and of the new nodes only the own ancestors."""
    at_S = torch.arange(read, device=lengths_B.device)
    node_T = torch.arange(num_nodes, device=lengths_B.device)
    if bits_BT is None:
        return at_S <= lengths_B[:, None, None] + node_T[:, None]
    mask_BTS = (at_S < lengths_B[:, None, None]).expand(-1, num_nodes, -1).clone()
    ancestor_BTT = ((bits_BT[:, :, None] >> node_T) & 1).bool()
    where_BTT = (lengths_B[:, None, None] + node_T).expand(-1, num_nodes, -1)
    return mask_BTS.scatter_(2, where_BTT, ancestor_BTT)


def attend(
    q_NHD: Tensor, keys: Tensor, values: Tensor, step: Step, size: tuple[int, int]
) -> Tensor:
    """Grouped-query attention of T nodes per row over its slot, [N, heads * D].

    The G query heads of a key/value head are stacked as extra query rows, so keys and values are
    read in place and never repeated.
    """
    num_rows, num_nodes = size
    if step.queries is None:
        assert step.bits_BT is not None
        q = q_NHD.view(num_rows, num_nodes, -1, keys.shape[3]).transpose(1, 2)
        bits, scale = step.bits_BT, keys.shape[3] ** -0.5
        out = tree_attention(q, keys, values, step.lengths_B, bits, scale)
        return out.transpose(1, 2).reshape(num_rows * num_nodes, -1)
    step.queries.copy_(q_NHD.view(step.queries.shape))
    parts = [
        F.scaled_dot_product_attention(q, keys, values, attn_mask=mask) for q, mask in step.blocks
    ]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    _, _, num_kv, group, head_dim = step.queries.shape
    out = out[:, :, : group * num_nodes].view(num_rows, num_kv, group, num_nodes, head_dim)
    return out.permute(0, 3, 1, 2, 4).reshape(num_rows * num_nodes, -1)


def attention_keeps_bits(shape: TargetShape, dtype: torch.dtype) -> bool:
    """Whether a row's attention on this CPU has the same bits alone, in a chain and in company.

    That is what the block sizes above are for; which ones it needs is a matter of processor.
    """
    random = torch.Generator().manual_seed(0)
    cache = SlotCache(replace(shape, num_layers=1), dtype, torch.device("cpu"))
    cache.reserve(2, 800)
    cache.layers[0].normal_(generator=random)
    q_NHD = torch.randn(2 * 22, shape.num_heads, shape.head_dim, generator=random, dtype=dtype)

    def first_row(lengths: tuple[int, ...], num_nodes: int) -> Tensor:
        size, lengths_B = (len(lengths), num_nodes), torch.tensor(lengths)
        step = plan_step(lengths_B.new_zeros(size), lengths_B, None, 0, cache, masked=True)
        step.stack_queries(shape, dtype)
        q = q_NHD[: size[0] * num_nodes]
        return attend(q, step.keys[0], step.values[0], step, size)[0]

    for length in (130, 300):
        alone = first_row((length,), 1)
        cases = [((length,), 2), ((length,), 9), ((length,), 22), ((length, 700), 1)]
        if not all(torch.equal(first_row(*case), alone) for case in cases):
            return False
    return True


def free_bytes(device: torch.device) -> float:
    """Memory that may still be taken on this device: on a CPU, this rank's part of it."""
    if device.type == "cuda":
        pool = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + pool
    free = min(psutil.virtual_memory().available, _cgroup_room())
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _cgroup_room(
    root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")
) -> float:
    """What the memory limits of cgroup v2 (of a container, of a batch job) leave; inf without."""
    try:
        own = process.read_text().partition("0::/")[2].splitlines()[:1]
    except OSError:  # not Linux
        return math.inf
    group, room = root.joinpath(*own), math.inf
    for folder in (group, *group.parents):
        try:
            limit, used, stat = (
                (folder / f"memory.{name}").read_text() for name in ("max", "current", "stat")
            )
        except OSError:
            continue
        if limit.strip() != "max":
            cached = int(stat.partition("inactive_file ")[2].split()[0])  # given back when asked
            room = min(room, int(limit) - int(used) + cached)
    return room


class Target:
    """What the engine needs of a target; forward, logits, refresh and the two weights differ."""

    backend: str
    decoder = "torch"  # who computes; others round in other ways
    splits_head = False  # whether `logits` gives what `forward` would, to the bit
    embed_weight: Tensor
    head_weight: Tensor

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: Any, act: torch.dtype) -> None:
        self.shape = TargetShape.from_config(model.config)
        self.device, self.dtype, self.act_dtype = device, dtype, act
        self.cache = SlotCache(self.shape, act, device)

    def slots_for(self, num_rows: int) -> int:
        """How many slots `reserve` takes for this many rows."""
        return num_rows

    def reserve(self, num_slots: int, length: int) -> None:
        self.cache.reserve(num_slots, length)

    def forward(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        parents_BT: Tensor | None = None,
        *,
        first_slot: int = 0,
        logits: bool = True,
    ) -> tuple[Tensor | None, Taps]:
        """One pass over B small trees behind B cursors.

        tokens_BT: int64, node 0 is the root; nothing stands behind a pad, whose id is below 0.
        lengths_B: committed tokens per row; node n is written at position lengths + n.
        parents_BT: as in `Draft`, or None for a chain.
        Returns logits_BTV (fp32 on a CPU, else as computed), or None, and the taps of all nodes;
        what stands at the places of pads is rubbish, natively whatever was in memory.
        A captured forward's taps hold until the next one.
        Raises ValueError when a row would leave the reserved cache.
        """
        raise NotImplementedError

    def logits(self, hidden_BTH: Tensor) -> Tensor:
        """The logits [B, T, V] of tapped hidden states, where the target `splits_head`."""
        raise NotImplementedError

    def refresh(self, named: Named) -> None:
        """New weights from (name, full tensor) pairs under the checkpoint's names, in any order.

        Raises ValueError when a weight is missing or has no place here.
        """
        raise NotImplementedError

    def compact(self, lengths_B: Tensor, nodes_BD: Tensor) -> None:
        self.cache.compact(lengths_B, nodes_BD)

    def copy_slot(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_slot(src, dst, length)

    @property
    def keeps_free_slots(self) -> bool:
        """Whether nothing is written to a slot behind the last row."""
        return True

    @property
    def num_graphs(self) -> int:
        """Captured forwards; a step in which one is added takes far longer than the next."""
        return 0

    @property
    def cache_bytes_per_token(self) -> int:
        return self.cache.bytes_per_token


def full_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of a plain, unsharded module; tied weights once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()
