"""A tree's forward equals its paths' forwards, for several families, rows of different lengths, commits included."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from models import FAMILIES, tiny_model

from specdraft.config import SpecdraftError
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.tree import DraftTree
from specdraft.verify import Verdict

LENGTHS = (9, 14, 5)


def prompts(vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, vocab, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def random_tree(vocab: int, seed: int) -> DraftTree:
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocab, (len(LENGTHS), 6), generator=draw)
    parents = torch.tensor([[-1, -1, 0, 0, 2, 4], [-1, 0, 1, 2, 3, 4], [-1, -1, -1, 2, 2, 3]])
    present = torch.ones_like(tokens, dtype=torch.bool)
    present[2, 4:] = False
    return DraftTree.chosen(tokens, parents, present)


def ancestors(tree: DraftTree, row: int, node: int) -> list[int]:
    path = []
    while node != -1:
        path.insert(0, node)
        node = int(tree.parents[row, node])
    return path


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_trees_forward_is_its_paths_before_and_after_commits(family: str, attention: str) -> None:
    if family == "gemma2" and attention == "sdpa":
        pytest.skip("transformers refuses SDPA for Gemma-2")
    model = tiny_model(family, attention)
    if family not in ("mixtral", "qwen3_moe"):  # experts have no float64 product
        model = model.double()  # norms and eager softmax are float32 all the same
    target = FrozenTarget(model)
    taps = (0, 2, target.num_layers)
    session = target.session(taps, len(LENGTHS))
    tokens, mask = prompts(target.vocab_size)
    seen = session.read(tokens, mask)
    texts = [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]
    roots = target.head(seen.hidden[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1]).argmax(-1)
    paths = ([[0, 2, 4], [], [2, 3]], [[1], [0, 1, 2, 3, 4, 5], []], [[0, 3], [0], [1]])
    for turn, accepted in enumerate(paths):  # far enough to wrap the sliding windows of 8
        tree = random_tree(target.vocab_size, turn)
        seen = session.extend(roots, tree)
        got = target.head(seen.hidden)
        for row, text in enumerate(texts):
            for node in range(-1, int(tree.present[row].sum())):
                path = ancestors(tree, row, node)
                whole = torch.tensor([[*text, int(roots[row]), *tree.tokens[row, path].tolist()]])
                with torch.no_grad():
                    want = model(input_ids=whole, use_cache=False).logits[0, -1]
                torch.testing.assert_close(got[row, node + 1], want, rtol=1e-6, atol=1e-5)
                alone = target.observe(whole, torch.ones_like(whole, dtype=torch.bool), taps)
                torch.testing.assert_close(seen.taps[row, node + 1], alone.taps[0, -1], rtol=1e-6, atol=1e-5)
        depth = max(map(len, accepted))
        path = torch.tensor([[*nodes, *[-1] * (depth - len(nodes))] for nodes in accepted])
        count = torch.tensor([len(nodes) for nodes in accepted])
        empty = torch.zeros(len(LENGTHS), depth)
        new = torch.randint(0, target.vocab_size, (len(LENGTHS),), generator=torch.Generator().manual_seed(turn))
        kept = session.commit(Verdict(path, count, new, empty.bool(), empty))
        for row, nodes in enumerate(accepted):
            added = [int(roots[row]), *tree.tokens[row, nodes].tolist()]
            assert kept.tokens[row, : len(added)].tolist() == added
            assert kept.mask[row].tolist() == [place < len(added) for place in range(kept.mask.shape[1])]
            places = [len(texts[row]) + place for place in range(len(added))]
            assert kept.positions[row, : len(added)].tolist() == places
            texts[row] += added
        assert session.cache.lengths.tolist() == [len(text) for text in texts]
        roots = new


def test_rows_can_be_dropped() -> None:
    target = FrozenTarget(tiny_model("llama"))
    tokens, mask = prompts(target.vocab_size)
    whole = target.session((), 3)
    whole.read(tokens, mask)
    whole.keep([2, 0])
    alone = target.session((), 2)
    alone.read(tokens[[2, 0]], mask[[2, 0]])
    tree, roots = DraftTree.chain(tokens[:2, :3]), torch.tensor([5, 6])
    torch.testing.assert_close(whole.extend(roots, tree).hidden, alone.extend(roots, tree).hidden, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_t13_head_of_the_observed_hidden_is_the_models_logits(family: str) -> None:
    model = tiny_model(family)
    target = FrozenTarget(model)
    with torch.no_grad():
        torch.nn.init.constant_(target.final_norm.weight, 3.0)
        tokens, mask = prompts(target.vocab_size)
        want = model(input_ids=tokens, attention_mask=mask.long()).logits
    hidden = target.observe(tokens, mask, ()).hidden
    torch.testing.assert_close(target.head(hidden)[mask], want[mask], rtol=1e-5, atol=1e-5)
    ids = torch.tensor([3, 7, 50])
    torch.testing.assert_close(target.restricted_head(hidden, ids), target.head(hidden)[..., ids], rtol=1e-5, atol=1e-5)


def test_t11_tap_k_is_the_output_of_layer_k_and_0_the_embedding() -> None:
    model = tiny_model("llama")
    target = FrozenTarget(model)
    tokens, mask = prompts(target.vocab_size)
    with torch.no_grad():
        states = model(input_ids=tokens, output_hidden_states=True).hidden_states
    seen = target.observe(tokens, mask, (0, 3, 1))
    want = torch.cat([states[0], states[3], states[1]], -1)
    torch.testing.assert_close(seen.taps, want, rtol=1e-5, atol=1e-6)
    session = target.session((0, 3, 1), len(LENGTHS))
    torch.testing.assert_close(session.read(tokens, mask).taps, seen.taps)
    with pytest.raises(SpecdraftError, match="tap 9 is not a layer"):
        target.observe(tokens, mask, (9,))


def test_t15_the_target_is_frozen_and_in_eval_mode() -> None:
    model = tiny_model("llama").train()
    target = FrozenTarget(model)
    assert not any(weight.requires_grad for weight in model.parameters())
    assert not any(module.training for module in model.modules())
    assert not target.observe(*prompts(target.vocab_size), (1,)).hidden.requires_grad


def test_an_architecture_that_cannot_be_rolled_back_is_refused_with_the_reason() -> None:
    config = transformers.FalconMambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(SpecdraftError, match="cannot be"):
        FrozenTarget(transformers.FalconMambaForCausalLM(config))
    config = transformers.Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    with pytest.raises(SpecdraftError, match="linear_attention"):
        FrozenTarget(transformers.Qwen3NextForCausalLM(config))


def test_t34_a_vision_language_target_with_positions_in_three_parts_is_refused(tmp_path: Path) -> None:
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    with pytest.raises(SpecdraftError, match="decoder-only causal LM"):
        FrozenTarget(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(SpecdraftError, match=r"Qwen2VLConfig.*AutoModelForCausalLM\.$"):
        FrozenTarget.load(TargetRecipe(name=str(tmp_path)))


def test_the_fingerprint_tells_weights_apart_and_not_their_dtype() -> None:
    model = tiny_model("llama").bfloat16()
    one = FrozenTarget(copy.deepcopy(model)).fingerprint
    assert FrozenTarget(model.float()).fingerprint == one
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] += 1
    assert FrozenTarget(model).fingerprint != one
