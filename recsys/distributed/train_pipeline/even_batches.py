"""Epochs that end at the same step on all ranks, even if ranks have different numbers of batches.

A rank reads one batch ahead. A flag in the header of its sharded modules (see `input_dist`) marks
its last batch, so after each step every rank knows which ranks continue; no step needs another
collective. One small exchange starts an epoch: ranks without data receive an empty batch, and an
error of one rank's data is raised on all ranks.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from enum import Enum, unique
from typing import Any, Generic, TypeVar, final

from torch import Tensor, nn

from recsys.base.arguments import choice
from recsys.base.checked import checked
from recsys.distributed.ranks.agreement import agree, run_on_all_ranks
from recsys.distributed.ranks.comm import broadcast_object
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.stages.header import EndOfData
from recsys.distributed.stages.input_dist import InputDist
from recsys.distributed.train_pipeline.batches import map_batch
from recsys.sparse import KeyedJaggedTensor

B = TypeVar("B")
_START = "start an epoch of EvenBatches"


@unique
class UnevenPolicy(Enum):
    """Policy for the end of an epoch if some ranks have more batches than others."""

    DROP = "drop"
    """The epoch ends on all ranks; remaining batches are not used."""
    PAD = "pad"
    """A rank without more batches repeats its last batch, whose samples count again. A rank
    without any batch uses empty ones."""
    JOIN = "join"
    """A rank without more batches uses empty ones, which add nothing to gradients. The loss is the
    mean over ranks of each rank's loss, as for all batches of different sizes."""


@final
class EvenBatches(Generic[B]):
    """Iterator over a rank's batches that yields the same number of batches on every rank.

    In each step call the model with the yielded batch, once or more.

    Args:
        batches: Batches of this rank in an epoch, such as a `DataLoader`. It may be empty if other
            ranks have batches, except with the policy "drop".
        model: The model to call; it contains a sharded collection.
        policy: An `UnevenPolicy` or its value, the same on every rank.
        may_be_empty: Whether data may have ended already, as in an epoch that is resumed: then
            nothing is yielded, instead of an error.

    Attributes:
        is_filler: Whether the batch of this step is repeated or empty. Leave such steps out of
            metrics; the mean loss of an empty batch is NaN, and its gradient zero.

    Raises:
        ValueError: If the policy is unknown; if the model has no sharded collection or is a
            `DMPCollection` of several groups; if no rank has a batch, or one has none with "drop";
            if the model was not called in a step.
        Exception: On every rank, an error of the data of any rank. The iterator raises an error of
            the first batch; the model raises later errors when it is called with the batch before.

    Example:
        >>> import torch
        >>> from recsys.distributed.model_parallel import DistributedModelParallel
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        ... )
        >>> model = DistributedModelParallel(
        ...     EmbeddingBagCollection(tables=[table]), device=torch.device("cpu")
        ... )
        >>> batch = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
        >>> [list(model(ids).values().shape) for ids in EvenBatches([batch] * 2, model, "join")]
        [[1, 4], [1, 4]]
    """

    @checked
    def __init__(
        self,
        batches: Iterable[B],
        model: nn.Module,
        policy: UnevenPolicy | str = UnevenPolicy.DROP,
        *,
        may_be_empty: bool = False,
    ) -> None:
        self._batches, self._may_be_empty = batches, may_be_empty
        self._policy = choice("EvenBatches.policy", policy, UnevenPolicy)
        self._collections = [
            module for module in model.modules() if isinstance(module, ShardedCollection)
        ]
        if not self._collections:
            raise ValueError(
                "EvenBatches needs a model with a sharded collection, whose headers mark the last "
                f"batch; received a {type(model).__name__} without one. Wrap the model in "
                "DistributedModelParallel first."
            )
        if any(stage.module.env.replicas is not None for stage in self._stages):
            raise ValueError(
                "EvenBatches does not support a DMPCollection of several groups, which exchange "
                "headers separately. Give every rank the same number of batches."
            )
        self.is_filler = False

    @property
    def _stages(self) -> list[InputDist]:
        return [collection.input_stage for collection in self._collections]

    def __iter__(self) -> Iterator[B]:
        batches = iter(self._batches)
        missing: Any = object()
        batch: Any = self._first(batches, missing)
        if batch is missing:
            return
        end_of_data = EndOfData()
        before = [stage.end_of_data for stage in self._stages]  # of a loop around this one
        try:
            for stage in self._stages:
                stage.end_of_data = end_of_data
            while True:
                late: list[Exception] = []
                try:
                    following = missing if self.is_filler else next(batches, missing)
                except Exception as raised:
                    late, following = [raised], batch
                end_of_data.is_last = following is missing
                yield batch
                ended_R = end_of_data.pop()
                if not ended_R.size:
                    raise ValueError(
                        "EvenBatches needs a call of the model with each batch, which exchanges "
                        "the end-of-data flags; received a step without a call."
                    )
                is_over = ended_R.any() if self._policy is UnevenPolicy.DROP else ended_R.all()
                if is_over:
                    return
                end_of_data.errors = late  # raised on all ranks by the next call of the model
                if following is not missing:
                    batch = following
                elif not self.is_filler:
                    self.is_filler = True
                    if self._policy is UnevenPolicy.JOIN:
                        batch = empty_batch(batch)
        finally:
            self.is_filler = False
            for stage, outer in zip(self._stages, before, strict=True):
                stage.end_of_data = outer

    def _first(self, batches: Iterator[B], missing: Any) -> Any:  # B
        """Return this rank's first batch, an empty one if only other ranks have one."""
        env = self._stages[0].module.env
        group = env.process_group
        batch: Any = missing
        facts: Exception | dict[str, str] = {"the policy": self._policy.value}
        try:
            batch = next(batches, missing)
        except Exception as error:  # raised on every rank
            if group is None:
                raise
            facts = error
        self.is_filler = batch is missing
        have = [not self.is_filler]
        if group is not None:
            have = agree(group, _START, facts, have[0])
        is_over = not all(have) if self._policy is UnevenPolicy.DROP else not any(have)
        if is_over and self._may_be_empty:
            self.is_filler = False
            return missing
        if not any(have):
            raise ValueError(
                "EvenBatches needs at least one batch; received none"
                f"{' on any rank' if len(have) > 1 else ''}. Give it data."
            )
        if all(have) or group is None:
            return batch
        without = [rank for rank, has in enumerate(have) if not has]
        if self._policy is UnevenPolicy.DROP:
            raise ValueError(
                "EvenBatches with the policy 'drop' needs a batch on every rank; received none on "
                f"ranks {without}. Use the policy 'join', or give each rank data."
            )
        source = have.index(True)

        def sample() -> bytes:
            return pickle.dumps(empty_batch(batch)) if env.rank == source else b""

        packed = run_on_all_ranks(env, _START, sample)  # an error of the source is raised on all
        received = broadcast_object(group, _START, packed, source)
        if not self.is_filler:
            return batch
        # tensors of the source's GPU move to the GPU of this rank
        device = self._stages[0].module.device
        return map_batch(
            pickle.loads(received),
            lambda part: isinstance(part, Tensor) and part.is_cuda,
            lambda part: part.to(device),
        )


def empty_batch(batch: B) -> B:
    """Return a batch of the same structure without samples.

    Args:
        batch: Tensors with samples first, jagged tensors, and dataclasses, tuples, lists and dicts
            of them.

    Example:
        >>> import torch
        >>> ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
        >>> dense, empty = empty_batch((torch.ones(2, 3), ids))
        >>> dense.shape, empty.stride(), empty.keys()
        (torch.Size([0, 3]), 0, ['f'])
    """
    return map_batch(batch, lambda part: isinstance(part, Tensor | KeyedJaggedTensor), _empty)


def _empty(part: Tensor | KeyedJaggedTensor) -> Tensor | KeyedJaggedTensor:
    if isinstance(part, Tensor):
        return part[:0] if part.dim() else part
    weights, inverse = part.weights_or_none(), part.inverse_indices_or_none()
    variable = part.variable_stride_per_key()
    return KeyedJaggedTensor(
        part.keys(),
        part.values()[:0],
        None if weights is None else weights[:0],
        part.lengths()[:0],
        stride=None if variable else 0,
        stride_per_key_per_rank=[[0]] * len(part.keys()) if variable else None,
        inverse_indices=None if inverse is None else (inverse[0], inverse[1][:, :0]),
    )
