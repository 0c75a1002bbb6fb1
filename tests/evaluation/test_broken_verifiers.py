"""Deliberately broken verifiers are caught by the evaluator's own verdict, within 2,000 tokens.

The target is a Markov chain of 8 tokens, the drafter a mixture of its law with another: about three in four of a
chain's drafts are accepted, as of a middling drafter that a user trained. WEAK is of another domain (three in five);
UNSURE, of whom E-03 tells, gives a fifth to the target's second best token and less to every other.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from evaluation.broken import (
    ShapedDrafter,
    SiblingsDrafter,
    best_kept,
    merged,
    sorted_by_value,
    spoiled,
    ungrouped,
    unlikely_dropped,
)
from evaluation.markov import MarkovDrafter, law, markov_target
from test_verify_wrong_rules import softmaxed, unchanged, unnormalised
from torch import Tensor

import specdraft.verify
from specdraft import decoding
from specdraft.decoding import generate
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation import EvalRecipe, Prompt, evaluate
from specdraft.evaluation.lossless import FAILED_BELOW, check_sampled
from specdraft.evaluation.report import Losslessness
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict, verify
from specdraft.warping import Warp

P, Q = law(0), 0.5 * law(0) + 0.5 * law(1)
WEAK = 0.3 * law(0) + 0.7 * law(1)
UNSURE = torch.full_like(P, 0.8 / 7).scatter(1, P.topk(2).indices[:, 1:], 0.2)
PROMPTS = [Prompt([i % 8, (3 * i) % 8], f"prompt {i}") for i in range(40)]
CHAIN, TREE = {"kind": "chain", "gamma": 3}, {"kind": "tree", "depth": 3, "width": 3, "nodes": 8}


def verdict(drafter: MarkovDrafter, target: FrozenTarget | None = None, **changes: object) -> Losslessness:
    """Of 40 answers of 40 tokens."""
    given = {
        "systems": [CHAIN],
        "temperature": 1.0,
        "max_new_tokens": 40,
        "batch_size": 40,
        "bootstrap_samples": 100,
        "compare_with_plain": False,
        "seed": 6,
        **changes,
    }
    target = markov_target(P) if target is None else target
    [system] = evaluate(target, drafter, EvalRecipe.model_validate(given), prompts=PROMPTS).systems
    assert system.losslessness.compared <= 2000
    return system.losslessness


DRAFTERS: dict[str, Callable[[], MarkovDrafter]] = {
    "chain": lambda: MarkovDrafter(Q),
    "independent siblings": lambda: SiblingsDrafter(Q),
    "siblings without replacement": lambda: SiblingsDrafter(Q, group=0),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_right_rule_holds(name: str) -> None:
    assert verdict(DRAFTERS[name]()).verdict == "law holds"


def test_the_right_rule_holds_for_a_chosen_tree_and_after_warping() -> None:
    assert verdict(ShapedDrafter(Q), systems=[TREE]).verdict == "law holds"
    assert verdict(MarkovDrafter(Q), temperature=0.7, top_p=0.9).verdict == "law holds"


WRONG_RESIDUALS = {
    "e04 softmaxed, chain": (softmaxed, MarkovDrafter(Q), CHAIN),
    "never taken, chain": (unchanged, MarkovDrafter(Q), CHAIN),
    "not renormalised, chosen tree": (unnormalised, ShapedDrafter(Q), TREE),
    "e10 not renormalised, independent siblings": (unnormalised, SiblingsDrafter(Q), CHAIN),
    "e10 not renormalised, without replacement": (unnormalised, SiblingsDrafter(Q, group=0), CHAIN),
    "e10 siblings are compared with p, independent": (unchanged, SiblingsDrafter(WEAK), CHAIN),
    "e10 siblings are compared with p, without replacement": (unchanged, SiblingsDrafter(WEAK, group=0), CHAIN),
}


@pytest.mark.parametrize("name", WRONG_RESIDUALS)
def test_e04_e10_a_wrong_residual_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    residual, drafter, system = WRONG_RESIDUALS[name]
    monkeypatch.setattr(specdraft.verify, "_residual", residual)
    found = verdict(drafter, systems=[system])
    assert found.verdict == "failed"
    assert "target's law" in found.reason


WRONG_DRAFTS = {
    "drawn siblings are merged": (SiblingsDrafter(Q), merged),
    "drawn siblings are sorted by q": (SiblingsDrafter(Q), sorted_by_value),
    "siblings without replacement are sorted by q": (SiblingsDrafter(Q, group=0), sorted_by_value),
    "the best of drawn siblings is kept": (SiblingsDrafter(Q), best_kept),
    "a chain drops its own unlikely tokens": (MarkovDrafter(Q), unlikely_dropped),
    "q of later siblings is not updated": (SiblingsDrafter(Q, group=0), ungrouped),
}


@pytest.mark.parametrize("name", WRONG_DRAFTS)
def test_drafts_that_break_the_law_are_caught(name: str) -> None:
    assert verdict(spoiled(*WRONG_DRAFTS[name])).verdict == "failed"


class UnwarpedDrafter(MarkovDrafter):
    """Draws from the warped law and hands on the one before."""

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        tree = super().propose(memory, warp=warp, dice=dice)
        context = torch.cat([memory[:, None], tree.tokens[:, :-1]], 1)
        return replace(tree, laws=self.logits[context].softmax(-1))


@pytest.mark.parametrize("other", [0.1, 0.25, 0.5])
def test_e05_q_before_warping_is_caught(other: float) -> None:
    """At temperature 0.7 and top-p 0.9, however good the drafter is."""
    q = (1 - other) * law(0) + other * law(1)
    assert verdict(UnwarpedDrafter(q), temperature=0.7, top_p=0.9).verdict == "failed"


def test_e03_greedy_acceptance_by_probability_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafted token is accepted where p(x) >= q(x), both before the temperature, whatever the argmax is."""
    target, drafter, seen = markov_target(P), UnwarpedDrafter(UNSURE), []
    honest = target.head

    def head(hidden: Tensor) -> Tensor:
        seen.append(honest(hidden))
        return seen[-1]

    def by_probability(tree: DraftTree, ids: Tensor, dice: Dice) -> Verdict:
        if not tree.nodes:
            return verify(tree, ids, dice)
        assert tree.laws is not None
        p, x = seen[-1].softmax(-1), tree.tokens[..., None]
        stands = p[:, :-1].gather(-1, x) >= tree.laws.gather(-1, x)
        return verify(tree, torch.cat([torch.where(stands[..., 0], tree.tokens, ids[:, :-1]), ids[:, -1:]], 1), dice)

    settings: dict[str, object] = {"temperature": 0.0, "compare_with_plain": True, "max_new_tokens": 8}
    assert verdict(MarkovDrafter(UNSURE), **settings).verdict == "identical"
    monkeypatch.setattr(target, "head", head)
    monkeypatch.setattr(decoding, "verify", by_probability)
    found = verdict(drafter, target, **settings)
    assert found.verdict == "failed"
    assert found.divergences


@pytest.mark.parametrize("name", [*DRAFTERS, "chosen tree"])
def test_false_alarms_of_the_real_loop_are_as_rare_as_stated(name: str) -> None:
    """Every row of a batch is a run of its own, with its own seed."""
    drafter = ShapedDrafter(Q) if name == "chosen tree" else DRAFTERS[name]()
    shape: Shape = DynamicTree(3, 3, 8) if name == "chosen tree" else Chain(3)
    drafter.shape = shape
    rows = [[i % 8] for i in range(250)]
    run = generate(
        markov_target(P), drafter, rows, warp=Warp(1.0), max_new_tokens=16, batch_size=250, seed=1, witness=True
    )
    p = torch.tensor([check_sampled([generation]).p_value for generation in run.generations])
    for level in (FAILED_BELOW, 0.05, 0.2):
        assert float((p < level).float().mean()) < level + 4 * (level * (1 - level) / len(rows)) ** 0.5
