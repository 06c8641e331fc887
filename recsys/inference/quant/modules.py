"""Embedding collections of quantized rows, for inference.

Legend: `B` batch size, `N` ids, `D` columns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch

from recsys.base.arguments import instance
from recsys.base.checked import checked
from recsys.inference.quant.collection import QuantizedCollection, Weights
from recsys.inference.quant.lookup import (
    QuantizedBags,
    QuantizedOptions,
    QuantizedRows,
    Served,
)
from recsys.inference.quant.rows import SERVED
from recsys.inference.quant.served import ProcessedBags, position_processor
from recsys.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_tables,
)
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
)
from recsys.modules.feature_processor import FeatureProcessorsCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.tables.embedding_inputs import expand_bags
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantFeatureProcessedEmbeddingBagCollection",
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
        >>> table = EmbeddingBagConfig(
        ...     10, 64, "films", data_type=DataType.INT8, feature_names=["liked"]
        ... )
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
        >>> table = EmbeddingBagConfig(
        ...     10, 4, "films", data_type=DataType.INT8, feature_names=["liked"]
        ... )
        >>> ebc = QuantFeatureProcessedEmbeddingBagCollection(
        ...     [table],
        ...     True,
        ...     torch.device("cpu"),
        ...     feature_processor=PositionWeightedModuleCollection({"liked": 3}),
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
        if not isinstance(feature_processor, FeatureProcessorsCollection):
            raise TypeError(
                f"{type(self).__name__}.feature_processor must be a FeatureProcessorsCollection; "
                f"received {type(feature_processor).__name__}."
            )
        if not is_weighted:
            raise ValueError(
                f"{type(self).__name__}.is_weighted must be True, as its processor computes "
                "weights; received False."
            )
        self.feature_processor = feature_processor

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
        >>> table = EmbeddingConfig(
        ...     10, 4, "films", data_type=DataType.INT4, feature_names=["liked"]
        ... )
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
        given = features.trim()
        features = self._with_rows(given)
        lengths = self._lengths(features, is_pooled=False)
        if features.variable_stride_per_key():
            of_key = features.lengths().split_with_sizes(features.stride_per_key())
        else:
            of_key = lengths.view(len(keys), features.stride()).unbind(0)
        lookups = cast(QuantizedRows, self.lookups())
        rows, ids = lookups.look_up(features.values(), lengths, positions, len(keys))
        if features is not given and lookups.need_indices:
            ids = list(given.values().split(given.length_per_key()))
        place = {key: i for i, key in enumerate(keys)}
        return {
            name: JaggedTensor.from_parts(
                found, ids[place[feature]] if lookups.need_indices else None, of_key[place[feature]]
            )
            for name, feature, found in zip(lookups.names, lookups.read, rows, strict=True)
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
