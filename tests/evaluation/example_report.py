"""A report made of synthetic rounds: everything that the page can show, without a model."""

import numpy as np
import torch
from torch import Tensor

from specdraft.decoding import Round
from specdraft.evaluation.curve import stops_paying
from specdraft.evaluation.report import (
    BatchSpeed,
    Costs,
    Curve,
    Divergence,
    Estimate,
    GammaPoint,
    Losslessness,
    Piece,
    Report,
    RunTime,
    Sample,
    Setting,
    SystemReport,
)
from specdraft.evaluation.statistics import Bootstrap, acceptance, calibration

CATEGORIES = ("chat", "code", "maths", "summarising")


def _rows(alpha: float, gamma: int, nodes: int, generator: np.random.Generator) -> list[list[Round]]:
    rows = []
    for prompt in range(40):
        rate = min(0.95, alpha + 0.1 * (prompt % 4) + generator.normal(0, 0.05))
        row = []
        for _ in range(int(generator.integers(10, 60))):
            accepted = int(np.cumprod(generator.random(gamma) < rate).sum())
            offered = min(accepted + 1, gamma)
            row.append(Round(offered, accepted, accepted + 1, nodes, (rate,) * offered))
        rows.append(row)
    return rows


def _system(name: str, shape: dict, alpha: float, speed: float, verdict: Losslessness) -> SystemReport:
    generator = np.random.default_rng(7)
    gamma, nodes = shape.get("gamma", shape.get("depth")), shape.get("nodes", shape.get("gamma"))
    rows = _rows(alpha, gamma, nodes, generator)
    lengths = [int(n) for n in generator.integers(20, 400, 40)]
    found = acceptance(rows, lengths, [CATEGORIES[i % 4] for i in range(40)], Bootstrap(40, 300, seed=0))
    seconds = 120 / speed
    tokens = sum(r.emitted for row in rows for r in row)
    points = [
        GammaPoint(gamma=g, tau=2.0, predicted_speedup=(2 - alpha**g) / (1 + 0.09 * g), measured=g <= gamma)
        for g in range(1, 9)
    ]
    sure = calibration(_sums(alpha, generator), Bootstrap(40, 300, seed=0))
    batches = [
        BatchSpeed(
            batch_size=size,
            batches=max(2, 40 // size),
            speedup=around(fast),
            decode_speedup=around(fast),
            predicted=around(1.04 * fast),
        )
        for size, fast in ((1, speed), (4, 0.8 * speed), (16, 0.55 * speed))
    ]
    return SystemReport(
        name=name,
        shape=shape,
        acceptance=found.model_copy(update={"calibration": sure}),
        time=RunTime(
            new_tokens=tokens,
            passes=found.rounds,
            seconds=seconds,
            prefill_seconds=6,
            target_seconds=0.6 * seconds,
            drafter_seconds=0.2 * seconds,
        ),
        speedup=around(speed),
        decode_speedup=around(speed + 0.05),
        costs=Costs(
            pass_seconds={1: 0.02, 5: 0.021, 9: 0.024},
            draft_step_seconds=0.0018,
            c=0.09,
            nodes=nodes,
            v=1.07,
            round_cost=1.45,
            predicted_speedup=speed + 0.1,
            break_even_alpha=0.27 if "gamma" in shape else None,
            best_gamma=2 if "gamma" in shape else None,
            by_gamma=points if "gamma" in shape else [],
        ),
        losslessness=verdict,
        predicted=around(speed + 0.1),
        by_batch=batches,
        stops_paying=stops_paying([1, 4, 16], [point.decode_speedup.value or 0 for point in batches]),
    )


def around(value: float) -> Estimate:
    return Estimate(value=value, low=value - 0.06, high=value + 0.07)


def _sums(alpha: float, generator: np.random.Generator) -> list[Tensor]:
    """What 40 prompts tell of a drafter that is too sure of itself."""
    sums = []
    for _ in range(40):
        sure = generator.random(60) ** 0.6
        right = generator.random(60) < sure * (0.6 + 0.5 * alpha)
        each = np.stack([np.ones(60), sure, right, right], 1)
        place = np.minimum((10 * sure).astype(int), 9)
        sums.append(torch.tensor(np.stack([each[place == bin_].sum(0) for bin_ in range(10)])))
    return sums


def example_report() -> Report:
    identical = Losslessness(verdict="identical", reason="all 40 answers are token-identical", compared=40)
    ties = Losslessness(
        verdict="ties",
        reason="2 of 40 answers part from plain decoding's, each at a near tie of the target's two best logits",
        compared=40,
        divergences=[
            Divergence(
                prompt=3,
                position=17,
                plain_token=104,
                speculative_token=99,
                top2_margin=0.0131,
                gap=0.0131,
                rounding=0.062,
            ),
            Divergence(prompt=21, position=80, plain_token=None, speculative_token=12, top2_margin=0.002),
        ],
    )
    sentence = "The old bridge over the river was closed: engineers found cracks & <worn> steel in two pillars."
    words = sentence.split()
    kinds = ("first", "accepted", "accepted", "corrected", "accepted", "accepted", "accepted", "free", "corrected")
    pieces = [Piece(kind=kinds[i % 9], text=word + " ", round=i // 4) for i, word in enumerate(words)]  # type: ignore[arg-type]
    prompt = (
        "Summarise this passage in one sentence:\n\nThe old bridge <script>alert('https://example.org')</script> " * 2
    )
    return Report(
        created="2026-01-02T03:04:05+00:00",
        setting=Setting(
            target="SmolLM2-135M-Instruct",
            target_fingerprint="0123456789abcdef",
            drafter="eagle3",
            device="cpu",
            hardware="2 cores of a CPU",
            dtype="bfloat16",
            threads=2,
            batch_size=1,
            temperature=0,
            top_k=None,
            top_p=None,
            max_new_tokens=128,
            seed=0,
            prompts=40,
            categories=dict.fromkeys(CATEGORIES, 10),
            training_overlap=0,
            trained_length=512,
        ),
        plain=RunTime(
            new_tokens=1500, passes=1460, seconds=30, prefill_seconds=1.6, target_seconds=27, drafter_seconds=0
        ),
        systems=[
            _system("chain of 4", {"kind": "chain", "gamma": 4}, 0.45, 1.34, identical),
            _system("tree of 16", {"kind": "tree", "depth": 5, "width": 4, "nodes": 16}, 0.55, 1.52, ties),
        ],
        samples=[
            Sample(prompt=prompt, category="summarising", system="chain of 4", tau=2.1, pieces=pieces),
            Sample(prompt="What is 17 + 26?", category="maths", system="tree of 16", tau=2.6, pieces=pieces[:7]),
        ],
        training=[
            Curve(name="loss", steps=list(range(0, 500, 10)), values=[4 - 2.5 * i / 50 for i in range(50)]),
            Curve(name="overlap_1", steps=list(range(0, 500, 10)), values=[0.1 + 0.5 * i / 50 for i in range(50)]),
            Curve(name="overlap_2", steps=list(range(0, 500, 10)), values=[0.1 + 0.4 * i / 50 for i in range(50)]),
        ],
        warnings=[
            "2 prompts are longer than the 512 tokens that the drafter was trained on; acceptance may fall there."
        ],
        provenance={"recipe": {"seed": 0}, "packages": {"torch": "2.13"}},
    )
