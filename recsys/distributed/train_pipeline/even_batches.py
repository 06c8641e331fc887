"""Ranks whose data end at different times finish an epoch together.

A rank looks one batch ahead, and says in the header of the sharded modules (see `input_dist`),
which travels anyway, whether its batch is its last. So after each step every rank knows who goes
on, and all leave the loop at the same step: no step needs a collective more, and none waits for
ever. One small exchange opens an epoch: ranks that have no batch at all hear what an empty one
looks like, and an error of a rank's data is raised on all.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from enum import Enum, unique
from typing import Any, Generic, TypeVar, final

from torch import Tensor, nn

from recsys.distributed.ranks.agreement import agree, run_on_all_ranks
from recsys.distributed.ranks.comm import broadcast_object
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.stages.header import EndOfData
from recsys.distributed.stages.input_dist import InputDist
from recsys.distributed.train_pipeline.batches import map_batch
from recsys.kernels.arguments import choice
from recsys.kernels.checked import checked
from recsys.sparse import KeyedJaggedTensor

B = TypeVar("B")
_START = "start an epoch of EvenBatches"


@unique
class UnevenPolicy(Enum):
    """What happens when some ranks have no more batches and others have."""

    DROP = "drop"
    """The epoch ends for all; what the others still had is not used."""
    PAD = "pad"
    """Ranks that have run out repeat their last batch until all have; its samples count again. A
    rank that had none takes part with empty batches."""
    JOIN = "join"
    """Ranks that have run out take part with empty batches until all have; they add nothing to
    gradients. As ever with different batch sizes, the loss is the mean over ranks of each rank's
    loss."""


@final
class EvenBatches(Generic[B]):
    """Iterates over a rank's batches for as many steps as every other rank.

    In each step call the model once or more with what is yielded.

    Args:
        batches: this rank's batches of an epoch, such as a `DataLoader`; it may have none where
            other ranks have some, but not with the policy "drop".
        model: the model that is called; it contains at least one sharded collection.
        policy: an `UnevenPolicy` or its value, the same on every rank.

    Attributes:
        is_filler: whether the batch of this step was made up: repeated, or empty. Leave such steps
            out of metrics; the mean loss of an empty batch is NaN, and its gradient zero.

    Raises:
        ValueError: if the policy is unknown, the model has no sharded collection or is a
            `DMPCollection` of several groups, no rank has a batch, one has none under "drop", or a
            step passed without a call of the model.
        Exception: on every rank, what the data of one raised in place of a batch: of the first one
            from here, of a later one from the model, which is then called with the batch before.

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
        self, batches: Iterable[B], model: nn.Module, policy: UnevenPolicy | str = UnevenPolicy.DROP
    ) -> None:
        self._batches = batches
        self._policy = choice("EvenBatches.policy", policy, UnevenPolicy)
        self._collections = [
            module for module in model.modules() if isinstance(module, ShardedCollection)
        ]
        if not self._collections:
            raise ValueError(
                "EvenBatches needs a model with a sharded collection, in whose exchanges the ranks "
                f"hear of each other; received a {type(model).__name__} without. Wrap the model in "
                "DistributedModelParallel first."
            )
        if any(stage.module.env.replicas is not None for stage in self._stages):
            raise ValueError(
                "EvenBatches needs ranks that all hear of each other in the exchanges of sharded "
                "modules; received a DMPCollection, in which only the ranks of a group do. Give "
                "every rank equally many batches."
            )
        self.is_filler = False

    @property
    def _stages(self) -> list[InputDist]:
        return [collection.input_stage for collection in self._collections]

    def __iter__(self) -> Iterator[B]:
        batches = iter(self._batches)
        missing: Any = object()
        batch: Any = self._first(batches, missing)
        news = EndOfData()
        before = [stage.end_of_data for stage in self._stages]  # of a loop around this one
        try:
            for stage in self._stages:
                stage.end_of_data = news
            while True:
                late: list[Exception] = []
                try:
                    following = missing if self.is_filler else next(batches, missing)
                except Exception as raised:
                    late, following = [raised], batch
                news.is_last = following is missing
                yield batch
                ended_R = news.pop()
                if not ended_R.size:
                    raise ValueError(
                        "EvenBatches needs the model to be called with each batch, or the ranks "
                        "do not hear of each other; received a step without a call."
                    )
                is_over = ended_R.any() if self._policy is UnevenPolicy.DROP else ended_R.all()
                if is_over:
                    return
                news.errors = late  # the next call of the model raises it on all ranks
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
        """Return this rank's first batch, an empty one if it has none and others have."""
        env = self._stages[0].module.env
        group = env.process_group
        batch: Any = missing
        facts: Exception | dict[str, str] = {"the policy": self._policy.value}
        try:
            batch = next(batches, missing)
        except Exception as error:  # the other ranks hear of it
            if group is None:
                raise
            facts = error
        self.is_filler = batch is missing
        have = [not self.is_filler]
        if group is not None:
            have = agree(group, _START, facts, have[0])
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
                f"EvenBatches with the policy 'drop' ends with the first rank that runs out; "
                f"received no batch at all on ranks {without}, so no rank would train. Take "
                "'join', or give each rank data."
            )
        source = have.index(True)

        def sample() -> bytes:
            return pickle.dumps(empty_batch(batch)) if env.rank == source else b""

        packed = run_on_all_ranks(env, _START, sample)  # an error of the source is raised on all
        received = broadcast_object(group, _START, packed, source)
        if not self.is_filler:
            return batch
        # what lay on the GPU of the source goes to that of this rank
        device = self._stages[0].module.device
        return map_batch(
            pickle.loads(received),
            lambda part: isinstance(part, Tensor) and part.is_cuda,
            lambda part: part.to(device),
        )


def empty_batch(batch: B) -> B:
    """Return a batch of the same kind without samples.

    Args:
        batch: tensors with samples first, jagged tensors, and dataclasses, tuples, lists and dicts
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
    if isinstance(part, KeyedJaggedTensor):
        return _empty_features(part)
    return part[:0] if part.dim() else part


def _empty_features(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights, inverse = features.weights_or_none(), features.inverse_indices_or_none()
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        features.values()[:0],
        None if weights is None else weights[:0],
        features.lengths()[:0],
        stride=None if variable else 0,
        stride_per_key_per_rank=[[0]] * len(features.keys()) if variable else None,
        inverse_indices=None if inverse is None else (inverse[0], inverse[1][:, :0]),
    )
