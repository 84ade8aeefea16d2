"""A target through its own transformers module: any rope decoder with full attention.

`ModuleTarget` keeps a private replica of the module and calls it with a cache object of the
transformers interface and an explicit 4-D mask: `PreTrainedModel` in, the same surface out as
target.py's. Slower than that, and for models that are not written out.

Left out: recurrent layers and sliding windows (refused: their state cannot roll back).
How to try it: `pytest tests/test_target.py -k module`. Shape suffixes: as in `slots.py`; H hidden.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from minitlt.draft import STATIC_ROPE, Taps
from minitlt.slots import Named, SlotCache, Step, Target, full_state, plan_step


class _CacheView:
    """A `SlotCache` with the part of transformers' Cache interface that attention layers call."""

    is_compileable = False

    def __init__(self, cache: SlotCache, step: Step) -> None:
        self.cache, self.step = cache, step
        self.layers: list[Any] = []

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = torch.cat([keys, values], dim=1).transpose(1, 2)  # [B, T, 2K, D]
        self.cache.write(layer_idx, self.step, new.reshape(-1, new.shape[-1]).to(self.cache.dtype))
        return self.step.keys[layer_idx], self.step.values[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        return self.step.read, 0

    def __len__(self) -> int:
        return 0


class ModuleTarget(Target):
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
        weights: Named | None = None,
    ) -> None:
        config: Any = model.config
        refuse_unsupported(config)
        device = torch.device(device) if device else next(model.parameters()).device
        super().__init__(model, dtype, device, dtype)
        model_class: Any = type(model)
        # A copy of the config: the attention chosen below must not reach the trainer's model.
        self.module: Any = model_class(copy.deepcopy(config)).to(self.device).eval()
        for parameter in self.module.parameters():  # buffers, as rotary frequencies, stay wide
            parameter.data = parameter.data.to(dtype)
        self.module.requires_grad_(False)
        self.module.set_attn_implementation("sdpa")
        names = inspect.signature(self.module.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self._seen: dict[int, Tensor] = {}
        self._last: Tensor | None = None
        # Cohere and Granite scale their logits: so is what is tapped, and the head gives them.
        up, down = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling"))
        self._scale = (up or 1.0) / (down or 1.0)
        self._hook()
        self.refresh(full_state(model) if weights is None else weights)
        self._head_gives_logits = self._check_head()

    @torch.no_grad()
    def _check_head(self) -> bool:
        """Whether lm_head(tapped hidden state) are the logits; not if they are soft-capped."""
        ids = torch.arange(8, device=self.device)[None] % self.shape.vocab
        want = self.module(input_ids=ids, use_cache=False).logits
        assert self._last is not None
        got = self.module.get_output_embeddings()(self._last * self._scale)
        gap = (want - got).abs().max()
        limit = 1e-4 if self.dtype.itemsize > 2 else 0.02
        # Not `<=`, so that NaN passes: a rank of FSDP may get its weights only later.
        return not bool(gap > limit * want.abs().max())

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
        """`logits=False` saves nothing here."""
        step = plan_step(tokens_BT, lengths_B, parents_BT, first_slot, self.cache, masked=True)
        assert step.mask_BTS is not None
        out = self.module(
            input_ids=tokens_BT.clamp(min=0),
            attention_mask=step.mask_BTS[:, None],
            position_ids=step.position_BT,
            use_cache=True,
            **{self._cache_name: _CacheView(self.cache, step)},
        )
        assert self._last is not None
        features = torch.cat([self._seen[i] for i in self.shape.tap_layers], -1)
        taps = Taps(features, self._last * self._scale)
        self._seen.clear()
        return (out.logits if logits else None), taps

    @torch.no_grad()
    def refresh(self, named: Named) -> None:
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
    def embed_weight(self) -> Tensor:  # type: ignore[override]
        return self.module.get_input_embeddings().weight

    @property
    def head_weight(self) -> Tensor:  # type: ignore[override]
        if not self._head_gives_logits:
            raise ValueError(
                f"{self.module.config.model_type}: its logits are more than lm_head of the last "
                "hidden state (soft-capped?), so no draft model can learn from it"
            )
        return self.module.get_output_embeddings().weight


def refuse_unsupported(config: Any) -> None:
    """Raises ValueError for models whose cache cannot roll back, or whose rows look at each other,
    saying which part of it."""
    layer_types = getattr(config, "layer_types", None) or []
    kinds = set(layer_types)
    if odd := sorted(kinds - {"full_attention"}):
        raise ValueError(
            f"{config.model_type}: layers of type {', '.join(odd)} keep a state that cannot roll "
            "back after a rejected draft; use a model with full attention in every layer"
        )
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and not layer_types:
        raise ValueError(
            f"{config.model_type}: a sliding window of {window} in every layer cannot roll back "
            "after a rejected draft; use a model with full attention"
        )
    rope = getattr(config, "rope_parameters", None)
    if rope is None:
        raise ValueError(
            f"{config.model_type}: no rotary positions in its config; minitlt needs a rope decoder"
        )
    by_layer_type = [part for part in rope.values() if isinstance(part, dict)]
    for kind in (part.get("rope_type", "default") for part in (rope, *by_layer_type)):
        if kind not in STATIC_ROPE:
            raise ValueError(
                f"{config.model_type}: rope type {kind!r} turns with the longest row of a batch, "
                f"so a row's tokens would depend on its company; possible: {', '.join(STATIC_ROPE)}"
            )
