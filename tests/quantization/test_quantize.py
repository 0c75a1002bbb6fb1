"""The `quantize` verb, from folder to folder: the checkpoint, the paired report, the alarm, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import token_rows
from models import tiny_model
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from tiny_chat import write_target

from specdraft import lowbit
from specdraft.config import SpecdraftError
from specdraft.drafters import DRAFTERS, load_drafter
from specdraft.drafters.base import TrainableDrafter
from specdraft.evaluation.stage import TrainedSource, training_of
from specdraft.evaluation.tune import TuneRecipe, tune
from specdraft.provenance import Provenance
from specdraft.quantization import QuantizeRecipe, quantize
from specdraft.quantization.bitsandbytes import write_bitsandbytes
from specdraft.quantization.report import FILE_NAME, QuantizeReport, bits_of, markdown, table
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.training import build

QUESTIONS = ["one two one two", "three", "what is the capital of France?", "two and two"]
ANSWERED = [("one two", "three four five six seven"), ("what is two and two", "four is two and two"), ("five", "six")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target/, a drafter of some kinds, copy/ (all that the target is), prompts.jsonl and answers.jsonl."""
    folder = tmp_path_factory.mktemp("quantize")
    write_target(folder / "target", intermediate_size=64)
    target = FrozenTarget.load(TargetRecipe(name=str(folder / "target"), dtype="float32"))
    own: dict[str, dict[str, int]] = {"eagle3": {"vocabulary": 64}, "lm": {}, "medusa": {}}
    for kind, settings in own.items():
        recipe: Any = DRAFTERS[kind].recipe_class(kind=kind, **settings)
        drafter = DRAFTERS[kind].for_target(target, recipe, torch.ones(target.vocab_size, dtype=torch.int64))
        torch.manual_seed(1)
        with torch.no_grad():
            for name, weight in drafter.named_parameters():
                if "embed" not in name:
                    weight += torch.randn_like(weight) * 0.05
        drafter.save_pretrained(folder / kind)
    whole: Any = DRAFTERS["lm"].recipe_class(kind="lm", layers=4)
    copied = DRAFTERS["lm"].for_target(target, whole, torch.ones(target.vocab_size, dtype=torch.int64))
    copied.save_pretrained(folder / "copy")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    with (folder / "answers.jsonl").open("w") as file:
        for asked, said in ANSWERED:
            chat = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            file.write(json.dumps({"messages": chat}) + "\n")
    made = QuantizeRecipe.model_validate({"target": {"name": "t"}, "drafter": folder, "output": folder / "x"})
    provenance = Provenance.of(made, seed=7, target="t", fingerprint="f", data=[])
    provenance.recipe["data"] = {"answers": [str(folder / "answers.jsonl")], "max_length": 40}
    provenance.write(folder / "eagle3")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are timed once: what they are is not what is tested."""
    monkeypatch.setattr("specdraft.evaluation.costs._REPEATS", 1)
    monkeypatch.setattr("specdraft.quantization.comparison._TIMINGS", 1)


def job(place: Path, out: Path, kind: str = "eagle3", **changes: Any) -> QuantizeRecipe:
    given = {
        "target": {"name": str(place / "target"), "dtype": "float32"},
        "drafter": place / kind,
        "scheme": "w8a8",
        "output": out,
    }
    return QuantizeRecipe.model_validate({**given, **changes})


def asked(place: Path, **changes: Any) -> dict[str, Any]:
    few: dict[str, Any] = {"prompts": [str(place / "prompts.jsonl")], "max_new_tokens": 8, "bootstrap_samples": 100}
    return {**few, "systems": [{"kind": "chain", "gamma": 2}], **changes}


def read(folder: Path) -> QuantizeReport:
    return QuantizeReport.model_validate_json((folder / FILE_NAME).read_text())


def test_q08_q10_a_drafter_is_written_measured_beside_what_it_was_and_reported(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = quantize(job(place, out, evaluation=asked(place, max_loss=0.5)))
    assert json.loads(json.dumps(done)) == done
    report = read(out)
    (pair,) = report.pairs
    assert done["tau"]["chain of 2"]["ratio"] == pair.tau_ratio.value
    assert pair.tau_ratio.value == pytest.approx(pair.after.acceptance.tau.value / pair.before.acceptance.tau.value)  # type: ignore[operator]
    assert pair.after.losslessness.verdict == pair.before.losslessness.verdict == "identical"
    assert pair.before.draft_step_seconds > 0
    assert report.before.bytes == (place / "eagle3" / "model.safetensors").stat().st_size
    assert report.after.bytes == (out / "model.safetensors").stat().st_size
    assert report.scheme == "INT8 per channel, activations INT8 per token"
    assert report.untouched == ["fc", "lm_head"]
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "model.safetensors", "quantize.json", "quantize.md", "specdraft.json",
    ]  # fmt: skip
    text = (out / "quantize.md").read_text()
    assert "int8" in text and "chain of 2" in text and "midlayer.mlp.up_proj" in text  # noqa: PT018
    assert table(report).row_count == 2


def test_q08_q09_sizes_dtypes_and_what_is_left_alone(place: Path, tmp_path: Path) -> None:
    """Linear weights in 8 bits take at most 0.30 of float32's bytes, in 4 bits 0.20; d2t stays int64."""
    for scheme, most in (("w8a8", 0.30), ("int8", 0.30), ("int4", 0.20)):
        out = tmp_path / scheme
        quantize(job(place, out, scheme=scheme, dtype="bfloat16"))
        report, held = read(out), load_file(out / "model.safetensors")
        overhead = sum(t.nbytes for n, t in held.items() if n.endswith("weight_shape"))
        assert report.after.linear_bytes - overhead <= most * report.before.linear_bytes
        assert report.after.by_dtype["int8" if scheme == "w8a8" else "int32"] > 0
        assert sum(report.after.by_dtype.values()) == sum(tensor.nbytes for tensor in held.values())
        assert held["d2t"].dtype == torch.int64
        assert held["t2d"].dtype == torch.bool
        floats = {tensor.dtype for tensor in held.values() if tensor.is_floating_point()}
        assert floats == {torch.bfloat16}, "norms, head, fusion and scales"
        before = load_file(place / "eagle3" / "model.safetensors")
        for name in ("fc.weight", "lm_head.weight", "norm.weight", "d2t"):
            assert torch.equal(held[name], before[name].to(held[name].dtype)), name


def test_q03_bits_that_are_reported_are_those_of_the_tensors(place: Path, tmp_path: Path) -> None:
    for scheme, bits in (("w8a8", 8), ("int4", 4)):
        quantize(job(place, tmp_path / scheme, scheme=scheme))
        found = bits_of(tmp_path / scheme)
        assert set(found.values()) == {bits}
        assert sorted(found) == sorted(read(tmp_path / scheme).quantized)
        config = json.loads((tmp_path / scheme / "config.json").read_text())[lowbit.KEY]
        assert config["config_groups"]["group_0"]["weights"]["num_bits"] == bits


def test_q01_q03_another_config_over_the_same_tensors_is_refused(place: Path, tmp_path: Path) -> None:
    """A checkpoint of 8 bits that is asked for as one of 4, of none, or of floats that call themselves integers."""
    out = tmp_path / "out"
    quantize(job(place, out))
    config = json.loads((out / "config.json").read_text())

    def refused(said: str, entry: dict[str, Any] | None) -> None:
        changed = {name: value for name, value in config.items() if name != lowbit.KEY}
        (out / "config.json").write_text(json.dumps(changed | ({} if entry is None else {lowbit.KEY: entry})))
        with pytest.raises(SpecdraftError, match=said):
            load_drafter(out)

    refused("weight is int8 instead of float32", None)
    four = json.loads(json.dumps(config[lowbit.KEY]))
    four["config_groups"]["group_0"] |= {"input_activations": None}
    four["config_groups"]["group_0"]["weights"] |= {"num_bits": 4, "strategy": "group", "group_size": 32}
    refused("weight_packed is missing", four | {"format": "pack-quantized"})
    refused("handled are", four)
    tensors = load_file(out / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    save_file({**tensors, name: tensors[name].float()}, out / "model.safetensors")
    refused(f"{name} is float32 instead of int8", config[lowbit.KEY])


@pytest.mark.parametrize("lost", ["midlayer.mlp.up_proj.weight_scale", "lm_head.weight", "d2t"])
def test_q04_nothing_is_ever_initialised_afresh(place: Path, tmp_path: Path, lost: str) -> None:
    quantize(job(place, tmp_path / "out", scheme="int4"))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "out" / "model.safetensors")
    with pytest.raises(SpecdraftError, match=f"{lost} is missing"):
        load_drafter(tmp_path / "out")


def held_logits(drafter: TrainableDrafter, target: FrozenTarget) -> torch.Tensor:
    tokens = torch.arange(3, 23)[None]
    drafter.attach(target)
    seen = target.observe(tokens, torch.ones_like(tokens).bool(), drafter.taps)
    with torch.no_grad():
        prediction = drafter.predict(tokens, seen)[0]
        return prediction.head(prediction.hidden)


@pytest.mark.parametrize("scheme", ["w8a8", "int8", "int4"])
def test_q01_q04_transformers_reads_a_quantised_lm_as_we_do_also_as_a_target_of_its_own_config(
    place: Path, tmp_path: Path, scheme: str
) -> None:
    """The draft LM, head untied and in full; the same folder as a target, with a drafter that is not quantised."""
    pytest.importorskip("compressed_tensors")
    quantize(job(place, tmp_path / "out", "lm", scheme=scheme))
    target = FrozenTarget.load(TargetRecipe(name=str(place / "target"), dtype="float32"))
    mine = load_drafter(tmp_path / "out")
    assert {layer.scheme.bits for layer in lowbit.quantized_linears(mine).values()} == {4 if scheme == "int4" else 8}
    assert not lowbit.quantized_linears(target.model)
    theirs = FrozenTarget.load(TargetRecipe(name=str(tmp_path / "out"), dtype="float32"))
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        want = theirs.model(tokens).logits
    near = 3e-2 if scheme == "w8a8" else 1e-5  # compressed-tensors rounds inputs to 127.5 steps, vLLM's kernels to 127
    torch.testing.assert_close(held_logits(mine, target), want, rtol=0, atol=near * float(want.abs().max()))
    plain = load_drafter(place / "lm")
    plain.attach(theirs)
    assert {weight.dtype for weight in plain.parameters()} == {torch.float32}


def test_gptq_on_the_targets_answers_changes_integers_alone(place: Path, tmp_path: Path) -> None:
    for name, more in (("rtn", {}), ("gptq", {"calibration": {"answers": [str(place / "answers.jsonl")], "rows": 3}})):
        quantize(job(place, tmp_path / name, scheme="int4", **more))
    rtn, calibrated = (load_file(tmp_path / name / "model.safetensors") for name in ("rtn", "gptq"))
    differ = {name.rpartition(".")[2] for name in rtn if not torch.equal(rtn[name], calibrated[name])}
    assert "weight_packed" in differ <= {"weight_packed", "weight_scale"}
    assert "GPTQ on 3 answers" in read(tmp_path / "gptq").rounding


def test_a_head_is_calibrated_on_what_it_reads(place: Path, tmp_path: Path) -> None:
    answers = {"answers": [str(place / "answers.jsonl")]}
    quantize(job(place, tmp_path / "out", head=True, fusion=True, calibration=answers))
    assert read(tmp_path / "out").untouched == []
    with pytest.raises(SpecdraftError, match="head: true has no effect: a medusa"):
        quantize(job(place, tmp_path / "other", "medusa", head=True))


def test_recovery_trains_the_weights_that_are_written(place: Path, tmp_path: Path) -> None:
    answers = [str(place / "answers.jsonl")]
    recovery = {"answers": answers, "steps": 12, "learning_rate": 3e-3, "batch_size": 3}
    quantize(job(place, tmp_path / "plain", scheme="int4"))
    quantize(job(place, tmp_path / "taught", scheme="int4", recovery=recovery))
    plain, taught = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "taught"))
    scales = [name for name in plain if name.endswith("weight_scale")]
    assert all(torch.equal(plain[name], taught[name]) for name in scales), "the grid is given"
    for name in ("midlayer.mlp.up_proj.weight_packed", "norm.weight"):
        assert not torch.equal(plain[name], taught[name])
    assert "12 steps of distillation" in read(tmp_path / "taught").rounding
    assert bits_of(tmp_path / "taught") == bits_of(tmp_path / "plain")


def test_q10_an_alarm_is_in_the_report_and_fails_when_strict_but_all_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights rounded to nothing, which no acceptance survives."""
    monkeypatch.setattr("specdraft.quantization.stage.to_nearest", lambda weight, *_: torch.zeros_like(weight).char())
    with pytest.raises(SpecdraftError, match="was written, but chain of 2: tau fell"):
        quantize(job(place, tmp_path / "out", "copy", evaluation=asked(place, strict=True)))
    report = read(tmp_path / "out")
    assert report.max_loss == 0.005
    assert report.pairs[0].before.acceptance.tau.value == 3
    assert report.pairs[0].after.acceptance.tau.value < 2  # type: ignore[operator]
    assert report.pairs[0].alarm
    assert "alarm: chain of 2: tau fell from 3.00" in caplog.text
    assert "ALARM" in markdown(report)
    assert job(place, tmp_path / "x", scheme="int4").max_loss == 0.03


def test_a_quantised_drafter_is_tuned_beside_its_parent_and_knows_what_it_was_trained_on(
    place: Path, tmp_path: Path
) -> None:
    quantize(job(place, tmp_path / "out"))
    source = TrainedSource(folder=tmp_path / "out")
    assert training_of(source) == training_of(TrainedSource(folder=place / "eagle3"))
    assert training_of(source) == (40, (str(place / "answers.jsonl"),))
    assert Provenance.read(tmp_path / "out").recipe["drafter_made"]["seed"] == 7
    recipe = TuneRecipe.model_validate(
        {
            "target": {"name": str(place / "target"), "dtype": "float32"},
            "drafters": [{"kind": "trained", "folder": str(place / "eagle3")}, source.model_dump(mode="json")],
            "prompts": [str(place / "prompts.jsonl")],
            "max_new_tokens": 8, "gammas": [2], "bootstrap_samples": 100, "confirm": 0, "output": tmp_path / "tune",
        }
    )  # fmt: skip
    assert len(tune(recipe)["drafters"]) == 2


def test_training_does_not_go_on_from_integers(place: Path, tmp_path: Path) -> None:
    quantize(job(place, tmp_path / "out"))
    target = FrozenTarget.load(TargetRecipe(name=str(place / "target"), dtype="float32"))
    recipe = DRAFTERS["eagle3"].recipe_class(kind="eagle3", checkpoint=str(tmp_path / "out"))
    with pytest.raises(SpecdraftError, match="integers do not learn"):
        build(recipe, target, token_rows([8]))


def test_what_cannot_be_quantised_is_refused_and_leaves_no_folder(place: Path, tmp_path: Path) -> None:
    def refused(said: str, kind: str = "eagle3", **changes: Any) -> None:
        with pytest.raises(SpecdraftError, match=said):
            quantize(job(place, tmp_path / "out", kind, **changes))
        assert not (tmp_path / "out").exists()

    refused("the width of midlayer.self_attn.o_proj .32.*is not divided", scheme="int4", group_size=64)
    refused("bnb-int8 is for draft LMs", scheme="bnb-int8")
    refused("no usable|cannot be read|no such|nothing", scheme="int4", calibration={"answers": ["nowhere.jsonl"]})
    quantize(job(place, tmp_path / "once"))
    with pytest.raises(SpecdraftError, match="is there already"):
        quantize(job(place, tmp_path / "once"))
    with pytest.raises(SpecdraftError, match="is quantised already"):
        quantize(job(place, tmp_path / "twice", drafter=tmp_path / "once"))
    for wrong in (
        {"scheme": "int3"},
        {"scheme": "w8a8", "group_size": 32},
        {"scheme": "int4", "group_size": 12},
        {"scheme": "bnb-nf4", "head": True},
        {"evaluation": {}},
    ):
        with pytest.raises(ValidationError):
            job(place, tmp_path / "out", **wrong)


@pytest.mark.parametrize("scheme", ["bnb-int8", "bnb-nf4"])
def test_q04_q06_bitsandbytes_by_transformers_on_a_cpu_comes_back_as_it_was(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("bitsandbytes")
    model = tiny_model(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    target = FrozenTarget(model)
    drafter = DRAFTERS["lm"].for_target(target, DRAFTERS["lm"].recipe_class(kind="lm", layers=2), torch.ones(96).long())  # type: ignore[call-arg]
    drafter.save_pretrained(tmp_path / "lm")
    model.save_pretrained(tmp_path / "target")
    named = write_bitsandbytes(tmp_path / "lm", scheme, "auto", tmp_path / "out")
    assert sorted(named) == sorted(name for name in lowbit.plain_linears(drafter) if name.endswith("_proj"))
    loaded = load_drafter(tmp_path / "out")
    want, got = held_logits(drafter, target), held_logits(loaded, target)
    assert float(torch.minimum(want.softmax(-1), got.softmax(-1)).sum(-1).mean()) > 0.7
    sizes = [sum(t.nbytes for t in load_file(tmp_path / name / "model.safetensors").values()) for name in ("lm", "out")]
    assert sizes[1] < 0.6 * sizes[0]


def test_q06_four_bits_that_the_cpu_kernel_cannot_take_are_refused_before_anything_is_written(
    place: Path, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(SpecdraftError, match="bnb-nf4 wants widths that are multiples of 64"):
        quantize(job(place, tmp_path / "out", "lm", scheme="bnb-nf4"))
    assert not (tmp_path / "out").exists()


def test_q06_without_bitsandbytes_it_says_so_at_the_start(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(SpecdraftError, match=r"needs the package bitsandbytes.*w8a8, int8 and int4 need nothing"):
        quantize(job(place, tmp_path / "out", "lm", scheme="bnb-int8"))
