"""A draft LM gets as many ids as its target, and drafts as before."""

from pathlib import Path

import pytest
import torch
from models import tiny_model
from safetensors.torch import load_file
from tiny_chat import chat_tokenizer
from transformers import AutoModelForCausalLM

from specdraft.causal import CausalLM
from specdraft.config import SpecdraftError
from specdraft.drafters import load_drafter
from specdraft.drafters.lm import LMConfig, LMDrafter
from specdraft.formats import FORMATS, Folder, Naming
from specdraft.target import FrozenTarget

FORMAT = FORMATS["huggingface"]


def drafter_of(size: int, target: FrozenTarget, tied: bool) -> LMDrafter:
    """An LM with `size` ids of its own."""
    lm = CausalLM(tiny_model(seed=1, vocab_size=size, num_hidden_layers=2, tie_word_embeddings=tied))
    drafter = LMDrafter(LMConfig(vocab_size=target.vocab_size, shared=min(size, target.vocab_size)), lm)
    drafter._target = [target]
    return drafter.eval()


@torch.no_grad()
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own"])
@pytest.mark.parametrize("size", [90, 96, 104])
def test_x10_it_is_a_plain_folder_with_the_targets_vocabulary_and_the_same_laws(
    size: int, tied: bool, tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model())
    drafter = drafter_of(size, target, tied)
    FORMAT.write(drafter, Naming(target, "t"), tmp_path / "out")
    assert drafter.reader.vocab_size == size, "the drafter itself is left as it was"
    plain, found = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(found.values()), found
    assert plain.config.vocab_size == plain.lm_head.weight.shape[0] == plain.model.embed_tokens.weight.shape[0] == 96
    loaded = load_drafter(tmp_path / "out")
    loaded.attach(target)
    tokens = torch.randint(0, 90, (1, 9))
    tokens[0, 3] = 95  # which the small one has not, and reads as its last
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), ())
    one, other = (d.predict(tokens, seen)[0] for d in (drafter, loaded))
    torch.testing.assert_close(other.head(other.hidden), one.head(one.hidden)[..., :96])
    logits = plain(input_ids=tokens, use_cache=False).logits
    assert int(logits.argmax(-1).max()) < min(size, 96), "what was filled up is never drafted"


def test_v07_the_rows_that_fill_it_up_are_copies_of_the_last(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model())
    drafter = drafter_of(90, target, tied=False)
    FORMAT.write(drafter, Naming(target, "t"), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        was = drafter.lm.state_dict()[name]
        assert torch.equal(tensors[name][:90], was)
        assert torch.equal(tensors[name][90:], was[-1:].expand(6, -1))


def test_x01_a_strangers_lm_is_read_and_keeps_its_every_bit(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    target = FrozenTarget(tiny_model(vocab_size=len(tokenizer) + 8), tokenizer)
    theirs = tiny_model(seed=1, vocab_size=len(tokenizer))
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    found = FORMAT.read(Folder(tmp_path / "theirs"), target)
    assert isinstance(found, LMDrafter)
    assert found.config.shared == len(tokenizer)
    assert all(torch.equal(theirs.state_dict()[name], tensor) for name, tensor in found.lm.state_dict().items())
    FORMAT.write(found, Naming(target, "t"), tmp_path / "out")
    again = FORMAT.read(Folder(tmp_path / "out"), target)
    assert isinstance(again, LMDrafter)
    assert (again.config.shared, again.reader.vocab_size) == (len(tokenizer), target.vocab_size)


def test_v09_without_a_tokenizer_another_vocabulary_is_not_the_targets(tmp_path: Path) -> None:
    tiny_model(vocab_size=90).save_pretrained(tmp_path)
    with pytest.raises(SpecdraftError, match="90 ids"):
        FORMAT.read(Folder(tmp_path), FrozenTarget(tiny_model()))
