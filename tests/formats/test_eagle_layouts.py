"""EAGLE-3 and EAGLE-1: the names that engines load, there and back bit for bit, and what is refused of others'."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import eagle3
from foreign import Checkpoint, assert_same, put, read, shaken, write
from models import tiny_model
from torch import Tensor

from specdraft.causal import Observation
from specdraft.config import SpecdraftError
from specdraft.drafters.base import TrainableDrafter
from specdraft.drafters.eagle import Eagle1Drafter, Eagle1Recipe, Eagle3Drafter
from specdraft.target import FrozenTarget

KEPT = torch.arange(2, 96, 3)
H, INNER, V, VD, HEADS, KEYS = 32, 48, 96, len(KEPT), 4 * 8, 2 * 8
SHAPE = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def head3(kept: Tensor | None = KEPT, dtype: torch.dtype = torch.float32, **recipe: Any) -> Eagle3Drafter:
    target = FrozenTarget(tiny_model(num_hidden_layers=8))
    return shaken(eagle3(target, kept, unroll=3, **recipe)).to(dtype=dtype)


def head1(dtype: torch.dtype = torch.float32) -> Eagle1Drafter:
    target = FrozenTarget(tiny_model())
    made = Eagle1Drafter.for_target(target, Eagle1Recipe(unroll=2), torch.ones(V, dtype=torch.int64))
    return shaken(made).to(dtype=dtype)


def foreign3(head: Eagle3Drafter, out: Path) -> Checkpoint:
    """As a stranger writes it: nothing of ours in config.json."""
    config, tensors = write("safeailab", head, out)
    del config["specdraft"], config["norm_before_residual"], config["head_dim"]
    return config, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_x10_x11_speculators_names_shapes_and_config(dtype: torch.dtype, tmp_path: Path) -> None:
    config, tensors = write("speculators", head3(dtype=dtype), tmp_path / "out")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "layers.0.input_layernorm.weight": (H,),
        "layers.0.hidden_norm.weight": (H,),
        "layers.0.self_attn.q_proj.weight": (HEADS, 2 * H),
        "layers.0.self_attn.k_proj.weight": (KEYS, 2 * H),
        "layers.0.self_attn.v_proj.weight": (KEYS, 2 * H),
        "layers.0.self_attn.o_proj.weight": (H, HEADS),
        "layers.0.post_attention_layernorm.weight": (H,),
        "layers.0.mlp.gate_proj.weight": (INNER, H),
        "layers.0.mlp.up_proj.weight": (INNER, H),
        "layers.0.mlp.down_proj.weight": (H, INNER),
        "fc.weight": (H, 3 * H),
        "norm.weight": (H,),
        "lm_head.weight": (VD, H),
        "d2t": (VD,),
        "t2d": (V,),
    }
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {dtype}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert config == {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": VD,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "target_hidden_size": H,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": {**SHAPE, "torch_dtype": str(dtype).removeprefix("torch.")},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "specdraft": {"drafter": "eagle3", "target_hidden_size": H, "unroll": 3, "trained_length": None},
    }


def test_x10_modelopts_names_and_config(tmp_path: Path) -> None:
    head = head3(dtype=torch.bfloat16)
    ours, tensors = write("safeailab", head, tmp_path / "ours")
    config, theirs = write("modelopt", head, tmp_path / "theirs")
    assert theirs.keys() == {name.replace("midlayer.", "layers.0.") for name in tensors} - {"t2d"}
    assert config == {
        **ours,
        "attention_bias": False,
        "mlp_bias": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }


def test_t11_modelopt_counts_the_tapped_layers_from_the_first_ones_output(tmp_path: Path) -> None:
    """Which the same list means of nobody else, so that it is never refused as doubtful."""
    head = head3(taps=(2, 3, 7))
    config, tensors = write("modelopt", head, tmp_path / "out")
    for name in ("eagle_aux_hidden_state_layer_ids", "specdraft", "norm_before_residual"):
        del config[name]
    head.config.unroll = 4  # which nobody wrote down
    found = read("modelopt", put((config, tensors), tmp_path / "theirs"), head.target)
    assert found.taps == (2, 3, 7)
    assert_same(found, head)
    for name, value in (("use_last_layernorm", False), ("parallel_draft_step", 4)):
        odd = {**config, "eagle_config": {**config["eagle_config"], name: value}}
        with pytest.raises(SpecdraftError, match=f"eagle_config says {name} {value}"):
            read("modelopt", put((odd, tensors), tmp_path / name), head.target)
    head.config.norm_before_residual = True
    with pytest.raises(SpecdraftError, match="TensorRT-LLM does not know"):
        write("modelopt", head, tmp_path / "never")


def test_speculators_own_mtp_is_sent_to_its_stitcher(tmp_path: Path) -> None:
    head = head3()
    config = {"speculators_model_type": "mtp", "transformer_layer_config": SHAPE}
    folder = put((config, {"mtp_layers.0.input_proj.weight": torch.zeros(H, 2 * H)}), tmp_path / "mtp")
    with pytest.raises(SpecdraftError, match="speculators stitch-mtp"):
        read("speculators", folder, head.target)


def test_x10_x11_sglangs_eagle1_has_its_own_class_and_a_bias_of_zeros(tmp_path: Path) -> None:
    head = head1(torch.bfloat16)
    vllm, ours = write("eagle1-vllm", head, tmp_path / "vllm")
    sglang, theirs = write("eagle1-sglang", head, tmp_path / "sglang")
    assert vllm["architectures"] == ["EagleLlamaForCausalLM"]
    assert sglang == {**vllm, "architectures": ["LlamaForCausalLMEagle"]}
    assert "fc.bias" not in ours
    bias = theirs.pop("fc.bias")
    assert (bias.shape, bias.dtype, bool(bias.any())) == ((H,), torch.bfloat16, False)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("safeailab", head3),
        ("modelopt", head3),
        ("modelopt", lambda dtype: head3(None, dtype)),
        ("speculators", head3),
        ("speculators", lambda dtype: head3(None, dtype)),
        ("eagle1-vllm", head1),
        ("eagle1-sglang", head1),
    ],
    ids=["safeailab", "modelopt", "modelopt-whole", "speculators", "speculators-whole", "eagle1-vllm", "eagle1-sglang"],
)
def test_x01_x02_there_and_back_is_bit_exact(
    name: str, make: Callable[..., TrainableDrafter], dtype: torch.dtype, tmp_path: Path
) -> None:
    drafter = make(dtype=dtype)
    drafter.config.trained_length = 48
    folder = put(write(name, drafter, tmp_path / "out"), tmp_path / "again")
    assert_same(read(name, folder, drafter.target), drafter)


def test_a_strangers_config_gives_the_same_head_and_a_prefix_is_no_matter(tmp_path: Path) -> None:
    head = head3()
    config, tensors = foreign3(head, tmp_path / "out")
    tensors["embed_tokens.weight"] = head.target.embedding.weight.detach().clone()
    config["unused"] = "kept out"
    folder = put((config, {f"model.{name}": tensor for name, tensor in tensors.items()}), tmp_path / "theirs")
    head.config.unroll = 4  # which nobody wrote down
    assert_same(read("safeailab", folder, head.target), head)


def test_x01_an_embedding_that_is_not_the_targets_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = head3()
    config, tensors = foreign3(head, tmp_path / "out")
    with caplog.at_level(logging.WARNING):
        tensors["embed_tokens.weight"] = head.target.embedding.weight.detach().bfloat16()
        read("safeailab", put((config, tensors), tmp_path / "copy"), head.target)
        assert "not the target's embedding" not in caplog.text
        tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 1
        read("safeailab", put((config, tensors), tmp_path / "own"), head.target)
        assert "not the target's embedding" in caplog.text
    tensors["embed_tokens.weight"] = torch.zeros(V, H + 1)
    with pytest.raises(SpecdraftError, match="another target"):
        read("safeailab", put((config, tensors), tmp_path / "bad"), head.target)


def test_without_a_head_of_its_own_it_speaks_through_the_targets_rows(tmp_path: Path) -> None:
    head = head3(None)
    config, tensors = foreign3(head, tmp_path / "out")
    del tensors["lm_head.weight"]
    found = read("safeailab", put((config, tensors), tmp_path / "theirs"), head.target)
    assert torch.equal(found.lm_head.weight, head.target.head_rows(torch.arange(V)))  # type: ignore[union-attr]


TOP, INNER_KEY = "eagle_aux_hidden_state_layer_ids", "eagle_config"


@pytest.mark.parametrize(
    ("top", "inner", "taps"),
    [
        (None, None, (2, 4, 5)),  # every engine's default for 8 layers
        ([1, 3, 6], [0, 2, 5], (1, 3, 6)),
        ([1, 3, 6], None, (1, 3, 6)),
        (None, [1, 3, 4], (2, 4, 5)),  # SGLang's way of saying the default
        (None, [2, 4, 5], (2, 4, 5)),  # vLLM's
        (None, [0, 2, 5], "SGLang as \\[1, 3, 6\\]"),
    ],
)
def test_t11_tapped_layers_are_read_by_the_engines_conventions_or_refused(
    top: list[int] | None, inner: list[int] | None, taps: tuple[int, ...] | str, tmp_path: Path
) -> None:
    head = head3()
    config, tensors = foreign3(head, tmp_path / "out")
    del config[TOP], config[INNER_KEY]
    config |= {} if top is None else {TOP: top}
    config |= {} if inner is None else {INNER_KEY: {TOP: inner}}
    folder = put((config, tensors), tmp_path / "theirs")
    if isinstance(taps, str):
        with pytest.raises(SpecdraftError, match=taps):
            read("safeailab", folder, head.target)
    else:
        assert read("safeailab", folder, head.target).taps == taps


def test_t11_layers_that_engines_would_sort_are_not_exported(tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError, match="ascending"):
        write("safeailab", head3(taps=(5, 2, 4)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


Damage = Callable[[dict[str, Any], dict[str, Tensor]], object]
DAMAGES: list[tuple[str, Damage]] = [
    ("fc.weight is missing", lambda config, tensors: tensors.pop("fc.weight")),
    ("fc.bias is not expected", lambda config, tensors: tensors.update({"fc.bias": torch.zeros(H)})),
    (r"norm.weight has the shape \(31,\)", lambda config, tensors: tensors.update({"norm.weight": torch.zeros(31)})),
    (r"fc.weight has the shape \(32, 96\)", lambda config, tensors: config.update({TOP: [2, 4]})),
    ("without a d2t table", lambda config, tensors: (tensors.pop("d2t"), tensors.pop("t2d"))),
    ("t2d without d2t", lambda config, tensors: tensors.pop("d2t")),
    ("d2t is all zero", lambda config, tensors: (tensors.pop("t2d"), tensors["d2t"].zero_())),
    ("t2d .* does not mark", lambda config, tensors: tensors["d2t"].zero_()),
    ("holds offsets", lambda config, tensors: tensors.update(d2t=KEPT.clone())),
    (
        "as ids do",
        lambda config, tensors: (tensors.pop("t2d"), tensors.update(d2t=torch.arange(VD) + 1)),
    ),
    ("norm_before_fc", lambda config, tensors: config.update(norm_before_fc=True)),
    ("norm_output", lambda config, tensors: config.update(eagle_config={"norm_output": True})),
    ("attention_bias True", lambda config, tensors: config.update(attention_bias=True)),
    ("2 layers", lambda config, tensors: config.update(num_hidden_layers=2)),
    ("the activation gelu", lambda config, tensors: config.update(hidden_act="gelu")),
    ("quantised", lambda config, tensors: config.update(quantization_config={"bits": 4})),
    ("lacks hidden_size", lambda config, tensors: config.pop("hidden_size")),
    ("mrope_section", lambda config, tensors: config.update(rope_scaling={"mrope_section": [2, 1, 1]})),
    ("width of|width 64|another target|64", lambda config, tensors: config.update(target_hidden_size=64)),
]


@pytest.mark.parametrize(("said", "damage"), DAMAGES, ids=[said for said, _ in DAMAGES])
def test_x01_x02_v02_a_damaged_or_unlike_head_is_refused_with_the_reason(
    said: str, damage: Damage, tmp_path: Path
) -> None:
    head = head3()
    config, tensors = foreign3(head, tmp_path / "out")
    damage(config, tensors)
    with pytest.raises(SpecdraftError, match=said):
        read("safeailab", put((config, tensors), tmp_path / "theirs"), head.target)


def test_v02_offsets_alone_are_enough_and_zeros_are_the_whole_vocabulary(tmp_path: Path) -> None:
    kept = torch.tensor([2, 3, 6, 9, 10])
    head = head3(kept)
    config, tensors = foreign3(head, tmp_path / "out")
    assert tensors["d2t"].tolist() == [2, 2, 4, 6, 6]
    del tensors["t2d"]
    tensors["d2t"] = tensors["d2t"].int()
    found = read("safeailab", put((config, tensors), tmp_path / "theirs"), head.target)
    assert found.kept_ids().tolist() == kept.tolist()  # type: ignore[union-attr]
    whole = head3(None)
    config, tensors = foreign3(whole, tmp_path / "whole")
    tensors |= {"d2t": torch.zeros(V, dtype=torch.int64), "t2d": torch.ones(V, dtype=torch.bool)}
    assert read("safeailab", put((config, tensors), tmp_path / "zeros"), whole.target).kept_ids() is None


@pytest.mark.parametrize("missing", ["d2t", "t2d", "norm_before_residual", "transformer_layer_config"])
def test_x02_speculators_needs_both_tables_and_the_norm_that_engines_disagree_on(missing: str, tmp_path: Path) -> None:
    head = head3()
    config, tensors = write("speculators", head, tmp_path / "out")
    config.pop(missing, None)
    tensors.pop(missing, None)
    with pytest.raises(SpecdraftError, match=missing):
        read("speculators", put((config, tensors), tmp_path / "theirs"), head.target)


def test_x11_a_nested_vocabulary_size_and_both_spellings_of_rotary_positions_are_read(tmp_path: Path) -> None:
    head = head3()
    config, tensors = foreign3(head, tmp_path / "out")
    config["text_config"] = {"vocab_size": config.pop("vocab_size")}
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    found = read("safeailab", put((config, tensors), tmp_path / "theirs"), head.target)
    assert (found.config.vocab_size, found.config.rope_parameters["rope_theta"]) == (V, 500.0)
    del config["rope_parameters"]
    config |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    found = read("safeailab", put((config, tensors), tmp_path / "old"), head.target)
    assert found.config.rope_parameters == {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}


def observed(drafter: TrainableDrafter) -> tuple[Tensor, Observation]:
    tokens = torch.randint(0, V, (1, 7), generator=torch.Generator().manual_seed(3))
    return tokens, drafter.target.observe(tokens, torch.ones_like(tokens).bool(), drafter.taps)


@torch.no_grad()
def test_norm_before_residual_adds_attention_to_the_normed_feature(tmp_path: Path) -> None:
    """Where attention and MLP give nothing, what the head reads is the normed feature itself."""
    head = head3()
    config, tensors = foreign3(head, tmp_path / "out")
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name].zero_()
    config["norm_before_residual"] = True
    found = read("safeailab", put((config, tensors), tmp_path / "theirs"), head.target)
    assert isinstance(found, Eagle3Drafter)
    tokens, seen = observed(found)
    wanted = found.norm(found.midlayer.hidden_norm(found.fc(seen.taps)))
    torch.testing.assert_close(found.predict(tokens, seen)[0].hidden, wanted)
    assert_same(
        read("speculators", put(write("speculators", found, tmp_path / "b"), tmp_path / "c"), head.target), found
    )


@torch.no_grad()
def test_x02_a_bias_of_eagle1_is_kept_for_sglang_and_refused_for_vllm_which_ignores_it(tmp_path: Path) -> None:
    head = head1()
    config, tensors = write("eagle1-sglang", head, tmp_path / "out")
    tensors["fc.bias"] = torch.randn(H)
    del config["specdraft"]
    biased = read("eagle1-sglang", put((config, tensors), tmp_path / "theirs"), head.target)
    assert isinstance(biased, Eagle1Drafter)
    tokens, seen = observed(biased)
    plain, moved = (one.predict(tokens, seen)[0].hidden for one in (head, biased))
    assert not torch.allclose(plain, moved)
    assert_same(
        read("eagle1-sglang", put(write("eagle1-sglang", biased, tmp_path / "b"), tmp_path / "c"), head.target), biased
    )
    with pytest.raises(SpecdraftError, match="vLLM ignores it"):
        write("eagle1-vllm", biased, tmp_path / "vllm")
    biased.save_pretrained(tmp_path / "ours")
    assert_same(type(biased).from_pretrained(tmp_path / "ours"), biased)


@pytest.mark.parametrize("extra", ["lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight"])
def test_x02_eagle1_with_what_its_layer_has_not_is_refused(extra: str, tmp_path: Path) -> None:
    head = head1()
    config, tensors = write("eagle1-vllm", head, tmp_path / "out")
    config["architectures"] = ["LlamaForCausalLM"]
    assert_same(read("eagle1-vllm", put((config, tensors), tmp_path / "good"), head.target), head)
    tensors[extra] = torch.zeros(H)
    with pytest.raises(SpecdraftError, match=f"{extra} is not expected"):
        read("eagle1-vllm", put((config, tensors), tmp_path / "theirs"), head.target)
