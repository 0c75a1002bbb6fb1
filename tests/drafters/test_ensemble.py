"""Several drafters' drafts in one tree: the law is exact, and a second chance is worth something."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from drafting import eagle3
from enumeration import EXACT
from evaluation.markov import MarkovDrafter, law, markov_target
from joint_law import exact_target, joint
from models import tiny_model

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.drafters.base import Drafter
from specdraft.drafters.ensemble import EnsembleDrafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookahead import LookaheadDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation.stage import EnsembleSource, TrainedSource, training_of
from specdraft.provenance import Provenance
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

PROMPTS = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13, 11, 3]]


def draft_lm(target: FrozenTarget, seed: int = 1) -> Drafter:
    return cast(Drafter, LMDrafter.of(FrozenTarget(tiny_model(seed=seed)), target))


def run(target: FrozenTarget, drafter: Drafter | None, size: int = 3, warp: Warp = Warp()) -> list[list[int]]:  # noqa: B008
    decoding = generate(target, drafter, PROMPTS, warp=warp, max_new_tokens=12, batch_size=size)
    return [generation.tokens for generation in decoding.generations]


@pytest.mark.parametrize("shape", [Chain(3), DynamicTree(3, 2, 5)], ids=["chain", "tree"])
def test_e01_greedy_output_is_the_targets_in_any_batch(shape: Shape) -> None:
    """An LM, a trained head that reads the target's layers, and the target's own guesses with their probes."""
    target = FrozenTarget(tiny_model())
    plain = run(target, None)
    learned = [draft_lm(target), cast(Drafter, eagle3(target).eval())]
    ensemble = EnsembleDrafter([*learned, LookaheadDrafter(window=3, ngram=3)])
    ensemble.shape = shape
    for size in (1, 3):
        assert run(target, ensemble, size) == plain


def test_a_sampled_row_does_not_depend_on_its_neighbours() -> None:
    target = FrozenTarget(tiny_model())
    ensemble = EnsembleDrafter([draft_lm(target), LookupDrafter(), draft_lm(target, 2)])
    ensemble.shape = Chain(2)
    assert run(target, ensemble, 1, Warp(0.6)) == run(target, ensemble, 3, Warp(0.6))


@pytest.mark.parametrize("other", ["lm", "lookup", "lookahead"])
def test_the_joint_law_is_the_targets_to_rounding(other: str) -> None:
    target = exact_target(3)
    first, second = (cast(Drafter, LMDrafter.of(exact_target(3, seed=seed), target).double()) for seed in (1, 2))
    others: dict[str, Drafter] = {
        "lm": second,
        "lookup": LookupDrafter(),
        "lookahead": LookaheadDrafter(window=2, ngram=3, guesses=2),
    }
    ensemble = EnsembleDrafter([others[other], first])
    ensemble.shape = Chain(1 if other == "lm" else 2)
    assert joint(target, ensemble, 3).error < EXACT


def test_two_drafters_accept_more_often_than_each_alone() -> None:
    """Two that are wrong in different ways, on a target whose law is known."""
    p = law(0)
    target = markov_target(p)
    parts = [MarkovDrafter(0.5 * p + 0.5 * law(seed)) for seed in (1, 2)]

    def tau(drafter: Drafter) -> float:
        drafter.shape = Chain(2)
        prompts = [[index % 8] for index in range(64)]
        made = generate(target, drafter, prompts, warp=Warp(1.0), max_new_tokens=40, batch_size=64).generations
        rounds = [r for generation in made for r in generation.rounds]
        return 1 + sum(r.accepted for r in rounds) / len(rounds)

    alone = [tau(part) for part in parts]
    assert tau(EnsembleDrafter(parts)) > max(alone) + 0.1


def test_lookahead_among_others_learns_as_it_does_alone() -> None:
    """Its probes are found in the merged tree, and its pool fills."""
    p = torch.full((8, 8), 1e-6, dtype=torch.float64)
    p[torch.arange(8), (torch.arange(8) + 1) % 3] = 1
    target = markov_target(p / p.sum(-1, keepdim=True))
    ensemble = EnsembleDrafter([MarkovDrafter(law(1)), LookaheadDrafter(window=3, ngram=4)])
    ensemble.shape = Chain(3)
    [found] = generate(target, ensemble, [[5]], warp=Warp(1.0), max_new_tokens=40).generations
    assert all(r.accepted == 3 for r in found.rounds[5:-1])
    assert len(found.rounds) >= 8


def test_all_draft_one_shape_and_one_that_cannot_says_so() -> None:
    with pytest.raises(SpecdraftError, match="at least 2 drafters"):
        EnsembleDrafter([LookupDrafter()])
    target = FrozenTarget(tiny_model())
    ensemble = EnsembleDrafter([draft_lm(target), LookupDrafter()])
    ensemble.shape = DynamicTree()
    with pytest.raises(SpecdraftError, match="prompt lookup drafts chains"):
        run(target, ensemble)


def test_a_recipe_makes_it_and_names_what_its_parts_were_trained_on(tmp_path: Path) -> None:
    given: dict[str, Any] = {"kind": "ensemble", "drafters": [{"kind": "early_exit", "exit": 2}, {"kind": "lookahead"}]}
    source = EnsembleSource.model_validate(given)
    target = FrozenTarget(tiny_model())
    made = source.load(target)
    assert isinstance(made, EnsembleDrafter)
    made.shape = Chain(3)
    assert run(target, made) == run(target, None)
    assert source.name == "the target's first 2 layers + lookahead (window 7, 5-grams)"
    with pytest.raises(ValueError, match="at least 2"):
        EnsembleSource.model_validate({**given, "drafters": given["drafters"][:1]})
    answers = tmp_path / "answers.jsonl"
    answers.write_text("{}\n")
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, length in zip(folders, (384, 256), strict=True):
        folder.mkdir()
        made_by = Provenance.of(source, seed=0, target="t", fingerprint="f", data=[])
        made_by.recipe["data"] = {"max_length": length, "answers": [str(answers)]}
        made_by.write(folder)
    trained = EnsembleSource(kind="ensemble", drafters=tuple(TrainedSource(folder=folder) for folder in folders))
    assert training_of(trained) == (256, (str(answers),))
