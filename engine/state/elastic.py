"""Values that belong to a rank, where another number of ranks goes on: random numbers, and positions in the data.

Random numbers at another number of ranks: the generators of rank ``r`` of ``n`` are seeded anew, each with

    xxh3_128(state of all generators of saved rank 0, n, r, kind of the generator)

so that they are the same at each load of the same checkpoint at that number of ranks, and others on each rank, for
each kind and for each number of ranks. They are not what an unbroken run would have drawn.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import xxhash

from ..errors import StateError, StateMismatch
from .rng import cuda_count, is_random_state

if TYPE_CHECKING:
    from .trainstate import TrainState

_SEED_WORDS = 4
"""A seed of 128 bits, as the 32-bit words that numpy takes."""


def derive_rng(stored: Any, world: int, rank: int) -> dict[str, Any]:
    """State for :meth:`RandomState.load_state_dict` on ``rank`` of ``world``, from that of saved rank 0 (see above).

    CUDA devices: those of this process, where the saved one used CUDA or this one does. Raises StateMismatch if
    ``stored`` is no state of the generators.
    """
    if not is_random_state(stored):
        raise StateMismatch(
            "rng: stored is no state of the random number generators", found=type(stored).__qualname__
        )
    seeds = _Seeds(stored, world, rank)
    words = seeds.of("numpy")
    count = torch.cuda.device_count() if stored["cuda"] else cuda_count()
    return {
        "python": random.Random(seeds.of("python")).getstate(),
        "numpy": np.random.RandomState(
            [words >> 32 * at & 0xFFFFFFFF for at in range(_SEED_WORDS)]
        ).get_state(),
        "torch": _torch_state(torch.Generator(), seeds.of("torch")),
        "cuda": [
            _torch_state(torch.Generator(device=f"cuda:{index}"), seeds.of(f"cuda:{index}"))
            for index in range(count)
        ],
    }


def check_data(live: str | None, stored: str | None) -> None:
    """Raise StateMismatch if a checkpoint of a finite data set is to be gone on with on a stream, or the other way
    round: a position in the one means nothing in the other. None: not said."""
    if live is not None and stored is not None and live != stored:
        raise StateMismatch(
            "loader: the checkpoint stands in data of another kind",
            found=f"data={stored!r}",
            expected=f"data={live!r}",
            hint=f'Go on with TrainState(data="{stored}"), or leave data= out if its position means the same',
        )


def reshard_loader_state(state: TrainState, stored: list[Any], rank: int, world: int) -> Any:
    """What the state's ``reshard_loader`` makes of the loaders' states of all ranks that saved, for ``rank`` of
    ``world``. Raises StateMismatch if it has none, StateError if it fails."""
    if state.reshard_loader is None:
        raise StateMismatch(
            "loader: the checkpoint has the positions of another number of ranks in the data",
            found=f"{len(stored)} ranks",
            expected=f"{world} ranks",
            hint="Give TrainState(reshard_loader=fn), fn(states, rank, world) -> state, which divides them anew; or "
            'load with allow={"loader"}, and the loader stays as it is',
        )
    try:
        return state.reshard_loader(list(stored), rank, world)
    except Exception as error:
        raise StateError(
            f"loader: reshard_loader failed for rank {rank} of {world}: {type(error).__qualname__}: {error}",
            found=f"states of {len(stored)} ranks",
            path="loader",
        ) from error


class _Seeds:
    def __init__(self, stored: dict[str, Any], world: int, rank: int) -> None:
        name, key, position, has_gauss, gauss = stored["numpy"]
        array = np.ascontiguousarray(key, dtype="<u4").tobytes()
        numpy_state = [str(name), array, int(position), int(has_gauss), float(gauss)]
        source = [stored["python"], numpy_state, stored["torch"], list(stored["cuda"]), world, rank]
        self._source = msgspec.msgpack.encode(source)

    def of(self, kind: str) -> int:
        """The seed of one generator, below 2^128."""
        return int(xxhash.xxh3_128_intdigest(self._source + kind.encode()))


def _torch_state(generator: torch.Generator, seed: int) -> bytes:
    # Seeds of torch have 64 bits, and may not be negative in all releases.
    return generator.manual_seed(seed & 0x7FFFFFFFFFFFFFFF).get_state().numpy().tobytes()
