"""A static tree in an evaluation: calibrated on answers, or given, and named in the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.markov import MarkovDrafter, law, markov_target
from models import tiny_model
from pydantic import ValidationError
from tiny_chat import chat_tokenizer

from specdraft.config import SpecdraftError
from specdraft.drafters.medusa import MedusaDrafter, MedusaRecipe
from specdraft.evaluation import EvalRecipe, Prompt, evaluate
from specdraft.target import FrozenTarget

PROMPTS = [Prompt([5, 9, 3, 8], "one"), Prompt([4, 6], "two")]


def recipe(**system: Any) -> EvalRecipe:
    systems = [{"kind": "static_tree", **system}]
    return EvalRecipe.model_validate({"systems": systems, "max_new_tokens": 5, "bootstrap_samples": 100})


def answered(folder: Path) -> str:
    messages = [{"role": "user", "content": "What is the capital?"}, {"role": "assistant", "content": "two and two"}]
    path = folder / "answers.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    return str(path)


def test_it_is_calibrated_on_answers_and_the_report_names_its_paths(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    target = FrozenTarget(tiny_model(vocab_size=len(tokenizer)), tokenizer)
    drafter = MedusaDrafter.for_target(target, MedusaRecipe(heads=2), torch.zeros(1)).eval()
    found = evaluate(target, drafter, recipe(nodes=6, calibrate=[answered(tmp_path)]), prompts=PROMPTS)
    [system] = found.systems
    assert system.name == "static tree of 6"
    paths = system.shape["paths"]
    assert isinstance(paths, list)
    assert len(paths) == 6
    assert system.losslessness.verdict == "identical"
    again = evaluate(target, drafter, recipe(paths=paths), prompts=PROMPTS)
    assert again.systems[0].acceptance == system.acceptance
    fallback = recipe(nodes=6).model_copy(update={"training_prompts": (answered(tmp_path),)})
    assert evaluate(target, drafter, fallback, prompts=PROMPTS).systems[0].shape["paths"] == paths
    with pytest.raises(SpecdraftError, match="calibrated on answers"):
        evaluate(target, drafter, recipe(), prompts=PROMPTS)
    with pytest.raises(SpecdraftError, match="trained 2 deep"):
        evaluate(target, drafter, recipe(depth=3, calibrate=[answered(tmp_path)]), prompts=PROMPTS)


def test_what_has_no_effect_and_what_cannot_be_calibrated_is_refused() -> None:
    with pytest.raises(ValidationError, match="nodes has no effect"):
        recipe(paths=[[0]], nodes=3)
    with pytest.raises(SpecdraftError, match="only a trained drafter"):
        evaluate(markov_target(law(0)), MarkovDrafter(law(1)), recipe(calibrate=["x"]), prompts=PROMPTS)
