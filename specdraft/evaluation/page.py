"""A Report for people: the terminal's table, `report.md`, and `report.html`, one page that needs nothing but itself."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from specdraft.evaluation import plots
from specdraft.evaluation.report import Costs, Estimate, Report, RunTime, SystemReport, lossless_sentence


class Figure(NamedTuple):
    """One line of the table."""

    name: str
    definition: str
    """The name under which the report's definitions explain it."""
    of: Callable[[SystemReport], str]
    plain: Callable[[RunTime], str] = lambda run: ""


def write(report: Report, folder: Path) -> None:
    """Write `report.json`, `report.md` and `report.html` into `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    report.save(folder / "report.json")
    (folder / "report.md").write_text(markdown(report), encoding="utf-8")
    (folder / "report.html").write_text(html(report), encoding="utf-8")


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
    """The lines of the table that this report has something to say about."""
    deepest = max((len(system.acceptance.depths) for system in report.systems), default=0)
    lines = [
        Figure("tau", "tau", lambda s: number(s.acceptance.tau), lambda run: "1.00"),
        Figure("emitted per pass", "emitted per pass", lambda s: number(s.acceptance.emitted_per_pass)),
        Figure("alpha", "alpha", lambda s: percent(s.acceptance.alpha)),
        *(Figure(f"alpha at depth {d + 1}", "alpha", lambda s, d=d: _at_depth(s, d)) for d in range(deepest)),  # type: ignore[misc]
        Figure("analytic alpha", "analytic alpha", lambda s: percent(s.acceptance.analytic_alpha)),
        Figure("acceptance ratio", "acceptance ratio", lambda s: percent(s.acceptance.acceptance_ratio)),
        Figure(
            "tokens/s",
            "tokens/s",
            lambda s: f"{s.time.tokens_per_second:.1f}",
            lambda run: f"{run.tokens_per_second:.1f}",
        ),
    ]
    if report.plain is not None:
        lines += [
            Figure("speed-up", "speed-up", lambda s: number(s.speedup), lambda run: "1.00"),
            Figure("decode speed-up", "decode speed-up", lambda s: number(s.decode_speedup), lambda run: "1.00"),
        ]
    if all(system.costs is not None for system in report.systems):
        lines += [
            Figure("predicted speed-up", "predicted speed-up", _cost(lambda c: f"{c.predicted_speedup:.2f}")),
            Figure("v(n)", "v(n)", _cost(lambda c: f"{c.v:.2f} (n = {c.nodes + 1:.3g})"), lambda run: "1.00"),
            Figure("c", "c", _cost(lambda c: f"{c.c:.3f}")),
            Figure("break-even alpha", "break-even alpha", _cost(lambda c: _share(c.break_even_alpha))),
            Figure("best gamma", "best gamma", _cost(lambda c: "–" if c.best_gamma is None else str(c.best_gamma))),
        ]
    lines += [
        Figure(
            "time in target", "time", lambda s: _share(s.time.share("target")), lambda run: _share(run.share("target"))
        ),
        Figure("time in drafter", "time", lambda s: _share(s.time.share("drafter")), lambda run: ""),
        Figure(
            "time in prompts",
            "time",
            lambda s: _share(s.time.share("prefill")),
            lambda run: _share(run.share("prefill")),
        ),
        Figure(
            "time elsewhere", "time", lambda s: _share(s.time.share("other")), lambda run: _share(run.share("other"))
        ),
        Figure("lossless", _lossless_key(report), lambda s: s.losslessness.verdict),
    ]
    return lines


def table(report: Report) -> Table:
    """For the terminal: `rich.print(table(report))`."""
    drawn = Table(title=report.headline, caption="\n".join(report.warnings) or None, title_justify="left")
    drawn.add_column("")
    for column in _columns(report):
        drawn.add_column(column, justify="right")
    for figure in figures(report):
        drawn.add_row(figure.name, *_cells(report, figure))
    return drawn


def markdown(report: Report) -> str:
    columns = _columns(report)
    setting = report.setting
    lines = [f"# {setting.drafter} on {setting.target}", "", f"**{report.headline}**", ""]
    lines += [f"> {warning}\n" for warning in report.warnings]
    lines += [f"| | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    lines += [f"| {figure.name} | {' | '.join(_cells(report, figure))} |" for figure in figures(report)]
    lines += ["", "## Losslessness", ""]
    lines += [
        f"* {system.name}: {system.losslessness.verdict}; {system.losslessness.reason}." for system in report.systems
    ]
    for system in report.systems:
        lines += [
            "",
            f"## {system.name}: parts",
            "",
            "| | | prompts | rounds | tau | alpha | analytic alpha |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for part in system.acceptance.slices:
            cells = (number(part.tau), percent(part.alpha), percent(part.analytic_alpha))
            lines.append(f"| {part.kind} | {part.name} | {part.prompts} | {part.rounds} | {' | '.join(cells)} |")
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


def html(report: Report) -> str:
    """The page: inline style and pictures, no script, and a policy that forbids it to load anything."""
    environment = Environment(
        loader=PackageLoader("specdraft.evaluation", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        report=report,
        setting=setting_lines(report),
        columns=_columns(report),
        rows=[(figure, _cells(report, figure)) for figure in figures(report)],
        tiles=_tiles(report),
        plots={title: Markup(drawing) for title, drawing in plots.draw(report).items()},
        provenance=json.dumps(report.provenance, indent=2, ensure_ascii=False),
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
        ("prompts", f"{s.prompts}{kinds}"),
        ("prompts seen in training", overlap),
        ("drafter's trained length", "not known" if s.trained_length is None else f"{s.trained_length} tokens"),
        ("made", report.created),
    ]


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
