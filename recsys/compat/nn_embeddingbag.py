"""`torch.nn.EmbeddingBag` sharded over ranks, as a collection of one table.

Each bag module has its own exchanges; an EmbeddingBagCollection has one for all its tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from recsys.base.checked import checked
from recsys.distributed.embeddingbag import ShardedEmbeddingBagCollection
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.sharder import CollectionSharder
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.state.table_shards import TableShards
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType, dtype_to_data_type
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.tables.eager import run_eagerly
from recsys.modules.tables.embedding_table import TableDict
from recsys.sparse import KeyedJaggedTensor

_TABLE = "weight"
"""Name of the table, in plans and in the state dict."""
_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


class _OneTable(EmbeddingBagCollection):
    """Collection with the parameter of an `nn.EmbeddingBag`."""

    def __init__(self, bag: nn.EmbeddingBag, is_weighted: bool) -> None:
        odd = {
            name: value
            for name in ("max_norm", "scale_grad_by_freq")
            if (value := getattr(bag, name))
        }
        if bag.mode not in _POOLINGS or odd:
            raise ValueError(
                "A sharded nn.EmbeddingBag must have mode 'sum' or 'mean', no max_norm and "
                f"no scale_grad_by_freq; received mode {bag.mode!r} and {odd or 'none of those'}. "
                "Omit EmbeddingBagSharder in the sharders to replicate it."
            )
        self.call_settings = bag.mode, bag.padding_idx, bag.include_last_offset
        config = EmbeddingBagConfig(
            bag.num_embeddings,
            bag.embedding_dim,
            _TABLE,
            dtype_to_data_type(bag.weight.dtype),
            ["input"],
            init_fn=nn.init.normal_,  # initial values of a bag on the meta device
            pooling=_POOLINGS[bag.mode],
        )
        super().__init__([config], is_weighted and bag.mode == "sum", torch.device("meta"))
        self.embedding_bags[_TABLE].weight = bag.weight


@final
class ShardedEmbeddingBag(ShardedEmbeddingBagCollection):
    """`torch.nn.EmbeddingBag` that is sharded over ranks, made by `EmbeddingBagSharder`.

    Its output, gradients, weight and state dict equal the unsharded bag's under any plan. Every
    rank calls it with its own bags, even if it has none. With a `padding_idx` the host waits for a
    GPU once more per call.
    """

    unsharded_module_type = nn.EmbeddingBag

    def _adopt(self, module: Any) -> None:
        super()._adopt(module)
        self._call_settings: tuple[str, int | None, bool] = module.call_settings

    def forward(  # type: ignore[override]
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> LazyAwaitable[Tensor]:
        """Look up and pool this rank's bags.

        Args:
            input: int32 or int64 ids: `[N]` with `offsets`, or bags of one size `[B, n]`.
            offsets: `[B]` first id of each bag; `[B + 1]` with `include_last_offset`.
            per_sample_weights: Weight of each id, in the shape of `input`; None for 1.

        Returns:
            A pending `[B, embedding_dim]` in the plan's `output_dtype`, by default the dtype of the
            weight.

        Raises:
            IndexError: On every rank, if an id on any rank is outside the table. On a GPU without
                other ranks it may be raised later, as in `ShardedCollection`.
            TypeError: On every rank, if ids are not integers.
            ValueError: On every rank, if shapes or offsets of a rank do not fit, or weights are
                passed to a bag without weights.
        """
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(self, input, offsets, per_sample_weights)  # type: ignore[no-any-return]
        pooled: LazyAwaitable[Tensor] = super().forward(
            self._features_of(input, offsets, per_sample_weights)
        )
        return pooled

    def input_dist(  # type: ignore[override]
        self,
        ctx: BatchContext,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Start the header exchange of a batch; see `ShardedCollection`.

        Args:
            ctx: A new context.
            input: Ids, as for `forward`.
            offsets: First id of each bag.
            per_sample_weights: Weight of each id.
        """
        return super().input_dist(ctx, self._features_of(input, offsets, per_sample_weights))

    def output_dist(self, ctx: BatchContext, output: Iterable[Tensor]) -> LazyAwaitable[Tensor]:
        """Start sending embeddings to the ranks of their samples; see `ShardedCollection`."""
        pooled = super().output_dist(ctx, output)
        dtype = self._settings.plan[_TABLE].output_dtype or self._table.dtype
        return LazyAwaitable(lambda: pooled.wait().values().to(dtype))

    def _features_of(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> KeyedJaggedTensor:
        mode, padding_idx, include_last_offset = self._call_settings
        try:
            if input.dim() == 2 and offsets is None:
                offsets = torch.arange(input.size(0) + 1, device=input.device) * input.size(1)
            elif input.dim() == 1 and offsets is not None and offsets.dim() == 1:
                if not include_last_offset:
                    offsets = torch.cat([offsets, offsets.new_full((1,), input.numel())])
            else:
                shape = None if offsets is None else list(offsets.shape)
                raise ValueError(
                    "An EmbeddingBag needs ids [N] with offsets [B], or ids [B, n] alone; "
                    f"received ids {list(input.shape)} and offsets {shape}."
                )
            if weights is not None and (not self._is_weighted or weights.shape != input.shape):
                raise ValueError(
                    "per_sample_weights need mode='sum', a sharder made with is_weighted=True, and "
                    f"the shape of the ids; received mode {mode!r}, weights "
                    f"{list(weights.shape)} and ids {list(input.shape)}."
                )
            values = input.flatten()
            if self._is_weighted:
                weights = torch.ones_like(values) if weights is None else weights.flatten()
                weights = weights.float()
            features = KeyedJaggedTensor(["input"], values, weights, offsets=offsets)
            if padding_idx is None:
                return features
            features.check_bags()
            kept = values != padding_idx
            offsets = nn.functional.pad(kept.cumsum(0), (1, 0))[offsets]
            weights = None if weights is None else weights[kept]
            return KeyedJaggedTensor(["input"], values[kept], weights, offsets=offsets)
        except Exception as error:  # the input stage raises it on every rank
            return cast(KeyedJaggedTensor, error)

    # -- names: the table's weight is a parameter of the module -----------------------------------

    @property
    def _table(self) -> TableShards:
        return self._stages.tables[_TABLE]

    def _hold_tables(self, tables: TableDict) -> None:
        """Add no submodule; `named_modules` yields the table."""

    def _weight_name(self, table: str) -> str:
        return "weight"

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module, and its table by the same name."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        yield from self._table.named_modules(memo, prefix, remove_duplicate)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._table._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._table._load_from_state_dict(*args)


class EmbeddingBagSharder(CollectionSharder[nn.EmbeddingBag, ShardedEmbeddingBag]):
    """Sharder of `torch.nn.EmbeddingBag`; it is not a default sharder, so pass it.

    Args:
        fused_params: Optimizer settings for weights without an attached optimizer.
        qcomm_codecs_registry: Wire formats of embeddings and gradients, from
            `get_qcomm_codecs_registry`; None for the dtype of the values.
        is_weighted: Whether bags of `mode="sum"` can be called with `per_sample_weights`.
            False saves 4 bytes per id on the wire.

    Example:
        >>> from recsys.distributed.model_parallel import DistributedModelParallel
        >>> model = nn.Sequential(nn.EmbeddingBag(10, 4, mode="sum"), nn.Linear(4, 1))
        >>> model = DistributedModelParallel(
        ...     model, device=torch.device("cpu"), sharders=[EmbeddingBagSharder()]
        ... )
        >>> list(model.state_dict()), model(torch.tensor([[1, 2], [3, 4]])).shape
        (['0.weight', '1.weight', '1.bias'], torch.Size([2, 1]))
    """

    replaces = nn.EmbeddingBag
    makes = ShardedEmbeddingBag

    @checked
    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        *,
        is_weighted: bool = True,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._is_weighted = is_weighted

    def _collection_of(self, module: nn.EmbeddingBag) -> _OneTable:
        return _OneTable(module, self._is_weighted)

    def shardable_parameters(self, module: nn.EmbeddingBag) -> dict[str, nn.Parameter]:
        """Return the weight by its name in plans: `{"weight": module.weight}`."""
        return {_TABLE: cast(nn.Parameter, module.weight)}
