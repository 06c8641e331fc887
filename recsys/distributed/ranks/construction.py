"""A sharded model is built on all ranks or on none.

Each rank builds its part without a word to the others, and leaves the given model as it is. Then
the ranks tell each other, in one exchange, what they built or why they could not. Only where all
agree are weights exchanged and is the model changed.
"""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import final

import torch
import torch.distributed as dist

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.agreement import agree, is_raised_on_all
from recsys.distributed.ranks.env import ShardingEnv

_STAGE = "build the model"

Load = Callable[[int], None]
"""Fills tables; takes rank 0's seed of their initial values."""


@final
class Construction:
    """What one rank has built so far.

    Args:
        env: the ranks.
        parts: groups of them over which parts of the model are sharded.

    Attributes:
        path: of the module that is being sharded, for messages; empty if it is the whole model.
    """

    def __init__(self, env: ShardingEnv, parts: Sequence[ShardingEnv] = ()) -> None:
        self.env = env
        self.groups = [one.process_group for one in (env, *parts)]
        self.path = ""
        self._facts: dict[str, str] = {}
        self._subjects: set[str] = set()
        self._gpu: str | None = None
        self._connections: list[Callable[[], None]] = [env.connect]
        self._loads: list[tuple[int, Load]] = []
        self._may_fail_alone = False
        self._last: list[Callable[[], None]] = []

    def add(self, subject: str, facts: Mapping[str, str]) -> None:
        """Add what has to be the same on all ranks, in words, by its name.

        Args:
            subject: what the facts are about.
            facts: such as `{"table 'users'": "100 x 4"}`.
        """
        while subject in self._subjects:
            subject += " (another)"
        self._subjects.add(subject)
        self._facts.update({f"{name} of {subject}": fact for name, fact in facts.items()})

    def works_on(self, device: torch.device) -> None:
        """Say where this rank works: under NCCL no two ranks may work on one GPU."""
        self._gpu = gpu_of(self.env, device)

    def load(self, seed: int, load: Load, *, may_fail_alone: bool = False) -> None:
        """Add what fills tables once all ranks agree; it may exchange weights.

        Args:
            seed: of their initial values, on this rank.
            load: fills them. If it fails it does so after its last exchange.
            may_fail_alone: whether it runs code that may fail on one rank only.
        """
        self._loads.append((seed, load))
        self._may_fail_alone |= may_fail_alone

    def connect(self, make_groups: Callable[[], None]) -> None:
        """Add what makes process groups, once all ranks agree."""
        self._connections.append(make_groups)

    def at_the_end(self, change: Callable[[], None]) -> None:
        """Add a change of the given model, for when nothing can fail any more."""
        self._last.append(change)

    def _agree(self, error: Exception | None) -> list[int]:
        own = (self._gpu, [seed for seed, _ in self._loads])
        if self.env.process_group is None:
            if error is not None:
                raise error
            return own[1]
        seen = agree(self.env.process_group, _STAGE, error or self._facts, own)
        _check_gpus([gpu for gpu, _ in seen])
        return seen[0][1]

    def finish(self, error: Exception | None = None) -> None:
        """Let the ranks agree, and then make groups, fill the tables and change the model.

        Args:
            error: why this rank could not build its part.

        Raises:
            Exception: `error`; or that of the lowest rank that has one, or ValueError if the
                ranks differ in what they built: the same on every rank.
        """
        seeds = self._agree(error)
        for make_groups in self._connections:
            make_groups()
        for seed, (_, load) in zip(seeds, self._loads, strict=True):
            try:
                load(seed)
            except Exception as failed:  # the other ranks go on exchanging: so does this one
                error = error or failed
        if self._may_fail_alone:
            comm.raise_together(self.env, "fill the tables", error)
        if error is not None:
            raise error
        for change in self._last:
            change()


_current: ContextVar[Construction | None] = ContextVar("construction", default=None)


@contextlib.contextmanager
def constructing(env: ShardingEnv, parts: Sequence[ShardingEnv] = ()) -> Iterator[Construction]:
    """Build something on all ranks of `env`; a part of it joins what is being built already.

    Every rank must enter it, and nothing in it may wait for other ranks. What it raises, every rank
    raises.

    Args:
        env: the ranks.
        parts: groups of them over which parts of it are sharded: what is built on one of these
            joins it, too. All groups then agree, and get the weights of rank 0 of `env`.
    """
    outer = _current.get()
    if outer is not None and any(group is env.process_group for group in outer.groups):
        yield outer
        return
    own = Construction(env, parts)
    token = _current.set(own)
    with no_collection():
        try:
            yield own
        except Exception as error:
            if not is_raised_on_all(error):
                own.finish(error)
            raise
        finally:
            _current.reset(token)
        own.finish()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would look through all that is built again and again.

    That is many small objects that stay: a third of the time that it takes to list the options of
    tables.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def gpu_of(env: ShardingEnv, device: torch.device) -> str | None:
    """Return the GPU that only one rank may work on, by host and number; None if there is none."""
    if device.type != "cuda" or env.world_size == 1:
        return None
    if "cuda:nccl" not in str(dist.get_backend_config(env.process_group)):
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{getattr(properties, 'uuid', device)} of {socket.gethostname()}"


def _check_gpus(gpus: list[str | None]) -> None:
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            raise ValueError(
                f"Under NCCL each rank needs a GPU of its own; ranks {first[gpu]} and {rank} both "
                f"work on GPU {gpu}. Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) "
                "before init_process_group, or pass device=..."
            )
