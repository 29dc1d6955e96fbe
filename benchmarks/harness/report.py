"""The report as one HTML page: self-contained, light and dark, on screens of any width and on paper.

Everything that comes from the report is escaped; the page forbids itself scripts and anything from elsewhere.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .charts import (
    MARGIN,
    PANEL,
    UNRIVALLED,
    Look,
    Sheet,
    draw_panel,
    looks,
    panel_height,
    panels,
    require,
    settings,
    title_of,
    works_of,
)
from .pictures import TIMELINES, bound, draw_timeline, pngs, timeline_height
from .results import CELLS, FLOORS, AimDict, Found, ReportDict, WorkloadDict, is_rival
from .style import STYLE
from .words import NONE, bounds, plain, rate, seconds, size, times

POLICY = "default-src 'none'; style-src 'unsafe-inline'"

HOW_TO_READ = (
    "<b>Workload</b>: a training state and what is done with it. <b>System</b>: a checkpoint engine in one mode. All "
    "systems of a workload are measured in turn, every other round backwards, each in a process of its own; figures "
    "are medians.",
    "<b>Floor</b>: what this machine can do at best with the same bytes, measured in the same rounds: a copy for what "
    "stops the training, a raw write and fsync for what has to be durable, a raw cold read for loads. <b>1 × the "
    "floor</b> (the solid line) cannot be beaten by much; <b>best rival</b> (the dashed line) is the fastest engine "
    "that is not everstep. Shorter is better everywhere.",
    "Bars begin at zero. Their scale is in multiples of the floor below, and of the best rival above: one bar, read "
    "against both. Where the slowest would hide the fastest, the axis is logarithmic, says so, and has dots instead "
    "of bars: there distances are factors. Thin lines reach from the least to the greatest of the repeats.",
    "A system counts only if every tensor that it loads is equal, bit for bit, to what was saved. “Until said to be "
    "written” is each engine's own word; in “until synced to disk” a sync is added to those that do without.",
    "Disks and neighbours on a shared machine drift: compare figures of one run, not of two. "
    "<code>everstep bench compare</code> tells which ratios of two runs differ by more than their noise.",
)


def page(report: ReportDict) -> str:
    """The report as HTML. Raises :class:`BadOption` if matplotlib is not installed."""
    require()
    look = looks(report)
    names = list(report["workloads"])
    with settings():
        workloads = "".join(_workload(report, name, i, look) for i, name in enumerate(names))
    links = "".join(f'<a href="#w{i}">{_text(name)}</a>' for i, name in enumerate(names))
    title = "Checkpoint engines, side by side"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}: everstep bench</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{title}</h1>{_about(report)}</header>\n"
        f'<nav><a href="#aims">Aims</a>{links}<a href="#systems">Systems</a></nav>\n'
        f'<div class="top">{_aims(report)}'
        f'<section class="read"><h2>How to read this</h2>{_paragraphs(HOW_TO_READ)}</section></div>\n'
        f"{workloads}{_systems(report, look)}</main>\n</body>\n</html>\n"
    )


def write_html(report: ReportDict, path: Path) -> None:
    """Write :func:`page` to ``path``."""
    path.write_text(page(report), encoding="utf-8")


def write_pngs(report: ReportDict, directory: Path) -> list[Path]:
    """Write the README's pictures into ``directory``, which is made if it is not there; those of what was not measured
    are left out. Raises :class:`BadOption` if matplotlib is not installed."""
    require()
    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawn in pngs(report).items():
        (directory / name).write_bytes(drawn)
        written.append(directory / name)
    return written


def _text(value: object) -> str:
    return html.escape(plain(value))


def _paragraphs(texts: Iterable[str]) -> str:
    return "".join(f"<p>{text}</p>" for text in texts)


def _facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Words and what they say, already escaped."""
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs if value)
    return f"<dl>{rows}</dl>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Cells are HTML. All columns but the first are numbers, in tables of ``kind`` "two" but the first two, and in
    those of "words" none. A row of one cell is a heading."""
    heads = "".join(f'<th scope="col">{words}</th>' for words in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n"
        if len(row) > 1
        else f'<tr><th colspan="{len(head)}" scope="rowgroup">{row[0]}</th></tr>\n'
        for row in rows
    )
    table = f'<table class="{kind}"><thead><tr>{heads}</tr></thead><tbody>\n{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>\n'


def _about(report: ReportDict) -> str:
    """What was measured, when, where and how."""
    machine, options = report["machine"], report["options"]
    versions = ", ".join(f"{_text(name)} {_text(v)}" for name, v in machine.get("versions", {}).items())
    known = {
        "versions",
        "memory_bytes",
        "cores",
        "cpu",
        "disk",
        "file_system",
        "directory",
        *machine.get("versions", ()),
    }
    more = [
        f"{_text(name.replace('_', ' '))} {_text(value)}"
        for name, value in machine.items()
        if name not in known
    ]
    disk = [_text(machine[name]) for name in ("disk", "file_system", "directory") if machine.get(name)]
    cores = f"{_text(machine.get('cores', NONE))} cores"
    chosen = [
        f"{_text(name.replace('_', ' '))} {_text(', '.join(map(str, v)) if isinstance(v, list) else v)}"
        for name, v in options.items()
        if name != "systems"
    ]
    cold = {plain(one["cold_by"]) for one in report["workloads"].values() if one["cold_by"]}
    begun, took = (
        _text(report["begun"]).replace("T", " ").replace("+00:00", " UTC"),
        _took(report["took_s"]),
    )
    return _facts(
        (
            ("When", f"{begun}, took {took}"),
            (
                "Machine",
                ", ".join([cores, size(machine.get("memory_bytes")), _text(machine.get("cpu") or "")]).rstrip(
                    ", "
                ),
            ),
            ("Disk", ", ".join(disk)),
            ("Versions", ", ".join([*more, versions] if versions else more)),
            ("Options", ", ".join(chosen)),
            ("Cold loads", "; ".join(map(_text, sorted(cold)))),
            ("Synced", _synced(report)),
        )
    )


def _took(seconds_of_it: float) -> str:
    return f"{seconds_of_it / 60:.0f} minutes" if seconds_of_it >= 120 else f"{seconds_of_it:.0f} s"


def _synced(report: ReportDict) -> str:
    does: dict[str, bool] = {}
    for one in report["workloads"].values():
        does.update({name: bool(system["syncs"]) for name, system in one["systems"].items()})
    own, added = ([_text(name) for name, syncs in does.items() if syncs is which] for which in (True, False))
    texts = []
    if own:
        texts.append("by themselves: " + ", ".join(own))
    if added:
        texts.append("only by the sync that the harness adds: " + ", ".join(added))
    return "; ".join(texts)


def _aims(report: ReportDict) -> str:
    """What was aimed at, and how it went."""
    aims = report["aims"]
    meanings = {cell.name: cell.meaning for cell in CELLS}
    rows = [
        (
            f"{_text(meanings.get(aim['cell'], aim['cell']))}<br><code>{_text(aim['cell'])}</code>",
            f"{bound(aim)} {times(aim['aim'])}",
            f"<b>{times(aim['value'])}</b>",
            _verdict(aim),
        )
        for aim in aims
    ]
    met = sum(aim["met"] for aim in aims)
    said = f"{met} of {len(aims)} met" if aims else "none of the cells with an aim was measured"
    also = [
        (f"<code>{_text(name)}</code>", times(value))
        for name, value in report["summary"].items()
        if name not in {aim["cell"] for aim in aims}
    ]
    return (
        f'<section id="aims"><h2>Aims: {said}</h2><p>Ratios of medians of this run; less is better. A bar is '
        "a value; the mark in the middle is its aim, the end twice that, and an arrow goes further.</p>"
        + (_table(("what", "aim", "value", ""), rows, "aims") if rows else "")
        + (_table(("also measured", "value"), also) if also else "")
        + "</section>\n"
    )


def _verdict(aim: AimDict) -> str:
    """Met or missed, and by how much: in words, and as a bar on the scale of the aim."""
    over = aim["value"] / aim["aim"]
    if aim["met"]:
        words = f"met, {100 * (1 - over):.0f} % to spare" if 0 <= over < 0.995 else "met"
    elif over < 2:
        words = f"missed by {100 * (over - 1):.1f} %" if over > 1 else "missed"
    else:
        words = f"missed: {times(over)} × the aim"
    kind, sign = ("met", "✓") if aim["met"] else ("missed", "✗")
    # The middle of the bar's track is the aim, its end twice that; a bar that goes further ends as an arrow.
    length, cut = min(max(over, 0.0), 2.0) * 50, " cut" if over > 2 else ""
    return (
        f'<span class="{kind}">{sign} {words}</span>'
        f'<span class="track"><span class="fill {kind}{cut}" style="width:{length:.1f}%"></span></span>'
    )


def _swatch(look: Mapping[str, Look], name: str) -> str:
    colour = look[name].colour if name in look else "transparent"
    words = f"<b>{_text(name)}</b>" if not is_rival(name) else _text(name)
    return f'<span class="swatch" style="background:{colour}"></span>{words}'


def _workload(report: ReportDict, name: str, index: int, look: Mapping[str, Look]) -> str:
    one = report["workloads"][name]
    scale = one["scale"]
    of = f"shapes of {_text(scale.get('of'))}, divided by {_text(scale.get('factor'))}" if scale else ""
    ranks = f"{one['ranks']} ranks" if one["ranks"] > 1 else "one process"
    facts = (size(one["size_bytes"]), f"{one['tensors']:,} tensors", ranks, of)
    return (
        f'<section id="w{index}"><h2>{_text(name)}</h2><p>{_text(one["meaning"])}. '
        f"{', '.join(fact for fact in facts if fact)}.</p>\n"
        f"{_uncounted(one)}{_pictures(report, name, index, look)}{_numbers(report, name, look)}</section>\n"
    )


def _uncounted(one: WorkloadDict) -> str:
    """Systems that were wrong, or left out, and notes on others."""
    wrong = {name: system["checked"] for name, system in one["systems"].items() if system["wrong"]}
    notes = [(name, note) for name, system in one["systems"].items() for note in system["notes"]]
    texts = [
        f'<p class="wrong">✗ <b>{_text(name)}</b> gave back wrong bytes, and does not count: {_text(words)}</p>'
        for name, words in wrong.items()
    ]
    if one["left_out"]:
        rows = "".join(
            f"<li><b>{_text(name)}</b>: {_text(why)}</li>" for name, why in one["left_out"].items()
        )
        texts.append(f'<div class="aside">Left out:<ul>{rows}</ul></div>')
    if notes:
        rows = "".join(f"<li><b>{_text(name)}</b>: {_text(note)}</li>" for name, note in notes)
        texts.append(f'<div class="aside">Notes:<ul>{rows}</ul></div>')
    checked: dict[str, list[str]] = {}
    for name, system in one["systems"].items():
        if not system["wrong"]:
            checked.setdefault(plain(system["checked"]), []).append(name)
    for words, names in checked.items():
        whose = f" ({_text(', '.join(names))})" if len(checked) > 1 else ""
        texts.append(f'<div class="aside">Checked: {_text(words)}{whose}</div>')
    return "".join(texts) + "\n"


def _figure(title: str, about: str, svg: str) -> str:
    label = html.escape(f"{plain(title)}: the same numbers are in the table below", quote=True)
    drawn = svg.replace('role="img"', f'role="img" aria-label="{label}"', 1)
    return (
        f"<figure><figcaption><h3>{_text(title)}</h3><p>{_text(about)}</p></figcaption>\n{drawn}</figure>\n"
    )


def _pictures(report: ReportDict, name: str, index: int, look: Mapping[str, Look]) -> str:
    """A workload's panels and time lines."""
    drawn = []
    for i, panel in enumerate(panels(report, name)):
        sheet = Sheet(PANEL + 2 * MARGIN, panel_height(panel) + 4)
        draw_panel(sheet, panel, look, at=(MARGIN, 0))
        drawn.append(_figure(panel.title, panel.about, sheet.svg(f"w{index}p{i}")))
    for system, found in report["workloads"][name]["systems"].items():
        for kind, phases in found["timelines"].items():
            if phases:
                sheet = Sheet(PANEL + 2 * MARGIN, timeline_height(phases) + 4)
                draw_timeline(sheet, phases, at=(MARGIN, 0))
                title = f"Time line of {TIMELINES.get(kind, plain(kind))}: {plain(system)}"
                drawn.append(
                    _figure(title, "the last one, from the call", sheet.svg(f"w{index}t{len(drawn)}"))
                )
    return f'<div class="pictures">\n{"".join(drawn)}</div>\n' if drawn else ""


def _numbers(report: ReportDict, name: str, look: Mapping[str, Look]) -> str:
    """Floors, times and memory as tables."""
    one, found = report["workloads"][name], Found(report["workloads"])
    times_of = list(_work_rows(report, name, look))
    floors = [
        (_text(floor), _text(FLOORS.get(floor, "")), *_times(samples), _text(samples.get("way", NONE)))
        for floor, samples in one["floors"].items()
    ]
    memory = [
        (
            _swatch(look, system),
            size(x["memory"]["peak_extra_bytes"]),
            size(x["memory"]["peak_beyond_copy_bytes"]),
        )
        for system, x in one["systems"].items()
        if x["memory"]
    ]
    timed = ("median", "least", "greatest", "repeats", "rate")
    slower = [
        (_swatch(look, system), f"{100 * x:.1f} %")
        for system in one["systems"]
        if (x := found.slowdown(system, name)) is not None
    ]
    parts = (
        ("Floors", _table(("floor", "what", *timed, "best way"), floors, "two"), floors),
        ("Times", _table(("system", *timed, "× floor", "× best rival"), times_of), times_of),
        ("Slow-down of training, median of the pairs", _table(("system", "slow-down"), slower), slower),
        (
            "Peak memory",
            _table(("system", "beyond the state", "beyond slots or one staged copy"), memory),
            memory,
        ),
    )
    tables = "".join(f"<h4>{title}</h4>{table}" for title, table, there in parts if there)
    return f"<details open><summary>Numbers</summary>{tables}</details>\n" if tables else ""


def _work_rows(report: ReportDict, name: str, look: Mapping[str, Look]) -> Iterator[Sequence[str]]:
    """Rows of the table of times: a heading for each work, and under it the systems, fastest first."""
    systems, found = report["workloads"][name]["systems"], Found(report["workloads"])
    for work in works_of(report, name):
        yield (f"{_text(title_of(work))} <code>{_text(work)}</code>",)
        measured = [(system, x["works"][work]) for system, x in systems.items() if work in x["works"]]
        for system, samples in sorted(measured, key=lambda pair: (bounds(pair[1]) or (float("inf"),))[0]):
            rival = None if work in UNRIVALLED else found.against_best(name, system, work)
            ratios = (found.against_floor(name, system, work), rival)
            told = (NONE if x is None else times(x) for x in ratios)
            yield (_swatch(look, system), *_times(samples), *told)


def _times(samples: Mapping[str, Any]) -> tuple[str, ...]:
    """Median, least, greatest, how many, rate."""
    count = len(samples.get("samples_s") or ())
    span = tuple(map(seconds, bounds(samples) or (None, None, None)))
    return (*span, str(count) if count else NONE, rate(samples.get("bytes_per_s")))


def _systems(report: ReportDict, look: Mapping[str, Look]) -> str:
    """Every system that took part, or did not."""
    rows: dict[str, tuple[str, ...]] = {}
    for one in report["workloads"].values():
        for name, system in one["systems"].items():
            rows.setdefault(
                name,
                (
                    _swatch(look, name),
                    _text(system["meaning"]),
                    _text(system["version"] or NONE),
                    "yes" if system["syncs"] else "no",
                    "yes" if system["verifies"] else "no",
                ),
            )
    absent: dict[str, str] = {}
    for one in report["workloads"].values():
        for name, why in one["left_out"].items():
            if name not in rows:
                absent.setdefault(name, why)
    left = "".join(f"<li><b>{_text(name)}</b>: {_text(why)}</li>" for name, why in absent.items())
    head = ("system", "what it is", "version", "syncs", "verifies loads")
    return (
        f'<section id="systems"><h2>Systems</h2>{_table(head, rows.values(), "words")}'
        + (f'<div class="aside">Not measured anywhere:<ul>{left}</ul></div>' if left else "")
        + "</section>\n"
    )


__all__ = ["page", "write_html", "write_pngs"]
