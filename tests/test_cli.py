import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy_stage import Toy
from typer.testing import CliRunner, Result

from specdraft import cli
from specdraft.config import load_recipe, settings


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.STAGES, "train", cli.Stage("toy_stage", "Toy", "run", "Toy.", "specdraft train"))


def specdraft(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def test_a_stage_ends_with_one_json_object_and_what_libraries_print_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("training: {learning_rate: 0.5}\n")
    result = specdraft("train", "--config", str(tmp_path / "a.yaml"), "training.schedule=linear")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"rate": 0.5}
    assert "a library prints this" in result.stderr


def test_layers_are_given_by_repeating_config(tmp_path: Path) -> None:
    for name, rate in (("a", 0.5), ("b", 0.25)):
        (tmp_path / f"{name}.yaml").write_text(f"training: {{learning_rate: {rate}}}\n")
    result = specdraft("train", "-c", str(tmp_path / "a.yaml"), "-c", str(tmp_path / "b.yaml"))
    assert json.loads(result.stdout) == {"rate": 0.25}


def test_dry_run_prints_the_resolved_recipe_and_does_nothing(tmp_path: Path) -> None:
    result = specdraft("train", "--dry-run", "fail=true")
    assert result.exit_code == 0
    (tmp_path / "again.yaml").write_text(result.stdout)
    assert load_recipe(Toy, [tmp_path / "again.yaml"]) == Toy(fail=True)


def test_an_error_for_people_exits_1_without_a_traceback() -> None:
    result = specdraft("train", "fail=true")
    assert result.exit_code == 1
    assert "specdraft train: the disk is full" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments", [("train", "fial=1"), ("train", "--confg", "x"), ("trian",), ("train", "-c", "none.yaml")]
)
def test_wrong_use_exits_2(arguments: tuple[str, ...]) -> None:
    result = specdraft(*arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert result.stdout == ""


def test_only_the_first_of_several_processes_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert specdraft("train", "fail=false").stdout == ""


def test_help_names_every_setting_of_the_recipe() -> None:
    result = specdraft("train", "--help")
    assert result.exit_code == 0
    for setting in settings(Toy):
        assert f"{setting.name}: {setting.kind}" in result.stdout
        assert setting.help in result.stdout


def test_the_first_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom specdraft.cli import app\n"
        "result = CliRunner().invoke(app, ['--help'])\nassert 'respond' in result.stdout\n"
        "print([name for name in ('torch', 'transformers', 'pydantic', 'omegaconf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
