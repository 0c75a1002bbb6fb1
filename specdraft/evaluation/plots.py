"""Plots as inline SVG whose colours are CSS variables, so that one picture reads well on light and dark pages."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specdraft.evaluation.report import Curve, Estimate, Report, RunTime, Slice, SystemReport

# Colours that stand in the drawing for the page's variables: no two alike, none that matplotlib chooses by itself.
_INK, _FAINT = "#010101", "#020202"
_SERIES = ("#030301", "#030302", "#030303", "#030304", "#030305")
_VARIABLES = {_INK: "var(--ink)", _FAINT: "var(--line)"} | {c: f"var(--s{i + 1})" for i, c in enumerate(_SERIES)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": _FAINT,
    "grid.linewidth": 0.7,
    "xtick.color": _FAINT,
    "ytick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def draw(report: Report) -> dict[str, str]:
    """Title to SVG, in the order in which the page shows them; a plot without anything to show is left out."""
    systems = report.systems
    plots: dict[str, Callable[[], str | None]] = {
        "Acceptance by depth": lambda: _alpha_by_depth(systems),
        "Acceptance by category": lambda: _by_slice(systems, "category"),
        "Acceptance by place in the answer": lambda: _by_slice(systems, "output position"),
        "Acceptance by prompt length": lambda: _by_slice(systems, "prompt length"),
        "Tokens emitted per target pass": lambda: _emitted(systems),
        "Where the time goes": lambda: _time(report.plain, systems),
        "Predicted speed-up by chain length": lambda: _by_gamma(systems),
        "Training": lambda: _training(report.training),
    }
    drawn = {}
    for title, plot in plots.items():
        with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):  # ids that no two plots of a page share
            if (drawing := plot()) is not None:
                drawn[title] = drawing
    return drawn


def _alpha_by_depth(systems: Sequence[SystemReport]) -> str | None:
    if not any(system.acceptance.depths for system in systems):
        return None
    figure, axes = _figure()
    for index, system in enumerate(systems):
        depths, shift = system.acceptance.depths, 0.06 * (index - (len(systems) - 1) / 2)
        at = [d.depth + shift for d in depths]
        axes.errorbar(
            at,
            *_bars([d.alpha for d in depths]),
            fmt="-o",
            markersize=4.5,
            elinewidth=1.2,
            color=_SERIES[index % 5],
            label=system.name,
        )
        axes.plot(at, _bars([d.analytic_alpha for d in depths])[0], "--", linewidth=1, color=_SERIES[index % 5])
    axes.plot([], [], "--", linewidth=1, color=_INK, label="analytic")
    axes.set(xlabel="depth", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    return _svg(figure, axes)


def _by_slice(systems: Sequence[SystemReport], kind: str) -> str | None:
    parts: list[list[Slice]] = [[s for s in system.acceptance.slices if s.kind == kind] for system in systems]
    names = list(dict.fromkeys(part.name for found in parts for part in found))
    if kind != "category":
        names.sort(key=lambda name: int(name.split()[0]))
    if len(names) < 2:
        return None
    figure, axes = _figure(grid="x", height=0.9 + 0.36 * len(names))
    for index, found in enumerate(parts):
        shift = 0.2 * (index - (len(systems) - 1) / 2)
        at = [names.index(part.name) + shift for part in found]
        values, errors = _bars([part.alpha for part in found])
        axes.errorbar(
            values,
            at,
            xerr=errors,
            fmt="o",
            markersize=4.5,
            elinewidth=1.2,
            color=_SERIES[index % 5],
            label=systems[index].name,
        )
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="alpha, all depths", xlim=(0, 1.02))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    return _svg(figure, axes)


def _emitted(systems: Sequence[SystemReport]) -> str:
    figure, axes = _figure()
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        counts = system.acceptance.emitted_histogram
        at = [n + width * (index - (len(systems) - 1) / 2) for n in range(1, len(counts))]
        shares = [count / max(sum(counts), 1) for count in counts[1:]]
        axes.bar(at, shares, width * 0.92, color=_SERIES[index % 5], label=system.name)
    axes.set(xlabel="tokens")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    return _svg(figure, axes)


def _time(plain: RunTime | None, systems: Sequence[SystemReport]) -> str:
    """Milliseconds a token, so that bars of different lengths compare."""
    runs = ([("plain", plain)] if plain is not None else []) + [(system.name, system.time) for system in systems]
    figure, axes = _figure(grid="x", height=1.1 + 0.42 * len(runs))
    left = [0.0] * len(runs)
    for index, part in enumerate(("prefill", "target", "drafter", "other")):
        spent = [1000 * getattr(run, f"{part}_seconds") / max(run.new_tokens, 1) for _, run in runs]
        axes.barh(
            range(len(runs)),
            spent,
            0.62,
            left=left,
            color=_SERIES[index],
            label={"prefill": "prompt", "other": "everything else"}.get(part, part),
        )
        left = [a + b for a, b in zip(left, spent, strict=True)]
    axes.set(yticks=range(len(runs)), yticklabels=[name for name, _ in runs], xlabel="milliseconds per new token")
    axes.invert_yaxis()
    return _svg(figure, axes)


def _by_gamma(systems: Sequence[SystemReport]) -> str | None:
    chains = [system for system in systems if system.costs is not None and system.costs.by_gamma]
    if not chains:
        return None
    figure, axes = _figure()
    for index, system in enumerate(chains):
        assert system.costs is not None
        points = system.costs.by_gamma
        seen = [point for point in points if point.measured]
        axes.plot([p.gamma for p in points], [p.predicted_speedup for p in points], ":", color=_SERIES[index % 5])
        axes.plot(
            [p.gamma for p in seen],
            [p.predicted_speedup for p in seen],
            "-o",
            markersize=4.5,
            color=_SERIES[index % 5],
            label=system.name,
        )
    axes.axhline(1, color=_INK, linewidth=0.8)
    axes.plot([], [], ":", color=_INK, label="acceptance carried on")
    axes.set(xlabel="gamma", ylabel="times plain decoding")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _svg(figure, axes)


def _training(curves: Sequence[Curve]) -> str | None:
    if not curves:
        return None
    losses = [curve for curve in curves if curve.name.endswith("loss")]
    rates = [curve for curve in curves if not curve.name.endswith("loss")]
    groups = [group for group in (losses, rates) if group]
    figure = Figure(figsize=(6.4, 2.7), layout="constrained")
    FigureCanvasSVG(figure)
    for place, group in enumerate(groups):
        axes = figure.add_subplot(1, len(groups), place + 1)
        for index, curve in enumerate(group):
            style = "-" if index < 5 else "--"
            axes.plot(curve.steps, curve.values, color=_SERIES[index % 5], linestyle=style, label=curve.name)
        axes.set(xlabel="optimiser step")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.2)
    return _svg(figure)


def _figure(height: float = 2.7, grid: Literal["x", "y"] = "y") -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.grid(visible=False)
    axes.grid(visible=True, axis=grid)
    return figure, axes


def _bars(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """Values, and how far their intervals reach below and above."""
    values = [float("nan") if e.value is None else e.value for e in estimates]
    below = [0.0 if e.low is None else max(v - e.low, 0.0) for v, e in zip(values, estimates, strict=True)]
    above = [0.0 if e.high is None else max(e.high - v, 0.0) for v, e in zip(values, estimates, strict=True)]
    return values, [below, above]


def _svg(figure: Figure, axes: Axes | None = None) -> str:
    if axes is not None:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1.4)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawing = buffer.getvalue()
    drawing = drawing[drawing.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r'<g id="[^"]*"', "<g", drawing)  # names that the plots of one page would share
    drawing = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", drawing)
    drawing = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1; font-family: inherit", drawing)
    for colour, variable in _VARIABLES.items():
        drawing = drawing.replace(colour, variable)
    return drawing
