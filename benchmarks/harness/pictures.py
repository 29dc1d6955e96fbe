"""Pictures that are more than one panel: time lines, aims, and the PNG files for a README."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .charts import (
    GAP,
    GRID,
    INK,
    MARGIN,
    MET_COLOUR,
    MISSED_COLOUR,
    MUTED,
    PANEL,
    PHASE_COLOURS,
    RIVAL_COLOURS,
    Look,
    Panel,
    Sheet,
    draw_panel,
    looks,
    memory_panel,
    panel_height,
    settings,
    slowdown_panel,
    work_panel,
)
from .results import CELLS, MAIN, AimDict, PhaseDict, ReportDict
from .words import plain, seconds, short, times

WIDE = 2 * PANEL + GAP
LEADING = 18.0
AIM_SPAN = 8.0
"""How many times better or worse than its aim a value can be drawn; what is beyond stands at the edge, as an arrow."""
TIMELINES = {"save": "a save", "recovery": "a recovery"}

_PHASE, _HEAD, _FOOT = 26.0, 6.0, 34.0
_AIM, _AIM_HEAD, _AIM_FOOT = 25.0, 54.0, 26.0

Timeline = tuple[str, str, str, Sequence[PhaseDict]]
"""Workload, system, kind and phases."""


@dataclass(frozen=True)
class Block:
    """A part of a picture: its height in a width, and what draws it at x, top, in a width."""

    height: Callable[[float], float]
    draw: Callable[[Sheet, float, float, float], None]
    wide: bool = False


def draw_timeline(
    sheet: Sheet, phases: Sequence[PhaseDict], *, at: tuple[float, float] = (0.0, 0.0), width: float = PANEL
) -> None:
    """Phases from top to bottom in the order in which they began, those of one name in one row, with how long each
    took."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    x, top = at
    rows = _rows(phases)
    left, right = 86.0, 66.0
    axes = sheet.axes(x + left, top + _HEAD, width - left - right, _PHASE * len(rows), len(rows))
    end = max(phase["end_s"] for phase in phases) or 1e-9
    unit, word = (1.0, "s") if end >= 1 else (1e3, "ms")
    axes.set_xlim(0, end * unit * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.tick_params(axis="x", length=3, pad=2)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(f"{word} since the call", fontsize=10, color=MUTED, labelpad=2)
    for i, (name, spans) in enumerate(rows.items()):
        colour = PHASE_COLOURS.get(name, RIVAL_COLOURS[i % len(RIVAL_COLOURS)])
        for begin, stop in spans:
            # A phase too short to be seen is drawn as the thinnest line that can be.
            thin = max((stop - begin) * unit, end * unit * 0.004)
            axes.barh(i + 0.5, thin, left=begin * unit, height=0.56, color=colour, zorder=2)
        level = top + _HEAD + _PHASE * (i + 0.5)
        sheet.text(x, level, short(name, 12))
        took = seconds(sum(stop - begin for begin, stop in spans))
        sheet.text(x + width, level, took, size=10, ha="right", color=MUTED)


def _rows(phases: Sequence[PhaseDict]) -> dict[str, list[tuple[float, float]]]:
    rows: dict[str, list[tuple[float, float]]] = {}
    for phase in sorted(phases, key=lambda phase: (phase["begin_s"], phase["end_s"])):
        rows.setdefault(plain(phase["phase"]), []).append((phase["begin_s"], phase["end_s"]))
    return rows


def timeline_height(phases: Sequence[PhaseDict]) -> float:
    return _HEAD + _PHASE * len(_rows(phases)) + _FOOT


def timelines(report: ReportDict) -> list[Timeline]:
    """All time lines that were told."""
    return [
        (workload, name, kind, phases)
        for workload, one in report["workloads"].items()
        for name, system in one["systems"].items()
        for kind, phases in system["timelines"].items()
        if phases
    ]


def draw_aims(sheet: Sheet, aims: Sequence[AimDict], *, at: tuple[float, float], width: float) -> None:
    """Every value over its aim, on a log axis around 1: as far to the left as it is better, to the right as it is
    worse."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    x, top = at
    meanings = {cell.name: cell.meaning for cell in CELLS}
    left, right = width * 0.5, 150.0
    met = sum(aim["met"] for aim in aims)
    sheet.text(x, top + 9, f"Aims: {met} of {len(aims)} met", size=12.5, weight="bold")
    sheet.text(x, top + 27, "value over aim; further left is better", size=10, color=MUTED)
    axes = sheet.axes(x + left, top + _AIM_HEAD, width - left - right, _AIM * len(aims), len(aims))
    axes.set_xscale("log")
    axes.set_xlim(1 / AIM_SPAN / 1.15, AIM_SPAN * 1.15)
    ticks = [1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
    words = {1 / 8: "⅛", 1 / 4: "¼", 1 / 2: "½", 1: "aim"}
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.get(value, f"{value:g} ×")))
    axes.tick_params(axis="x", length=3, pad=2)
    axes.grid(axis="x", color=GRID, linewidth=0.7)
    axes.axvline(1, color=INK, linewidth=1.3)
    axes.set_xlabel("times the aim (log axis)", fontsize=10, color=MUTED, labelpad=2)
    sheet.text(x + width - 68, top + _AIM_HEAD - 10, "value", size=9.5, ha="right", color=MUTED)
    sheet.text(x + width, top + _AIM_HEAD - 10, "aim", size=9.5, ha="right", color=MUTED)
    for i, aim in enumerate(aims):
        colour = MET_COLOUR if aim["met"] else MISSED_COLOUR
        over = aim["value"] / aim["aim"]
        place = min(max(over, 1 / AIM_SPAN), AIM_SPAN)
        shape = "o" if place == over else "<" if over < place else ">"
        sheet.line(x, top + _AIM_HEAD + _AIM * i, x + width, color=GRID, linewidth=0.5)
        axes.plot([1, place], [i + 0.5] * 2, color=colour, linewidth=2.2, zorder=3, solid_capstyle="butt")
        axes.plot([place], [i + 0.5], shape, color=colour, markersize=7.5, zorder=4, clip_on=False)
        level = top + _AIM_HEAD + _AIM * (i + 0.5)
        sheet.text(x, level, "✓" if aim["met"] else "✗", color=colour, weight="bold")
        sheet.text(
            x + 16, level, short(meanings.get(aim["cell"], aim["cell"]), int((left - 24) / 5.8)), size=10.5
        )
        sheet.text(
            x + width - 68, level, times(aim["value"]), ha="right", weight="bold", color=colour, size=10.5
        )
        sheet.text(x + width, level, f"{bound(aim)} {times(aim['aim'])}", ha="right", size=10.5, color=MUTED)


def bound(aim: AimDict) -> str:
    """ "≤" or "<"."""
    return "<" if aim["strict"] else "≤"


def aims_height(aims: Sequence[AimDict]) -> float:
    return _AIM_HEAD + _AIM * len(aims) + _AIM_FOOT + 8


def pngs(report: ReportDict) -> dict[str, bytes]:
    """The README's pictures by file name; those of what was not measured are left out."""
    made = {
        "blocking.png": _panels(report, MAIN, ("blocking", "blocking_alone", "first_blocking")),
        "durable.png": _panels(report, MAIN, ("durable_synced", "durable")),
        "load.png": _panels(report, MAIN, ("cold_load", "memory")),
        "small.png": [
            block
            for name in ("small-10k", "small-100k")
            for block in _panels(report, name, ("blocking", "cold_load"))
        ],
        "training.png": _panels(report, "training", ("slowdown",)),
        "aims.png": [_aims_block(report["aims"])] if report["aims"] else [],
        "timeline.png": [_timeline_block(*one) for one in _chosen(timelines(report))],
    }
    with settings():
        return {name: _picture(blocks) for name, blocks in made.items() if blocks}


def _panels(report: ReportDict, workload: str, works: Sequence[str]) -> list[Block]:
    if workload not in report["workloads"]:
        return []
    others = {"slowdown": slowdown_panel, "memory": memory_panel}
    found = [
        others[work](report, workload) if work in others else work_panel(report, workload, work)
        for work in works
    ]
    meaning, look = report["workloads"][workload]["meaning"], looks(report)
    return [
        _panel_block(replace(panel, about=f"{workload}, {meaning}: {panel.about}"), look)
        for panel in found
        if panel
    ]


def _panel_block(panel: Panel, look: Mapping[str, Look]) -> Block:
    def draw(sheet: Sheet, x: float, top: float, width: float) -> None:
        draw_panel(sheet, panel, look, at=(x, top), width=width, titled=True)

    return Block(lambda width: panel_height(panel, width, titled=True), draw)


def _aims_block(aims: Sequence[AimDict]) -> Block:
    def draw(sheet: Sheet, x: float, top: float, width: float) -> None:
        draw_aims(sheet, aims, at=(x, top), width=width)

    return Block(lambda width: aims_height(aims), draw, wide=True)


def _timeline_block(workload: str, system: str, kind: str, phases: Sequence[PhaseDict]) -> Block:
    def draw(sheet: Sheet, x: float, top: float, width: float) -> None:
        title = f"{TIMELINES.get(kind, kind)}: {system}, {workload}"
        sheet.text(
            x, top + 9, short(title[:1].upper() + title[1:], int(width / 8.2)), size=12.5, weight="bold"
        )
        draw_timeline(sheet, phases, at=(x, top + 24), width=width)

    return Block(lambda width: 24 + timeline_height(phases), draw)


def _chosen(found: Sequence[Timeline]) -> list[Timeline]:
    """The first time line of each kind of each of everstep's modes, no more than four."""
    chosen: dict[tuple[str, str], Timeline] = {}
    for one in found:
        chosen.setdefault((one[1], one[2]), one)
    return list(chosen.values())[:4]


def _picture(blocks: Sequence[Block]) -> bytes:
    """Blocks in two columns, one alone in both, as a PNG."""
    columns = 1 if len(blocks) == 1 or blocks[0].wide else 2
    width = WIDE if columns == 1 else PANEL
    rows = [blocks[i : i + columns] for i in range(0, len(blocks), columns)]
    heights = [max(block.height(width) for block in row) for row in rows]
    sheet = Sheet(WIDE + 2 * MARGIN, sum(heights) + 2 * MARGIN + LEADING * (len(rows) - 1))
    top = MARGIN
    for row, height in zip(rows, heights, strict=True):
        for i, block in enumerate(row):
            block.draw(sheet, MARGIN + i * (PANEL + GAP), top, width)
        top += height + LEADING
    return sheet.png()


__all__ = ["bound", "draw_aims", "draw_timeline", "pngs", "timeline_height", "timelines"]
