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

from recsys.base.arguments import setting
from recsys.base.checked import checked


@final
class ShardingEnv:
    """The ranks that a module is sharded over.

    Args:
        world_size: Number of ranks.
        rank: This rank.
        pg: Process group; `None` for a single rank.

    Attributes:
        replicas: If several groups of ranks hold the whole model each (see `DMPCollection`): the
            ranks with the same shards as this one, including itself. Otherwise None.

    Raises:
        ValueError: The rank is out of range, or several ranks have no process group.

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
        """Ranks per node, as in `get_local_size`."""
        return node_size_of(self.world_size)

    @property
    def exchanges_in_streams(self) -> bool:
        """True if GPU streams wait for exchanges, not the host: with NCCL, or with one rank."""
        if self.process_group is None or self.world_size == 1:
            return True
        return "cuda:nccl" in str(torch.distributed.get_backend_config(self.process_group))

    def prefers_reduce_scatter(self, device: torch.device) -> bool:
        """Return whether reduce-scatter is the better collective for sums over ranks.

        Each rank then receives only the sum, and NCCL adds up the values of a node's GPUs before it
        sends them to other nodes, in an order of its own. Gloo sends all values to all ranks.

        Args:
            device: Device of the values.
        """
        if torch.are_deterministic_algorithms_enabled() or device.type != "cuda":
            return False
        return self.world_size > 1 and self.exchanges_in_streams

    def of_node(self, node_size: int) -> ShardingEnv:
        """Return the environment of the ranks on this rank's node.

        Every rank must call it in the same order; the group is made once.

        Args:
            node_size: Ranks per node; divides `world_size`. Ranks of one node are consecutive.
        """
        first = self.rank - self.rank % node_size
        return self.of_ranks(range(first, first + node_size))

    def of_ranks(self, ranks: Sequence[int]) -> ShardingEnv:
        """Return the environment of some of these ranks, including this one; see `group_of`.

        If one rank requests only itself, all ranks must.
        """
        if len(ranks) == 1:
            return ShardingEnv(1, 0)
        return ShardingEnv(len(ranks), ranks.index(self.rank), self.group_of(ranks))

    @cached_property
    def for_ids(self) -> ShardingEnv:
        """The same ranks, with a process group for ids.

        Ids of the next batch, embeddings, and gradients of dense layers have separate groups, so
        that none waits in a queue behind the others. The groups are made with the first model over
        these ranks. Gloo uses threads instead of a queue, and more threads would only cost time:
        then it is this environment itself.
        """
        return self._with_group("ids") if self.exchanges_in_streams else self

    @cached_property
    def for_embeddings(self) -> ShardingEnv:
        """The same ranks, with a process group for embeddings; see `for_ids`."""
        return self._with_group("embeddings") if self.exchanges_in_streams else self

    def connect(self) -> None:
        """Make the process groups of later exchanges and asynchronous saves, on every rank.

        Making a group waits for all its ranks, up to the timeout of the default group. A model
        makes its groups while it is built, where a lost rank ends the job at once, so that training
        and saves do not wait for such a rank.
        """
        if self.process_group is None or self.world_size == 1:
            return
        _ = self.for_ids, self.for_embeddings
        backends = str(torch.distributed.get_backend_config(self.process_group))
        if "gloo" in backends or "nccl" in backends:  # not for `fake` and the like
            self._with_group("saves", "gloo")

    def for_saves(self) -> ShardingEnv:
        """Return the same ranks with their own gloo group, for exchanges of another thread.

        Every rank must call it in the same order; the group is made once.

        Raises:
            ValueError: On all ranks, if they cannot have one.
        """
        return self._for_thread("saves", "save during training")

    def for_publishing(self) -> ShardingEnv:
        """Return the same ranks with a gloo group for published rows; as `for_saves`."""
        return self._for_thread("publishing", "publish rows")

    def _for_thread(self, purpose: str, action: str) -> ShardingEnv:
        env = self._with_group(purpose, "gloo")
        if env is self and self.world_size > 1:
            raise ValueError(
                f"To {action}, ranks need a process group of their own. {_NEEDS}; received a group "
                f"of {self.world_size} ranks for which this does not hold. Make the same groups on "
                "all ranks, or save by save_checkpoint."
            )
        return env

    def _with_group(self, purpose: str, backend: str | None = None) -> ShardingEnv:
        """Return the same ranks with a group of their own; itself if that is not possible."""
        if self.process_group is None or self.world_size == 1:
            return self
        whole = torch.distributed.group.WORLD
        assert whole is not None
        if whole.bound_device_id and backend is None and self.world_size < whole.size():
            return self  # new groups are split from the bound one, which needs all of its ranks
        group = self._group_of(range(self.world_size), backend, purpose)
        return self if group is None else ShardingEnv(self.world_size, self.rank, group)

    def group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> torch.distributed.ProcessGroup:
        """Return the process group of some of these ranks, including this one.

        Every rank of this environment must call it, in the same order, each for its part of a
        division of the ranks. No two divisions may have a part in common. The group is made once,
        also for another environment of the same ranks. It has the timeout of this environment's
        group, and ends with the default group: PyTorch names a group by its ranks and the number of
        groups, so that a new group would find the old one's entries in the store.

        Args:
            ranks: Ranks in this environment.
            backend: Backend of the group, such as "gloo"; None for this environment's.

        Raises:
            ValueError: On all ranks, if PyTorch cannot make it.
        """
        group = self._group_of(ranks, backend)
        if group is None:
            raise ValueError(
                f"Ranks {list(ranks)} of {self.world_size} need a process group of their own. "
                f"{_NEEDS}; received a group for which this does not hold. Make the same "
                "groups on all ranks."
            )
        return group

    def _group_of(
        self, ranks: Sequence[int], backend: str | None, purpose: str = ""
    ) -> torch.distributed.ProcessGroup | None:
        """Return the group of `group_of`; None on all ranks if PyTorch cannot make it.

        Args:
            ranks: Ranks in this environment.
            backend: Backend of the group; None for this environment's.
            purpose: Distinguishes groups of the same ranks.
        """
        group, whole = self.process_group, torch.distributed.group.WORLD
        assert group is not None
        assert whole is not None
        members = torch.distributed.get_process_group_ranks(group)
        if members != sorted(members):
            return None  # a new group would order its ranks differently
        backend = backend or str(torch.distributed.get_backend_config(group))
        timeout = _timeout_of(group)
        wanted = tuple(members[rank] for rank in ranks)
        key = wanted, backend, timeout, purpose
        agreed, known = _agreed.setdefault(group, {}), _groups.setdefault(whole, {})
        if key in agreed:
            return agreed[key]
        to_make, alone = [] if key in known else [wanted], len(wanted) < whole.size()
        if alone:
            missing, alone = _find_missing_groups(group, wanted, key in known)
            if not alone:
                if len(members) < whole.size():
                    return None
                to_make = missing
        for request in to_make:
            made = torch.distributed.new_group(
                request, timeout=timeout, backend=backend, use_local_synchronization=alone
            )
            if request == wanted:
                known[key] = made
        agreed[key] = known[key]
        return known[key]

    @classmethod
    @checked
    def from_process_group(cls, pg: torch.distributed.ProcessGroup) -> ShardingEnv:
        """Return the environment of a process group."""
        return cls(torch.distributed.get_world_size(pg), torch.distributed.get_rank(pg), pg)

    @classmethod
    @checked
    def from_local(cls, world_size: int = 1, rank: int = 0) -> ShardingEnv:
        """Return the environment of a single process, without a process group.

        Args:
            world_size: One; or the number of the process's devices, for sharded quantized models
                only.
            rank: 0.
        """
        env = cls(1, 0)
        _check_rank(world_size, rank)
        env.world_size, env.rank = world_size, rank
        return env

    def check_can_exchange(self) -> None:
        """Check that several ranks have a process group.

        Raises:
            ValueError: They have none.
        """
        if self.process_group is None and self.world_size > 1:
            raise ValueError(
                f"ShardingEnv needs a process group for world_size={self.world_size}. "
                "Call torch.distributed.init_process_group and use ShardingEnv.from_process_group."
            )

    @classmethod
    def default(cls) -> ShardingEnv:
        """Return the environment of the default process group, or of one process without one.

        Raises:
            ValueError: This is one of several processes (`WORLD_SIZE` of torchrun) without a
                process group: each would train its own model.
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
    """Wait briefly for process-group threads at interpreter exit.

    A gloo thread needs Python's lock to free the tensors of the last exchange. Up to Python 3.13, a
    thread that requests the lock during exit is terminated inside C++ code, which aborts the
    process after its work is done.
    """
    atexit.register(time.sleep, _LAST_MOMENT)


_LAST_MOMENT = 0.1  # seconds; each thread needs the lock once
_NEEDS = (
    "PyTorch makes one for some of a job's ranks only if all of them are in the same number of "
    "groups, and orders them by rank"
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
"""Groups by default group, and by ranks, backend, timeout and purpose."""
_agreed: _Groups = WeakKeyDictionary()
"""Groups that all ranks of a group have requested."""


def _timeout_of(group: torch.distributed.ProcessGroup) -> timedelta | None:
    """Return the timeout of a group's exchanges; None for PyTorch's default."""
    for device in sorted(group._device_types, key=lambda device: device.type == "cpu"):
        options = getattr(group._get_backend(device), "options", None)
        if options is not None:
            return options._timeout  # type: ignore[no-any-return]
    return None


def _find_missing_groups(
    group: torch.distributed.ProcessGroup, ranks: tuple[int, ...], known: bool
) -> tuple[list[tuple[int, ...]], bool]:
    """Return the requested groups to make, the same on all ranks of a group.

    Also return whether the ranks of each group can make it without the others: PyTorch then names a
    group by the number of groups that a rank is in, which must be the same for all its ranks.

    Args:
        group: Group of all requesting ranks.
        ranks: Ranks of the group that this rank requests.
        known: Whether that group exists already.
    """
    known_groups = ranks, None if known else len(torch.distributed.distributed_c10d._world.pg_names)
    requests = [known_groups] * group.size()
    torch.distributed.all_gather_object(requests, known_groups, group=group)
    asked = dict.fromkeys(request for request in requests if request[1] is not None)
    missing = list(dict.fromkeys(ranks for ranks, _ in asked))
    return missing, len(missing) == len(asked)


def node_size_of(world_size: int) -> int:
    """Return the ranks per node for a number of ranks, from `LOCAL_WORLD_SIZE`."""
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
            "The environment variable LOCAL_WORLD_SIZE must divide the number of ranks; received "
            f"{local_size} for {world_size} ranks. Start the same number on each node."
        )
    return world_size
