"""A sharded model is built on all ranks or on none.

Each rank builds its shards locally; the given model is not modified yet. Then the ranks exchange
facts about their shards, or errors, in one exchange. Only if all agree, weights are exchanged and
the model is modified.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import final

import torch
import torch.distributed as dist

from recsys.base.machine import machine_name
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.agreement import agree, is_raised_on_all, raise_together
from recsys.distributed.ranks.env import ShardingEnv

_STAGE = "build the model"

Load = Callable[[int], None]
"""Function that fills tables; its argument is rank 0's seed of the initial values."""


@final
class BuildTransaction:
    """The state of one rank's build.

    Args:
        env: The ranks.
        parts: Groups of these ranks over which parts of the model are sharded.

    Attributes:
        path: Path of the module that is being sharded, for messages; empty for the whole model.
    """

    def __init__(self, env: ShardingEnv, parts: Sequence[ShardingEnv] = ()) -> None:
        self.env = env
        self.groups = [part.process_group for part in (env, *parts)]
        self.path = ""
        self._facts: dict[str, str] = {}
        self._subjects: set[str] = set()
        self._gpu: str | None = None
        self._connections: list[Callable[[], None]] = [env.connect]
        self._loads: list[tuple[int, Load]] = []
        self._may_fail_alone = False
        self._changes: list[Callable[[], None]] = []

    def add(self, subject: str, facts: Mapping[str, str]) -> None:
        """Add facts that must be the same on all ranks.

        Args:
            subject: Subject of the facts.
            facts: Texts by name, such as `{"table 'users'": "100 x 4"}`.
        """
        while subject in self._subjects:
            subject += " (another)"
        self._subjects.add(subject)
        self._facts.update({f"{name} of {subject}": fact for name, fact in facts.items()})

    def set_device(self, device: torch.device) -> None:
        """Set the device of this rank: under NCCL no two ranks may share a GPU."""
        self._gpu = gpu_of(self.env, device)

    def load(self, seed: int, load: Load, *, may_fail_alone: bool = False) -> None:
        """Add a function that fills tables after all ranks have agreed; it may exchange weights.

        Args:
            seed: Seed of the initial values on this rank.
            load: Fills the tables. It must not fail before its last exchange.
            may_fail_alone: Whether it runs code that may fail on one rank only.
        """
        self._loads.append((seed, load))
        self._may_fail_alone |= may_fail_alone

    def connect(self, make_groups: Callable[[], None]) -> None:
        """Add a function that makes process groups after all ranks have agreed."""
        self._connections.append(make_groups)

    def on_commit(self, change: Callable[[], None]) -> None:
        """Add a change of the given model, applied when no error is possible any more."""
        self._changes.append(change)

    def _agree(self, error: Exception | None) -> list[int]:
        state = (self._gpu, [seed for seed, _ in self._loads])
        if self.env.process_group is None:
            if error is not None:
                raise error
            return state[1]
        seen = agree(self.env.process_group, _STAGE, error or self._facts, state)
        _check_gpus([gpu for gpu, _ in seen])
        return seen[0][1]

    def commit(self, error: Exception | None = None) -> None:
        """Compare the ranks' facts, and then make groups, fill the tables and modify the model.

        Args:
            error: Error of this rank's build.

        Raises:
            Exception: On every rank the same: `error`, or the error of the lowest rank that has
                one, or ValueError if the facts differ.
        """
        seeds = self._agree(error)
        for make_groups in self._connections:
            make_groups()
        for seed, (_, load) in zip(seeds, self._loads, strict=True):
            try:
                load(seed)
            except Exception as failed:  # the other ranks continue to exchange: so must this one
                error = error or failed
        if self._may_fail_alone:
            raise_together(self.env, "fill the tables", error)
        if error is not None:
            raise error
        for change in self._changes:
            change()


_current: ContextVar[BuildTransaction | None] = ContextVar("build_transaction", default=None)


@contextlib.contextmanager
def build_on_all_ranks(
    env: ShardingEnv, parts: Sequence[ShardingEnv] = ()
) -> Iterator[BuildTransaction]:
    """Build something on all ranks of `env`; an inner build joins the outer one.

    Every rank must enter it, and the code in it must not wait for other ranks. An error in it is
    raised on every rank.

    Args:
        env: The ranks.
        parts: Groups of these ranks over which parts are sharded: builds on these groups join this
            one, too. All groups then agree, and receive the weights of rank 0 of `env`.
    """
    outer = _current.get()
    if outer is not None and any(group is env.process_group for group in outer.groups):
        yield outer
        return
    transaction = BuildTransaction(env, parts)
    with no_collection():
        try:
            with comm.set_context(_current, transaction):
                yield transaction
        except Exception as error:
            if not is_raised_on_all(error):
                transaction.commit(error)
            raise
        transaction.commit()


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Pause the garbage collector, which would scan all new objects again and again.

    A build creates many small objects that stay. Collections would be a third of the time that the
    planner needs to list options.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def gpu_of(env: ShardingEnv, device: torch.device) -> str | None:
    """Return host and number of the GPU that only one rank may use; None without one."""
    if device.type != "cuda" or env.world_size == 1:
        return None
    if "cuda:nccl" not in str(dist.get_backend_config(env.process_group)):
        return None
    properties = torch.cuda.get_device_properties(device)
    return f"{getattr(properties, 'uuid', device)} of {machine_name()}"


def _check_gpus(gpus: list[str | None]) -> None:
    first: dict[str, int] = {}
    for rank, gpu in enumerate(gpus):
        if gpu is not None and first.setdefault(gpu, rank) != rank:
            raise ValueError(
                f"Under NCCL each rank needs a GPU of its own; ranks {first[gpu]} and {rank} both "
                f"use GPU {gpu}. Call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) "
                "before init_process_group, or pass device=..."
            )
