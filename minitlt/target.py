"""The target: a causal language model behind slots (`slots.py`) with one cursor per row.

`forward` feeds every row a small tree of tokens and returns logits and taps; nothing is committed
by it. Two ways to compute the same logits:
- `LlamaTarget`, for the Llama family (Llama, Mistral without sliding window, Qwen2, Qwen3) over
  fused weights. On a CPU with a C compiler, in fp32 or bf16, native code runs all of it: every node
  of a tree decodes to the very bits of plain decoding. Else it is what is written out below. On a
  CPU the weights are then packed for oneDNN, whose fp32 products give a row the same bits whatever
  other rows stand beside it (on some processors for four rows or more: `linear.fewest_rows` looks),
  and so does grouped attention in blocks of the right sizes (`slots.reach`): both are padded up to
  that. So there chains in fp32 have the bits of plain decoding; in trees and bf16 the law holds.
- `ModuleTarget` (module_target.py), any other rope decoder through its own transformers module.

Weights are a replica, refreshed out of place from (name, full tensor) pairs, so that the trainer's
own module is never touched, merged into or switched to another attention. On a GPU they are copied
into place, because captured forwards (`graphs.py`) keep their addresses.

Rotary pairs stand side by side here: rows of the query and key weights are reordered once
(`_pair_rows`), so that turning a head is one complex product. Scores do not change by it.

Left out: recurrent layers (refused: their state cannot roll back), tensor parallelism.
How to try it: `pytest tests/test_target.py`. Shape suffixes: as in `slots.py`; V vocab, H hidden,
F = 3H tapped.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minitlt import native
from minitlt.draft import MAX_NODES, STATIC_ROPE, Taps
from minitlt.graphs import StepGraphs, row_bucket
from minitlt.linear import Linear, Residual, fewest_rows, norm_factor, put
from minitlt.module_target import ModuleTarget, refuse_unsupported
from minitlt.slots import Named, Step, Target, attend, attention_keeps_bits, full_state, plan_step

logger = logging.getLogger(__name__)
_FUSED_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def _pair_rows(x: Tensor, head_dim: int) -> Tensor:
    """Rows (or entries) i and i + D/2 of every head side by side."""
    return x.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(x.shape)


def _rotate_(x_NHD: Tensor, turn_N1C: Tensor) -> None:
    """Turns the pairs of every head by their angles, in place: one complex product."""
    narrow = x_NHD.dtype.itemsize < 4
    pairs = (x_NHD.float() if narrow else x_NHD).view(turn_N1C.dtype)
    if narrow:
        x_NHD.copy_(torch.view_as_real(pairs * turn_N1C).flatten(-2))
    else:
        pairs.mul_(turn_N1C)


# Weights whose products share an input are one matrix. Gate and up stay apart where a product can
# multiply its result at once.
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = {"gate_up": ("mlp.gate_proj", "mlp.up_proj")}
_GATE_AND_UP = {"gate": ("mlp.gate_proj",), "up": ("mlp.up_proj",)}
_ROTATED = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.q_norm", "self_attn.k_norm")
_NATIVE_NORMS = {
    "input_layernorm": "norm_in",
    "post_attention_layernorm": "norm_mlp",
    "self_attn.q_norm": "norm_q",
    "self_attn.k_norm": "norm_k",
}
_STREAM_NORMS = ("input_layernorm", "post_attention_layernorm", "norm")
_DENSE = {"embed_tokens.weight": "embed", "norm.weight": "norm", "lm_head.weight": "head"}


class LlamaTarget(Target):
    """The Llama family: in C where `native` runs, else four or five products and one cache write
    a layer, written out.

    `model` gives config, rotary frequencies and the first weights; it is not kept.
    """

    backend = "fused"
    splits_head = True

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        weights: Named | None = None,
    ) -> None:
        config: Any = model.config
        device = torch.device(device) if device else next(model.parameters()).device
        # On a CPU only the weights are narrow: attention, norms and the residual stream cost
        # little there and stay wide, which keeps a row's bits independent of its company.
        narrow = device.type != "cpu" or dtype == torch.float64
        super().__init__(model, dtype, device, dtype if narrow else torch.float32)
        self.masks_short = device.type == "cpu"
        self.eps = float(config.rms_norm_eps)
        self.native = native.runs(dtype, device)
        self._norm_factor = 1.0 if self.native else norm_factor(self.shape.hidden, device)
        self._decoder: native.Decoder | None = None
        self.version = 0  # of the weights that native code reads
        self.tied = bool(config.tie_word_embeddings)
        rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
        self._inv_freq = rotary.inv_freq.detach().to(device, torch.float32)
        self._rope_scale = float(rotary.attention_scaling)
        self._turn = torch.empty(0)
        with torch.device("meta"):  # adapters may have been put into `model` itself
            self._names = {name for name, _ in type(model)(config).named_parameters()}
        self.head = Linear(dtype, device)
        if self.head.packs:
            self.decoder = native.name() if self.native else "packed"
        self._parts = {"qkv": _QKV, "out": ("self_attn.o_proj",), "down": ("mlp.down_proj",)}
        self._parts |= _GATE_AND_UP if self.head.fuses or self.native else _GATE_UP
        num = self.shape.num_layers
        self.linears = [{name: Linear(dtype, device) for name in self._parts} for _ in range(num)]
        self.norms: list[dict[str, Tensor]] = [{} for _ in range(num)]
        self._dense: dict[str, Tensor] = {}
        self._tried = False
        self._graphs = StepGraphs(self._captured) if device.type == "cuda" else None
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
            and rope.get("rope_type", "default") in STATIC_ROPE
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )

    def slots_for(self, num_rows: int) -> int:
        # The slots behind the last row are for the padding rows of captured graphs.
        return num_rows if self._graphs is None else row_bucket(num_rows)

    def reserve(self, num_slots: int, length: int) -> None:
        num_slots = self.slots_for(num_slots)
        moves = num_slots > self.cache.num_slots or length > self.cache.length
        if self._graphs is not None and moves:
            self._graphs.clear()  # before the new cache is asked for: their memory is free then
        super().reserve(num_slots, length)
        if self._turn.shape[0] < self.cache.length:
            position = torch.arange(self.cache.length, device=self.device, dtype=torch.float32)
            angle = torch.outer(position, self._inv_freq)
            turn = torch.complex(angle.cos(), angle.sin()) * self._rope_scale
            self._turn = turn.to(torch.complex128) if self.dtype == torch.float64 else turn

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
        num_nodes = tokens_BT.shape[1]
        if self._graphs is not None and logits and first_slot == 0 and num_nodes <= MAX_NODES:
            features, hidden = self._graphs(tokens_BT, lengths_B, parents_BT)
            # Outside of the graph: every graph keeps its results, and logits are the largest.
            return self.logits(hidden), Taps(features, hidden)
        if self._decoder is not None:
            place = self.place(first_slot)
            *taps, scores = self._decoder(tokens_BT, lengths_B, parents_BT, *place, logits)
            return scores, Taps(*taps)
        # Elsewhere a kernel reads ancestor bits; a prefill chunk is too long for those.
        masked = self.masks_short or num_nodes > MAX_NODES
        step = plan_step(tokens_BT, lengths_B, parents_BT, first_slot, self.cache, masked=masked)
        return self._run(tokens_BT, step, logits)

    def _captured(
        self, tokens_BT: Tensor, lengths_B: Tensor, parents_BT: Tensor
    ) -> tuple[Tensor, ...]:
        """What a graph records: no look at the host, all of the cache in reach."""
        plan = (tokens_BT, lengths_B, parents_BT, 0, self.cache)
        _, taps = self._run(tokens_BT, plan_step(*plan, masked=False, whole=True), False)
        return taps.features_BNF, taps.hidden_BNH

    def _run(self, tokens_BT: Tensor, step: Step, logits: bool) -> tuple[Tensor | None, Taps]:
        shape, size = self.shape, (tokens_BT.shape[0], tokens_BT.shape[1])
        step.stack_queries(shape, self.act_dtype)
        token_N, position_N = tokens_BT.clamp(min=0).reshape(-1), step.position_BT.reshape(-1)
        stream = Residual(self._dense["embed"][token_N], self.eps)
        turn_N1C = self._turn[position_N][:, None]
        taps = {}
        for i in range(shape.num_layers):
            if i in shape.tap_layers:
                taps[i] = stream.h_NH.clone()
            x_NH = stream.normed(self.norms[i]["input_layernorm"])
            stream.h_NH += self._attention(i, x_NH, turn_N1C, step, size)
            x_NH = stream.normed(self.norms[i]["post_attention_layernorm"])
            stream.h_NH += self._mlp(i, x_NH)
        last_NH = stream.normed(self._dense["norm"])
        features = torch.cat([taps[i] for i in shape.tap_layers], dim=-1)
        result = Taps(features.view(*size, -1), last_NH.view(*size, -1))
        return (self.logits(result.hidden_BNH) if logits else None), result

    @torch.no_grad()
    def logits(self, hidden_BTH: Tensor) -> Tensor:
        return self.head(hidden_BTH.flatten(0, 1)).unflatten(0, hidden_BTH.shape[:2])

    def _attention(
        self, index: int, x_NH: Tensor, turn_N1C: Tensor, step: Step, size: tuple[int, int]
    ) -> Tensor:
        s, norms, linears = self.shape, self.norms[index], self.linears[index]
        qkv = linears["qkv"](x_NH).view(len(x_NH), -1, s.head_dim)
        q = qkv[:, : s.num_heads]
        if "self_attn.q_norm" in norms:  # Qwen3 normalises queries and keys per head
            k = qkv[:, s.num_heads : -s.num_kv_heads]
            q.copy_(F.rms_norm(q, (s.head_dim,), norms["self_attn.q_norm"], self.eps))
            k.copy_(F.rms_norm(k, (s.head_dim,), norms["self_attn.k_norm"], self.eps))
        _rotate_(qkv[:, : -s.num_kv_heads], turn_N1C)
        self.cache.write(index, step, qkv[:, s.num_heads :].reshape(-1, s.head_dim))
        return linears["out"](attend(q, step.keys[index], step.values[index], step, size))

    def _mlp(self, index: int, x_NH: Tensor) -> Tensor:
        linears = self.linears[index]
        if "up" in linears:
            x_NI = linears["up"].fused(x_NH, "mul", linears["gate"].fused(x_NH, "swish"))
        else:
            gate_NI, up_NI = linears["gate_up"](x_NH).chunk(2, dim=-1)
            x_NI = F.silu(gate_NI).mul_(up_NI)
        return linears["down"](x_NI)

    @torch.no_grad()
    def refresh(self, named: Named) -> None:
        waiting: dict[str, Tensor] = {}
        missing = set(self._names)
        for name, tensor in named:
            missing.discard(name)
            short = name.removeprefix("model.")
            if short.startswith("layers."):
                self._take(name, tensor.detach(), waiting)
            elif short not in _DENSE:
                raise ValueError(f"weight {name!r} has no place in a {self.backend} target")
            elif short != "lm_head.weight" or not self.tied:
                self._store(self._dense, _DENSE[short], tensor)
        if missing:
            raise ValueError(f"the weights given lack {min(missing)!r} ({len(missing)} in all)")
        if self.native or self.head.packed or self.act_dtype != self.dtype:
            self.head.load(self.head_weight)
        else:
            self.head.weight = self.head_weight  # one copy; if tied, the embedding's
        if self.native:
            self._decoder = self._decoder or self._make_decoder()
            self.version += 1
        elif self.device.type == "cpu" and not self._tried:
            self._try_bits()

    @property
    def num_weights(self) -> int:
        """Of all products."""
        products = [self.head, *(linear for layer in self.linears for linear in layer.values())]
        return sum(linear.num_weights for linear in products)

    @property
    def native_decoder(self) -> native.Decoder:
        assert self._decoder is not None, "only where `native` is true"
        return self._decoder

    def place(self, first_slot: int) -> tuple[Tensor, int, Tensor]:
        """Where a native forward of rows from this slot on reads and writes."""
        return self.cache.whole, first_slot, self._turn

    def _make_decoder(self) -> native.Decoder:
        shape, head = self.shape, self.head.panels
        assert head is not None, "native says that this target is"
        layers: list[dict[str, Any]] = [
            {name: linear.panels for name, linear in linears.items()}
            | {_NATIVE_NORMS[name]: norm for name, norm in norms.items()}
            for linears, norms in zip(self.linears, self.norms, strict=True)
        ]
        return native.Decoder(
            layers,
            self._dense["embed"],
            self._dense["norm"],
            head,
            heads=(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            taps=shape.tap_layers,
            eps=self.eps,
        )

    def _try_bits(self) -> None:
        """Whether a row's bits depend on its company, on this processor and at these sizes."""
        self._tried, self.head.fewest = True, fewest_rows(self.head)
        fewest = {name: fewest_rows(linear) for name, linear in self.linears[0].items()}
        for name, linear in (pair for layer in self.linears for pair in layer.items()):
            linear.fewest = fewest[name]
        if not attention_keeps_bits(self.shape, self.act_dtype):
            logger.warning(
                "attention rounds a row in another way beside others on this processor: "
                "speculation may change a token where two nearly tie (the law stays)"
            )

    def _store(self, place: dict[str, Tensor], key: str, tensor: Tensor) -> None:
        """In place: drafters hold embedding and head by reference."""
        tensor = tensor.detach().to(self.device, self.act_dtype)
        factor = self._norm_factor if key in _STREAM_NORMS else 1.0
        place[key] = put(place.get(key), tensor * factor if factor != 1.0 else tensor)

    def _take(self, name: str, tensor: Tensor, waiting: dict[str, Tensor]) -> None:
        """Takes one tensor of a decoder layer; loads a fused matrix once its parts are there."""
        start, rest = name.split("layers.")
        index, rest = rest.split(".", 1)
        prefix, module = f"{start}layers.{index}.", rest.rsplit(".", 1)[0]
        if module in _ROTATED:
            tensor = _pair_rows(tensor, self.shape.head_dim)
        if module.endswith("norm"):
            self._store(self.norms[int(index)], module, tensor)
            return
        group = next((g for g, modules in self._parts.items() if module in modules), "")
        if name not in self._names or not group:
            raise ValueError(f"weight {name!r} has no place in a {self.backend} target")
        waiting[name] = tensor
        parts = {
            kind: [f"{prefix}{m}.{kind}" for m in self._parts[group]] for kind in ("weight", "bias")
        }
        parts = {kind: names for kind, names in parts.items() if names[0] in self._names}
        if all(n in waiting for names in parts.values() for n in names):
            whole = {k: torch.cat([waiting.pop(n) for n in names]) for k, names in parts.items()}
            self.linears[int(index)][group].load(**whole)

    @property
    def keeps_free_slots(self) -> bool:
        return self._graphs is None  # padding rows of captured graphs write there

    @property
    def num_graphs(self) -> int:
        return len(self._graphs or ())

    @property
    def embed_weight(self) -> Tensor:  # type: ignore[override]
        return self._dense["embed"]

    @property
    def head_weight(self) -> Tensor:  # type: ignore[override]
        return self._dense["embed" if self.tied else "head"]


def make_target(
    model: nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    backend: str = "auto",
    weights: Named | None = None,
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
    chosen = LlamaTarget if backend != "module" and fused else ModuleTarget
    target = chosen(model, dtype=dtype, device=device, weights=weights)
    how = chosen.backend, dtype, target.decoder
    logger.info("target: %s runs %s, in %s (%s)", config.model_type, *how)
    return target
