"""One object for each step, in safetensors' format, by the clients that most people have: s3fs and boto3. Endpoint and
credentials come by the environment (AWS_*)."""

from __future__ import annotations

import io
from abc import abstractmethod
from pathlib import Path
from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import absent, fill


class ObjectSession(Session):
    """The state's tensors are made one piece of memory, and that one object."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.bucket, _, self._prefix = str(job.options["url"]).removeprefix("s3://").partition("/")

    def key(self, step: int) -> str:
        return f"{self._prefix}/{step}.safetensors"

    def save(self, step: int) -> Pending:
        from safetensors.torch import save

        self.put(self.key(step), save(self.job.state.tensors()))
        return Done()

    def load(self, step: int) -> None:
        from safetensors.torch import load

        fill(self.job.state, load(self.get(self.key(step))))

    @abstractmethod
    def put(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def get(self, key: str) -> bytes: ...

    def path(self, step: int) -> Path:
        raise NotImplementedError("what lies in a store has no path")


class S3fsSession(ObjectSession):
    def __init__(self, job: Job) -> None:
        from ...object_ways import s3fs_client

        super().__init__(job)
        self._files = s3fs_client()

    def put(self, key: str, data: bytes) -> None:
        self._files.pipe_file(f"{self.bucket}/{key}", data)

    def get(self, key: str) -> bytes:
        found: bytes = self._files.cat_file(f"{self.bucket}/{key}")
        return found

    def forget(self, step: int) -> None:
        self._files.rm_file(f"{self.bucket}/{self.key(step)}")


class Boto3Session(ObjectSession):
    def __init__(self, job: Job) -> None:
        from ...object_ways import boto3_client

        super().__init__(job)
        self._client, self._config = boto3_client()

    def put(self, key: str, data: bytes) -> None:
        self._client.upload_fileobj(io.BytesIO(data), self.bucket, key, Config=self._config)

    def get(self, key: str) -> bytes:
        room = io.BytesIO()
        self._client.download_fileobj(self.bucket, key, room, Config=self._config)
        return room.getvalue()

    def forget(self, step: int) -> None:
        self._client.delete_object(Bucket=self.bucket, Key=self.key(step))


class S3fs(System):
    name = "s3fs"
    meaning = "safetensors in memory, put and got by s3fs"
    works = frozenset({"s3"})
    package = "s3fs"
    session: Any = S3fsSession

    def missing(self) -> str | None:
        return absent(self.package)

    def open(self, job: Job) -> Session:
        session: Session = self.session(job)
        return session


class Boto3(S3fs):
    name = "boto3"
    meaning = "safetensors in memory, put and got by boto3's transfer manager"
    package = "boto3"
    session = Boto3Session


__all__ = ["Boto3", "S3fs"]
