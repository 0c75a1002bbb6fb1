"""One rank of a drafter that FSDP shards by hand: `torchrun --nproc_per_node 2 fsdp_worker.py FOLDER`.

accelerate has no FSDP on CPUs, so that the trainer's own way through it is for GPUs; what it does to the loss, the
gradients and a save is the same here. Rank 1 has no supervised token.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from drafting import heads_drafter, tiny_target, token_rows
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specdraft.config import SpecdraftError
from specdraft.data.batches import collate
from specdraft.drafters.base import Evidence, ObjectiveRecipe


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    target = tiny_target()
    drafter = heads_drafter(target)
    fully_shard(drafter.lm_head)
    fully_shard(drafter)
    drafter.objective = ObjectiveRecipe(chunk=4)
    rows = token_rows([20, 13], silent=[1])
    batch = collate([rows[rank]])
    seen = target.observe(batch["input_ids"], batch["attention_mask"].bool(), drafter.taps)
    items = int(rows.supervised.sum())
    loss = drafter(batch["input_ids"], batch["labels"], Evidence(seen, target), num_items_in_batch=items).loss
    loss.backward()
    gradients = {name: weight.grad.full_tensor() * 2 for name, weight in drafter.named_parameters()}  # FSDP's mean
    refused = ""
    try:
        drafter.save_pretrained(folder / "sharded")
    except SpecdraftError as error:
        refused = str(error)
    whole = get_model_state_dict(drafter, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        drafter.save_pretrained(folder / "final", state_dict=whole)
        torch.save(gradients, folder / "gradients.pt")
        sharded = all(isinstance(weight, DTensor) for weight in drafter.parameters())
        facts = {"loss": float(loss), "sharded": sharded, "ranks": dist.get_world_size(), "refused": refused}
        (folder / "facts.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
