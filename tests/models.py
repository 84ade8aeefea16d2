"""Tiny models for tests, built from configs with explicit seeds; nothing is downloaded."""

from typing import Any

import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(kind: str, **values: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


KINDS = {  # those that are written out
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama3_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "llama_linear": (LlamaConfig, LlamaForCausalLM, rope("linear", factor=4.0)),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16}),
}
OTHERS = {  # through their own modules; Granite and Cohere scale their logits
    "olmo2": (Olmo2Config, Olmo2ForCausalLM, {}),
    "phi3": (Phi3Config, Phi3ForCausalLM, {}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForCausalLM, {"num_key_value_heads": 4}),
    "granite": (
        GraniteConfig,
        GraniteForCausalLM,
        {
            "logits_scaling": 4.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere": (CohereConfig, CohereForCausalLM, {"logit_scale": 0.25}),
}


def tiny_model(
    kind: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: Any
) -> nn.Module:
    """A model of this kind with weights large enough that its distributions are not flat."""
    config_class, model_class, extra = (KINDS | OTHERS)[kind]
    config = config_class(**{**SIZES, **extra, **sizes})
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter, std=0.2)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.25 if "embed" not in name else 1.0)
            else:
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype).eval()


def random_prompts(lengths: list[int], *, vocab: int = 97, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
