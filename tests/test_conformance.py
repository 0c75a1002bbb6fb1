"""What every entry of DRAFTERS must do, whatever its method. A new entry is picked up from its one line."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from drafting import ForcedDice
from enumeration import EXACT
from joint_law import exact_target, joint
from models import tiny_model
from torch import Tensor

from specdraft.config import SpecdraftError, settings
from specdraft.decoding import generate
from specdraft.drafters import DRAFTERS, load_drafter
from specdraft.drafters.base import Drafter, Evidence, ObjectiveRecipe
from specdraft.drafters.base import TrainableDrafter as Trainable
from specdraft.drafters.shapes import Chain, DynamicTree, Shape, StaticTree
from specdraft.objectives import Prediction
from specdraft.reduction import IGNORED
from specdraft.target import FrozenTarget
from specdraft.training import TrainRecipe
from specdraft.verify import Verdict
from specdraft.warping import Warp

KINDS = sorted(DRAFTERS)
FAMILIES = ("llama", "qwen3", "gemma2", "mixtral")
SHAPES: tuple[Shape, ...] = (Chain(4), DynamicTree(3, 3, 7), StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0))))


def made(kind: str, target: FrozenTarget, shaken: bool = True) -> Trainable:
    """The drafter of a recipe that says `kind` alone; `shaken`: far from its start, so that every part matters."""
    recipe = DRAFTERS[kind].recipe_class(kind=kind)
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    torch.manual_seed(0)
    drafter = DRAFTERS[kind].for_target(target, recipe, counts)
    if shaken:
        with torch.no_grad():
            for weight in drafter.parameters():
                if weight.requires_grad:
                    weight += torch.randn_like(weight) * 0.2
    return drafter.eval()


def batch(target: FrozenTarget, taps: tuple[int, ...], silent: int = 4) -> tuple[Tensor, Tensor, Evidence]:
    """Two rows of 14 and 9 tokens, supervised after the first `silent`."""
    tokens = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(14) < torch.tensor([[14], [9]])
    labels = tokens.masked_fill(~mask | (torch.arange(14) < silent), IGNORED)
    return tokens, labels, Evidence(target.observe(tokens, mask, taps), target)


def at_depth(predictions: Sequence[Prediction], depth: int) -> Prediction:
    """The prediction that drafts the token of this depth: an LM's one prediction serves every depth."""
    return next(p for p in predictions if p.depth == depth or p.shift == 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_t07_e19_training_laws_are_decoding_laws_at_every_depth_and_after_every_round(kind: str, family: str) -> None:
    """Rows of different lengths; three tokens proposed, of which 0 to 3 are accepted, each row another way."""
    target = FrozenTarget(tiny_model(family))
    drafter = made(kind, target)
    drafter.shape = Chain(3)
    proposer = cast(Drafter, drafter)
    tokens = torch.randint(0, 96, (2, 22), generator=torch.Generator().manual_seed(3))
    predictions = drafter.predict(tokens, target.observe(tokens, torch.ones_like(tokens).bool(), drafter.taps))
    rows, known = torch.arange(2), torch.tensor([7, 3])
    session = target.session(drafter.taps, 2)
    memory = proposer.begin(session.read(tokens[:, :7], torch.arange(7) < known[:, None]), tokens[rows, known], session)
    for accepted in ([0, 3], [3, 0], [2, 1], [1, 2]):
        ahead = tokens[rows[:, None], known[:, None] + 1 + torch.arange(3)]
        tree = proposer.propose(memory, warp=Warp(1.0), dice=ForcedDice(ahead))
        assert tree.laws is not None
        for depth in (1, 2, 3):
            prediction = at_depth(predictions, depth)
            hidden = prediction.hidden[rows, known + depth - 1 - prediction.shift]
            want = prediction.head(hidden).float().softmax(-1)
            kept = slice(want.shape[-1]) if prediction.kept_ids is None else prediction.kept_ids
            torch.testing.assert_close(tree.laws[:, depth - 1, kept], want, rtol=0, atol=2e-5)
        session.extend(tokens[rows, known], tree)
        count = torch.tensor(accepted)
        path = torch.where(torch.arange(3) < count[:, None], torch.arange(3), -1)
        known = known + count + 1
        verdict = Verdict(path, count, tokens[rows, known], torch.ones(2, 3).bool(), torch.ones(2, 3))
        memory = proposer.remember(memory, verdict, session.commit(verdict))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: type(shape).__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_e01_greedy_output_is_the_targets_in_any_batch(kind: str, shape: Shape) -> None:
    target = FrozenTarget(tiny_model())
    drafter = made(kind, target, shaken=False)
    drafter.shape = shape
    prompts = [[5, 9, 3, 8, 1, 7], [4, 6], [11, 3, 12, 13]]
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 14}
    plain = [g.tokens for g in generate(target, None, prompts, **settings).generations]
    for size in (1, 3):
        run = generate(target, cast(Drafter, drafter), prompts, batch_size=size, **settings)
        assert [g.tokens for g in run.generations] == plain


@pytest.mark.parametrize("shape", [Chain(2), StaticTree(((0,), (1,), (0, 0)))], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_joint_law_of_the_first_three_sampled_tokens_is_the_targets_to_rounding(kind: str, shape: Shape) -> None:
    """Every outcome of the real loop over a float64 target (LayerNorm: no float32 inside)."""
    target = exact_target(4)
    drafter = made(kind, target).double()
    drafter.shape = shape
    assert joint(target, cast(Drafter, drafter), 3, [1, 2, 3, 1, 2]).error < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_t05_t15_every_weight_of_the_drafter_learns_and_none_of_the_targets(kind: str) -> None:
    target = FrozenTarget(tiny_model())
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    drafter = made(kind, target).train()
    optimiser = torch.optim.AdamW([weight for weight in drafter.parameters() if weight.requires_grad], 1e-2)
    tokens, labels, evidence = batch(target, drafter.taps)
    drafter(tokens, labels, evidence).loss.backward()
    still = [name for name, w in drafter.named_parameters() if w.requires_grad and (w.grad is None or not w.grad.any())]
    assert not still, "without a gradient"
    optimiser.step()
    assert not target.model.training
    assert not any(weight.requires_grad or weight.grad is not None for weight in target.model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in target.model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_t01_t03_only_supervised_positions_count_and_padding_changes_nothing(kind: str) -> None:
    target = FrozenTarget(tiny_model())
    drafter = made(kind, target).train()
    tokens, labels, evidence = batch(target, drafter.taps)
    loss = drafter(tokens, labels, evidence).loss
    seen = evidence.observation
    wide = torch.nn.functional.pad
    padded = target.observe(wide(tokens, (0, 9)), wide(seen.mask, (0, 9)), drafter.taps)
    other = drafter(wide(tokens, (0, 9)), wide(labels, (0, 9), value=IGNORED), Evidence(padded, target)).loss
    torch.testing.assert_close(other, loss, rtol=1e-5, atol=1e-6)
    none = torch.full_like(labels, IGNORED)
    silent = drafter(tokens, none, evidence)
    silent.loss.backward()
    assert float(silent.loss.detach()) == 0
    assert not any(weight.grad is not None and weight.grad.any() for weight in drafter.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_t32_it_overfits_a_batch_and_then_drafts_what_it_learned(kind: str) -> None:
    """The target's own greedy answers; what was learned teacher-forced holds when decoding."""
    target = FrozenTarget(tiny_model())
    drafter = made(kind, target, shaken=False).train()
    drafter.objective = ObjectiveRecipe(terms={"forward_kl": 1.0}, depth_decay=1.0)
    prompts = [[5, 9, 3, 8], [4, 6, 11, 12]]
    answers = generate(target, None, prompts, warp=Warp(), max_new_tokens=12, batch_size=2).generations
    rows = torch.tensor([[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)])
    labels = rows.masked_fill(torch.arange(rows.shape[1]) < 4, IGNORED)
    evidence = Evidence(target.observe(rows, torch.ones_like(rows).bool(), drafter.taps), target)
    optimiser = torch.optim.AdamW([w for w in drafter.parameters() if w.requires_grad], 5e-3, weight_decay=0.0)
    losses = []
    for _ in range(120):
        output = drafter(rows, labels, evidence)
        optimiser.zero_grad()
        output.loss.backward()
        optimiser.step()
        losses.append(float(output.loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    drafter.eval().shape = Chain(2)
    settings: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 12, "batch_size": 2}
    rounds = [r for g in generate(target, cast(Drafter, drafter), prompts, **settings).generations for r in g.rounds]
    first = sum(r.accepted > 0 for r in rounds) / len(rounds)
    with torch.no_grad():
        prediction = drafter.predict(rows, evidence.observation)[0]
        times = torch.arange(4, rows.shape[1] - 1) - prediction.shift
        columns = prediction.head(prediction.hidden[:, times]).argmax(-1)
    guesses = columns if prediction.kept_ids is None else prediction.kept_ids[columns]
    accuracy = float((guesses == rows[:, 5:]).float().mean())
    assert first >= accuracy - 0.25, "drafting is worse than training said"


@pytest.mark.parametrize("kind", KINDS)
def test_x01_x02_what_is_saved_comes_back_bitwise_and_strictly(kind: str, tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model())
    drafter = made(kind, target)
    drafter.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path)
    loaded.attach(target)
    assert type(loaded) is type(drafter)
    tokens, _, evidence = batch(target, drafter.taps)
    assert loaded.taps == drafter.taps
    with torch.no_grad():
        mine = drafter.predict(tokens, evidence.observation)
        theirs = loaded.predict(tokens, evidence.observation)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.head(one.hidden), other.head(other.hidden))
        assert one[:2] == other[:2]
    with pytest.raises(SpecdraftError):
        load_drafter(tmp_path / "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_v12_ids_that_the_target_has_gained_are_never_drafted(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    drafter = made(kind, FrozenTarget(tiny_model()))
    model = tiny_model()
    model.resize_token_embeddings(98, mean_resizing=False)
    grown = FrozenTarget(model)
    with caplog.at_level(logging.WARNING):
        drafter.attach(grown)
    assert "2 ids more" in caplog.text
    tokens, session = torch.tensor([[97, 5, 96]]), grown.session(drafter.taps, 1)
    proposer = cast(Drafter, drafter)
    memory = proposer.begin(session.read(tokens, torch.ones(1, 3).bool()), torch.tensor([97]), session)
    laws = proposer.propose(memory, warp=Warp(1.0), dice=ForcedDice(torch.tensor([[4, 5, 6, 7]]))).laws
    assert laws is not None
    assert laws.shape == (1, 4, 98)
    assert not laws[..., 96:].any()


def test_a_new_entry_is_picked_up_from_its_one_line() -> None:
    """By the recipes, their help, and this suite, which must pass for it."""
    assert {setting.default for setting in settings(TrainRecipe) if setting.name == "drafter.kind"} == set(KINDS)
    if "toy" in DRAFTERS:
        return
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root), str(root / "tests")])
    suite = ["-p", "toy_drafter", "-p", "no:cacheprovider", "-k", "toy or picked_up", "tests/test_conformance.py"]
    command = [sys.executable, "-m", "pytest", "-q", *suite]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=root, check=False, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
