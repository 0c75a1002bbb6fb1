"""EAGLE-1: the layer of the paper, in the layout that vLLM loads; what it shares with EAGLE-3 is tested there."""

import json
from pathlib import Path

import pytest
import torch
from models import tiny_model
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from specdraft.drafters.eagle import Eagle1Drafter, Eagle1Recipe
from specdraft.target import FrozenTarget

H, INNER, HEADS, KEYS = 32, 48, 4 * 8, 2 * 8
LAYOUT = {
    "fc.weight": (H, 2 * H),
    "layers.0.self_attn.q_proj.weight": (HEADS, H),
    "layers.0.self_attn.k_proj.weight": (KEYS, H),
    "layers.0.self_attn.v_proj.weight": (KEYS, H),
    "layers.0.self_attn.o_proj.weight": (H, HEADS),
    "layers.0.post_attention_layernorm.weight": (H,),
    "layers.0.mlp.gate_proj.weight": (INNER, H),
    "layers.0.mlp.up_proj.weight": (INNER, H),
    "layers.0.mlp.down_proj.weight": (H, INNER),
}


def eagle1(target: FrozenTarget, **recipe: object) -> Eagle1Drafter:
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    return Eagle1Drafter.for_target(target, Eagle1Recipe.model_validate(recipe), counts).eval()


def test_x10_x11_names_shapes_and_config_are_the_layouts(tmp_path: Path) -> None:
    """No norm before the attention, no final norm, no head of its own: vLLM refuses a file that has them."""
    eagle1(FrozenTarget(tiny_model())).bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == LAYOUT
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["EagleLlamaForCausalLM"]
    assert written["num_hidden_layers"] == 1
    assert written["torch_dtype"] == "bfloat16"
    assert written["tie_word_embeddings"] is False
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (4, 2, 8)


@torch.no_grad()
def test_the_first_step_is_the_papers_layer_over_the_next_embedding_and_the_last_hidden_state() -> None:
    """Written out: fc over (embedding, feature), attention without a norm before it, MLP, the target's own head."""
    target = FrozenTarget(tiny_model())
    drafter = eagle1(target, start="random")
    tokens = torch.randint(0, 96, (1, 9))
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), ())
    weights = dict(drafter.named_parameters())

    def product(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"layers.0.{name}.weight"].T

    embedded = target.embedding(torch.cat([tokens[:, 1:], tokens[:, :1] * 0], 1))
    fused = torch.cat([embedded, seen.hidden], -1) @ weights["fc.weight"].T
    query, key, value = (product(f"self_attn.{n}_proj", fused).view(1, 9, -1, 8).transpose(1, 2) for n in "qkv")
    cos, sin = drafter.rotary.angles(fused, torch.arange(9)[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    scores = query @ repeat_kv(key, 2).transpose(2, 3) / 8**0.5
    scores = scores.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ repeat_kv(value, 2)).transpose(1, 2).flatten(2)
    middle = fused + product("self_attn.o_proj", mixed)
    normed = middle * torch.rsqrt(middle.pow(2).mean(-1, keepdim=True) + drafter.config.rms_norm_eps)
    normed = normed * weights["layers.0.post_attention_layernorm.weight"]
    out = middle + product("mlp.down_proj", silu(product("mlp.gate_proj", normed)) * product("mlp.up_proj", normed))

    first = drafter.predict(tokens, seen)[0]
    torch.testing.assert_close(first.hidden, out, rtol=1e-5, atol=1e-5)
    assert torch.equal(first.head(out), target.head(out))
    assert (first.depth, first.shift, first.kept_ids) == (1, 1, None)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_t15_the_head_is_the_targets_own_capped_logits_included_and_does_not_learn(family: str) -> None:
    target = FrozenTarget(tiny_model(family))
    drafter = eagle1(target)
    hidden = torch.randn(3, H, requires_grad=True)
    logits = drafter.head()(hidden)
    torch.testing.assert_close(logits, target.head(hidden.detach()))
    logits.sum().backward()
    assert hidden.grad is not None
    assert not any(weight.requires_grad for weight in drafter.head().parameters())
    assert not [name for name in drafter.state_dict() if "head" in name]


@torch.no_grad()
def test_it_starts_by_handing_the_feature_on_at_every_depth() -> None:
    """Not with the target's last layer, whose output is in the scale of what comes before the final norm: unrolled on
    itself, that explodes."""
    target = FrozenTarget(tiny_model())
    drafter = eagle1(target)
    assert torch.equal(drafter.fc.weight, torch.cat([torch.zeros(H, H), torch.eye(H)], 1))
    tokens = torch.randint(0, 96, (2, 9))
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), ())
    for prediction in drafter.predict(tokens, seen):
        torch.testing.assert_close(prediction.hidden, seen.hidden)
