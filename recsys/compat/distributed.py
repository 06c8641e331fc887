"""Small helpers of TorchRec's that speak to other ranks, plan or quantize, for scripts."""

from __future__ import annotations

import abc
import copy
import functools
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.base.arguments import choice
from recsys.base.checked import checked
from recsys.compat.planner.types import ShardingOption
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.planner.planners import EmbeddingShardingPlanner
from recsys.distributed.planner.types import PlannerError
from recsys.distributed.ranks.agreement import failure_of, raise_failure
from recsys.distributed.ranks.comm import LazyAwaitable, broadcast_object
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.node import get_local_size
from recsys.distributed.shard import materialize_dense
from recsys.distributed.sharded.module_tree import outermost
from recsys.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from recsys.distributed.train_pipeline.pipelines import TrainPipelineBase
from recsys.distributed.types import ModuleSharder, ShardedModule, ShardingPlan, ShardingType
from recsys.inference import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from recsys.inference.quant_sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

DEFAULT_FUSED_PARAMS: dict[str, Any] = {}
"""Default settings of sharders of quantized collections: none."""
DEFAULT_SHARDERS = [
    QuantEmbeddingBagCollectionSharder(),
    QuantEmbeddingCollectionSharder(),
    QuantFeatureProcessedEmbeddingBagCollectionSharder(),
]
"""Default sharders of `shard_quant_model`."""
DEFAULT_QUANT_MAPPING: dict[str, type[nn.Module]] = {
    "torchrec.modules.embedding_modules.EmbeddingBagCollection": QuantEmbeddingBagCollection,
    "torchrec.modules.embedding_modules.EmbeddingCollection": QuantEmbeddingCollection,
}
"""Quantized module types of `quantize_inference_model`, by TorchRec's name of the replaced type."""
DEFAULT_QUANTIZATION_DTYPE = torch.int8
"""Default data type of tables in `quantize_inference_model`."""


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Return whether this process is rank `leader_rank` of a group; True if `pg` is None."""
    return pg is None or pg.rank() == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call a function on one rank and return its result on all ranks.

    Args:
        pg: Process group; all its ranks must make this call.
        rank: Rank of the group that calls the function.
        func: Function; its result must be picklable.
        *args: Arguments of the function.
        **kwargs: Keyword arguments of the function.

    Raises:
        Exception: The function raised an error; every rank raises it.
    """
    result, error = None, None
    if is_leader(pg, rank):
        try:
            result = func(*args, **kwargs)
        except Exception as raised:
            error = raised
    told = broadcast_object(pg, "call a function", (result, failure_of(error)), rank)
    if told[1] is not None:
        raise_failure(rank, told[1], error)
    return told[0]  # type: ignore[return-value]


def run_on_leader(
    pg: dist.ProcessGroup, rank: int
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function to run by `invoke_on_rank_and_broadcast_result`."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        return functools.partial(invoke_on_rank_and_broadcast_result, pg, rank, function)

    return decorate


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Initialize `meta` tensors on a device by `reset_parameters`, and move the others there."""
    materialize_dense(module, device)
    module.to(device)


def filter_state_dict(state_dict: Mapping[str, Any], name: str) -> OrderedDict[str, Any]:
    """Return the entries of a submodule, with names relative to it."""
    start = f"{name}."
    return OrderedDict(
        (key.removeprefix(start), value)
        for key, value in state_dict.items()
        if key.startswith(start)
    )


def append_prefix(prefix: str, name: str) -> str:
    """Join two parts of a path by a dot; an empty part is left out."""
    return ".".join(part for part in (prefix, name) if part)


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Prepend a prefix to every name, in place."""
    renamed = {f"{prefix}{key}": value for key, value in state_dict.items()}
    state_dict.clear()
    state_dict.update(renamed)


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return the device of a rank: "cpu", or a device type with the rank as index."""
    return torch.device(device_type) if device_type == "cpu" else torch.device(device_type, rank)


def get_tensor_size_bytes(t: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return t.numel() * t.element_size()


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes with `get_local_size` ranks each."""
    size = ShardingEnv.default().world_size if world_size is None else world_size
    return size // get_local_size(world_size)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of a rank's node; the node of this process if `rank` is None."""
    place = ShardingEnv.default().rank if rank is None else rank
    return place // get_local_size(world_size)


def extract_plan(
    search_space: Sequence[ShardingOption], loaded_sharding_options: Mapping[int, ShardingOption]
) -> list[ShardingOption]:
    """Return the options of a search space that a stored plan uses, with their ranks.

    Args:
        search_space: All options.
        loaded_sharding_options: Options of the plan by `ShardingOption.storage_hash`.

    Raises:
        PlannerError: Two options have the same hash, or the search space lacks an option of the
            plan.
    """
    by_hash = {option.storage_hash(): option for option in search_space}
    if len(by_hash) < len(search_space):
        raise PlannerError("Options of a search space must differ; received duplicates.")
    missing = [o.name for key, o in loaded_sharding_options.items() if key not in by_hash]
    if missing:
        raise PlannerError(
            "loaded_sharding_options must be in the search space; received other options for "
            f"tables {missing}."
        )
    chosen = [copy.deepcopy(o) for key, o in by_hash.items() if key in loaded_sharding_options]
    for option in chosen:
        before = loaded_sharding_options[option.storage_hash()]
        for shard, known in zip(option.shards, before.shards, strict=True):
            shard.rank = known.rank
    return chosen


class ShardingPlanner(abc.ABC):
    """Interface of planners. Any class with these methods may be passed; deriving is optional."""

    @abc.abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return a plan without communication with other ranks."""

    @abc.abstractmethod
    def collective_plan(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        """Return the same plan on every rank; all ranks must make this call."""


ShardingPlanner.register(EmbeddingShardingPlanner)


@dataclass
class TorchCompileConfig:
    """Compiler settings of `TrainPipelinePT2`.

    Args:
        fullgraph: As in torch.compile. A model with tables has graph breaks at their lookups.
        dynamic: As in torch.compile.
        backend: As in torch.compile.
        compile_on_iter: Number of steps before the model is compiled.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int = 3


class TrainPipelinePT2(TrainPipelineBase[Any, Any]):
    """A `TrainPipelineBase` that compiles the model after some steps.

    Args:
        model: As in `TrainPipelineBase`.
        optimizer: As in `TrainPipelineBase`.
        device: As in `TrainPipelineBase`.
        compile_configs: Compiler settings; `TorchCompileConfig()` if None.
        pre_compile_fn: Called with the model before it is compiled.
        post_compile_fn: Called with the model after it is compiled.
        input_transformer: Converts a batch to the model's input; None passes the batch itself.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        compile_configs: TorchCompileConfig | None = None,
        pre_compile_fn: Callable[[nn.Module], None] | None = None,
        post_compile_fn: Callable[[nn.Module], None] | None = None,
        input_transformer: Callable[[Any], Any] | None = None,
    ) -> None:
        def forward(batch: Any) -> Any:
            return model(batch if input_transformer is None else input_transformer(batch))

        super().__init__(model, optimizer, device, custom_model_fwd=forward)
        self._config = compile_configs or TorchCompileConfig()
        self._around = pre_compile_fn, post_compile_fn
        self._steps_done = 0

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Run one training step; see `TrainPipeline`."""
        if self._steps_done == self._config.compile_on_iter:
            before, after = self._around
            if before is not None:
                before(self._model)
            self._model.compile(
                fullgraph=self._config.fullgraph,
                dynamic=self._config.dynamic,
                backend=self._config.backend,
            )
            if after is not None:
                after(self._model)
        self._steps_done += 1
        return super().progress(dataloader_iter)


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Return the paths of the outermost modules without sharded modules.

    Args:
        model: Model. The list is empty if nothing in it is sharded.
    """
    if not _has_sharded(model):
        return []
    return [path for path, _ in outermost(model, lambda child: not _has_sharded(child))]


@contextmanager
def sharded_model_copy(device: torch.device | str | int | None) -> Iterator[None]:
    """Context in which `copy.deepcopy` copies a DistributedModelParallel to a device.

    Args:
        device: Device of the copy; the model's device if None.
    """

    def copied(model: DistributedModelParallel, memo: dict[int, Any]) -> DistributedModelParallel:
        return model.copy(model.device if device is None else torch.device(device))

    with mock.patch.object(DistributedModelParallel, "__deepcopy__", copied):
        yield


def _has_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, ShardedModule) for child in module.modules())


class DataLoadingThread(threading.Thread, Generic[T]):
    """Thread that prefetches one batch at a time and copies it to a device.

    Args:
        device: Device of the batches.
        dataloader_iter: Iterator of batches that have a method `to`.
        to_device_non_blocking: Whether copies from page-locked memory are asynchronous.
        memcpy_stream_priority: Ignored: this class creates no stream.
        memcpy_stream: Stream of the copies; the current one if None.
    """

    def __init__(
        self,
        device: torch.device,
        dataloader_iter: Iterator[Any],
        to_device_non_blocking: bool,
        memcpy_stream_priority: int = 0,
        memcpy_stream: torch.Stream | None = None,
    ) -> None:
        super().__init__(daemon=True)
        self._device, self._source = device, dataloader_iter
        self._is_non_blocking, self._copies = to_device_non_blocking, memcpy_stream
        self._read: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._is_stopped = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Read until the iterator ends or `stop` is called."""
        try:
            for batch in self._source:
                with nullcontext() if self._copies is None else self._copies:
                    moved = batch.to(self._device, non_blocking=self._is_non_blocking)
                self._give(moved)
                if self._is_stopped.is_set():
                    return
        except BaseException as error:
            self._error = error
        self._is_stopped.set()

    def _give(self, batch: Any) -> None:
        while not self._is_stopped.is_set():
            try:
                return self._read.put(batch, timeout=0.1)
            except queue.Full:
                continue

    def stop(self) -> None:
        """Stop the thread. A queued batch can still be read; later batches are dropped."""
        self._is_stopped.set()

    def get_next_batch(self, none_throws: bool = False) -> T | None:
        """Return the next batch; None after the last one.

        Args:
            none_throws: Whether to raise StopIteration after the last batch.

        Raises:
            StopIteration: No batch is left, and `none_throws` is True.
            Exception: The iterator raised this error.
        """
        while True:
            is_last = self._is_stopped.is_set()
            try:
                batch: T = self._read.get(timeout=0.0 if is_last else 0.1)
                return batch
            except queue.Empty:
                if is_last:
                    break
        if self._error is not None:
            raise self._error
        if none_throws:
            raise StopIteration
        return None


class GetItemLazyAwaitable(LazyAwaitable[V]):
    """An entry of a result in progress; it is available with the result.

    Args:
        parent: The result.
        key: Key of the entry.

    Example:
        >>> GetItemLazyAwaitable(LazyAwaitable(lambda: {"a": 3}), "a").wait()
        3
    """

    def __init__(self, parent: LazyAwaitable[Any], key: object) -> None:
        super().__init__(lambda: parent.wait()[key])


class LazyGetItemMixin(Generic[K, V]):
    """Mixin that makes entries of a `LazyAwaitable` awaitable: `pending[key]` does not wait.

    Name it before `LazyAwaitable` among the bases of a class.

    Example:
        >>> class Pending(LazyGetItemMixin[str, int], LazyAwaitable[dict[str, int]]):
        ...     def _wait_impl(self):
        ...         print("waits")
        ...         return {"a": 3}
        >>> entry = Pending()["a"]
        >>> entry + 1
        waits
        4
    """

    def __getitem__(self, key: K) -> GetItemLazyAwaitable[V]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]  # a LazyAwaitable


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[torch.distributed.ProcessGroup | None, torch.distributed.ProcessGroup | None]:
    """Return the process group of this rank's node, and of its peers on all nodes.

    Peers have the same local rank. Every rank must call it; groups are made once. Nodes hold
    consecutive ranks, `get_local_size` each.

    Args:
        device: On `meta` there are no groups; otherwise ignored.
        backend: Backend of the groups, such as "gloo"; None for the default group's.

    Returns:
        The two groups, or None twice on `meta`.

    Raises:
        ValueError: There is no default process group, or nodes have different sizes.
    """
    if device is not None and device.type == "meta":
        return None, None
    env = ShardingEnv.default()
    if env.process_group is None:
        raise ValueError(
            "intra_and_cross_node_pg needs the default process group; received a process without "
            "one. Call torch.distributed.init_process_group first."
        )
    size = env.node_size
    local_rank = env.rank % size
    first = env.rank - local_rank
    return (
        env.group_of(range(first, first + size), backend),
        env.group_of(range(local_rank, env.world_size, size), backend),
    )


@checked
def get_sharding_constructor_from_type(
    sharding_type: ShardingType,
) -> Callable[..., ParameterShardingGenerator]:
    """Return the function that makes generators of a sharding type, such as `row_wise`.

    Args:
        sharding_type: A `ShardingType` or its value.

    Raises:
        ValueError: If the type is unknown.

    Example:
        >>> get_sharding_constructor_from_type(ShardingType.TABLE_WISE)(rank=1) is not None
        True
    """
    return _HELPERS[choice("sharding_type", sharding_type, ShardingType)]


_HELPERS: Mapping[ShardingType, Callable[..., ParameterShardingGenerator]] = {
    ShardingType.DATA_PARALLEL: data_parallel,
    ShardingType.TABLE_WISE: table_wise,
    ShardingType.COLUMN_WISE: column_wise,
    ShardingType.ROW_WISE: row_wise,
    ShardingType.TABLE_ROW_WISE: table_row_wise,
    ShardingType.TABLE_COLUMN_WISE: table_column_wise,
    ShardingType.GRID_SHARD: grid_shard,
}
