"""A Report for people: the terminal's table, `report.md`, and `report.html`, one page that needs nothing but itself."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from rich.table import Table

from specdraft.evaluation import plots
from specdraft.evaluation.report import Costs, Estimate, Report, RunTime, Sample, SystemReport, lossless_sentence


class Figure(NamedTuple):
    """One line of the table."""

    group: str
    """The heading under which it stands."""
    name: str
    definition: str
    """The name under which the report's definitions explain it."""
    of: Callable[[SystemReport], str]
    plain: Callable[[RunTime], str] = lambda run: ""
    """What plain decoding has to say to it."""


class Shown(NamedTuple):
    """A prompt, and what each system made of it."""

    prompt: str
    category: str | None
    answers: list[Sample]


def write(report: Report, folder: Path) -> None:
    """Write `report.json`, `report.md` and `report.html` into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    report.save(folder / "report.json")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(html(report), encoding="utf-8")


def template(package: str, name: str, escaping: bool) -> Template:
    """A template in the folder `templates` of a package; `escaping`: what is put in is text, not HTML."""
    environment = Environment(
        loader=PackageLoader(package, "templates"),
        autoescape=escaping,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def drawn(title: str, notes: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Table:
    """For the terminal, with `notes` below; the first `left` columns hold words, the others figures."""
    table = Table(title=title, caption="\n".join(notes) or None, title_justify="left", caption_justify="left")
    for place, name in enumerate(header):
        table.add_column(name, justify="left" if place < left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def piped(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The lines of the same table in Markdown."""
    rule = f"|{'---|' * left}{'---:|' * (len(header) - left)}"
    named = "".join(f"| {name} " if name else "| " for name in header)
    return [f"{named}|", rule, *(f"| {' | '.join(row)} |" for row in rows)]


def number(estimate: Estimate | None, digits: int = 2) -> str:
    if estimate is None or estimate.value is None:
        return "–"
    text = f"{estimate.value:.{digits}f}"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def percent(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "–"
    text = f"{100 * estimate.value:.1f} %"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"


def figures(report: Report) -> list[Figure]:
    """The lines of the table that this report has something to say about, and a definition for: an older one has not
    all."""
    lines = [*_acceptance_figures(report), *_speed_figures(report), *_cost_figures(report), *_time_figures()]
    return [line for line in (*lines, _verdict(report)) if line.definition in report.definitions]


def _acceptance_figures(report: Report) -> list[Figure]:
    group, deepest = "Acceptance", max((len(system.acceptance.depths) for system in report.systems), default=0)
    lines = [
        Figure(group, "tau", "tau", lambda s: number(s.acceptance.tau), _one),
        Figure(group, "emitted per pass", "emitted per pass", lambda s: number(s.acceptance.emitted_per_pass)),
        Figure(group, "alpha", "alpha", lambda s: percent(s.acceptance.alpha)),
        *(Figure(group, f"alpha at depth {d + 1}", "alpha", lambda s, d=d: _at_depth(s, d)) for d in range(deepest)),  # type: ignore[misc]
        Figure(group, "analytic alpha", "analytic alpha", lambda s: percent(s.acceptance.analytic_alpha)),
        Figure(group, "acceptance ratio", "acceptance ratio", lambda s: percent(s.acceptance.acceptance_ratio)),
        Figure(group, "i.i.d. tau", "i.i.d. tau", lambda s: number(s.acceptance.iid_tau)),
        Figure(group, "departure from i.i.d.", "departure from i.i.d.", lambda s: percent(s.acceptance.iid_departure)),
    ]
    if any(system.acceptance.calibration is not None for system in report.systems):
        lines.append(Figure(group, "calibration error", "calibration error", _calibration_error))
    return lines


def _speed_figures(report: Report) -> list[Figure]:
    group = "Speed"
    lines = [Figure(group, "tokens/s", "tokens/s", lambda s: _rate(s.time), _rate)]
    if report.plain is None:
        return lines
    lines += [
        Figure(group, "speed-up", "speed-up", lambda s: number(s.speedup), _one),
        Figure(group, "decode speed-up", "decode speed-up", lambda s: number(s.decode_speedup), _one),
        Figure(group, "predicted speed-up", "predicted speed-up", lambda s: number(s.predicted)),
        Figure(
            group, "predicted / measured", "predicted / measured", lambda s: _against(s.predicted, s.decode_speedup)
        ),
    ]
    if any(system.by_batch for system in report.systems):
        lines.append(Figure(group, "stops paying", "stops paying", _stops))
    return lines


def _cost_figures(report: Report) -> list[Figure]:
    if any(system.costs is None for system in report.systems):
        return []
    group = "Costs"
    return [
        Figure(group, "v(n)", "v(n)", _cost(lambda c: f"{c.v:.2f} (n = {c.nodes + 1:.3g})"), _one),
        Figure(group, "c", "c", _cost(lambda c: f"{c.c:.3f}")),
        Figure(group, "round cost", "round cost", _cost(lambda c: f"{c.round_cost:.2f}"), _one),
        Figure(group, "break-even alpha", "break-even alpha", _cost(lambda c: _share(c.break_even_alpha))),
        Figure(group, "best gamma", "best gamma", _cost(lambda c: "–" if c.best_gamma is None else str(c.best_gamma))),
    ]


def _time_figures() -> list[Figure]:
    parts: tuple[tuple[str, Literal["target", "drafter", "prefill", "other"]], ...] = (
        ("time in target", "target"),
        ("time in drafter", "drafter"),
        ("time in prompts", "prefill"),
        ("time elsewhere", "other"),
    )

    def line(name: str, part: Literal["target", "drafter", "prefill", "other"]) -> Figure:
        def share(run: RunTime) -> str:
            return _share(run.share(part))

        own = Figure("Costs", name, "time", lambda s: share(s.time))
        return own if part == "drafter" else own._replace(plain=share)

    return [line(name, part) for name, part in parts]


def _verdict(report: Report) -> Figure:
    return Figure("Losslessness", "lossless", _lossless_key(report), lambda s: s.losslessness.verdict)


def _one(run: RunTime) -> str:
    return "1.00"


def _rate(run: RunTime) -> str:
    return f"{run.tokens_per_second:.1f}"


def _calibration_error(system: SystemReport) -> str:
    found = system.acceptance.calibration
    return "–" if found is None else percent(found.error)


def _against(predicted: Estimate | None, measured: Estimate | None) -> str:
    if predicted is None or measured is None or predicted.value is None or not measured.value:
        return "–"
    return f"{predicted.value / measured.value:.2f}"


def _stops(system: SystemReport) -> str:
    if not system.by_batch:
        return "–"
    if system.stops_paying is None:
        return f"not up to {system.by_batch[-1].batch_size}"
    return f"about {system.stops_paying:.2g}"


def table(report: Report) -> Table:
    """For the terminal: `rich.print(table(report))`."""
    return drawn(report.headline, report.warnings, *_figure_table(report), left=1)


def _figure_table(report: Report) -> tuple[list[str], list[list[str]]]:
    """Header and rows."""
    return ["", *_columns(report)], [[figure.name, *_cells(report, figure)] for figure in figures(report)]


def markdown(report: Report) -> str:
    setting = report.setting
    lines = [f"# {setting.drafter} on {setting.target}", "", f"**{report.headline}**", ""]
    lines += [f"> {warning}\n" for warning in report.warnings]
    lines += piped(*_figure_table(report), left=1)
    lines += ["", "## Losslessness", ""]
    lines += [
        f"* {system.name}: {system.losslessness.verdict}; {system.losslessness.reason}." for system in report.systems
    ]
    if (served := report.served) is not None:
        lines += ["", f"## Served by {served.engine}: {served.verdict}", "", f"{served.reason}.", ""]
        lines += piped([f"{served.system}, {served.prompts} prompts", "here", "engine"], served.rows, left=1)
    if any(system.by_batch for system in report.systems):
        lines += ["", "## Batch sizes", "", *piped(_BATCH_COLUMNS, batch_rows(report), left=1)]
    for system in report.systems:
        parts = [
            (p.kind, p.name, str(p.prompts), str(p.rounds), number(p.tau), percent(p.alpha), percent(p.analytic_alpha))
            for p in system.acceptance.slices
        ]
        header = ("", "", "prompts", "rounds", "tau", "alpha", "analytic alpha")
        lines += ["", f"## {system.name}: parts", "", *piped(header, parts, left=2)]
    lines += [
        "",
        "## Setting",
        "",
        *(f"* {name}: {text}" for name, text in setting_lines(report)),
        "",
        "## Definitions",
        "",
    ]
    lines += [f"* **{name}**: {text}" for name, text in report.definitions.items()]
    return "\n".join(lines) + "\n"


_BATCH_COLUMNS = (
    "",
    "batch size",
    "batches",
    "speed-up",
    "decode speed-up",
    "predicted speed-up",
    "predicted / measured",
)


def batch_rows(report: Report) -> list[tuple[str, ...]]:
    """A line for each system and batch size."""
    return [
        (
            system.name,
            str(point.batch_size),
            str(point.batches),
            number(point.speedup),
            number(point.decode_speedup),
            number(point.predicted),
            _against(point.predicted, point.decode_speedup),
        )
        for system in report.systems
        for point in system.by_batch
    ]


def html(report: Report) -> str:
    """The page: inline style and pictures, no script, and a policy that forbids it to load anything."""
    return template("specdraft.evaluation", "report.html.jinja", escaping=True).render(
        report=report,
        setting=setting_lines(report),
        columns=_columns(report),
        groups=_groups(report),
        tiles=_tiles(report),
        plots={
            section: [plot._replace(drawing=Markup(plot.drawing)) for plot in found]
            for section, found in plots.draw(report).items()
        },
        shown=_shown(report.samples),
        provenance=json.dumps(report.provenance, indent=2, ensure_ascii=False),
        batch_columns=_BATCH_COLUMNS,
        batch_rows=batch_rows(report),
        number=number,
        percent=percent,
    )


def setting_lines(report: Report) -> list[tuple[str, str]]:
    s = report.setting
    law = (
        "greedy"
        if s.temperature == 0
        else f"temperature {s.temperature:g}, top-k {s.top_k or 'off'}, top-p {s.top_p or 'off'}"
    )
    kinds = f" ({', '.join(f'{count} {name}' for name, count in s.categories.items())})" if s.categories else ""
    overlap = "not known" if s.training_overlap is None else f"{s.training_overlap} of {s.prompts}"
    return [
        ("target", f"{s.target} ({s.target_fingerprint})"),
        ("drafter", s.drafter),
        ("hardware", f"{s.hardware}, {s.device}, {s.threads} threads"),
        ("precision", s.dtype),
        ("acceptance", s.acceptance),
        ("decoding", f"{law}; batches of {s.batch_size}; at most {s.max_new_tokens} new tokens; seed {s.seed}"),
        ("controls", s.controls),
        ("prompts", f"{s.prompts}{kinds}{'' if s.answers in (None, s.prompts) else f'; {s.answers} turns answered'}"),
        ("prompts seen in training", overlap),
        ("drafter's trained length", "not known" if s.trained_length is None else f"{s.trained_length} tokens"),
        ("made", report.created),
    ]


def _groups(report: Report) -> list[tuple[str, list[tuple[Figure, list[str]]]]]:
    """The table's lines under their headings."""
    found: dict[str, list[tuple[Figure, list[str]]]] = {}
    for figure in figures(report):
        found.setdefault(figure.group, []).append((figure, _cells(report, figure)))
    return [*found.items()]


def _shown(samples: Sequence[Sample]) -> list[Shown]:
    """Samples of one prompt side by side, in the order of the report."""
    found: dict[tuple[str, str | None], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.prompt, sample.category), []).append(sample)
    return [Shown(prompt, category, answers) for (prompt, category), answers in found.items()]


def _columns(report: Report) -> list[str]:
    return [*(["plain"] if report.plain is not None else []), *(system.name for system in report.systems)]


def _cells(report: Report, figure: Figure) -> list[str]:
    plain = [figure.plain(report.plain)] if report.plain is not None else []
    return [*plain, *(figure.of(system) for system in report.systems)]


def _tiles(report: Report) -> Sequence[tuple[str, str, str, str]]:
    """The few figures that stand large: name, value, what stands below it, and its definition."""
    best, known = report.best, report.definitions
    tiles = []
    if best.speedup is not None and best.speedup.value is not None:
        tiles.append(("speed-up", f"{best.speedup.value:.2f}×", _between(best.speedup, 1, 2), known["speed-up"]))
    tau, alpha = best.acceptance.tau, best.acceptance.alpha
    tiles.append(
        ("tokens per target pass", "–" if tau.value is None else f"{tau.value:.2f}", _between(tau, 1, 2), known["tau"])
    )
    tiles.append(("acceptance, alpha", _share(alpha.value), _between(alpha, 100, 0, " %"), known["alpha"]))
    verdicts = [system.losslessness for system in report.systems]
    word = (
        "yes"
        if all(v.lossless for v in verdicts)
        else "no"
        if any(v.verdict in ("failed", "lossy by choice") for v in verdicts)
        else "not certified"
    )
    tiles.append(("lossless", word, lossless_sentence(verdicts), known[_lossless_key(report)]))
    return tiles


def _between(estimate: Estimate, scale: float, digits: int, unit: str = "") -> str:
    if estimate.low is None or estimate.high is None:
        return "too little for an interval"
    return f"{scale * estimate.low:.{digits}f} to {scale * estimate.high:.{digits}f}{unit}"


def _at_depth(system: SystemReport, place: int) -> str:
    depths = system.acceptance.depths
    return percent(depths[place].alpha) if place < len(depths) else "–"


def _cost(text: Callable[[Costs], str]) -> Callable[[SystemReport], str]:
    return lambda system: "–" if system.costs is None else text(system.costs)


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _lossless_key(report: Report) -> str:
    if any(system.losslessness.verdict == "lossy by choice" for system in report.systems):
        return "lossy by choice"
    return "lossless, greedy" if report.setting.temperature == 0 else "lossless, sampled"
