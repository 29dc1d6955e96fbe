"""``everstep diff``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from .frame import answering, command, human_bytes, json_option, progress, table
from .survey import Listed, Survey, choose, survey

if TYPE_CHECKING:
    from everstep.store.changes import Changes, Kind, Name
    from everstep.store.numbers import Change

VALUES_MAX = 1000
"""Plain values that differ, told one by one."""

EPILOG = """\
Exit codes:
  0  compared, whether or not something differs
  1  no such checkpoint, or one of them cannot be read
  2  usage

Example:
  everstep diff runs/gpt 11000 12000
  everstep diff runs/gpt 11000 12000 --part model --all
  everstep diff runs/gpt 11000 12000 --json | jq '.tensors | max_by(.relative_norm)'
"""

Values = dict[str, Any]
"""Plain values by path."""


@command("diff", epilog=EPILOG)
@click.argument("run")
@click.argument("before", type=click.IntRange(min=0))
@click.argument("after", type=click.IntRange(min=0))
@click.option("--part", "parts", multiple=True, help="Compare this part only (may be given again).")
@click.option("--all", "everything", is_flag=True, help="List tensors that did not change, too.")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True, help="Whose plain values.")
@json_option
def diff(
    run: str, before: int, after: int, parts: tuple[str, ...], everything: bool, rank: int, as_json: bool
) -> None:
    """Say what changed in RUN from step BEFORE to step AFTER, by tensor and plain value.

    The two may have been written by different numbers of ranks. "changed" is the share of a tensor's bytes that differ;
    "max" the largest absolute difference; "relative" the Euclidean norm of the difference over that of the values
    before, both over what is finite in the two. What has the same hashes in both is equal without being read.
    """
    with answering(as_json) as answer:
        found = survey(run)
        old, new = choose(found, before), choose(found, after)
        assert old is not None
        assert new is not None
        changes, values = _compare(run, found, (old, new), parts, rank)
        answer.give(
            _as_json(found, (old, new), changes, values),
            lambda: _as_text((old, new), changes, values, everything),
        )


def _compare(
    run: str, found: Survey, chosen: tuple[Listed, Listed], parts: tuple[str, ...], rank: int
) -> tuple[Changes, dict[str, tuple[Any, Any]]]:
    from everstep.errors import BadOption
    from everstep.places import locate
    from everstep.store.blocking import run_blocking
    from everstep.store.changes import changes_between
    from everstep.store.sources import DurableSource

    known = sorted({part for one in chosen for part in one.manifest.parts})
    unknown = [part for part in parts if part not in known]
    if unknown:
        raise BadOption("there is no such part", found=unknown, expected=f"one of {known}")

    async def read() -> tuple[Changes, dict[str, tuple[Any, Any]]]:
        backend = locate(run).open()
        try:
            sides = [DurableSource(backend, one.manifest, found.run.chunk_bytes) for one in chosen]
            values = [await _values(side, rank, parts) for side in sides]
            with progress("compared", unit="B", scale=True) as bar:

                def told(more: int, total: int) -> None:
                    bar.total = total
                    bar.update(more)

                changes = await changes_between(*sides, parts=parts or None, told=told)
            return changes, _differing(*values)
        finally:
            await backend.close()

    return run_blocking(read())


async def _values(source: Any, rank: int, parts: tuple[str, ...]) -> Values:
    """The plain values of a rank, by path; of rank 0 where there are fewer."""
    from everstep.state.codec import decode_state

    who = rank if rank in source.ranks else 0
    layout = await source.layout(who)

    def stand_in(index: int) -> str:
        return f"<tensor {layout.entries[index].key}>" if 0 <= index < len(layout.entries) else "<tensor>"

    flat: Values = {}
    for part, value in decode_state(await source.state(who), stand_in, light=True).items():
        if not parts or part in parts:
            _flatten(part, value, flat)
    return flat


def _flatten(path: str, value: Any, flat: Values) -> None:
    """Leaves by path. Iterative: states may be deep."""
    todo = [(path, value)]
    while todo:
        where, one = todo.pop()
        inner = getattr(one, "value", one) if getattr(one, "type_name", None) is not None else one
        if isinstance(inner, dict) and inner:
            todo += [(f"{where}/{key}", item) for key, item in inner.items()]
        elif isinstance(inner, (list, tuple)) and inner:
            todo += [(f"{where}/{at}", item) for at, item in enumerate(inner)]
        elif isinstance(inner, (bytes, bytearray)):
            flat[where] = f"<{len(inner)} bytes, {_digest(bytes(inner))}>"
        else:
            flat[where] = inner if isinstance(inner, (bool, int, float, str, type(None))) else str(inner)


def _digest(data: bytes) -> str:
    from everstep.format.hashing import hexdigest

    return hexdigest(data)[:8]


def _differing(before: Values, after: Values) -> dict[str, tuple[Any, Any]]:
    """Paths whose values are not the same; what is absent is None, and says so by being there or not."""
    found = {}
    for path in sorted({*before, *after}):
        was, now = before.get(path, "<absent>"), after.get(path, "<absent>")
        if type(was) is not type(now) or (was != now and not (was != was and now != now)):
            found[path] = was, now
    return found


def _as_json(
    found: Survey, chosen: tuple[Listed, Listed], changes: Changes, values: dict[str, tuple[Any, Any]]
) -> dict[str, Any]:
    some = dict(list(values.items())[:VALUES_MAX])
    return {
        "run": found.url,
        "before": _about(chosen[0]),
        "after": _about(chosen[1]),
        "equal": not (
            values
            or changes.only_before
            or changes.only_after
            or changes.retyped
            or any(change.changed_bytes for _, change in changes.tensors.values())
        ),
        "tensors": [_tensor(name, kind, change) for name, (kind, change) in changes.tensors.items()],
        "only_before": [_named(name, kind) for name, kind in changes.only_before.items()],
        "only_after": [_named(name, kind) for name, kind in changes.only_after.items()],
        "retyped": [
            {**_named(name, new), "dtype_before": old.dtype, "shape_before": list(old.shape)}
            for name, (old, new) in changes.retyped.items()
        ],
        "values": {path: {"before": was, "after": now} for path, (was, now) in some.items()},
        "values_differing": len(values),
        "read_bytes": changes.read_bytes,
    }


def _about(one: Listed) -> dict[str, Any]:
    m = one.manifest
    return {"step": m.step, "incarnation": m.incarnation, "world": m.world, "in_lineage": one.in_lineage}


def _named(name: Name, kind: Kind) -> dict[str, Any]:
    rank = {} if name.rank < 0 else {"rank": name.rank}
    return {"part": name.part, "key": name.key, **rank, "dtype": kind.dtype, "shape": list(kind.shape)}


def _tensor(name: Name, kind: Kind, change: Change) -> dict[str, Any]:
    value = {
        **_named(name, kind),
        "nbytes": change.nbytes,
        "changed_bytes": change.changed_bytes,
        "changed_fraction": change.changed_fraction,
        "changed_elements": change.changed,
        "elements": change.elements,
    }
    if change.numeric:
        same = not change.changed_bytes  # may not have been read
        value |= {"max_abs": change.max_abs, "norm": change.norm}
        value["relative_norm"] = 0.0 if same else change.relative_norm
    if change.numeric and change.changed_bytes:
        value |= {
            "nans_before": change.nans_before,
            "nans_after": change.nans_after,
        }
    return value


def _as_text(
    chosen: tuple[Listed, Listed], changes: Changes, values: dict[str, tuple[Any, Any]], everything: bool
) -> str:
    old, new = (one.manifest for one in chosen)
    blocks = [f"step {old.step} of incarnation {old.incarnation} -> step {new.step} of {new.incarnation}"]
    blocks.append(
        table(("part", "tensors", "changed", "size", "bytes changed"), _parts(changes), right=(1, 2, 3, 4))
    )
    rows = [
        _row(name, kind, change)
        for name, (kind, change) in changes.tensors.items()
        if everything or change.changed_bytes
    ]
    if rows:
        headers = ("tensor", "dtype, shape", "changed", "max", "relative", "NaN")
        blocks.append(table(headers, rows, right=(2, 3, 4, 5)))
    for what, some in (("only before", changes.only_before), ("only after", changes.only_after)):
        if some:
            blocks.append(f"{what}:\n" + "\n".join(f"  {_text(n)}  {kind}" for n, kind in some.items()))
    if changes.retyped:
        told = [f"  {_text(n)}  {was} -> {now}" for n, (was, now) in changes.retyped.items()]
        blocks.append("another dtype or shape:\n" + "\n".join(told))
    if values:
        told = [
            f"  {path}: {_short(was)} -> {_short(now)}"
            for path, (was, now) in list(values.items())[:VALUES_MAX]
        ]
        more = [f"  and {len(values) - VALUES_MAX} more"] if len(values) > VALUES_MAX else []
        blocks.append("plain values:\n" + "\n".join(told + more))
    return "\n\n".join(blocks)


def _parts(changes: Changes) -> list[tuple[object, ...]]:
    """By part: tensors, how many of them changed, their bytes, and the share that changed."""
    sums: dict[str, list[int]] = {}
    for name, (_, change) in changes.tensors.items():
        row = sums.setdefault(name.part, [0, 0, 0, 0])
        for at, more in enumerate((1, bool(change.changed_bytes), change.nbytes, change.changed_bytes)):
            row[at] += more
    return [
        (part, tensors, changed, human_bytes(nbytes), _percent(differing / nbytes if nbytes else 0.0))
        for part, (tensors, changed, nbytes, differing) in sums.items()
    ]


def _row(name: Name, kind: Kind, change: Change) -> tuple[object, ...]:
    known = change.numeric and change.changed_bytes
    relative = change.relative_norm
    return (
        _text(name),
        str(kind),
        _percent(change.changed_fraction),
        f"{change.max_abs:.3g}" if known else "",
        "" if not known else "new" if relative is None else f"{relative:.3g}",
        _nans(change) if known else "",
    )


def _nans(change: Change) -> str:
    if not change.nans_before and not change.nans_after:
        return ""
    return f"{change.nans_before} -> {change.nans_after}"


def _text(name: Name) -> str:
    from everstep.format.entries import path_of

    rank = "" if name.rank < 0 else f" of rank {name.rank}"
    return path_of(name.part, name.key) + rank


def _percent(share: float) -> str:
    if share and share < 0.0001:
        return "<0.01 %"
    return f"{100 * share:.2f} %"


def _short(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.9g}"
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
