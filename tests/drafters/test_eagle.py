"""EAGLE-3: what it computes in training is what it computes in decoding, and its tree is EAGLE-2's."""

import logging
from typing import Any

import pytest
import torch
from drafting import ForcedDice, eagle3
from models import tiny_model
from torch import Tensor
from transformers import GPTNeoXConfig, LlamaConfig
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from specdraft.config import SpecdraftError
from specdraft.drafters.blocks import Rotary, rope_of
from specdraft.drafters.eagle import Eagle3Config, Eagle3Drafter
from specdraft.drafters.proposals import Words
from specdraft.drafters.shapes import Chain, DynamicTree
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

KEPT = torch.arange(2, 96, 3)
FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt_neox", "mixtral")


def drafter_for(target: FrozenTarget, kept: Tensor | None = None, **recipe: Any) -> Eagle3Drafter:
    """Far from the target's start, so that every part of it matters."""
    drafter = eagle3(target, kept, **recipe).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 + (weight.dim() == 1))
        drafter.lm_head.weight *= 3  # confident enough for deep trees
    return drafter


def texts(rows: int, length: int) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(3))


def trained_laws(drafter: Eagle3Drafter, tokens: Tensor) -> list[Tensor]:
    """q of each depth at each slot of whole rows: [batch, time, draft vocabulary] each."""
    seen = drafter.target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), drafter.taps)
    return [prediction.head(prediction.hidden).softmax(-1) for prediction in drafter.predict(tokens, seen)]


@pytest.mark.parametrize(("family", "kept"), [*((family, None) for family in FAMILIES), ("llama", KEPT)])
@torch.no_grad()
def test_t07_t09_e19_training_laws_are_decoding_laws_at_every_step_and_after_every_round(
    family: str, kept: Tensor | None
) -> None:
    """Rows of different lengths; k = 4 proposals of which a = 0..4 are accepted, each row another way."""
    target = FrozenTarget(tiny_model(family))
    drafter = drafter_for(target, kept)
    drafter.shape = Chain(4)
    tokens, known = texts(2, 26), torch.tensor([7, 3])
    want = trained_laws(drafter, tokens)
    rows = torch.arange(2)
    session = target.session(drafter.taps, 2)
    read = session.read(tokens[:, :7], torch.arange(7) < known[:, None])
    memory = drafter.begin(read, tokens[rows, known])
    for accepted in ([0, 4], [3, 0], [4, 1], [2, 2]):
        ahead = tokens[rows[:, None], known[:, None] + 1 + torch.arange(4)]
        tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(ahead))
        assert tree.laws is not None
        for step in range(4):
            got = tree.laws[:, step] if kept is None else tree.laws[:, step, kept]
            torch.testing.assert_close(got, want[step][rows, known - 1], rtol=0, atol=1e-5)
        assert memory.cache.lengths.tolist() == session.cache.lengths.tolist() == known.tolist()
        session.extend(tokens[rows, known], tree)
        count = torch.tensor(accepted)
        path = torch.where(torch.arange(4) < count[:, None], torch.arange(4), -1)
        known = known + count + 1
        verdict = Verdict(path, count, tokens[rows, known], torch.ones(2, 4).bool(), torch.ones(2, 4))
        memory = drafter.remember(memory, verdict, session.commit(verdict))
    memory = drafter.keep(memory, [1])
    tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(tokens[1:, known[1] + 1 :]))
    assert tree.laws is not None
    got = tree.laws[0, 0] if kept is None else tree.laws[0, 0, kept]
    torch.testing.assert_close(got, want[0][1, known[1] - 1], rtol=0, atol=1e-5)


@torch.no_grad()
def test_t09_tokens_are_the_datas_and_features_the_drafters_own() -> None:
    drafter = drafter_for(FrozenTarget(tiny_model()))
    tokens = texts(1, 10)
    seen = drafter.target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), drafter.taps)
    base = [prediction.hidden for prediction in drafter.predict(tokens, seen)]
    blind = seen._replace(taps=torch.cat([seen.taps[:, :5], torch.randn_like(seen.taps[:, 5:])], 1))
    for depth, prediction in enumerate(drafter.predict(tokens, blind)):
        assert torch.equal(prediction.hidden[:, :5], base[depth][:, :5]), "no target feature after the slot is read"
        assert not torch.allclose(prediction.hidden[:, 5], base[depth][:, 5])
    other = tokens.clone()
    other[0, 7] = (tokens[0, 7] + 1) % 96  # read by slot 6 at depth 1, by slot 5 at depth 2, by slot 4 at depth 3
    for depth, prediction in enumerate(drafter.predict(other, seen)):
        first = next(t for t in range(10) if not torch.equal(prediction.hidden[:, t], base[depth][:, t]))
        assert first == 6 - depth
        assert (prediction.depth, prediction.shift) == (depth + 1, depth + 1)


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def slow_tree(drafter: Eagle3Drafter, prompt: Tensor, root: Tensor, shape: DynamicTree) -> set[tuple[int, ...]]:
    """EAGLE-2 in plain Python: a forced chain along each path gives the law below it."""
    seen = drafter.target.observe(prompt[None], torch.ones(1, len(prompt), dtype=torch.bool), drafter.taps)
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(shape.depth):
        level: dict[tuple[int, ...], float] = {}
        for path in frontier:
            drafter.shape = Chain(len(path) + 1)
            forced = ForcedDice(torch.tensor([[*path, 0]]))
            laws = drafter.propose(drafter.begin(seen, root[None]), warp=Warp(1.0), dice=forced).laws
            assert laws is not None
            top = laws[0, -1].log().topk(shape.width)
            for score, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                level[(*path, token)] = scores.get(path, 0.0) + score
        scores |= level
        frontier = sorted(level, key=level.__getitem__, reverse=True)[: shape.width]
    return set(sorted(scores, key=scores.__getitem__, reverse=True)[: shape.nodes])


@pytest.mark.parametrize("kept", [None, KEPT], ids=["whole", "reduced"])
@torch.no_grad()
def test_the_dynamic_tree_is_eagle_2s(kept: Tensor | None) -> None:
    drafter = drafter_for(FrozenTarget(tiny_model()), kept)
    tokens, lengths = texts(2, 8), torch.tensor([7, 4])
    roots = tokens[torch.arange(2), lengths]
    shape = DynamicTree(depth=4, width=3, nodes=11)
    seen = drafter.target.observe(tokens[:, :7], torch.arange(7) < lengths[:, None], drafter.taps)
    drafter.shape = shape
    tree = drafter.propose(drafter.begin(seen, roots), warp=Warp(1.0), dice=ForcedDice(tokens))
    assert tree.laws is None, "chosen, not drawn"
    assert tree.nodes == shape.nodes
    assert tree.depth >= 3
    for row, length in enumerate(lengths.tolist()):
        paths = paths_of(tree, row)
        assert paths == slow_tree(drafter, tokens[row, :length], roots[row], shape)
        assert all(path[:-1] in paths for path in paths if len(path) > 1), "ancestors are kept"


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def eagle_config(rope: dict[str, Any], head_dim: int = 16) -> Eagle3Config:
    sizes = {"vocab_size": 96, "draft_vocab_size": 96, "hidden_size": 32, "target_hidden_size": 32, "taps": [1, 2]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim, "intermediate_size": 16}
    return Eagle3Config(**sizes, **heads, max_position_embeddings=64, rope_parameters=rope)


def reloaded(config: Eagle3Config) -> Eagle3Config:
    return Eagle3Drafter.config_from_servable(Eagle3Drafter(config).servable_config())


@pytest.mark.parametrize("kind", ROPES)
def test_t19_rotary_positions_of_every_kind_are_transformers_own(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e3, **ROPES[kind]}
    theirs = modeling_llama.LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=64, rope_parameters=rope)
    )
    states, positions = torch.randn(2, 2, 90, 16), torch.arange(90).expand(2, -1)
    want, _ = modeling_llama.apply_rotary_pos_emb(states, states, *theirs(states, positions))
    for config in (eagle_config(rope_of({"rope_parameters": rope}, "target")), reloaded(eagle_config(rope))):
        torch.testing.assert_close(Rotary(config)(states, positions), want, rtol=0, atol=1e-6)


def test_t17_partial_rotary_turns_the_dims_that_the_target_turns_also_after_a_load() -> None:
    settings = {"hidden_size": 32, "num_attention_heads": 2, "rotary_pct": 0.25, "max_position_embeddings": 64}
    theirs = GPTNeoXConfig(**settings)
    states, positions = torch.randn(2, 2, 9, 16), torch.arange(9).expand(2, -1)
    cos, sin = modeling_gpt_neox.GPTNeoXRotaryEmbedding(theirs)(states, positions)
    want, _ = modeling_gpt_neox.apply_rotary_pos_emb(states, states, cos, sin)
    config = eagle_config(rope_of(theirs.to_dict(), "target"))
    for mine in (config, reloaded(config)):
        got = Rotary(mine)(states, positions)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
        assert torch.equal(got[..., 4:], states[..., 4:])


@pytest.mark.parametrize(
    ("rope", "said"), [({"rope_type": "spiral"}, "spiral"), ({"mrope_section": [1, 1, 2]}, "mrope_section")]
)
def test_t17_t19_t34_unknown_rotary_positions_are_refused(rope: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecdraftError, match=said):
        rope_of({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **rope}}, "the target")


def test_frequencies_stay_float32_in_a_bfloat16_drafter() -> None:
    rotary = Rotary(eagle_config({"rope_type": "default", "rope_theta": 1e4}))
    before = rotary.angles.inv_freq.clone()
    assert torch.equal(rotary.bfloat16().angles.inv_freq, before)


@pytest.mark.parametrize(("taps", "layers"), [(None, [1, 2]), ((0, 3), [0, 3])])
def test_t11_the_written_config_counts_taps_as_each_engine_does(
    taps: tuple[int, ...] | None, layers: list[int]
) -> None:
    written = drafter_for(FrozenTarget(tiny_model()), taps=taps).servable_config()
    assert written["eagle_aux_hidden_state_layer_ids"] == layers, "vLLM: hidden_states[k], after layer k"
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in layers], "SGLang adds 1"


def test_default_taps_are_early_middle_and_late() -> None:
    layers = {"num_hidden_layers": 8}
    assert drafter_for(FrozenTarget(tiny_model(**layers))).taps == (2, 4, 5)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_start_from_the_target_copies_its_last_layer_norm_and_output_rows(family: str) -> None:
    target = FrozenTarget(tiny_model(family))
    with torch.no_grad():
        target.final_norm.weight.uniform_(0.5, 2)
    drafter = eagle3(target, KEPT)
    last, mine = target.layers[-1], drafter.midlayer
    assert torch.equal(drafter.lm_head.weight, target.head_rows(KEPT))
    for name in ("q_proj", "k_proj", "v_proj"):
        theirs = getattr(last.self_attn, name).weight
        weight = getattr(mine.self_attn, name).weight
        assert torch.equal(weight[:, 32:], theirs)
        assert not weight[:, :32].any(), "what it reads of the embedding begins at zero"
    assert torch.equal(mine.self_attn.o_proj.weight, last.self_attn.o_proj.weight)
    assert torch.equal(mine.mlp.down_proj.weight, last.mlp.down_proj.weight)
    one_plus = float(family == "gemma3")
    torch.testing.assert_close(drafter.norm.weight, target.final_norm.weight + one_plus)
    torch.testing.assert_close(mine.hidden_norm.weight, last.input_layernorm.weight + one_plus)
    assert not torch.equal(eagle3(target, KEPT, start="random").lm_head.weight, drafter.lm_head.weight)


def test_v02_d2t_holds_offsets_and_t2d_marks_the_kept_ids() -> None:
    drafter = drafter_for(FrozenTarget(tiny_model(vocab_size=12)), torch.tensor([2, 5, 6, 9]))
    assert drafter.d2t.tolist() == [2, 4, 4, 6]
    assert drafter.t2d.tolist() == [i in (2, 5, 6, 9) for i in range(12)]
    assert drafter.kept_ids().tolist() == [2, 5, 6, 9]  # type: ignore[union-attr]
    assert Words(12, drafter.kept_ids()).ids(torch.tensor([3, 0])).tolist() == [9, 2]
    law = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    assert Words(12, drafter.kept_ids()).widened(law).nonzero()[:, 1].tolist() == [2, 5, 6, 9]
    whole = drafter_for(FrozenTarget(tiny_model()))
    assert whole.kept_ids() is None
    assert "d2t" not in whole.state_dict()


def test_v03_a_reduced_vocabulary_without_its_ids_is_refused() -> None:
    target = FrozenTarget(tiny_model())
    with pytest.raises(SpecdraftError, match="not ascending ids"):
        Eagle3Drafter(Eagle3Config.like(target, draft_vocab_size=8, taps=[1])).attach(target)


@torch.no_grad()
def test_v12_a_target_that_has_gained_ids_is_warned_of_and_they_are_never_drafted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model()
    drafter = drafter_for(FrozenTarget(model))
    model = tiny_model()
    model.resize_token_embeddings(98, mean_resizing=False)
    grown = FrozenTarget(model)
    with caplog.at_level(logging.WARNING):
        drafter.attach(grown)
    assert "2 ids more" in caplog.text
    tokens = torch.tensor([[97, 5, 96]])
    memory = drafter.begin(grown.observe(tokens, torch.ones(1, 3).bool(), drafter.taps), torch.tensor([97]))
    laws = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(texts(1, 4))).laws
    assert laws is not None
    assert laws.shape == (1, 4, 98)
    assert not laws[..., 96:].any()


def test_a_drafter_is_not_attached_to_a_target_of_another_shape() -> None:
    drafter = drafter_for(FrozenTarget(tiny_model()))
    with pytest.raises(SpecdraftError, match="made for a target of width 32 with 96 ids"):
        drafter.attach(FrozenTarget(tiny_model(vocab_size=90)))


@pytest.mark.parametrize("family", ["mixtral", "gemma2", "qwen3"])
def test_t35_a_drafter_of_any_target_is_dense_keeps_its_key_heads_and_has_no_window(family: str) -> None:
    written = drafter_for(FrozenTarget(tiny_model(family))).servable_config()
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (4, 2, 8)
    assert not [key for key in written if "expert" in key or "window" in key or key == "layer_types"]
