"""`specdraft quantize`: a trained drafter in integers, and what that changed."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from pydantic import Field, model_validator
from rich.console import Console
from torch import Tensor, nn

from specdraft import lowbit
from specdraft.config import Recipe, SpecdraftError
from specdraft.drafters import kind_of, load_drafter
from specdraft.drafters.base import Drafter, TrainableDrafter, read_servable
from specdraft.drafters.lm import LMDrafter
from specdraft.evaluation import exhibits
from specdraft.evaluation.stage import TrainedSource, training_of
from specdraft.lowbit import QuantizedLinear, Scheme
from specdraft.packing import pack_linears
from specdraft.progress import progress_bar
from specdraft.provenance import Provenance
from specdraft.quantization.bitsandbytes import KINDS, write_bitsandbytes
from specdraft.quantization.calibration import CalibrationRecipe, hessians
from specdraft.quantization.comparison import ComparisonRecipe, compare
from specdraft.quantization.recovery import RecoveryRecipe, recover
from specdraft.quantization.report import Pair, QuantizeReport, Weights, bits_of, table
from specdraft.quantization.rounding import clipped_scale, gptq, nearest_scale, to_nearest
from specdraft.target import FrozenTarget, TargetRecipe

log = logging.getLogger(__name__)

GROUPS = (128, 64, 32)
"""Group sizes that every engine's kernels take, the cheapest first."""
FUSIONS = ("fc", "input_proj")
"""What brings the target's features, and embeddings, to the drafter's width."""
Step = Callable[[str, int], Callable[[int], None]]


class QuantizeRecipe(Recipe):
    target: TargetRecipe
    """The drafter's target."""
    drafter: Path
    """Folder of a drafter that was trained here."""
    scheme: Literal["w8a8", "int8", "int4", "bnb-int8", "bnb-nf4"] = "w8a8"
    """w8a8: 8 bits by channel, inputs too, by token; int8: weights only; int4: weights only, in groups. Written as
    compressed-tensors. bnb-int8 and bnb-nf4: draft LMs alone, by bitsandbytes, loaded through transformers."""
    group_size: int | None = Field(default=None, ge=8, multiple_of=8)
    """int4: columns that share a scale. Unset: the largest of 128, 64 and 32 that divides every layer's width."""
    calibration: CalibrationRecipe | None = None
    """Round so that outputs on the target's answers change least (GPTQ). Unset: each weight to the nearest."""
    head: bool = False
    """Quantise the drafter's own output head too. Not every engine loads that."""
    fusion: bool = False
    """Quantise the layer that fuses features and embeddings too (`fc`, `input_proj`). Not every engine loads that."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of scales and of all that is not quantised. `auto`: the drafter's own; engines compute in bfloat16."""
    recovery: RecoveryRecipe | None = None
    """A short distillation with rounded weights, after rounding."""
    evaluation: ComparisonRecipe | None = None
    """Held-out prompts on which the drafter is measured before and after. Unset: nothing is measured."""
    output: Path
    """Folder to write; it must not be there yet: the drafter, quantize.json and quantize.md."""

    @model_validator(mode="after")
    def _no_idle_setting(self) -> Self:
        if self.group_size is not None and self.scheme != "int4":
            raise ValueError(f"group_size has no effect with {self.scheme}, which has one scale a row: leave it out")
        named = ("calibration", "recovery", "head", "fusion")
        if self.scheme in KINDS and (idle := [name for name in named if getattr(self, name)]):
            raise ValueError(f"{', '.join(idle)} has no effect with {self.scheme}: bitsandbytes rounds by itself")
        return self

    @property
    def bits(self) -> Literal[4, 8]:
        return 4 if self.scheme in ("int4", "bnb-nf4") else 8

    @property
    def max_loss(self) -> float:
        given = None if self.evaluation is None else self.evaluation.max_loss
        return given if given is not None else 0.005 if self.bits == 8 else 0.03


def quantize(recipe: QuantizeRecipe) -> dict[str, Any]:
    """Quantise, write the checkpoint, load it again, compare it with what it was, report; returns the summary.

    Raises SpecdraftError, and leaves no folder behind, for a drafter that is quantised already, layers or groups that
    do not fit, and a checkpoint that does not come back as it was meant. With `evaluation.strict` also for an alarm;
    then everything is written.
    """
    if recipe.output.exists():
        raise SpecdraftError(f"{recipe.output} is there already: remove it, or name another output")
    if lowbit.KEY in (written := read_servable(recipe.drafter)):
        raise SpecdraftError(
            f"{recipe.drafter} is quantised already ({written[lowbit.KEY].get('quant_method')}): quantise the drafter "
            "that it was made from"
        )
    target = FrozenTarget.load(recipe.target)
    console = Console(stderr=True)
    with progress_bar(console) as bar:

        def step(what: str, total: int) -> Callable[[int], None]:
            task = bar.add_task(what, total=total)
            return lambda done: bar.advance(task, done)

        try:
            layers, said = _write(recipe, target, step)
            _provenance(recipe, target).write(recipe.output)
            report = _report(recipe, target, layers, said, step)
            report.write(recipe.output)
        except BaseException:
            shutil.rmtree(recipe.output, ignore_errors=True)
            raise
    if report.pairs:
        console.print(table(report))
    for alarm in report.alarms:
        log.warning("alarm: %s", alarm)
    if report.alarms and recipe.evaluation is not None and recipe.evaluation.strict:
        raise SpecdraftError(f"{recipe.output} was written, but {'; '.join(report.alarms)}")
    return summary(report, recipe.output)


def summary(report: QuantizeReport, folder: Path) -> dict[str, Any]:
    """What the last line of stdout says."""
    tau = {
        pair.system: {
            "before": pair.before.acceptance.tau.value,
            "after": pair.after.acceptance.tau.value,
            "ratio": pair.tau_ratio.value,
            "lossless": pair.after.losslessness.verdict,
        }
        for pair in report.pairs
    }
    return {
        "output": str(folder),
        "headline": report.headline,
        "bytes": {"before": report.before.bytes, "after": report.after.bytes},
        "tau": tau,
        "alarms": report.alarms,
    }


def _write(recipe: QuantizeRecipe, target: FrozenTarget, step: Step) -> tuple[list[str], tuple[str, str]]:
    """Write the checkpoint; the names of the quantised layers, and scheme and rounding in words."""
    drafter = _loaded(recipe.drafter, target)
    if recipe.scheme in KINDS:
        if not isinstance(drafter, LMDrafter):
            raise SpecdraftError(f"{recipe.scheme} is for draft LMs: {recipe.drafter} holds a {kind_of(drafter)}")
        widths = {layer.in_features for layer in layers_to_quantize(drafter, head=False, fusion=False).values()}
        if recipe.bits == 4 and any(width % 64 for width in widths):
            raise SpecdraftError(f"{recipe.scheme} wants widths that are multiples of 64; these are {sorted(widths)}")
        named = write_bitsandbytes(recipe.drafter, recipe.scheme, recipe.dtype, recipe.output)
        return named, (recipe.scheme, "bitsandbytes' own rounding")
    layers = layers_to_quantize(drafter, head=recipe.head, fusion=recipe.fusion)
    scheme = scheme_for(recipe, layers)
    quantize_layers(recipe, drafter, target, layers, scheme, step)
    drafter.save_pretrained(recipe.output)
    wrong = {name: bits for name, bits in bits_of(recipe.output).items() if bits != scheme.bits}
    if wrong or len(bits_of(recipe.output)) != len(layers):
        raise SpecdraftError(f"{recipe.output} was to hold {len(layers)} layers of {scheme.bits} bits; wrong: {wrong}")
    rounding = "to the nearest" if recipe.calibration is None else f"GPTQ on {recipe.calibration.rows} answers"
    rounding += "" if recipe.recovery is None else f", then {recipe.recovery.steps} steps of distillation"
    return list(layers), (str(scheme), rounding)


def layers_to_quantize(drafter: TrainableDrafter, *, head: bool, fusion: bool) -> dict[str, nn.Linear]:
    """By name. Raises SpecdraftError if there is none, or `head` or `fusion` asks for what the drafter has not."""
    found: dict[str, dict[str, nn.Linear]] = {"projections": {}, "head": {}, "fusion": {}}
    tied = set(drafter.lm.all_tied_weights_keys) if isinstance(drafter, LMDrafter) else set()
    for name, layer in lowbit.plain_linears(drafter).items():
        parts = name.split(".")
        own = "head" if {"lm_head", "lm_heads"} & set(parts) else "fusion" if parts[-1] in FUSIONS else "projections"
        if f"{name.removeprefix('lm.')}.weight" not in tied:
            found[own][name] = layer
    for asked, own in ((head, "head"), (fusion, "fusion")):
        if asked and not found[own]:
            raise SpecdraftError(f"{own}: true has no effect: a {kind_of(drafter)} drafter here has none of its own")
    chosen = found["projections"] | (found["head"] if head else {}) | (found["fusion"] if fusion else {})
    if not chosen:
        raise SpecdraftError(f"there is nothing to quantise in a {kind_of(drafter)} drafter but {', '.join(found)}")
    return chosen


def scheme_for(recipe: QuantizeRecipe, layers: dict[str, nn.Linear]) -> Scheme:
    """Raises SpecdraftError where no group size, or not the one that was asked for, divides every layer's width."""
    if recipe.scheme != "int4":
        return Scheme(8, activations=recipe.scheme == "w8a8")
    sizes = GROUPS if recipe.group_size is None else (recipe.group_size,)
    fitting = [size for size in sizes if not any(layer.in_features % size for layer in layers.values())]
    if not fitting:
        asked = ", ".join(map(str, sizes))
        wrong = {name: layer.in_features for name, layer in layers.items() if layer.in_features % sizes[-1]}
        named = ", ".join(f"{name} ({width})" for name, width in wrong.items())
        raise SpecdraftError(
            f"int4 in groups of {asked}: the width of {named} is not divided; give a group_size that divides every "
            "width, or take int8 or w8a8, which have no groups"
        )
    return Scheme(4, fitting[0])


@torch.no_grad()
def quantize_layers(
    recipe: QuantizeRecipe,
    drafter: TrainableDrafter,
    target: FrozenTarget,
    layers: dict[str, nn.Linear],
    scheme: Scheme,
    step: Step,
) -> None:
    """Put integers in the place of the layers' weights, in place, and bring all else to the recipe's dtype."""
    dtype = drafter.dtype if recipe.dtype == "auto" else cast(torch.dtype, getattr(torch, recipe.dtype))
    sums: dict[str, Tensor] = {}
    if recipe.calibration is not None:
        sums = hessians(drafter, target, layers, recipe.calibration, step("calibrating", recipe.calibration.rows))
    integers, scales = {}, {}
    advance = step("rounding", len(layers))
    for name, layer in layers.items():
        weight = layer.weight
        if name in sums:
            scales[name] = clipped_scale(weight, scheme, dtype, sums[name].diagonal())
            integers[name] = gptq(weight, scales[name], scheme, sums.pop(name))
        else:
            scales[name] = nearest_scale(weight, scheme, dtype)
            integers[name] = to_nearest(weight, scales[name], scheme)
        advance(1)
    if recipe.recovery is not None:
        for name, layer in layers.items():
            layer.weight.copy_(QuantizedLinear.of(layer, integers[name], scales[name], scheme).dequantized())
        with torch.enable_grad():
            recover(drafter, target, scales, scheme, recipe.recovery)
        integers = {name: to_nearest(layer.weight, scales[name], scheme) for name, layer in layers.items()}
    for name, layer in layers.items():
        drafter.set_submodule(name, QuantizedLinear.of(layer, integers[name], scales[name], scheme))
    nn.Module.to(drafter, dtype)


def _report(
    recipe: QuantizeRecipe, target: FrozenTarget, layers: list[str], said: tuple[str, str], step: Step
) -> QuantizeReport:
    before, after = (_loaded(folder, target) for folder in (recipe.drafter, recipe.output))
    untouched = [name for name in lowbit.plain_linears(before) if name not in layers]
    pairs: list[Pair] = []
    warnings: list[str] = []
    if recipe.evaluation is None:
        warnings.append("Nothing was measured: give prompts as evaluation.prompts.")
    else:
        for drafter in (before, after):
            pack_linears(drafter)
        advance, last = None, 0

        def progress(done: int, total: int) -> None:
            nonlocal advance, last
            advance = advance or step("before and after", total)
            advance(done - last)
            last = done

        _, answers = training_of(TrainedSource(folder=recipe.drafter))
        forms = (cast(Drafter, before), cast(Drafter, after))
        pairs = compare(target, *forms, recipe.evaluation, answers, recipe.max_loss, progress)
    return QuantizeReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        target=target.name,
        target_fingerprint=target.fingerprint,
        drafter=str(recipe.drafter),
        kind=kind_of(before),
        scheme=said[0],
        rounding=said[1],
        quantized=layers,
        untouched=untouched,
        before=Weights.of(recipe.drafter, set(layers), "lm."),
        after=Weights.of(recipe.output, set(layers), "lm."),
        hardware=exhibits.hardware(target.device),
        target_dtype=str(target.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        max_loss=recipe.max_loss,
        pairs=pairs,
        warnings=warnings,
        provenance=asdict(Provenance.read(recipe.output)),
    )


def _loaded(folder: Path, target: FrozenTarget) -> TrainableDrafter:
    drafter = load_drafter(folder)
    drafter.attach(target)
    nn.Module.to(drafter, target.device)
    return drafter


def _provenance(recipe: QuantizeRecipe, target: FrozenTarget) -> Provenance:
    """Of the quantising; what the drafter was trained on counts as its own."""
    made = Provenance.of_conversion(recipe, recipe.drafter, target=target.name, fingerprint=target.fingerprint)
    trained = made.recipe.get("drafter_made", {"recipe": {}})["recipe"]
    return replace(made, recipe={**made.recipe, "data": trained["data"]}) if "data" in trained else made
