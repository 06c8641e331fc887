"""A plain `torch.nn.EmbeddingBag` placed on many ranks: a collection of one table.

Each bag is an exchange of its own; an EmbeddingBagCollection makes one of all its tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from recsys.distributed.embeddingbag import ShardedEmbeddingBagCollection
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.sharder import CollectionSharder
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.checked import checked
from recsys.modules.eager import run_eagerly
from recsys.modules.embedding_configs import EmbeddingBagConfig, PoolingType, dtype_to_data_type
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.embedding_table import TableDict
from recsys.sparse import KeyedJaggedTensor

_TABLE = "weight"
"""The name of the one table, in plans and in the state dict."""
_POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


@final
class _Settings(NamedTuple):
    """What a call of an `nn.EmbeddingBag` depends on."""

    mode: str
    padding_idx: int | None
    include_last_offset: bool
    is_weighted: bool


class _OneTable(EmbeddingBagCollection):
    """A bag as a collection with the bag's own parameter."""

    def __init__(self, bag: nn.EmbeddingBag, is_weighted: bool) -> None:
        odd = {
            name: value
            for name in ("max_norm", "scale_grad_by_freq")
            if (value := getattr(bag, name))
        }
        if bag.mode not in _POOLINGS or odd:
            raise ValueError(
                "An nn.EmbeddingBag to be sharded must have mode 'sum' or 'mean', no max_norm and "
                f"no scale_grad_by_freq; received mode {bag.mode!r} and {odd or 'none of those'}. "
                "Leave it out of the plan's sharders: it is replicated then."
            )
        self.settings = _Settings(
            bag.mode, bag.padding_idx, bag.include_last_offset, is_weighted and bag.mode == "sum"
        )
        config = EmbeddingBagConfig(
            bag.num_embeddings,
            bag.embedding_dim,
            _TABLE,
            dtype_to_data_type(bag.weight.dtype),
            ["input"],
            init_fn=nn.init.normal_,  # what a bag on the meta device starts from
            pooling=_POOLINGS[bag.mode],
        )
        super().__init__([config], self.settings.is_weighted, torch.device("meta"))
        self.embedding_bags[_TABLE].weight = bag.weight


@final
class ShardedEmbeddingBag(ShardedEmbeddingBagCollection):
    """A `torch.nn.EmbeddingBag` placed on many ranks.

    Its output, gradients, weight and state dict are those of the unsharded bag, whatever the plan.
    Every rank calls it with its own bags, also when it has none. Its sharder makes it. With a
    `padding_idx` a call on a GPU waits for the device once more.
    """

    unsharded_module_type = nn.EmbeddingBag

    def _adopt(self, module: Any) -> None:
        super()._adopt(module)
        self.settings: _Settings = module.settings

    def forward(  # type: ignore[override]
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> LazyAwaitable[Tensor]:
        """Look up and pool this rank's bags.

        Args:
            input: int32 or int64 ids: `[N]` with `offsets`, or bags of one size `[B, n]`.
            offsets: `[B]` where each bag begins; `[B + 1]` with `include_last_offset`.
            per_sample_weights: one for each id, in the shape of `input`; None: all 1.

        Returns:
            A pending `[B, embedding_dim]`, in the dtype of the weight, or the plan's
            `output_dtype` if it names one.

        Raises:
            IndexError: on every rank, if an id on any rank is outside the table; on a GPU without
                other ranks maybe later, as of `ShardedCollection`.
            TypeError: on every rank, if ids are not integers.
            ValueError: on every rank, if shapes or offsets of a rank do not fit, or weights come
                where the bag takes none.
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
        """Start to tell the ranks that own rows how many ids come; see the base class.

        Args:
            ctx: a new context.
            input: as for `forward`, like the others.
            offsets: where each bag begins.
            per_sample_weights: one for each id.
        """
        return super().input_dist(ctx, self._features_of(input, offsets, per_sample_weights))

    def output_dist(self, ctx: BatchContext, output: Iterable[Tensor]) -> LazyAwaitable[Tensor]:
        """Start sending embeddings to the samples' ranks; see the base class."""
        pooled = super().output_dist(ctx, output)
        dtype = self._settings.plan[_TABLE].output_dtype or self._table.dtype
        return LazyAwaitable(lambda: pooled.wait().values().to(dtype))

    def _features_of(
        self, input: Tensor, offsets: Tensor | None, weights: Tensor | None
    ) -> KeyedJaggedTensor:
        try:
            if input.dim() == 2 and offsets is None:
                offsets = torch.arange(input.size(0) + 1, device=input.device) * input.size(1)
            elif input.dim() == 1 and offsets is not None and offsets.dim() == 1:
                if not self.settings.include_last_offset:
                    offsets = torch.cat([offsets, offsets.new_full((1,), input.numel())])
            else:
                shape = None if offsets is None else list(offsets.shape)
                raise ValueError(
                    "An EmbeddingBag takes ids [N] with offsets [B], or ids [B, n] without; "
                    f"received ids {list(input.shape)} and offsets {shape}."
                )
            if weights is not None and (
                not self.settings.is_weighted or weights.shape != input.shape
            ):
                raise ValueError(
                    "per_sample_weights need mode='sum', a sharder made with is_weighted=True, and "
                    f"the shape of the ids; received mode {self.settings.mode!r}, weights "
                    f"{list(weights.shape)} and ids {list(input.shape)}."
                )
            values = input.flatten()
            if self.settings.is_weighted:
                weights = torch.ones_like(values) if weights is None else weights.flatten()
                weights = weights.float()
            features = KeyedJaggedTensor(["input"], values, weights, offsets=offsets)
            if self.settings.padding_idx is None:
                return features
            features.check_bags()
            kept = values != self.settings.padding_idx
            offsets = nn.functional.pad(kept.cumsum(0), (1, 0))[offsets]
            weights = None if weights is None else weights[kept]
            return KeyedJaggedTensor(["input"], values[kept], weights, offsets=offsets)
        except Exception as error:  # the input stage raises it on every rank
            return cast(KeyedJaggedTensor, error)

    # -- names: the table's weight is the module's ------------------------------------------------

    @property
    def _table(self) -> TableShards:
        return self._stages.tables[_TABLE]

    def _hold_tables(self, tables: TableDict) -> None:
        """Hold no submodule: `named_modules` has the table."""

    def _weight_name(self, table: str) -> str:
        return "weight"

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield this module and its table by the same name, which is why parameters have it."""
        memo = set() if memo is None else memo
        yield from super().named_modules(memo, prefix, remove_duplicate)
        yield from self._table.named_modules(memo, prefix, remove_duplicate)

    def _save_to_state_dict(self, *args: Any) -> None:
        self._table._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._table._load_from_state_dict(*args)


class EmbeddingBagSharder(CollectionSharder[nn.EmbeddingBag, ShardedEmbeddingBag]):
    """Shards `torch.nn.EmbeddingBag`; not among the default sharders, so name it.

    Args:
        fused_params: optimizer settings for weights that have no optimizer attached; see
            `EmbeddingBagCollectionSharder`.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel, from
            `get_qcomm_codecs_registry`; None: as they are.
        is_weighted: whether bags of `mode="sum"` can be called with `per_sample_weights`.
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
        """Return the weight, by the name it has in plans: `{"weight": module.weight}`."""
        return {_TABLE: cast(nn.Parameter, module.weight)}
