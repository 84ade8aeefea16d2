"""The policy's weights as the engine's replica needs them: whole, merged, one at a time.

The idea. However the trainer keeps its policy (plain, DDP, FSDP2, ZeRO-3, with LoRA adapters), the
engine decodes with full tensors under the checkpoint's names. `full_parameters` yields them one by
one, so that no rank ever holds a second copy of the model, and with the same collectives on every
rank. The trainer's own tensors are never written to. `weights_fingerprint` says cheaply whether
anything may have moved since the last refresh.

Left out: DoRA and LoRA on embeddings (refused), quantised policies.
How to try it: `pytest tests/test_weights.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from minitlt.config import ConfigError


def full_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, full tensor) of every policy weight, one at a time.

    Every rank must iterate to the end, in the same order: DTensors (FSDP2) and ZeRO-3 shards are
    gathered by a collective each. LoRA deltas are added out of place in fp32, so the base weights
    are never touched. Gradients do not flow.
    """
    layers = _adapted_layers(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name or ".original_module." in name:
            continue
        clean = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        clean = clean.replace(".modules_to_save.default.", ".")
        with _gathered(parameter), torch.no_grad():
            full = parameter.detach()
            if hasattr(full, "full_tensor"):
                full = full.full_tensor()
            layer = layers.get(name.removesuffix(".base_layer.weight"))
            if layer is not None:
                full = _merged(layer, full)
            yield clean, full


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """LoRA layers by the name of their module; empty for a plain model."""
    if not hasattr(model, "peft_config"):
        return {}
    for name, module in model.named_modules():
        for kind in ("lora_magnitude_vector", "lora_embedding_A"):
            if len(getattr(module, kind, None) or ()):
                raise ConfigError(f"{name}: DoRA and LoRA on embeddings are not supported")
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and len(m.lora_A)}


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """W + sum of the active adapters' deltas, in fp32, in a new tensor."""
    total = weight.float()
    for adapter in layer.active_adapters:
        if adapter in layer.lora_A:
            total = total + layer.get_delta_weight(adapter).float()
    return total


def _gathered(parameter: nn.Parameter) -> Any:
    """Context in which a ZeRO-3 parameter is whole; nothing to do for others."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])


def weights_fingerprint(model: nn.Module, global_step: int) -> tuple[Any, ...]:
    """Changes whenever an optimizer step, a reload or another adapter may have moved weights."""
    versions = sum(p._version for p in model.parameters())
    return global_step, versions, getattr(model, "active_adapter", None)
