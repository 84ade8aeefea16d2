"""The target: a causal language model behind slots with one cursor per row.

What it is. A row of the batch owns a *slot* of the key/value cache. `forward` feeds every row a
small tree of tokens at once (a chain is the plainest tree, one token the plainest chain), writes
their keys and values behind the row's cursor and returns logits and taps. Nothing is committed by
that: `lengths` belong to the caller, so rolling back a rejected draft is not moving the cursor,
and stale entries behind it are masked now and overwritten later. There is no left padding.

Two ways to compute the same logits:
- `LlamaTarget`, written out below for the Llama family (Llama, Mistral without sliding window,
  Qwen2, Qwen3) over fused QKV and gate-up weights. On a CPU the weights are packed once for
  oneDNN. Packed products give a row the same bits whatever other rows stand beside it (for four
  rows or more), and so does grouped attention (for four query rows or more): `_MIN_ROWS` and
  `_MIN_QUERIES` pad up to that. This is why speculative and plain decoding agree bit for bit for
  chains, and not just nearly.
- `ModuleTarget`, any other rope decoder through its own transformers module, with a cache object
  of the transformers interface and an explicit 4-D mask. `PreTrainedModel` in, same surface out.

Weights are a replica, refreshed out of place from (name, full tensor) pairs, so that the trainer's
own module is never touched, merged into or switched to another attention.

Left out: paged memory (slots are plain, lazily touched tensors), sliding windows, recurrent layers
(refused: their state cannot roll back), prefix sharing beyond a group (`copy_slot` shares a
prompt among siblings).

How to try it: `pytest tests/test_target.py`.

Shape suffixes: B rows, T query tokens, N = B*T, S cached positions read, V vocab, H hidden,
F = 3H tapped, G query heads per key/value head, D head dim; K key/value heads.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitlt.draft import MAX_NODES, Taps, ancestor_bits, default_taps, depths
from minitlt.kernels import tree_attention

_FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
# oneDNN takes another path for a single row of some shapes, and streams weights a third slower
# for fewer than four: rows are repeated up to four.
_MIN_ROWS = 4
_MIN_QUERIES = 4  # the CPU attention takes another path for fewer query rows
_READ_STEP = 128  # the cache is read in multiples of this many positions


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


class Target(Protocol):
    """What the engine needs of a target. Both classes below have exactly this surface."""

    shape: TargetShape
    backend: str
    device: torch.device
    dtype: torch.dtype
    cache: SlotCache

    def reserve(self, num_slots: int, length: int) -> None: ...

    def forward(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        parents_BT: Tensor | None = None,
        *,
        first_slot: int = 0,
        logits: bool = True,
    ) -> tuple[Tensor | None, Taps]: ...

    def compact(self, lengths_B: Tensor, nodes_BD: Tensor) -> None: ...

    def copy_slot(self, src: int, dst: int, length: int) -> None: ...

    def refresh(self, named: Iterable[tuple[str, Tensor]]) -> None: ...

    @property
    def cache_bytes_per_token(self) -> int: ...

    @property
    def embed_weight(self) -> Tensor: ...

    @property
    def head_weight(self) -> Tensor: ...


class SlotCache:
    """Keys and values, [layers][slots, length, 2, K, D]; pages are touched only when written.

    Key and value of a token lie side by side so that one indexed copy per layer writes both.
    """

    def __init__(self, shape: TargetShape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.layers: list[Tensor] = []
        self.num_slots = self.length = 0

    def reserve(self, num_slots: int, length: int) -> None:
        """Room for this many rows of this many tokens; what was stored may be dropped."""
        if num_slots <= self.num_slots and length <= self.length:
            return
        self.num_slots = num_slots
        self.length = -(-length // _READ_STEP) * _READ_STEP
        s = self.shape
        self.layers = []  # free the old block before the new one is asked for
        size = (self.num_slots, self.length, 2, s.num_kv_heads, s.head_dim)
        self.layers = [
            torch.zeros(size, dtype=self.dtype, device=self.device) for _ in range(s.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        """What is reserved now."""
        return self.num_slots * self.length * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        """All layers, key and value."""
        s = self.shape
        return 2 * s.num_layers * s.num_kv_heads * s.head_dim * self.dtype.itemsize

    def copy_slot(self, src: int, dst: int, length: int) -> None:
        for layer in self.layers:
            layer[dst, :length] = layer[src, :length]

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
        for layer in self.layers:
            layer[row, dst] = layer[row, src]  # the right side is a copy, so overlaps are safe


@dataclass
class _Step:
    """One forward's geometry, computed once and used by every layer."""

    first_slot: int
    write_N: Tensor  # flat cache rows (slot * length + position) of the new tokens
    position_BT: Tensor
    mask_BTS: Tensor | None  # True = may attend; None when the kernel reads ancestor bits
    bits_BT: Tensor | None
    lengths_B: Tensor
    read: int  # S
    pick_N: Tensor | None = None  # repeats rows up to _MIN_ROWS
    grouped_mask: Tensor | None = None  # mask_BTS for the stacked query heads, [B, 1, G*T.., S]

    def stack_queries(self, group: int) -> None:
        """The mask of `attend`: once per group head, and again until there are enough rows."""
        if self.mask_BTS is None:
            return
        num_rows, num_nodes, read = self.mask_BTS.shape
        group *= -(-_MIN_QUERIES // (group * num_nodes))
        mask = self.mask_BTS[:, None, None].expand(-1, 1, group, -1, -1)
        self.grouped_mask = mask.reshape(num_rows, 1, group * num_nodes, read)


def _plan_step(
    tokens_BT: Tensor,
    lengths_B: Tensor,
    parents_BT: Tensor | None,
    first_slot: int,
    cache: SlotCache,
    masked: bool,
) -> _Step:
    """Positions, write places and who sees whom. `parents_BT` None means a chain."""
    num_rows, num_nodes = tokens_BT.shape
    device = tokens_BT.device
    node_T = torch.arange(num_nodes, device=device)
    if parents_BT is None:
        depth_BT = node_T.expand(num_rows, -1)
        bits_BT = None
    else:
        depth_BT, bits_BT = depths(parents_BT), ancestor_bits(parents_BT)
    longest = int(lengths_B.max()) + num_nodes
    if longest > cache.length:
        raise ValueError(f"a row needs {longest} cache positions, only {cache.length} are reserved")
    read = min(-(-longest // _READ_STEP) * _READ_STEP, cache.length)
    slot_B1 = torch.arange(first_slot, first_slot + num_rows, device=device)[:, None]
    write_N = (slot_B1 * cache.length + lengths_B[:, None] + node_T).reshape(-1)
    mask_BTS = None
    if masked:
        mask_BTS = _attention_mask(lengths_B, bits_BT, num_nodes, read)
    elif bits_BT is None:
        bits_BT = ((2 << node_T) - 1).expand(num_rows, -1)
    return _Step(
        first_slot, write_N, lengths_B[:, None] + depth_BT, mask_BTS, bits_BT, lengths_B, read
    )


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


class Linear:
    """y = x W^T + b over a weight that is replaced, never trained.

    On a CPU the weight is packed once for oneDNN (fp32 or bf16); activations stay fp32. Elsewhere
    it is a plain matrix product in the weight's dtype.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.packed = device.type == "cpu" and can_pack(dtype)
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def load(self, weight: Tensor, bias: Tensor | None) -> None:
        weight = weight.detach().to(self.device, self.dtype)
        if self.packed:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        elif self.weight is None:
            self.weight = weight.clone()
        else:
            self.weight.copy_(weight)  # captured graphs keep the address
        self.bias = None if bias is None else bias.detach().to(self.device, self.dtype).clone()

    def __call__(self, x_NH: Tensor) -> Tensor:
        assert self.weight is not None, "load() the weight first"
        x_NH = x_NH.to(self.dtype)
        if self.packed:
            y = torch.ops.mkldnn._linear_pointwise(x_NH, self.weight, self.bias, "none", [], "")
        else:
            y = F.linear(x_NH, self.weight, self.bias)
        return y if self.device.type != "cpu" or y.dtype == torch.float64 else y.float()


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch can pack a weight of this dtype for oneDNN on this processor."""
    if dtype == torch.float32:
        return torch.backends.mkldnn.is_available()
    if dtype == torch.bfloat16:
        return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computed in fp32 (or fp64), as transformers does, whatever the dtype of x."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return weight * (wide * scale).to(x.dtype)


class _Layer:
    """The weights of one decoder layer, fused where the products share an input."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.qkv = Linear(dtype, device)
        self.out = Linear(dtype, device)
        self.gate_up = Linear(dtype, device)
        self.down = Linear(dtype, device)
        self.norms: dict[str, Tensor] = {}


class LlamaTarget:
    """The Llama family written out: 4 matrix products a layer, one cache write a layer.

    `model` gives config, rotary frequencies and the first weights; it is not kept.
    """

    backend = "fused"

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        config: Any = model.config
        self.shape = TargetShape.from_config(config)
        self.device = torch.device(device) if device else next(model.parameters()).device
        self.dtype = dtype
        # On a CPU only the weights are narrow: attention, norms and the residual stream cost
        # little there and stay wide, which keeps a row's bits independent of its company.
        narrow = self.device.type != "cpu" or dtype == torch.float64
        self.act_dtype = dtype if narrow else torch.float32
        self.masks_short = self.device.type == "cpu"
        self.eps = float(config.rms_norm_eps)
        self.tied = bool(config.tie_word_embeddings)
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        self._inv_freq = rotary.inv_freq.detach().to(self.device, torch.float32)
        self._rope_scale = float(rotary.attention_scaling)
        self._cos = self._sin = torch.empty(0)
        self.layers = [_Layer(dtype, self.device) for _ in range(self.shape.num_layers)]
        self.head = Linear(dtype, self.device)
        self._dense: dict[str, Tensor] = {}
        with torch.device("meta"):  # adapters may have been put into `model` itself
            self._names = [name for name, _ in type(model)(config).named_parameters()]
        self._biased = {
            group
            for group, modules in _FUSED.items()
            for name in self._names
            if name.endswith(tuple(f"{m}.bias" for m in modules))
        }
        self.cache = SlotCache(self.shape, self.act_dtype, self.device)
        self.refresh(full_state(model) if weights is None else weights)

    @staticmethod
    def supports(config: Any) -> bool:
        """Whether the written-out path computes exactly what this config's module does."""
        rope = getattr(config, "rope_parameters", None) or {}
        window = getattr(config, "sliding_window", None)
        if getattr(config, "use_sliding_window", window is not None) and window:
            return False
        return (
            config.model_type in _FUSED_TYPES
            and getattr(config, "hidden_act", "silu") == "silu"
            and rope.get("rope_type", "default") in _STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )

    def reserve(self, num_slots: int, length: int) -> None:
        self.cache.reserve(num_slots, length)
        if self._cos.shape[0] < self.cache.length:
            position = torch.arange(self.cache.length, device=self.device, dtype=torch.float32)
            angle = torch.outer(position, self._inv_freq).repeat(1, 2)
            self._cos = (angle.cos() * self._rope_scale).to(self.act_dtype)
            self._sin = (angle.sin() * self._rope_scale).to(self.act_dtype)

    @torch.no_grad()
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

        tokens_BT: int64, node 0 is the root, pads may be anything (negative ids read row 0).
        lengths_B: committed tokens per row; node n is written at position lengths + n.
        parents_BT: as in `Draft`, or None for a chain.
        Returns fp32 (fp64 stays) logits_BTV, or None, and the taps of all nodes.
        Raises ValueError when a row would leave the reserved cache.
        """
        # Elsewhere a kernel reads ancestor bits; a prefill chunk is too long for those.
        masked = self.masks_short or tokens_BT.shape[1] > MAX_NODES
        step = _plan_step(tokens_BT, lengths_B, parents_BT, first_slot, self.cache, masked)
        step.stack_queries(self.shape.num_heads // self.shape.num_kv_heads)
        num_rows, num_nodes = tokens_BT.shape
        h_NH = self._dense["embed"][tokens_BT.clamp(min=0).reshape(-1)].to(self.act_dtype)
        position_N = step.position_BT.reshape(-1)
        num = num_rows * num_nodes
        step.pick_N = torch.arange(_MIN_ROWS, device=self.device) % num if num < _MIN_ROWS else None
        if step.pick_N is not None:
            h_NH, position_N = h_NH[step.pick_N], position_N[step.pick_N]
            step.write_N = step.write_N[step.pick_N]
        rope = self._cos[position_N][:, None], self._sin[position_N][:, None]
        taps = []
        for i, layer in enumerate(self.layers):
            if i in self.shape.tap_layers:
                taps.append((i, h_NH))
            h_NH = h_NH + self._attention(i, layer, h_NH, rope, step, (num_rows, num_nodes))
            h_NH = h_NH + self._mlp(layer, h_NH)
        last_NH = _rms_norm(h_NH, self._dense["norm"], self.eps)
        seen = dict(taps)
        features = torch.cat([seen[i] for i in self.shape.tap_layers], dim=-1)
        result = Taps(
            features[:num].view(num_rows, num_nodes, -1),
            last_NH[:num].view(num_rows, num_nodes, -1),
        )
        if not logits:
            return None, result
        out = self.head(last_NH)[:num]
        wide = out if out.dtype == torch.float64 else out.float()
        return wide.view(num_rows, num_nodes, -1), result

    def _attention(
        self,
        index: int,
        layer: _Layer,
        h_NH: Tensor,
        rope: tuple[Tensor, Tensor],
        step: _Step,
        size: tuple[int, int],
    ) -> Tensor:
        s, norms = self.shape, layer.norms
        qkv = layer.qkv(_rms_norm(h_NH, norms["input_layernorm"], self.eps))
        qkv = qkv.to(self.act_dtype).view(h_NH.shape[0], -1, s.head_dim)
        num_rotated = s.num_heads + s.num_kv_heads
        qk, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if "self_attn.q_norm" in norms:  # Qwen3 normalises queries and keys per head
            qk = torch.cat(
                [
                    _rms_norm(qk[:, : s.num_heads], norms["self_attn.q_norm"], self.eps),
                    _rms_norm(qk[:, s.num_heads :], norms["self_attn.k_norm"], self.eps),
                ],
                dim=1,
            )
        cos, sin = rope
        half = s.head_dim // 2
        turned = torch.cat([-qk[..., half:], qk[..., :half]], dim=-1)
        qk = qk * cos + turned * sin
        store = self.cache.layers[index]
        new = torch.stack([qk[:, s.num_heads :], value], dim=1)
        store.view(-1, *store.shape[2:]).index_copy_(0, step.write_N, new)
        out = attend(qk[: size[0] * size[1], : s.num_heads], store, step, size)
        if step.pick_N is not None:
            out = out[step.pick_N]
        return layer.out(out).to(self.act_dtype)

    def _mlp(self, layer: _Layer, h_NH: Tensor) -> Tensor:
        x = _rms_norm(h_NH, layer.norms["post_attention_layernorm"], self.eps)
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(F.silu(gate).mul_(up)).to(self.act_dtype)

    def compact(self, lengths_B: Tensor, nodes_BD: Tensor) -> None:
        self.cache.compact(lengths_B, nodes_BD)

    def copy_slot(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_slot(src, dst, length)

    @property
    def cache_bytes_per_token(self) -> int:
        return self.cache.bytes_per_token

    @torch.no_grad()
    def refresh(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """New weights from (name, full tensor) pairs under the checkpoint's names.

        Parts of a fused weight are held until all have come, so any order will do.
        Raises ValueError when a weight is missing or has no place here.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        missing = set(self._names)
        for name, tensor in named:
            missing.discard(name)
            short = name.removeprefix("model.")
            if short == "embed_tokens.weight":
                self._store("embed", tensor)
            elif short == "norm.weight":
                self._store("norm", tensor)
            elif short == "lm_head.weight":
                if not self.tied:
                    self._store("head", tensor)
            elif short.startswith("layers."):
                self._take(short, tensor, waiting)
            else:
                raise ValueError(f"weight {name!r} has no place in a {self.backend} target")
        if missing:
            raise ValueError(f"the weights given lack {min(missing)!r} ({len(missing)} in all)")
        self.head.load(self.head_weight, None)

    def _store(self, key: str, tensor: Tensor) -> None:
        if key in self._dense:
            self._dense[key].copy_(tensor)  # drafters hold these by reference
        else:
            self._dense[key] = tensor.detach().to(self.device, self.act_dtype, copy=True)

    def _take(self, short: str, tensor: Tensor, waiting: dict[str, dict[str, Tensor]]) -> None:
        """Takes one tensor of a decoder layer; loads a fused matrix once its parts are there."""
        _, index, rest = short.split(".", 2)
        layer = self.layers[int(index)]
        if rest.endswith(("layernorm.weight", "_norm.weight")):
            norm = tensor.detach().to(self.device, self.act_dtype, copy=True)
            layer.norms[rest.removesuffix(".weight")] = norm
            return
        group = next((g for g, names in _FUSED.items() if rest.rsplit(".", 1)[0] in names), None)
        if group is None:
            raise ValueError(f"weight {short!r} has no place in a {self.backend} target")
        parts = waiting.setdefault(f"{index}.{group}", {})
        parts[rest] = tensor.detach()
        names = _FUSED[group]
        if len(parts) < len(names) * (2 if group in self._biased else 1):
            return
        bias = torch.cat([parts[f"{n}.bias"] for n in names]) if group in self._biased else None
        getattr(layer, group).load(torch.cat([parts[f"{n}.weight"] for n in names]), bias)
        del waiting[f"{index}.{group}"]

    @property
    def embed_weight(self) -> Tensor:
        return self._dense["embed"]

    @property
    def head_weight(self) -> Tensor:
        return self._dense["embed" if self.tied else "head"]


_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


def attend(q_NHD: Tensor, store: Tensor, step: _Step, size: tuple[int, int]) -> Tensor:
    """Grouped-query attention of T nodes per row over its slot, [N, heads * D].

    The G query heads of a key/value head are stacked as extra query rows, so keys and values are
    read in place and never repeated.
    """
    num_rows, num_nodes = size
    num_kv, head_dim = store.shape[-2:]
    group = q_NHD.shape[1] // num_kv
    rows = slice(step.first_slot, step.first_slot + num_rows)
    k, v = (store[rows, : step.read, i].transpose(1, 2) for i in (0, 1))  # [B, K, S, D]
    if step.grouped_mask is None:
        assert step.bits_BT is not None
        q = q_NHD.view(num_rows, num_nodes, -1, head_dim).transpose(1, 2)
        out = tree_attention(q, k, v, step.lengths_B, step.bits_BT, head_dim**-0.5)
        return out.transpose(1, 2).reshape(num_rows * num_nodes, -1)
    q = q_NHD.view(num_rows, num_nodes, num_kv, group, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(num_rows, num_kv, group * num_nodes, head_dim)
    num_queries, padded = q.shape[2], step.grouped_mask.shape[2]
    if num_queries < padded:
        q = torch.cat([q] * (padded // num_queries), dim=2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=step.grouped_mask)[:, :, :num_queries]
    out = out.view(num_rows, num_kv, group, num_nodes, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_rows * num_nodes, -1)


class _CacheView:
    """A `SlotCache` with the part of transformers' Cache interface that attention layers call."""

    is_compileable = False

    def __init__(self, cache: SlotCache, step: _Step) -> None:
        self.cache, self.step = cache, step
        self.layers: list[Any] = []

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        store = self.cache.layers[layer_idx]
        new = torch.stack([keys.transpose(1, 2), values.transpose(1, 2)], dim=2)
        flat = new.reshape(-1, *store.shape[2:]).to(store.dtype)
        store.view(-1, *store.shape[2:]).index_copy_(0, self.step.write_N, flat)
        rows = slice(self.step.first_slot, self.step.first_slot + keys.shape[0])
        view = store[rows, : self.step.read]
        return view[:, :, 0].transpose(1, 2), view[:, :, 1].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.step.read, 0

    def __len__(self) -> int:
        return 0


class ModuleTarget:
    """Any rope decoder through its own transformers module, kept as a private replica.

    Raises ValueError for models whose cache cannot roll back or whose layers are not standard.
    """

    backend = "module"

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        weights: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        config: Any = model.config
        refuse_unsupported(config)
        self.shape = TargetShape.from_config(config)
        self.device = torch.device(device) if device else next(model.parameters()).device
        self.dtype = dtype
        model_class: Any = type(model)
        # A copy of the config: the attention chosen below must not reach the trainer's model.
        self.module: Any = model_class(copy.deepcopy(config)).to(self.device).eval()
        for parameter in self.module.parameters():  # buffers, as rotary frequencies, stay wide
            parameter.data = parameter.data.to(dtype)
        self.module.requires_grad_(False)
        self.module.set_attn_implementation("sdpa")
        names = inspect.signature(self.module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.cache = SlotCache(self.shape, dtype, self.device)
        self._seen: dict[int, Tensor] = {}
        self._last: Tensor | None = None
        self._hook()
        self.refresh(full_state(model) if weights is None else weights)

    def _hook(self) -> None:
        layers = self.module.get_decoder().layers
        for index in set(self.shape.tap_layers):
            layers[index].register_forward_pre_hook(
                lambda _m, args, kwargs, i=index: self._seen.__setitem__(
                    i, args[0] if args else kwargs["hidden_states"]
                ),
                with_kwargs=True,
            )
        self.module.get_output_embeddings().register_forward_pre_hook(
            lambda _m, args: setattr(self, "_last", args[0])
        )

    def reserve(self, num_slots: int, length: int) -> None:
        self.cache.reserve(num_slots, length)

    @torch.no_grad()
    def forward(
        self,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        parents_BT: Tensor | None = None,
        *,
        first_slot: int = 0,
        logits: bool = True,
    ) -> tuple[Tensor | None, Taps]:
        """As `LlamaTarget.forward`; `logits=False` saves nothing here."""
        step = _plan_step(tokens_BT, lengths_B, parents_BT, first_slot, self.cache, True)
        assert step.mask_BTS is not None
        out = self.module(
            input_ids=tokens_BT.clamp(min=0),
            attention_mask=step.mask_BTS[:, None],
            position_ids=step.position_BT,
            use_cache=True,
            **{self._cache_name: _CacheView(self.cache, step)},
        )
        assert self._last is not None
        taps = Taps(torch.cat([self._seen[i] for i in self.shape.tap_layers], -1), self._last)
        self._seen.clear()
        wide = out.logits if out.logits.dtype == torch.float64 else out.logits.float()
        return (wide if logits else None), taps

    def compact(self, lengths_B: Tensor, nodes_BD: Tensor) -> None:
        self.cache.compact(lengths_B, nodes_BD)

    def copy_slot(self, src: int, dst: int, length: int) -> None:
        self.cache.copy_slot(src, dst, length)

    @property
    def cache_bytes_per_token(self) -> int:
        return self.cache.bytes_per_token

    @torch.no_grad()
    def refresh(self, named: Iterable[tuple[str, Tensor]]) -> None:
        own = dict(self.module.named_parameters())
        missing = set(own)
        for name, tensor in named:
            if name not in own:
                raise ValueError(f"weight {name!r} has no place in {type(self.module).__name__}")
            own[name].copy_(tensor)
            missing.discard(name)
        if missing:
            raise ValueError(f"the weights given lack {min(missing)!r} ({len(missing)} in all)")

    @property
    def embed_weight(self) -> Tensor:
        return self.module.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:
        return self.module.get_output_embeddings().weight


def full_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every parameter of a plain, unsharded module; tied weights once."""
    for name, parameter in model.named_parameters():
        yield name, parameter.detach()


def has_layer_types(config: Any) -> bool:
    return bool(getattr(config, "layer_types", None))


def refuse_unsupported(config: Any) -> None:
    """Raises ValueError for models whose cache cannot roll back, saying which part of it."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if odd := sorted(kinds - {"full_attention"}):
        raise ValueError(
            f"{config.model_type}: layers of type {', '.join(odd)} keep a state that cannot roll "
            "back after a rejected draft; use a model with full attention in every layer"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and not has_layer_types(config):
        raise ValueError(
            f"{config.model_type}: a sliding window of {window} in every layer cannot roll back "
            "after a rejected draft; use a model with full attention"
        )
    if getattr(config, "rope_parameters", None) is None:
        raise ValueError(
            f"{config.model_type}: no rotary positions in its config; minitlt needs a rope decoder"
        )


def make_target(
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    backend: str = "auto",
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> LlamaTarget | ModuleTarget:
    """The written-out path where it is exact for this config, else the transformers module.

    weights: (checkpoint name, full tensor) pairs; None takes the model's own.
    backend: auto | fused | module. Raises ValueError when `fused` is asked for and not possible.
    """
    config: Any = model.config
    refuse_unsupported(config)
    fused = LlamaTarget.supports(config)
    if backend == "fused" and not fused:
        raise ValueError(f"{config.model_type} has no fused path; use backend 'module'")
    if backend != "module" and fused:
        return LlamaTarget(model, dtype=dtype, device=device, weights=weights)
    return ModuleTarget(model, dtype=dtype, device=device, weights=weights)
