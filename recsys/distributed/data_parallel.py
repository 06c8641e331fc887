"""Dense parameters replicated by DistributedDataParallel, with gradient buckets in fixed order."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from recsys.base.arguments import whole
from recsys.base.checked import check_fields
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.shard import exclude_sharded_from_ddp, names_excluded_from_ddp
from recsys.optim.apply_optimizer_in_backward import attached_optimizer

if TYPE_CHECKING:
    from recsys.distributed.model_parallel import DistributedModelParallel

__all__ = ["DataParallelWrapper", "DefaultDataParallelWrapper"]

# torch 2.13 renamed `broadcast_buffers` and warns of the old name
_BROADCAST_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


class DataParallelWrapper(Protocol):
    """Wrapper that replicates the dense parameters of a model."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the inner module of `dmp` in place."""


@final
@dataclass(eq=False)
class DefaultDataParallelWrapper:
    """Wrapper that replicates trainable dense parameters by DistributedDataParallel.

    Args:
        bucket_cap_mb: Size of a gradient bucket in MB.
        static_graph: Whether every step uses the same parameters.
        find_unused_parameters: Whether some steps do not use all dense parameters.
        params_to_ignore: Names of parameters and buffers that are neither copied from rank 0 nor
            reduced. Names passed to
            `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model` are ignored too.
        broadcast_buffers: Whether the buffers of rank 0 are copied to other ranks before every
            forward pass, which costs a collective. None: only if the model has a batch or instance
            norm with running statistics.

    Raises:
        ValueError: When the model is wrapped, if `params_to_ignore` has an unknown name, or a dense
            parameter is updated in backward.
    """

    bucket_cap_mb: int = 25
    static_graph: bool = False
    find_unused_parameters: bool = False
    params_to_ignore: Sequence[str] | None = field(default=None, kw_only=True)
    broadcast_buffers: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_fields(self)
        whole("DefaultDataParallelWrapper.bucket_cap_mb", self.bucket_cap_mb)

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        """Wrap the inner module in place if there are several ranks and dense parameters."""
        module = dmp._dmp_wrapped_module
        if env.world_size == 1 or isinstance(module, DistributedDataParallel):
            return
        everything = dict(module.named_parameters()) | dict(module.named_buffers())
        ignored = list(self.params_to_ignore or ())
        unknown = [name for name in ignored if name not in everything]
        if unknown:
            raise ValueError(
                "DefaultDataParallelWrapper.params_to_ignore must have names of the model's "
                f"parameters and buffers; received {unknown}. The model has "
                f"{list(everything)[:8]} (at most 8 shown)."
            )
        exclude_sharded_from_ddp(module, ignored)
        excluded = names_excluded_from_ddp(module)
        dense = {n: t for n, t in everything.items() if n not in excluded}
        if not any(t.requires_grad for t in dense.values()):
            for tensor in dense.values():  # not trained, but equal to rank 0's
                torch.distributed.broadcast(tensor.data, group=env.process_group, group_src=0)
            return
        in_backward = [n for n in dense if attached_optimizer(everything[n]) is not None]
        if in_backward:
            raise ValueError(
                "Replicated parameters need their gradients for the all-reduce over ranks; "
                f"received parameters that are updated in backward: {in_backward}. Call "
                "apply_optimizer_in_backward with the tables only."
            )
        broadcasts = self.broadcast_buffers
        if broadcasts is None:
            broadcasts = any(_has_running_statistics(child) for child in module.modules())
        settings: dict[str, Any] = {_BROADCAST_BUFFERS: broadcasts}
        dmp._dmp_wrapped_module = FixedOrderDataParallel(
            module,
            device_ids=None if device.type == "cpu" else [device],
            process_group=env.process_group,
            gradient_as_bucket_view=True,
            **settings,
            bucket_cap_mb=self.bucket_cap_mb,
            static_graph=self.static_graph,
            find_unused_parameters=self.find_unused_parameters,
        )
        dmp._dmp_wrapped_module.training = module.training


@final
class FixedOrderDataParallel(DistributedDataParallel):
    """DistributedDataParallel with the same buckets in every step of every process.

    DistributedDataParallel reduces the first step of a process in one bucket, and later steps in
    buckets in the order in which gradients became ready in the first step. An all-reduce sums the
    ranks' values in an order that depends on the position in the bucket. On three or more ranks a
    restarted job would thus not repeat the steps bit for bit. This class makes the final buckets at
    once, in the reverse order of the parameters: about the order in which gradients become ready.

    With `find_unused_parameters` alone torch itself makes the buckets only once.

    Args:
        args: Arguments of DistributedDataParallel.
        kwargs: Arguments of DistributedDataParallel.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        unused, static = (kwargs.get(key) for key in ("find_unused_parameters", "static_graph"))
        self._rebuilds_buckets = static or not unused
        super().__init__(*args, **kwargs)
        if not self._rebuilds_buckets:
            return
        self.reducer._push_all_rebuilt_params()  # the order of ready gradients
        self.reducer._rebuild_buckets()

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return the omitted part of names, for `torch.distributed.checkpoint`."""
        return {"": "module"}

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if not self._rebuilds_buckets:
            return parameters, expect_sparse_gradient
        return parameters[::-1], expect_sparse_gradient[::-1]


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
