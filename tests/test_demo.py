"""scripts/demo.py with stages that take no time: order, stamps, resuming, failure, the estimate of the time left."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from typer.testing import CliRunner

from specdraft.cli import app

SCRIPT = Path(__file__).parent.parent / "scripts" / "demo.py"
REPORT = "# report\n\n| | plain | chain |\n|---|---:|---:|\n| tau | 1 | 1.5 |\n\n## more\n"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo", "--quick"])
    monkeypatch.setattr(
        module, "stages", lambda folder, quick, full: [stage(module, folder, name) for name in ("one", "report")]
    )
    monkeypatch.chdir(tmp_path)
    for name, value in (*module.LIVE_BARS.items(), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)
    for name in ("one", "report"):
        (tmp_path / f"{name}.yaml").write_text(name)
    return module


def stage(demo: ModuleType, folder: Path, name: str) -> object:
    """Counts its runs, writes its output, shows a bar and ends with JSON; fails while a file `broken` exists."""
    code = (
        "import json, pathlib, sys\n"
        f"folder = pathlib.Path({str(folder)!r}) / {name!r}\nfolder.mkdir(exist_ok=True)\n"
        "print('Loading weights: 3/3\\r 5/10\\r10/10', file=sys.stderr)\n"
        "runs = folder / 'runs'\nruns.write_text((runs.read_text() if runs.exists() else '') + 'x')\n"
        f"(folder / 'report.md').write_text({REPORT!r})\n"
        "assert not pathlib.Path('broken').exists(), 'broken for the test'\n"
        "print(json.dumps({'ok': True}))\n"
    )
    return demo.Stage(name, [sys.executable, "-c", code], [Path(f"{name}.yaml")], folder / name, 10)


def runs(name: str) -> int:
    return len(Path(f"runs/quick/{name}/runs").read_text())


def test_stages_run_once_and_the_table_is_shown(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main()
    demo.main()
    assert (runs("one"), runs("report")) == (1, 1)
    assert json.loads(Path("runs/quick/one.done.json").read_text())["summary"] == {"ok": True}
    shown = capsys.readouterr()
    assert "| tau | 1 | 1.5 |" in shown.out
    assert "report.html" in shown.out
    assert "## more" not in shown.out
    assert "left" in shown.err


def test_a_failed_stage_shows_its_log_and_is_run_again(demo: ModuleType) -> None:
    Path("broken").touch()
    with pytest.raises(SystemExit, match=r"(?s)broken for the test.*one failed with exit code 1; log: .*one\.log"):
        demo.main()
    Path("broken").unlink()
    demo.main()
    assert (runs("one"), runs("report")) == (2, 1)


def test_outputs_of_other_settings_are_refused_and_never_overwritten(demo: ModuleType) -> None:
    demo.main()
    Path("one.yaml").write_text("changed")
    with pytest.raises(SystemExit, match="one was made with other settings; move it away"):
        demo.main()
    assert (runs("one"), runs("report")) == (1, 1)


def test_progress_reads_the_stages_own_bar_alone(demo: ModuleType) -> None:
    progress = demo.Progress.__new__(demo.Progress)
    progress.fraction, progress._total = None, None
    for line, fraction in (
        (b" 3/12 [00:01<00:03]", 0.25),
        (b"5/5 of another bar", 0.25),
        (b"9 of 12 rows answered", 0.75),
    ):
        progress._note(line)
        assert progress.fraction == fraction
    progress.fraction, progress._total = None, None
    progress._note("capture \u2501\u2501 \x1b[35m 45%\x1b[0m 0:00:07".encode())
    assert progress.fraction == 0.45


def test_the_time_left_follows_the_measured_pace(demo: ModuleType) -> None:
    stages = [stage(demo, Path("."), name)._replace(seconds=100) for name in ("one", "report")]
    clock = demo.Clock(stages)
    assert clock.left(0, None) == 200
    assert clock.left(60, 0.5) == 60 + 100
    clock.done(200)
    assert 150 < clock.left(0, None) < 200


@pytest.mark.parametrize("full", [False, True])
def test_every_stage_is_a_command_that_parses_and_makes_its_output(full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SCRIPT.parent.parent)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    module = load()
    made = [stage for stage in module.stages(Path("runs/demo"), False, full) if stage.name != "target"]
    names = ["respond", "sample", "capture", "train", "eval"]
    more = ["int8", "int8-eval", "int4", "int4-eval", "export", "publish"]
    assert [stage.name for stage in made] == names + more * full
    for stage in made:
        assert all(path.is_file() for path in stage.inputs)
        verb = stage.command.index("specdraft.cli") + 1
        result = CliRunner().invoke(app, [*stage.command[verb:], "--dry-run"])
        assert result.exit_code == 0, result.output
        recipe = yaml.safe_load(result.output)
        place = recipe["training"]["output_dir"] if stage.name == "train" else recipe["output"]
        assert Path(place) == stage.output


def test_where_a_hub_is_named_the_last_stage_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    last = load().stages(Path("runs/demo"), False, True)[-1]
    assert (last.name, last.output) == ("upload", Path("runs/demo/uploaded"))
    assert last.command[:2] == ["env", "HF_HUB_OFFLINE=0"]
    assert last.command[-2:] == ["output=runs/demo/uploaded", "upload=true"]


def test_what_an_interruption_left_is_removed_where_a_verb_begins_afresh(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [stage(demo, Path("runs/quick"), name)._replace(afresh=name == "one") for name in ("one", "report")]
    monkeypatch.setattr(demo, "stages", lambda *_: made)
    Path("runs/quick/one").mkdir(parents=True)
    Path("runs/quick/one/half").touch()
    demo.main()
    assert not Path("runs/quick/one/half").exists()
