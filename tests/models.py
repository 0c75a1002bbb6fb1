"""Tiny random targets of several families, built on the spot."""

import torch
import transformers
from transformers import PreTrainedModel

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOWED = {**COMMON, "head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {**COMMON, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": (transformers.LlamaConfig, COMMON),
    "qwen3": (transformers.Qwen3Config, {**COMMON, "head_dim": 8}),
    "gemma2": (transformers.Gemma2Config, {**WINDOWED, "query_pre_attn_scalar": 8}),
    "gemma3": (transformers.Gemma3TextConfig, {**WINDOWED, "query_pre_attn_scalar": 8}),
    "mistral": (transformers.MistralConfig, {**COMMON, "sliding_window": 8}),
    "gpt_neox": (
        transformers.GPTNeoXConfig,
        {key: value for key, value in COMMON.items() if key != "num_key_value_heads"},
    ),
    "mixtral": (transformers.MixtralConfig, {**EXPERTS, "num_local_experts": 4}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {**EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
    ),
}
FAMILIES = tuple(CONFIGS)


def tiny_model(
    family: str = "llama", attention: str | None = None, seed: int = 0, **changes: object
) -> PreTrainedModel:
    """A random causal LM with weights large enough that its laws are far from uniform."""
    kind, settings = CONFIGS[family]
    torch.manual_seed(seed)
    config = kind(**{**settings, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.mul_(4.0 if "embed" not in name else 8.0)
    return model.eval()
