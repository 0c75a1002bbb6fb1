"""Decoding speed of our loop and of transformers' `generate`, plain and assisted by the same draft model.

Greedy, one prompt at a time, the systems in turns. Specdraft packs a float32 CPU target's weights when it loads it, and
`generate` gains by that as well: it is timed on the model as transformers loads it, and on the packed one. The table is
on stdout, and on its last line one JSON object.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specdraft.config import SpecdraftError
from specdraft.data.conversations import Faults
from specdraft.decoding import Decoding, generate
from specdraft.drafters import load_drafter
from specdraft.drafters.base import Chain, Drafter
from specdraft.drafters.lm import LMDrafter
from specdraft.evaluation.prompts import read_prompts
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.warping import Warp

Decode = Callable[[list[int]], list[int]]
"""Prompt ids to new ids."""
PLAIN = "generate, plain"


def cut(source: str, layers: int, folder: Path) -> None:
    """An ordinary checkpoint of the first layers of a model: a draft model that costs no training and knows little."""
    config = copy.deepcopy(AutoConfig.from_pretrained(source))
    if not 0 < layers < config.num_hidden_layers:
        raise SpecdraftError(f"a draft of {layers} layers: allowed are 1 to {config.num_hidden_layers - 1}")
    whole = AutoModelForCausalLM.from_pretrained(source)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    draft = AutoModelForCausalLM.from_config(config, dtype=whole.dtype)
    kept = draft.state_dict().keys()
    draft.load_state_dict({name: value for name, value in whole.state_dict().items() if name in kept})
    draft.generation_config = whole.generation_config
    draft.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def assisted(model: PreTrainedModel, cap: int, draft: PreTrainedModel | None = None, gamma: int = 0) -> Decode:
    """transformers' generate; with a draft model, a chain of `gamma` tokens in every round, as ours."""
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": cap, "pad_token_id": 0}
    if draft is not None:
        draft.generation_config.num_assistant_tokens = gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft

    def decode(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()

    return decode


@dataclass
class Clock:
    """Seconds inside the forward calls of modules."""

    seconds: float = 0.0
    _starts: list[float] = field(default_factory=list)

    @contextmanager
    def watching(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        def begin(*_: Any) -> None:
            self._starts.append(time.perf_counter())

        def end(*_: Any) -> None:
            started = self._starts.pop()
            if not self._starts:  # of nested calls, the outermost counts
                self.seconds += time.perf_counter() - started

        with ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end).remove)
            yield


@dataclass
class Ours:
    """Our loop, with what it says about its own time, and what the models' forward calls took of it."""

    target: FrozenTarget
    drafter: Drafter | None
    watched: Sequence[nn.Module]
    cap: int
    clock: Clock = field(default_factory=Clock)
    wall: float = 0.0
    decodings: list[Decoding] = field(default_factory=list)

    def __call__(self, prompt: list[int]) -> list[int]:
        with self.clock.watching(self.watched):
            start = time.perf_counter()
            decoding = generate(
                self.target, self.drafter, [prompt], warp=Warp(temperature=0.0), max_new_tokens=self.cap
            )
            self.wall += time.perf_counter() - start
        self.decodings.append(decoding)
        return decoding.generations[0].tokens

    def shares(self) -> dict[str, float]:
        """Parts of the wall-clock time, and accepted tokens a round."""
        inside = sum(d.prefill_seconds + d.target_seconds + d.drafter_seconds for d in self.decodings)
        rounds = [row for d in self.decodings for row in d.generations[0].rounds]
        return {
            "target": sum(d.prefill_seconds + d.target_seconds for d in self.decodings) / self.wall,
            "drafter": sum(d.drafter_seconds for d in self.decodings) / self.wall,
            "neither": 1 - inside / self.wall,
            "outside_model_calls": 1 - self.clock.seconds / self.wall,
            "accepted": statistics.fmean(row.accepted for row in rounds) if rounds else 0.0,
        }


def calls(held: FrozenTarget) -> list[nn.Module]:
    """The modules that are called in a forward pass: the body, and the output head beside it."""
    return [held.body, held.model.get_output_embeddings()]


def systems(arguments: argparse.Namespace, draft: str) -> tuple[dict[str, Decode], FrozenTarget]:
    cap, gamma, dtype = arguments.max_new_tokens, arguments.gamma, getattr(torch, arguments.dtype)
    as_loaded, as_loaded_draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval() for name in (arguments.target, draft)
    )
    target, small = (
        FrozenTarget.load(TargetRecipe(name=name, dtype=arguments.dtype, device="cpu"))
        for name in (arguments.target, draft)
    )
    drafter = LMDrafter.of(small, target)
    drafter.shape = Chain(gamma)
    found: dict[str, Decode] = {
        PLAIN: assisted(as_loaded, cap),
        "generate, assisted": assisted(as_loaded, cap, as_loaded_draft, gamma),
        "generate, plain, packed": assisted(target.model, cap),
        "generate, assisted, packed": assisted(target.model, cap, small.model, gamma),
        "specdraft, plain": Ours(target, None, calls(target), cap),
        "specdraft, draft LM": Ours(target, drafter, [*calls(target), *calls(small)], cap),
    }
    if arguments.head is not None:
        head = load_drafter(arguments.head)
        head.attach(target)
        head.shape = Chain(gamma)
        found["specdraft, trained head"] = Ours(target, head, calls(target), cap)
    return found, target


def compare(arguments: argparse.Namespace, draft: str) -> dict[str, Any]:
    found, target = systems(arguments, draft)
    prompts = [p.ids for p in read_prompts(target, [arguments.prompts], arguments.limit, {}, Faults())]
    outputs: dict[str, list[list[int]]] = {}
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for decode in found.values():  # warm-up, of which nothing is kept
        decode(prompts[0])
        if isinstance(decode, Ours):
            decode.clock.seconds, decode.wall, decode.decodings = 0.0, 0.0, []
    for repeat in range(arguments.repeats):
        spent = dict.fromkeys(found, 0.0)
        outputs = {name: [] for name in found}
        for place, prompt in enumerate(prompts, 1):
            for name, decode in found.items():
                start = time.perf_counter()
                outputs[name].append(decode(prompt))
                spent[name] += time.perf_counter() - start
            print(
                f"run {repeat + 1} of {arguments.repeats}: prompt {place}/{len(prompts)}", file=sys.stderr, flush=True
            )
        for name, total in spent.items():
            seconds[name].append(total)
    rows = {}
    for name, decode in found.items():
        tokens = sum(map(len, outputs[name]))
        rows[name] = {
            "tokens_per_second": statistics.median(tokens / s for s in seconds[name]),
            "tokens_per_second_range": [tokens / max(seconds[name]), tokens / min(seconds[name])],
            "tokens": tokens,
            "different_outputs": sum(a != b for a, b in zip(outputs[name], outputs[PLAIN], strict=True)),
            "shares": decode.shares() if isinstance(decode, Ours) else None,
        }
    for row in rows.values():
        row["times_plain"] = row["tokens_per_second"] / rows[PLAIN]["tokens_per_second"]
    drafting = rows["specdraft, draft LM"]
    keys = ("target", "prompts", "limit", "gamma", "max_new_tokens", "repeats", "draft", "layers", "head")
    return {
        "bench": "decode",
        "machine": machine.facts(arguments.dtype),
        "settings": {key: getattr(arguments, key) for key in keys},
        "over_assisted": drafting["tokens_per_second"] / rows["generate, assisted"]["tokens_per_second"],
        "over_assisted_packed": drafting["tokens_per_second"] / rows["generate, assisted, packed"]["tokens_per_second"],
        "neither_share": drafting["shares"]["neither"],
        "outside_share": drafting["shares"]["outside_model_calls"],
        "systems": rows,
    }


def table(result: dict[str, Any]) -> str:
    about, settings = result["machine"], result["settings"]
    lines = [
        f"greedy, {settings['limit']} prompts x {settings['repeats']}, at most {settings['max_new_tokens']} new tokens,"
        f" chains of {settings['gamma']}; {about['dtype']}, {about['threads']} threads, {about['cpu']}",
        "",
        "| | tokens/s | lowest to highest | over plain | other outputs | target | drafter | neither | outside |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["systems"].items():
        low, high = row["tokens_per_second_range"]
        shares = row["shares"] or {}
        parts = [
            f"{shares[key]:.1%}" if shares else "" for key in ("target", "drafter", "neither", "outside_model_calls")
        ]
        lines.append(
            f"| {name} | {row['tokens_per_second']:.1f} | {low:.1f} to {high:.1f} | {row['times_plain']:.2f} x | "
            f"{row['different_outputs']} | {' | '.join(parts)} |"
        )
    return "\n".join([*lines, "", NOTE, ""])


NOTE = """\
packed: the same model object with its weights packed by specdraft. other outputs: prompts answered otherwise than by
plain generate. target, drafter, neither: shares of our loop's time by its own clocks; outside: what is not within a
forward call of the target or the draft LM (a trained head's calls are not counted)."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench decode", description=__doc__)
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct", help="as the demo makes it")
    parser.add_argument("--prompts", default="prompts/held_out.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--draft", help="a draft LM's checkpoint; unset: the target's first layers")
    parser.add_argument("--layers", type=int, default=6, help="layers of the draft that is cut from the target")
    parser.add_argument("--head", help="a trained drafter's folder, timed as well")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens a round")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=machine.DTYPE)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(words)


@torch.no_grad()
def main() -> None:
    arguments = parse(sys.argv[1:])
    try:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.draft is None:
                cut(arguments.target, arguments.layers, Path(folder))
            result = compare(arguments, arguments.draft or folder)
    except SpecdraftError as error:
        raise SystemExit(str(error)) from None
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
