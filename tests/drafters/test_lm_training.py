"""A draft LM that is trained: where it starts, what learns, and that it is a plain Hugging Face folder when saved."""

import json
import logging
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from drafting import ForcedDice, token_rows
from models import tiny_model
from safetensors.torch import load_file, save_file
from tiny_chat import chat_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdraft.config import SpecdraftError
from specdraft.decoding import generate
from specdraft.drafters import load_drafter
from specdraft.drafters.base import Drafter
from specdraft.drafters.lm import LMDrafter, LMRecipe
from specdraft.drafters.shapes import Chain
from specdraft.drafters.vocabulary import check_tokenizers
from specdraft.packing import PackedLinear, pack_linears
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.trainer import DrafterTrainer, TrainingSettings, observe
from specdraft.warping import Warp

COUNTS = torch.zeros(96, dtype=torch.int64)
LORA = {"rank": 2, "alpha": 8}
TIED = {"tie_word_embeddings": True}


def made(target: FrozenTarget, shaken: bool = False, **recipe: Any) -> LMDrafter:
    torch.manual_seed(0)
    drafter = LMDrafter.for_target(target, LMRecipe(**recipe), COUNTS)
    if shaken:
        with torch.no_grad():
            for weight in drafter.parameters():
                if weight.requires_grad:
                    weight += torch.randn_like(weight) * 0.2
    return drafter.eval()


def texts(rows: int = 2, length: int = 12) -> Tensor:
    return torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(3))


def logits(drafter: LMDrafter, tokens: Tensor) -> Tensor:
    seen = drafter.target.observe(tokens, torch.ones_like(tokens).bool(), ())
    [prediction] = drafter.predict(tokens, seen)
    assert prediction[:2] == (1, 0)
    with torch.no_grad():
        return prediction.head(prediction.hidden)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_neox", "mixtral"])
@torch.no_grad()
def test_all_layers_cut_from_the_target_are_the_target(family: str) -> None:
    """Scaling, soft-capping and windows included; a plain head stays one, for the loss's quick way."""
    target = FrozenTarget(tiny_model(family))
    drafter, tokens = made(target, layers=4), texts(length=20)
    want = target.head(target.observe(tokens, torch.ones_like(tokens).bool(), ()).hidden)
    torch.testing.assert_close(logits(drafter, tokens), want, rtol=0, atol=1e-4)
    [prediction] = drafter.predict(tokens, target.observe(tokens, torch.ones_like(tokens).bool(), ()))
    assert (type(prediction.head) is torch.nn.Linear) == (family != "gemma2")


@pytest.mark.parametrize(
    ("recipe", "kept"),
    [({}, [0, 3]), ({"layers": 3}, [0, 1, 3]), ({"layers": 2, "spread": "first"}, [0, 1]), ({"layers": 1}, [0])],
)
def test_a_cut_keeps_these_layers_in_new_places(recipe: dict[str, Any], kept: list[int]) -> None:
    target = FrozenTarget(tiny_model("gemma2"))
    lm = made(target, **recipe).lm
    kinds = target.config.layer_types
    assert lm.config.num_hidden_layers == len(lm.model.layers) == len(kept)
    assert lm.config.layer_types == [kinds[place] for place in kept]
    for new, (old, layer) in enumerate(zip(kept, lm.model.layers, strict=True)):
        assert layer.self_attn.layer_idx == new
        assert torch.equal(layer.mlp.up_proj.weight, target.layers[old].mlp.up_proj.weight)
    assert torch.equal(lm.model.norm.weight, target.final_norm.weight)
    assert target.config.num_hidden_layers == 4, "the target's own config is another object"
    assert {weight.dtype for weight in lm.parameters()} == {torch.float32}
    assert lm.lm_head.weight is lm.model.embed_tokens.weight, "Gemma's are tied"
    assert lm.lm_head.weight.data_ptr() != target.embedding.weight.data_ptr()


def test_more_layers_than_there_are_and_idle_settings_are_refused() -> None:
    with pytest.raises(SpecdraftError, match=r"drafter\.layers is 5: in-memory has 4 layers"):
        made(FrozenTarget(tiny_model()), layers=5)
    with pytest.raises(ValueError, match="mean nothing beside model"):
        LMRecipe(model="somewhere", layers=2)
    with pytest.raises(ValueError, match="lora mean nothing beside checkpoint"):
        LMRecipe.model_validate({"checkpoint": "somewhere", "lora": LORA})
    with pytest.raises(SpecdraftError, match=r"drafter\.lora\.modules \['none'\] fit nothing"):
        made(FrozenTarget(tiny_model()), lora={"modules": ("none",)})


def trained(target: FrozenTarget, folder: Path, steps: int, resume: str | None = None, **recipe: Any) -> LMDrafter:
    drafter = made(target, **recipe).train()
    settings = TrainingSettings(
        output_dir=folder, max_steps=steps, batch_size=2, save_every=2, log_every=1, learning_rate=1e-2,
        schedule="constant", warmup=0.0,
    )  # fmt: skip
    arguments = settings.arguments(target.device, evaluating=False)
    trainer = DrafterTrainer(drafter, token_rows((14, 9, 12, 11)), arguments, look=partial(observe, target, ()))
    trainer.train(resume_from_checkpoint=resume)
    held = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
    assert held == {id(weight) for weight in drafter.parameters() if weight.requires_grad}
    return drafter


@pytest.mark.parametrize("recipe", [{}, {"lora": {**LORA, "dropout": 0.1}}], ids=["whole", "lora"])
def test_t15_t21_a_run_that_goes_on_is_the_run_that_was_not_stopped(recipe: dict[str, Any], tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model(**TIED))
    before = {name: weight.clone() for name, weight in target.model.state_dict().items()}
    start = made(target, **recipe)
    whole = trained(target, tmp_path / "whole", 4, **recipe)
    trained(target, tmp_path / "parts", 2, **recipe)
    rest = trained(target, tmp_path / "parts", 4, str(tmp_path / "parts" / "checkpoint-2"), **recipe)
    torch.testing.assert_close(rest.state_dict(), whole.state_dict(), rtol=0, atol=0)
    for name, weight in whole.named_parameters():
        assert weight.requires_grad == (not recipe or ".lora_" in name)
        assert torch.equal(weight, start.get_parameter(name)) != weight.requires_grad, name
    assert all(torch.equal(before[name], weight) for name, weight in target.model.state_dict().items())
    saved = [AutoModelForCausalLM.from_pretrained(tmp_path / run / "checkpoint-4") for run in ("whole", "parts")]
    torch.testing.assert_close(*(model.state_dict() for model in saved), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [("llama", {}), ("gemma2", {}), ("gpt_neox", {}), ("mixtral", {}), ("llama", {"lora": LORA})],
)
@torch.no_grad()
def test_t29_x01_x02_what_is_saved_is_a_plain_folder_and_comes_back(
    family: str, recipe: dict[str, Any], tmp_path: Path
) -> None:
    target = FrozenTarget(tiny_model(family, **(TIED if family == "llama" else {})))
    drafter, tokens = made(target, shaken=True, **recipe), texts()
    drafter.config.trained_length = 64
    drafter.save_pretrained(tmp_path)
    plain, found = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(plain) is type(drafter.lm)
    assert not any(found.values()), found
    loaded = load_drafter(tmp_path)
    assert isinstance(loaded, LMDrafter)
    loaded.attach(target)
    assert loaded.config.to_dict() == drafter.config.to_dict()
    torch.testing.assert_close(loaded.lm.state_dict(), plain.state_dict(), rtol=0, atol=0)
    got, want = logits(loaded, tokens), logits(drafter, tokens)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if recipe else 0)
    torch.testing.assert_close(plain(input_ids=tokens, use_cache=False).logits, got, rtol=0, atol=1e-6)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["specdraft"] == {"drafter": "lm", "vocab_size": 96, "shared": 96, "trained_length": 64}
    assert written["torch_dtype"] == written["dtype"] == "float32"
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] if family == "llama" else True
    assert (tmp_path / "adapter").exists() == bool(recipe)
    loaded.save_pretrained(tmp_path / "again")
    one, other = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_t29_weights_gathered_without_a_tied_name_are_whole(tmp_path: Path) -> None:
    drafter = made(FrozenTarget(tiny_model(**TIED)), shaken=True)
    gathered = drafter.state_dict()
    del gathered["lm.lm_head.weight"]
    drafter.save_pretrained(tmp_path, state_dict=gathered)
    tokens = texts()
    loaded = load_drafter(tmp_path)
    loaded.attach(drafter.target)
    assert torch.equal(logits(cast(LMDrafter, loaded), tokens), logits(drafter, tokens))


@pytest.mark.parametrize("said", ["model.norm.weight is missing", "extra.weight is not expected", "model.norm.weight"])
def test_x01_x02_a_tensor_that_does_not_fit_is_refused(said: str, tmp_path: Path) -> None:
    drafter = made(FrozenTarget(tiny_model()))
    drafter.save_pretrained(tmp_path / "good")
    path = tmp_path / "good" / "model.safetensors"
    tensors = load_file(path)
    if "missing" in said:
        del tensors["model.norm.weight"]
    elif "expected" in said:
        tensors["extra.weight"] = torch.zeros(3)
    else:
        tensors["model.norm.weight"] = torch.zeros(31)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(SpecdraftError, match=said if "expected" in said or "missing" in said else None):
        load_drafter(tmp_path / "good")
    with pytest.raises(SpecdraftError, match=said):
        drafter.save_pretrained(tmp_path / "bad", state_dict={f"lm.{name}": t for name, t in tensors.items()})
    assert not (tmp_path / "bad").exists()


@torch.no_grad()
def test_t07_decoding_reads_the_weights_that_training_changes_and_packs_loaded_ones(tmp_path: Path) -> None:
    target = FrozenTarget(tiny_model())
    drafter, tokens = made(target, shaken=True, lora=LORA), texts(1)

    def drafted(drafter: LMDrafter) -> Tensor:
        drafter.shape = Chain(3)
        seen = target.observe(tokens[:, :6], torch.ones(1, 6).bool(), ())
        laws = drafter.propose(drafter.begin(seen, tokens[:, 6]), warp=Warp(1.0), dice=ForcedDice(tokens[:, 7:10])).laws
        assert laws is not None
        return laws[0]

    before = drafted(drafter)
    for weight in drafter.parameters():
        if weight.requires_grad:
            weight += torch.randn_like(weight) * 0.3
    after = drafted(drafter)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(after, logits(drafter, tokens)[0, 6:9].softmax(-1), rtol=0, atol=1e-5)
    drafter.save_pretrained(tmp_path)
    loaded = cast(LMDrafter, load_drafter(tmp_path))
    loaded.attach(target)
    pack_linears(loaded)
    assert type(loaded.reader._head) is PackedLinear
    torch.testing.assert_close(drafted(loaded), after, rtol=0, atol=1e-5)


def folders(tmp_path: Path, target_ids: int, model_ids: int) -> tuple[FrozenTarget, Path]:
    """A target and a draft LM of another width, with one tokenizer and heads padded to other lengths."""
    tokenizer = chat_tokenizer()
    for name, ids, width in (("target", target_ids, 32), ("lm", model_ids, 16)):
        model = tiny_model(seed=len(name), vocab_size=len(tokenizer) + ids, hidden_size=width)
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return FrozenTarget.load(TargetRecipe(name=str(tmp_path / "target"), dtype="float32")), tmp_path / "lm"


@pytest.mark.parametrize(("target_ids", "model_ids"), [(0, 8), (8, 0), (4, 8)])
def test_v07_padded_columns_are_neither_drafted_nor_trained_on(target_ids: int, model_ids: int, tmp_path: Path) -> None:
    """p is the target's over all of its ids, then restricted, never renormalised."""
    target, folder = folders(tmp_path, target_ids, model_ids)
    drafter = made(target, model=str(folder))
    real = len(target.tokenizer)
    assert drafter.config.shared == check_tokenizers(drafter.reader, target) == real
    tokens = torch.randint(3, real, (1, 12), generator=torch.Generator().manual_seed(3))
    labels = tokens.clone()
    evidence = observe(target, (), {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)})
    output = drafter.train()(tokens, labels, evidence)
    output.loss.backward()
    with torch.no_grad():
        p = target.head(evidence.observation.hidden).softmax(-1)[0, :-1, :real]
        q = drafter.lm(input_ids=tokens).logits[0, :-1, :real].softmax(-1)
    assert float(output.overlaps[0]) == pytest.approx(float(torch.minimum(p, q).sum()), rel=1e-4)
    grad = drafter.lm.lm_head.weight.grad
    assert grad is not None
    assert grad[:real].any()
    assert not grad[real:].any()
    drafter.eval().save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").get_vocab() == target.tokenizer.get_vocab()
    rows: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 8}
    loaded = load_drafter(tmp_path / "saved")
    loaded.attach(target)
    prompts = tokens[:, :5].tolist()
    plain, fast = (generate(target, d, prompts, **rows).generations[0].tokens for d in (None, cast(Drafter, loaded)))
    assert plain == fast


def test_the_saved_drafter_can_write_answers_itself_and_stops_where_the_target_does(tmp_path: Path) -> None:
    """On its own text: `respond` takes the folder as a target."""
    target, _ = folders(tmp_path, 0, 0)
    target.model.generation_config.eos_token_id = [2, 7]
    made(target).save_pretrained(tmp_path / "saved")
    writer = FrozenTarget.load(TargetRecipe(name=str(tmp_path / "saved"), dtype="float32"))
    assert writer.end_ids == (2, 7)
    assert writer.tokenizer.get_vocab() == target.tokenizer.get_vocab()


def test_v12_a_target_with_more_ids_is_warned_of_and_one_with_fewer_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(FrozenTarget(tiny_model())).save_pretrained(tmp_path)
    loaded = cast(LMDrafter, load_drafter(tmp_path))
    with pytest.raises(SpecdraftError, match="made for a target with 96 ids; in-memory has 90"):
        loaded.attach(FrozenTarget(tiny_model(vocab_size=90)))
    grown = FrozenTarget(tiny_model(vocab_size=98))
    with caplog.at_level(logging.WARNING):
        loaded.attach(grown)
    assert "2 ids more" in caplog.text
    assert loaded.kept_ids() is not None
    prompts = [[97, 5, 96]]
    rows: dict[str, Any] = {"warp": Warp(), "max_new_tokens": 8}
    plain, fast = (generate(grown, d, prompts, **rows).generations[0].tokens for d in (None, cast(Drafter, loaded)))
    assert plain == fast
