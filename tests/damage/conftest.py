from tests.threadless import threadless

__all__ = ["threadless"]
