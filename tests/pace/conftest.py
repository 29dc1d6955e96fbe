"""Small runs through the public face, as those of ``tests/facade``."""

from tests.facade.conftest import forked, node, root, storage

__all__ = ["forked", "node", "root", "storage"]
