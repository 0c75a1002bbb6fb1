"""The commands by which each engine serves a published drafter, as they stand in its card.

Which engine loads which layout, and under which name of the method, was read in the engines' sources and partly run:
vLLM 0.32, SGLang 0.5.23, TensorRT-LLM 1.3, transformers 5.24.
"""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdraft.evaluation.report import Report
from specdraft.formats import FORMATS
from specdraft.formats.safeailab import TAPS

_QUANTISED = {"compressed-tensors": {"vLLM", "SGLang", "transformers"}, "bitsandbytes": {"transformers"}}
"""The engines that load a drafter that was quantised so; of others it is not known."""
_WHY_NONE = {
    "mtp": "Engines load MTP modules only out of the target's own checkpoint: `specdraft export` with `format=mtp` "
    "stitches them into a copy of it.",
    "lm": "Engines want a draft model with exactly as many ids as its target: `specdraft export` with "
    "`format=huggingface` fills it up.",
}


class Engine(NamedTuple):
    name: str
    tag: str
    language: str
    text: str


@dataclass(frozen=True)
class Serving:
    engines: list[Engine]
    fetched: str | None
    """What to run first, where engines cannot fetch what they load by themselves."""
    load: str
    """Python."""
    evaluate: str
    """A shell command."""
    note: str | None
    """Why no engine loads it, and what to do."""


@dataclass(frozen=True)
class _Asked:
    """What the commands are made of."""

    layout: str
    config: Mapping[str, Any]
    target: str
    drafter: str
    """The repository, or the folder into which it was fetched."""
    revision: str | None
    gamma: int
    tree: tuple[int, int, int] | None
    """Depth, width and nodes, where a tree was measured to be best."""

    def method(self, engine: str) -> str | None:
        """The engine's name of the method; None where it does not load this layout."""
        return FORMATS[self.layout].methods.get(engine)


def commands(
    kind: str,
    layout: str | None,
    config: Mapping[str, Any],
    reports: Sequence[Report],
    *,
    target: str,
    repo: str,
    revision: str | None,
    folder: str | None,
) -> Serving:
    """The commands for a drafter of a kind and layout in `repo`, on the branch `revision` or in the folder `folder`.

    How much is drafted is what its reports found best.
    """
    served = layout is not None and not (kind == "lm" and _ids_differ(config))
    fetched = None
    if folder is not None:
        fetched = f"hf download {repo} --include {shlex.quote(folder + '/*')} --local-dir drafter"
    engines = []
    if served and layout is not None:
        where = repo if folder is None else f"drafter/{folder}"
        asked = _Asked(layout, config, target, where, revision, _gamma(layout, config, reports), _tree(reports[0]))
        how = (config.get("quantization_config") or {}).get("quant_method")
        made = [engine for make in _ENGINES if (engine := make(asked)) is not None]
        engines = [engine for engine in made if how is None or engine.name in _QUANTISED.get(how, ())]
    ours = layout in (None, "safeailab", "eagle1-vllm", "medusa-vllm") or kind in ("lm", "hydra", "early_exit")
    place = {"revision": revision, "subfolder": folder}
    return Serving(
        engines,
        fetched if engines else None,
        _load(repo, place) if ours else _import(repo, target, revision, folder),
        _evaluate(repo if ours else "imported", target, place if ours else {}),
        _WHY_NONE.get(kind, "No engine serves this kind of drafter; specdraft's own loop decodes with it.")
        if not engines
        else None,
    )


def _vllm(asked: _Asked) -> Engine | None:
    if (method := asked.method("vLLM")) is None:
        return None
    settings: dict[str, Any] = {"method": method}
    served = asked.drafter if method == "mtp" else asked.target
    options = ""
    if method != "mtp":
        settings["model"] = asked.drafter
    if asked.revision is not None:
        if method == "mtp":
            options = f" --revision {shlex.quote(asked.revision)}"
        else:
            settings["revision"] = asked.revision
    settings["num_speculative_tokens"] = asked.gamma
    text = f"vllm serve {shlex.quote(served)}{options} \\\n    --speculative-config {shlex.quote(json.dumps(settings))}"
    return Engine("vLLM", "vllm", "bash", text)


def _sglang(asked: _Asked) -> Engine | None:
    if (method := asked.method("SGLang")) is None:
        return None
    if asked.tree is None or asked.layout in ("huggingface", "mtp"):
        depth, width, nodes = asked.gamma, 1, asked.gamma
    else:
        depth, width, nodes = asked.tree
    lines = [f"python -m sglang.launch_server --model-path {shlex.quote(asked.target)}"]
    if asked.layout == "mtp":
        lines = [f"python -m sglang.launch_server --model-path {shlex.quote(asked.drafter)}"]
        lines += [] if asked.revision is None else [f"--revision {shlex.quote(asked.revision)}"]
    lines.append(f"--speculative-algorithm {method}")
    if asked.layout != "mtp":
        lines.append(f"--speculative-draft-model-path {shlex.quote(asked.drafter)}")
        if asked.revision is not None:
            lines.append(f"--speculative-draft-model-revision {shlex.quote(asked.revision)}")
    lines.append(f"--speculative-num-steps {depth} --speculative-eagle-topk {width}")
    lines.append(f"--speculative-num-draft-tokens {nodes + 1}")
    return Engine("SGLang", "sglang", "bash", " \\\n    ".join(lines))


def _tensorrt(asked: _Asked) -> Engine | None:
    method = asked.method("TensorRT-LLM")
    if method is None or asked.revision is not None:  # it loads a repository's main branch alone
        return None
    lines = [
        "speculative_config:",
        f"  decoding_type: {method}",
        f"  max_draft_len: {asked.gamma}",
        f"  speculative_model: {asked.drafter}",
    ]
    if (taps := asked.config.get(TAPS)) is not None:
        lines.append(f"  eagle3_layers_to_capture: {json.dumps([tap - 1 for tap in taps])}")
    listed = "\n".join(lines)
    text = (
        f"cat > speculative.yaml <<'END'\n{listed}\nEND\n"
        f"trtllm-serve {shlex.quote(asked.target)} --extra_llm_api_options speculative.yaml"
    )
    return Engine("TensorRT-LLM", "tensorrt-llm", "bash", text)


def _transformers(asked: _Asked) -> Engine | None:
    if asked.layout != "huggingface":
        return None
    place = "" if asked.revision is None else f', revision="{asked.revision}"'
    text = f"""\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{asked.target}")
target = AutoModelForCausalLM.from_pretrained("{asked.target}")
drafter = AutoModelForCausalLM.from_pretrained("{asked.drafter}"{place})
prompt = tokenizer("The capital of France is", return_tensors="pt")
answer = target.generate(**prompt, assistant_model=drafter, max_new_tokens=32)
print(tokenizer.decode(answer[0]))"""
    return Engine("transformers", "transformers", "python", text)


_ENGINES: tuple[Callable[[_Asked], Engine | None], ...] = (_vllm, _sglang, _tensorrt, _transformers)


def _ids_differ(config: Mapping[str, Any]) -> bool:
    return config["vocab_size"] != config.get("specdraft", {}).get("vocab_size", config["vocab_size"])


def _gamma(layout: str, config: Mapping[str, Any], reports: Sequence[Report]) -> int:
    """The draft length of a chain: that of the best chain that was measured; all heads of a set that vLLM counts."""
    if layout in ("medusa-vllm", "fasterdecoding"):
        return config.get("num_heads") or config["medusa_num_heads"]
    chains = [system for report in reports for system in report.systems if system.shape.get("kind") == "chain"]
    if not chains:
        return config.get("specdraft", {}).get("unroll") or 3
    best = max(chains, key=lambda one: (one.speedup.value or 0 if one.speedup else 0, one.acceptance.tau.value or 0))
    gamma = int(str(best.shape["gamma"]))
    modules = config.get("num_nextn_predict_layers") or 1
    return max(modules, gamma - gamma % modules) if layout == "mtp" else gamma


def _tree(report: Report) -> tuple[int, int, int] | None:
    shape = report.best.shape
    if shape.get("kind") != "tree":
        return None
    depth, width, nodes = (int(str(shape[name])) for name in ("depth", "width", "nodes"))
    return depth, width, nodes


def _load(repo: str, place: Mapping[str, str | None]) -> str:
    where = "".join(f', {name}="{value}"' for name, value in place.items() if value is not None)
    return f'from specdraft.drafters import load_drafter\n\ndrafter = load_drafter("{repo}"{where})'


def _import(repo: str, target: str, revision: str | None, folder: str | None) -> str:
    options = "" if revision is None else f" --revision {shlex.quote(revision)}"
    inside = "theirs" if folder is None else f"theirs/{folder}"
    return (
        f"hf download {repo}{options} --local-dir theirs\n"
        f"specdraft import folder={inside} target.name={shlex.quote(target)} output=imported"
    )


def _evaluate(drafter: str, target: str, place: Mapping[str, str | None]) -> str:
    where = "".join(f" drafter.{name}={value}" for name, value in place.items() if value is not None)
    return (
        f"specdraft eval target.name={shlex.quote(target)} drafter.kind=trained drafter.folder={drafter}{where} \\\n"
        "    'evaluation.prompts=[prompts.jsonl]' output=report"
    )
