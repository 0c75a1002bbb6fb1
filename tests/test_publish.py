"""`specdraft publish`, end to end: the real client against a Hub of our own, and back by the repository's name."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import shaken
from hub_server import TOKEN, Hub, Repo
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file, save_file
from tiny_chat import write_target

from specdraft.config import SpecdraftError
from specdraft.drafters import load_drafter
from specdraft.drafters.eagle import Eagle3Drafter, Eagle3Recipe
from specdraft.evaluation import EvaluateRecipe, Report, evaluate_recipe
from specdraft.export import ExportRecipe, export
from specdraft.provenance import Provenance, hash_weights
from specdraft.publish import PublishRecipe, publish
from specdraft.target import FrozenTarget, TargetRecipe

REPO, BASE = "someone/head", "maker/target"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")  # the client's own upload


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, and two drafters with their provenance and a report each: head/ and int8/."""
    folder = tmp_path_factory.mktemp("place")
    write_target(folder / "target")
    target = FrozenTarget.load(TargetRecipe(name=str(folder / "target")))
    made = Provenance.of(Eagle3Recipe(), seed=7, target=str(folder / "target"), fingerprint="f", data=[])
    answers = {str(folder / "answers.jsonl"): "sha256:1", str(folder / "more" / "answers.jsonl"): "sha256:2"}
    made.data.update(answers)
    made.recipe["training"] = {"epochs": 2.0, "learning_rate": 3e-3, "output_dir": str(folder), "seed": None}
    made.recipe["data"] = {"answers": list(answers), "max_length": 64}
    for name in ("head", "int8"):
        recipe = Eagle3Recipe(vocabulary=128, unroll=3, taps=(1, 2, 3))
        head = shaken(Eagle3Drafter.for_target(target, recipe, torch.ones(target.vocab_size).long()))
        head.config.trained_length = 64
        head.save_pretrained(folder / name)
        made.write(folder / name)
    evaluate_recipe(evaluation(folder, folder / "head", folder / "head-report"))
    report = Report.load(folder / "head-report" / "report.json")
    (folder / "int8-report").mkdir()
    of(report, hash_weights(folder / "int8")).save(folder / "int8-report" / "report.json")
    return folder


def evaluation(place: Path, drafter: Path | str, output: Path, **source: Any) -> EvaluateRecipe:
    rows = [{"prompt": "one two one two", "category": "chat"}, {"prompt": "capital of France", "category": "maths"}]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluateRecipe.model_validate(
        {
            "target": {"name": str(place / "target"), "dtype": "float32"},
            "drafter": {"kind": "trained", "folder": drafter, **source},
            "evaluation": {
                "prompts": [str(place / "prompts.jsonl")],
                "systems": [{"kind": "chain", "gamma": 2}],
                "max_new_tokens": 8,
                "bootstrap_samples": 100,
            },
            "output": output,
        }
    )


def of(report: Report, weights: str | None, **changes: Any) -> Report:
    setting = report.setting.model_copy(update={"drafter_weights": weights, **changes})
    return report.model_copy(update={"setting": setting})


def job(place: Path, **changes: Any) -> PublishRecipe:
    given = {
        "folder": place / "head",
        "reports": [place / "head-report" / "report.json"],
        "repo": REPO,
        "base_model": BASE,
        "licence": "apache-2.0",
    }
    return PublishRecipe.model_validate({**given, **changes})


def with_int8(place: Path, **changes: Any) -> PublishRecipe:
    variant = {"name": "int8", "folder": place / "int8", "reports": [place / "int8-report" / "report.json"]}
    return job(place, variants=[variant], upload=True, **changes)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The client reads where the Hub is, and whether it may be asked, when it is imported; so it is told afterwards."""
    with Hub() as hub:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + template)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def bytes_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_what_is_published_comes_back_by_name_and_measures_the_same(hub: Hub, place: Path, tmp_path: Path) -> None:
    done = publish(job(place, upload=True))
    assert json.loads(json.dumps(done)) == done
    assert (done["uploaded"], done["where"]) == (True, f"{hub.endpoint}/{REPO}")
    files = hub.repos[REPO].at("main")
    assert {name for name in files if not name.startswith("plots/")} == {
        *("README.md", "config.json", "model.safetensors", "report.json", "specdraft.json")
    }
    assert sorted(files) == done["files"]["main"]
    assert files["model.safetensors"] == bytes_of(place / "head")
    assert not hub.repos[REPO].private
    assert hub.repos[REPO].messages == ["A drafter, measured"]

    evaluate_recipe(evaluation(place, REPO, tmp_path / "again"))
    before, after = (Report.load(path / "report.json") for path in (place / "head-report", tmp_path / "again"))
    assert after.setting.drafter == REPO
    assert after.setting.drafter_weights == before.setting.drafter_weights == done["weights"]["main"]
    assert after.setting.trained_length == 64, "as its provenance says"
    assert [one.acceptance for one in after.systems] == [one.acceptance for one in before.systems]
    assert [one.losslessness.verdict for one in after.systems] == ["identical"]


def test_variants_are_branches_with_their_own_card_or_folders(hub: Hub, place: Path) -> None:
    publish(with_int8(place))
    repo = hub.repos[REPO]
    assert repo.at("int8")["model.safetensors"] == bytes_of(place / "int8") != repo.at("main")["model.safetensors"]
    assert b"drafter.revision=int8" in repo.at("int8")["README.md"]
    assert b"drafter.revision" not in repo.at("main")["README.md"]
    wanted = load_drafter(place / "int8").state_dict()
    for found in (load_drafter(REPO, "int8"), load_drafter(place, subfolder="int8")):
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())

    publish(with_int8(place, repo="someone/folders", variants_as="folders"))
    files = hub.repos["someone/folders"].at("main")
    assert files["int8/model.safetensors"] == bytes_of(place / "int8")
    assert "int8/README.md" not in files
    assert list(hub.repos["someone/folders"].branches) == ["main"]
    found = load_drafter("someone/folders", subfolder="int8")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.state_dict().items())
    hub.asked.clear()
    load_drafter("someone/folders")
    assert not any("int8" in asked for asked in hub.asked if "/resolve/" in asked), "other variants stay there"


def test_publishing_again_leaves_nothing_of_the_last_time_and_nothing_of_others_out(hub: Hub, place: Path) -> None:
    hub.repos[REPO] = Repo(private=False)
    old = {"model-00001-of-00002.safetensors": b"", "report-3.json": b"", "plots/old.svg": b"", "LICENSE": b"theirs"}
    hub.repos[REPO].commits["0" * 40] = dict(old)
    publish(job(place, upload=True))
    assert old.keys() & hub.repos[REPO].at("main").keys() == {"LICENSE"}


def test_a_private_repository_stays_private_and_a_public_one_is_refused(hub: Hub, place: Path) -> None:
    publish(job(place, private=True, upload=True, repo="someone/secret"))
    assert hub.repos["someone/secret"].private
    hub.repos[REPO] = Repo(private=False)
    with pytest.raises(SpecdraftError, match="is public already, and private was asked for: nothing was uploaded"):
        publish(job(place, private=True, upload=True))
    assert hub.repos[REPO].at("main") == {}


def test_without_upload_nothing_leaves_and_everything_is_shown(
    hub: Hub, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = publish(job(place, output=tmp_path / "out"))
    assert hub.asked == []
    assert "set upload=true" in done["where"]
    assert bytes_of(tmp_path / "out" / "main") == bytes_of(place / "head")
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "model.safetensors" in shown.err
    assert "## Limits" in shown.err
    with pytest.raises(SpecdraftError, match="is there already"):
        publish(job(place, output=tmp_path / "out"))


def test_no_report_of_exactly_these_weights_no_publication(hub: Hub, place: Path, tmp_path: Path) -> None:
    report = Report.load(place / "head-report" / "report.json")
    for weights, said in ((None, "does not say which weights"), (hash_weights(place / "int8"), "measured sha256:")):
        of(report, weights).save(tmp_path / "report.json")
        with pytest.raises(SpecdraftError, match=rf"{said}(.|\n)*run `specdraft eval` on this very folder"):
            publish(job(place, reports=[place / "head-report" / "report.json", tmp_path / "report.json"], upload=True))
    changed = {**load_file(place / "head" / "model.safetensors")}
    changed["norm.weight"] = changed["norm.weight"] + 1e-6
    (tmp_path / "changed").mkdir()
    (tmp_path / "changed" / "config.json").write_bytes((place / "head" / "config.json").read_bytes())
    save_file(changed, tmp_path / "changed" / "model.safetensors")
    with pytest.raises(SpecdraftError, match="exactly the weights"):
        publish(job(place, folder=tmp_path / "changed", upload=True))
    assert hub.asked == []


def test_a_bit_exact_export_has_the_reports_of_what_was_exported_and_a_rounded_one_has_not(
    place: Path, tmp_path: Path
) -> None:
    for dtype in ("auto", "bfloat16"):
        asked = {"drafter": place / "head", "target": {"name": str(place / "target")}, "format": "speculators"}
        export(ExportRecipe.model_validate({**asked, "output": tmp_path / dtype, "dtype": dtype, "verify": False}))
    publish(job(place, folder=tmp_path / "auto", output=tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "main" / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == BASE, "not the folder that it was exported with"
    assert "specdraft import" in (tmp_path / "out" / "main" / "README.md").read_text()
    tensors = load_file(tmp_path / "auto" / "model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] + 1}, tmp_path / "auto" / "model.safetensors")
    for name in ("auto", "bfloat16"):
        with pytest.raises(SpecdraftError, match="exactly the weights"):
            publish(job(place, folder=tmp_path / name))


def test_reports_of_several_targets_or_a_target_that_nobody_can_load_are_refused(place: Path, tmp_path: Path) -> None:
    report = Report.load(place / "head-report" / "report.json")
    of(report, hash_weights(place / "head"), target_fingerprint="other").save(tmp_path / "a.json")
    of(report, hash_weights(place / "int8"), target_fingerprint="other").save(tmp_path / "b.json")
    with pytest.raises(SpecdraftError, match="2 different targets"):
        publish(job(place, reports=[place / "head-report" / "report.json", tmp_path / "a.json"]))
    with pytest.raises(SpecdraftError, match="int8 was measured on another target"):
        publish(job(place, variants=[{"name": "int8", "folder": place / "int8", "reports": [tmp_path / "b.json"]}]))
    with pytest.raises(SpecdraftError, match="set base_model"):
        publish(job(place, base_model=None))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repo": "nobody"}, "no owner/name"),
        ({"base_model": "./target"}, "no owner/name"),
        ({"variants_as": "folders"}, "no effect without variants"),
        ({"variants": [{"name": "main", "folder": "x", "reports": ["y"]}]}, "names of their own"),
        ({"variants": [{"name": "a/b", "folder": "x", "reports": ["y"]}]}, "pattern"),
        ({"reports": []}, "at least 1"),
        ({"token": "hf_x"}, "Extra inputs"),
    ],
)
def test_recipes_that_cannot_be_meant_are_refused(changes: dict[str, Any], said: str, place: Path) -> None:
    with pytest.raises(ValueError, match=said):
        job(place, **changes)


def test_no_place_of_this_machine_and_no_prompt_is_published(place: Path, tmp_path: Path) -> None:
    publish(job(place, output=tmp_path / "out", data=[{"name": "maker/prompts", "licence": "mit"}]))
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file() and path.suffix != ".safetensors":
            text = path.read_text()
            assert str(place) not in text
            assert str(Path.home()) + "/" not in text
    made = Provenance.read(tmp_path / "out" / "main")
    assert made.data == {"answers.jsonl": "sha256:1", "answers.jsonl (2)": "sha256:2"}
    assert made.recipe["data"]["answers"] == ["answers.jsonl", "answers.jsonl"]
    assert made.target == "target"
    report = Report.load(tmp_path / "out" / "main" / "report.json")
    assert (report.setting.target, report.setting.drafter, report.samples) == (BASE, REPO, [])
    publish(job(place, output=tmp_path / "more", samples=True))
    assert Report.load(tmp_path / "more" / "main" / "report.json").samples


def test_a_folder_of_this_machine_that_nobody_foresaw_is_found_before_it_is_published(
    hub: Hub, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (place / "head").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("HOME", "/homes/ada")
    (copy / "generation_config.json").write_text('{"from": "/homes/ada/secret/model"}')
    (copy / "notes.txt").write_text("not a part of a checkpoint")
    (copy / "optimizer.pt").write_bytes(b"\x80")
    with pytest.raises(SpecdraftError, match=r"generation_config\.json names /homes/ada, a folder of this machine"):
        publish(job(place, folder=copy, upload=True))
    assert hub.asked == []
    (copy / "generation_config.json").unlink()
    assert not {"notes.txt", "optimizer.pt"} & {*publish(job(place, folder=copy))["files"]["main"]}


def test_the_token_is_never_told(
    hub: Hub, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    with caplog.at_level(logging.DEBUG):
        done = publish(job(place, upload=True))
        monkeypatch.setenv("HF_TOKEN", wrong := "hf_aTokenThatIsNotTheRightOne")
        with pytest.raises(SpecdraftError, match="the Hub did not take someone/head") as failure:
            publish(job(place, upload=True))
    told = "".join([caplog.text, *capfd.readouterr(), str(failure.value), json.dumps(done)])
    assert TOKEN not in told
    assert wrong not in told
    assert all(TOKEN.encode() not in content for content in hub.repos[REPO].at("main").values())


def test_x13_what_is_neither_a_folder_nor_a_repository_is_an_error(hub: Hub, place: Path) -> None:
    for name, said in (
        ("someone/nothing", "the Hub gives none"),
        ("a/b/c", "neither a folder nor the name of a repository"),
    ):
        with pytest.raises(SpecdraftError, match=said):
            load_drafter(name)
    with pytest.raises(SpecdraftError, match="revision 'int8' has no effect"):
        load_drafter(place / "head", "int8")
    publish(job(place, upload=True))
    with pytest.raises(SpecdraftError, match="the Hub gives none"):
        load_drafter(REPO, "int9")
    with pytest.raises(SpecdraftError, match=r"config\.json"):
        load_drafter(REPO, subfolder="int9")


def test_the_card_is_what_the_hub_indexes(hub: Hub, place: Path) -> None:
    publish(with_int8(place, languages=["en"], tags=["chat"], data=[{"name": "maker/prompts", "licence": "mit"}]))
    card = ModelCard(hub.repos[REPO].at("main")["README.md"].decode())
    assert card.data.base_model == BASE
    assert (card.data.license, card.data.library_name, card.data.pipeline_tag) == (
        *("apache-2.0", "specdraft", "text-generation"),
    )
    assert (card.data.language, card.data.datasets) == (["en"], ["maker/prompts"])
    assert {"speculative-decoding", "eagle3", "vllm", "sglang", "tensorrt-llm", "chat"} <= {*card.data.tags}
    report = Report.load(place / "head-report" / "report.json")
    tau = report.systems[0].acceptance.tau
    (found,) = [result for result in card.data.eval_results if result.metric_type == "tau"]
    assert found.metric_value == round(tau.value or 0, 4)
    assert found.metric_args["low"] == round(tau.low or 0, 4)


@pytest.mark.slow
def test_the_command_in_a_fresh_process_with_hf_endpoint(place: Path, tmp_path: Path) -> None:
    with Hub() as hub:
        settings = {
            **os.environ,
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_TOKEN": TOKEN,
        }
        code = "from specdraft.cli import app; app()"
        words = [f"folder={place / 'head'}", f"reports=[{place / 'head-report' / 'report.json'}]", f"repo={REPO}"]
        words += [f"base_model={BASE}", "licence=mit", "upload=true"]
        command = [sys.executable, "-c", code, "publish", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["uploaded"]
        assert TOKEN not in done.stdout + done.stderr
        assert hub.repos[REPO].at("main")["model.safetensors"] == bytes_of(place / "head")
