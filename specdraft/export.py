"""`specdraft export` and `specdraft import`: a drafter into an engine's layout, and others' drafters into ours.

The parity gate: what was written is read again by a process that knows nothing of the first, and must give the same
logits and the same acceptance.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from pydantic import Field, model_validator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.conversations import Faults
from specdraft.drafters import kind_of, load_drafter
from specdraft.drafters.base import Drafter, TrainableDrafter
from specdraft.evaluation import ChainSystem, EvalRecipe, Prompt, evaluate
from specdraft.evaluation.prompts import read_prompts
from specdraft.evaluation.served import Ask, VllmEngine, confront, decode_both
from specdraft.evaluation.served_counts import Served
from specdraft.formats import FORMATS, Folder, Naming, recognise
from specdraft.formats.safeailab import TAPS
from specdraft.lowbit import engine_dtype
from specdraft.objectives import Prediction
from specdraft.provenance import Provenance, hash_weights
from specdraft.target import FrozenTarget, TargetRecipe

log = logging.getLogger(__name__)

FormatName = Literal[
    "safeailab",
    "modelopt",
    "speculators",
    "eagle1-vllm",
    "eagle1-sglang",
    "medusa-vllm",
    "fasterdecoding",
    "mtp",
    "huggingface",
]
_GAMMA = 3
_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""Where a layout is not exact: the largest difference of two logits, over the largest logit."""
_SLIP = 0.02
"""And of an acceptance rate: a tie between two tokens that rounding decides."""


class ExportRecipe(Recipe):
    drafter: Path
    """Folder of a drafter that was trained here."""
    target: TargetRecipe
    """Its target."""
    format: FormatName
    """The layout: EAGLE-3 as safeailab (every engine), modelopt or speculators; eagle1-vllm or eagle1-sglang; Medusa as
    medusa-vllm or fasterdecoding; mtp, stitched into a copy of the target's checkpoint; a draft LM as huggingface."""
    output: Path
    """Folder to write; it must not be there yet."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of what is written. `auto`: the drafter's own."""
    target_name: str | None = None
    """Where the engine will find the target, for layouts that say so (speculators, fasterdecoding). Unset:
    `target.name`."""
    verify: bool = True
    """Read what was written in a fresh process, and compare logits and acceptance; a difference is an error."""
    verify_engine: VllmEngine | None = None
    """Have an engine load what was written and decode: its counts must be those of the drafter here, to the count."""
    prompts: tuple[str, ...] = ()
    """Prompts for both, as for `eval`; the first four. Unset: four rows of random tokens."""
    max_new_tokens: int = Field(default=32, ge=8)
    """Tokens decoded from each of them."""

    @model_validator(mode="after")
    def _no_idle_setting(self) -> Self:
        if self.target_name is not None and not FORMATS[self.format].names_target:
            raise ValueError(f"target_name has no effect: the layout {self.format} does not name the target")
        if self.prompts and not (self.verify or self.verify_engine):
            raise ValueError("prompts have no effect without verify")
        if self.verify_engine is not None and "vLLM" not in FORMATS[self.format].methods:
            raise ValueError(f"verify_engine: vLLM does not load the layout {self.format}")
        return self


class ImportRecipe(Recipe):
    folder: Path
    """Folder of a drafter that was trained elsewhere, with safetensors files."""
    target: TargetRecipe
    """The target that it was trained for."""
    format: FormatName | None = None
    """Its layout. Unset: recognised."""
    taps: tuple[int, ...] | None = None
    """EAGLE-3: the target layers that it reads (k: after layer k), where its config.json does not say or is wrong."""
    output: Path
    """Folder to write, in our own layout; it must not be there yet."""


def export(recipe: ExportRecipe) -> dict[str, Any]:
    """Write the drafter in an engine's layout, with its provenance, and verify it.

    Raises SpecdraftError, and leaves no folder behind, for a drafter of another kind than the layout's, a missing,
    extra or misshapen tensor, or a difference between what was written and what was meant.
    """
    layout = FORMATS[recipe.format]
    _check_new(recipe.output)
    drafter = load_drafter(recipe.drafter)
    if (kind := kind_of(drafter)) not in layout.drafters:
        fitting = ", ".join(name for name, one in FORMATS.items() if kind in one.drafters) or "none"
        raise SpecdraftError(f"{recipe.drafter} holds a drafter of the kind {kind}; its layouts are: {fitting}")
    if recipe.dtype != "auto":
        drafter.to(dtype=getattr(torch, recipe.dtype))  # type: ignore[call-arg]
    if recipe.verify_engine is not None:
        recipe.verify_engine.ready(cast(Drafter, drafter))
    target = FrozenTarget.load(recipe.target)
    drafter.attach(target)
    nn.Module.to(drafter, target.device)
    summary: dict[str, Any] = {"output": str(recipe.output), "format": recipe.format, "engines": layout.engines}
    try:
        layout.write(drafter, Naming(target, recipe.target_name or recipe.target.name), recipe.output)
        made = Provenance.of_conversion(recipe, recipe.drafter, target=target.name, fingerprint=target.fingerprint)
        replace(made, recipe={**made.recipe, "written": hash_weights(recipe.output)}).write(recipe.output)
        if recipe.verify:
            summary["verified"] = verify(recipe, target, drafter)
        if recipe.verify_engine is not None:
            summary["served"] = verify_served(recipe, recipe.verify_engine, target, drafter).model_dump(mode="json")
    except BaseException:
        shutil.rmtree(recipe.output, ignore_errors=True)
        raise
    return summary


def import_drafter(recipe: ImportRecipe) -> dict[str, Any]:
    """Read a drafter that others trained, and write it as ours, so that `eval` and `train` take it.

    Raises SpecdraftError, and writes nothing, if its layout is not known, something in it is not handled, or a tensor
    is missing, extra or misshapen.
    """
    _check_new(recipe.output)
    folder = Folder(recipe.folder)
    name = recipe.format or recognise(folder)
    layout = FORMATS[name]
    if recipe.taps is not None:
        if "eagle3" not in layout.drafters:
            raise SpecdraftError(f"taps have no effect: a drafter in the layout {name} reads none")
        folder.config[TAPS] = list(recipe.taps)
    target = FrozenTarget.load(recipe.target)
    drafter = layout.read(folder, target)
    drafter.attach(target)
    drafter.save_pretrained(recipe.output)
    load_drafter(recipe.output)
    made = Provenance.of_conversion(recipe, recipe.folder, target=target.name, fingerprint=target.fingerprint)
    made.write(recipe.output)
    return {"output": str(recipe.output), "format": name, "kind": kind_of(drafter), "taps": list(drafter.taps)}


class Evidence(NamedTuple):
    """What a drafter computes on fixed tokens, and how it fares with fixed prompts."""

    logits: list[Tensor]
    """float32 [2, 16, kept], one a depth, teacher-forced on random tokens."""
    metrics: dict[str, float]
    """tau and alpha of greedy chains, see `Acceptance.metrics`."""


@torch.no_grad()
def gather(target: FrozenTarget, drafter: TrainableDrafter, prompts: list[list[int]], max_new_tokens: int) -> Evidence:
    """The evidence of a drafter that is attached to `target`."""
    predictions = _predictions(target, drafter)
    logits = [prediction.logits(prediction.hidden).float().cpu().contiguous() for prediction in predictions]
    settings = EvalRecipe(
        systems=(ChainSystem(gamma=_gamma(predictions)),),
        max_new_tokens=max_new_tokens,
        batch_size=len(prompts),
        compare_with_plain=False,
        bootstrap_samples=100,
        shown=0,
    )
    asked = [Prompt(ids, "") for ids in prompts]
    report = evaluate(target, cast(Drafter, drafter), settings, prompts=asked)
    return Evidence(logits, report.systems[0].acceptance.metrics())


def _predictions(target: FrozenTarget, drafter: TrainableDrafter) -> list[Prediction]:
    """Teacher-forced on two rows of 16 random tokens, always the same."""
    tokens = torch.randint(target.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0)).to(target.device)
    seen = target.observe(tokens, torch.ones_like(tokens, dtype=torch.bool), drafter.taps)
    return drafter.predict(tokens, seen)


def _gamma(predictions: list[Prediction]) -> int:
    """Length of the chains that are compared: no deeper than was trained."""
    anywhere = predictions[0].shift == 0  # a language model, which drafts as deep as asked
    return _GAMMA if anywhere else min(_GAMMA, len(predictions))


def compare(meant: Evidence, found: Evidence, rounding: float) -> dict[str, float]:
    """The largest relative difference of the logits, and the acceptance as found.

    `rounding` 0: bit for bit, the acceptance too. Raises SpecdraftError for more than that.
    """
    pairs = list(zip(meant.logits, found.logits, strict=False))  # how deep one module is unrolled is not in its weights
    if not pairs or any(one.shape != other.shape for one, other in pairs):
        shapes = [[list(logits.shape) for logits in side.logits] for side in (meant, found)]
        raise SpecdraftError(f"what was written has logits of the shape {shapes[1]}, the drafter {shapes[0]}")
    off = max(float((one - other).abs().max() / one.abs().max().clamp(min=1e-12)) for one, other in pairs)
    if not off <= rounding:
        raise SpecdraftError(
            f"what was written computes other logits than the drafter: they differ by up to {off:.2g} of the largest, "
            f"allowed is {rounding:g}"
        )
    slip = 0.0 if rounding == 0 else _SLIP
    names = meant.metrics.keys() | found.metrics.keys()
    unlike = [n for n in sorted(names) if not abs(meant.metrics.get(n, -1) - found.metrics.get(n, -1)) <= slip]
    if unlike:
        told = ", ".join(f"{n} {found.metrics.get(n)} instead of {meant.metrics.get(n)}" for n in unlike)
        raise SpecdraftError(f"what was written is accepted otherwise than the drafter: {told}")
    return {"logits": off, **found.metrics}


def verify(recipe: ExportRecipe, target: FrozenTarget, drafter: TrainableDrafter) -> dict[str, float]:
    """Compare what lies in `recipe.output`, read by a fresh process, with `drafter`. Raises SpecdraftError."""
    prompts = _prompts(recipe, target)
    meant = gather(target, drafter.eval(), prompts, recipe.max_new_tokens)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        job = {
            "target": recipe.target.model_dump(mode="json"),
            "format": recipe.format,
            "folder": str(recipe.output),
            "prompts": prompts,
            "max_new_tokens": recipe.max_new_tokens,
            "threads": torch.get_num_threads(),
        }
        (scratch / "job.json").write_text(json.dumps(job))
        _in_fresh_process(scratch)
        found = _read_evidence(scratch)
    exact = FORMATS[recipe.format].exact
    return compare(meant, found, 0.0 if exact else _ROUNDING.get(drafter.dtype, 1e-5))


def verify_served(recipe: ExportRecipe, engine: VllmEngine, target: FrozenTarget, drafter: TrainableDrafter) -> Served:
    """An engine's counts with what lies in `recipe.output` beside those of `drafter`, which is moved to the dtype in
    which engines draft. Raises SpecdraftError where they differ."""
    nn.Module.to(drafter.eval(), target.device, engine_dtype(drafter, target.dtype))
    ask = Ask(_prompts(recipe, target), recipe.max_new_tokens, _gamma(_predictions(target, drafter)))
    plain, chain = decode_both(target, cast(Drafter, drafter), ask)
    served = confront(engine, target, cast(Drafter, drafter), ask, plain, chain, written=recipe.output)
    if not served.equal:
        raise SpecdraftError(f"{served.engine} does not do as the drafter here with what was written: {served.reason}")
    return served


def _in_fresh_process(scratch: Path) -> None:
    """`answer`, in another process of this very package. Raises SpecdraftError with its last words if it fails."""
    command = [sys.executable, "-P", "-m", "specdraft.export", str(scratch)]
    here = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, here))}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise SpecdraftError(f"what was written could not be read by a fresh process: {last}")


def answer(scratch: Path) -> None:
    """The fresh process: read the folder that `job.json` names, and write down the evidence beside it."""
    job = json.loads((scratch / "job.json").read_text())
    torch.set_num_threads(job["threads"])  # sums in another order would differ in their last bits
    target = FrozenTarget.load(TargetRecipe.model_validate(job["target"]))
    drafter = FORMATS[job["format"]].read(Folder(Path(job["folder"])), target)
    drafter.attach(target)
    nn.Module.to(drafter, target.device)
    found = gather(target, drafter, job["prompts"], job["max_new_tokens"])
    save_file({str(depth): logits for depth, logits in enumerate(found.logits)}, scratch / "logits.safetensors")
    (scratch / "metrics.json").write_text(json.dumps(found.metrics))


def _read_evidence(scratch: Path) -> Evidence:
    stored = load_file(scratch / "logits.safetensors")
    metrics = json.loads((scratch / "metrics.json").read_text())
    return Evidence([stored[str(depth)] for depth in range(len(stored))], metrics)


def _prompts(recipe: ExportRecipe, target: FrozenTarget) -> list[list[int]]:
    if recipe.prompts:
        return [prompt.ids for prompt in read_prompts(target, recipe.prompts, 4, {}, Faults())]
    return torch.randint(target.vocab_size, (4, 8), generator=torch.Generator().manual_seed(1)).tolist()


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise SpecdraftError(f"{folder} is there already: remove it, or name another output")


if __name__ == "__main__":
    answer(Path(sys.argv[1]))
