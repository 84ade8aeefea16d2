"""The policy's weights as the engine's replica needs them: whole, merged, one at a time.

The idea. However the trainer keeps its policy (plain, DDP, FSDP2, ZeRO-3, with LoRA adapters), the
engine decodes with full tensors under the checkpoint's names. `full_parameters` yields them one by
one, so that no rank ever holds a second copy of the model, and with the same collectives on every
rank. The trainer's own tensors are never written to. `weights_fingerprint` says cheaply whether
anything may have moved since the last refresh.

Left out: LoRA's variants, and LoRA on embeddings and tied weights (refused); quantised policies.
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

    Every rank must iterate to the end, in the same order: DTensors (FSDP2) and ZeRO-3 shards, a
    LoRA layer's A and B among them, are gathered by a collective each. LoRA deltas are added out
    of place in fp32, so the base weights are never touched. Gradients do not flow.

    Raises FloatingPointError, on every rank and at the end, if ZeRO-3's weights are not finite:
    nobody sees them anywhere else (`stop.py` looks at all others after every step).
    """
    layers, sums = _adapted_layers(model), []
    for name, parameter in model.named_parameters():
        if "lora_" in name or ".original_module." in name:
            continue
        clean = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        clean = clean.replace(".modules_to_save.default.", ".")
        layer = layers.pop(name.removesuffix(".base_layer.weight"), None)
        deltas = [] if layer is None else _deltas(layer)
        with _gathered([parameter, *(p for _, *pair in deltas for p in pair)]), torch.no_grad():
            full = _whole(parameter)
            for scaling, a, b in deltas:
                delta = scaling * (_whole(b).float() @ _whole(a).float())
                delta = delta.T if layer.fan_in_fan_out else delta
                if delta.shape != full.shape:  # it would be broadcast, or be nothing
                    raise RuntimeError(f"{name} is {tuple(full.shape)} and its LoRA delta is "
                                       f"{tuple(delta.shape)}")  # fmt: skip
                full = full.float() + delta
            if is_zero3(parameter):
                sums.append(full.sum(dtype=torch.float32))  # neither nan nor inf gets lost in it
            yield clean, full
    if layers:
        raise ConfigError(f"{min(layers)}: LoRA on a weight that is tied is not supported")
    if sums and not torch.stack(sums).isfinite().all():
        raise FloatingPointError(
            "the policy's weights are not finite: it has diverged; go on from the last checkpoint "
            "(minitlt train --resume RUN) with a lower learning_rate"
        )


def _adapted_layers(model: nn.Module) -> dict[str, Any]:
    """LoRA layers by the name of their module; empty for a plain model."""
    if not hasattr(model, "peft_config"):
        return {}
    for name, module in model.named_modules():
        biases = any(getattr(module, "lora_bias", {}).values())
        kinds = ("lora_magnitude_vector", "lora_variant", "lora_embedding_A")
        if biases or any(len(getattr(module, kind, None) or ()) for kind in kinds):
            raise ConfigError(f"{name}: DoRA and other variants of LoRA, its bias, and LoRA on "
                              "embeddings are not supported")  # fmt: skip
    return {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and len(m.lora_A)}


def _deltas(layer: Any) -> list[tuple[float, nn.Parameter, nn.Parameter]]:
    """(scaling, A, B) of every active adapter; W + scaling * B @ A is what the layer computes."""
    active = [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]
    return [(layer.scaling[a], layer.lora_A[a].weight, layer.lora_B[a].weight) for a in active]


def _whole(parameter: nn.Parameter) -> Tensor:
    """All of a parameter that may be sharded by FSDP2."""
    tensor: Any = parameter.detach()
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def is_zero3(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


def _gathered(parameters: list[nn.Parameter]) -> Any:
    """Context in which ZeRO-3 parameters are whole; nothing to do for others."""
    if not is_zero3(parameters[0]):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters)


def weights_fingerprint(model: nn.Module, global_step: int) -> tuple[Any, ...]:
    """Changes whenever an optimizer step, a reload or another adapter may have moved weights."""
    versions = sum(p._version for p in model.parameters())
    return global_step, versions, getattr(model, "active_adapter", None)
