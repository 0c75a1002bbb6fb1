"""Wrong rules, most of which some toolkit once had: the enumeration that `verify` passes catches them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from enumeration import (
    EXACT,
    Drafting,
    ScriptedDice,
    Trial,
    acceptance,
    constant,
    draft,
    drawn,
    enumerate_round,
    joint_error,
    law,
    outcomes,
)
from torch import Tensor

import specdraft.verify
from specdraft.tree import ALONE, NO_NODE, ROOT, DraftTree, merge
from specdraft.warping import Warp

P, Q = constant(0.4, 0.3, 0.2, 0.1), constant(0.2, 0.15, 0.05, 0.6)  # p exceeds q at three tokens
INDEPENDENT = [Trial(), Trial()]
WITHOUT_REPLACEMENT = [Trial(ROOT, 0), Trial(ROOT, 0)]


def error(drafting: Drafting, p: Tensor = P) -> float:
    return joint_error(p, enumerate_round(p, drafting), 1)


def reordered(shape: list[Trial], key: Callable[[DraftTree], Tensor]) -> Drafting:
    """Draw, then try in the order of falling `key` [batch, trials]."""

    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        tree = draft(shape, Q, dice, batch)
        order = key(tree).argsort(dim=1, descending=True, stable=True)
        return replace(tree, draws=tree.draws._replace(node=tree.draws.node.gather(1, order)))

    return drafting


def without(shape: list[Trial], doomed: Callable[[DraftTree], Tensor]) -> Drafting:
    """Draw, then drop the trials that are `doomed`, bool [batch, trials]."""

    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        tree = draft(shape, Q, dice, batch)
        return replace(tree, draws=tree.draws._replace(node=tree.draws.node.masked_fill(doomed(tree), NO_NODE)))

    return drafting


def confidence(tree: DraftTree) -> Tensor:
    return Q[0, tree.tokens]


def duplicate(tree: DraftTree) -> Tensor:
    """The second of two equal siblings."""
    same = tree.tokens[:, 0] == tree.tokens[:, 1]
    return torch.stack([torch.zeros_like(same), same], 1)


def worse(tree: DraftTree) -> Tensor:
    """The less confident of two siblings; the second of equal ones."""
    first_loses = confidence(tree)[:, 0] < confidence(tree)[:, 1]
    return torch.stack([first_loses, ~first_loses], 1)


def ungrouped(dice: ScriptedDice, batch: int) -> DraftTree:
    """Drawn without replacement, but every sibling claims the law of the first."""
    tree = draft(WITHOUT_REPLACEMENT, Q, dice, batch)
    return replace(tree, draws=tree.draws._replace(group=torch.full_like(tree.draws.group, ALONE)))


WRONG_DRAFTS = {
    "equal siblings share a trial": without(INDEPENDENT, duplicate),
    "the better of two is kept": without(INDEPENDENT, worse),
    "a chain drops its own unlikely token": without([Trial()], lambda tree: confidence(tree) < 0.2),
    "siblings are sorted by q": reordered(INDEPENDENT, confidence),
    "siblings without replacement are sorted by q": reordered(WITHOUT_REPLACEMENT, confidence),
    "q of later siblings is not updated": ungrouped,
}


@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_drafts_that_break_the_law_are_caught(name: str) -> None:
    assert error(WRONG_DRAFTS[name]) > 1e-3


@pytest.mark.parametrize("shape", [INDEPENDENT, WITHOUT_REPLACEMENT, [Trial()]])
def test_the_same_drafts_left_alone_are_exact(shape: list[Trial]) -> None:
    assert error(drawn(shape, Q)) < EXACT
    assert error(reordered(shape, lambda tree: torch.zeros_like(tree.tokens))) < EXACT
    assert error(without(shape, lambda tree: torch.zeros_like(tree.present))) < EXACT
    assert error(lambda dice, batch: merge([draft(shape, Q, dice, batch)])) < EXACT


def softmaxed(r: Tensor, q: Tensor) -> Tensor:
    return (r - q).clamp(min=0).softmax(-1)


def unnormalised(r: Tensor, q: Tensor) -> Tensor:
    return (r - q).clamp(min=0)


def forgetful(r: Tensor, q: Tensor) -> Tensor:
    """Every sibling is compared with p, as if those before it had not been rejected."""
    rest = (P[0] - q).clamp(min=0)
    return rest / rest.sum(-1, keepdim=True)


def unchanged(r: Tensor, q: Tensor) -> Tensor:
    return r


@pytest.mark.parametrize("shape", [INDEPENDENT, WITHOUT_REPLACEMENT])
@pytest.mark.parametrize("residual", [softmaxed, unnormalised, forgetful, unchanged])
def test_wrong_residuals_are_caught(
    residual: Callable[[Tensor, Tensor], Tensor], shape: list[Trial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specdraft.verify, "_residual", residual)
    assert error(drawn(shape, Q)) > 1e-3


def test_e04_a_softmaxed_residual_gives_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specdraft.verify, "_residual", softmaxed)
    found = enumerate_round(constant(0.5, 0.3, 0.2), drawn([Trial()], constant(0.2, 0.5, 0.3)))
    emitted = law([(probability, result.emitted[0]) for probability, result in found])
    assert [emitted[x] for x in range(3)] == pytest.approx([0.321, 0.390, 0.290], abs=5e-4)


def test_e05_q_before_warping_gives_another_law() -> None:
    raw = torch.tensor([[0.5, 0.3, 0.1, 0.1], [0.4, 0.4, 0.1, 0.1]], dtype=torch.float64)
    p, q = Warp(1.0, top_k=2)(raw.log())

    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        tree = draft([Trial()], q.expand(4, -1), dice, batch)
        return replace(tree, laws=raw[1].expand(batch, 2, -1))

    found = enumerate_round(p.expand(4, -1), drafting)
    emitted = law([(probability, result.emitted[0]) for probability, result in found])
    assert emitted == pytest.approx({0: 0.53125, 1: 0.46875})


def test_e08_a_chosen_token_with_a_soft_q_gives_another_law() -> None:
    p, q = constant(0.5, 0.3, 0.2), constant(0.2, 0.5, 0.3)

    def drafting(dice: ScriptedDice, batch: int) -> DraftTree:
        return DraftTree.chain(torch.ones(batch, 1, dtype=torch.int64), q[:1].expand(batch, 1, -1))

    found = enumerate_round(p, drafting)
    assert law([(probability, result.emitted[0]) for probability, result in found]) == pytest.approx({0: 0.4, 1: 0.6})
    assert acceptance(found) == pytest.approx(0.6)


def test_e34_typical_acceptance_gives_another_law() -> None:
    """Medusa's rule accepts a drafted token that p finds likely enough, whatever its q."""

    def run(dice: ScriptedDice, batch: int) -> list[int]:
        token = dice.draw(Q[:1].expand(batch, -1), range(batch))
        other = dice.draw(P[:1].expand(batch, -1), range(batch))
        return token.where(P[0, token] > 0.3, other).tolist()

    emitted = law(outcomes(run))
    assert max(abs(emitted.get(x, 0) - float(P[0, x])) for x in range(4)) > 1e-2
