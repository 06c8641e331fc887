"""Options of modules for their quantization.

`from_float` of a quantized collection reads them, and with it `quantize_dynamic`,
`quantize_embeddings` and `quantize_inference_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.modules.tables.embedding_tables import QUANTIZATION_NOTES, TableCollection

__all__ = [
    "PREPARED",
    "PRUNED",
    "quant_prep_customize_row_alignment",
    "quant_prep_enable_cache_features_order",
    "quant_prep_enable_quant_state_dict_split_scale_bias",
    "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
    "set_pruning_data",
]

PREPARED, PRUNED = QUANTIZATION_NOTES
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
        setattr(collection, PRUNED, left)
    return model


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
    setattr(module, PREPARED, {**getattr(module, PREPARED, {}), option: value})
