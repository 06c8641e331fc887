"""The ranks that a module is sharded over."""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, cached_property
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from recsys.kernels.arguments import setting
from recsys.kernels.checked import checked


@final
class ShardingEnv:
    """The ranks a module is sharded over.

    Args:
        world_size: number of ranks.
        rank: this rank.
        pg: the process group; `None` when there is only one rank.

    Attributes:
        replicas: where several groups of ranks hold the whole model each (see `DMPCollection`), the
            ranks that hold what this one holds, itself among them; else None.

    Raises:
        ValueError: if the rank is none of these, or several have no process group.

    Example:
        >>> ShardingEnv(world_size=1, rank=0).world_size
        1
    """

    @checked
    def __init__(
        self, world_size: int, rank: int, pg: torch.distributed.ProcessGroup | None = None
    ) -> None:
        _check_rank(world_size, rank)
        self.world_size = world_size
        self.rank = rank
        self.process_group = pg
        self.replicas: ShardingEnv | None = None
        self.check_can_exchange()
        if world_size > 1:
            _let_threads_finish()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingEnv:
        return self  # a process group is not copied

    @cached_property
    def node_size(self) -> int:
        """Ranks per node, as `get_local_size` says."""
        return node_size_of(self.world_size)

    @property
    def exchanges_in_streams(self) -> bool:
        """Whether streams of a GPU wait for exchanges, not the host: by NCCL, or with one rank."""
        if self.process_group is None or self.world_size == 1:
            return True
        return "cuda:nccl" in str(torch.distributed.get_backend_config(self.process_group))

    def adds_up_on_the_way(self, device: torch.device) -> bool:
        """Return whether sums over ranks are better made while values travel, by reduce-scatter.

        Nothing is then received but the sum, and NCCL sends over a node's network cards what
        its GPUs have added up. The order in which it adds is its own. Gloo sends everything to all.

        Args:
            device: where the values are.
        """
        if torch.are_deterministic_algorithms_enabled() or device.type != "cuda":
            return False
        return self.world_size > 1 and self.exchanges_in_streams

    def of_node(self, node_size: int) -> ShardingEnv:
        """Return the environment of the ranks on this rank's node.

        Every rank must ask in the same order; the group is made once.

        Args:
            node_size: ranks per node; divides `world_size`. Ranks of one node are neighbours.
        """
        first = self.rank - self.rank % node_size
        return self.of_ranks(range(first, first + node_size))

    def of_ranks(self, ranks: Sequence[int]) -> ShardingEnv:
        """Return the environment of some of these ranks, this one among them; see `group_of`.

        Where one rank asks for itself alone, all do.
        """
        if len(ranks) == 1:
            return ShardingEnv(1, 0)
        return ShardingEnv(len(ranks), ranks.index(self.rank), self.group_of(ranks))

    @cached_property
    def for_ids(self) -> ShardingEnv:
        """The same ranks, with a process group in which nothing but ids travels.

        So what is computed next never waits in a queue behind what is computed now: ids of the
        batch to come, embeddings, and the gradients of dense layers have a group each. They are
        made with the first model over these ranks. Gloo has threads in place
        of a queue, and more of them would only cost time: there it is this environment itself.
        """
        return self._beside("ids") if self.exchanges_in_streams else self

    @cached_property
    def for_embeddings(self) -> ShardingEnv:
        """The same ranks, with a process group for embeddings, or itself; see `for_ids`."""
        return self._beside("embeddings") if self.exchanges_in_streams else self

    def connect(self) -> None:
        """Make the process groups of later exchanges and asynchronous saves; every rank must.

        Making a group waits for all its ranks, up to the timeout of the default group. A model
        makes its groups while it is built, where a rank that is lost ends the job at once, so that
        training and saves do not wait for a rank that was lost meanwhile.
        """
        if self.process_group is None or self.world_size == 1:
            return
        _ = self.for_ids, self.for_embeddings
        backends = str(torch.distributed.get_backend_config(self.process_group))
        if "gloo" in backends or "nccl" in backends:  # others, such as `fake`, have no real ranks
            self._beside("saves", "gloo")

    def aside(self) -> ShardingEnv:
        """Return the same ranks with a gloo group of their own, for exchanges of another thread.

        Every rank must ask in the same order; the group is made once.

        Raises:
            ValueError: on all ranks, if they cannot have one.
        """
        own = self._beside("saves", "gloo")
        if own is self and self.world_size > 1:
            raise ValueError(
                "To save beside training, ranks need a process group of their own. "
                f"{_NEEDS}; received a group of {self.world_size} ranks for which this does not "
                "hold. Make groups on all ranks alike, or use save_checkpoint."
            )
        return own

    def _beside(self, purpose: str, backend: str | None = None) -> ShardingEnv:
        """Return the same ranks with a group of their own; itself if it can have none."""
        if self.process_group is None or self.world_size == 1:
            return self
        whole = torch.distributed.group.WORLD
        assert whole is not None
        if whole.bound_device_id and backend is None and self.world_size < whole.size():
            return self  # new groups are split off the bound one: all of its ranks must take part
        own = self._group_of(range(self.world_size), backend, purpose)
        return self if own is None else ShardingEnv(self.world_size, self.rank, own)

    def group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> torch.distributed.ProcessGroup:
        """Return the process group of some of these ranks, this one among them.

        Every rank of this environment must ask, in the same order, each for its part of a split of
        the ranks; no two splits may have a part in common. The group is made once, also for another
        environment of the same ranks. It has the timeout of this environment's group, and ends with
        the default group: PyTorch names groups of some ranks by these and by how many groups there
        are, so that one made anew would find in the store what the old one left there.

        Args:
            ranks: numbers in this environment.
            backend: of the group, such as "gloo"; that of this environment's group if None.

        Raises:
            ValueError: on all ranks, if PyTorch cannot make it.
        """
        found = self._group_of(ranks, backend)
        if found is None:
            raise ValueError(
                f"Ranks {list(ranks)} of {self.world_size} need a process group of their own. "
                f"{_NEEDS}; received a group for which this does not hold. Make groups on all "
                "ranks alike."
            )
        return found

    def _group_of(
        self, ranks: Sequence[int], backend: str | None, purpose: str = ""
    ) -> torch.distributed.ProcessGroup | None:
        """Return what `group_of` does; None on all ranks if PyTorch cannot make it.

        Args:
            ranks: numbers in this environment.
            backend: of the group; that of this environment's group if None.
            purpose: tells groups of the same ranks apart.
        """
        group, whole = self.process_group, torch.distributed.group.WORLD
        assert group is not None
        assert whole is not None
        members = torch.distributed.get_process_group_ranks(group)
        if members != sorted(members):
            return None  # a new group would number its ranks otherwise
        backend = backend or str(torch.distributed.get_backend_config(group))
        timeout = _timeout_of(group)
        wanted = tuple(members[rank] for rank in ranks)
        key = wanted, backend, timeout, purpose
        agreed, known = _agreed.setdefault(group, {}), _groups.setdefault(whole, {})
        if key in agreed:
            return agreed[key]
        to_make, alone = [] if key in known else [wanted], len(wanted) < whole.size()
        if alone:
            missing, alone = _missing(group, wanted, key in known)
            if not alone:
                if len(members) < whole.size():
                    return None
                to_make = missing
        for one in to_make:
            made = torch.distributed.new_group(
                one, timeout=timeout, backend=backend, use_local_synchronization=alone
            )
            if one == wanted:
                known[key] = made
        agreed[key] = known[key]
        return known[key]

    @classmethod
    @checked
    def from_process_group(cls, pg: torch.distributed.ProcessGroup) -> ShardingEnv:
        """Make the environment of a process group."""
        return cls(torch.distributed.get_world_size(pg), torch.distributed.get_rank(pg), pg)

    @classmethod
    @checked
    def from_local(cls, world_size: int = 1, rank: int = 0) -> ShardingEnv:
        """Make the environment of a single process, without a process group.

        Args:
            world_size: one; or the number of the process's devices, over which quantized models
                are sharded, and only they.
            rank: 0.
        """
        env = cls(1, 0)
        _check_rank(world_size, rank)
        env.world_size, env.rank = world_size, rank
        return env

    def check_can_exchange(self) -> None:
        """Check that there is a process group, if there are several ranks.

        Raises:
            ValueError: if there is none.
        """
        if self.process_group is None and self.world_size > 1:
            raise ValueError(
                f"ShardingEnv needs a process group for world_size={self.world_size}. "
                "Call torch.distributed.init_process_group and use ShardingEnv.from_process_group."
            )

    @classmethod
    def default(cls) -> ShardingEnv:
        """Make the environment of the default process group, or of one process without one.

        Raises:
            ValueError: if this is one process of several, as `WORLD_SIZE` of torchrun tells, and
                there is no process group yet: each would train a model of its own.
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            assert torch.distributed.group.WORLD is not None
            return cls.from_process_group(torch.distributed.group.WORLD)
        started = setting("WORLD_SIZE") or 1
        if started > 1:
            raise ValueError(
                f"This is one of {started} processes (WORLD_SIZE={started}), but they have no "
                "process group, so each would train a model of its own. First call "
                'torch.distributed.init_process_group("gloo"), or "nccl" on GPUs; or pass '
                "env=ShardingEnv.from_local() if that is what you want."
            )
        return cls.from_local()


@cache
def _let_threads_finish() -> None:
    """Have a process that ends wait a moment for the threads of its process groups.

    A thread of gloo that has not yet dropped the tensors of the last exchange asks for Python's
    lock to do so. Up to Python 3.13 a thread that asks while Python ends is ended itself, in C++
    that must not be left so: the whole process aborts, after all its work was done.
    """
    atexit.register(time.sleep, _LAST_MOMENT)


_LAST_MOMENT = 0.1  # seconds; the threads need one turn each
_NEEDS = (
    "PyTorch makes one for a part of a job's ranks only if each is in equally many groups, and "
    "numbers them in ascending order"
)


def _check_rank(world_size: int, rank: int) -> None:
    if not 0 <= rank < world_size:
        raise ValueError(
            f"ShardingEnv.rank must be in [0, world_size); received rank={rank}, "
            f"world_size={world_size}."
        )


_Groups = WeakKeyDictionary[
    torch.distributed.ProcessGroup,
    dict[tuple[tuple[int, ...], str, timedelta | None, str], torch.distributed.ProcessGroup],
]
_groups: _Groups = WeakKeyDictionary()
"""Those that were made under a default group, by ranks in it, backend, timeout and purpose."""
_agreed: _Groups = WeakKeyDictionary()
"""Those of them that all ranks of a group have asked for."""


def _timeout_of(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """Return after what time exchanges of a group fail; None: PyTorch's default."""
    for device in sorted(group._device_types, key=lambda device: device.type == "cpu"):
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return None


def _missing(
    group: torch.distributed.ProcessGroup, ranks: tuple[int, ...], known: bool
) -> tuple[list[tuple[int, ...]], bool]:
    """Return, to all ranks of a group alike, which of the groups that they want are to be made.

    And whether the ranks of each can make it without the others: PyTorch then tells groups apart
    by how many a rank is in, which must be equal for all ranks of it.

    Args:
        group: whose ranks all ask.
        ranks: those that this rank wants a group of.
        known: that they have it already.
    """
    own = ranks, None if known else len(torch.distributed.distributed_c10d._world.pg_names)
    told = [own] * group.size()
    torch.distributed.all_gather_object(told, own, group=group)
    asked = dict.fromkeys(one for one in told if one[1] is not None)
    missing = list(dict.fromkeys(ranks for ranks, _ in asked))
    return missing, len(missing) == len(asked)


def node_size_of(world_size: int) -> int:
    """Return the ranks per node among so many, as `LOCAL_WORLD_SIZE` says."""
    local_size = setting("LOCAL_WORLD_SIZE")
    if local_size is None:
        return world_size
    if world_size % local_size == 0:
        return local_size
    job_size = setting("WORLD_SIZE")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        job_size = torch.distributed.get_world_size()
    if world_size == job_size:
        raise ValueError(
            "The environment variable LOCAL_WORLD_SIZE must divide the number of ranks: nodes have "
            f"equally many; received {local_size} for {world_size} ranks. Start as many on each "
            "node."
        )
    return world_size
