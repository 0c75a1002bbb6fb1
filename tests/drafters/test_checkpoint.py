"""A checkpoint is what engines load (the layout's names, shapes and dtypes), comes back bitwise, or is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafting import eagle3
from models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.drafters import load_drafter
from specdraft.drafters.eagle import Eagle3Drafter
from specdraft.target import FrozenTarget

KEPT = torch.arange(2, 96, 3)
H, INNER, V, VD, HEADS, KEYS, TAPS = 32, 48, 96, len(KEPT), 4 * 8, 2 * 8, 2
LAYER = {
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (HEADS, 2 * H),
    "midlayer.self_attn.k_proj.weight": (KEYS, 2 * H),
    "midlayer.self_attn.v_proj.weight": (KEYS, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, HEADS),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.mlp.gate_proj.weight": (INNER, H),
    "midlayer.mlp.up_proj.weight": (INNER, H),
    "midlayer.mlp.down_proj.weight": (H, INNER),
    "fc.weight": (H, TAPS * H),
    "norm.weight": (H,),
}
REDUCED = {**LAYER, "lm_head.weight": (VD, H), "d2t": (VD,), "t2d": (V,)}
WHOLE = {**LAYER, "lm_head.weight": (V, H)}


def drafter(kept: Tensor | None = KEPT, dtype: torch.dtype = torch.float32, family: str = "llama") -> Eagle3Drafter:
    made = eagle3(FrozenTarget(tiny_model(family)), kept, unroll=3)
    return made.to(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kept", "golden"), [(KEPT, REDUCED), (None, WHOLE)], ids=["reduced", "whole"])
def test_x10_x11_names_shapes_and_dtypes_are_the_layouts(
    kept: Tensor | None, golden: dict[str, tuple[int, ...]], dtype: torch.dtype, tmp_path: Path
) -> None:
    drafter(kept, dtype).save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == golden
    fixed = {"d2t": torch.int64, "t2d": torch.bool}
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: fixed.get(n, dtype) for n in golden}
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": H,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "draft_vocab_size": VD if kept is not None else V,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1]},
        "specdraft": {"drafter": "eagle3", "target_hidden_size": H, "unroll": 3, "trained_length": None},
    }


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x01_x02_it_comes_back_bitwise_and_the_config_alone_rebuilds_it(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    saved = drafter(KEPT, dtype, family)
    saved.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, Eagle3Drafter)
    assert not loaded.training
    assert loaded.servable_config() == saved.servable_config()
    mine, theirs = saved.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)
    tokens = torch.randint(0, V, (1, 9))
    target = saved.target
    loaded.attach(target)
    seen = target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), saved.taps)
    with torch.no_grad():
        for one, other in zip(saved.predict(tokens, seen), loaded.predict(tokens, seen), strict=True):
            assert torch.equal(one.hidden, other.hidden)
            assert torch.equal(one.kept_ids, other.kept_ids)  # type: ignore[arg-type]


Damage = Callable[[dict[str, Tensor]], None]
DAMAGES: dict[str, Damage] = {
    "fc.weight is missing": lambda tensors: tensors.__delitem__("fc.weight"),
    "d2t is missing": lambda tensors: tensors.__delitem__("d2t"),
    "fc.bias is not expected": lambda tensors: tensors.update({"fc.bias": torch.zeros(H)}),
    r"norm.weight has the shape \(31,\) instead of \(32,\)": lambda tensors: tensors.update(
        {"norm.weight": torch.zeros(31)}
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_x01_x02_a_missing_extra_or_misshapen_tensor_is_refused_at_load_and_at_save(said: str, tmp_path: Path) -> None:
    whole = drafter()
    whole.save_pretrained(tmp_path / "good")
    tensors = load_file(tmp_path / "good" / "model.safetensors")
    DAMAGES[said](tensors)
    save_file(tensors, tmp_path / "good" / "model.safetensors")
    with pytest.raises(SpecdraftError, match=said):
        load_drafter(tmp_path / "good")
    with pytest.raises(SpecdraftError, match=said):
        whole.save_pretrained(tmp_path / "bad", state_dict=tensors)
    assert not (tmp_path / "bad").exists(), "nothing is written in part"


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    drafter().save_pretrained(tmp_path / "none", is_main_process=False)
    assert not (tmp_path / "none").exists()


def test_x13_a_folder_that_is_no_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError, match="is not a drafter's checkpoint"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(SpecdraftError, match=r"describes no drafter of ours.*eagle3"):
        load_drafter(tmp_path)
    drafter().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut short")
    with pytest.raises(SpecdraftError, match="cannot be read"):
        load_drafter(tmp_path)
