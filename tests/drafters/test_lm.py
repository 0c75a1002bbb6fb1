"""A draft LM: its cache follows what was committed, and it shares the target's tokens or is refused."""

import logging
from collections.abc import Sequence

import pytest
import torch
from models import tiny_model
from tokenizers import AddedToken, Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.shapes import Chain, StaticTree
from specdraft.target import FrozenTarget
from specdraft.tree import DraftTree
from specdraft.verify import Verdict
from specdraft.warping import Warp


class RecordingDice:
    """Dice that draw the likeliest token and keep the laws they were shown."""

    def __init__(self) -> None:
        self.laws: list[Tensor] = []

    def accept(self, chance: Tensor, rows: Sequence[int]) -> Tensor:
        raise AssertionError("a drafter tosses no coin")

    def draw(self, law: Tensor, rows: Sequence[int]) -> Tensor:
        self.laws.append(law)
        return law.argmax(-1)

    def keep(self, rows: Sequence[int]) -> "RecordingDice":
        return self


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_e19_e22_after_every_round_the_drafter_is_where_a_fresh_one_would_be(family: str) -> None:
    """k = 4 proposals of which a = 0..4 are accepted, rows of different lengths, past a sliding window of 8."""
    target, model = FrozenTarget(tiny_model(family)), FrozenTarget(tiny_model(family, seed=1))
    drafter = LMDrafter.of(model, target)
    drafter.shape = Chain(4)
    texts = [[5, 9, 3, 8, 1, 7], [4, 6]]
    prompt = torch.tensor([texts[0], [*texts[1], 0, 0, 0, 0]])
    session = target.session((), 2)
    seen = session.read(prompt, torch.arange(6) < torch.tensor([[6], [2]]))
    roots = torch.tensor([11, 12])
    memory = drafter.begin(seen, roots)
    for accepted in ([0, 4], [1, 3], [4, 0], [2, 1]):
        dice = RecordingDice()
        tree = drafter.propose(memory, warp=Warp(1.0), dice=dice)
        for row, text in enumerate(texts):
            whole = torch.tensor([[*text, int(roots[row]), *tree.tokens[row].tolist()]])
            with torch.no_grad():
                fresh = model.model(input_ids=whole, use_cache=False).logits[0].softmax(-1)
            for step, law in enumerate(dice.laws):
                torch.testing.assert_close(law[row], fresh[len(text) + step], rtol=0, atol=1e-5)
        assert memory.session.cache.lengths.tolist() == [len(text) + 1 for text in texts], "all but what comes next"
        session.extend(roots, tree)
        count = torch.tensor(accepted)
        path = torch.where(torch.arange(4) < count[:, None], torch.arange(4), -1)
        verdict = Verdict(path, count, roots + 20, torch.ones(2, 4).bool(), torch.ones(2, 4))
        memory = drafter.remember(memory, verdict, session.commit(verdict))
        for row, text in enumerate(texts):
            text += [int(roots[row]), *tree.tokens[row, : accepted[row]].tolist()]
        roots = verdict.token


def tokenizer(words: Sequence[str], added: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One token a word, then the added ones."""
    built = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    built.add_tokens([AddedToken(token) for token in added])
    return PreTrainedTokenizerFast(tokenizer_object=built)


WORDS = [f"w{index}" for index in range(90)]


def pair(mine: PreTrainedTokenizerFast | None, theirs: PreTrainedTokenizerFast | None, **sizes: int) -> LMDrafter:
    model = tiny_model(seed=1, vocab_size=sizes.get("model", 96))
    target = tiny_model(vocab_size=sizes.get("target", 96))
    return LMDrafter.of(FrozenTarget(model, mine, "drafter"), FrozenTarget(target, theirs, "target"))


def test_v09_v10_another_tokenizer_is_refused_with_both_strings() -> None:
    swapped = list(WORDS)
    swapped[5], swapped[6] = swapped[6], swapped[5]
    with pytest.raises(SpecdraftError, match=r"2 ids to different tokens \(5: 'w6' and 'w5', 6: 'w5' and 'w6'\)"):
        pair(tokenizer(swapped), tokenizer(WORDS))


@pytest.mark.parametrize("theirs", [["<other>"], []], ids=["renamed", "missing"])
def test_v09_an_added_token_that_differs_is_allowed_with_a_warning(
    theirs: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        pair(tokenizer(WORDS, ["<extra>"]), tokenizer(WORDS, theirs))
    assert "differ in 1 added tokens: 90: '<extra>'" in caplog.text
    caplog.clear()
    pair(tokenizer(WORDS, ["<extra>"]), tokenizer(WORDS, ["<extra>"]))
    assert not caplog.text


def test_v09_an_added_token_that_ends_the_targets_text_must_be_the_same() -> None:
    model, target = tiny_model(seed=1), tiny_model()
    target.generation_config.eos_token_id = 90
    with pytest.raises(SpecdraftError, match="90: '<stop>' and '<end>'"):
        LMDrafter.of(
            FrozenTarget(model, tokenizer(WORDS, ["<stop>"])), FrozenTarget(target, tokenizer(WORDS, ["<end>"]))
        )


@pytest.mark.parametrize(("model", "target"), [(92, 96), (96, 92)])
def test_v07_padded_vocabularies_draft_real_ids_alone_and_lose_nothing(model: int, target: int) -> None:
    """The random target emits padding ids too; the drafter reads them and never drafts them."""
    drafter = pair(tokenizer(WORDS), tokenizer(WORDS), model=model, target=target)
    held = FrozenTarget(tiny_model(vocab_size=target))
    assert drafter.config.shared == 90
    seen = held.session((), 1).read(torch.tensor([[7, target - 1]]), torch.ones(1, 2).bool())
    dice = RecordingDice()
    drafter.propose(drafter.begin(seen, torch.tensor([target - 2])), warp=Warp(1.0), dice=dice)
    assert all(law.shape == (1, target) and not law[:, 90:].any() for law in dice.laws)
    prompts = [[7, target - 1, 3]]
    plain, fast = (
        generate(held, d, prompts, warp=Warp(), max_new_tokens=12).generations[0].tokens for d in (None, drafter)
    )
    assert plain == fast


def test_v07_without_tokenizers_the_vocabularies_must_be_as_large() -> None:
    with pytest.raises(SpecdraftError, match="92 ids, the target target 96"):
        pair(None, None, model=92)


def test_a_draft_lm_drafts_a_tree_whose_every_node_is_its_own_likeliest() -> None:
    drafter = pair(None, None)
    drafter.shape = StaticTree(((0,), (1,), (0, 0), (1, 1)))
    prompt = torch.tensor([[7, 9]])
    session = drafter.reader.session((), 1)
    seen = session.read(prompt, torch.ones(1, 2).bool())
    tree = drafter.propose(drafter.begin(seen, torch.tensor([11])), warp=Warp(), dice=RecordingDice())

    def ranked(*path: int) -> list[int]:
        whole = torch.tensor([[7, 9, 11, *path]])
        with torch.no_grad():
            return drafter.lm(input_ids=whole, use_cache=False).logits[0, -1].argsort(descending=True).tolist()

    first, second = ranked()[:2]
    assert tree.tokens.tolist() == [[first, second, ranked(first)[0], ranked(second)[1]]]
    assert tree.parents.tolist() == [[-1, -1, 0, 1]]


def test_greedy_drafts_are_the_argmax_and_chosen() -> None:
    drafter = pair(None, None)
    seen = drafter.reader.session((), 1).read(torch.tensor([[7]]), torch.ones(1, 1).bool())
    memory = drafter.begin(seen, torch.tensor([1]))
    dice = RecordingDice()
    drafted: DraftTree = drafter.propose(memory, warp=Warp(), dice=dice)
    drawn = drafter.propose(memory, warp=Warp(1.0), dice=dice)
    assert drafted.laws is None
    assert torch.equal(drafted.tokens, drawn.tokens)
