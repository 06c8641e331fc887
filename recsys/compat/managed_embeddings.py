"""TorchRec's managed collision embedding collections, over tables with hashed ids."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, final

import torch
from torch import Tensor, nn

from recsys.compat.features_as_rows import BagsWithRows, SequencesWithRows, hashed
from recsys.compat.managed_collisions import ManagedCollisionCollection
from recsys.distributed.default_sharders import add_default_sharder
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
)
from recsys.distributed.placement.plan import ParameterSharding, ShardingType
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable, NoWait
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.sharder import ModuleSharder, ShardedModule
from recsys.distributed.stages.batch import BatchContext
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.eager import run_eagerly
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.modules.tables.table_lookups import new_weights
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor

ShrdCtx = TypeVar("ShrdCtx", bound=BatchContext)


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """Embedding collection whose tables have hashed ids, by the rules of managed collision modules.

    It changes the given collection: its tables get the rules, whole lines of 64 rows per region,
    and new initial values. Their parameters and optimizers in backward stay. To train, they need an
    optimizer in backward (`apply_optimizer_in_backward`), or `DistributedModelParallel`.

    Args:
        embedding_module: The collection.
        managed_collision_collection: Modules of its tables.
        return_remapped_features: Return rows in place of ids too.
        allow_in_place_embed_weight_update: Without an effect.

    Raises:
        ValueError: The tables of the two differ; or rows are to be returned, and two tables read a
            feature.
    """

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        hashed_configs = managed_collision_collection.embedding_configs()
        if embedding_module.configs() != hashed_configs:
            raise ValueError(
                "managed_collision_collection must have the tables of the embedding collection in "
                f"its order; received {[c.name for c in hashed_configs]} for "
                f"{[c.name for c in embedding_module.configs()]}. Pass both the same configs."
            )
        names = [feature for config in hashed_configs for feature in config.feature_names]
        if return_remapped_features and len(set(names)) < len(names):
            raise ValueError(
                "return_remapped_features must be False if two tables read a feature; received "
                f"the features {names}. Put the feature into the batch once for each table."
            )
        self._return_remapped_features = return_remapped_features
        self._embedding_module = embedding_module  # before the other, for copies
        self._managed_collision_collection = managed_collision_collection
        _set_rules(embedding_module, managed_collision_collection)

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[Any, KeyedJaggedTensor | None]:
        """Look up a batch of any 64-bit ids; in training mode, new ids get rows.

        Args:
            features: int32 or int64 ids of all features of the tables.
            mutate_miss_lengths: Without an effect: unknown ids read a row, and lengths stay.

        Returns:
            The output of the embedding collection; and, with `return_remapped_features`, the
            features of the tables, in order, with the rows that were read, else None.

        Raises:
            ValueError: The tables are trained without an optimizer in backward.
        """
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(self, features)  # type: ignore[no-any-return]
        collection = self._managed_collision_collection
        embeddings = self._embedding_module(hashed(features, collection.hash_functions()))
        if not self._return_remapped_features:
            return embeddings, None
        return embeddings, collection(features)

    def split(self) -> tuple[TableCollection, ManagedCollisionCollection, bool]:
        """Return the embedding collection, the modules, and whether rows are returned."""
        modules = self._managed_collision_collection
        return self._embedding_module, modules, self._return_remapped_features


@final
class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """`EmbeddingBagCollection` whose tables have hashed ids; see the base class.

    Args:
        embedding_bag_collection: The collection.
        managed_collision_collection: Modules of its tables.
        return_remapped_features: Return rows in place of ids too.
        allow_in_place_embed_weight_update: Without an effect.

    Example:
        >>> from recsys import EmbeddingBagConfig
        >>> from recsys.compat.managed_collisions import HashZchManagedCollisionModule
        >>> table = EmbeddingBagConfig(100, 4, "users", feature_names=["user"])
        >>> module = HashZchManagedCollisionModule(100, torch.device("cpu"), 1)
        >>> ebc = ManagedCollisionEmbeddingBagCollection(
        ...     EmbeddingBagCollection([table]),
        ...     ManagedCollisionCollection({"users": module}, [table]),
        ... )
        >>> batch = KeyedJaggedTensor(["user"], torch.tensor([-7]), lengths=torch.tensor([1]))
        >>> pooled, rows = ebc.eval()(batch)
        >>> pooled.values().shape, rows
        (torch.Size([1, 4]), None)
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection, managed_collision_collection, return_remapped_features
        )

    @property
    def _embedding_bag_collection(self) -> Any:
        return self._embedding_module  # used by code for TorchRec


@final
class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """`EmbeddingCollection` whose tables have hashed ids; see the base class.

    Args:
        embedding_collection: The collection.
        managed_collision_collection: Modules of its tables.
        return_remapped_features: Return rows in place of ids too.
        allow_in_place_embed_weight_update: Without an effect.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection, managed_collision_collection, return_remapped_features
        )

    @property
    def _embedding_collection(self) -> Any:
        return self._embedding_module  # used by code for TorchRec


@torch.no_grad()
def _set_rules(tables: TableCollection, modules: ManagedCollisionCollection) -> None:
    """Give tables the rules of their modules, in place, so that their parameters stay."""
    rules = [module.ids for _, module in modules.modules_by_table()]
    tables._configs = [
        replace(config, ids=ids) for config, ids in zip(tables._configs, rules, strict=True)
    ]
    weights = new_weights(tables._configs, tables.poolings(), tables.device)
    for config, table, weight in zip(tables._configs, tables._tables(), weights, strict=True):
        table.weight.data, table.num_embeddings = weight, config.num_embeddings
        table.index = TableIndex(config, weight.device)
    tables._lookups, tables._saved_states = None, {}
    tables._fill()
    modules.bind(tables._configs, tables._tables())


# -- sharded --------------------------------------------------------------------------------------


class ManagedCollisionCollectionSharder:
    """Accepted by the sharders below, without an effect: tables are sharded with their ids.

    Args:
        qcomm_codecs_registry: Without an effect.
    """

    def __init__(
        self, qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None
    ) -> None:
        self.qcomm_codecs_registry = qcomm_codecs_registry


class BaseShardedManagedCollisionEmbeddingCollection(ShardedModule):
    """Embedding collection with hashed ids, sharded over ranks.

    Args:
        module: The unsharded collection.
        table_name_to_parameter_sharding: The plan, with one entry per table.
        e_sharder: Sharder of its embedding collection.
        mc_sharder: Without an effect.
        env: The ranks.
        device: Device of the tables.
        module_fqn: Path of the module in the model, for error messages.
    """

    answers_for_all = False
    unsharded_module_type: ClassVar[type[nn.Module]] = BaseManagedCollisionEmbeddingCollection
    """Type of the unsharded module."""

    def __init__(
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        e_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder | None,
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__()
        tables, modules, self._return_remapped_features = module.split()
        self._hash_functions = modules.hash_functions()
        if self._return_remapped_features:
            e_sharder = copy.copy(e_sharder)
            is_pooled = isinstance(tables, EmbeddingBagCollection)
            kind = BagsWithRows if is_pooled else SequencesWithRows
            vars(e_sharder)["makes"] = kind
        self._embedding_module: ShardedCollection = e_sharder.shard(
            tables,
            table_name_to_parameter_sharding,
            env,
            device,
            module_fqn,
        )

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Keyed optimizer of the tables with fused updates; names as in the state dict."""
        return CombinedOptimizer([("_embedding_module", self._embedding_module.fused_optimizer)])

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names of the tables.

        Args:
            prefix: Path of the module, which is prepended to each name.
        """
        path = f"{prefix}._embedding_module" if prefix else "_embedding_module"
        yield from self._embedding_module.sharded_parameter_names(path)

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[LazyAwaitable[Any], Awaitable[KeyedJaggedTensor | None]]:
        """Look up this rank's batch.

        Args:
            features: int32 or int64 ids of this rank's samples, with every feature of the tables.
            mutate_miss_lengths: Without an effect.

        Returns:
            The pending output of the embedding collection; and the pending features with rows in
            place of ids, or the pending None without `return_remapped_features`.
        """
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(self, features)  # type: ignore[no-any-return]
        return self._outputs(self._embedding_module(self._preprocess(features)))

    def _preprocess(self, features: Any) -> Any:
        try:
            return hashed(features, self._hash_functions)
        except Exception as error:  # the input stage raises it on every rank
            return error

    def _outputs(
        self, embeddings: LazyAwaitable[Any]
    ) -> tuple[LazyAwaitable[Any], Awaitable[KeyedJaggedTensor | None]]:
        if not self._return_remapped_features:
            return embeddings, NoWait(None)
        return embeddings, vars(embeddings)["rows"]

    def create_context(self) -> BatchContext:
        """Return a context; see `ShardedCollection`."""
        return self._embedding_module.create_context()

    def input_dist(
        self, ctx: BatchContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Start the header exchange of a batch; see `ShardedCollection`."""
        return self._embedding_module.input_dist(ctx, self._preprocess(features))

    def compute(self, ctx: BatchContext, dist_input: BatchContext) -> list[Tensor]:
        """Look up the received ids of a batch; see `ShardedCollection`."""
        return self._embedding_module.compute(ctx, dist_input)

    def output_dist(
        self, ctx: BatchContext, output: Iterable[Tensor]
    ) -> tuple[LazyAwaitable[Any], Awaitable[KeyedJaggedTensor | None]]:
        """Start sending embeddings, and rows, to the ranks of their samples; as from `forward`."""
        return self._outputs(self._embedding_module.output_dist(ctx, output))

    def compute_and_output_dist(
        self, ctx: BatchContext, input: BatchContext
    ) -> tuple[LazyAwaitable[Any], Awaitable[KeyedJaggedTensor | None]]:
        """Look up the received ids and start sending embeddings; as from `forward`."""
        return self._outputs(self._embedding_module.compute_and_output_dist(ctx, input))


class ShardedManagedCollisionEmbeddingBagCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """`ManagedCollisionEmbeddingBagCollection` that is sharded over ranks.

    Args:
        module: The unsharded collection.
        table_name_to_parameter_sharding: The plan, with one entry per table.
        ebc_sharder: Sharder of its embedding collection.
        mc_sharder: Without an effect.
        env: The ranks.
        device: Device of the tables.
        module_fqn: Path of the module in the model, for error messages.
    """

    unsharded_module_type = ManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        module: ManagedCollisionEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        ebc_sharder: EmbeddingBagCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder | None,
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None = None,
    ) -> None:
        plan = table_name_to_parameter_sharding
        super().__init__(module, plan, ebc_sharder, mc_sharder, env, device, module_fqn)


class ShardedManagedCollisionEmbeddingCollection(BaseShardedManagedCollisionEmbeddingCollection):
    """`ManagedCollisionEmbeddingCollection` that is sharded over ranks.

    Args:
        module: The unsharded collection.
        table_name_to_parameter_sharding: The plan, with one entry per table.
        ec_sharder: Sharder of its embedding collection.
        mc_sharder: Without an effect.
        env: The ranks.
        device: Device of the tables.
        module_fqn: Path of the module in the model, for error messages.
    """

    unsharded_module_type = ManagedCollisionEmbeddingCollection

    def __init__(
        self,
        module: ManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        ec_sharder: EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder | None,
        env: ShardingEnv,
        device: torch.device | None,
        module_fqn: str | None = None,
    ) -> None:
        plan = table_name_to_parameter_sharding
        super().__init__(module, plan, ec_sharder, mc_sharder, env, device, module_fqn)


class BaseManagedCollisionEmbeddingCollectionSharder(
    ModuleSharder[BaseManagedCollisionEmbeddingCollection]
):
    """Base of the two sharders.

    Args:
        e_sharder: Sharder of the embedding collection.
        mc_sharder: Without an effect.
        qcomm_codecs_registry: Without an effect; pass it to `e_sharder`.
    """

    replaces: ClassVar[type[BaseManagedCollisionEmbeddingCollection]]
    """Module type."""
    makes: ClassVar[type[Any]]
    """Type of the sharded module."""

    def __init__(
        self,
        e_sharder: EmbeddingBagCollectionSharder | EmbeddingCollectionSharder,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._e_sharder, self._mc_sharder = e_sharder, mc_sharder
        self.fused_params = e_sharder.fused_params
        self.qcomm_codecs_registry = e_sharder.qcomm_codecs_registry

    @property
    def module_type(self) -> type[nn.Module]:
        """The module type this sharder replaces."""
        return self.replaces

    def shard(
        self,
        module: Any,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> BaseShardedManagedCollisionEmbeddingCollection:
        """Return the collection with sharded tables; weights and ids are kept."""
        sharders: Any = self._e_sharder, self._mc_sharder
        made: BaseShardedManagedCollisionEmbeddingCollection = self.makes(
            module, params, *sharders, env, device, module_fqn
        )
        return made

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return the weight of each table by name."""
        return self._e_sharder.shardable_parameters(module.split()[0])

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types of tables with hashed ids: all but data-parallel."""
        types = self._e_sharder.sharding_types(compute_device_type)
        return [kind for kind in types if kind != ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the compute kernels that the sharder of the embedding collection supports."""
        return self._e_sharder.compute_kernels(sharding_type, compute_device_type)


@final
class ManagedCollisionEmbeddingBagCollectionSharder(BaseManagedCollisionEmbeddingCollectionSharder):
    """Sharder of `ManagedCollisionEmbeddingBagCollection`.

    Args:
        ebc_sharder: Sharder of the embedding collection; None for one with the arguments below.
        mc_sharder: Without an effect.
        fused_params: Optimizer settings for tables without an attached optimizer.
        qcomm_codecs_registry: Wire formats of embeddings and gradients.

    Example:
        >>> ManagedCollisionEmbeddingBagCollectionSharder().module_type.__name__
        'ManagedCollisionEmbeddingBagCollection'
    """

    replaces = ManagedCollisionEmbeddingBagCollection
    makes = ShardedManagedCollisionEmbeddingBagCollection

    def __init__(
        self,
        ebc_sharder: EmbeddingBagCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        default = EmbeddingBagCollectionSharder(fused_params, qcomm_codecs_registry)
        super().__init__(ebc_sharder or default, mc_sharder)


@final
class ManagedCollisionEmbeddingCollectionSharder(BaseManagedCollisionEmbeddingCollectionSharder):
    """Sharder of `ManagedCollisionEmbeddingCollection`.

    Args:
        ec_sharder: Sharder of the embedding collection; None for one with the arguments below.
        mc_sharder: Without an effect.
        fused_params: Optimizer settings for tables without an attached optimizer.
        qcomm_codecs_registry: Wire formats of embeddings and gradients.
    """

    replaces = ManagedCollisionEmbeddingCollection
    makes = ShardedManagedCollisionEmbeddingCollection

    def __init__(
        self,
        ec_sharder: EmbeddingCollectionSharder | None = None,
        mc_sharder: ManagedCollisionCollectionSharder | None = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        default = EmbeddingCollectionSharder(fused_params, qcomm_codecs_registry)
        super().__init__(ec_sharder or default, mc_sharder)


add_default_sharder(ManagedCollisionEmbeddingBagCollectionSharder)
add_default_sharder(ManagedCollisionEmbeddingCollectionSharder)
