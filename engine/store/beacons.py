"""Reading the nodes' beacons."""

from __future__ import annotations

from everstep.backends.api import Backend
from everstep.backends.errors import NotFound
from everstep.errors import EverstepError, RunError
from everstep.format import names
from everstep.format.beacon import BEACON_BYTES_MAX, Beacon, decode_beacon

from .asking import each, reading


async def read_beacons(backend: Backend) -> tuple[dict[str, Beacon], dict[str, EverstepError]]:
    """By name all beacons of the run, and why others of them cannot be read (another release's, damaged). CannotTell if
    the storage does not answer."""
    with reading(backend, names.LIVE):
        children = await backend.list_names(names.LIVE)
    ours = [
        name
        for name in (f"{names.LIVE}/{child}" for child in sorted(children))
        if names.parse(name) is not None
    ]
    found: dict[str, Beacon] = {}
    unreadable: dict[str, EverstepError] = {}

    async def one(name: str) -> None:
        try:
            beacon = await read_beacon(backend, name)
        except RunError as error:
            unreadable[name] = error
            return
        if beacon is not None:
            found[name] = beacon

    await each(ours, one)
    return dict(sorted(found.items())), unreadable


async def read_beacon(backend: Backend, name: str) -> Beacon | None:
    """One beacon; None if it is not there (any more). Damaged, UnknownFormat, CannotTell."""
    try:
        with reading(backend, name):
            return decode_beacon(await backend.read(name, BEACON_BYTES_MAX), name)
    except NotFound:
        return None
