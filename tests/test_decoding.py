"""The loop: greedy output is the target's own, sampled output follows the target's law, whatever drafts."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from drafting import eagle3
from enumeration import EXACT
from evaluation.markov import known_answer, markov_target
from evaluation.markov import law as markov_law
from joint_law import exact_target, joint
from models import FAMILIES, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from specdraft import decoding
from specdraft.config import SpecdraftError
from specdraft.decoding import Decoding, Generation, generate
from specdraft.dice import Dice
from specdraft.drafters.base import Drafter
from specdraft.drafters.eagle import Eagle3Drafter
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp
from specdraft.witness import Transforms


def prompts(lengths: Sequence[int], vocabulary: int = 96) -> list[list[int]]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (length,), generator=draw).tolist() for length in lengths]


def shaped(drafter: Any, shape: Shape) -> Drafter:
    drafter.shape = shape
    return drafter


def lm(target: FrozenTarget, family: str = "llama", **changes: Any) -> LMDrafter:
    return LMDrafter.of(FrozenTarget(tiny_model(family, seed=1, **changes).to(target.dtype)), target)


def own(target: FrozenTarget) -> LMDrafter:
    """The target as its own drafter: every greedy draft is right."""
    return LMDrafter.of(target, target)


def eagle(target: FrozenTarget, kept: Tensor | None = None) -> Eagle3Drafter:
    return eagle3(target, kept).to(dtype=target.dtype).eval()


DRAFTERS: dict[str, Callable[[FrozenTarget, str], Drafter]] = {
    "eagle chain": lambda target, _: shaped(eagle(target), Chain(4)),
    "eagle tree": lambda target, _: shaped(eagle(target), DynamicTree(3, 3, 7)),
    "lm": lambda target, family: lm(target, family),
    "half right": lambda target, _: shaped(own(target), Chain(2)),
    "lookup": lambda _target, _family: shaped(LookupDrafter(), Chain(3)),
}


def decode(target: FrozenTarget, drafter: Drafter | None, rows: Sequence[Sequence[int]], **settings: Any) -> Decoding:
    return generate(target, drafter, rows, **{"warp": Warp(), "max_new_tokens": 12, **settings})


def ids(run: Decoding) -> list[list[int]]:
    return [generation.tokens for generation in run.generations]


def transforms(run: Decoding) -> Tensor:
    return torch.tensor(
        [value for generation in run.generations for value in generation.transforms.tokens], dtype=torch.float64
    )


def accepted(generation: Generation) -> list[int]:
    return [turn.accepted for turn in generation.rounds]


def never_ending(model: PreTrainedModel) -> PreTrainedModel:
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def sums_up(generation: Generation) -> bool:
    return 1 + sum(turn.emitted for turn in generation.rounds) == len(generation.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_e01_e24_e25_greedy_is_plain_decoding_is_transformers_generate(family: str) -> None:
    """float32; rows of different lengths beside one another, right and wrong drafts mixed, sliding windows wrapped."""
    model = tiny_model(family)
    rows = prompts((3, 11, 6))
    want = [
        model.generate(torch.tensor([row]), max_new_tokens=8, do_sample=False)[0, len(row) :].tolist() for row in rows
    ]
    target = FrozenTarget(model)
    assert ids(decode(target, None, rows, batch_size=3, max_new_tokens=8)) == want
    for name in ("eagle tree", "lm", "half right"):
        run = decode(target, DRAFTERS[name](target, family), rows, batch_size=3, max_new_tokens=8)
        assert ids(run) == want, name
        assert all(map(sums_up, run.generations))


@pytest.mark.parametrize("name", DRAFTERS)
def test_e24_e25_a_row_is_what_it_is_alone_rounds_included(name: str) -> None:
    target = FrozenTarget(tiny_model())
    drafter, rows = DRAFTERS[name](target, "llama"), prompts((3, 11, 7, 5, 13, 2, 8, 4))
    plain = ids(decode(target, None, rows, batch_size=8, max_new_tokens=6))
    alone = decode(target, drafter, rows, max_new_tokens=6)
    assert ids(alone) == plain
    for size in (3, 8):
        run = decode(target, drafter, rows, batch_size=size, max_new_tokens=6)
        assert ids(run) == plain
        assert [g.rounds for g in run.generations] == [g.rounds for g in alone.generations]


def test_e27_nothing_stays_behind_in_a_drafter() -> None:
    target = FrozenTarget(tiny_model())
    drafter, rows = lm(target), prompts((4, 9))
    first, second = (decode(target, drafter, rows, warp=Warp(0.8), batch_size=2) for _ in range(2))
    assert first.generations == second.generations


def test_e12_e13_an_end_in_the_middle_of_a_draft_ends_the_row_and_the_count() -> None:
    target = FrozenTarget(never_ending(tiny_model()))
    rows = prompts((4, 6, 9))
    plain = ids(decode(target, None, rows))
    place = next(p for p in range(3, 12) if plain[0][p] not in plain[0][:p])
    end = plain[0][place]
    never = next(i for i in range(96) if not any(i in row for row in plain))
    target.model.generation_config.eos_token_id = [never, end]
    assert target.end_ids == (never, end)
    drafter = shaped(own(target), Chain(place + 2))
    run = decode(target, drafter, rows, batch_size=3)
    cut = [row[: row.index(end) + 1] if end in row else row for row in plain]
    assert ids(run) == cut == ids(decode(target, None, rows))
    assert [generation.ended for generation in run.generations] == [
        "end token" if end in row else "cap" for row in plain
    ]
    [turn] = run.generations[0].rounds
    assert (turn.accepted, turn.emitted) == (place + 2, place), "[d1, d2, end, d4, d5] and a free token: 3 of 6"
    assert all(map(sums_up, run.generations))


def test_e12_an_end_as_the_first_token_leaves_no_round() -> None:
    target = FrozenTarget(never_ending(tiny_model()))
    rows = prompts((4, 6))
    first = ids(decode(target, None, rows, max_new_tokens=1))
    target.model.generation_config.eos_token_id = first[0][0]
    run = decode(target, lm(target), rows, batch_size=2)
    assert run.generations[0] == Generation(first[0], [], "end token")
    assert run.generations[1].tokens[:1] == first[1]


@pytest.mark.parametrize("cap", [1, 2, 5, 6])
def test_a_length_cap_cuts_within_a_draft(cap: int) -> None:
    target = FrozenTarget(never_ending(tiny_model()))
    rows = prompts((4, 6))
    run = decode(target, shaped(own(target), Chain(3)), rows, max_new_tokens=cap, batch_size=2)
    assert ids(run) == [row[:cap] for row in ids(decode(target, None, rows))]
    assert all(generation.ended == "cap" for generation in run.generations)
    assert all(map(sums_up, run.generations))
    assert run.new_tokens == 2 * cap
    assert run.passes == -(-(cap - 1) // 4)


@pytest.mark.parametrize(("family", "attention"), [("mistral", "sdpa"), ("mistral", "eager"), ("gemma2", "eager")])
def test_e20_sliding_windows_equal_a_recomputation_without_a_cache(family: str, attention: str) -> None:
    """A window of 8, 40 tokens, k = 4, and a drafter that is half wrong."""
    target = FrozenTarget(never_ending(tiny_model(family, attention)))
    text = prompts((5,))[0]
    for _ in range(40):
        logits = target.head(target.observe(torch.tensor([text]), torch.ones(1, len(text)).bool(), ()).hidden[:, -1])
        text = [*text, int(logits.argmax())]
    for drafter in (lm(target, family), own(target)):
        [generation] = decode(target, drafter, [text[:5]], max_new_tokens=40).generations
        assert generation.tokens == text[5:]


def test_e22_draft_positions_go_on_from_the_prompts() -> None:
    target = FrozenTarget(tiny_model())
    drafter, asked = eagle(target), []
    drafter.rotary.register_forward_pre_hook(lambda _module, args: asked.append(args[1][0].tolist()))
    drafter.shape = Chain(4)
    decode(target, drafter, prompts((7,)), max_new_tokens=2)
    assert asked[::2] == asked[1::2] == [list(range(7)), [7], [8], [9]], "queries and keys; slot i stands at i"


@pytest.mark.parametrize("name", ["eagle chain", "lm", "lookup"])
def test_e36_the_same_seed_gives_the_same_ids_whatever_the_batch(name: str) -> None:
    target = FrozenTarget(tiny_model().double())
    drafter = DRAFTERS[name](target, "llama")
    rows = prompts((3, 7, 5, 9))
    settings: dict[str, Any] = {
        "warp": Warp(1.5, top_k=40, top_p=0.95),
        "max_new_tokens": 8,
        "seed": 3,
        "witness": True,
    }
    one = decode(target, drafter, rows, **settings)
    for size in (3, 4):
        other = decode(target, drafter, rows, batch_size=size, **settings)
        assert ids(other) == ids(one)
        assert [accepted(g) for g in other.generations] == [accepted(g) for g in one.generations]
        torch.testing.assert_close(transforms(other), transforms(one))
    strangers = [rows[0], *reversed(rows[1:])]
    assert ids(decode(target, drafter, strangers, batch_size=4, **settings))[0] == ids(one)[0]
    assert ids(decode(target, drafter, rows, batch_size=4, **{**settings, "seed": 4})) != ids(one)


SIZE = 4
TINY = {"vocab_size": SIZE, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
EXACT_DRAFTERS: dict[str, Callable[[FrozenTarget], Drafter]] = {
    "eagle chain": lambda target: shaped(eagle(target), Chain(2)),
    "eagle chain, reduced": lambda target: shaped(eagle(target, torch.tensor([0, 2, 3])), Chain(2)),
    "eagle tree": lambda target: shaped(eagle(target), DynamicTree(2, 2, 4)),
    "lm": lambda target: shaped(lm(target, **TINY), Chain(2)),
    "lookup": lambda _: shaped(LookupDrafter(), Chain(3)),
}


@pytest.mark.parametrize("name", EXACT_DRAFTERS)
def test_the_joint_law_of_the_first_three_tokens_is_the_targets_to_rounding(name: str) -> None:
    """Every outcome of the real loop over a float64 target (LayerNorm: no float32 inside), prompt to third token."""
    target = exact_target(SIZE)
    warp = Warp(3.0, top_k=3) if name == "lm" else Warp(3.0)
    assert joint(target, EXACT_DRAFTERS[name](target), 3, [1, 2, 3, 1, 2], warp).error < EXACT


def test_a_markov_target_and_draft_lm_give_the_analytic_alpha_and_tau() -> None:
    p, q, gamma = markov_law(1), markov_law(2), 3
    target = markov_target(p, torch.float64)
    drafter = shaped(LMDrafter.of(markov_target(q, torch.float64), target), Chain(gamma))
    run = decode(target, drafter, [[i % 8] for i in range(40)], warp=Warp(1.0), max_new_tokens=48, batch_size=40)
    overlap = torch.minimum(p, q).sum(-1)
    turns = []
    for generation in run.generations:
        place = 0
        for turn in generation.rounds:
            path = generation.tokens[place : place + turn.offered]
            chances = torch.tensor(turn.chances[: len(path)])
            torch.testing.assert_close(chances, overlap[path].float(), rtol=0, atol=1e-5)
            place += turn.emitted
            turns.append(turn)
    answer = known_answer(p, q, gamma)
    offered, stood = sum(turn.offered for turn in turns), sum(turn.accepted for turn in turns)
    assert abs(stood / offered - answer.alpha) < 4 * (answer.alpha * (1 - answer.alpha) / offered) ** 0.5
    spread = torch.tensor([float(turn.accepted) for turn in turns]).std().item()
    assert abs(1 + stood / len(turns) - answer.tau) < 4 * spread / len(turns) ** 0.5


def distance(run: Decoding) -> tuple[float, int]:
    """Kolmogorov-Smirnov distance of the transforms from uniform, and how many there are."""
    values = transforms(run).sort().values
    steps = torch.arange(len(values) + 1, dtype=torch.float64) / len(values)
    return float(torch.maximum(values - steps[:-1], steps[1:] - values).max()), len(values)


def typical(tree: DraftTree, p: Tensor, dice: Dice) -> Verdict:
    """E-34's rule, not lossless: a drafted token stands where its probability is high enough."""
    likely = p[:, :-1].gather(-1, tree.tokens[..., None])[..., 0] > 0.05
    count = likely.int().cumprod(1).sum(1)
    path = torch.where(torch.arange(tree.nodes) < count[:, None], torch.arange(tree.nodes), -1)
    rows = torch.arange(tree.batch)
    token = dice.draw(p[rows, count], rows.tolist())
    return Verdict(path, count, token, torch.ones_like(path, dtype=torch.bool), torch.ones(path.shape))


def test_e34_the_transforms_are_uniform_for_the_right_rule_and_tell_a_wrong_one_within_2000_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p, q = markov_law(1), markov_law(2)
    target = markov_target(p, torch.float64)
    drafter = shaped(LMDrafter.of(markov_target(q, torch.float64), target), Chain(3))
    settings: dict[str, Any] = {"warp": Warp(1.0), "max_new_tokens": 50, "batch_size": 40, "witness": True}
    rows = [[i % 8] for i in range(40)]
    right = decode(target, drafter, rows, **settings)
    assert [len(generation.transforms.tokens) for generation in right.generations] == [50] * 40
    far, count = distance(right)
    assert far < 1.95 / count**0.5  # 0.1 %
    monkeypatch.setattr(decoding, "verify", typical)
    far, count = distance(decode(target, drafter, rows, **settings))
    assert count == 2000
    assert far > 2.2 / count**0.5  # 0.01 %


def test_transforms_of_trimmed_tokens_are_dropped_and_greedy_runs_have_none() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = list(range(48))
    target = FrozenTarget(model)
    rows, settings = prompts((4, 6, 9, 5)), {"warp": Warp(2.0), "batch_size": 4}
    run = decode(target, shaped(own(target), Chain(4)), rows, witness=True, **settings)
    assert ids(run) == ids(decode(target, shaped(own(target), Chain(4)), rows, **settings)), "a witness only looks on"
    assert any(generation.ended == "end token" for generation in run.generations)
    assert all(len(generation.transforms.tokens) == len(generation.tokens) for generation in run.generations)
    assert all(
        generation.transforms == Transforms() for generation in decode(target, own(target), prompts((4,))).generations
    )
    with pytest.raises(SpecdraftError, match="a witness needs a temperature"):
        decode(target, None, prompts((4,)), witness=True)


@pytest.mark.parametrize("warp", [Warp(), Warp(1.0)], ids=["greedy", "sampled"])
def test_e11_nan_logits_are_an_error_at_the_prompt_and_later(warp: Warp) -> None:
    target = FrozenTarget(never_ending(tiny_model()))
    [row] = prompts((5,))
    with torch.no_grad():
        target.embedding.weight[[i for i in range(96) if i not in row]] = torch.nan
    if set(ids(decode(target, None, [row], warp=warp, max_new_tokens=1))[0]) <= set(row):
        pytest.fail("the first token should be one that the prompt does not hold")
    with pytest.raises(ValueError, match="NaN or infinity in pass 0, row 0"):
        decode(target, LookupDrafter(), [row], warp=warp)
    with torch.no_grad():
        target.final_norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinity in pass 0, row 0"):
        decode(target, None, [row], warp=warp, max_new_tokens=1)


def test_e11_a_drafter_that_is_the_target_is_always_accepted() -> None:
    target = FrozenTarget(never_ending(tiny_model()).double())
    run = decode(target, shaped(own(target), Chain(3)), prompts((4, 6)), warp=Warp(1.0), batch_size=2)
    turns = [turn for generation in run.generations for turn in generation.rounds]
    assert all(turn.accepted == turn.offered == 3 for turn in turns)
    assert all(abs(chance - 1) < 1e-6 for turn in turns for chance in turn.chances)


def test_what_cannot_be_decoded_is_refused() -> None:
    target = FrozenTarget(tiny_model())
    with pytest.raises(SpecdraftError, match="prompt 1 has no token"):
        decode(target, None, [[3], []])
    with pytest.raises(SpecdraftError, match="max_new_tokens must be at least 1"):
        decode(target, None, [[3]], max_new_tokens=0)


def test_progress_counts_prompts() -> None:
    target, done = FrozenTarget(tiny_model()), []
    decode(target, None, prompts((3, 4, 5)), batch_size=2, max_new_tokens=2, progress=done.append)
    assert done == [2, 1]
