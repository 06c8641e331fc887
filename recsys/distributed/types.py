"""The vocabulary of placement: sharding types, plans, the process environment, and awaitables.

A plan is data. It names, for every table of every sharded module, a sharding type and the
rectangles (row range x column range) of the table with the rank that owns each. Nothing here
moves a tensor.
"""

from __future__ import annotations

import abc
import copy
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, unique
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Self, TypeVar, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from recsys.distributed.file_checks import read_source
from recsys.distributed.module_tree import outermost, walk
from recsys.kernels.arguments import choice, setting, whole_list
from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation
from recsys.modules.embedding_configs import DataType, data_type_to_dtype

T = TypeVar("T")


@unique
class ShardingType(Enum):
    """How the rows and columns of a table are divided among ranks."""

    DATA_PARALLEL = "data_parallel"
    """Every rank holds a whole copy; gradients are all-reduced."""
    TABLE_WISE = "table_wise"
    """One rank owns the whole table."""
    COLUMN_WISE = "column_wise"
    """Columns are divided; each part is owned by any rank."""
    ROW_WISE = "row_wise"
    """Rows are divided among all ranks."""
    TABLE_ROW_WISE = "table_row_wise"
    """Rows are divided among the ranks of one node."""
    TABLE_COLUMN_WISE = "table_column_wise"
    """Columns are divided among the ranks of one node."""
    GRID_SHARD = "grid_shard"
    """Columns are divided among nodes, the rows of each part among that node's ranks."""


@unique
class EmbeddingComputeKernel(Enum):
    """Where a table lives."""

    DENSE = "dense"
    """As ``FUSED``: whether a table updates itself depends on its optimizer alone."""
    FUSED = "fused"
    """Device memory, or host memory on a CPU. The optimizer attached to a table, if any, updates it
    in the backward pass; one without is a plain parameter, and backward fills its ``.grad``."""
    FUSED_UVM = "fused_uvm"
    """As ``FUSED``, in host memory that the GPU reads directly."""
    FUSED_UVM_CACHING = "fused_uvm_caching"
    """As ``FUSED_UVM``, with a cache in device memory."""
    QUANT = "quant"
    """Quantized rows, for inference."""


def compute_kernel_to_embedding_location(
    compute_kernel: EmbeddingComputeKernel,
) -> EmbeddingLocation:
    """Returns where the rows of a table with this compute kernel lie.

    Args:
        compute_kernel: of the table.

    Raises:
        ValueError: if it is no :class:`EmbeddingComputeKernel`, nor the value of one.

    Example:
        >>> compute_kernel_to_embedding_location(EmbeddingComputeKernel.FUSED_UVM)
        <EmbeddingLocation.MANAGED: 'managed'>
    """
    kernel = choice("compute_kernel", compute_kernel, EmbeddingComputeKernel)
    return _LOCATIONS.get(kernel, EmbeddingLocation.DEVICE)


_LOCATIONS = {
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
}


@final
@dataclass
class ShardMetadata:
    """One rectangle of a table and its owner.

    Args:
        shard_offsets: ``[first row, first column]``.
        shard_sizes: ``[rows, columns]``.
        placement: ``"rank:<rank>/<device>"``, such as ``"rank:0/cuda:0"`` or ``"rank:1/cpu"``. An
            object with a ``rank()`` method (torch's ``_remote_device``) is accepted as well.

    Raises:
        TypeError: if offsets or sizes are no lists of whole numbers.
        ValueError: if there are not two of each, or as many for a part that is no table, or one is
            negative.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: object = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("shard_offsets", "shard_sizes")}
        for name, numbers in given.items():
            setattr(self, name, whole_list(f"{type(self).__name__}.{name}", numbers))
        num_dims = len(self.shard_offsets)
        if num_dims != len(self.shard_sizes) or num_dims > 2:
            for name, numbers in given.items():
                whole_list(f"{type(self).__name__}.{name}", numbers, length=2)
        if type(self.placement) is str:
            self.placement = Placement(self.placement)

    @property
    def rank(self) -> int:
        """The owning rank.

        Raises:
            ValueError: if the placement names no rank.
        """
        return placement_rank(self.placement)


@final
class Placement(str):
    """Where a shard lies: the text ``"rank:<rank>/<device>"``, which knows its parts.

    Example:
        >>> Placement("rank:3/cuda:1").rank(), Placement("rank:3/cuda:1").device()
        (3, device(type='cuda', index=1))
    """

    __slots__ = ()

    def rank(self) -> int:
        """Returns the owning rank.

        Raises:
            ValueError: if it names none.
        """
        return _rank_in(self)

    def device(self) -> torch.device:
        """Returns the device, of that rank."""
        return torch.device(self.partition("/")[2])


def placement_rank(placement: object) -> int:
    """Returns the rank a placement names, such as 3 for ``"rank:3/cuda:3"``.

    Raises:
        ValueError: if it names none.
    """
    rank = getattr(placement, "rank", None)
    if callable(rank):
        rank = rank()
    if isinstance(rank, int):
        return rank
    return _rank_in(str(placement))


def _rank_in(placement: str) -> int:
    match = re.fullmatch(r"rank:(\d+)(/.*)?", placement)
    if match is None:
        raise ValueError(
            "A shard's placement must be 'rank:<rank>/<device>', such as 'rank:0/cpu'; "
            f"received {placement!r}."
        )
    return int(match.group(1))


@final
@dataclass
class EnumerableShardingSpec:
    """The rectangles of one table; together they cover it once."""

    shards: list[ShardMetadata]


_warned_of: set[str] = set()  # settings that mean nothing, in this process


def warn_once(setting: str, value: object, advice: str) -> None:
    """Warns, once per process, that a setting means nothing here.

    Args:
        setting: such as ``"CacheParams.algorithm"``.
        value: what was received.
        advice: what to do, or what holds instead.
    """
    if setting not in _warned_of:
        _warned_of.add(setting)
        warnings.warn(f"{setting} means nothing here; received {value!r}. {advice}", stacklevel=4)


@final
@dataclass(frozen=True, slots=True)
class CacheParams:
    """The device cache of a ``fused_uvm_caching`` table; arguments are TorchRec's.

    Args:
        algorithm: means nothing: the least recently used rows leave the cache.
        load_factor: share of the table's rows that the cache holds, above 0 up to 1 (FBGEMM's
            default, 0.2).
        reserved_memory: means nothing.
        precision: means nothing: a cached row has the dtype of its table.
        prefetch_pipeline: means nothing.
        stats: means nothing; the planner takes ``pooling_stats``.
        multipass_prefetch_config: means nothing.

    A value for what means nothing warns, once per process.

    Raises:
        ValueError: if ``load_factor`` is out of its range.

    Example:
        >>> CacheParams(load_factor=0.1).load_factor
        0.1
    """

    algorithm: object | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: object | None = None
    prefetch_pipeline: bool | None = None
    stats: object | None = None
    multipass_prefetch_config: object | None = None

    def __post_init__(self) -> None:
        if self.load_factor is not None and not 0 < self.load_factor <= 1:
            raise ValueError(
                f"CacheParams.load_factor must lie in (0, 1]; received {self.load_factor}."
            )
        for own in fields(self):
            value = getattr(self, own.name)
            if own.name != "load_factor" and value:
                warn_once(f"CacheParams.{own.name}", value, "Only load_factor can be chosen.")


@final
@dataclass
class ParameterSharding:
    """How one table is placed.

    Args:
        sharding_type: a :class:`ShardingType` value, such as ``"table_wise"``.
        compute_kernel: an :class:`EmbeddingComputeKernel` value, such as ``"fused"``.
        ranks: the owners of the shards in order; the sharding spec says the same in full.
        sharding_spec: the rectangles. ``None`` for data-parallel tables, or to let them follow from
            ``sharding_type`` and ``ranks``.
        cache_params: of ``fused_uvm_caching``; FBGEMM's defaults if None.
        enforce_hbm: means nothing: a cached table's states lie where its kernel puts them.
        stochastic_rounding: whether the optimizer of a table of fp16 or bf16 rounds at random, as
            in :class:`~recsys.kernels.types.OptimizerSpec`; None: as the optimizer says. For other
            tables it means nothing.
        bounds_check_mode: what to do with an id outside the table.
        output_dtype: dtype of the looked-up embeddings, one for all tables of a module: float32
            (None), float16 or bfloat16, also as a
            :class:`~recsys.modules.embedding_configs.DataType`. Sums are made in float32 and
            converted at the end; what travels is chosen by ``qcomm_codecs_registry``.
        key_value_params: means nothing: no table lies in a key-value store.

    True or a value for what means nothing warns, once per process.

    Raises:
        TypeError: if ranks are no list of whole numbers.
        ValueError: if there is no such type or kernel, or a rank is negative.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: EnumerableShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: torch.dtype | None = None
    key_value_params: object | None = None

    def __post_init__(self) -> None:
        where = type(self).__name__
        kind = choice(f"{where}.sharding_type", self.sharding_type, ShardingType)
        kernel = choice(f"{where}.compute_kernel", self.compute_kernel, EmbeddingComputeKernel)
        self.sharding_type, self.compute_kernel = kind.value, kernel.value
        if self.ranks is not None:
            self.ranks = whole_list(f"{where}.ranks", self.ranks)
        given: object = self.output_dtype
        if isinstance(given, DataType):
            self.output_dtype = data_type_to_dtype(given)
        if self.enforce_hbm:
            warn_once(f"{where}.enforce_hbm", True, "States lie where the compute kernel says.")
        if self.key_value_params is not None:
            warn_once(
                f"{where}.key_value_params",
                self.key_value_params,
                "Tables lie in device or host memory: compute kernels fused, fused_uvm, "
                "fused_uvm_caching.",
            )


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The placement of one module's tables: table name to :class:`ParameterSharding`.

    Printing it shows the table that users of TorchRec know: one line per table, then one per shard.
    """

    def __str__(self) -> str:
        head = ("param", "sharding type", "compute kernel", "ranks")
        rows = [
            (name, sharding.sharding_type, sharding.compute_kernel, str(sharding.ranks))
            for name, sharding in self.items()
        ]
        shard_head = ("param", "shard offsets", "shard sizes", "placement")
        shard_rows = [
            (name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement))
            for name, sharding in self.items()
            if sharding.sharding_spec is not None
            for shard in sharding.sharding_spec.shards
        ]
        tables = (
            format_table(*table, gap=" | ") for table in ((head, rows), (shard_head, shard_rows))
        )
        return "\n\n".join(tables)


def format_table(
    head: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    numbers: Container[int] = (),
    gap: str = "  ",
) -> str:
    """Returns text columns under a head, each as wide as its widest cell; numbers end right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        gap.join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRanks:
    """The ranks that a plan is made for.

    Attributes:
        world_size: how many.
        local_world_size: of a node.
        compute_device: where they compute, "cpu" or "cuda".
    """

    world_size: int
    local_world_size: int
    compute_device: str


@dataclass
class ShardingPlan:
    """The placement of a whole model: module path to the plan of that module.

    Args:
        plan: by module path.
        made_for: the ranks, where they are known: planners and files say them.

    Example:
        >>> tables = EmbeddingModuleShardingPlan()
        >>> tables["users"] = ParameterSharding("table_wise", "fused", ranks=[0])
        >>> plan = ShardingPlan({"sparse": tables})
        >>> ShardingPlan.from_json(plan.to_json()) == plan
        True
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)
    made_for: PlanRanks | None = field(default=None, compare=False, repr=False, kw_only=True)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """Returns the plan of the module at this path, or None."""
        return self.plan.get(module_path)

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the plan as JSON, one line per table, and writes it to a file if one is given.

        Args:
            path: of the file.
        """
        from recsys.distributed import plan_json  # builds on this file

        text = plan_json.write(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @staticmethod
    def from_json(source: str | Path) -> ShardingPlan:
        """Returns the plan that a file describes.

        Whether it is one for a model is checked when it is used: by
        :meth:`EmbeddingShardingPlanner.rate
        <recsys.distributed.planner.planners.EmbeddingShardingPlanner.rate>` and by
        DistributedModelParallel.

        Args:
            source: a path, or the JSON text itself, which starts with a brace.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if the text is no JSON, or a key, a choice, a rank or a size is wrong; the
                message names module and table.
            TypeError: if a value has the wrong type.
        """
        from recsys.distributed import plan_json  # builds on this file

        return plan_json.read(*read_source(source, "Plan file"))

    def __str__(self) -> str:
        return "\n\n".join(
            f"module: {path}".rstrip() + f"\n{plan}" for path, plan in self.plan.items()
        )


@final
class ShardingEnv:
    """The ranks a module is sharded over.

    Args:
        world_size: number of ranks.
        rank: this rank.
        pg: the process group; ``None`` when there is only one rank.

    Example:
        >>> ShardingEnv(world_size=1, rank=0).world_size
        1
    """

    def __init__(
        self, world_size: int, rank: int, pg: torch.distributed.ProcessGroup | None = None
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(
                f"ShardingEnv.rank must lie in [0, world_size); received rank={rank}, "
                f"world_size={world_size}."
            )
        if pg is None and world_size > 1:
            raise ValueError(
                f"ShardingEnv needs a process group for world_size={world_size}. "
                "Call torch.distributed.init_process_group and use ShardingEnv.from_process_group."
            )
        self.world_size = world_size
        self.rank = rank
        self.process_group = pg

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingEnv:
        return self  # a process group is not copied

    def of_node(self, node_size: int) -> ShardingEnv:
        """Returns the environment of the ranks on this rank's node.

        Every rank must ask in the same order; the group is made once.

        Args:
            node_size: ranks per node; divides ``world_size``. Ranks of one node are neighbours.
        """
        if node_size == 1:
            return ShardingEnv(1, 0)
        first = self.rank - self.rank % node_size
        group = self.group_of(range(first, first + node_size))
        return ShardingEnv(node_size, self.rank - first, group)

    def group_of(
        self, ranks: Sequence[int], backend: str | None = None
    ) -> torch.distributed.ProcessGroup:
        """Returns the process group of some of these ranks, this one among them.

        Each of them must ask in the same order as the others; the group is made once.

        Args:
            ranks: numbers in this environment.
            backend: of the group, such as "gloo"; that of the default group if None.
        """
        assert self.process_group is not None
        known = _groups.setdefault(self.process_group, {})
        key = tuple(ranks), backend
        if key not in known:
            members = torch.distributed.get_process_group_ranks(self.process_group)
            known[key] = torch.distributed.new_group(
                [members[rank] for rank in ranks],
                backend=backend,
                use_local_synchronization=True,
            )
        return known[key]

    @classmethod
    def from_process_group(cls, pg: torch.distributed.ProcessGroup) -> ShardingEnv:
        """Makes the environment of a process group."""
        return cls(torch.distributed.get_world_size(pg), torch.distributed.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int = 1, rank: int = 0) -> ShardingEnv:
        """Makes the environment of a single process, without a process group."""
        return cls(world_size, rank)

    @classmethod
    def default(cls) -> ShardingEnv:
        """Makes the environment of the default process group, or of one process without one.

        Raises:
            ValueError: if this is one process of several, as ``WORLD_SIZE`` of torchrun tells, and
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


_groups: WeakKeyDictionary[
    torch.distributed.ProcessGroup,
    dict[tuple[tuple[int, ...], str | None], torch.distributed.ProcessGroup],
] = WeakKeyDictionary()


class Awaitable(abc.ABC, Generic[T]):
    """A result that is under way.

    A class of your own defines ``_wait_impl``, which returns the result.

    Example:
        >>> class Ones(Awaitable[torch.Tensor]):
        ...     def _wait_impl(self) -> torch.Tensor:
        ...         return torch.ones(2)
        >>> Ones().wait().tolist()
        [1.0, 1.0]
    """

    _callbacks: list[Callable[[T], T]] | None = None

    @abc.abstractmethod
    def _wait_impl(self) -> T:
        """Blocks until the result is there and returns it."""

    @property
    def callbacks(self) -> list[Callable[[T], T]]:
        """Functions that :meth:`wait` applies to the result, one after the other; append to it."""
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    def wait(self) -> T:
        """Blocks until the result is there and returns it."""
        result = self._wait_impl()
        for callback in self._callbacks or ():
            result = callback(result)
        return result


class NoWait(Awaitable[T]):
    """A result that is there already.

    Args:
        obj: the result.
    """

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


_UNSET: Any = object()


class LazyAwaitable(Awaitable[T]):
    """A result that is under way, and arrives by :meth:`wait` or by being used.

    Attributes, indexing, iteration, arithmetic and torch functions all wait first, so that code
    written for the result itself works unchanged. A class of your own may define ``_wait_impl`` in
    place of passing ``finish``.

    Args:
        finish: computes the result; called once, at the first use.

    Example:
        >>> later = LazyAwaitable(lambda: torch.ones(3))
        >>> (later + 1).tolist()
        [2.0, 2.0, 2.0]
    """

    _finish: Callable[[], T] | None = None
    _result: T = _UNSET

    def __init__(self, finish: Callable[[], T] | None = None) -> None:
        if finish is None and type(self)._wait_impl is LazyAwaitable._wait_impl:
            raise TypeError(
                f"{type(self).__name__} needs a way to its result: pass a function, or define "
                "_wait_impl in a class of your own."
            )
        self._finish = finish

    def _wait_impl(self) -> T:
        assert self._finish is not None
        return self._finish()

    def wait(self) -> T:
        """Blocks until the result is there and returns it; the same object at every call."""
        if self._result is _UNSET:
            result = self._wait_impl() if self._finish is None else self._finish()
            for callback in self._callbacks or ():
                result = callback(result)
            self._result, self._finish = result, None
        return self._result

    def __repr__(self) -> str:
        state = "under way" if self._result is _UNSET else repr(self._result)
        return f"{type(self).__name__}({state})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying, pickling, probing
            raise AttributeError(name)
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        resolve = torch.utils._pytree.tree_map_only
        args, kwargs = resolve(LazyAwaitable, lambda lazy: lazy.wait(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.wait())

    def __int__(self) -> int:
        return int(self.wait())  # type: ignore[call-overload, no-any-return]

    def __float__(self) -> float:
        return float(self.wait())  # type: ignore[arg-type]


def _forward_operator(name: str) -> Callable[..., Any]:
    def operate(self: LazyAwaitable[Any], *others: Any) -> Any:
        others = tuple(o.wait() if isinstance(o, LazyAwaitable) else o for o in others)
        return getattr(self.wait(), name)(*others)

    return operate


for _name in [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "matmul",
    "rmatmul",
    "floordiv",
    "rfloordiv",
    "mod",
    "pow",
    "rpow",
    "neg",
    "abs",
    "and",
    "or",
    "xor",
    "invert",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "setitem",
    "contains",
]:
    setattr(LazyAwaitable, f"__{_name}__", _forward_operator(f"__{_name}__"))
LazyAwaitable.__hash__ = object.__hash__  # type: ignore[method-assign]


class LazyNoWait(LazyAwaitable[T]):
    """A result that is already there.

    Args:
        obj: the result.
    """

    def __init__(self, obj: T) -> None:
        super().__init__(lambda: obj)
        self.wait()


class ShardedModule(nn.Module, abc.ABC):
    """A module whose tables are placed on ranks by a plan.

    It answers for all that is below it: nobody else replicates, moves, copies or updates that. If a
    part of yours is to be replicated, let :meth:`sharded_parameter_names` leave it out, or let the
    sharder return a plain module that contains the sharded one.
    """

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> Any:
        """The keyed optimizer of the tables that update themselves in backward."""

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yields the names of the parameters and buffers that differ from rank to rank.

        Args:
            prefix: the module's path, which leads every name.
        """
        for name, _ in (*self.named_parameters(prefix), *self.named_buffers(prefix)):
            yield name

    def copy(self, device: torch.device) -> Self:
        """Returns a copy on another device; sharded modules inside are copied by themselves."""
        return copy_around_sharded(self, device)


def refuse_to_pickle(module: nn.Module) -> NoReturn:
    """Raises TypeError: a module holds a part of a model, and the way to the other parts."""
    raise TypeError(
        f"A {type(module).__name__} cannot be pickled: it holds this rank's part of the tables "
        "and the process group. Save it by recsys.distributed.checkpoint.save_checkpoint, or its "
        "state_dict() by torch.distributed.checkpoint; copy it by copy.deepcopy."
    )


M = TypeVar("M", bound=nn.Module)


def copy_around_sharded(
    module: M, device: torch.device, current_device: torch.device | None = None
) -> M:
    """Returns a deep copy on another device; sharded modules below make their own.

    Args:
        module: whose parameters and buffers, outside of sharded modules, move to ``device``.
        device: where the copy goes.
        current_device: whose tensors move; all if None.
    """

    def is_inner(root: nn.Module) -> Callable[[nn.Module], bool]:
        return lambda found: found is not root and isinstance(found, ShardedModule)

    copies: dict[int, Any] = {
        id(inner): cast(ShardedModule, inner).copy(device)
        for _, inner in outermost(module, is_inner(module))
    }
    copied = copy.deepcopy(module, copies)
    move_parts(copied, device, is_inner(copied), current_device)
    return copied


def copy_to_device(module: M, current_device: torch.device, to_device: torch.device) -> M:
    """Returns a deep copy whose tensors on one device lie on another; others stay where they are.

    Args:
        module: a model, or a part of one. Sharded modules in it are copied to ``to_device``.
        current_device: whose tensors move; those on ``meta`` never do.
        to_device: where to.

    Example:
        >>> cpu, meta = torch.device("cpu"), torch.device("meta")
        >>> copy_to_device(nn.Linear(2, 3), cpu, meta).weight.device
        device(type='meta')
    """
    return copy_around_sharded(module, to_device, current_device)


def move_parts(
    module: nn.Module,
    device: torch.device,
    is_leaf: Callable[[nn.Module], bool],
    current_device: torch.device | None = None,
) -> None:
    """Moves the tensors of a model, in place, save those of leaves and those on ``meta``.

    Args:
        module: the model.
        device: where to.
        is_leaf: tells which parts stay, with what is below them.
        current_device: whose tensors move; all if None.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        stays = tensor.is_meta or current_device not in (None, tensor.device)
        return tensor if stays else tensor.to(device)

    for _, part in walk(module, is_leaf):
        if not is_leaf(part):
            part._apply(moved, recurse=False)


class ModuleSharder(abc.ABC, Generic[T]):
    """Makes the sharded counterpart of one module type."""

    fused_params: Mapping[str, Any] = MappingProxyType({})
    """Optimizer settings for tables that have no optimizer attached."""

    @property
    @abc.abstractmethod
    def module_type(self) -> type[nn.Module]:
        """The module type this sharder replaces."""

    @abc.abstractmethod
    def shard(
        self,
        module: Any,
        params: EmbeddingModuleShardingPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Returns what takes the module's place, with its weights.

        That is a :class:`ShardedModule`, or a module that contains some. Name the parts as in the
        given module, so that the state dict keeps its names.

        Args:
            module: to be sharded.
            params: its plan.
            env: the ranks.
            device: where the tables go.
            module_fqn: the module's path in the model, by which errors name it. A sharder of your
                own may leave it out.
        """

    @abc.abstractmethod
    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Returns table name to weight, for every table of the module."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types this sharder can execute on that kind of device."""
        return [kind.value for kind in ShardingType]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the compute kernels for that sharding type on that kind of device."""
        kernels = [EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE]
        if compute_device_type == "cuda" and sharding_type != ShardingType.DATA_PARALLEL.value:
            kernels += [EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING]
        return [kernel.value for kernel in kernels]
