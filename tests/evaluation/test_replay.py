"""Rounds that are read off the target's answers are those that decoding makes."""

from functools import cache
from typing import Any

import pytest
import torch
from drafting import eagle3
from models import tiny_model
from torch import Tensor

from specdraft.config import SpecdraftError
from specdraft.decoding import Generation, generate
from specdraft.drafters import DRAFTERS
from specdraft.drafters.base import Evidence, TrainableDrafter
from specdraft.drafters.mtp import MTPDrafter, MTPRecipe
from specdraft.drafters.shapes import Chain, DynamicTree, StaticTree
from specdraft.evaluation.replay import NEVER, Ranks, Trace, greedy_trace, read_overlaps, read_ranks
from specdraft.evaluation.statistics import Bootstrap
from specdraft.reduction import IGNORED
from specdraft.target import FrozenTarget
from specdraft.warping import Warp

PROMPTS = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13], [21], [31, 44, 5]]
CAP = 14
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 3)))


@cache
def ending_target() -> FrozenTarget:
    """Some of whose answers end, one with its first token, and others hit the cap."""
    target = FrozenTarget(tiny_model())
    target.model.generation_config.eos_token_id = []
    said = decoded(target, None)
    target.model.generation_config.eos_token_id = [said[1].tokens[0], said[2].tokens[8], said[4].tokens[7]]
    return target


def decoded(target: FrozenTarget, drafter: Any) -> list[Generation]:
    return generate(target, drafter, PROMPTS, warp=Warp(), max_new_tokens=CAP, batch_size=5).generations


def made(kind: str, target: FrozenTarget) -> TrainableDrafter:
    """A drafter of five depths, not quite as it starts, so that some of its guesses are right and some are not."""
    recipe = DRAFTERS[kind].recipe_class(kind=kind, **({"heads": 5} if kind in ("medusa", "hydra") else {}))
    torch.manual_seed(0)
    drafter = DRAFTERS[kind].for_target(target, recipe, torch.ones(target.vocab_size, dtype=torch.int64))
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += torch.randn_like(weight) * 0.02
    return drafter.eval()


@cache
def traced() -> tuple[Trace, list[list[int]]]:
    answers = [g.tokens for g in decoded(ending_target(), None)]
    return greedy_trace(ending_target(), PROMPTS, answers, 5), answers


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "medusa", "hydra", "mtp", "lm", "early_exit"])
def test_replayed_rounds_are_decodings_own(kind: str) -> None:
    target = ending_target()
    trace, answers = traced()
    assert [len(answer) for answer in answers] == [CAP, 1, 9, CAP, 8]
    drafter = made(kind, target)
    trained = vars(drafter.config).get("unroll")
    ranks = read_ranks(drafter, target, trace, 5)
    assert vars(drafter.config).get("unroll") == trained
    assert (ranks.depth, ranks.agreement) == (5, 1.0)
    accepted = 0
    for shape in (*map(Chain, range(1, 6)), TREE):
        drafter.shape = shape
        found = decoded(target, drafter)
        assert [g.tokens for g in found] == answers
        assert ranks.rounds(shape) == [g.rounds for g in found]
        accepted += sum(r.accepted for g in found for r in g.rounds)
    assert accepted, "a test in which nothing is accepted tests little"


def test_a_reduced_vocabulary_never_drafts_what_it_lacks() -> None:
    target = ending_target()
    trace, answers = traced()
    lacking = {answers[3][6], answers[3][7]}
    drafter = eagle3(target, torch.tensor([id for id in range(96) if id not in lacking])).eval()
    ranks = read_ranks(drafter, target, trace, 5)
    assert ranks.by_prompt[3][5, :2].tolist() == [NEVER, NEVER]
    drafter.shape = Chain(5)
    assert ranks.rounds(Chain(5)) == [g.rounds for g in decoded(target, drafter)]


def test_a_drafter_with_a_module_or_head_a_depth_is_as_deep_as_it_has_them() -> None:
    target = ending_target()
    trace, _ = traced()
    stack = MTPDrafter.for_target(target, MTPRecipe(modules="each", depths=2), torch.zeros(1)).eval()
    ranks = read_ranks(stack, target, trace, 5)
    assert ranks.depth == 2
    stack.shape = Chain(2)
    assert ranks.rounds(Chain(2)) == [g.rounds for g in decoded(target, stack)]
    with pytest.raises(SpecdraftError, match="3 tokens deep"):
        ranks.rounds(Chain(3))
    with pytest.raises(SpecdraftError, match="dynamic tree"):
        ranks.rounds(DynamicTree(2, 2, 3))


def test_rounds_of_ranks_by_hand() -> None:
    """Root 0: rank 0, then 1; root 2: refused; root 3: all right, and the answer ends within the round."""
    table = torch.tensor([[0, 1, 0], [0, 0, 0], [2, 0, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.int32)
    ranks = Ranks(3, [table.numpy(), table[:0].numpy()], 1.0)
    chain, silent = ranks.rounds(Chain(3))
    assert silent == []
    assert [(r.offered, r.accepted, r.emitted, r.proposed) for r in chain] == [
        (2, 1, 2, 3),
        (1, 0, 1, 3),
        (3, 3, 2, 3),
    ]
    tree, _ = ranks.rounds(StaticTree(((0,), (2,), (0, 1))))
    assert [(r.offered, r.accepted, r.emitted, r.proposed) for r in tree] == [(2, 2, 3, 3), (2, 1, 2, 3)]


def test_answers_that_are_not_the_targets_are_told() -> None:
    target = ending_target()
    _, answers = traced()
    forged = [[(token + 1) % 96 for token in answer] for answer in answers]
    drafter = made("eagle3", target)
    assert read_ranks(drafter, target, greedy_trace(target, PROMPTS, forged, 2), 2).agreement < 0.5
    with pytest.raises(SpecdraftError, match="no token"):
        greedy_trace(target, PROMPTS, [[], *answers[1:]], 2)


@pytest.mark.parametrize("kind", ["eagle3", "medusa", "lm"])
def test_overlaps_are_trainings_own(kind: str) -> None:
    """Sum over prompts against what `forward` counts on the same answers at temperature 1; overlap is not alpha."""
    target = FrozenTarget(tiny_model())
    target.model.generation_config.eos_token_id = []
    warp = Warp(1.0)
    sampled = generate(target, None, PROMPTS, warp=warp, max_new_tokens=8, batch_size=5, seed=3).generations
    answers = [g.tokens for g in sampled]
    drafter = made(kind, target)
    found = read_overlaps(drafter, target, Trace(PROMPTS, answers, [[] for _ in PROMPTS]), warp, 4)
    overlaps, counts = Tensor(found.depth).zero_(), Tensor(found.depth).zero_()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens = torch.tensor([[*prompt, *answer]])
        labels = tokens.masked_fill(torch.arange(tokens.shape[1]) < len(prompt), IGNORED)
        seen = target.observe(tokens, torch.ones_like(tokens).bool(), drafter.taps)
        with torch.no_grad():
            output: Any = drafter(tokens, labels, Evidence(seen, target))
        overlaps += output.overlaps[: found.depth]
        counts += output.counts[: found.depth]
    assert found.counts.sum(0).tolist() == counts.tolist()
    want = overlaps / counts
    got = torch.tensor([e.value for e in found.by_depth(Bootstrap(len(PROMPTS), 100, 0))])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
