"""Medusa: its heads' labels and gradients, its layout, and the static tree that is made from their accuracies."""

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import ForcedDice, eagle3, token_rows
from models import tiny_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.drafters import load_drafter
from specdraft.drafters.base import Evidence, TrainableDrafter
from specdraft.drafters.medusa import MedusaDrafter, MedusaRecipe
from specdraft.drafters.proposals import best_paths
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.evaluation.calibrate import rank_accuracies
from specdraft.reduction import IGNORED
from specdraft.target import FrozenTarget
from specdraft.verify import Verdict
from specdraft.warping import Warp

H, V = 32, 96
STATIC = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))


def medusa(target: FrozenTarget, shaken: bool = True, **recipe: Any) -> MedusaDrafter:
    """`shaken`: far from the start, so that every part of it matters."""
    drafter = MedusaDrafter.for_target(target, MedusaRecipe(**recipe), torch.zeros(target.vocab_size)).eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += shaken * 0.3 * torch.randn_like(weight)
    return drafter


def everything(tokens: Tensor) -> Tensor:
    return torch.ones_like(tokens, dtype=torch.bool)


@pytest.mark.parametrize("head", ["own", "target"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_fresh_heads_say_what_the_target_says_of_the_next_token(head: str, family: str) -> None:
    target = FrozenTarget(tiny_model(family))
    drafter = medusa(target, shaken=False, head=head, layers=2)
    tokens = torch.randint(0, V, (1, 6))
    seen = target.observe(tokens, everything(tokens), ())
    predictions = drafter.predict(tokens, seen)
    assert [(p.depth, p.shift) for p in predictions] == [(d, d) for d in (1, 2, 3, 4)]
    for prediction in predictions:
        assert torch.equal(prediction.hidden, seen.hidden)
        want = target.head(seen.hidden)
        best = want.argmax(-1)
        assert torch.equal(prediction.head(prediction.hidden).argmax(-1), best)
        if head == "target" or family == "llama":
            torch.testing.assert_close(prediction.head(prediction.hidden), want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_t07_training_laws_are_decoding_laws_with_heads_of_its_own_and_after_rounds() -> None:
    """Rows of different lengths, accepting 0 to 4 of four tokens; the conformance suite says it of the shared head."""
    target = FrozenTarget(tiny_model())
    drafter = medusa(target, head="own", layers=2)
    drafter.shape = Chain(4)
    tokens, rows, known = torch.randint(0, V, (2, 24)), torch.arange(2), torch.tensor([7, 3])
    predictions = drafter.predict(tokens, target.observe(tokens, everything(tokens), ()))
    session = target.session((), 2)
    memory = drafter.begin(session.read(tokens[:, :7], torch.arange(7) < known[:, None]), tokens[rows, known])
    for accepted in ([0, 4], [3, 0], [4, 1]):
        ahead = tokens[rows[:, None], known[:, None] + 1 + torch.arange(4)]
        tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(ahead))
        assert tree.laws is not None
        for depth, (_, _, hidden, head, _) in enumerate(predictions):
            want = head(hidden[rows, known - 1]).softmax(-1)
            torch.testing.assert_close(tree.laws[:, depth], want, rtol=0, atol=1e-5)
        session.extend(tokens[rows, known], tree)
        count = torch.tensor(accepted)
        path = torch.where(torch.arange(4) < count[:, None], torch.arange(4), -1)
        known = known + count + 1
        verdict = Verdict(path, count, tokens[rows, known], torch.ones(2, 4).bool(), torch.ones(2, 4))
        memory = drafter.remember(memory, verdict, session.commit(verdict))
    memory = drafter.keep(memory, [1])
    tree = drafter.propose(memory, warp=Warp(1.0), dice=ForcedDice(tokens[1:, known[1] + 1 :]))
    assert tree.laws is not None
    _, _, hidden, head, _ = predictions[3]
    torch.testing.assert_close(tree.laws[0, 3], head(hidden[1, known[1] - 1]).softmax(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", [Chain(4), DynamicTree(5, 3, 9), STATIC], ids=["chain", "dynamic", "static"])
@pytest.mark.parametrize("head", ["own", "target"])
def test_e01_greedy_answers_are_the_targets(head: str, shape: Shape) -> None:
    target = FrozenTarget(tiny_model())
    drafter = medusa(target, head=head)
    drafter.shape = shape
    prompts = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13]]
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 8}
    plain = [g.tokens for g in generate(target, None, prompts, **settings).generations]
    for size in (1, 3):
        run = generate(target, drafter, prompts, batch_size=size, **settings)
        assert [g.tokens for g in run.generations] == plain


@torch.no_grad()
def test_a_static_trees_nodes_are_the_likeliest_of_their_depths_head() -> None:
    target = FrozenTarget(tiny_model())
    drafter = medusa(target)
    drafter.shape = STATIC
    tokens = torch.randint(0, V, (2, 5))
    seen = target.observe(tokens, everything(tokens), ())
    tree = drafter.propose(drafter.begin(seen, tokens[:, 0]), warp=Warp(1.0), dice=ForcedDice(tokens))
    ranked = [p.head(p.hidden[:, -1]).argsort(-1, descending=True) for p in drafter.predict(tokens, seen)]
    for node, path in enumerate(STATIC.paths):
        assert torch.equal(tree.tokens[:, node], ranked[len(path) - 1][:, path[-1]])
    assert tree.parents[0].tolist() == [-1, -1, -1, 0, 0, 1, 3, 6]


def test_a_draft_deeper_than_there_are_heads_is_refused_but_a_dynamic_tree_only_ends_there() -> None:
    target = FrozenTarget(tiny_model())
    drafter = medusa(target, heads=2)
    tokens = torch.tensor([[3, 4]])
    memory = drafter.begin(target.observe(tokens, everything(tokens), ()), torch.tensor([5]))
    for shape in (Chain(3), STATIC):
        drafter.shape = shape
        with pytest.raises(SpecdraftError, match=r"2 heads cannot draft [34] tokens deep"):
            drafter.propose(memory, warp=Warp(), dice=ForcedDice(tokens))
    drafter.shape = DynamicTree(5, 3, 12)
    assert drafter.propose(memory, warp=Warp(), dice=ForcedDice(tokens)).depth == 2


def test_d02_labels_of_head_k_stand_k_further_on_and_end_with_the_answer() -> None:
    """[P1, P2, P3, R1 ... R5]: head d at t learns the law of token t + d + 1, where all from t + 1 on are answer."""
    target = FrozenTarget(tiny_model())
    drafter = medusa(target)
    tokens = torch.randint(3, V, (1, 8))
    labels = tokens.masked_fill(torch.arange(8) < 3, IGNORED)
    seen = target.observe(tokens, everything(tokens), ())
    output = drafter(tokens, labels, Evidence(seen, target))
    assert output.counts.tolist() == [4, 3, 2, 1]
    log_p = target.head(seen.hidden)[0].log_softmax(-1)
    with torch.no_grad():
        for depth, prediction in enumerate(drafter.predict(tokens, seen), 1):
            log_q = prediction.head(prediction.hidden[0]).log_softmax(-1)
            pairs = [(t, t + depth) for t in range(2, 7 - depth)]
            want = sum((log_p[i].exp() * (log_p[i] - log_q[t])).sum() for t, i in pairs)
            torch.testing.assert_close(output.losses[depth - 1], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["own", "target"])
def test_t05_every_head_has_a_gradient_and_changes_from_the_first_step_on(head: str) -> None:
    target = FrozenTarget(tiny_model())
    drafter = medusa(target, shaken=False, head=head).train()
    tokens = torch.randint(3, V, (2, 12))
    seen = target.observe(tokens, everything(tokens), ())
    output = drafter(tokens, tokens, Evidence(seen, target))
    assert len(output.losses) == 4
    output.loss.backward()
    before = [weight.clone() for weight in drafter.parameters()]
    assert len(before) == 4 if head == "target" else 8
    torch.optim.AdamW(drafter.parameters(), 1e-2).step()
    for weight, old in zip(drafter.parameters(), before, strict=True):
        assert weight.grad is not None
        assert weight.grad.norm() > 0
        assert not torch.equal(weight, old)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", ["own", "target"])
def test_x01_x10_x11_the_checkpoint_is_vllms_layout_and_comes_back_bitwise(
    head: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model())
    drafter = medusa(target, head=head, heads=3, layers=2).to(dtype=dtype)
    drafter.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    golden = {f"blocks.{i}.layers.{j}.weight": (H, H) for i, j in product(range(3), range(2))}
    golden |= {"lm_head.weight": (V, H)} if head == "target" else {f"lm_heads.{i}.weight": (V, H) for i in range(3)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == golden
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    if head == "target":
        assert torch.equal(tensors["lm_head.weight"], target.head_rows(torch.arange(V)).to(dtype))
        assert "lm_head.weight" not in drafter.state_dict(), "the target's is not the drafter's to hold"
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": False,
        "original_lm_head": head == "target",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "specdraft": {"drafter": "medusa", "trained_length": None},
    }
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, MedusaDrafter)
    assert loaded.servable_config() == drafter.servable_config()
    mine, theirs = drafter.state_dict(), loaded.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine)


def test_x02_without_the_targets_head_nothing_is_written_or_read(tmp_path: Path) -> None:
    medusa(FrozenTarget(tiny_model())).save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    with pytest.raises(SpecdraftError, match="call attach"):
        loaded.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SpecdraftError, match=r"lm_head\.weight is missing"):
        load_drafter(tmp_path)


def value(paths: Any, accuracies: list[list[float]]) -> float:
    """Accepted tokens a round: the sum over nodes of the product of the accuracies along their paths."""
    chances = []
    for path in paths:
        chance = 1.0
        for depth, rank in enumerate(path):
            chance *= accuracies[depth][rank]
        chances.append(chance)
    return sum(chances)


@pytest.mark.parametrize("nodes", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "accuracies",
    [
        [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.3, 0.3, 0.1]],
        [[0.3, 0.1, 0.29], [0.9, 0.0, 0.05]],  # by chance a later rank is right more often
    ],
)
def test_the_static_tree_is_the_best_of_all(nodes: int, accuracies: list[list[float]]) -> None:
    every = [path for depth in range(1, len(accuracies) + 1) for path in product(range(3), repeat=depth)]
    possible = (
        [paths for paths in combinations(every, nodes) if all(len(path) == 1 or path[:-1] in paths for path in paths)]
        if nodes < 5
        else []
    )
    best = max((value(paths, accuracies) for paths in possible), default=0.0)
    found = best_paths(accuracies, nodes)
    assert found.nodes == nodes
    assert value(found.paths, accuracies) >= best - 1e-12


KEPT = torch.arange(2, V, 3)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle, reduced"])
@torch.no_grad()
def test_calibration_counts_where_the_targets_greedy_token_stands_among_the_guesses(kind: str) -> None:
    target = FrozenTarget(tiny_model())
    drafter: TrainableDrafter
    drafter = (
        medusa(target) if kind == "medusa" else eagle3(target, KEPT if "reduced" in kind else None, unroll=2).eval()
    )
    rows = token_rows((14, 9, 11, 6, 12))
    found = rank_accuracies(drafter, target, rows, 40, chunk=5)
    want: list[list[float]] = []
    counts: list[int] = []
    for row in range(len(rows)):
        tokens = rows[row]["input_ids"][None]
        seen = target.observe(tokens, everything(tokens), drafter.taps)
        greedy = target.head(seen.hidden)[0].argmax(-1)
        for depth, prediction in enumerate(drafter.predict(tokens, seen), 1):
            want, counts = (want, counts) if depth <= len(want) else ([*want, [0.0] * 40], [*counts, 0])
            for t in range(2, tokens.shape[1] - depth - 1):
                counts[depth - 1] += 1
                order = prediction.head(prediction.hidden[0, t]).argsort(descending=True)
                ids = (order if prediction.kept_ids is None else prediction.kept_ids[order]).tolist()[:40]
                if int(greedy[t + depth]) in ids:
                    want[depth - 1][ids.index(int(greedy[t + depth]))] += 1
    torch.testing.assert_close(
        torch.tensor(found),
        torch.tensor([[hits / count for hits in row] for row, count in zip(want, counts, strict=True)]),
    )
    with pytest.raises(SpecdraftError, match="too short"):
        rank_accuracies(drafter, target, token_rows((5, 5)), 4)
