"""Speed-up over batch size: what is predicted from parts and rounds is what decoding takes, by a clock that ticks only
where the target and the drafter say so."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from evaluation.markov import MarkovDrafter, law, markov_target
from torch import Tensor

from specdraft.causal import Observation, Session
from specdraft.dice import Dice
from specdraft.drafters.shapes import Chain
from specdraft.evaluation import EvalRecipe, Prompt, evaluate
from specdraft.evaluation.costs import Parts, time_parts
from specdraft.evaluation.curve import Clock, Rows, contexts, filled, predicted
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp

P, Q = law(0), 0.7 * law(0) + 0.3 * law(2)
PARTS = Parts({1: 1.0}, 0.0, [0.5], [1.0], [0.25], 0.0)


class Ticking(MarkovDrafter):
    """Takes its time, on the clock of the test."""

    now = 0.0

    def begin(self, seen: Observation, roots: Tensor, session: Session | None = None) -> Tensor:
        Ticking.now += 0.3
        return super().begin(seen, roots, session)

    def propose(self, memory: Tensor, *, warp: Warp, dice: Dice) -> DraftTree:
        Ticking.now += 0.2 + 0.02 * len(memory)
        return super().propose(memory, warp=warp, dice=dice)

    def remember(self, memory: Tensor, verdict: Verdict, seen: Observation) -> Tensor:
        Ticking.now += 0.15
        return super().remember(memory, verdict, seen)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrozenTarget]:
    """A pass takes a second and a little for each token in it, drafting and reading their own, all else nothing."""
    target = markov_target(P)
    head = target.head

    def slow(hidden: Tensor) -> Tensor:
        Ticking.now += 1 + 0.03 * hidden[..., 0].numel()
        return head(hidden)

    monkeypatch.setattr(target, "head", slow)
    monkeypatch.setattr(time, "perf_counter", lambda: Ticking.now)
    return target


def test_prediction_is_what_decoding_takes_at_every_batch_size(target: FrozenTarget) -> None:
    prompts = [Prompt([i % 8, (3 * i) % 8, i % 5][: 1 + i % 3], f"prompt {i}") for i in range(12)]
    recipe = EvalRecipe.model_validate(
        {"systems": [{"kind": "chain", "gamma": 3}], "max_new_tokens": 24, "batch_size": 2, "batch_sizes": [1, 4, 16]}
    )
    (system,) = evaluate(target, Ticking(Q), recipe, prompts=prompts).systems
    assert [point.batch_size for point in system.by_batch] == [1, 4, 16]
    for measured, promised in [
        (system.decode_speedup, system.predicted),
        *((point.decode_speedup, point.predicted) for point in system.by_batch),
    ]:
        assert measured is not None
        assert promised is not None
        assert promised.value == pytest.approx(measured.value, rel=0.02)  # the last round is not read
    assert system.costs is not None
    assert system.costs.c == pytest.approx((0.2 + 0.04) / 3 / 1.06)
    assert system.costs.v == pytest.approx((1 + 0.03 * 2 * 4) / 1.06)
    assert system.costs.round_cost == pytest.approx((0.24 + 1.24 + 0.15) / 1.06)
    fast = [point.decode_speedup.value or 0 for point in system.by_batch]
    assert fast[0] > fast[1] > fast[2], "a busier machine has less to gain"
    assert (system.stops_paying is None) == (fast[-1] > 1)


def test_drafters_reading_is_timed_with_the_round_and_not_with_plain_decoding(target: FrozenTarget) -> None:
    parts = time_parts(target, Ticking(Q), [Chain(2), Chain(4)], [[1, 2, 3], [4]], Warp(0.0), (5,))
    assert parts.passes == pytest.approx({1: 1.06, 5: 1.3})
    assert parts.plain_rest == pytest.approx(0)
    assert parts.drafts == pytest.approx([0.24, 0.24])
    assert parts.targets == pytest.approx([1.18, 1.3])
    assert parts.rests == pytest.approx([0.15, 0.15])
    assert parts.begin == pytest.approx(0.3)


def test_seconds_of_a_batch_that_runs_empty() -> None:
    parts = [PARTS, PARTS._replace(passes={1: 1.2}), PARTS._replace(passes={1: 1.3}, begin=2.0)]
    clock = Clock.of([1, 2, 3], parts, PARTS)
    assert clock.seconds(0, np.array([3, 1, 2])) == pytest.approx(1.3 + 1.2 + 1.0)
    assert clock.seconds(1, np.array([3, 1, 2])) == pytest.approx(3 * 1.75 + 2.0)
    rounds = np.random.default_rng(0).integers(0, 9, (5, 3))
    by_hand = [sum([1.0, 1.2, 1.3][sum(row > k) - 1] for k in range(max(row))) for row in rounds]
    assert clock.seconds(0, rounds) == pytest.approx(by_hand)


def test_predicted_speed_up_has_a_closed_form_where_rows_are_alone() -> None:
    clock = Clock.of([1], [PARTS], PARTS)
    plain = Rows(rounds=np.array([8, 12, 20]), tokens=np.array([8, 12, 20]))
    half = Rows(rounds=np.array([4, 6, 10]), tokens=np.array([8, 12, 20]))
    found = predicted(clock, 1, plain, half, 1, seed=0)
    assert found.value == pytest.approx(2 / 1.75)
    assert (found.low, found.high) == pytest.approx((2 / 1.75, 2 / 1.75)), "every prompt gains as much"
    uneven = Rows(rounds=np.array([8, 6, 4]), tokens=np.array([8, 12, 20]))
    found = predicted(clock, 1, plain, uneven, 1, seed=0)
    assert found.low is not None
    assert found.high is not None
    assert found.low < (found.value or 0) < found.high


@pytest.mark.parametrize(("prompts", "size"), [(7, 3), (16, 16), (5, 8), (8, 1)])
def test_batches_are_full_and_hold_every_prompt(prompts: int, size: int) -> None:
    places = filled(prompts, size)
    assert places.shape[1] == size
    assert len(places) >= 2
    assert set(places.flat) == set(range(prompts))


def test_contexts_are_prompts_halfway_through_their_answers_and_of_all_lengths() -> None:
    prompts, answers = [[1] * n for n in range(1, 9)], [[2] * 6] * 8
    assert contexts(prompts, answers, 1) == [[1] * 5 + [2] * 3]
    assert [len(row) for row in contexts(prompts, answers, 4)] == [5, 7, 9, 11]
    assert len(contexts(prompts[:2], answers[:2], 5)) == 5


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"batch_sizes": [4, 1]}, "must rise"), ({"batch_sizes": [2], "compare_with_plain": False}, "no effect")],
)
def test_batch_sizes_that_make_no_sense_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        EvalRecipe.model_validate(changes)


def test_one_prompt_has_no_interval() -> None:
    alone = Rows(rounds=np.array([4]), tokens=np.array([8]))
    assert predicted(Clock.of([1], [PARTS], PARTS), 1, alone, alone, 1, seed=0).low is None
    silent = Rows(rounds=np.array([0]), tokens=np.array([0]))
    assert predicted(Clock.of([1], [PARTS], PARTS), 1, silent, silent, 1, seed=0).value is None
