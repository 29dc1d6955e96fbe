"""As for the facade: every test has a node of its own; one S3 server for all, and files without threads."""

from __future__ import annotations

from tests.facade.conftest import forked, node, root
from tests.s3.conftest import s3_server
from tests.threadless import threadless

__all__ = ["forked", "node", "root", "s3_server", "threadless"]
