"""The ways in which ``bench s3`` puts images into an object store and gets them back, each in a process of its own.

``python -m everstep.benchmarks.object_ways SETUP`` (JSON) obeys lines on standard input (``put N``, ``get N``) and
answers each with a line of JSON: seconds, processor seconds, and after a get the hashes of what came.
Images lie in files of a memory file system, which everstep maps like its slots; its targets, too. Credentials and
endpoint come by the environment.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

IMAGES_PARALLEL = 4
"""Images that the rivals move side by side, where that is left to their user."""

BLANK_BYTES = 1 << 20
"""One write of zeros over what is to come anew."""


@dataclass(frozen=True)
class Setup:
    """What a way is told. Image ``i`` is the first ``image_bytes`` of the file ``source/i``; what comes back goes to
    ``target/i``. ``rate``: bytes/s at most, for everstep's own way."""

    way: str
    bucket: str
    prefix: str
    source: str
    target: str
    images: int
    image_bytes: int
    rate: float | None = None

    def encode(self) -> str:
        return json.dumps(asdict(self))

    def sources(self) -> list[str]:
        return [str(Path(self.source, str(index))) for index in range(self.images)]

    def targets(self) -> list[str]:
        return [str(Path(self.target, str(index))) for index in range(self.images)]

    def keys(self, number: int) -> list[str]:
        return [f"{self.prefix}/{self.way}/{number}/{index}" for index in range(self.images)]


class Way(Protocol):
    """Puts all images as number ``number``, and gets them back. ``get`` returns what came, where that is not in the
    target files."""

    def put(self, number: int) -> None: ...

    def get(self, number: int) -> list[bytes] | None: ...


def mapped(path: str, nbytes: int, *, write: bool = False) -> mmap.mmap:
    """The first ``nbytes`` of a file, made as long if it is to be written."""
    flags = os.O_RDWR | os.O_CREAT if write else os.O_RDONLY
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if write:
            os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ)
    finally:
        os.close(fd)


class _Image:
    """An image as the flush takes it."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.nbytes = len(view)

    def piece(self, start: int, end: int) -> memoryview:
        return self._view[start:end]


class Everstep:
    """A rank's flush, vote and manifest; and a verified load. Number ``n`` is step ``n``."""

    def __init__(self, setup: Setup) -> None:
        from everstep.backends.limit import TokenBucket
        from everstep.backends.open import open_backend

        self._loop = asyncio.new_event_loop()
        gate = TokenBucket(setup.rate) if setup.rate is not None else None
        self._backend = open_backend(f"s3://{setup.bucket}/{setup.prefix}/{setup.way}", gate=gate)
        self._images = [memoryview(mapped(path, setup.image_bytes)) for path in setup.sources()]
        self._targets = [memoryview(mapped(path, setup.image_bytes, write=True)) for path in setup.targets()]

    def put(self, number: int) -> None:
        self._loop.run_until_complete(self._put(number))

    async def _put(self, number: int) -> None:
        from everstep.format import names
        from everstep.format.constants import CHUNK_BYTES
        from everstep.format.hashing import rank_root
        from everstep.format.vote import ImageRecord, Vote, encode_vote, header_of
        from everstep.store.asking import each
        from everstep.store.commit import make_manifest, publish_decision
        from everstep.store.flush import IMAGES_PARALLEL, FlushJob, publish_vote, write_image

        job = FlushJob(number, 1, 1, 0, 1)
        with ThreadPoolExecutor(2 * IMAGES_PARALLEL) as pool:

            async def one(index: int) -> ImageRecord:
                name = names.image(number, 1, 1, 0, str(index))
                source = _Image(self._images[index])
                return await write_image(self._backend, job, str(index), name, source, CHUNK_BYTES, pool)

            records = tuple(await each(range(len(self._images)), one, limit=IMAGES_PARALLEL))
        vote = Vote(number, 1, 1, 0, 1, "full", "0" * 32, rank_root(records), records)
        await publish_vote(self._backend, job, vote)
        manifest = make_manifest(vote, [header_of(vote, encode_vote(vote))], "shared")
        await publish_decision(self._backend, manifest, 1)

    def get(self, number: int) -> None:
        self._loop.run_until_complete(self._get(number))

    async def _get(self, number: int) -> None:
        from everstep.format.constants import CHUNK_BYTES
        from everstep.format.manifest import Manifest
        from everstep.plan.reads import Read
        from everstep.store.catalog import read_decision_at
        from everstep.store.fill import fill
        from everstep.store.sources import DurableSource

        manifest = await read_decision_at(self._backend, number, 1, 1)
        if not isinstance(manifest, Manifest):
            raise TypeError(f"step {number} has no manifest but {manifest}")
        source = DurableSource(self._backend, manifest, CHUNK_BYTES)
        reads = [Read(i, 0, str(i), 0, len(view), 0) for i, view in enumerate(self._targets)]
        await fill([source], reads, dict(enumerate(self._targets)), headers=False)


class S3fsFiles:
    """s3fs, ``put`` and ``get`` of files."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._fs = setup, s3fs_client()

    def put(self, number: int) -> None:
        self._fs.put(self._setup.sources(), self._paths(number))

    def get(self, number: int) -> None:
        self._fs.get(self._paths(number), self._setup.targets())

    def _paths(self, number: int) -> list[str]:
        return [f"{self._setup.bucket}/{key}" for key in self._setup.keys(number)]


class S3fsMemory(S3fsFiles):
    """s3fs, ``pipe`` and ``cat`` of memory."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._images = [bytes(mapped(path, setup.image_bytes)) for path in setup.sources()]

    def put(self, number: int) -> None:
        self._fs.pipe(dict(zip(self._paths(number), self._images, strict=True)))

    def get(self, number: int) -> list[bytes]:  # type: ignore[override]
        paths = self._paths(number)
        found = self._fs.cat(paths)
        return [found] if isinstance(found, bytes) else [found[path] for path in paths]


def s3fs_client() -> Any:
    """s3fs as people have it, with paths instead of host names."""
    from s3fs import S3FileSystem

    return S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={"s3": {"addressing_style": "path"}},
    )


class Boto3:
    """boto3's transfer manager with its default of ten threads, for all images together."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._client, self._config = boto3_client()

    def put(self, number: int) -> None:
        pairs = zip(self._setup.sources(), self._setup.keys(number), strict=True)
        self._all(lambda manager: [manager.upload(path, self._setup.bucket, key) for path, key in pairs])

    def get(self, number: int) -> None:
        pairs = zip(self._setup.targets(), self._setup.keys(number), strict=True)
        self._all(lambda manager: [manager.download(self._setup.bucket, key, path) for path, key in pairs])

    def _all(self, begin: Callable[[Any], list[Any]]) -> None:
        from boto3.s3.transfer import create_transfer_manager

        with create_transfer_manager(self._client, self._config) as manager:
            for transfer in begin(manager):
                transfer.result()


def boto3_client() -> tuple[Any, Any]:
    """boto3's client, and what its transfers go by."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    transfers = TransferConfig(use_threads=True)
    config = Config(max_pool_connections=transfers.max_concurrency, s3={"addressing_style": "path"})
    return boto3.client("s3", config=config), transfers


class S3TorchConnector:
    """s3torchconnector's client, from and into memory, a thread for each image."""

    def __init__(self, setup: Setup) -> None:
        from s3torchconnector._s3client import S3Client, S3ClientConfig

        self._setup = setup
        self._client = S3Client(
            os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
            endpoint=os.environ.get("AWS_ENDPOINT_URL"),
            s3client_config=S3ClientConfig(force_path_style=True),
        )
        self._images = [memoryview(mapped(path, setup.image_bytes)) for path in setup.sources()]
        self._targets = [memoryview(mapped(path, setup.image_bytes, write=True)) for path in setup.targets()]

    def put(self, number: int) -> None:
        def one(key: str, image: memoryview) -> None:
            step = 8 << 20
            with self._client.put_object(self._setup.bucket, key) as writer:
                for start in range(0, len(image), step):
                    writer.write(image[start : start + step])

        self._each(one, number, self._images)

    def get(self, number: int) -> None:
        def one(key: str, target: memoryview) -> None:
            reader = self._client.get_object(self._setup.bucket, key)
            done = 0
            while done < len(target):
                count = reader.readinto(target[done:])
                if not count:
                    raise EOFError(f"{key} ended after {done} bytes")
                done += count

        self._each(one, number, self._targets)

    def _each(self, one: Callable[[str, memoryview], None], number: int, views: list[memoryview]) -> None:
        with ThreadPoolExecutor(IMAGES_PARALLEL) as pool:
            list(pool.map(one, self._setup.keys(number), views))


WAYS: dict[str, Callable[[Setup], Way]] = {
    "everstep": Everstep,
    "s3fs_files": S3fsFiles,
    "s3fs_memory": S3fsMemory,
    "boto3": Boto3,
    "s3torchconnector": S3TorchConnector,
}
"""everstep, then its rivals."""

FILE_WAYS = frozenset({"s3fs_files", "boto3"})
"""Those that get into files, which are made anew each time; the others' memory is there before."""


def _obey(setup: Setup, way: Way, order: str, number: int) -> dict[str, Any]:
    """Do one order; what is answered."""
    for path in setup.targets() if order == "get" else ():  # what does not come must not look as if it had
        with suppress(FileNotFoundError), open(path, "r+b") as file:
            for start in range(0, os.path.getsize(path), BLANK_BYTES):
                file.write(bytes(min(BLANK_BYTES, os.path.getsize(path) - start)))
    act = way.put if order == "put" else way.get
    cpu, begun = time.process_time(), time.perf_counter()
    came = act(number)
    done: dict[str, Any] = {"seconds": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu}
    if order == "get":
        done["hashes"] = [xxhash.xxh3_128_hexdigest(view) for view in came or _came(setup)]
        for path in setup.targets() if setup.way in FILE_WAYS else ():
            os.unlink(path)
    return done


def _came(setup: Setup) -> list[memoryview]:
    return [memoryview(mapped(path, os.path.getsize(path))) for path in setup.targets()]


def main() -> None:
    """Say that it is ready, then obey."""
    setup = Setup(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    try:
        way = WAYS[setup.way](setup)
        answer({"ready": True})
        for line in sys.stdin:
            order, number = line.split()
            answer(_obey(setup, way, order, int(number)))
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)


if __name__ == "__main__":
    main()
