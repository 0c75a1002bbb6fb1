"""The train stage: a recipe in, checkpoints that engines load out."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Union, cast

import torch
from pydantic import Field
from torch import Tensor
from transformers import set_seed
from transformers.trainer_utils import get_last_checkpoint

from specdraft.causal import Observation
from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import DataRecipe, TokenRows, collate, load_rows
from specdraft.data.store import FeatureStore
from specdraft.drafters import DRAFTERS, load_drafter
from specdraft.drafters.base import Drafter, DrafterRecipe, Evidence, ObjectiveRecipe, TrainableDrafter
from specdraft.evaluation import EvalRecipe, evaluate
from specdraft.lowbit import quantized_linears
from specdraft.provenance import FILE_NAME, Provenance
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.trainer import BEST, FINAL, Batch, Collate, DrafterTrainer, Look, TrainingSettings, observe

log = logging.getLogger(__name__)

FREE = {"resume", "workers", "log_every", "save_every", "keep", "trackers", "max_steps", "epochs", "evaluate_every"}
"""Training settings that may change when a run goes on."""


if TYPE_CHECKING:
    AnyRecipe = DrafterRecipe
else:
    AnyRecipe = Annotated[
        Union[tuple(drafter.recipe_class for drafter in DRAFTERS.values())],  # noqa: UP007
        Field(discriminator="kind"),
    ]
"""The recipe of any method in DRAFTERS; `kind` says which."""


class TrainRecipe(Recipe):
    target: TargetRecipe
    """The model that is to answer faster."""
    data: DataRecipe
    """Its own answers."""
    drafter: AnyRecipe
    """What is trained."""
    objective: ObjectiveRecipe = ObjectiveRecipe()
    """What is minimised."""
    training: TrainingSettings
    """How."""
    evaluation: EvalRecipe | None = None
    """Held-out prompts on which acceptance is measured while training; the weights with the highest tau of its first
    system go to `best`."""


def train(recipe: TrainRecipe) -> dict[str, Any]:
    """Train, or go on with an interrupted run; returns a summary.

    Writes to training.output_dir: checkpoint-N, `final`, `best` if there is an evaluation, trainer_state.json with the
    curves, and what made it. Raises SpecdraftError if the folder holds a run of another recipe.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    target = FrozenTarget.load(recipe.target)  # before the arguments: ZeRO-3 must not shard it
    folder, settings = recipe.training.output_dir, recipe.training
    made = Provenance.of(
        recipe,
        seed=settings.seed,
        target=target.name,
        fingerprint=target.fingerprint,
        data=[Path(name) for name in recipe.data.answers if Path(name).is_file()],
    )
    checkpoint = _to_resume(folder, made, settings.resume)
    arguments = settings.arguments(target.device, evaluating=recipe.evaluation is not None)
    rows = load_rows(recipe.data, target.tokenizer, target.end_ids)
    log.info("%s", rows.report)
    set_seed(settings.seed)
    drafter = build(recipe.drafter, target, rows)
    drafter.objective = recipe.objective
    drafter.config.trained_length = recipe.data.max_length
    look, batch_rows = evidence_of(recipe.data, target, drafter, rows)
    trainer = DrafterTrainer(
        drafter,
        rows,
        arguments,
        look=look,
        collate=batch_rows,
        measure=None if recipe.evaluation is None else partial(measure, target, recipe.evaluation),
        bad_steps=settings.bad_steps,
    )
    if arguments.should_save:
        made.write(folder)
    outcome = trainer.train(resume_from_checkpoint=checkpoint)
    trainer.drain()  # the positions behind the last log line
    if recipe.evaluation is not None and not _evaluated_last(trainer):
        trainer.evaluate()
    trainer.save_model(str(folder / FINAL))
    trainer.save_state()
    for name in (BEST, FINAL):
        if arguments.should_save and (folder / name).is_dir():
            made.write(folder / name)
    return {
        "final": str(folder / FINAL),
        "best": str(folder / BEST) if (folder / BEST).is_dir() else None,
        "steps": outcome.global_step,
        "loss": outcome.training_loss,
        "tau": trainer.state.best_metric,
        "positions": trainer.tally.positions,
        "positions_per_second": trainer.tally.positions / max(outcome.metrics["train_runtime"], 1e-9),
        "seconds": outcome.metrics["train_runtime"],
        "skipped_steps": trainer.finite.skipped,
    }


def build(recipe: DrafterRecipe, target: FrozenTarget, rows: TokenRows) -> TrainableDrafter:
    """The drafter that training starts from, attached to the target. A checkpoint keeps its own draft vocabulary.

    Raises SpecdraftError for a checkpoint that is quantised.
    """
    if recipe.checkpoint is not None:
        drafter = load_drafter(recipe.checkpoint)
        if quantized_linears(drafter):
            raise SpecdraftError(f"{recipe.checkpoint} is quantised, and integers do not learn: go on from its parent")
        drafter.attach(target)
        torch.nn.Module.to(drafter, target.device)
        return drafter
    return DRAFTERS[recipe.kind].for_target(target, recipe, rows.token_counts(target.vocab_size))


@dataclass(frozen=True)
class Stored:
    """A batch's features as read from disk; a plain dataclass, so that nothing casts or moves them on the way."""

    observation: Observation
    log_partition: Tensor


def evidence_of(
    recipe: DataRecipe, target: FrozenTarget, drafter: TrainableDrafter, rows: TokenRows
) -> tuple[Look, Collate]:
    """Where a batch's evidence comes from: the target itself, or the store that `capture` wrote."""
    taps = drafter.taps
    if recipe.store is None:
        return partial(observe, target, taps), collate
    return partial(recall, target), partial(_collate_stored, FeatureStore(recipe.store, target, taps, rows))


def _collate_stored(store: FeatureStore, rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    batch = store.collate(rows)
    batch["stored"] = Stored(batch.pop("observation"), batch.pop("log_partition"))
    return batch


def recall(target: FrozenTarget, batch: Batch) -> Evidence:
    """The evidence that `_collate_stored` put into the batch, on the target's device."""
    stored: Stored = batch["stored"]
    observation = Observation(*(tensor.to(target.device) for tensor in stored.observation))
    return Evidence(observation, target, stored.log_partition.to(target.device))


def measure(target: FrozenTarget, recipe: EvalRecipe, drafter: TrainableDrafter) -> dict[str, float]:
    """Held-out tau and alpha per depth of the recipe's first system; of the others with their names before them."""
    proposer = cast(Drafter, drafter)
    shape = proposer.shape
    report = evaluate(target, proposer, recipe)
    proposer.shape = shape
    first, *others = report.systems
    figures = first.acceptance.metrics()
    for system in others:
        figures |= {f"{system.name} {name}": value for name, value in system.acceptance.metrics().items()}
    return figures


def _evaluated_last(trainer: DrafterTrainer) -> bool:
    return any("eval_tau" in line and line["step"] == trainer.state.global_step for line in trainer.state.log_history)


def _to_resume(folder: Path, made: Provenance, resume: bool) -> str | None:
    """The checkpoint to go on from, if any. Raises SpecdraftError if it is another recipe's, or resuming is off."""
    checkpoint = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    if checkpoint is None:
        return None
    if not resume:
        raise SpecdraftError(f"{checkpoint} is there and training.resume is off: remove it, or use another output_dir")
    if (folder / FILE_NAME).exists():
        before, now = _decisive(Provenance.read(folder)), _decisive(made)
        if changed := sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key)):
            raise SpecdraftError(
                f"{folder} holds a run of another recipe, with other {', '.join(changed)}: use another "
                "training.output_dir, or remove that run"
            )
    return checkpoint


def _decisive(made: Provenance) -> dict[str, Any]:
    """What must be the same for a run to be the same: settings by dotted name, target and data."""
    found: dict[str, Any] = {"target": made.target_fingerprint, "data": made.data}
    for section in ("drafter", "objective", "training"):
        for name, value in made.recipe[section].items():
            if section != "training" or name not in FREE:
                found[f"{section}.{name}"] = value
    return found
