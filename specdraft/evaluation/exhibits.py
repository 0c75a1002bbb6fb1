"""What a report shows beside its figures: answers with the origin of each token, the training's curves, the machine."""

import json
import platform
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from specdraft.config import SpecdraftError
from specdraft.decoding import Generation
from specdraft.evaluation.prompts import Prompt
from specdraft.evaluation.report import Curve, Piece, Sample


def samples(
    tokenizer: Any, prompts: Sequence[Prompt], answers: Mapping[str, Sequence[Generation]], count: int
) -> list[Sample]:
    """`count` prompts, spread over the categories, each answered by every system."""
    chosen = _spread([prompt.category for prompt in prompts], count)
    return [
        Sample(
            prompt=prompts[index].text,
            category=prompts[index].category,
            system=system,
            tau=_tau(generations[index]),
            pieces=pieces(tokenizer, generations[index]),
        )
        for index in chosen
        for system, generations in answers.items()
    ]


def pieces(tokenizer: Any, generation: Generation) -> list[Piece]:
    """The answer token by token; a token that completes no character joins the next one's piece. Without a tokenizer
    the ids stand for the text."""
    kinds: list[tuple[Any, int]] = [("first", 0)]
    for number, r in enumerate(generation.rounds, 1):
        own = "corrected" if r.offered > r.accepted else "free"
        kinds += [("accepted" if place < r.accepted else own, number) for place in range(r.emitted)]
    return [
        Piece(kind=kind, text=text, round=number)
        for text, (kind, number) in zip(_texts(tokenizer, generation.tokens), kinds, strict=True)
        if text
    ]


def training_curves(path: Path) -> list[Curve]:
    """Losses, overlaps and acceptance of a `trainer_state.json`. Raises SpecdraftError if it is none."""
    try:
        log = json.loads(path.read_text(encoding="utf-8"))["log_history"]
        points = [
            (name, int(entry["step"]), float(value))
            for entry in log
            for name, value in entry.items()
            if re.fullmatch(r"(eval_)?(loss|overlap_\d+|alpha(_\d+)?)", name)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecdraftError(f"{path} is no trainer_state.json of transformers' Trainer: {error!r}") from error
    names = sorted({name for name, _, _ in points})
    return [
        Curve(
            name=name,
            steps=[step for other, step, _ in points if other == name],
            values=[value for other, _, value in points if other == name],
        )
        for name in names
    ]


def hardware(device: torch.device) -> str:
    """The accelerator's name, or the processor's with the number of its cores that we may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8")) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    read = [tokenizer.decode(tokens[:end]) for end in range(1, len(tokens) + 1)]
    # a text that ends within a character decodes to U+FFFD there: hold it back until it is whole
    whole: list[str] = list(accumulate(read, lambda before, now: before if now.endswith("\ufffd") else now))
    return [now[len(before) :] for before, now in zip(["", *whole], whole, strict=False)]


def _tau(generation: Generation) -> float | None:
    rounds = generation.rounds
    return 1 + sum(r.accepted for r in rounds) / len(rounds) if rounds else None


def _spread(categories: Sequence[str | None], count: int) -> list[int]:
    """Indices that go round the categories in turn, in the order of the prompts."""
    seen: dict[str | None, int] = {}
    ranks = []
    for index, category in enumerate(categories):
        seen[category] = seen.get(category, 0) + 1
        ranks.append((seen[category], index))
    return sorted(index for _, index in sorted(ranks)[:count])
