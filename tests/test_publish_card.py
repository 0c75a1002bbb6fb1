"""What a card says and the commands that it prints, for every kind of drafter, from a synthetic report."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from evaluation.example_report import example_report
from markdown_it import MarkdownIt
from models import tiny_model
from tiny_chat import chat_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from specdraft.card import Data, Measured, Publication, public, render
from specdraft.cli import app
from specdraft.evaluation.report import Report
from specdraft.formats import FORMATS
from specdraft.serving import Serving, commands

REPO, BASE = "someone/head", "maker/target"
CONFIGS: dict[str, dict[str, Any]] = {
    "eagle3": {"eagle_aux_hidden_state_layer_ids": [2, 15, 27], "draft_vocab_size": 4096, "vocab_size": 49152},
    "medusa": {"num_heads": 3, "medusa_num_heads": 3},
    "lm": {"vocab_size": 96, "specdraft": {"drafter": "lm", "vocab_size": 96}},
    "mtp": {"num_nextn_predict_layers": 2},
}
INT8 = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}


def report(**changes: Any) -> Report:
    made = example_report()
    setting = made.setting.model_copy(update={"drafter_weights": "sha256:1", **changes})
    return made.model_copy(update={"setting": setting})


def measured(layout: str | None, kind: str | None = None, **changes: Any) -> Measured:
    kind = kind or FORMATS[layout or ""].drafters[0]
    config = {"torch_dtype": "bfloat16", "specdraft": {"drafter": kind}, **CONFIGS.get(kind, {})}
    made = {
        "specdraft": "0.1.0",
        "data": {"a/b.jsonl": "sha256:2"},
        "recipe": {"training": {"epochs": 2, "seed": None}},
    }
    return Measured(Path("head"), {**config, **changes}, layout, "sha256:1", 29_878_696, made, [report()])


def publication(main: Measured, **changes: Any) -> Publication:
    given: dict[str, Any] = {"base_revision": "abc", "variants": {}, "as_folders": False, "data": ()}
    given |= {"licence": "mit", "languages": ("en",), "tags": ()}
    return Publication(repo=REPO, base_model=BASE, main=main, **{**given, **changes})


def blocks(card: str) -> list[tuple[str, str]]:
    """Language and text of each block of code, as a reader of Markdown finds them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(card.split("---\n", 2)[2])
    return [(token.info, token.content) for token in tokens if token.type == "fence"]


def served(layout: str, **place: Any) -> Serving:
    one = measured(layout)
    where = {"revision": None, "folder": None, **place}
    return commands(one.kind, layout, one.config, one.reports, target=BASE, repo=REPO, **where)


def text_of(layout: str, engine: str, **place: Any) -> str:
    (found,) = [one.text for one in served(layout, **place).engines if one.name == engine]
    return found


@pytest.mark.parametrize("layout", FORMATS)
def test_a_layout_has_a_command_of_each_engine_that_loads_it(layout: str) -> None:
    named = {engine.name for engine in served(layout).engines}
    meant = {name for name in ("vLLM", "SGLang", "TensorRT-LLM") if name in FORMATS[layout].engines}
    if layout == "huggingface":
        meant = {"vLLM", "SGLang", "TensorRT-LLM", "transformers"}
    assert named == meant


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("safeailab", {"method": "eagle3", "model": REPO, "num_speculative_tokens": 4}),
        ("speculators", {"method": "eagle3", "model": REPO, "num_speculative_tokens": 4}),
        ("eagle1-vllm", {"method": "eagle", "model": REPO, "num_speculative_tokens": 4}),
        ("medusa-vllm", {"method": "medusa", "model": REPO, "num_speculative_tokens": 3}),
        ("fasterdecoding", {"method": "medusa", "model": REPO, "num_speculative_tokens": 3}),
        ("huggingface", {"method": "draft_model", "model": REPO, "num_speculative_tokens": 4}),
        ("mtp", {"method": "mtp", "num_speculative_tokens": 4}),
    ],
)
def test_vllms_command(layout: str, settings: dict[str, Any]) -> None:
    words = shlex.split(text_of(layout, "vLLM").replace("\\\n", ""))
    assert words[:3] == ["vllm", "serve", REPO if layout == "mtp" else BASE]
    assert json.loads(words[words.index("--speculative-config") + 1]) == settings


def test_a_variant_is_named_by_its_branch_or_fetched_into_a_folder() -> None:
    words = shlex.split(text_of("safeailab", "vLLM", revision="int8").replace("\\\n", ""))
    assert json.loads(words[-1])["revision"] == "int8"
    assert "--speculative-draft-model-revision int8" in text_of("safeailab", "SGLang", revision="int8")
    found = served("safeailab", folder="int8")
    assert found.fetched == "hf download someone/head --include 'int8/*' --local-dir drafter"
    words = shlex.split(text_of("safeailab", "vLLM", folder="int8").replace("\\\n", ""))
    assert json.loads(words[-1])["model"] == "drafter/int8"
    assert 'subfolder="int8"' in found.load


def test_sglang_drafts_the_tree_that_was_measured_best_and_tensorrt_counts_layers_from_the_first() -> None:
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4" in text_of("safeailab", "SGLang")
    assert "--speculative-num-draft-tokens 17" in text_of("safeailab", "SGLang")
    assert "--speculative-num-steps 4 --speculative-eagle-topk 1" in text_of("huggingface", "SGLang")
    written = text_of("safeailab", "TensorRT-LLM").split("END")[1].removeprefix("'\n")
    assert yaml.safe_load(written) == {
        "speculative_config": {
            "decoding_type": "Eagle3",
            "max_draft_len": 4,
            "speculative_model": REPO,
            "eagle3_layers_to_capture": [1, 14, 26],
        }
    }


@pytest.mark.parametrize(
    ("layout", "kind"), [*((name, None) for name in FORMATS), (None, "hydra"), (None, "early_exit"), (None, "mtp")]
)
def test_every_card_is_whole_and_our_commands_parse(layout: str | None, kind: str | None) -> None:
    card = render(publication(measured(layout, kind)), None, [])
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == BASE
    assert head["model-index"][0]["results"]
    for title in ("Measured", "Serve", "Load and measure with specdraft", "Target", "Training", "Limits"):
        assert f"\n## {title}\n" in card
    assert "None" not in card
    assert "\n\n\n" not in card
    found = blocks(card)
    if layout is None:
        assert "specdraft's own loop" in card or "stitches them" in card
        assert len(found) == 3
    ours = [line for _, text in found for line in text.replace("\\\n", "").splitlines() if line.startswith("specdraft")]
    assert ours
    for line in ours:
        result = CliRunner().invoke(app, [*shlex.split(line)[1:], "--dry-run"])
        assert result.exit_code == 0, result.output


def test_x07_a_card_says_what_was_measured_and_what_was_not() -> None:
    main = measured("safeailab")
    card = render(publication(main, variants={"int8": measured("safeailab", quantization_config=INT8)}), None, [])
    made = main.reports[0]
    for text in (
        made.headline,
        "samples of up to 512 tokens",
        "drafts 4,096 of the target's 49,152 ids",
        "measured on 40 prompts",
        "at temperature 0 only",
        "names no source or licence",
        made.warnings[0],
        "revision `abc`",
        f"`{made.setting.target_fingerprint}`",
        "| int8 | INT8 (compressed-tensors) | 29.9 MB |",
        "| summarising |",
        "b.jsonl` sha256:2",
        "epochs: 2",
    ):
        assert text in card, text
    tau = made.systems[0].acceptance.tau
    assert f"{tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]" in card
    assert "a/b.jsonl" not in card
    assert "seed" not in dict(blocks(card))["yaml"]
    data = (Data(name="maker/prompts", licence="cc-by-4.0", note="answered by the target"),)
    assert "* maker/prompts: cc-by-4.0; answered by the target" in render(publication(main, data=data), None, [])


def test_what_transformers_is_told_to_do_works_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = chat_tokenizer()
    for name, seed in ((BASE, 0), (REPO, 1)):
        tiny_model(vocab_size=len(tokenizer), seed=seed).save_pretrained(name)
        tokenizer.save_pretrained(name)
    said: list[str] = []
    exec(text_of("huggingface", "transformers"), {"print": said.append})
    target = AutoModelForCausalLM.from_pretrained(BASE)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    assert said == [tokenizer.decode(target.generate(**prompt, max_new_tokens=32)[0])]


def test_a_draft_lm_with_fewer_ids_than_its_target_is_not_said_to_be_served() -> None:
    one = measured("huggingface", specdraft={"drafter": "lm", "vocab_size": 100})
    found = commands("lm", one.layout, one.config, one.reports, target=BASE, repo=REPO, revision=None, folder=None)
    assert found.engines == []
    assert "fills it up" in (found.note or "")


def test_public_keeps_names_and_drops_places() -> None:
    given = {
        "/data/a.jsonl": 1,
        "b/a.jsonl": 2,
        "target": BASE,
        "cache": "~/x/y/",
        "n": None,
        "l": ["C:\\u\\z", "plain"],
    }
    assert public(given, {BASE}) == {
        "a.jsonl": 1,
        "a.jsonl (2)": 2,
        "target": BASE,
        "cache": "y",
        "n": None,
        "l": ["z", "plain"],
    }
