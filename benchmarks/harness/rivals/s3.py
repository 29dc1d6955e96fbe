"""s3torchconnector: DCP through its S3 writer and reader. Endpoint and credentials come by the environment (AWS_*)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..api import Done, Job, Pending, Session, System
from .parts import absent

THREADS = 2
REGION = "us-east-1"


class S3Session(Session):
    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._root = str(job.options["url"]).rstrip("/")
        self._alone = job.world == 1
        self._region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or REGION

    def save(self, step: int) -> Pending:
        from s3torchconnector.dcp import S3StorageWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = S3StorageWriter(self._region, self._url(step), thread_count=THREADS, overwrite=True)
        writer.fs = self._files()
        save(self.job.state.tree(), storage_writer=writer, no_dist=self._alone)
        return Done()

    def load(self, step: int) -> None:
        from s3torchconnector.dcp import S3StorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = S3StorageReader(self._region, self._url(step))
        reader.fs = self._files(reader._reader_constructor)
        load(self.job.state.tree(), storage_reader=reader, no_dist=self._alone)

    def _url(self, step: int) -> str:
        return f"{self._root}/{step}/"

    def _files(self, reading: Any = None) -> Any:
        """Its file system for an endpoint that is not AWS's own: writer and reader take none."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3FileSystem

        client = S3Client(
            self._region,
            endpoint=os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"),
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        return S3FileSystem(self._region, s3_client=client, reader_constructor=reading)

    def path(self, step: int) -> Path:
        raise NotImplementedError("what lies in a store has no path")

    def forget(self, step: int) -> None:
        from s3torchconnector._s3dataset_common import parse_s3_uri

        client = self._files()._client
        bucket, prefix = parse_s3_uri(self._url(step))
        keys = [found.key for page in client.list_objects(bucket, prefix) for found in page.object_info]
        for key in keys:
            client.delete_object(bucket, key)


class S3TorchConnector(System):
    name = "s3torchconnector"
    meaning = "DCP through s3torchconnector's writer and reader"
    works = frozenset({"s3", "ranks"})
    package = "s3torchconnector"

    def missing(self) -> str | None:
        return absent("s3torchconnector", "tenacity")

    def open(self, job: Job) -> Session:
        return S3Session(job)


__all__ = ["S3TorchConnector"]
