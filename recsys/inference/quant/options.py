"""Options of quantized collections: element types, layout of rows, and pruning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import nn

from recsys.base.arguments import whole, wrong_type
from recsys.base.checked import checked
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.kernels.backend import OUTPUT_CODES
from recsys.modules.embedding_configs import BaseEmbeddingConfig, DataType, QuantConfig
from recsys.modules.tables.embedding_tables import QUANTIZATION_NOTES, TableCollection

__all__ = [
    "SERVED",
    "QuantizedOptions",
    "quant_prep_customize_row_alignment",
    "quant_prep_enable_cache_features_order",
    "quant_prep_enable_quant_state_dict_split_scale_bias",
    "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
    "quantized_configs",
    "rows_left",
    "set_pruning_data",
    "to_data_type",
]

_DATA_TYPES = {
    **dict.fromkeys((torch.int8, torch.uint8, torch.qint8, torch.quint8), DataType.INT8),
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
    torch.float16: DataType.FP16,
    torch.float32: DataType.FP32,
}

SERVED = (*dict.fromkeys(_DATA_TYPES.values()), DataType.UINT8)
"""Element types that quantized tables support."""


def to_data_type(dtype: torch.dtype) -> DataType:
    """Return the element type of tables for a quantized dtype.

    Raises:
        ValueError: Tables cannot be quantized to it.

    Example:
        >>> to_data_type(torch.quint4x2)
        <DataType.INT4: 'INT4'>
    """
    if not isinstance(dtype, torch.dtype) or dtype not in _DATA_TYPES:
        raise ValueError(
            "Tables are quantized to torch.int8, torch.quint4x2, torch.quint2x4, torch.float16 or "
            f"torch.float32; received {dtype!r}."
        )
    return _DATA_TYPES[dtype]


def rows_left(config: BaseEmbeddingConfig) -> int:
    """Return the number of rows of a table after pruning."""
    left = config.num_embeddings_post_pruning
    if left is None:
        return config.num_embeddings
    where = f"Table {config.name!r}: num_embeddings_post_pruning"
    return whole(where, left, most=config.num_embeddings)


@final
@dataclass(frozen=True)
class QuantizedOptions:
    """Options of a quantized collection, fixed when it is built.

    Raises:
        ValueError: An option is not supported.
    """

    owner: str
    """The collection's class, for messages."""
    output_dtype: torch.dtype
    register_tbes: bool
    """Must be False."""
    splits: bool
    """Scales and biases are separate buffers."""
    row_alignment: int
    """Rows are stored in multiples of this many bytes."""
    caches_order: bool
    """Keep the positions of the features among the keys of the last batch."""
    is_weighted: bool = False
    """Rows are multiplied by the weights of a batch."""
    need_indices: bool = False
    """Ids are returned as weights."""

    def __post_init__(self) -> None:
        owner, alignment = self.owner, self.row_alignment
        if self.register_tbes:
            raise ValueError(
                f"{owner}.register_tbes is not supported; received {self.register_tbes!r}. Leave "
                "it out: each table's rows are a buffer without it."
            )
        whole(f"{owner}.row_alignment", alignment)
        if self.splits and alignment % 2:
            raise ValueError(
                f"{owner}.row_alignment must be even with quant_state_dict_split_scale_bias=True; "
                f"received {alignment}."
            )
        if self.output_dtype not in OUTPUT_CODES:
            raise ValueError(
                f"{owner}.output_dtype must be one of {[*OUTPUT_CODES]}; received "
                f"{self.output_dtype}."
            )


_PREPARED, _PRUNED = QUANTIZATION_NOTES
"""Attributes of a module: arguments of the quantized module by name; rows to keep by table name."""


@checked
def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: Sequence[type[nn.Module]], row_alignment: int
) -> None:
    """Set the alignment of rows in bytes; the default is 16.

    On the CPU, 1 saves memory: 68 bytes instead of 80 for 64 values of int8.

    Args:
        module: A model to quantize.
        module_types: The classes of collections to change.
        row_alignment: The number of bytes; CUDA needs 16.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(10, 64, "t", feature_names=["f"])
        >>> model = nn.Sequential(EmbeddingBagCollection(tables=[table]))
        >>> quant_prep_customize_row_alignment(model, [EmbeddingBagCollection], 1)
        >>> quantize_embeddings(model)[0].embedding_bags["t"].weight.shape
        torch.Size([10, 68])
    """
    whole("quant_prep_customize_row_alignment: row_alignment", row_alignment)
    _prepare_types(module, module_types, "row_alignment", row_alignment)


@checked
def quant_prep_enable_cache_features_order(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Cache the order of a batch's features in quantized collections.

    Args:
        module: A model to quantize.
        module_types: The classes of collections to change.
    """
    _prepare_types(module, module_types, "cache_features_order", True)


@checked
def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Store scales and biases of a quantized collection in separate buffers.

    Args:
        module: The collection, not a model that contains it.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingConfig
        >>> from recsys.modules.embedding_modules import EmbeddingCollection
        >>> tables = EmbeddingCollection(tables=[EmbeddingConfig(9, 4, "t", feature_names=["f"])])
        >>> quant_prep_enable_quant_state_dict_split_scale_bias(tables)
        >>> list(quantize_embeddings(tables).embeddings["t"].state_dict())
        ['weight', 'weight_qscale', 'weight_qbias']
    """
    _prepare(module, "quant_state_dict_split_scale_bias", True)


@checked
def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Store scales and biases in separate buffers, for collections of some classes in a model.

    Args:
        module: A model to quantize.
        module_types: The classes of collections to change.
    """
    _prepare_types(module, module_types, "quant_state_dict_split_scale_bias", True)


@checked
def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: Mapping[str, int],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Set the number of first rows of each table that quantization keeps.

    Other ids are errors in the quantized model.

    Args:
        model: A model to quantize.
        tables_to_rows_post_pruning: Number of rows by table name; other tables keep all rows.
        module_types: The classes of collections to change; None: all.

    Returns:
        The model.

    Raises:
        ValueError: A name is not a table of the model, or a table has fewer rows.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(1000, 64, "t", feature_names=["f"])
        >>> model = nn.Sequential(EmbeddingBagCollection(tables=[table]))
        >>> quantize_embeddings(set_pruning_data(model, {"t": 10}))[0].embedding_bags["t"]
        QuantizedTable(10, 64, INT8)
    """
    collections = [
        module
        for module in model.modules()
        if isinstance(module, TableCollection | ShardedCollection)
        and (module_types is None or _is_one_of(module, module_types))
    ]
    sizes = {config.name: config.num_embeddings for c in collections for config in c.configs()}
    unknown = sorted(tables_to_rows_post_pruning.keys() - sizes)
    if unknown:
        raise ValueError(
            f"tables_to_rows_post_pruning must name tables of the model, {sorted(sizes)}; received "
            f"{unknown}."
        )
    left = {
        name: whole(f"Rows of table {name!r} after pruning", rows, most=sizes[name])
        for name, rows in tables_to_rows_post_pruning.items()
    }
    for collection in collections:
        setattr(collection, _PRUNED, left)
    return model


def quantized_configs(
    module: TableCollection | ShardedCollection, configured: nn.Module
) -> tuple[list[Any], dict[str, Any]]:
    """Return the tables and options of a quantized collection for a trained one.

    Args:
        module: The trained collection, sharded or not.
        configured: The module with the `qconfig`, if there is one.

    Returns:
        The tables, and arguments of the quantized collection by name.

    Raises:
        TypeError: The module is not a collection.
        ValueError: A table cannot be quantized to its dtype.
    """
    if not isinstance(cast(object, module), TableCollection | ShardedCollection):
        wrong_type("module", "a collection of tables, sharded or not", module)
    qconfig = getattr(configured, "qconfig", None)
    dtype, output_dtype = torch.int8, torch.float32
    per_table: Mapping[str, torch.dtype] = {}
    if qconfig is not None:
        dtype, output_dtype = qconfig.weight().dtype, qconfig.activation().dtype
        per_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
        # in torch's QConfig this is the dtype of the inputs of dense layers
        if output_dtype not in OUTPUT_CODES and not isinstance(qconfig, QuantConfig):
            output_dtype = torch.float32
    pruned: Mapping[str, int] = getattr(module, _PRUNED, {})
    configs: list[Any] = []
    for config in module.configs():
        data_type = to_data_type(per_table.get(config.name, dtype))
        left = pruned.get(config.name, config.num_embeddings_post_pruning)
        configs.append(replace(config, data_type=data_type, num_embeddings_post_pruning=left))
    return configs, {"output_dtype": output_dtype} | getattr(configured, _PREPARED, {})


def _prepare_types(
    model: nn.Module, types: Sequence[type[nn.Module]], option: str, value: object
) -> None:
    for module in model.modules():
        if _is_one_of(module, types):
            _prepare(module, option, value)


def _is_one_of(module: nn.Module, types: Sequence[type[nn.Module]]) -> bool:
    """Return whether a module, or the unsharded form of it, is an instance of the classes."""
    unsharded = getattr(module, "unsharded_module_type", type(module))
    return isinstance(module, tuple(types)) or issubclass(unsharded, tuple(types))


def _prepare(module: nn.Module, option: str, value: object) -> None:
    setattr(module, _PREPARED, {**getattr(module, _PREPARED, {}), option: value})
