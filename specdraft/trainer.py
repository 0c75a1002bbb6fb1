"""transformers' Trainer for a drafter: adds the target's evidence, the data's order, and what is worth knowing.

Accumulation, schedules, resuming, DDP, DeepSpeed, trackers and progress are the library's. Only the drafter is the
trainer's model; the target stands beside it.
"""

import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import DistributedType, broadcast_object_list
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader
from tqdm.auto import tqdm  # type: ignore[import-untyped]
from transformers import (
    PrinterCallback,
    ProgressCallback,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from specdraft.config import Recipe, SpecdraftError
from specdraft.data.batches import LengthBatches, TokenRows, collate
from specdraft.drafters.base import DrafterOutput, Evidence, TrainableDrafter
from specdraft.target import FrozenTarget, computes_in_bfloat16

log = logging.getLogger(__name__)

Batch = Mapping[str, Any]
Look = Callable[[Batch], Evidence]
"""What the target says about a batch: computed, or read from a store."""
Collate = Callable[[Sequence[dict[str, Tensor]]], dict[str, Any]]
"""Rows to a batch, as `data.batches.collate` does it."""
Measure = Callable[[TrainableDrafter], dict[str, float]]
"""Held-out acceptance of a drafter: figures by name, "tau" among them."""

BEST, FINAL = "best", "final"
"""Folders of a run: the weights with the highest held-out tau, and the last ones. The lowest loss is not the best."""


class TrainingSettings(Recipe):
    output_dir: Path
    """Folder of the run: checkpoint-N to go on from, `best` and `final` to use."""
    epochs: float = Field(default=3.0, gt=0)
    """Passes over the data, unless max_steps is set."""
    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps; replaces epochs."""
    batch_size: int = Field(default=8, ge=1)
    """Rows of a micro-batch on each process."""
    accumulate: int = Field(default=1, ge=1)
    """Micro-batches of one optimiser step: the same step as one batch as large."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    schedule: SchedulerType = SchedulerType.COSINE
    """How the learning rate falls after warm-up, as transformers names it."""
    warmup: float = Field(default=0.03, ge=0)
    """Warm-up: a share of all steps if below 1, else a number of steps."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's, on matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Clip the gradient to this norm; 0: never."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Half precisions are autocast over float32 weights; under DeepSpeed they are the engine's own. `auto`: bfloat16
    where the device has instructions for it, and not under DeepSpeed."""
    seed: int = 0
    """Of the initial weights and of the order of the data."""
    log_every: int = Field(default=10, ge=1)
    """Steps between log lines: loss and overlap of each depth."""
    save_every: int | None = Field(default=200, ge=1)
    """Steps between checkpoints to go on from; unset: none."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; unset: only at the end. Needs an `evaluation` section."""
    resume: bool = True
    """Go on from the last checkpoint in output_dir. Off: refuse a folder that has one."""
    workers: int = Field(default=0, ge=0)
    """Processes that read rows."""
    trackers: tuple[str, ...] = ()
    """Where curves go besides the log: tensorboard, wandb, trackio, ..."""
    deepspeed: Path | None = None
    """DeepSpeed's JSON config, unless accelerate was launched with one."""
    bad_steps: int = Field(default=5, ge=1)
    """Stop after so many steps in a row without a finite gradient; a single one is skipped and counted."""

    def arguments(self, device: torch.device, evaluating: bool) -> TrainingArguments:
        """transformers' arguments for a target on `device`."""
        cpu = device.type == "cpu"
        several = int(os.environ.get("WORLD_SIZE", "1")) > 1
        engine = self.deepspeed is not None or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        precision = self.precision
        if precision == "auto":
            precision = "bfloat16" if computes_in_bfloat16(device) and not engine else "float32"
        arguments = TrainingArguments(
            output_dir=str(self.output_dir),
            num_train_epochs=self.epochs,
            max_steps=self.max_steps or -1,
            per_device_train_batch_size=self.batch_size,
            gradient_accumulation_steps=self.accumulate,
            learning_rate=self.learning_rate,
            lr_scheduler_type=self.schedule,
            warmup_steps=self.warmup,
            weight_decay=self.weight_decay,
            adam_beta1=self.betas[0],
            adam_beta2=self.betas[1],
            max_grad_norm=self.max_grad_norm,
            bf16=precision == "bfloat16",
            fp16=precision == "float16",
            seed=self.seed,
            logging_steps=self.log_every,
            logging_first_step=True,
            save_strategy="no" if self.save_every is None else "steps",
            save_steps=self.save_every or 1,
            save_total_limit=self.keep,
            eval_strategy="steps" if evaluating and self.evaluate_every else "no",
            eval_steps=self.evaluate_every,
            metric_for_best_model="tau" if evaluating else None,
            greater_is_better=True if evaluating else None,
            report_to=list(self.trackers),
            dataloader_num_workers=self.workers,
            dataloader_pin_memory=not cpu,
            deepspeed=None if self.deepspeed is None else str(self.deepspeed),
            use_cpu=cpu,
            ddp_backend="gloo" if cpu and several else None,
            ddp_find_unused_parameters=False,
            ddp_broadcast_buffers=False,
            accelerator_config={"even_batches": False},
            average_tokens_across_devices=True,
            remove_unused_columns=False,
            label_names=["labels"],
            prediction_loss_only=True,
        )
        if arguments.n_gpu > 1:  # one process sees several devices: it uses its own; more come with `accelerate launch`
            arguments._n_gpu = 1
        return arguments


def observe(target: FrozenTarget, taps: tuple[int, ...], batch: Batch) -> Evidence:
    """The target reads the batch: its features, in its own precision."""
    with torch.autocast(target.device.type, enabled=False):
        return Evidence(target.observe(batch["input_ids"], batch["attention_mask"].bool(), taps), target)


class Tally:
    """Sums over supervised positions since the last log line, of every depth: loss, overlap, count."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.positions = 0

    def add(self, output: DrafterOutput) -> None:
        sums = torch.stack([output.losses.double(), output.overlaps.double(), output.counts.double()])
        self.sums = sums if self.sums is None else self.sums + sums

    def drain(self, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """`gather` sums over ranks. overlap_d is teacher-forced and no alpha; see the package's words."""
        if self.sums is None:
            return {}
        losses, overlaps, counts = gather(self.sums).tolist()
        self.sums = None
        self.positions += int(counts[0])
        if counts[0] > 0 and not any(losses):
            log.warning("the loss is exactly 0 over %d positions: the drafter is learning nothing", int(counts[0]))
        figures = {}
        for depth, (loss, overlap, count) in enumerate(zip(losses, overlaps, counts, strict=True), 1):
            figures[f"loss_{depth}"] = loss / max(count, 1)
            figures[f"overlap_{depth}"] = overlap / max(count, 1)
        return figures


class FiniteSteps(TrainerCallback):
    """Skips an optimiser step whose gradient is not finite, counts it, and stops after `limit` in a row.

    Not under DeepSpeed, whose engine has stepped by then, nor with float16, whose loss scaling does it.
    """

    def __init__(self, trainer: "DrafterTrainer", limit: int) -> None:
        self.trainer, self.limit = trainer, limit
        self.rows: list[int] = []
        self.skipped = self.in_a_row = 0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        accelerator = self.trainer.accelerator
        if accelerator.distributed_type == DistributedType.DEEPSPEED or accelerator.scaler is not None:
            return
        model: nn.Module = kwargs["model"]
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        rows, self.rows = self.rows, []
        if accelerator.reduce((~norm.isfinite()).double(), "sum") == 0:
            self.in_a_row = 0
            return
        for parameter in model.parameters():
            parameter.grad = None
        self.skipped += 1
        self.in_a_row += 1
        log.warning("step %d skipped: its gradient is not finite (rows %s)", state.global_step + 1, rows)
        if self.in_a_row >= self.limit:
            raise SpecdraftError(
                f"{self.in_a_row} steps in a row had a gradient that is not finite, the last of them on rows {rows}; "
                "lower training.learning_rate, or look at those rows"
            )


class EpochOrder(TrainerCallback):
    """Tells the sampler its epoch. The library does so through its own loaders only, and not when it resumes."""

    def __init__(self, trainer: "DrafterTrainer") -> None:
        self.trainer = trainer

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.trainer.batches.set_epoch(math.floor(state.epoch or 0))


class StderrProgress(ProgressCallback):
    """The library's bars; figures below them, on stderr."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            text = "  ".join(f"{name} {value:.4g}" for name, value in logs.items() if name != "total_flos")
            tqdm.write(f"step {state.global_step}  {text}", file=sys.stderr)


class DrafterTrainer(Trainer):
    """`look` gives the evidence of a batch, `measure` the held-out acceptance of the drafter."""

    def __init__(
        self,
        drafter: TrainableDrafter,
        rows: TokenRows,
        arguments: TrainingArguments,
        *,
        look: Look,
        collate: Collate = collate,
        measure: Measure | None = None,
        bad_steps: int = 5,
    ) -> None:
        super().__init__(
            drafter,
            arguments,
            data_collator=collate,
            train_dataset=rows,
            eval_dataset=rows if measure is not None else None,  # asked for; `evaluate` reads prompts of its own
        )
        self.drafter, self.rows, self.folder = drafter, rows, Path(str(arguments.output_dir))
        self.look, self.measure = look, measure
        self.tally = Tally()
        self.finite = FiniteSteps(self, bad_steps)
        self.batches = LengthBatches(
            rows.lengths,
            arguments.per_device_train_batch_size,
            seed=arguments.seed,
            rank=arguments.process_index,
            world=arguments.world_size,
        )
        self.remove_callback(PrinterCallback)
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(StderrProgress())
        self.add_callback(EpochOrder(self))
        self.add_callback(self.finite)

    def get_train_dataloader(self) -> DataLoader:
        """Order and share of the rows are a function of (seed, epoch, rank) alone; every rank takes as many steps."""
        return DataLoader(
            self.rows,
            batch_sampler=self.batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        rows = inputs["row"].tolist()
        self.finite.rows += rows
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED and not loss.isfinite():
            raise SpecdraftError(f"the loss is not finite on rows {rows}, and DeepSpeed has taken the step already")
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        batch = {"input_ids": inputs["input_ids"], "labels": inputs["labels"], "evidence": self.look(inputs)}
        loss, output = super().compute_loss(model, batch, True, num_items_in_batch)
        self.tally.add(output)
        return (loss, output) if return_outputs else loss

    def drain(self) -> dict[str, float]:
        """Loss and overlap of each depth since this was last called, over all ranks; their positions are counted."""
        return self.tally.drain(lambda sums: self.accelerator.reduce(sums, "sum"))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds overlap and loss of each depth to the training lines."""
        if "loss" in logs:
            logs |= self.drain()
            if self.finite.skipped:
                logs["skipped_steps"] = self.finite.skipped
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The true alpha and tau on held-out prompts; the weights go to `best` when tau is the highest so far.

        Every rank decodes the same prompts, so that sharded weights can be gathered; the first rank's figures count.
        """
        if self.measure is None:
            raise SpecdraftError("nothing to evaluate on: give the recipe an `evaluation` section")
        self.drafter.eval()
        with torch.no_grad():
            figures = [self.measure(self.drafter)]
        self.drafter.train()
        broadcast_object_list(figures)
        metrics = {f"eval_{name}": value for name, value in figures[0].items()}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if self.state.best_metric is None or metrics["eval_tau"] > self.state.best_metric:
            self.save_model(str(self.folder / BEST))
        return metrics

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """The library's hook for every save; `state_dict` is gathered from a sharded run. No pickle is written."""
        folder = Path(output_dir or self.folder)
        self.drafter.save_pretrained(folder, is_main_process=self.args.should_save, state_dict=state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The library's hook of a run that goes on, DeepSpeed's aside: the drafter knows how it was written."""
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self.drafter.load_weights(Path(resume_from_checkpoint))
