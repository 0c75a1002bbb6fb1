"""Two processes are one, however they are wrapped, and a killed run that goes on is the run that was not killed.

Each launch serves several checks: starting ranks is what takes the time.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import HeadsDrafter, heads_drafter, tiny_target
from torch import Tensor

ROOT = Path(__file__).parent.parent
WORKER = str(Path(__file__).parent / "train_worker.py")
STEP = {
    "lengths": [20, 13, 9, 8],
    "silent": [1, 3],  # of two ranks the second has nothing supervised
    "sgd": True,
    "settings": {
        "schedule": "constant", "learning_rate": 1024.0, "warmup": 0.0, "max_grad_norm": 0.0, "max_steps": 1,
        "save_every": None, "batch_size": 2,
    },
}  # fmt: skip
RUN = {
    "lengths": [12, 20, 9, 30, 14, 17, 25, 11, 16, 40],
    "settings": {"epochs": 3.0, "batch_size": 2, "save_every": 2, "warmup": 0.3, "learning_rate": 0.01},
}
BIASED = {"drafter": {"biased": True, "kept": list(range(0, 96, 2))}}
"""A head that is no plain linear layer, over a reduced vocabulary: it takes the way through its module."""
pytestmark = pytest.mark.slow


def job(base: Mapping[str, Any], folder: Path, **changes: Any) -> dict[str, Any]:
    settings = {**base["settings"], **changes.pop("settings", {})}
    return {**base, **changes, "folder": str(folder), "settings": settings}


def launch(jobs: list[dict[str, Any]], config: str | None = None, *options: str, dies: bool = False) -> None:
    """Run the worker as one process, or as two under `accelerate launch`."""
    launcher = [sys.executable]
    if config is not None:
        file = str(ROOT / "configs" / "accelerate" / config)
        port = str(20_000 + os.getpid() % 20_000)
        launcher += ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", file]
        launcher += ["--main_process_port", port, *options]
    kind = {"ACCELERATE_USE_CPU": "true"} if config in (None, "ddp.yaml") else {"DS_ACCELERATOR": "cpu"}
    environment = {**os.environ, **kind, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*launcher, WORKER, json.dumps(jobs)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert (done.returncode != 0) == dies, done.stderr[-4000:]


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def gradients(folder: Path, **drafter: Any) -> dict[str, Tensor]:
    """What one step of plain SGD took off the weights; the checkpoint is loaded strictly on the way."""
    before = heads_drafter(tiny_target(), **drafter).state_dict()
    after = HeadsDrafter.from_pretrained(folder / "final").state_dict()
    return {name: before[name].double() - after[name].double() for name in before}


def assert_same_step(folder: Path, reference: Path, **drafter: Any) -> None:
    loss, expected = result(folder)["lines"][0]["loss"], result(reference)["lines"][0]["loss"]
    assert loss == pytest.approx(expected, rel=1e-6)
    theirs = gradients(reference, **drafter)
    for name, ours in gradients(folder, **drafter).items():
        assert theirs[name].norm() > 0
        assert (ours - theirs[name]).norm() <= 1e-6 * theirs[name].norm(), name


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process: a step of 4 rows at once, as 2 x 2 and as 4 x 1, plain and biased; an uninterrupted run."""
    folder = tmp_path_factory.mktemp("one")
    sizes = {"4x1": (4, 1), "2x2": (2, 2), "1x4": (1, 4)}
    launch(
        [
            job(STEP, folder / name, settings={"batch_size": rows, "accumulate": micro})
            for name, (rows, micro) in sizes.items()
        ]
        + [job(STEP, folder / "biased", settings={"batch_size": 4}, **BIASED), job(RUN, folder / "run")]
    )
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    jobs = [
        job(STEP, folder / "2x1"),
        job(STEP, folder / "1x2", settings={"batch_size": 1, "accumulate": 2}),
        job(STEP, folder / "biased", **BIASED),
        job(RUN, folder / "run"),
    ]
    launch(jobs, "ddp.yaml")
    return folder


@pytest.mark.parametrize("name", ["2x2", "1x4"])
def test_t02_accumulation_equals_one_big_batch(one: Path, name: str) -> None:
    assert_same_step(one / name, one / "4x1")


@pytest.mark.parametrize("name", ["2x1", "1x2"])
def test_t02_two_processes_equal_one(one: Path, two: Path, name: str) -> None:
    found = result(two / name)
    facts = found["facts"]
    assert (facts["type"], facts["processes"], facts["ddp"]) == ("MULTI_CPU", 2, True)
    assert found["rows"] == [[[0, 2]], [[1, 3]]]  # the second rank's are the silent ones
    assert_same_step(two / name, one / "4x1")


def test_two_processes_equal_one_through_a_head_s_module(one: Path, two: Path) -> None:
    assert_same_step(two / "biased", one / "biased", **BIASED["drafter"])


def test_zero_2_trains_and_saves(one: Path, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    launch([job(STEP, tmp_path / "plain")], "zero2.yaml")
    facts = result(tmp_path / "plain")["facts"]
    assert (facts["type"], facts["processes"], facts["stage"]) == ("DEEPSPEED", 2, 2)
    assert 0.4 < facts["own share"] < 0.6  # of what the optimiser holds
    assert_same_step(tmp_path / "plain", one / "4x1")


def test_zero_3_trains_and_saves_with_sharded_heads(one: Path, tmp_path: Path) -> None:
    """With no parameter small enough to be kept whole; the second rank, with nothing supervised, must call as often."""
    pytest.importorskip("deepspeed")
    engine = json.loads((ROOT / "configs" / "deepspeed" / "zero3.json").read_text())
    engine["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    (tmp_path / "zero3.json").write_text(json.dumps(engine))
    launch([job(STEP, tmp_path / "plain")], "zero3.yaml", "--deepspeed_config_file", str(tmp_path / "zero3.json"))
    facts = result(tmp_path / "plain")["facts"]
    assert (facts["type"], facts["processes"], facts["stage"]) == ("DEEPSPEED", 2, 3)
    assert 0.4 < facts["own share"] < 0.6  # of the parameters
    assert facts["empty"] == facts["parameters"]
    assert_same_step(tmp_path / "plain", one / "4x1")


def test_t21_t22_a_killed_run_goes_on_as_if_it_had_not_been(one: Path, tmp_path: Path) -> None:
    """One process, killed in the middle of epoch 2, gone on with two workers: rows, losses and rates are the same."""
    launch([job(RUN, tmp_path / "run", die_after=7)], dies=True)
    launch([job(RUN, tmp_path / "run", resume=True, settings={"workers": 2})])
    assert_goes_on(tmp_path / "run", one / "run", 7)


def test_t21_t22_two_ranks_killed_go_on_as_if_they_had_not_been(two: Path, tmp_path: Path) -> None:
    launch([job(RUN, tmp_path / "run", die_after=5)], "ddp.yaml", dies=True)
    launch([job(RUN, tmp_path / "run", resume=True)], "ddp.yaml")
    assert_goes_on(tmp_path / "run", two / "run", 5)


def assert_goes_on(folder: Path, reference: Path, died_after: int) -> None:
    whole, rest = result(reference), result(folder)
    first = rest["lines"][0]["step"]
    assert 1 < first <= died_after + 1
    assert [line["step"] for line in rest["lines"]] == list(range(first, len(whole["lines"]) + 1))
    for ours, theirs in zip(rest["lines"], whole["lines"][first - 1 :], strict=True):
        assert ours == theirs
    assert rest["rows"] == [rows[first - 1 :] for rows in whole["rows"]]
    torch.testing.assert_close(
        HeadsDrafter.from_pretrained(folder / "final").state_dict(),
        HeadsDrafter.from_pretrained(reference / "final").state_dict(),
        rtol=0,
        atol=0,
    )
