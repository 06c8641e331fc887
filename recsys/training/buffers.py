"""Buffers whose values differ between ranks, such as running means: comparison, save and load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final
from zlib import crc32

import torch
from torch import Tensor, nn

from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.comm import gather_objects
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.shard import sharded_names


@final
class OwnBuffers:
    """Buffers of this rank that differ from rank 0, such as running sums of the rank's batches.

    A checkpoint contains the buffers of rank 0. A job that resumes also needs the buffers of other
    ranks, unless DistributedDataParallel copies rank 0's before each forward pass.

    Args:
        model: The model.
        env: The ranks.

    Example:
        >>> own = OwnBuffers(nn.BatchNorm1d(2), ShardingEnv.default())
        >>> own.compare()
        >>> own.state_dict()  # one rank
        {}
    """

    def __init__(self, model: nn.Module, env: ShardingEnv) -> None:
        self._model, self._env = model, env
        self._names: list[str] = []

    def compare(self) -> None:
        """Find the buffers that differ from rank 0, before a save; every rank calls it."""
        if self._env.world_size == 1 or not (buffers := dict(_buffers_of(self._model))):
            return
        checksums = {name: _checksum_of(buffer) for name, buffer in buffers.items()}
        first = gather_objects(self._env.process_group, "compare buffers", checksums)[0]
        self._names = [name for name, checksum in checksums.items() if checksum != first.get(name)]

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers that differ, by name."""
        buffers = dict(_buffers_of(self._model))
        return {name: buffers[name].detach().clone() for name in self._names}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Fill the buffers that differed."""
        buffers = dict(_buffers_of(self._model))
        for name, value in state_dict.items():
            buffers[name].copy_(value)

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Do nothing: on another number of ranks all start with the buffers of rank 0."""


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers of the state dict that are not sharded."""
    unwrapped = get_unwrapped_module(model)
    sharded = sharded_names(unwrapped)
    for path, module in unwrapped.named_modules():
        for key, buffer in module._buffers.items():
            name = f"{path}.{key}" if path else key
            is_saved = key not in module._non_persistent_buffers_set and name not in sharded
            if buffer is not None and is_saved:
                yield name, buffer


def _checksum_of(value: Tensor) -> int:
    host = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return crc32(host.numpy().data)
