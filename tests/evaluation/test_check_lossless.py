"""`specdraft eval --check-lossless`: the report is written, and a verdict that is not lossless is exit code 1."""

import json
from pathlib import Path

import pytest
from evaluation.example_report import example_report
from typer.testing import CliRunner

from specdraft import cli
from specdraft.config import SpecdraftError
from specdraft.evaluation import EvaluateRecipe, Report, stage
from specdraft.evaluation.report import Losslessness

COMMON = ["target.name=t", "drafter.kind=lookup", "evaluation.prompts=[p.jsonl]"]


def judged(verdict: str) -> Report:
    report = example_report()
    found = Losslessness.model_validate({"verdict": verdict, "reason": "the reason"})
    return report.model_copy(update={"systems": [report.systems[0].model_copy(update={"losslessness": found})]})


@pytest.mark.parametrize("verdict", ["identical", "ties", "law holds"])
def test_lossless_verdicts_pass(verdict: str) -> None:
    stage.require_lossless(judged(verdict))


@pytest.mark.parametrize("verdict", ["failed", "not certified", "lossy by choice"])
def test_e34_the_others_are_named_with_their_reason(verdict: str) -> None:
    with pytest.raises(SpecdraftError, match=f"1 of 1 systems not shown to be lossless.*{verdict}, the reason"):
        stage.require_lossless(judged(verdict))


@pytest.mark.parametrize(
    ("verdict", "flag", "code"),
    [
        ("failed", ["--check-lossless"], 1),
        ("failed", [], 0),
        ("failed", ["check_lossless=true"], 1),
        ("law holds", ["--check-lossless"], 0),
    ],
)
def test_the_exit_code_follows_the_verdict_once_the_report_is_written(
    verdict: str, flag: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        @staticmethod
        def load(*_given: object) -> None:
            return None

    monkeypatch.setattr(stage, "FrozenTarget", Nothing)
    monkeypatch.setattr(stage.LookupSource, "load", Nothing.load)
    monkeypatch.setattr(stage, "evaluate", lambda *_given, **_named: judged(verdict))
    result = CliRunner().invoke(cli.app, ["eval", *COMMON, f"output={tmp_path / 'report'}", *flag])
    assert result.exit_code == code, result.stderr
    assert Report.load(tmp_path / "report" / "report.json").systems[0].losslessness.verdict == verdict
    if code:
        assert "specdraft eval: 1 of 1 systems not shown to be lossless" in result.stderr
        assert result.stdout == ""
    else:
        assert json.loads(result.stdout)["systems"]


def test_only_eval_has_the_flag() -> None:
    assert CliRunner().invoke(cli.app, ["train", "--check-lossless"]).exit_code == 2
    assert "check_lossless" in EvaluateRecipe.model_fields
