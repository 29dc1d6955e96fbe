"""An error of this node's own memory or disk, as an answer to another node. No error of a connection comes this way: a
:class:`~.link.Link` makes PeerLost of those, so that an OSError on its caller's way is always of local work."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from everstep.errors import AgentError, CapacityError, EverstepError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
"""More of something is needed than there is: memory, quota, descriptors."""


def own_failure(node: str, what: str, error: BaseException) -> EverstepError:
    """``error`` of ``node`` itself while it did ``what``: CapacityError where there was no room, else AgentError."""
    kind = CapacityError if isinstance(error, OSError) and error.errno in NO_ROOM else AgentError
    return kind(
        f"node {node} fails by itself, not its connection: {what}",
        found=f"{type(error).__name__}: {error}",
        hint=f"See to the memory, disk and limits of node {node}",
        node=node,
    )


@contextlib.contextmanager
def own_failures(node: str, what: str) -> Iterator[None]:
    """An OSError within is raised as :func:`own_failure`."""
    try:
        yield
    except OSError as error:
        raise own_failure(node, what, error) from error
