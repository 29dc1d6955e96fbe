"""The pictures of a report, drawn with matplotlib: SVG for the page, PNG files for a README.

One *panel* is one thing that was measured in one workload: a row for each system, fastest first, its name and its
values above its bar. Bars begin at zero. Where the greatest value is more than :data:`LINEAR_SPAN` times the least,
bars from zero would show nothing of the small ones: then the axis is logarithmic, says so, and has dots instead of
bars.

All lengths here are *units*: 1/72 inch, and one CSS pixel where the page shows a panel at its own size.
"""

from __future__ import annotations

import functools
import io
import math
import os
import re
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from everstep.errors import BadOption

from .results import FLOORS as FLOOR_MEANINGS
from .results import MIB, PHASES, WORKS, Found, ReportDict, family, is_rival
from .words import bounds, decimals, plain, seconds, short, times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = "pip install 'everstep[report]'"
LINEAR_SPAN = 30.0
PANEL = 400.0
"""Width of a panel, in units."""
GAP = 36.0
MARGIN = 14.0
PNG_DPI = 144
"""Two pixels a unit: a picture of two panels is sharp at the width of a README, about 850 pixels."""

INK, MUTED, GRID = "#1b1f24", "#5b6570", "#d5dae0"
"""Of text, lesser text and lines. In the page, CSS variables of these names take their place, by theme."""
OURS_COLOURS = ("#0072b2", "#3a9bdc", "#004c78", "#6db8e8")
RIVAL_COLOURS = ("#c98500", "#009e73", "#cc79a7", "#d55e00", "#8a8a8a", "#7d7a2c", "#a0522d", "#4f9a9c")
"""One for each engine; visible on white and on black, and told apart by the colour-blind (Okabe and Ito's, some
darker)."""
MET_COLOUR, MISSED_COLOUR = "#0072b2", "#d55e00"
PHASE_COLOURS = dict(
    zip(PHASES, ("#0072b2", "#009e73", "#c98500", "#cc79a7", "#3a9bdc", "#d55e00"), strict=True)
)

UNRIVALLED = frozenset({"open", "loop", "loop_alone"})
"""Works whose ratio to a rival's says nothing, and that have no panel."""
TITLES = {
    "open": "Opening the engine",
    "first_blocking": "Blocking time of the first save",
    "first_durable": "First save, until written",
    "blocking": "Blocking time of a save",
    "blocking_alone": "Blocking time, nothing computed meanwhile",
    "durable": "A save, until said to be written",
    "durable_synced": "A save, until synced to disk",
    "cold_load": "Cold load",
    "memory_recovery": "Recovery from own memory",
    "first_memory_recovery": "First recovery from own memory",
    "replicate": "Until another node's memory has it",
    "peer_recovery": "Recovery from another node's memory",
    "disk_recovery": "Recovery from disk",
    "loop": "Training loop with saves",
    "loop_alone": "The same loop without",
}

_NAMES, _TICKS, _SMALL, _TITLE = 11.0, 9.5, 10.0, 12.5
_LINE, _ROW, _BAR, _HEAD, _FOOT, _KEY = 14.0, 30.0, 9.0, 30.0, 34.0, 24.0
_PER_CHARACTER = 0.6
"""Mean width of a character over the size of the font, on the safe side."""


def missing() -> str | None:
    """Why no pictures can be drawn, None if they can. Quick: loads nothing."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        return f"matplotlib is not installed: {INSTALL}"
    return None


def require() -> None:
    """Raise :class:`BadOption`, with what to install, if no pictures can be drawn."""
    reason = missing()
    if reason is not None:
        raise BadOption("reports with pictures need matplotlib", found="it is not installed", hint=INSTALL)


@functools.cache
def _loaded() -> tuple[Any, tempfile.TemporaryDirectory[str]]:
    """matplotlib, and the directory that it keeps settings and its list of fonts in, which goes when the process
    ends."""
    require()
    keep = os.environ.get("MPLCONFIGDIR")
    own = tempfile.TemporaryDirectory(prefix="everstep-charts-")
    os.environ["MPLCONFIGDIR"] = own.name
    try:
        import matplotlib
        import matplotlib.backends.backend_agg
        import matplotlib.backends.backend_svg
        import matplotlib.figure
        import matplotlib.font_manager
        import matplotlib.ticker
    finally:
        if keep is None:
            del os.environ["MPLCONFIGDIR"]
        else:
            os.environ["MPLCONFIGDIR"] = keep
    return matplotlib, own


def _matplotlib() -> Any:
    return _loaded()[0]


@contextmanager
def settings() -> Iterator[None]:
    """matplotlib's own defaults, whatever the user's are, and ours: the same report gives the same picture."""
    matplotlib = _matplotlib()
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": "everstep",
                "text.parse_math": False,
                "font.family": ["DejaVu Sans"],
                "text.color": INK,
                "axes.edgecolor": GRID,
                "axes.linewidth": 0.8,
                "xtick.color": GRID,
                "xtick.labelcolor": MUTED,
                "xtick.labelsize": _TICKS,
                "hatch.linewidth": 0.6,
            }
        )
        yield


class Look(NamedTuple):
    """How a system is drawn everywhere in a report."""

    colour: str
    hatch: str


def looks(report: ReportDict) -> dict[str, Look]:
    """Every system's look: everstep's modes are blue, a rival's modes are shades of its engine's colour, and engines
    beyond the palette are hatched (their dots are squares)."""
    names = list(dict.fromkeys(name for one in report["workloads"].values() for name in one["systems"]))
    ours = [name for name in names if not is_rival(name)]
    found = {name: Look(OURS_COLOURS[i % len(OURS_COLOURS)], "") for i, name in enumerate(ours)}
    engines: dict[str, list[str]] = {}
    for name in names:
        if is_rival(name):
            engines.setdefault(family(name), []).append(name)
    for i, modes in enumerate(engines.values()):
        hatch = "////" if i >= len(RIVAL_COLOURS) else ""
        for mode, name in enumerate(modes):
            found[name] = Look(_shade(RIVAL_COLOURS[i % len(RIVAL_COLOURS)], mode), hatch)
    return found


def _shade(colour: str, mode: int) -> str:
    """The colour of an engine's mode: its own, lighter, darker, lighter still."""
    towards, share = ((0, 0.0), (255, 0.35), (0, 0.3), (255, 0.55), (0, 0.5))[mode % 5]
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (towards - part) * share):02x}" for part in parts)


class Row(NamedTuple):
    """A system in a panel. ``value``, ``low``, ``high``: on the panel's axis. ``texts``: under ``Panel.columns``."""

    system: str
    value: float
    low: float
    high: float
    texts: tuple[str, ...]
    suffix: str = ""


class Mark(NamedTuple):
    """A line across all rows."""

    value: float
    words: str
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """What :func:`draw_panel` draws. ``second``: another scale, at the top: what 1.0 on it is on the first one, and
    its words."""

    title: str
    about: str
    axis: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    marks: tuple[Mark, ...] = ()
    second: tuple[float, str] | None = None

    @property
    def logarithmic(self) -> bool:
        values = [row.value for row in self.rows]
        return bool(values) and min(values) > 0 and max(values) > LINEAR_SPAN * min(values)


def works_of(report: ReportDict, workload: str) -> list[str]:
    """The works that were measured there: those that are known, first ones after later ones, then others."""
    works = {work for one in report["workloads"][workload]["systems"].values() for work in one["works"]}
    known = [work for work in WORKS if work in works]
    return [*sorted(known, key=lambda work: work.startswith("first_")), *sorted(works.difference(WORKS))]


def panels(report: ReportDict, workload: str) -> list[Panel]:
    """All of a workload's panels: its works that were measured, the slow-down of a loop, peak memory."""
    found = [
        work_panel(report, workload, work) for work in works_of(report, workload) if work not in UNRIVALLED
    ]
    return [
        panel for panel in (*found, slowdown_panel(report, workload), memory_panel(report, workload)) if panel
    ]


def work_panel(report: ReportDict, workload: str, work: str) -> Panel | None:
    """Seconds of ``work`` over those of its floor; over the best rival's, or as they are, where there is none. None if
    nobody was measured."""
    one, found = report["workloads"][workload], Found(report["workloads"])
    about, floor_name = WORKS[work] if work in WORKS else (work.replace("_", " "), None)
    floor = found.floor(workload, floor_name) if floor_name else None
    rival = found.best(workload, work)
    best = found.work(workload, rival, work) if rival else None
    floor, best = (x if x and math.isfinite(x) else None for x in (floor, best))
    unit = floor or best or 1.0
    rows = []
    for name, system in one["systems"].items():
        span = bounds(system["works"].get(work))
        if span is None:
            continue
        median, low, high = span
        texts = [times(median / base) + " ×" for base in (floor, best) if base]
        suffix = " (no fsync)" if work in ("durable", "first_durable") and not system["syncs"] else ""
        rows.append(Row(name, median / unit, low / unit, high / unit, (*texts, seconds(median)), suffix))
    if not rows:
        return None
    marks = []
    if floor:
        marks.append(
            Mark(1.0, f"floor: {FLOOR_MEANINGS.get(floor_name or '', floor_name)}, {seconds(floor)}")
        )
    if best:
        marks.append(Mark(best / unit, f"best rival: {short(rival or '', 30)}, {seconds(best)}", dashed=True))
    axis = "times the floor" if floor else "times the best rival" if best else "seconds"
    return Panel(
        title=title_of(work),
        about=about,
        axis=axis,
        columns=(*(["× floor"] if floor else []), *(["× best rival"] if best else []), "median"),
        rows=tuple(sorted(rows, key=lambda row: row.value)),
        marks=tuple(marks),
        second=(best / floor, "times the best rival") if floor and best else None,
    )


def title_of(work: str) -> str:
    """What a reader calls it."""
    return TITLES.get(work) or work.replace("_", " ").capitalize()


def slowdown_panel(report: ReportDict, workload: str) -> Panel | None:
    """How much longer a training loop takes, in per cent, of paired runs."""
    rows = []
    for name, system in report["workloads"][workload]["systems"].items():
        median = Found(report["workloads"]).slowdown(name, workload)
        if median is None or not math.isfinite(median):
            continue
        pairs = zip(
            system["works"]["loop"]["samples_s"], system["works"]["loop_alone"]["samples_s"], strict=True
        )
        all_of_them = [100 * (with_them / alone - 1) for with_them, alone in pairs]
        value = 100 * median
        rows.append(Row(name, value, min(all_of_them), max(all_of_them), (f"{value:.1f} %",)))
    if not rows:
        return None
    return Panel(
        title="Slow-down of training",
        about="how much longer a training loop takes with its saves than without, paired runs",
        axis="per cent longer than without saves",
        columns=("slow-down",),
        rows=tuple(sorted(rows, key=lambda row: row.value)),
    )


def memory_panel(report: ReportDict, workload: str) -> Panel | None:
    """Peak memory beyond the state, and beyond what holds a copy of it, in MiB."""
    taken = {
        name: system["memory"]["peak_beyond_copy_bytes"] / MIB
        for name, system in report["workloads"][workload]["systems"].items()
        if system["memory"]
    }
    if not taken:
        return None
    rivals = sorted((value, name) for name, value in taken.items() if is_rival(name))
    marks = []
    if rivals:
        marks.append(
            Mark(rivals[0][0], f"best rival: {short(rivals[0][1], 30)}, {rivals[0][0]:,.0f} MiB", dashed=True)
        )
    return Panel(
        title="Peak memory",
        about="beyond the state and everstep's slots, or the one copy that asynchronous engines stage",
        axis="MiB",
        columns=("MiB",),
        rows=tuple(
            Row(name, value, value, value, (f"{value:,.0f}",))
            for name, value in sorted(taken.items(), key=lambda item: item[1])
        ),
        marks=tuple(marks),
    )


class Sheet:
    """A figure to draw on in units, from the top left corner."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        figure = _matplotlib().figure.Figure(figsize=(width / 72, height / 72), dpi=72)
        self.figure: Figure = figure
        figure.patch.set_alpha(0.0)

    def text(self, x: float, top: float, words: str, *, size: float = _NAMES, **how: Any) -> None:
        """``words`` with their first line's middle at ``top``."""
        how = {"ha": "left", "va": "center", **how}
        self.figure.text(x / self.width, 1 - top / self.height, plain(words), fontsize=size, **how)

    def line(self, x: float, top: float, to_x: float, **how: Any) -> None:
        """A level line."""
        from matplotlib.lines import Line2D

        y = 1 - top / self.height
        line = Line2D([x / self.width, to_x / self.width], [y, y], transform=self.figure.transFigure, **how)
        self.figure.add_artist(line)

    def axes(self, x: float, top: float, width: float, height: float, rows: float) -> Axes:
        """Axes without a frame; ``rows``: from 0 at the top to that at the bottom."""
        place = (x / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(place)
        axes.patch.set_alpha(0.0)
        axes.set_ylim(rows, 0)
        axes.yaxis.set_visible(False)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)
        return axes

    def svg(self, name: str) -> str:
        """An ``<svg>`` element for a page, its ids beginning with ``name``, its neutral colours CSS variables."""
        stream = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.savefig(stream, format="svg", metadata=nothing)
        return _for_page(stream.getvalue(), name)

    def png(self) -> bytes:
        """The same on white, in 256 colours: no pixel is off by more than a few of 255, for a third of the bytes."""
        from PIL import Image

        self.figure.patch.set_alpha(1.0)
        drawn, stream = io.BytesIO(), io.BytesIO()
        self.figure.savefig(drawn, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
        with Image.open(drawn) as image:
            few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(stream, format="png", optimize=True)
        return stream.getvalue()


def _for_page(text: str, name: str) -> str:
    """What matplotlib wrote, without what refers to other places, and fit to stand beside others in one page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.S)
    head, _, body = text.partition(">")
    view = re.search(r'viewBox="([\d. -]+)"', head)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\b(id|href)="(#?)', rf'\1="\2{name}-', body)
    body = body.replace("url(#", f"url(#{name}-")
    for colour, variable in ((INK, "ink"), (MUTED, "muted"), (GRID, "grid")):
        body = body.replace(colour, f"var(--{variable})")
    body = body.replace("'DejaVu Sans'", "var(--sans)")
    body = re.sub(r"\n\s*", "\n", body)
    return f'<svg viewBox="{view.group(1) if view else ""}" role="img">{body.strip()}'


def panel_height(panel: Panel, width: float = PANEL, *, titled: bool = False) -> float:
    """Units that :func:`draw_panel` needs."""
    title = 22.0 + _LINE * len(_wrapped(panel.about, width)) if titled else 0.0
    marks = sum(len(_wrapped(mark.words, width - _KEY)) for mark in panel.marks)
    return title + _LINE * marks + _HEAD + _ROW * len(panel.rows) + _FOOT


def _wrapped(words: str, width: float) -> list[str]:
    """Lines of small text; what has no spaces is cut."""
    return textwrap.wrap(plain(words), int(width / (_SMALL * _PER_CHARACTER)))


def draw_panel(
    sheet: Sheet,
    panel: Panel,
    looks: Mapping[str, Look],
    *,
    at: tuple[float, float] = (0.0, 0.0),
    width: float = PANEL,
    titled: bool = False,
) -> None:
    """Draw ``panel`` with its top left corner ``at`` (x, top)."""
    x, top = at
    if titled:
        sheet.text(x, top + 9, panel.title, size=_TITLE, weight="bold")
        for i, words in enumerate(_wrapped(panel.about, width)):
            sheet.text(x, top + 27 + i * _LINE, words, size=_SMALL, color=MUTED)
        top += 22 + _LINE * len(_wrapped(panel.about, width))
    for mark in panel.marks:
        sheet.line(x, top + 7, x + 18, **_style(mark))
        for words in _wrapped(mark.words, width - _KEY):
            sheet.text(x + _KEY, top + 7, words, size=_SMALL, color=MUTED)
            top += _LINE
    axes = sheet.axes(x, top + _HEAD, width, _ROW * len(panel.rows), len(panel.rows))
    _scale(axes, panel)
    _bars(axes, panel, looks)
    _labels(sheet, panel, (x, top), width)
    axes.set_xlabel(
        panel.axis + (" (log axis)" if panel.logarithmic else ""), fontsize=_SMALL, color=MUTED, labelpad=2
    )


def _style(mark: Mark) -> dict[str, Any]:
    return {
        "color": MUTED if mark.dashed else INK,
        "linewidth": 1.3,
        "linestyle": (0, (2.2, 1.4)) if mark.dashed else "-",
    }


def _scale(axes: Axes, panel: Panel) -> None:
    """Limits and ticks of both scales."""
    from matplotlib.ticker import FixedLocator, FuncFormatter

    ends = [x for row in panel.rows for x in (row.low, row.high, row.value)] + [
        mark.value for mark in panel.marks
    ]
    if panel.logarithmic:
        axes.set_xscale("log")
        ends = [x for x in ends if x > 0]
        axes.set_xlim(min(ends) / 1.25, max(ends) * 1.25)
    else:
        least, greatest = min(0.0, *ends), max(0.0, *ends)
        spread = (greatest - least) or 1.0
        axes.set_xlim(least - (0.03 * spread if least < 0 else 0.0), greatest + 0.03 * spread)
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(FixedLocator(_ticks(low, high, panel.logarithmic)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: decimals(value)))
    axes.minorticks_off()
    axes.tick_params(axis="x", length=3, pad=2)
    if panel.second is not None:
        factor = panel.second[0]
        ticks = _ticks(low / factor, high / factor, panel.logarithmic)
        axes.hlines(0, low, high, color=GRID, linewidth=0.8, clip_on=False)
        axes.vlines([tick * factor for tick in ticks], -3 / _ROW, 0, color=GRID, linewidth=0.8, clip_on=False)
        for tick in ticks:
            axes.text(
                tick * factor, -5 / _ROW, decimals(tick), size=_TICKS, color=MUTED, ha="center", va="bottom"
            )


def _ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """From ``low`` to ``high``, few enough that their words never meet."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if logarithmic:
        decades = math.log10(high / low)
        subs = (1.0, 2.0, 5.0) if decades < 2.3 else (1.0, 3.0) if decades < 4 else (1.0,)
        values = LogLocator(subs=subs, numticks=9).tick_values(low, high)
    else:
        values = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [float(value) for value in values if low <= value <= high]


def _bars(axes: Axes, panel: Panel, looks: Mapping[str, Look]) -> None:
    """Grid, bars (dots on a log axis), whiskers from the least to the greatest, and marks, row by row: nothing runs
    through the words between."""
    low, high = axes.get_xlim()
    middles = [i + 0.68 for i in range(len(panel.rows))]
    above, below = [y - 0.18 for y in middles], [y + 0.2 for y in middles]
    for tick in axes.get_xticks():
        axes.vlines([tick] * len(middles), above, below, color=GRID, linewidth=0.7, zorder=0)
    for mark in panel.marks:
        axes.vlines([mark.value] * len(middles), above, below, zorder=2, **_style(mark))
    if panel.logarithmic:
        axes.hlines(middles, low, high, color=GRID, linewidth=0.7, zorder=0)
    for middle, row in zip(middles, panel.rows, strict=True):
        look = looks.get(row.system, Look(MUTED, ""))
        if panel.logarithmic:
            shape = "s" if look.hatch else "o"
            axes.plot([row.value], [middle], shape, color=look.colour, markersize=7.5, zorder=3)
        else:
            how: dict[str, Any] = {
                "color": look.colour,
                "hatch": look.hatch,
                "edgecolor": "white",
                "linewidth": 0,
            }
            axes.barh(middle, row.value, height=_BAR / _ROW, **how)
    spans = [
        (y, max(row.low, low), row.high)
        for y, row in zip(middles, panel.rows, strict=True)
        if row.high > row.low
    ]
    for y, least, greatest in spans:
        axes.plot([least, greatest], [y, y], color=INK, linewidth=1.0, zorder=4, marker="|", markersize=5)
    if low < 0:
        axes.axvline(0, color=INK, linewidth=0.8)


def _labels(sheet: Sheet, panel: Panel, at: tuple[float, float], width: float) -> None:
    """Names and values above the bars, columns' heads above the first."""
    x, top = at
    rights = [x + width - sum((62.0, 78.0, 66.0)[:i]) for i in range(len(panel.columns))][::-1]
    heads = top + (_HEAD - 10 if panel.second is None else 8)
    for right, words in zip(rights, panel.columns, strict=True):
        sheet.text(right, heads, words, size=_TICKS, ha="right", color=MUTED)
    if panel.second is not None:
        sheet.text(
            x,
            top + 8,
            panel.second[1] + (" (log axis)" if panel.logarithmic else ""),
            size=_TICKS,
            color=MUTED,
        )
    room = rights[0] - x - 52
    for i, row in enumerate(panel.rows):
        weight = "normal" if is_rival(row.system) else "bold"
        level = top + _HEAD + _ROW * (i + 0.26)
        name = short(
            row.system, int(room / (_NAMES * (_PER_CHARACTER + 0.06 * (weight == "bold")))) - len(row.suffix)
        )
        sheet.text(x, level, name + row.suffix, weight=weight)
        for right, words in zip(rights, row.texts, strict=True):
            sheet.text(right, level, words, size=_SMALL, ha="right", weight=weight)
