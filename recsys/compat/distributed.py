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

from recsys.compat.planner.types import ShardingOption
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.planner.planners import EmbeddingShardingPlanner
from recsys.distributed.planner.types import PlannerError
from recsys.distributed.ranks.agreement import failure_of, raise_failure
from recsys.distributed.ranks.comm import broadcast_object
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.node import get_local_size
from recsys.distributed.shard import materialize_dense
from recsys.distributed.sharded.module_tree import outermost
from recsys.distributed.train_pipeline.pipelines import TrainPipelineBase
from recsys.distributed.types import ModuleSharder, ShardedModule, ShardingPlan
from recsys.inference import QuantEmbeddingBagCollection, QuantEmbeddingCollection
from recsys.inference.quant_sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)

T = TypeVar("T")

DEFAULT_FUSED_PARAMS: dict[str, Any] = {}
"""What a sharder of quantized collections takes: nothing, as rows are laid out when quantized."""
DEFAULT_SHARDERS = [
    QuantEmbeddingBagCollectionSharder(),
    QuantEmbeddingCollectionSharder(),
    QuantFeatureProcessedEmbeddingBagCollectionSharder(),
]
"""What `shard_quant_model` uses."""
DEFAULT_QUANT_MAPPING: dict[str, type[nn.Module]] = {
    "torchrec.modules.embedding_modules.EmbeddingBagCollection": QuantEmbeddingBagCollection,
    "torchrec.modules.embedding_modules.EmbeddingCollection": QuantEmbeddingCollection,
}
"""What `quantize_inference_model` replaces, by TorchRec's name, and by what."""
DEFAULT_QUANTIZATION_DTYPE = torch.int8
"""Of tables that `quantize_inference_model` is told nothing of."""


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Return whether this process is a rank of a group; without a group it is."""
    return pg is None or pg.rank() == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call a function on one rank, and return what it returns on all.

    Args:
        pg: the ranks; each must call this.
        rank: of the group, where the function is called.
        func: returns something that can be pickled.
        *args: of the function.
        **kwargs: of the function.

    Raises:
        Exception: on every rank, what the function raises.
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
    """Decorate a function that one rank calls for all: `invoke_on_rank_and_broadcast_result`."""

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        return functools.partial(invoke_on_rank_and_broadcast_result, pg, rank, function)

    return decorate


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Make what is on `meta` on a device, by `reset_parameters`, and move the rest there."""
    materialize_dense(module, device)
    module.to(device)


def filter_state_dict(state_dict: Mapping[str, Any], name: str) -> OrderedDict[str, Any]:
    """Return the entries below a module, by their names there."""
    start = f"{name}."
    return OrderedDict(
        (key.removeprefix(start), value)
        for key, value in state_dict.items()
        if key.startswith(start)
    )


def append_prefix(prefix: str, name: str) -> str:
    """Return two parts of a path with a dot between them, unless one is empty."""
    return ".".join(part for part in (prefix, name) if part)


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Put a text in front of every name, in place."""
    renamed = {f"{prefix}{key}": value for key, value in state_dict.items()}
    state_dict.clear()
    state_dict.update(renamed)


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return the device of a rank, with its number if there are several on a node."""
    return torch.device(device_type) if device_type == "cpu" else torch.device(device_type, rank)


def get_tensor_size_bytes(t: Tensor) -> int:
    """Return how many bytes the elements of a tensor take."""
    return t.numel() * t.element_size()


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes, of `get_local_size` ranks each."""
    size = ShardingEnv.default().world_size if world_size is None else world_size
    return size // get_local_size(world_size)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of the node that a rank is on; of this process if None."""
    place = ShardingEnv.default().rank if rank is None else rank
    return place // get_local_size(world_size)


def extract_plan(
    search_space: Sequence[ShardingOption], loaded_sharding_options: Mapping[int, ShardingOption]
) -> list[ShardingOption]:
    """Return the options of a search space that were chosen before, with their ranks.

    Args:
        search_space: what can be chosen.
        loaded_sharding_options: what was, by `ShardingOption.storage_hash`.

    Raises:
        PlannerError: two options have one hash, or an option that was chosen cannot be.
    """
    by_hash = {option.storage_hash(): option for option in search_space}
    if len(by_hash) < len(search_space):
        raise PlannerError("The options of a search space must differ; received some twice.")
    missing = [o.name for key, o in loaded_sharding_options.items() if key not in by_hash]
    if missing:
        raise PlannerError(
            f"Options that were chosen before must be in the search space; those of {missing} are "
            "not."
        )
    chosen = [copy.deepcopy(o) for key, o in by_hash.items() if key in loaded_sharding_options]
    for option in chosen:
        before = loaded_sharding_options[option.storage_hash()]
        for shard, known in zip(option.shards, before.shards, strict=True):
            shard.rank = known.rank
    return chosen


class ShardingPlanner(abc.ABC):
    """What makes plans. A class with these methods need not be made from this one."""

    @abc.abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> ShardingPlan:
        """Return a plan, made by this process alone."""

    @abc.abstractmethod
    def collective_plan(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> ShardingPlan:
        """Return one plan on every rank; every rank must call it."""


ShardingPlanner.register(EmbeddingShardingPlanner)


@dataclass
class TorchCompileConfig:
    """How `TrainPipelinePT2` compiles.

    Args:
        fullgraph: as of torch.compile. A model with tables has graph breaks at their lookups.
        dynamic: as of torch.compile.
        backend: as of torch.compile.
        compile_on_iter: number of the step, from 0, before which the model is compiled.
    """

    fullgraph: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    compile_on_iter: int = 3


class TrainPipelinePT2(TrainPipelineBase[Any, Any]):
    """A `TrainPipelineBase` that compiles the model after some steps.

    Args:
        model: as there.
        optimizer: as there.
        device: as there.
        compile_configs: how; as a `TorchCompileConfig` without arguments if None.
        pre_compile_fn: called with the model before it is compiled.
        post_compile_fn: called with the model when it is.
        input_transformer: what the model gets of a batch.
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
        """Make one training step; see `TrainPipeline`."""
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
    """Return the paths of the outermost modules in which nothing is sharded.

    Args:
        model: with sharded modules in it; of one without there are none.
    """
    if not _has_sharded(model):
        return []
    return [path for path, _ in outermost(model, lambda child: not _has_sharded(child))]


@contextmanager
def sharded_model_copy(device: torch.device | str | int | None) -> Iterator[None]:
    """Let `copy.deepcopy` of a DistributedModelParallel, within, put the copy on a device.

    Args:
        device: where copies go; where the model is if None.
    """

    def copied(model: DistributedModelParallel, memo: dict[int, Any]) -> DistributedModelParallel:
        return model.copy(model.device if device is None else torch.device(device))

    with mock.patch.object(DistributedModelParallel, "__deepcopy__", copied):
        yield


def _has_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, ShardedModule) for child in module.modules())


class DataLoadingThread(threading.Thread, Generic[T]):
    """Reads batches ahead, one at a time, and moves them to a device.

    Args:
        device: where batches go.
        dataloader_iter: of batches that have `to`.
        to_device_non_blocking: whether copies from page-locked memory overlap with what follows.
        memcpy_stream_priority: Ignored; batches are copied on the current stream.
        memcpy_stream: a stream to copy on; the current one if None.
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
        """Read until there are no more batches, or `stop` is called."""
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
        """End the thread; batches that were read are dropped."""
        self._is_stopped.set()

    def get_next_batch(self, none_throws: bool = False) -> T | None:
        """Return the next batch, None after the last.

        Args:
            none_throws: whether to raise StopIteration after the last.

        Raises:
            Exception: what reading raised.
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
