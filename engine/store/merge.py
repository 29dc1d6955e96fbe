"""Synthetic fulls: a checkpoint that is a delta, once more as a further attempt whose images are plain.

What is written is decoded from the delta and its bases, and proved by the hashes that were taken from the snapshot. The
new attempt is committed as any other; as soon as it counts, nothing needs the bases any more.
"""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import replace

from everstep.backends.api import Backend
from everstep.backends.points import reach
from everstep.errors import SaveFailed
from everstep.format import names
from everstep.format.records import RunRecord
from everstep.format.vote import ImageRecord, Vote

from .asking import each, writing
from .flush import UNBASED, FlushJob, NotesOf, publish_vote, refuse_decided
from .sources import DurableSource
from .streaming import Streaming

IMAGES_PARALLEL = 2
"""Images of one rank that are written side by side, each with memory as :mod:`.streaming` says."""


async def merge_rank(
    backend: Backend,
    job: FlushJob,
    source: DurableSource,
    *,
    run: RunRecord,
    pool: Executor,
    notes: NotesOf | None = None,
) -> Vote:
    """Write ``job``'s rank's share of a further attempt of the checkpoint that ``source`` has, all images plain, every
    chunk proved, and vote. Doing it again ends in the same vote. ``pool`` hashes; ``notes`` gives, by an object's name,
    what its writer remembers over a crash.

    Raises Damaged (of the delta or a base, naming object and chunk), Pruned, SaveAbandoned (the attempt was given up),
    SaveFailed, StorageFull, CannotTell. Nothing counts then.
    """
    if (job.step, job.incarnation, job.world) != (source.step, source.incarnation, source.world):
        raise SaveFailed(
            "a checkpoint is merged as itself only",
            found=f"step {job.step} of incarnation {job.incarnation}, {job.world} ranks",
            expected=f"step {source.step} of incarnation {source.incarnation}, {source.world} ranks",
            step=job.step,
            rank=job.rank,
        )
    await refuse_decided(backend, job)
    former = await source.vote_of(job.rank)
    place = job.step, job.incarnation, job.attempt, job.rank

    async def write(record: ImageRecord) -> None:
        streaming = Streaming(run.chunk_bytes, pool)
        name = record.plain().object_name(*place)

        async def read(offset: int, view: memoryview) -> None:
            await source.read_into(job.rank, record.name, offset, view)

        with writing(backend, name, step=job.step, rank=job.rank):
            told = notes(name) if notes is not None else None
            writer = await backend.open_writer(name, record.nbytes, told)
            try:
                await streaming.copy(read, record, source.locate(job.rank, record.name), writer)
                await writer.commit()
            except BaseException:
                await writer.abort()
                raise
        reach("merge.image.done", name)

    await each(former.images, write, limit=IMAGES_PARALLEL)
    reach("merge.vote.before", names.vote(*place))
    images = tuple([record.plain() for record in former.images])
    meta = {key: value for key, value in former.meta.items() if key != UNBASED}
    vote = replace(former, attempt=job.attempt, kind="full", images=images, meta=meta)
    return await publish_vote(backend, job, vote)
