"""The exact law of what the real decoding loop emits, with any drafter, over a tiny float64 target."""

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from enumeration import ScriptedDice, law, outcomes
from models import tiny_model
from torch import Tensor

from specdraft.decoding import generate
from specdraft.drafters.base import Drafter
from specdraft.target import FrozenTarget
from specdraft.warping import Processors, Warp

PROMPT = [1, 2, 0, 1, 2]
WARP = Warp(3.0)


def exact_target(vocab: int, **changes: object) -> FrozenTarget:
    """LayerNorm: no float32 inside. A second seed is a draft LM."""
    bare = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return FrozenTarget(
        tiny_model("gpt_neox", **{"vocab_size": vocab, "num_hidden_layers": 2, **bare, **changes}).double()
    )


class Joint(NamedTuple):
    error: float
    """Greatest difference between the law of the tokens that were emitted and the target's."""
    accepted: float
    """Drafted tokens that were accepted, on average."""


def joint(
    target: FrozenTarget,
    drafter: Drafter,
    length: int,
    prompt: Sequence[int] = PROMPT,
    warp: Warp = WARP,
    processors: Processors | None = None,
) -> Joint:
    """Over every outcome of decoding the first `length` tokens, from the prompt on."""

    def run(dice: ScriptedDice, rows: int) -> list[tuple[tuple[int, ...], int]]:
        settings: dict[str, Any] = {"max_new_tokens": length, "batch_size": rows, "processors": processors}
        found = generate(target, drafter, [prompt] * rows, warp=warp, dice=lambda _: dice, **settings)
        return [(tuple(g.tokens), sum(r.accepted for r in g.rounds)) for g in found.generations]

    found = outcomes(run)
    emitted = law([(probability, tokens) for probability, (tokens, _) in found])
    laws: dict[tuple[int, ...], Tensor] = {}
    for known in range(length):
        paths = list(product(range(target.vocab_size), repeat=known))
        tokens = torch.tensor([[*prompt, *path] for path in paths])
        logits = target.head(target.observe(tokens, torch.ones_like(tokens).bool(), ()).hidden[:, -1])
        for processor in () if processors is None else processors(len(prompt)):
            logits = processor(tokens, logits)
        laws.update(zip(paths, warp(logits), strict=True))
    error = 0.0
    for path in product(range(target.vocab_size), repeat=length):
        want = torch.stack([laws[path[:step]][path[step]] for step in range(length)]).prod()
        error = max(error, abs(emitted.get(path, 0.0) - float(want)))
    return Joint(error, sum(probability * accepted for probability, (_, accepted) in found))
