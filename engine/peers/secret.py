"""What only the agents of a run know: by it they know each other. It is never logged, nor part of any text."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from everstep.errors import BadOption

SECRET = "EVERSTEP_SECRET"
SECRET_FILE = "EVERSTEP_SECRET_FILE"
SECRET_BYTES_MIN = 16
SECRET_BYTES_MAX = 4096
SECRET_BYTES = 32
"""Of a secret that a job makes for itself."""


def run_secret() -> bytes | None:
    """The run's secret, from EVERSTEP_SECRET or the file that EVERSTEP_SECRET_FILE names (without white space at its
    ends); None where neither is set. BadOption where it cannot be read or used, or where all users can read it."""
    text, name = os.environ.get(SECRET), os.environ.get(SECRET_FILE)
    if text and name:
        raise BadOption(
            f"{SECRET} and {SECRET_FILE} exclude each other", found="both", expected="one of them"
        )
    if text:
        return _checked(os.fsencode(text), SECRET)
    return _checked(_read(Path(name)), SECRET_FILE) if name else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise BadOption(
                    f"the file of {SECRET_FILE} is open to other users",
                    found=f"{path}: {stat.filemode(mode)}",
                    expected="no access for others, none for writing but its owner's",
                    hint="chmod 600",
                )
            return file.read(SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        found = f"{path}: {error.strerror or type(error).__name__}"
        raise BadOption(f"the file of {SECRET_FILE} cannot be read", found=found) from None


def _checked(secret: bytes, name: str) -> bytes:
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        raise BadOption(
            f"the secret of {name} is too short or too long",
            found=f"{len(secret)} bytes",
            expected=f"{SECRET_BYTES_MIN} to {SECRET_BYTES_MAX}",
            hint="For instance: openssl rand -hex 32",
        )
    return secret
