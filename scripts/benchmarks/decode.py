"""Decoding speed of our loop beside transformers' `generate` and, where it is installed, a peer's decoder.

Greedy, one prompt at a time, in one process, the systems in turns, with the same draft LM, the same prompt lookup and
the same trained head wherever a system has such a drafter: chains of as many tokens, and a tree, or both drafters in
one, where it has that.
Specdraft packs a CPU target's weights when it loads it, and others gain by that as well: they are timed on the model as
transformers loads it, which is what their users have, and on the packed one. The table is on stdout, and on its last
line one JSON object.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, Literal, cast

import machine
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdraft.causal import CausalLM
from specdraft.config import SpecdraftError
from specdraft.data.conversations import Faults
from specdraft.decoding import Decoding, generate
from specdraft.drafters.base import Drafter
from specdraft.drafters.eagle import Eagle3Drafter
from specdraft.drafters.hybrid import HybridDrafter
from specdraft.drafters.lm import LMDrafter, LMRecipe
from specdraft.drafters.lookup import LookupDrafter
from specdraft.drafters.shapes import Chain, DynamicTree, Shape
from specdraft.evaluation.prompts import read_prompts
from specdraft.evaluation.stage import TrainedSource
from specdraft.packing import pack_linears
from specdraft.target import FrozenTarget, TargetRecipe
from specdraft.warping import Warp

PEERS = {"economize": "0.3.2"}
TREE = DynamicTree(depth=5, width=4, nodes=15)
WARM_UP = 16  # tokens of a prompt
NGRAM = 3  # tokens of the longest suffix that is looked up, everywhere

Decode = Callable[[list[int]], list[int]]
"""Prompt ids to new ids."""
Drafts = Literal["plain", "draft LM", "lookup", "head", "head, tree", "lookup, else head"]


@dataclass(frozen=True)
class System:
    owner: str
    drafts: Drafts
    decode: Decode
    packed: bool = False
    """Another's loop on weights that specdraft packed."""

    @property
    def name(self) -> str:
        return f"{self.owner}, {self.drafts}" + ", packed" * self.packed

    @property
    def ours(self) -> bool:
        return self.owner == "specdraft"


def cut(target: FrozenTarget, layers: int, folder: str) -> None:
    """An ordinary checkpoint of the target's first layers: a draft model that costs no training and knows little."""
    if not 0 < layers < target.num_layers:
        raise SpecdraftError(f"a draft of {layers} layers: allowed are 1 to {target.num_layers - 1}")
    counts = torch.ones(target.vocab_size, dtype=torch.int64)
    LMDrafter.for_target(target, LMRecipe(layers=layers, spread="first"), counts).save_pretrained(folder)


def of_transformers(model: PreTrainedModel, draft: PreTrainedModel, cap: int, gamma: int) -> Iterator[tuple]:
    """What `generate` drafts with, and how it then decodes; a round has a chain of `gamma` tokens, as ours."""
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0

    def decoder(**drafting: Any) -> Decode:
        def decode(prompt: list[int]) -> list[int]:
            ids, options = torch.tensor([prompt]), {"do_sample": False, "max_new_tokens": cap, "pad_token_id": 0}
            found = model.generate(ids, attention_mask=torch.ones_like(ids), **options, **drafting)
            return found[0, len(prompt) :].tolist()

        return decode

    yield "plain", decoder()
    yield "draft LM", decoder(assistant_model=draft)
    yield "lookup", decoder(prompt_lookup_num_tokens=gamma, max_matching_ngram_size=NGRAM)


def of_economize(
    model: PreTrainedModel, target: FrozenTarget, draft: str, head: Drafter | None, arguments: argparse.Namespace
) -> Iterator[tuple]:
    """The same of economize. It drafts no trees from an EAGLE-3 head, and reads no other head of ours."""
    import economize
    from economize.techniques.draft_model import DraftModelConfig
    from economize.techniques.lookup import LookupConfig

    packed, end = model is target.model, target.end_ids

    def decoder(attached: Any, gamma: int = arguments.gamma) -> Decode:
        options = economize.DecodeConfig(cycle_length=1 + gamma, lossless=True)

        def decode(prompt: list[int]) -> list[int]:
            ids = torch.tensor(prompt)
            return attached.decode(ids, arguments.max_new_tokens, decoding=options, stop=end).tokens.tolist()

        return decode

    drafting = economize.apply(model, DraftModelConfig(model=draft))
    if packed:
        pack_linears(drafting.techniques["draft_model"].draft_model)
    yield "plain", decoder(drafting, gamma=0)
    yield "draft LM", decoder(drafting)
    yield "lookup", decoder(economize.apply(model, LookupConfig(max_ngram=NGRAM)))
    if isinstance(head, Eagle3Drafter):
        checkpoint = economize.read_checkpoint(arguments.head, format="eagle3")
        # it reads the key that counts taps from 0 at the first layer's output as if it were vLLM's
        checkpoint.configs[0] = replace(checkpoint.configs[0], aux_layers=head.taps)
        attached = economize.attach(model, checkpoint)
        if packed:
            pack_linears(attached.techniques["eagle3"])
        yield "head", decoder(attached)


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
    shape: Shape
    watched: Sequence[nn.Module]
    cap: int
    clock: Clock = field(default_factory=Clock)
    wall: float = 0.0
    decodings: list[Decoding] = field(default_factory=list)

    def __call__(self, prompt: list[int]) -> list[int]:
        if self.drafter is not None:
            self.drafter.shape = self.shape
        with self.clock.watching(self.watched):
            start = time.perf_counter()
            decoding = generate(
                self.target, self.drafter, [prompt], warp=Warp(temperature=0.0), max_new_tokens=self.cap
            )
            self.wall += time.perf_counter() - start
        self.decodings.append(decoding)
        return decoding.generations[0].tokens

    def shares(self) -> dict[str, float]:
        """Parts of the wall-clock time."""
        inside = sum(d.prefill_seconds + d.target_seconds + d.drafter_seconds for d in self.decodings)
        return {
            "target": sum(d.prefill_seconds + d.target_seconds for d in self.decodings) / self.wall,
            "drafter": sum(d.drafter_seconds for d in self.decodings) / self.wall,
            "neither": 1 - inside / self.wall,
            "outside_model_calls": 1 - self.clock.seconds / self.wall,
        }


def calls(held: FrozenTarget) -> list[nn.Module]:
    """The modules that are called in a forward pass: the body, and the output head beside it."""
    return [held.body, held.model.get_output_embeddings()]


def load(name: str, dtype: Literal["float32", "bfloat16"]) -> FrozenTarget:
    return FrozenTarget.load(TargetRecipe(name=name, dtype=dtype, device="cpu"))


@dataclass
class Record:
    """What one system did."""

    seconds: list[float] = field(default_factory=list)
    """Of each run over all prompts."""
    cpu_seconds: float = 0.0
    """Of all runs, over all threads."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """By prompt; every run gives the same."""
    passes: dict[int, int] = field(default_factory=dict)
    """By prompt: passes of the target."""

    def add(self, prompt: int, new: list[int], seconds: float, passes: int) -> None:
        if prompt == 0:
            self.seconds.append(0.0)
        self.seconds[-1] += seconds
        self.outputs[prompt], self.passes[prompt] = new, passes


class Bench:
    """Every system, and how often each target was read."""

    def __init__(self, arguments: argparse.Namespace, target: FrozenTarget, draft: str) -> None:
        cap, gamma, chain = arguments.max_new_tokens, arguments.gamma, Chain(arguments.gamma)
        as_loaded, as_loaded_draft = (
            AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).eval() for name in (arguments.target, draft)
        )
        small = load(draft, arguments.dtype)
        head = None if arguments.head is None else TrainedSource(folder=arguments.head).load(target)
        self.systems: list[System] = []
        for packed, model, assistant in ((False, as_loaded, as_loaded_draft), (True, target.model, small.model)):
            found = {"transformers": of_transformers(model, assistant, cap, gamma)}
            if arguments.peer is not None:
                found[arguments.peer] = of_economize(model, target, draft, head, arguments)
            self.systems += [System(name, *made, packed) for name, every in found.items() for made in every]
        lm = cast(Drafter, LMDrafter.of(small, target))
        drafters: list[tuple[Drafts, Drafter | None, Shape]] = [("plain", None, chain), ("draft LM", lm, chain)]
        drafters.append(("lookup", LookupDrafter(longest=NGRAM), chain))
        if head is not None:
            both = HybridDrafter(LookupDrafter(longest=NGRAM), head, least=1)
            drafters += [("head", head, chain), ("head, tree", head, TREE), ("lookup, else head", both, chain)]
        for drafts, drafter, shape in drafters:
            watched = [*calls(target), *(calls(small) if drafter is lm else [])]
            self.systems.append(System("specdraft", drafts, Ours(target, drafter, shape, watched, cap)))
        self.passes = 0
        for layers in (CausalLM(as_loaded).layers, target.layers):
            layers[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.passes += 1

    def take_turns(self, prompts: Sequence[list[int]], repeats: int) -> dict[str, Record]:
        for system in self.systems:  # warm-up, of which nothing is kept
            system.decode(prompts[0][:WARM_UP])
            if isinstance(system.decode, Ours):
                system.decode.clock.seconds, system.decode.wall, system.decode.decodings = 0.0, 0.0, []
        records = {system.name: Record() for system in self.systems}
        for repeat in range(repeats):
            for place, prompt in enumerate(prompts, 1):
                for system in self.systems:
                    record, before = records[system.name], self.passes
                    start, cpu = time.perf_counter(), time.process_time()
                    new = system.decode(prompt)
                    record.cpu_seconds += time.process_time() - cpu
                    record.add(place - 1, new, time.perf_counter() - start, self.passes - before)
                print(f"run {repeat + 1} of {repeats}: prompt {place}/{len(prompts)}", file=sys.stderr, flush=True)
        return records


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    target = load(arguments.target, arguments.dtype)
    prompts = [p.ids for p in read_prompts(target, [arguments.prompts], arguments.limit, {}, Faults())]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.draft is None:
            cut(target, arguments.layers, folder)
        bench = Bench(arguments, target, arguments.draft or folder)
    records = bench.take_turns(prompts, arguments.repeats)
    plain = records["transformers, plain"]
    rows: dict[str, dict[str, Any]] = {}
    for system in bench.systems:
        record = records[system.name]
        tokens = sum(map(len, record.outputs.values()))
        rows[system.name] = {
            "tokens_per_second": statistics.median(tokens / s for s in record.seconds),
            "tokens_per_second_range": [tokens / max(record.seconds), tokens / min(record.seconds)],
            "tokens_per_cpu_second": tokens * arguments.repeats / record.cpu_seconds,
            "tokens": tokens,
            "tokens_per_pass": tokens / sum(record.passes.values()),
            "different_outputs": sum(record.outputs[place] != plain.outputs[place] for place in plain.outputs),
            "shares": system.decode.shares() if isinstance(system.decode, Ours) else None,
        }
    for row in rows.values():
        row["times_plain"] = row["tokens_per_second"] / rows["transformers, plain"]["tokens_per_second"]
    keys = ("target", "prompts", "gamma", "max_new_tokens", "repeats", "draft", "layers", "head", "peer")
    return {
        "bench": "decode",
        "machine": machine.facts(arguments.dtype),
        "settings": {key: getattr(arguments, key) for key in keys} | {"limit": len(prompts)},
        "as_loaded": verdict(bench.systems, rows, packed=False),
        "packed": verdict(bench.systems, rows, packed=True),
        "systems": rows,
    }


def verdict(systems: Sequence[System], rows: dict[str, dict[str, Any]], *, packed: bool) -> dict[str, Any]:
    """Our fastest over the fastest of the others, as loaded or packed, and the same by what is drafted with."""

    def speed(system: System) -> float:
        return cast(float, rows[system.name]["tokens_per_second"])

    ours = [system for system in systems if system.ours]
    theirs = [system for system in systems if not system.ours and system.packed == packed]
    best, rival = max(ours, key=speed), max(theirs, key=speed)
    alike: dict[str, float] = {}
    for system in ours:
        if peers := [speed(peer) for peer in theirs if peer.drafts == system.drafts]:
            alike[system.drafts] = speed(system) / max(peers)
    return {
        "best_of_ours": best.name,
        "best_of_theirs": rival.name,
        "over_best": speed(best) / speed(rival),
        "like_for_like": alike,
    }


def table(result: dict[str, Any]) -> str:
    about, settings = result["machine"], result["settings"]
    lines = [
        f"greedy, {settings['limit']} prompts x {settings['repeats']}, at most {settings['max_new_tokens']} new tokens,"
        f" chains of {settings['gamma']}; {about['dtype']}, {about['threads']} threads, {about['cpu']}",
        "",
        "| | tokens/s | lowest to highest | over plain | tokens a pass | other outputs | target | drafter | neither "
        "| outside |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["systems"].items():
        low, high = row["tokens_per_second_range"]
        shares = row["shares"] or {}
        parts = [
            f"{shares[key]:.1%}" if shares else "" for key in ("target", "drafter", "neither", "outside_model_calls")
        ]
        lines.append(
            f"| {name} | {row['tokens_per_second']:.1f} | {low:.1f} to {high:.1f} | {row['times_plain']:.2f} x | "
            f"{row['tokens_per_pass']:.2f} | {row['different_outputs']} | {' | '.join(parts)} |"
        )
    lines += ["", "| others | our best | their best | ratio | like for like |", "|---|---|---|---:|---|"]
    for key, name in (("as_loaded", "as loaded"), ("packed", "packed")):
        found = result[key]
        alike = ", ".join(f"{drafts} {ratio:.2f} x" for drafts, ratio in found["like_for_like"].items())
        lines.append(
            f"| {name} | {found['best_of_ours']} | {found['best_of_theirs']} | {found['over_best']:.2f} x | {alike} |"
        )
    notes = [NOTE] + [NO_PEER] * (settings["peer"] is None) + [NO_HEAD] * (settings["head"] is None)
    differ = any(row["different_outputs"] for row in result["systems"].values())
    notes += [NEAR_TIES] * (differ and about["dtype"] != "float32")
    return "\n".join([*lines, "", *notes, ""])


NOTE = """\
packed: the same model with its weights packed by specdraft, as ours are. tokens a pass: new tokens over passes of the
target, the prompt's included. other outputs: prompts answered otherwise than by transformers, plain. target, drafter,
neither: shares of our loop's time by its own clocks; outside: what is not within a forward call of the target or the
draft LM (a trained head's calls are not counted). like for like: with the same drafter, over the fastest of theirs."""
NO_PEER = "economize's decoder is left out: give --peer economize."
NO_HEAD = "a trained head is left out: give --head and its folder."
NEAR_TIES = """\
In half precision the likeliest token may change with the shape of a pass where two are nearly as likely: where other
outputs are counted, tokens/s compares different texts, of the same length unless one ended sooner."""


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench decode", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=PEERS, help="whom to compare with besides transformers")
    parser.add_argument("--target", default=".cache/smollm2-135m-instruct", help="as the demo makes it")
    parser.add_argument("--prompts", default="prompts/held_out.jsonl")
    parser.add_argument("--limit", type=int, default=8, help="prompts")
    parser.add_argument("--draft", help="a draft LM's checkpoint; unset: cut from the target")
    parser.add_argument("--layers", type=int, default=6, help="the first layers, that such a draft has")
    parser.add_argument("--head", help="a trained drafter's folder, timed as well; economize reads EAGLE-3 alone")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens a round")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=machine.DTYPE)
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args(words)


@torch.no_grad()
def main() -> None:
    arguments = parse(sys.argv[1:])
    try:
        if arguments.peer is not None and version(arguments.peer) != PEERS[arguments.peer]:
            print(f"compared is {arguments.peer} {version(arguments.peer)}", file=sys.stderr)
        result = compare(arguments)
    except SpecdraftError as error:
        raise SystemExit(str(error)) from None
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
