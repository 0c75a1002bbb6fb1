"""The target drafts with its own layers: its session is left as it was, and what it drafts is what those layers say."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import ForcedDice, token_rows
from enumeration import EXACT
from joint_law import exact_target, joint
from models import tiny_model
from pydantic import ValidationError
from torch import Tensor
from transformers import PreTrainedModel

from specdraft.causal import Session
from specdraft.config import SpecdraftError
from specdraft.data.batches import collate
from specdraft.decoding import Generation, generate
from specdraft.drafters import load_drafter
from specdraft.drafters.base import Drafter, Evidence
from specdraft.drafters.early_exit import EarlyExitDrafter, EarlyExitRecipe, LayersDrafter, SearchRecipe, search
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation.stage import EarlyExitSource
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


def adapted(target: FrozenTarget, start: bool = False, **recipe: Any) -> EarlyExitDrafter:
    """An adapter far from where it starts, so that every part of it matters; `start`: as it starts."""
    drafter = EarlyExitDrafter.for_target(target, EarlyExitRecipe(**recipe), torch.zeros(target.vocab_size)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in drafter.parameters():
            if not start:
                weight += torch.randn_like(weight) * 0.3
    return drafter


def cut(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """The model with some of its layers, each of its own kind still, and no others."""
    body = model.base_model
    body.layers = torch.nn.ModuleList(body.layers[layer - 1] for layer in layers)
    body.config.num_hidden_layers = len(layers)
    if getattr(body.config, "layer_types", None):
        body.config.layer_types = [body.config.layer_types[layer - 1] for layer in layers]
    for place, layer in enumerate(body.layers):
        layer.self_attn.layer_idx = place
    return model


def whole(target: FrozenTarget, tokens: Tensor, taps: tuple[int, ...] = ()) -> Any:
    return target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), taps)


def texts(rows: int, length: int) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(3))


def forced_rounds(target: FrozenTarget, drafter: Any, want: Tensor) -> None:
    """Rows of different lengths, three tokens proposed, of which 0 to 3 are accepted, each row another way.

    want: [2, time, V], the law of token t + 1.
    """
    drafter.shape = Chain(3)
    tokens, rows, known = texts(2, 22), torch.arange(2), torch.tensor([7, 3])
    session = target.session(drafter.taps, 2)
    memory = drafter.begin(session.read(tokens[:, :7], torch.arange(7) < known[:, None]), tokens[rows, known], session)
    for accepted in ([0, 3], [3, 0], [2, 1], [1, 2]):
        ahead = tokens[rows[:, None], known[:, None] + 1 + torch.arange(3)]
        tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(ahead))
        for step in range(3):
            torch.testing.assert_close(tree.laws[:, step], want[rows, known + step], rtol=0, atol=1e-5)
        assert session.cache.lengths.tolist() == known.tolist()
        session.extend(tokens[rows, known], tree)
        count = torch.tensor(accepted)
        path = torch.where(torch.arange(3) < count[:, None], torch.arange(3), -1)
        known = known + count + 1
        verdict = Verdict(path, count, tokens[rows, known], torch.ones(2, 3).bool(), torch.ones(2, 3))
        memory = drafter.remember(memory, verdict, session.commit(verdict))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
@torch.no_grad()
def test_t07_e19_an_adapters_training_laws_are_its_decoding_laws(family: str) -> None:
    target = FrozenTarget(tiny_model(family))
    drafter = adapted(target, exit=2, depth=2)
    tokens = texts(2, 22)
    [prediction] = drafter.predict(tokens, whole(target, tokens, drafter.taps))
    assert (prediction.depth, prediction.shift, drafter.taps) == (1, 0, (2,))
    forced_rounds(target, drafter, prediction.head(prediction.hidden).softmax(-1))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_e32_an_exit_is_a_model_cut_to_its_first_layers(family: str) -> None:
    changes = {"num_hidden_layers": 6, **({"layer_types": GEMMA_LAYERS} if family == "gemma3" else {})}
    target = FrozenTarget(tiny_model(family, **changes))
    want = cut(tiny_model(family, **changes), [1, 2])(input_ids=texts(2, 22), use_cache=False).logits.softmax(-1)
    forced_rounds(target, LayersDrafter(target, [1, 2]), want)


GEMMA_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"] * 2


@torch.no_grad()
def test_e32_skipped_layers_leave_the_others_their_masks_and_places() -> None:
    """A model tells the kind of a layer by its place: the second of those that are kept is not the second layer."""
    changes = {"num_hidden_layers": 6, "layer_types": GEMMA_LAYERS}
    target, tokens = FrozenTarget(tiny_model("gemma3", **changes)), texts(1, 22)
    with target.only({2, 3, 6}):
        got = target.head(whole(target, tokens).hidden)
    want = cut(tiny_model("gemma3", **changes), [2, 3, 6])(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def state(session: Session) -> list[Any]:
    cache = session.cache
    buffers = [(layer.keys[:, :, : cache.width].clone(), layer.values[:, :, : cache.width]) for layer in cache.layers]
    return [cache.width, cache.lengths.tolist(), session._scratch, [layer.filled for layer in cache.layers], buffers]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("shape", [Chain(40), DynamicTree(3, 3, 7)], ids=["chain", "tree"])
@pytest.mark.parametrize("fails", [False, True], ids=["well", "failing"])
@torch.no_grad()
def test_e32_the_targets_session_is_as_if_it_had_never_drafted(shape: Shape, fails: bool) -> None:
    """Bit for bit, before and after the next pass and its commit; also if something fails in the middle of a draft."""
    target = FrozenTarget(tiny_model("gemma2"))
    before = list(target.layers)
    tokens, mask = texts(2, 9), torch.arange(9) < torch.tensor([[9], [5]])
    drafted, untouched = target.session((), 2), target.session((), 2)
    seen = drafted.read(tokens, mask)
    untouched.read(tokens, mask)
    drafter = LayersDrafter(target, [1, 4])
    drafter.shape = shape
    memory = drafter.begin(seen, tokens[:, 0], drafted)
    if fails:
        handle = target.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drafter.propose(memory, warp=Warp(), dice=ForcedDice(tokens))
        handle.remove()
    else:
        drafter.propose(memory, warp=Warp(), dice=ForcedDice(tokens))
    assert list(target.layers) == before
    assert same(state(drafted), state(untouched))
    tree, count = DraftTree.chain(tokens[:, :3]), torch.tensor([1, 3])
    path = torch.where(torch.arange(3) < count[:, None], torch.arange(3), -1)
    verdict = Verdict(path, count, tokens[:, 4], torch.ones(2, 3).bool(), torch.ones(2, 3))
    for session in (drafted, untouched):
        session.extend(tokens[:, 1], tree)
    assert same(drafted._extended, untouched._extended)
    assert same(drafted.commit(verdict), untouched.commit(verdict))
    assert same(state(drafted), state(untouched))


PROMPTS = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13]]


def decoded(target: FrozenTarget, drafter: Drafter | None, batch: int = 1) -> list[Generation]:
    return generate(target, drafter, PROMPTS, warp=Warp(), max_new_tokens=10, batch_size=batch).generations


@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(3, 3, 7)], ids=["chain", "tree"])
def test_e01_e24_e25_e32_greedy_output_is_the_targets(shape: Shape) -> None:
    target = FrozenTarget(tiny_model("gemma3"))
    plain = [generation.tokens for generation in decoded(target, None)]
    drafters: list[Any] = [LayersDrafter.without(target, [2]), LayersDrafter(target, [1]), adapted(target, exit=3)]
    for drafter in drafters:
        drafter.shape = shape
        alone = decoded(target, drafter)
        assert [generation.tokens for generation in alone] == plain
        assert decoded(target, drafter, 3) == alone


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_with_all_its_layers_the_target_accepts_every_draft(family: str) -> None:
    model = tiny_model(family)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    target = FrozenTarget(model)
    last: list[Any] = [LayersDrafter(target, range(1, 5)), LayersDrafter.without(target, [])]
    for drafter in [*last, adapted(target, start=True, exit=4)]:
        rounds = [turn for generation in decoded(target, drafter, 3) for turn in generation.rounds]
        assert all(turn.accepted == turn.offered == 4 for turn in rounds)


@pytest.mark.parametrize("shape", [Chain(2), DynamicTree(2, 2, 4)], ids=["chain", "tree"])
def test_the_joint_law_of_three_tokens_is_the_targets_to_rounding(shape: Shape) -> None:
    target = exact_target(4)
    drafter = LayersDrafter(target, [1])
    drafter.shape = shape
    assert joint(target, drafter, 3, [1, 2, 3, 1, 2]).error < EXACT


@torch.no_grad()
def test_an_adapter_begins_as_the_plain_exit_and_by_default_after_a_third() -> None:
    target = FrozenTarget(tiny_model(num_hidden_layers=6))
    drafter, tokens = adapted(target, start=True), texts(1, 9)
    assert (drafter.config.exit, drafter.config.width, len(drafter.blocks)) == (2, 16, 1)
    [prediction] = drafter.predict(tokens, whole(target, tokens, drafter.taps))
    with target.only({1, 2}):
        assert torch.equal(prediction.hidden, whole(target, tokens).hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_t15_only_the_adapter_learns_also_for_a_half_precision_target(dtype: torch.dtype) -> None:
    target = FrozenTarget(tiny_model("gemma2").to(dtype))
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    drafter = adapted(target, exit=2).train()
    batch = collate([token_rows([12, 8])[row] for row in range(2)])
    seen = target.observe(batch["input_ids"], batch["attention_mask"].bool(), drafter.taps)
    optimiser = torch.optim.AdamW(drafter.parameters(), 1e-2)
    losses = []
    for _ in range(4):
        loss = drafter(batch["input_ids"], batch["labels"], Evidence(seen, target)).loss
        loss.backward()
        assert {
            name for name, weight in drafter.named_parameters() if weight.grad is not None and weight.grad.any()
        } == {
            "blocks.0.norm.weight",
            "blocks.0.down.weight",
            "blocks.0.up.weight",
        }
        optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert not any(weight.requires_grad or weight.grad is not None for weight in target.model.parameters())
    assert not target.model.training
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())


def test_x01_x02_it_comes_back_bitwise_and_only_to_a_target_of_as_many_layers(tmp_path: Path) -> None:
    target, tokens = FrozenTarget(tiny_model()), texts(1, 9)
    saved = adapted(target, exit=3, width=5, depth=2)
    saved.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, EarlyExitDrafter)
    loaded.attach(target)
    assert loaded.servable_config() == saved.servable_config()
    assert loaded.taps == (3,)
    mine, theirs = saved.state_dict(), loaded.state_dict()
    assert list(mine) == list(theirs)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    seen = whole(target, tokens, (3,))
    with torch.no_grad():
        assert torch.equal(saved.predict(tokens, seen)[0].hidden, loaded.predict(tokens, seen)[0].hidden)
    with pytest.raises(SpecdraftError, match=r"a target of 4 layers after layer 3.* has 2 layers"):
        loaded.attach(FrozenTarget(tiny_model(num_hidden_layers=2)))


def idle(target: FrozenTarget, layers: Sequence[int]) -> FrozenTarget:
    """Layers that add nothing to what they are given."""
    with torch.no_grad():
        for layer in layers:
            target.layers[layer - 1].self_attn.o_proj.weight.zero_()
            target.layers[layer - 1].mlp.down_proj.weight.zero_()
    return FrozenTarget(target.model)


def unpacked(**changes: Any) -> FrozenTarget:
    """In float64, where no weight is packed, so that it can be written to."""
    return FrozenTarget(tiny_model(**changes).double())


def test_a_search_finds_the_layers_that_do_nothing() -> None:
    target, rows = idle(unpacked(num_hidden_layers=6), (2, 5)), token_rows([20, 12, 16])
    asked, steps = SearchRecipe(answers=("a",), trials=10, rows=2), []
    found = search(target, rows, asked, lambda *step: steps.append(step))
    assert found.layers == (1, 3, 4, 6)
    assert found.agreement == 1
    assert found.speed > 1
    assert steps == [(done, 21) for done in range(1, 22)]
    four = search(target, rows, asked.model_copy(update={"keep": 4, "trials": 0}))
    assert four.layers == found.layers
    with pytest.raises(SpecdraftError, match=r"search.keep is 6: in-memory has 6 layers, so at most 5"):
        search(target, rows, asked.model_copy(update={"keep": 6}))


def test_a_search_is_decided_by_its_seed_and_judges_drafts_first_step() -> None:
    """Of a set that leaves layers out in the middle, behind the whole target's keys and values."""
    target, rows = unpacked(num_hidden_layers=6), token_rows([20, 12])
    asked = SearchRecipe(answers=("a",), keep=3, trials=12, seed=1)
    found = search(target, rows, asked)
    assert search(target, rows, asked) == found
    assert len(found.layers) == 3
    assert found.agreement >= search(target, rows, asked.model_copy(update={"trials": 0})).agreement
    drafter, hits = LayersDrafter(target, found.layers), []
    drafter.shape = Chain(1)
    for row in range(2):
        tokens = rows[row]["input_ids"][None]
        want = target.head(whole(target, tokens).hidden)[0].argmax(-1)
        for place in range(2, tokens.shape[1] - 1):  # token_rows supervises what follows the third token
            session = target.session((), 1)
            seen = session.read(tokens[:, :place], torch.ones(1, place).bool())
            tree = drafter.propose(drafter.begin(seen, tokens[:, place], session), warp=Warp(), dice=ForcedDice(tokens))
            hits.append(int(tree.tokens[0, 0]) == int(want[place]))
    assert found.agreement == sum(hits) / len(hits)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 0}, "nothing to train"),
        ({"skip": [3]}, "keys and values of the whole target"),
        ({"exit": 0}, "greater than or equal to 1"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        EarlyExitRecipe.model_validate(settings)


def test_layers_that_are_not_there_are_refused() -> None:
    target = FrozenTarget(tiny_model())
    for make in (
        lambda: LayersDrafter(target, range(1, 6)),
        lambda: LayersDrafter.without(target, [0]),
        lambda: LayersDrafter.without(target, [1, 2, 3, 4]),
        lambda: adapted(target, exit=5),
    ):
        with pytest.raises(SpecdraftError, match="at least one, and they are counted from 1 to 4"):
            make()
    with pytest.raises(SpecdraftError, match="with the target's session"):
        LayersDrafter(target, [1]).begin(whole(target, texts(1, 3)), torch.tensor([3]))


@pytest.mark.parametrize("given", [{}, {"exit": 1, "skip": [2]}])
def test_a_source_says_in_one_way_which_layers_draft(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=f"one of exit, skip and search.*; {len(given)} of them"):
        EarlyExitSource.model_validate({"kind": "early_exit", **given})


def test_sources_load() -> None:
    target = FrozenTarget(tiny_model())
    first = EarlyExitSource.model_validate({"kind": "early_exit", "exit": 2}).load(target)
    others = EarlyExitSource.model_validate({"kind": "early_exit", "skip": [3, 2]})
    assert isinstance(first, LayersDrafter)
    assert first.layers == (1, 2)
    assert others.load(target).layers == (1, 4)  # type: ignore[attr-defined]
    assert others.name == "the target without its layers 2, 3"
