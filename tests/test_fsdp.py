"""FSDP: sharded heads give the loss and gradients of whole ones, and what is saved is whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from drafting import HeadsDrafter, heads_drafter, tiny_target, token_rows

from specdraft.data.batches import collate
from specdraft.drafters.base import Evidence, ObjectiveRecipe

pytestmark = pytest.mark.slow


def test_t28_sharded_heads_learn_the_same_and_are_saved_whole(tmp_path: Path) -> None:
    worker = str(Path(__file__).parent / "fsdp_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", worker]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["sharded"]
    assert facts["ranks"] == 2
    assert "shard" in facts["refused"], "a save of shards must be refused"

    target = tiny_target()
    drafter = heads_drafter(target)
    drafter.objective = ObjectiveRecipe(chunk=4)
    rows = token_rows([20, 13], silent=[1])
    batch = collate([rows[0], rows[1]])
    seen = target.observe(batch["input_ids"], batch["attention_mask"].bool(), drafter.taps)
    loss = drafter(batch["input_ids"], batch["labels"], Evidence(seen, target)).loss
    loss.backward()
    assert facts["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    gradients = torch.load(tmp_path / "gradients.pt", weights_only=True)
    for name, weight in drafter.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-5, atol=1e-9)

    loaded = HeadsDrafter.from_pretrained(tmp_path / "final")
    for name, weight in drafter.state_dict().items():
        assert weight.dim() == 1 or weight.norm() > 0
        assert torch.equal(loaded.state_dict()[name], weight)
