"""A trained drafter for other engines, and their drafters for us.

One weights file serves everybody (`layers.0.*`, fc, norm, lm_head, and d2t / t2d only when the
draft vocabulary is reduced); what differs is config.json:

- sglang, vllm: architecture LlamaForCausalLMEagle3, the layer's sizes at the top level;
- specforge: as sglang, with the layer called `midlayer`, to be trained on there;
- speculators: the same facts nested under `transformer_layer_config`, the proposal method and the
  verifier beside them, and no top-level model_type (vLLM tells the two formats apart by that);
- native: our own file, see `save_drafter`.

Two traps are worth a sentence. `d2t` holds offsets (target id minus draft id), not ids. The tapped
layers have one key with two meanings (SGLang: outputs of layers, vLLM: inputs), so the key is left
out for EAGLE-3's default layers and written per engine otherwise; read, both spellings of the
default are the default.

Left out: sharded and pickled files, EAGLE-1 heads, heads with a norm per tap or post-norm
recurrence (refused by name).

How to run: `pytest tests/test_export.py`.

Shape suffixes: V draft vocabulary, W target vocabulary, N pairs, F = 3H taps.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from minitlt.common import reading, write_atomically
from minitlt.eagle3 import (
    FILE,
    Eagle3Config,
    Eagle3Drafter,
    Pack,
    default_taps,
    llama_config,
    load_drafter,
    save_drafter,
)

logger = logging.getLogger(__name__)

LAYOUTS = ("sglang", "vllm", "specforge", "speculators", "native")
_IDS_KEY = "eagle_aux_hidden_state_layer_ids"
_REFUSED = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")


def export_drafter(
    drafter: Eagle3Drafter,
    folder: str | Path,
    layout: str = "sglang",
    *,
    target: str = "",
    target_architecture: str = "LlamaForCausalLM",
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Writes `folder`/model.safetensors and config.json for an engine; returns the folder.

    target: name or path of the model it drafts for (speculators writes it down and needs it).
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r}; choose {', '.join(LAYOUTS)}")
    if layout == "speculators" and not target:
        raise ValueError("the speculators layout needs the target's name or path")
    folder = Path(folder)
    if layout == "native":
        save_drafter(folder, drafter)
        return folder
    if layout == "speculators":
        config = _speculators_config(drafter.config, target, target_architecture)
    else:
        config = _engine_config(drafter.config, layout)
    config["torch_dtype" if layout != "speculators" else "dtype"] = str(dtype).split(".")[1]
    tensors = checkpoint_tensors(drafter, dtype)
    if layout == "specforge":
        tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / "model.safetensors", lambda path: save_file(tensors, path, {"format": "pt"})
    )
    write_atomically(folder / "config.json", json.dumps(config, indent=2) + "\n")
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # that leaves it private
    return folder


def checkpoint_tensors(drafter: Eagle3Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights under the names every engine reads. The head is the target's rows if not own."""
    named = _pieces(drafter)
    if drafter.head is None:
        named["lm_head.weight"] = drafter.target_rows()
    tensors = {name: tensor.to("cpu", dtype, copy=True) for name, tensor in named.items()}
    if drafter.config.reduced:
        ids_V = drafter.ids_V.cpu()
        known_W = torch.zeros(drafter.config.vocab_size, dtype=torch.bool)
        known_W[ids_V] = True
        tensors |= {"d2t": ids_V - torch.arange(len(ids_V)), "t2d": known_W}
    return tensors


def _pieces(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """The drafter's own weights under their published names: views, so they can be written to."""
    c = drafter.config
    heads, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    named = dict(zip("qkv", drafter.qkv.split([heads, kv, kv]), strict=True))
    named = {f"self_attn.{name}_proj": part for name, part in named.items()}
    named["self_attn.o_proj"] = drafter.out
    named["mlp.gate_proj"], named["mlp.up_proj"] = drafter.gate_up.chunk(2)
    named["mlp.down_proj"] = drafter.down
    named["input_layernorm"], named["hidden_norm"] = drafter.norm_in, drafter.norm_h
    named["post_attention_layernorm"] = drafter.norm_post
    named = {f"layers.0.{name}": tensor for name, tensor in named.items()}
    named |= {"fc": drafter.fc, "norm": drafter.norm}
    if drafter.head is not None:
        named["lm_head"] = drafter.head
    return {f"{name}.weight": tensor.detach() for name, tensor in named.items()}


def _layer_config(config: Eagle3Config) -> dict[str, Any]:
    """Sizes in both the old and the new rope style: engines differ in which one they read."""
    rope = dict(config.rope)
    theta = rope.pop("rope_theta", 10_000.0)
    scaled = rope.get("rope_type", "default") != "default"
    return {
        "model_type": "llama",
        **llama_config(config),
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "tie_word_embeddings": False,
    }


def _engine_config(config: Eagle3Config, layout: str) -> dict[str, Any]:
    values = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(config),
        "draft_vocab_size": config.draft_vocab_size,
    }
    if config.tap_layers != default_taps(config.num_target_layers):
        shift = 0 if layout == "vllm" else 1
        values["eagle_config"] = {_IDS_KEY: [i - shift for i in config.tap_layers]}
    return values


def _speculators_config(config: Eagle3Config, target: str, architecture: str) -> dict[str, Any]:
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,  # the chain length that `vllm serve` takes from the folder
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        **dict.fromkeys(_REFUSED, False),
        "embed_requires_grad": False,
        "target_hidden_size": None,
        _IDS_KEY: list(config.tap_layers),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
    }


def import_drafter(
    folder: str | Path,
    target: Eagle3Config,
    *,
    layout: str = "",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Eagle3Drafter:
    """A drafter from any of the layouts, not yet tied.

    target: the facts of the model it shall draft for (`Eagle3Config.from_target`). layout: tells
    the two meanings of custom tap layers apart ("sglang" or "vllm"); needed only where such are
    written down. ValueError names what does not fit; nothing is skipped in silence.
    """
    folder = Path(folder)
    if (folder / FILE).is_file():
        drafter = load_drafter(folder, dtype=dtype, device=device)
        _check_fit(drafter.config, target)
        return drafter
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} holds no {name} (sharded and pickled heads are not read)")
    with reading(folder / "model.safetensors"):
        tensors = {_plain_name(n): t for n, t in load_file(folder / "model.safetensors").items()}
    with reading(folder / "config.json"):
        values = json.loads((folder / "config.json").read_text())
        config = _read_config(values, tensors, target, layout)
    _check_fit(config, target)
    drafter = Eagle3Drafter(config, dtype=dtype, device=device)
    _load_tensors(drafter, tensors)
    return drafter


def _plain_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def _check_fit(config: Eagle3Config, target: Eagle3Config) -> None:
    for name in ("hidden_size", "vocab_size", "tap_layers"):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise ValueError(f"the drafter has {name} {own}, its target {wanted}")


def _read_config(
    values: dict[str, Any], tensors: dict[str, Tensor], target: Eagle3Config, layout: str
) -> Eagle3Config:
    for name in _REFUSED:
        # vLLM's reader takes an absent norm_before_residual of a speculators head as true.
        absent = name == "norm_before_residual" and "speculators_model_type" in values
        if values.get(name, absent):
            raise ValueError(f"drafters with {name} = true are not supported")
    layer = values.get("transformer_layer_config", values)
    if layer.get("num_hidden_layers", 1) != 1:
        raise ValueError("drafters with more than one layer are not supported")
    if layer.get("hidden_act", "silu") != "silu":
        raise ValueError(f"drafters with {layer['hidden_act']} are not supported")
    if (values.get("target_hidden_size") or layer["hidden_size"]) != layer["hidden_size"]:
        raise ValueError("drafters of another hidden size than their target are not supported")
    head = tensors.get("lm_head.weight")
    unsaid = {"num_hidden_layers": 1, "rope_theta": 10_000.0}  # what LlamaConfig takes them for
    return replace(
        Eagle3Config.from_target(SimpleNamespace(**unsaid | layer)),
        draft_vocab_size=layer["vocab_size"] if head is None else len(head),
        num_target_layers=target.num_target_layers,
        tap_layers=_read_taps(values, target, layout),
        own_head=head is not None,
    )


def _read_taps(values: dict[str, Any], target: Eagle3Config, layout: str) -> tuple[int, int, int]:
    ids = values.get(_IDS_KEY) or (values.get("eagle_config") or {}).get(_IDS_KEY)
    default = default_taps(target.num_target_layers)
    if not ids:
        return default
    if "speculators_model_type" not in values and layout not in ("sglang", "vllm"):
        if tuple(ids) in (default, tuple(i - 1 for i in default)):
            return default
        raise ValueError(
            f"{_IDS_KEY} means outputs of layers to SGLang and inputs to vLLM: say which layout "
            "this drafter has (minitlt export .. --to native --read-as sglang or vllm)"
        )
    low, mid, high = (i + (layout == "sglang") for i in ids)
    return low, mid, high


def _load_tensors(drafter: Eagle3Drafter, tensors: dict[str, Tensor]) -> None:
    """Copies by name, strictly: every tensor is known and every weight is there."""
    own = _pieces(drafter)
    wanted = set(own) | ({"d2t", "t2d"} if drafter.config.reduced else set())
    unknown, missing = set(tensors) - wanted - {"embed_tokens.weight"}, wanted - set(tensors)
    if unknown or missing:
        raise ValueError(
            f"drafter tensors: unknown {sorted(unknown) or 'none'}, "
            f"missing {sorted(missing) or 'none'}"
        )
    if "embed_tokens.weight" in tensors:
        logger.info("the drafter's own embedding table is not used; the target's is")
    for name, tensor in own.items():
        given, size = tuple(tensors[name].shape), tuple(tensor.shape)
        if given != size:
            raise ValueError(f"drafter tensors do not fit the config: {name} {given}, not {size}")
        tensor.copy_(tensors[name])
    drafter.ids_V.copy_(_draft_ids(drafter.config, tensors))


def _draft_ids(config: Eagle3Config, tensors: dict[str, Tensor]) -> Tensor:
    """Target ids from the offsets, checked against the mask."""
    if not config.reduced:
        return torch.arange(config.vocab_size)
    d2t_V, t2d_W = tensors["d2t"].long(), tensors["t2d"].bool()
    ids_V = d2t_V + torch.arange(len(d2t_V))
    if len(t2d_W) != config.vocab_size or not torch.equal(t2d_W.nonzero()[:, 0], ids_V):
        raise ValueError("d2t (offsets) and t2d (mask) do not name the same, ascending tokens")
    return ids_V


def check_export(
    drafter: Eagle3Drafter, folder: str | Path, *, layout: str = "", num_steps: int = 3
) -> list[float]:
    """Loads `folder` back strictly and compares recurrent steps with the drafter.

    The drafter is rounded to the file's dtype first, so that any difference is a wrong weight and
    not rounding. Returns the largest difference of the logits per step; raises ValueError above
    1e-4 of their size. One step alone would prove nothing: a wrong recurrent state shows in the
    second.
    """
    copy = drafter.serving_copy("float32")
    loaded = import_drafter(folder, drafter.config, layout=layout, device=drafter.fc.device)
    loaded._target = drafter._target
    stored = drafter.fc.dtype
    if not (Path(folder) / FILE).is_file():
        tensors = load_file(Path(folder) / "model.safetensors").values()
        stored = next(t.dtype for t in tensors if t.is_floating_point())
    copy.load_state_dict({
        name: tensor.to(stored) if tensor.is_floating_point() else tensor
        for name, tensor in drafter.state_dict().items()
    })  # fmt: skip
    copy.pack_weights()
    if not torch.equal(copy.ids_V, loaded.ids_V):
        raise ValueError("the exported draft vocabulary is another one")
    differences = []
    for own, other in zip(_probe(copy, num_steps), _probe(loaded, num_steps), strict=True):
        differences.append(float((own - other).abs().max()))
        if not differences[-1] <= 1e-4 * float(own.abs().max()):
            raise ValueError(f"the exported drafter differs, per step: {differences}")
    return differences


@torch.no_grad()
def _probe(drafter: Eagle3Drafter, num_steps: int, num_pairs: int = 12) -> list[Tensor]:
    """Logits of random pairs over some recurrent steps."""
    c, random = drafter.config, torch.Generator().manual_seed(0)
    tokens_N = torch.randint(c.vocab_size, (num_pairs + num_steps,), generator=random)
    features_NF = torch.randn(num_pairs, 3 * c.hidden_size, generator=random)
    device = drafter.fc.device
    pack = Pack(
        features_NF.to(device),
        tokens_N[:num_pairs].to(device),
        torch.arange(num_pairs, device=device),
        torch.arange(num_pairs, device=device),
        tokens_N.unfold(0, num_pairs, 1)[:num_steps].to(device),
        [(num_pairs, num_pairs)],
    )
    drafter.reserve_positions(num_pairs + num_steps)
    return [drafter.logits(state) for state in drafter.unroll(pack, num_steps)]
