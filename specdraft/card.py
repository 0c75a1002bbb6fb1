"""The model card of a published drafter: what was measured, how it is served, what it came from."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from huggingface_hub import EvalResult, ModelCardData

from specdraft.config import Recipe
from specdraft.evaluation import plots
from specdraft.evaluation.page import figures, number, percent, setting_lines, template
from specdraft.evaluation.report import Estimate, Report, SystemReport
from specdraft.formats import FORMATS
from specdraft.quantization.report import QuantizeReport
from specdraft.serving import Serving, commands

_SHOWN = ("tau", "alpha", "analytic alpha", "tokens/s", "speed-up", "decode speed-up", "lossless")
_KINDS = {
    "eagle3": "An EAGLE-3 head",
    "eagle1": "An EAGLE-1 head",
    "medusa": "A set of Medusa heads",
    "hydra": "A set of Hydra heads",
    "mtp": "A set of multi-token-prediction modules",
    "lm": "A draft language model",
    "early_exit": "An early-exit adapter",
}
_IDLE = set("output_dir cache_dir store strict resume workers log_every save_every keep trackers bad_steps".split())
"""Settings of a training that do not bear on the drafter."""
_OPEN = ("Acceptance by depth", "Acceptance by category", "Where the time goes")
"""Plots that a card shows at once; the others are folded in."""
_INK = {"ink": "#1d2126", "line": "#dcdad3", "card": "#ffffff"} | dict(
    zip(("s1", "s2", "s3", "s4", "s5"), ("#2f6fa8", "#c2641c", "#2e8560", "#7d5ba6", "#8a7a2f"), strict=True)
)
"""The report page's colours on white: a picture in a file has no page to take them from."""


class Data(Recipe):
    name: str
    """A data set's name on the Hub, owner/name, or words for one that is not there."""
    licence: str
    """Its licence."""
    note: str | None = None
    """What it was used for, who answered it, what was left out."""


@dataclass(frozen=True)
class Measured:
    """A checkpoint, and the reports that measured exactly its weights, at least one."""

    folder: Path
    config: dict[str, Any]
    layout: str | None
    """Its name in FORMATS; None: no engine loads it."""
    weights: str
    size: int
    """Bytes of its safetensors files."""
    made: dict[str, Any] | None
    """Its provenance, `specdraft.json`, if it has one."""
    reports: list[Report]
    quantised: QuantizeReport | None = None
    """What `quantize` measured beside what it was made from, if it wrote this."""

    @property
    def kind(self) -> str:
        """Its name in DRAFTERS."""
        own = self.config.get("specdraft", {}).get("drafter")
        return own or FORMATS[self.layout].drafters[0] if self.layout else own

    @property
    def number_format(self) -> str:
        """What its weights are stored in, in a few words."""
        how = self.config.get("quantization_config")
        if how is None:
            return str(self.config.get("torch_dtype") or self.config.get("dtype") or "not said")
        bits = [f"INT{group['weights']['num_bits']}" for group in (how.get("config_groups") or {}).values()]
        return " ".join([*bits[:1], f"({how.get('quant_method', 'quantised')})"])


@dataclass(frozen=True)
class Publication:
    """All that a card speaks of."""

    repo: str
    base_model: str
    base_revision: str | None
    main: Measured
    variants: dict[str, Measured]
    as_folders: bool
    licence: str
    data: Sequence[Data]
    languages: Sequence[str]
    tags: Sequence[str]

    @property
    def names(self) -> set[str]:
        """The names with a slash that are public."""
        return {self.repo, self.base_model, *(one.name for one in self.data)}


class Picture(NamedTuple):
    title: str
    reading: str
    """How to read it."""
    path: str


def render(publication: Publication, variant: str | None, drawn: Sequence[Picture]) -> str:
    """The card of the main checkpoint, or of a variant on a branch of its own: metadata, then Markdown."""
    one = publication.main if variant is None else publication.variants[variant]
    trained = training_recipe(one.made)
    body = template("specdraft", "card.md.jinja", escaping=False).render(
        p=publication,
        one=one,
        variant=variant,
        kind=_KINDS[one.kind],
        reports=[(_title(report), _table(report), _parts(report.best), report) for report in one.reports],
        setting=setting_lines(public_report(one.reports[0], publication, samples=False)),
        serving=_serving(publication, variant),
        variants=_variants(publication),
        plots=[plot for plot in drawn if plot.title in _OPEN],
        folded=[plot for plot in drawn if plot.title not in _OPEN],
        training=_training(public(trained, publication.names)),
        made=None if one.made is None else public(one.made, publication.names),
        limits=_limits(publication, one),
        size=_size,
    )
    return f"---\n{metadata(publication, one).to_yaml()}\n---\n\n" + re.sub(r"\n{3,}", "\n\n", body)


def metadata(publication: Publication, one: Measured) -> ModelCardData:
    """What the Hub indexes: the target, the licence, the tags, and the figures as `model-index`."""
    engines = [engine.tag for engine in _serving(publication, None).engines]
    own = ["speculative-decoding", "specdraft", one.kind.replace("_", "-"), *engines]
    return ModelCardData(
        base_model=publication.base_model,
        license=publication.licence,
        library_name="transformers" if one.kind == "lm" else "specdraft",
        pipeline_tag="text-generation",
        language=list(publication.languages) or None,
        datasets=[data.name for data in publication.data if re.fullmatch(r"[\w.-]+/[\w.-]+", data.name)] or None,
        tags=[*own, *publication.tags],
        model_name=publication.repo.split("/")[1],
        eval_results=[result for report in one.reports for result in _results(report)],
    )


def _results(report: Report) -> list[EvalResult]:
    """tau, alpha and speed-up of every system; a figure's interval and setting are its arguments."""
    setting = report.setting
    data = report.provenance.get("data")
    asked = ", ".join(Path(name).name for name in data) if isinstance(data, dict) else ""
    found = []
    for system in report.systems:
        wanted: dict[str, Estimate | None] = {
            "tau": system.acceptance.tau,
            "alpha": system.acceptance.alpha,
            "speed-up": system.speedup,
        }
        for name, estimate in wanted.items():
            if estimate is None or estimate.value is None:
                continue
            found.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="speculative decoding",
                    dataset_type="prompts",
                    dataset_name=asked or "prompts",
                    metric_type=name,
                    metric_name=f"{name}, {system.name}",
                    metric_value=round(estimate.value, 4),
                    metric_args={
                        "low": None if estimate.low is None else round(estimate.low, 4),
                        "high": None if estimate.high is None else round(estimate.high, 4),
                        "temperature": setting.temperature,
                        "batch_size": setting.batch_size,
                        "dtype": setting.dtype,
                        "hardware": setting.hardware,
                    },
                )
            )
    return found


def public(value: Any, names: Collection[str]) -> Any:
    """A JSON value without places of a machine: of a text with a slash in it, key or value, only the last part stays,
    unless it is one of `names`. Two keys that end alike are told apart by a number."""
    if isinstance(value, str):
        if value in names or not re.search(r"[/\\]", value):
            return value
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    if isinstance(value, list):
        return [public(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    kept: dict[str, Any] = {}
    for key, item in value.items():
        short, more = public(key, names), 1
        while (name := short if more == 1 else f"{short} ({more})") in kept:
            more += 1
        kept[name] = public(item, names)
    return kept


def public_report(report: Report, publication: Publication, samples: bool) -> Report:
    """A report as it is published: target and drafter under their names on the Hub; the rest as `public` leaves it."""
    setting = report.setting.model_copy(update={"target": publication.base_model, "drafter": publication.repo})
    provenance = public({**report.provenance, "target": publication.base_model}, publication.names)
    warnings = [re.sub(r"\S*[/\\](?=\S)", "", warning) for warning in report.warnings]
    shown = report.samples if samples else []
    changes = {"setting": setting, "provenance": provenance, "warnings": warnings, "samples": shown}
    return report.model_copy(update=changes)


def public_comparison(found: QuantizeReport, publication: Publication) -> QuantizeReport:
    """What `quantize` measured, likewise."""
    names = {"target": publication.base_model, "drafter": publication.repo}
    return found.model_copy(update={**names, "provenance": public(found.provenance, publication.names)})


def training_recipe(made: dict[str, Any] | None) -> dict[str, Any]:
    """The recipe of the training at the bottom of a provenance, under whatever conversions; empty if there is none."""
    recipe = {} if made is None else made.get("recipe", {})
    while "training" not in recipe and "drafter_made" in recipe:
        recipe = recipe["drafter_made"].get("recipe", {})
    return recipe if "training" in recipe else {}


def draw(report: Report, folder: Path) -> list[Picture]:
    """Write the report's plots as files that need no page; what is there to be shown."""
    folder.mkdir(parents=True)
    drawn = []
    for plot in (plot for section in plots.draw(report).values() for plot in section):
        drawing = re.sub(r"var\(--(\w+)\)", lambda variable: _INK[variable[1]], plot.drawing)
        drawing = drawing.replace("font-family: inherit", "font-family: sans-serif")
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        drawing = drawing.replace("<svg ", f'<svg {spaces} style="background: #ffffff" ', 1)
        path = folder / f"{re.sub(r'[^a-z]+', '-', plot.title.lower()).strip('-')}.svg"
        path.write_text(drawing, encoding="utf-8")
        drawn.append(Picture(plot.title, plot.reading, f"{folder.name}/{path.name}"))
    return drawn


def _serving(publication: Publication, variant: str | None) -> Serving:
    one = publication.main if variant is None else publication.variants[variant]
    return commands(
        one.kind,
        one.layout,
        one.config,
        one.reports,
        target=publication.base_model,
        repo=publication.repo,
        revision=None if publication.as_folders else variant,
        folder=variant if publication.as_folders else None,
    )


def _title(report: Report) -> str:
    s = report.setting
    law = "Greedy" if s.temperature == 0 else f"Temperature {s.temperature:g}"
    more = "".join(f", {name} {value:g}" for name, value in (("top-k", s.top_k), ("top-p", s.top_p)) if value)
    return f"{law}{more}; batch {s.batch_size}, {s.dtype}, on {s.hardware}; {s.prompts} prompts"


def _table(report: Report) -> list[list[str]]:
    """Head and rows: the figures, of plain decoding where that was run and of each system."""
    plain = report.plain
    rows = [["", *(["plain"] if plain is not None else []), *(system.name for system in report.systems)]]
    for figure in figures(report):
        if figure.name in _SHOWN or figure.name.startswith("alpha at depth"):
            cells = [figure.plain(plain)] if plain is not None else []
            rows.append([figure.name, *cells, *(figure.of(system) for system in report.systems)])
    return rows


def _parts(system: SystemReport) -> list[list[str]]:
    """Head and rows: the best system's acceptance by category; only the head where prompts have none."""
    parts = [part for part in system.acceptance.slices if part.kind == "category"]
    rows = [[part.name, str(part.prompts), number(part.tau), percent(part.alpha)] for part in parts]
    return [[f"{system.name}, by category", "prompts", "tau", "alpha"], *rows]


def _variants(publication: Publication) -> list[list[str]]:
    """Head and rows: each checkpoint of the repository with the figures of its own first report."""
    rows = [["checkpoint", "weights", "size", "system", "tau", "alpha", "speed-up", "lossless"]]
    for name, one in {"main": publication.main, **publication.variants}.items():
        best = one.reports[0].best
        figures_ = [number(best.acceptance.tau), percent(best.acceptance.alpha), number(best.speedup)]
        rows.append([name, one.number_format, _size(one.size), best.name, *figures_, best.losslessness.verdict])
    return rows


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _training(recipe: dict[str, Any]) -> str:
    """The training recipe as YAML, without what is unset or does not bear on the outcome."""
    kept = {name: recipe[name] for name in ("drafter", "data", "objective", "training") if name in recipe}
    if not kept:
        return ""
    return yaml.safe_dump(_set(kept), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100).strip()


def _set(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _set(part) for name, part in value.items() if part not in (None, [], {}) and name not in _IDLE}
    return value


def _limits(publication: Publication, one: Measured) -> list[str]:
    """What the figures do not say, as far as the reports and the config tell."""
    settings = [report.setting for report in one.reports]
    first = settings[0]
    found = [
        f"It drafts for `{publication.base_model}` with the fingerprint `{first.target_fingerprint}`. Another "
        "revision, a fine-tune or a quantised copy of the target still answers as itself, but accepts otherwise."
    ]
    if first.trained_length is None:
        found.append("How long its training samples were is not known.")
    else:
        found.append(
            f"It was trained on samples of up to {first.trained_length} tokens; past that, acceptance may fall."
        )
    drafted, whole = one.config.get("draft_vocab_size"), one.config.get("vocab_size")
    if drafted and whole and drafted < whole:
        found.append(f"It drafts {drafted:,} of the target's {whole:,} ids; the others come from the target alone.")
    if (most := max(s.prompts for s in settings)) < 100:
        found.append(f"It was measured on {most} prompts: mind the intervals.")
    sampled = {s.temperature for s in settings}
    if sampled == {0.0}:
        found.append("It was measured at temperature 0 only; at higher temperatures acceptance is another.")
    overlaps = [(s.training_overlap, s.prompts) for s in settings]
    if any(overlap is None for overlap, _ in overlaps):
        found.append("Whether evaluation prompts were trained on is not known.")
    found += [f"{n} of the {all_} evaluation prompts were trained on." for n, all_ in overlaps if n]
    machines = " and ".join(sorted({f"{s.hardware} ({s.device}, {s.dtype})" for s in settings}))
    found.append(
        f"Speed was measured in specdraft's own loop on {machines}; in an engine it is another, acceptance is not."
    )
    if not publication.data:
        found.append("The publisher names no source or licence of the training data.")
    return found + [warning for report in one.reports for warning in public_report(report, publication, False).warnings]
