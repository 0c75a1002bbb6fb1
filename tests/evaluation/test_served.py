"""Served mode against a vLLM that is played: what it is asked, what is counted, and the verdict on its replies."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation.example_report import example_report
from evaluation.fake_vllm import fake_vllm
from models import tiny_model
from tiny_chat import chat_tokenizer
from typer.testing import CliRunner

from specdraft import cli
from specdraft.config import SpecdraftError
from specdraft.decoding import Generation, Round
from specdraft.drafters.base import Drafter
from specdraft.drafters.eagle import Eagle3Drafter, Eagle3Recipe
from specdraft.drafters.lm import LMDrafter
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.medusa import MedusaDrafter, MedusaRecipe
from specdraft.drafters.shapes import Chain
from specdraft.evaluation import EvaluateRecipe, Report, evaluate_recipe, page, stage
from specdraft.evaluation.served import Ask, Replies, VllmEngine, confront, decode_both, judge
from specdraft.evaluation.served_counts import Counts, Served
from specdraft.target import FrozenTarget, TargetRecipe

ASK = Ask([[5, 6, 7, 5, 6], [9, 8], [11, 12, 13, 11, 12]], 24, 3)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_model())


def counted(chain: Sequence[Generation], gamma: int = ASK.gamma) -> list[Counts]:
    return [Counts.of_rounds(generation.rounds, gamma) for generation in chain]


def asked(
    target: FrozenTarget, drafter: Drafter, folder: Path, counts: Sequence[Counts] | None = None, **fault: Any
) -> tuple[Served, dict[str, Any]]:
    """The verdict on a vLLM that decodes as we do and counts `counts` (else as we do), and the job that it got."""
    plain, chain = decode_both(target, drafter, ASK)
    engine = VllmEngine(kind="vllm", python=fake_vllm(folder, plain, counts or counted(chain), **fault))
    engine.ready(drafter)
    served = confront(engine, target, drafter, ASK, plain, chain)
    return served, json.loads((folder / "job.json").read_text())


def test_e13_e28_e29_counts_are_those_of_the_sampler_and_positions_are_marginal() -> None:
    rounds = [Round(4, 4, 5, 4, ()), Round(4, 4, 2, 4, ()), Round(3, 2, 3, 4, ()), Round(1, 0, 1, 4, ())]  # one cut
    found = Counts.of_rounds([*rounds, Round(0, 0, 1, 0, ())], 4)
    assert found == Counts(drafts=4, draft_tokens=16, accepted=10, per_position=(3, 3, 2, 2))
    assert found.tau == 3.5


def test_e17_a_round_without_a_proposal_is_no_draft() -> None:
    assert Counts.of_rounds([Round(0, 0, 1, 0, ())], 2) == Counts(per_position=(0, 0))
    assert Counts().tau is None
    assert Counts.of_rounds([Round(1, 1, 2, 1, ())], 2) == Counts(
        drafts=1, draft_tokens=1, accepted=1, per_position=(1, 0)
    )


def test_counts_add_and_subtract_whatever_their_depth() -> None:
    one, other = Counts(drafts=2, accepted=3, per_position=(2, 1)), Counts(drafts=1, accepted=1, per_position=(1,))
    assert one + other == Counts(drafts=3, accepted=4, per_position=(3, 1))
    assert one - other == Counts(drafts=1, accepted=2, per_position=(1, 1))


def test_e01_equal_counts_and_answers_are_equal(target: FrozenTarget, tmp_path: Path) -> None:
    served, job = asked(target, LookupDrafter(2, 3, "earliest"), tmp_path)
    assert served.equal
    assert served.answers == "identical"
    assert served.ours == served.theirs
    assert served.ours.accepted > 0, "random models repeat themselves"
    assert job["prompts"] == [list(prompt) for prompt in ASK.prompts]
    assert job["end_ids"] == [2]
    assert job["max_new_tokens"] == 24
    assert job["llm"]["dtype"] == "float32"
    assert job["llm"]["max_model_len"] >= 5 + 24 + 3
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    assert job["llm"]["speculative_config"] == ngram


def test_t11_the_first_prompt_that_is_counted_otherwise_is_named(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = LookupDrafter()
    counts = counted(decode_both(target, drafter, ASK)[1])
    counts[1] += Counts(drafts=1, draft_tokens=3, per_position=(0, 0, 0))
    served, _ = asked(target, drafter, tmp_path, counts)
    assert not served.equal
    assert [one.prompt for one in served.unequal] == [1]
    assert served.unequal[0].theirs.drafts == served.unequal[0].ours.drafts + 1
    assert "the counts differ in 1 of 3 batches of 1, first from prompt 1 on" in served.reason
    assert "set drafter.occurrence to earliest" in served.reason


def test_equal_sums_of_unequal_prompts_are_not_equal(target: FrozenTarget) -> None:
    plain, chain = decode_both(target, LookupDrafter(), ASK)
    ours = counted(chain)
    swapped = [ours[1], ours[0], ours[2]]
    assert ours[0] != ours[1]
    served = judge(target, LookupDrafter(), ASK, plain, ours, Replies("e", None, swapped))
    assert served.ours == served.theirs
    assert not served.equal


def test_e01_an_answer_that_parts_is_named_by_its_place(target: FrozenTarget) -> None:
    plain, chain = decode_both(target, LookupDrafter(), ASK)
    answers = [list(generation.tokens) for generation in plain]
    was, answers[2][4] = answers[2][4], 90
    served = judge(target, LookupDrafter(), ASK, plain, counted(chain), Replies("e", answers, counted(chain)))
    assert (served.equal, served.answers) == (False, "failed")
    assert f"first in prompt 2 at token 4: {was} here, 90 there" in served.reason
    unknown = judge(target, LookupDrafter(), ASK, plain, counted(chain), Replies("e", None, counted(chain)))
    assert (unknown.equal, unknown.answers) == (True, None)
    assert "not compared" in unknown.reason


def test_likely_causes_are_told(target: FrozenTarget) -> None:
    drafter = MedusaDrafter.for_target(target, MedusaRecipe(heads=3), torch.zeros(96)).eval()
    plain, chain = decode_both(target, drafter, ASK)
    longer = [Counts(drafts=1, draft_tokens=5, per_position=(0,) * 5) for _ in chain]
    drafter.to(dtype=torch.bfloat16)
    told = judge(target, drafter, ASK, plain, counted(chain), Replies("e", None, longer)).reason
    assert "3 tokens a round are drafted here, 5 there" in told
    assert "the drafter computes in torch.bfloat16 here" in told


def test_x10_a_trained_drafter_is_written_in_the_layout_that_vllm_loads(target: FrozenTarget, tmp_path: Path) -> None:
    drafter = Eagle3Drafter.for_target(target, Eagle3Recipe(vocabulary=32, unroll=3), torch.ones(96).long()).eval()
    served, job = asked(target, drafter, tmp_path)
    assert served.equal
    assert job["llm"]["speculative_config"]["method"] == "eagle3"
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["draft_vocab_size"] == 32
    assert not Path(job["llm"]["speculative_config"]["model"]).exists(), "the temporary folder is gone"


def test_a_packed_draft_lm_with_fewer_ids_is_written_too(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer()
    size = len(tokenizer)
    target = FrozenTarget(tiny_model(vocab_size=size + 6), tokenizer)
    small = LMDrafter.of(FrozenTarget(tiny_model(seed=1, vocab_size=size), tokenizer), target)
    _, job = asked(target, small, tmp_path)
    assert job["llm"]["speculative_config"]["method"] == "draft_model"
    assert json.loads((tmp_path / "drafter" / "config.json").read_text())["vocab_size"] == size + 6


def test_x13_an_engine_that_fails_or_does_not_speculate_is_an_error(target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError, match=r"exit code 3(.|\n)*unexpected fc\.bias"):
        asked(target, LookupDrafter(), tmp_path, code=3, says="KeyError: unexpected fc.bias")
    python = fake_vllm(tmp_path, [Generation()] * 3, [Counts()] * 3)
    (tmp_path / "replies.json").write_text('{"version": "0", "answers": [[], [], []], "counters": [{}, {}, {}, {}]}')
    plain, chain = decode_both(target, LookupDrafter(), ASK)
    with pytest.raises(SpecdraftError, match="no counter 'drafts': it did not speculate"):
        confront(VllmEngine(kind="vllm", python=python), target, LookupDrafter(), ASK, plain, chain)


def test_what_cannot_be_served_is_said_before_anything_is_decoded(target: FrozenTarget, tmp_path: Path) -> None:
    with pytest.raises(SpecdraftError, match=r"nowhere/python is not there. Make the environment"):
        VllmEngine(kind="vllm", python=tmp_path / "nowhere" / "python").ready(LookupDrafter())

    class Other:
        taps, shape = (), Chain()

    python = fake_vllm(tmp_path, [], [Counts()])
    with pytest.raises(SpecdraftError, match="does not serve Other"):
        VllmEngine(kind="vllm", python=python).ready(Other())  # type: ignore[arg-type]


def test_e16_vllm_continues_the_earliest_of_equally_long_matches() -> None:
    from specdraft.drafters.lookup import Text

    tokens = [1, 2, 3, 9, 1, 2, 3, 7, 5, 1, 2, 3]
    assert Text(tokens, 1, 3, "earliest").continuation(3) == [9, 1, 2]
    assert Text([3, 4, 1, 2, 3, 9, 1, 2, 3], 1, 3, "earliest").continuation(2) == [9, 1], "a longer one goes before it"
    assert Text([4, 4, 4], 1, 3, "earliest").continuation(2) == [4]


def folder_of_target(folder: Path, **changes: Any) -> Path:
    tokenizer = chat_tokenizer()
    tiny_model(vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(folder: Path, engine: dict[str, Any], /, **changes: Any) -> EvaluateRecipe:
    settings = {"prompts": [str(folder / "p.jsonl")], "systems": [{"kind": "chain", "gamma": 2}], "max_new_tokens": 12}
    return EvaluateRecipe.model_validate(
        {
            "target": {"name": str(folder / "target"), "dtype": "float32"},
            "drafter": {"kind": "lookup", "occurrence": "earliest"},
            "evaluation": {**settings, "bootstrap_samples": 100, **changes.pop("evaluation", {})},
            "output": folder / "report",
            **({"engine": engine} | changes),
        }
    )


def test_eval_sets_the_engine_beside_and_fails_when_asked_to(tmp_path: Path) -> None:
    folder_of_target(tmp_path / "target")
    (tmp_path / "p.jsonl").write_text('{"prompt": "one two one two"}\n{"prompt": "three three"}\n')
    target = FrozenTarget.load(TargetRecipe(name=str(tmp_path / "target"), dtype="float32"))
    (tmp_path / "vllm").mkdir()
    python = fake_vllm(tmp_path / "vllm", [Generation()] * 2, [Counts(per_position=(0, 0))] * 2)
    engine = {"kind": "vllm", "python": python}
    with pytest.raises(SpecdraftError, match="does not do as found here"):
        evaluate_recipe(recipe(tmp_path, engine, check_served=True))
    job = json.loads((tmp_path / "vllm" / "job.json").read_text())
    ask = Ask(job["prompts"], 12, 2)
    plain, chain = decode_both(target, LookupDrafter(occurrence="earliest"), ask)
    fake_vllm(tmp_path / "vllm", plain, counted(chain, 2))
    found = evaluate_recipe(recipe(tmp_path, engine, check_served=True))
    assert found["served"]["verdict"] == "equal"
    report = Report.load(tmp_path / "report" / "report.json")
    assert report.served is not None
    assert report.served.engine == "vLLM 0.0, float32"
    written = (tmp_path / "report" / "report.md").read_text()
    assert "## Served by vLLM 0.0, float32: equal" in written
    assert f"| drafts | {report.served.ours.drafts} | {report.served.ours.drafts} |" in written


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluation": {"temperature": 1.0}}, "compared greedily"),
        ({"evaluation": {"compare_with_plain": False}}, "compared greedily"),
        ({"evaluation": {"systems": [{"kind": "tree"}]}}, "has none"),
        ({"evaluation": {"systems": [{"kind": "chain"}, {"kind": "chain", "gamma": 2}]}}, "has chain of 4, chain of 2"),
        ({"evaluation": {"systems": [{"kind": "chain", "stop_below": 0.5}]}}, "one chain of a fixed length"),
        ({"engine": None, "check_served": True}, "no effect without engine"),
    ],
)
def test_an_engine_is_compared_with_one_greedy_chain(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        recipe(tmp_path, {"kind": "vllm"}, **changes)


def test_the_flags_are_settings() -> None:
    common = ["target.name=t", "drafter.kind=lookup", "evaluation.prompts=[p.jsonl]", "output=o", "--dry-run"]
    done = CliRunner().invoke(cli.app, ["eval", *common, "--engine", "vllm", "--check-served"])
    assert done.exit_code == 0, done.output
    assert "check_served: true" in done.stdout
    assert "kind: vllm" in done.stdout
    assert CliRunner().invoke(cli.app, ["eval", *common, "--engine", "tgi"]).exit_code == 2
    given = ["drafter=d", "target.name=t", "format=safeailab", "output=o", "--dry-run"]
    done = CliRunner().invoke(cli.app, ["export", *given, "--verify-engine", "vllm"])
    assert done.exit_code == 0, done.output
    assert "verify_engine:\n  kind: vllm" in done.stdout


def test_a_report_without_an_engine_says_nothing_of_one() -> None:
    report = example_report()
    assert "Served by" not in page.markdown(report)
    assert "served" not in stage.summary(report, Path("o"))
    stage.require_served(report)


@pytest.mark.slow
@pytest.mark.skipif(
    "SPECDRAFT_VLLM_PYTHON" not in os.environ, reason="SPECDRAFT_VLLM_PYTHON names the Python of no vLLM environment"
)
def test_x10_t11_vllm_counts_as_we_do(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    folder_of_target(tmp_path / "target", **sizes)
    target = FrozenTarget.load(TargetRecipe(name=str(tmp_path / "target"), dtype="float32"))
    eagle = Eagle3Drafter.for_target(
        target, Eagle3Recipe(vocabulary=64, unroll=3), torch.ones(target.vocab_size).long()
    )
    for drafter in (LookupDrafter(occurrence="earliest"), eagle.eval()):
        plain, chain = decode_both(target, drafter, ASK)
        engine = VllmEngine(kind="vllm", python=Path(os.environ["SPECDRAFT_VLLM_PYTHON"]))
        served = confront(engine, target, drafter, ASK, plain, chain)
        assert served.equal, served.reason
