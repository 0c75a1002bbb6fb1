"""Plots as inline SVG whose colours are CSS variables, so that one picture reads well on light and dark pages."""

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from specdraft.evaluation.report import Curve, Estimate, Report, RunTime, Slice, SystemReport

# Colours that stand in the drawing for the page's variables: no two alike, none that matplotlib chooses by itself.
_INK, _FAINT, _PAPER = "#010101", "#020202", "#020203"
_SERIES = ("#030301", "#030302", "#030303", "#030304", "#030305")
_VARIABLES = {_INK: "var(--ink)", _FAINT: "var(--line)", _PAPER: "var(--card)"} | {
    c: f"var(--s{i + 1})" for i, c in enumerate(_SERIES)
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
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


class Plot(NamedTuple):
    title: str
    reading: str
    """How to read it, in a sentence or two."""
    drawing: str
    """An <svg> element."""


def draw(report: Report) -> dict[str, list[Plot]]:
    """The page's plots by section, in the order in which they are shown; one without anything to show is left out."""
    systems = report.systems
    makers: list[tuple[str, str, str, Callable[[], str | None]]] = [
        ("speed", "Where the time goes", _READING["time"], lambda: _time(report.plain, systems)),
        ("speed", "Speed-up by batch size", _READING["batch"], lambda: _by_batch(systems)),
        ("speed", "Tau and speed by chain length", _READING["gamma"], lambda: _by_gamma(systems)),
        ("speed", "Tokens emitted per target pass", _READING["emitted"], lambda: _emitted(systems)),
        ("acceptance", "Acceptance by depth", _READING["depth"], lambda: _alpha_by_depth(systems)),
        ("acceptance", "Acceptance by category", _READING["slice"], lambda: _by_slice(systems, "category")),
        ("acceptance", "Acceptance by prompt length", _READING["slice"], lambda: _by_slice(systems, "prompt length")),
        (
            "acceptance",
            "Acceptance by place in the answer",
            _READING["slice"],
            lambda: _by_slice(systems, "output position"),
        ),
        ("acceptance", "Is the drafter as often right as it says?", _READING["sure"], lambda: _calibration(systems)),
        ("acceptance", "Training", _READING["training"], lambda: _training(report.training)),
    ]
    drawn: dict[str, list[Plot]] = {}
    for section, title, reading, plot in makers:
        with mpl.rc_context({**_STYLE, "svg.hashsalt": title}):  # ids that no two plots of a page share
            if (drawing := plot()) is not None:
                drawing = drawing.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
                drawn.setdefault(section, []).append(Plot(title, reading, drawing))
    return drawn


_READING = {
    "time": "Shorter is faster. Drafting pays where it saves more of the target's time than it takes itself.",
    "batch": (
        "Filled: measured, without reading prompts. Hollow: predicted. Below 1, plain decoding is faster: a large "
        "batch keeps the machine busy, and guesses are no longer free."
    ),
    "gamma": (
        "What a chain of each length would do, at the acceptance measured here. Dotted: beyond the depths that were "
        "drafted, the last one's acceptance carried on. Hollow, with its interval: what was measured."
    ),
    "emitted": "Share of the rounds that emitted so many tokens. Plain decoding gives one for every pass.",
    "depth": (
        "Of the rounds that accepted all before, the share that accepted here too; dashed: what the laws promise, "
        "which should meet it. A line that falls says that the drafter gets lost further down."
    ),
    "slice": "Bars are 95 % intervals: where they overlap widely, a difference is not shown.",
    "sure": (
        "Above: how likely the drafter found a token, against how often the target would write it. Below the diagonal, "
        "it is too sure of itself. Beneath: how many tokens that rests on."
    ),
    "training": "Over optimiser steps. Overlap is teacher-forced, and so not alpha.",
}
_MARKERS = ("o", "s", "^", "D", "v")


def _alpha_by_depth(systems: Sequence[SystemReport]) -> str | None:
    if not any(system.acceptance.depths for system in systems):
        return None
    figure, axes = _figure()
    for index, system in enumerate(systems):
        depths, shift = system.acceptance.depths, 0.06 * (index - (len(systems) - 1) / 2)
        at = [d.depth + shift for d in depths]
        _errorbar(axes, at, [d.alpha for d in depths], index, system.name)
        axes.plot(at, _bars([d.analytic_alpha for d in depths])[0], "--", linewidth=1, color=_SERIES[index % 5])
    axes.plot([], [], "--", linewidth=1, color=_INK, label="analytic")
    axes.set(xlabel="depth", ylim=(0, 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
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
            fmt=_MARKERS[index % 5],
            markersize=4.5,
            elinewidth=1.2,
            color=_SERIES[index % 5],
            label=systems[index].name,
        )
    axes.set(yticks=range(len(names)), yticklabels=names, xlabel="alpha, all depths", xlim=(0, 1.02))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
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
    parts: tuple[Literal["prefill", "target", "drafter", "other"], ...] = ("prefill", "target", "drafter", "other")
    for index, part in enumerate(parts):
        spent = [1000 * getattr(run, f"{part}_seconds") / max(run.new_tokens, 1) for _, run in runs]
        bars = axes.barh(
            range(len(runs)),
            spent,
            0.62,
            left=left,
            color=_SERIES[index],
            label={"prefill": "prompt", "other": "everything else"}.get(part, part),
            edgecolor=_PAPER,
        )
        shares = [run.share(part) for _, run in runs]
        named = [f"{100 * share:.0f} %" if share > 0.09 else "" for share in shares]
        axes.bar_label(bars, named, label_type="center", color=_PAPER, fontsize=8.5)
        left = [a + b for a, b in zip(left, spent, strict=True)]
    axes.set(yticks=range(len(runs)), yticklabels=[name for name, _ in runs], xlabel="milliseconds per new token")
    axes.invert_yaxis()
    return _svg(figure, axes)


def _by_gamma(systems: Sequence[SystemReport]) -> str | None:
    chains = [system for system in systems if system.costs is not None and system.costs.by_gamma]
    if not chains:
        return None
    figure, (left, right) = _pair()
    for index, system in enumerate(chains):
        assert system.costs is not None
        points, colour, marker = system.costs.by_gamma, _SERIES[index % 5], _MARKERS[index % 5]
        seen = [point for point in points if point.measured]
        for axes, of in ((left, lambda p: p.tau), (right, lambda p: p.predicted_speedup)):
            axes.plot([p.gamma for p in points], [of(p) for p in points], ":", color=colour)
            axes.plot([p.gamma for p in seen], [of(p) for p in seen], f"-{marker}", markersize=4.5, color=colour)
        measured = ((left, system.acceptance.tau), (right, system.decode_speedup or Estimate(value=None)))
        for axes, estimate in measured:
            values, errors = _bars([estimate])
            axes.errorbar(
                [seen[-1].gamma],
                values,
                errors,
                fmt=marker,
                markersize=7,
                markerfacecolor=_PAPER,
                elinewidth=1.6,
                capsize=3,
                color=colour,
                label=system.name,
            )
    right.axhline(1, color=_INK, linewidth=0.8)
    left.set(xlabel="gamma", title="tau")
    right.set(xlabel="gamma", title="times plain decoding")
    return _svg(figure, None, left)


def _by_batch(systems: Sequence[SystemReport]) -> str | None:
    shown = [system for system in systems if system.by_batch]
    if not shown:
        return None
    figure, axes = _figure()
    sizes = [point.batch_size for point in shown[0].by_batch]
    for index, system in enumerate(shown):
        shift, colour, marker = 1.03 ** (index - (len(shown) - 1) / 2), _SERIES[index % 5], _MARKERS[index % 5]
        at = [size * shift for size in sizes]
        _errorbar(axes, at, [point.decode_speedup for point in system.by_batch], index, system.name)
        promised = _bars([point.predicted for point in system.by_batch])[0]
        axes.plot(at, promised, f"--{marker}", markersize=7, linewidth=1, color=colour, markerfacecolor="none")
        if system.stops_paying is not None:
            axes.axvline(system.stops_paying, linestyle=":", linewidth=1, color=colour)
    axes.plot([], [], "--o", markersize=7, linewidth=1, color=_INK, markerfacecolor="none", label="predicted")
    axes.axhline(1, color=_INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set(xlabel="batch size", ylabel="times plain decoding")
    axes.set_ylim(bottom=0)
    return _svg(figure, axes)


def _calibration(systems: Sequence[SystemReport]) -> str | None:
    shown = [(s.name, s.acceptance.calibration) for s in systems if s.acceptance.calibration is not None]
    if not shown:
        return None
    figure = Figure(figsize=(5.2, 4.0), layout="constrained")
    FigureCanvasSVG(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    upper.plot([0, 1], [0, 1], color=_INK, linewidth=0.8)
    for index, (name, found) in enumerate(shown):
        at = [bin_.confidence for bin_ in found.bins]
        _errorbar(upper, at, [bin_.target for bin_ in found.bins], index, name)
        width = 0.09 / len(shown)
        places = [bin_.low + 0.005 + width * (index + 0.5) for bin_ in found.bins]
        lower.bar(places, [bin_.nodes for bin_ in found.bins], width * 0.92, color=_SERIES[index % 5])
    upper.set(ylabel="target would write it", ylim=(0, 1.02), xlim=(0, 1))
    lower.set(xlabel="the drafter's own probability", ylabel="tokens")
    for axis in (upper.yaxis, lower.xaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    return _svg(figure, upper)


def _training(curves: Sequence[Curve]) -> str | None:
    if not curves:
        return None
    losses = [curve for curve in curves if curve.name.endswith("loss")]
    rates = [curve for curve in curves if not curve.name.endswith("loss")]
    groups = [group for group in (losses, rates) if group]
    figure = Figure(figsize=(5.2, 2.9), layout="constrained")
    FigureCanvasSVG(figure)
    for place, group in enumerate(groups):
        axes = figure.add_subplot(1, len(groups), place + 1)
        for index, curve in enumerate(group):
            style = "-" if index < 5 else "--"
            axes.plot(curve.steps, curve.values, color=_SERIES[index % 5], linestyle=style, label=curve.name)
        axes.set(xlabel="optimiser step")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.2, handlelength=1.2)
    return _svg(figure)


def _pair() -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(5.2, 2.7), layout="constrained")
    FigureCanvasSVG(figure)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, (left, right)


def _figure(height: float = 2.6, grid: Literal["x", "y"] = "y") -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, height), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    axes.grid(visible=False)
    axes.grid(visible=True, axis=grid)
    return figure, axes


def _errorbar(axes: Axes, at: Sequence[float], estimates: Sequence[Estimate], series: int, name: str) -> None:
    """A line through the estimates, with their intervals."""
    axes.errorbar(
        at,
        *_bars(estimates),
        fmt=f"-{_MARKERS[series % 5]}",
        markersize=4.5,
        elinewidth=1.2,
        color=_SERIES[series % 5],
        label=name,
    )


def _bars(estimates: Sequence[Estimate]) -> tuple[list[float], list[list[float]]]:
    """Values, and how far their intervals reach below and above."""
    values = [float("nan") if e.value is None else e.value for e in estimates]
    below = [0.0 if e.low is None else max(v - e.low, 0.0) for v, e in zip(values, estimates, strict=True)]
    above = [0.0 if e.high is None else max(e.high - v, 0.0) for v, e in zip(values, estimates, strict=True)]
    return values, [below, above]


def _svg(figure: Figure, axes: Axes | None = None, named: Axes | None = None) -> str:
    """`axes` get a legend above them; that of `named` stands above the whole figure."""
    if axes is not None:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2, handlelength=1.4)
    if named is not None:
        figure.legend(*named.get_legend_handles_labels(), loc="outside upper left", ncols=4, handlelength=1.4)
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
