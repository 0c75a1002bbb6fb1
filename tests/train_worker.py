"""Trains a tiny drafter as one rank: `python train_worker.py JOBS`, alone or under accelerate launch or torchrun.

JOBS is a JSON list of `Job` fields, done one after the other in the same processes; rank 0 writes result.json.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from drafting import HeadsDrafter, heads_drafter, tiny_target, token_rows
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from specdraft.drafters.base import ObjectiveRecipe
from specdraft.trainer import FINAL, DrafterTrainer, TrainingSettings, observe

RATE = 1024.0
"""Learning rate of plain SGD: one step writes the gradient into the weights, whatever wraps the model."""


@dataclass
class Job:
    folder: str
    lengths: Sequence[int]
    silent: Sequence[int] = ()
    """Rows without a supervised token."""
    settings: dict[str, Any] = field(default_factory=dict)
    drafter: dict[str, Any] = field(default_factory=dict)
    chunk: int = 4
    sgd: bool = False
    die_after: int | None = None
    """Step after which rank 0 kills itself."""
    resume: bool = False


class Events(TrainerCallback):
    """Notes rows, losses and rates of each step as they happen, and dies where it is told to."""

    def __init__(self, trainer: DrafterTrainer, job: Job) -> None:
        self.trainer, self.job = trainer, job
        self.lines: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.rows = sorted(self.trainer.finite.rows)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.lines.append({**logs, "step": state.global_step, "rows": self.rows})

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.job.die_after and state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGKILL)


def facts(trainer: Trainer, drafter: HeadsDrafter) -> dict[str, Any]:
    """How the run was really distributed."""
    engine = trainer.model_wrapped
    whole = sum(parameter.numel() for parameter in heads_drafter(drafter.target).parameters())
    found: dict[str, Any] = {
        "type": trainer.accelerator.distributed_type.value,
        "processes": trainer.accelerator.num_processes,
        "ddp": isinstance(engine, DistributedDataParallel),
        "rows of each rank": len(trainer.batches),
    }
    if trainer.is_deepspeed_enabled:
        found["stage"] = engine.zero_optimization_stage()
        if found["stage"] == 3:
            found["own share"] = sum(p.ds_tensor.numel() for p in drafter.parameters()) / whole
            found["parameters"] = len(list(drafter.parameters()))
            found["empty"] = sum(p.numel() == 0 for p in drafter.parameters())
        else:
            found["own share"] = sum(p.numel() for p in engine.optimizer.single_partition_of_fp32_groups) / whole
    return found


def work(job: Job) -> None:
    target = tiny_target()  # before the arguments: ZeRO-3 must not shard it
    drafter = heads_drafter(target, **job.drafter)
    drafter.objective = ObjectiveRecipe(chunk=job.chunk)
    settings = TrainingSettings(output_dir=job.folder, log_every=1, **job.settings)
    arguments = settings.arguments(target.device, evaluating=False)
    if job.sgd:
        arguments.optim = "sgd"
    trainer = DrafterTrainer(
        drafter,
        token_rows(job.lengths, silent=job.silent),
        arguments,
        look=partial(observe, target, drafter.taps),
    )
    events = Events(trainer, job)
    trainer.callback_handler.callbacks.insert(0, events)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(job.folder) if job.resume else None)
    trainer.save_model(str(Path(job.folder) / FINAL))
    mine = [line["rows"] for line in events.lines]
    gathered: list[Any] = [mine] * trainer.accelerator.num_processes
    if torch.distributed.is_initialized():
        torch.distributed.all_gather_object(gathered, mine)
    if trainer.is_world_process_zero():
        result = {"facts": facts(trainer, drafter), "lines": events.lines, "rows": gathered}
        (Path(job.folder) / "result.json").write_text(json.dumps(result))


def without_compiled_communication() -> None:
    """DeepSpeed compiles a shared-memory library at its first use on CPUs; gloo does as well, at once."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


if __name__ == "__main__":
    if "DS_ACCELERATOR" in os.environ:
        without_compiled_communication()
    for fields in json.loads(sys.argv[1]):
        work(Job(**fields))
