"""Embedding collections of quantized rows, for inference, and their sharders.

Quantized tables are read-only, so the devices of one process exchange no updates. Each device looks
up its shards and sends the rows to the device of the ids.

Shapes: `B` batch size, `N` ids, `D` columns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from recsys.base.arguments import instance
from recsys.base.checked import checked
from recsys.distributed.default_sharders import add_default_sharder
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)
from recsys.distributed.placement.strategies import check_plan_covers
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.sharded.devices import canonical_device, default_device, local_devices
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.inference.quant.collection import QuantizedCollection, Weights
from recsys.inference.quant.lookup import (
    ProcessedBags,
    QuantizedBags,
    QuantizedRows,
    Served,
    position_processor,
)
from recsys.inference.quant.options import SERVED, QuantizedOptions
from recsys.inference.quant.rows import SHARDING_TYPES, meta_rows, shards_of_plan
from recsys.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
)
from recsys.modules.embedding_interfaces import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import FeatureProcessorsCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.tables.embedding_inputs import expand_bags
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollection",
    "QuantEmbeddingCollectionSharder",
    "QuantFeatureProcessedEmbeddingBagCollection",
    "QuantFeatureProcessedEmbeddingBagCollectionSharder",
    "QuantizedSharder",
]


class QuantEmbeddingBagCollection(QuantizedCollection, EmbeddingBagCollectionInterface):
    """An `EmbeddingBagCollection` with quantized rows, for inference.

    It has no gradients. `quantize_embeddings` and `from_float` build it from a trained collection.

    Args:
        tables: The tables; their `data_type` (INT8, INT4, INT2, FP16 or FP32) is the type of the
            stored rows.
        is_weighted: Multiply each row by the weight of its id before pooling.
        device: Device of the tables.
        output_dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`.
        table_name_to_quantized_weights: By table, rows, uint8 [rows, bytes], and scales and biases,
            uint8 [rows, 4], or None if each row begins with them or has none. None: all zeros.
        register_tbes: Not supported: must be False.
        quant_state_dict_split_scale_bias: Store a table of INT8, INT4 or INT2 as three buffers:
            `weight` without scales and biases, and `weight_qscale` and `weight_qbias`, fp16
            [rows, 1].
        row_alignment: Alignment of rows in bytes. CUDA needs 16; on the CPU, 1 saves memory.
        cache_features_order: Cache the positions of the features among the keys of the last batch.

    Attributes:
        embedding_bags: Modules that hold the buffer `weight`, uint8 [rows, bytes per row], by table
            name.

    Raises:
        ValueError: Table names repeat, a table has no features or pooling NONE, an element type,
            width, output dtype or option is not supported, or the weights do not match the tables.
        TypeError: A table is not an EmbeddingBagConfig.

    Example:
        >>> from recsys.modules.embedding_configs import DataType
        >>> table = EmbeddingBagConfig(10, 64, "films", DataType.INT8, ["liked"])
        >>> ebc = QuantEmbeddingBagCollection([table], False, torch.device("cpu"))
        >>> {name: (buffer.shape, buffer.dtype) for name, buffer in ebc.named_buffers()}
        {'embedding_bags.films.weight': (torch.Size([10, 80]), torch.uint8)}
    """

    _lookups = QuantizedBags
    _tables_name = "embedding_bags"
    # not inherited, as it replaces this forward only
    script_form = QuantizedCollection.script_form

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Weights | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = 16,
        cache_features_order: bool = False,
    ) -> None:
        tables = check_tables(type(self).__name__, tables, EmbeddingBagConfig, SERVED)
        options = QuantizedOptions(
            type(self).__name__, output_dtype, register_tbes, quant_state_dict_split_scale_bias,
            row_alignment, cache_features_order, is_weighted=is_weighted,
        )  # fmt: skip
        poolings = [config.pooling for config in tables]
        super().__init__(tables, poolings, device, table_name_to_quantized_weights, options)

    @classmethod
    def _options_of(cls, module: EmbeddingBagCollection) -> dict[str, Any]:
        return {"is_weighted": module.is_weighted()}

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool a batch.

        Args:
            features: Ids of all features of the tables. With one batch size per key it needs
                inverse indices.

        Returns:
            [B, sum of D] in the output dtype, with the keys of the float collection.

        Raises:
            IndexError: An id is outside its table.
            KeyError: The batch lacks a feature.
            TypeError: The batch is not a KeyedJaggedTensor, or ids are not integers.
            ValueError: The batch lacks weights or inverse indices, or its lengths do not match the
                ids.
        """
        positions = self._positions(features)
        features = self._with_rows(features.trim())
        lookups = cast(QuantizedBags, self.lookups())
        weights = features.weights_or_none() if lookups.is_weighted else None
        if lookups.is_weighted and weights is None:
            raise ValueError(
                "The collection was built with is_weighted=True and needs one weight per id; "
                "received a batch without weights. Pass weights= to the KeyedJaggedTensor, and "
                "is_weighted=True to an export."
            )
        lengths, num_keys = self._lengths(features, is_pooled=True), len(features.keys())
        values = lookups.look_up(features.values(), lengths, weights, positions, num_keys)
        if features.variable_stride_per_key():
            values = expand_bags(values, tuple(lookups.dims), tuple(lookups.read), features)
        return KeyedTensor.from_parts(lookups.names, lookups.dims, values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in order."""
        return cast(list[EmbeddingBagConfig], self.configs())

    def is_weighted(self) -> bool:
        """Return whether ids have weights."""
        return self._options.is_weighted


class QuantFeatureProcessedEmbeddingBagCollection(QuantEmbeddingBagCollection):
    """A `FeatureProcessedEmbeddingBagCollection` with quantized rows.

    The feature processors are not quantized. Arguments that are not listed are as for
    `QuantEmbeddingBagCollection`.

    Args:
        tables: As for `QuantEmbeddingBagCollection`.
        is_weighted: Must be True, as the processors compute weights.
        feature_processor: Computes the weights of a batch.

    Raises:
        TypeError: `feature_processor` is not a FeatureProcessorsCollection.
        ValueError: `is_weighted` is False, or as for `QuantEmbeddingBagCollection`.

    Example:
        >>> from recsys.modules.embedding_configs import DataType
        >>> from recsys.modules.feature_processor import PositionWeightedModuleCollection
        >>> table = EmbeddingBagConfig(10, 4, "films", DataType.INT8, ["liked"])
        >>> weights = PositionWeightedModuleCollection({"liked": 3})
        >>> ebc = QuantFeatureProcessedEmbeddingBagCollection(
        ...     [table], True, torch.device("cpu"), feature_processor=weights
        ... )
        >>> list(ebc.state_dict())
        ['embedding_bags.films.weight', 'feature_processor.position_weights.liked']
    """

    script_form = QuantizedCollection.script_form

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Weights | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = 16,
        feature_processor: FeatureProcessorsCollection | None = None,
        cache_features_order: bool = False,
    ) -> None:
        super().__init__(
            tables,
            is_weighted,
            device,
            output_dtype,
            table_name_to_quantized_weights,
            register_tbes,
            quant_state_dict_split_scale_bias,
            row_alignment,
            cache_features_order,
        )
        owner = type(self).__name__
        self.feature_processor = instance(
            f"{owner}.feature_processor",
            feature_processor,
            FeatureProcessorsCollection,  # type: ignore[type-abstract]
        )
        if not is_weighted:
            raise ValueError(
                f"{owner}.is_weighted must be True, as its processor computes weights; received "
                "False."
            )

    @classmethod
    def _tables_of(cls, module: FeatureProcessedEmbeddingBagCollection) -> Any:
        if not hasattr(type(module), "split"):  # sharded collections have it too
            kind = FeatureProcessedEmbeddingBagCollection
            instance(f"{cls.__name__}.from_float: module", module, kind)
        return module.split()[1]

    @classmethod
    def _options_of(cls, module: FeatureProcessedEmbeddingBagCollection) -> dict[str, Any]:  # type: ignore[override]
        return {"is_weighted": True, "feature_processor": copy.deepcopy(module.split()[0])}

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Apply the processors, look up and pool a batch.

        Arguments and errors as `QuantEmbeddingBagCollection.forward`, and errors of the processors,
        such as a bag longer than its position weights. The batch needs no weights.
        """
        return super().forward(self.feature_processor(features))

    @property
    def served(self) -> Served:
        """The module that exported programs run; it reads the same tables."""
        processor = position_processor(self.feature_processor) or self.feature_processor
        return ProcessedBags(processor, cast(QuantizedBags, super().served))


class QuantEmbeddingCollection(QuantizedCollection, EmbeddingCollectionInterface):
    """An `EmbeddingCollection` with quantized rows, for inference.

    Arguments that are not listed are as for `QuantEmbeddingBagCollection`.

    Args:
        tables: The tables, all of the same embedding_dim; their `data_type` is the type of the
            stored rows.
        device: Device of the tables.
        need_indices: Return the ids too, as the weights of each JaggedTensor.
        output_dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`.

    Attributes:
        embeddings: Modules that hold the buffer `weight`, by table name.

    Raises:
        ValueError: Dims differ, or as for `QuantEmbeddingBagCollection`.
        TypeError: A table is not an EmbeddingConfig.

    Example:
        >>> from recsys.modules.embedding_configs import DataType
        >>> table = EmbeddingConfig(10, 4, "films", DataType.INT4, ["liked"])
        >>> ec = QuantEmbeddingCollection([table], torch.device("cpu"))
        >>> bags = KeyedJaggedTensor(["liked"], torch.tensor([7, 8]), lengths=torch.tensor([2]))
        >>> ec(bags)["liked"].values().shape
        torch.Size([2, 4])
    """

    _lookups = QuantizedRows
    _tables_name = "embeddings"
    # not inherited, as it replaces this forward only
    script_form = QuantizedCollection.script_form

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingConfig],
        device: torch.device,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Weights | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int = 16,
        cache_features_order: bool = False,
    ) -> None:
        tables = check_tables(type(self).__name__, tables, EmbeddingConfig, SERVED)
        options = QuantizedOptions(
            type(self).__name__, output_dtype, register_tbes, quant_state_dict_split_scale_bias,
            row_alignment, cache_features_order, need_indices=need_indices,
        )  # fmt: skip
        poolings = [PoolingType.NONE] * len(tables)
        super().__init__(tables, poolings, device, table_name_to_quantized_weights, options)

    @classmethod
    def _options_of(cls, module: EmbeddingCollection) -> dict[str, Any]:
        return {"need_indices": module.need_indices()}

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a batch.

        Args:
            features: Ids of all features of the tables.

        Returns:
            One JaggedTensor per feature ("feature@table" if several tables read it): values [N, D]
            in the output dtype, the feature's lengths, and the ids as weights if `need_indices`.

        Raises:
            IndexError: An id is outside its table.
            KeyError: The batch lacks a feature.
            TypeError: The batch is not a KeyedJaggedTensor, or ids are not integers.
            ValueError: The lengths do not match the ids.
        """
        positions, keys = self._positions(features), features.keys()
        trimmed = features.trim()
        features = self._with_rows(trimmed)
        lengths = self._lengths(features, is_pooled=False)
        if features.variable_stride_per_key():
            key_lengths = features.lengths().split_with_sizes(features.stride_per_key())
        else:
            key_lengths = lengths.view(len(keys), features.stride()).unbind(0)
        lookups = cast(QuantizedRows, self.lookups())
        rows, ids = lookups.look_up(features.values(), lengths, positions, len(keys))
        if features is not trimmed and lookups.need_indices:
            ids = list(trimmed.values().split(trimmed.length_per_key()))
        place = {key: i for i, key in enumerate(keys)}
        return {
            name: JaggedTensor.from_parts(
                values,
                ids[place[feature]] if lookups.need_indices else None,
                key_lengths[place[feature]],
            )
            for name, feature, values in zip(lookups.names, lookups.read, rows, strict=True)
        }

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return cast(list[EmbeddingConfig], self.configs())

    def need_indices(self) -> bool:
        """Return whether the output includes the ids."""
        return self._options.need_indices

    def embedding_dim(self) -> int:
        """Return the number of columns of every table."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs of each table."""
        return get_embedding_names_by_table(self._configs)


class QuantizedSharder(ModuleSharder[QuantizedCollection]):
    """Base of sharders that place the tables of quantized collections on devices of one process.

    Args:
        fused_params: Must be empty: the options of the lookup are fixed at quantization.
        shardable_params: Names of tables, either all tables of a collection or none. A collection
            with none of them is not sharded. None: all tables.

    Raises:
        ValueError: `fused_params` is not empty.
    """

    replaces: type[QuantizedCollection]
    """The class of modules that this sharder replaces."""

    @checked
    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        shardable_params: Sequence[str] | None = None,
    ) -> None:
        if fused_params:
            raise ValueError(
                f"{type(self).__name__}.fused_params must be empty, as quantized tables are not "
                "trained, and output_dtype and row_alignment are fixed at quantization; received "
                f"{dict(fused_params)}. Leave it out."
            )
        self._names = None if shardable_params is None else set(shardable_params)

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
    ) -> QuantizedCollection:
        """Return the same collection with each shard on its owner's device.

        Args:
            module: The quantized collection; not changed.
            params: Placement by table: table_wise, row_wise or column_wise.
            env: One rank per device: `ShardingEnv.from_local(number of devices)`.
            device: One of the devices, whose kind is used; None: the default device.
            module_fqn: The module's path in the model, for messages.

        Raises:
            ValueError: The plan does not match the tables or the devices, or there are several
                processes.
        """
        if env.process_group is not None and env.world_size > 1:
            raise ValueError(
                "A quantized model is sharded over the devices of one process; received "
                f"{env.world_size} processes. Pass env=ShardingEnv.from_local(number of devices)."
            )
        first = canonical_device(device or default_device(env))
        devices = [first] if env.world_size == 1 else local_devices(first.type, env.world_size)
        path = type(module).__name__ if module_fqn is None else module_fqn
        configs = module.configs()
        names = [config.name for config in configs]
        check_plan_covers(path, EmbeddingModuleShardingPlan(params), names)
        dtype = module.output_dtype()
        shards = [shards_of_plan(c, params[c.name], env.world_size, dtype) for c in configs]
        collection: QuantizedCollection = module.placed(shards, devices.__getitem__)
        return collection

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Return a placeholder of each table's rows on `meta`, `[rows, columns]`, by table name.

        Raises:
            ValueError: `shardable_params` has some of the collection's tables, but not all.
        """
        names = [config.name for config in module.configs()]
        chosen = [name for name in names if self._names is None or name in self._names]
        if chosen and chosen != names:
            raise ValueError(
                f"shardable_params must name all tables of a collection, or none; received "
                f"{chosen} of {names}. Add the other tables, or move them to another collection."
            )
        return {config.name: meta_rows(config) for config in module.configs() if chosen}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the supported sharding types."""
        return [kind.value for kind in SHARDING_TYPES]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the supported compute kernel."""
        return [EmbeddingComputeKernel.QUANT.value]


class QuantEmbeddingBagCollectionSharder(QuantizedSharder):
    """Sharder of `QuantEmbeddingBagCollection`; arguments as for `QuantizedSharder`."""

    replaces = QuantEmbeddingBagCollection


class QuantFeatureProcessedEmbeddingBagCollectionSharder(QuantizedSharder):
    """Sharder of `QuantFeatureProcessedEmbeddingBagCollection`, as `QuantizedSharder`."""

    replaces = QuantFeatureProcessedEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(QuantizedSharder):
    """Sharder of `QuantEmbeddingCollection`; arguments as for `QuantizedSharder`."""

    replaces = QuantEmbeddingCollection


for _kind in (
    QuantEmbeddingBagCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
):
    add_default_sharder(_kind)
