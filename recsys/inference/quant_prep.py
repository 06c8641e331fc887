"""What to say about modules before they are quantized.

`from_float` of a quantized collection, and so `quantize_dynamic`, `quantize_embeddings` and
`quantize_inference_model`, reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from recsys.distributed.sharded_collection import ShardedCollection
from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked
from recsys.modules.embedding_tables import QUANTIZATION_NOTES, TableCollection

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
"""The attributes of a module: arguments, by name, of the quantized one; and the rows that are left,
by table name."""


@checked
def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: Sequence[type[nn.Module]], row_alignment: int
) -> None:
    """Say in multiples of how many bytes rows will be stored: 16 if nothing is said.

    On the CPU 1 saves memory: 68 bytes instead of 80 for 64 values of int8.

    Args:
        module: a model that will be quantized.
        module_types: the classes of the collections in it that are meant.
        row_alignment: the number of bytes; CUDA needs 16.

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
    """Say that quantized collections will remember the order of a batch's features.

    Args:
        module: a model that will be quantized.
        module_types: the classes of the collections in it that are meant.
    """
    _prepare_types(module, module_types, "cache_features_order", True)


@checked
def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Say that the quantized collection's scales and biases will be buffers of their own.

    Args:
        module: the collection, not a model that it is in.

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
    """Return the same for all collections of some classes in a model.

    Args:
        module: the model.
        module_types: the classes.
    """
    _prepare_types(module, module_types, "quant_state_dict_split_scale_bias", True)


@checked
def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: Mapping[str, int],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Say how many rows of each table are left when the model is quantized: its first ones.

    Ids of the served model count the rows that are left; others are errors.

    Args:
        model: a model that will be quantized.
        tables_to_rows_post_pruning: table name to the number of rows; other tables keep all.
        module_types: the classes of the collections that are meant; None: all.

    Returns:
        The model.

    Raises:
        ValueError: a name is not a table's, or a table has fewer rows.

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
            f"tables_to_rows_post_pruning names {unknown}, which are not tables of the model; its "
            f"tables are {sorted(sizes)}."
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
    """Return whether a module, or what it was before it was sharded, is of one of some classes."""
    unsharded = getattr(module, "unsharded_module_type", type(module))
    return isinstance(module, tuple(types)) or issubclass(unsharded, tuple(types))


def _prepare(module: nn.Module, option: str, value: object) -> None:
    setattr(module, PREPARED, {**getattr(module, PREPARED, {}), option: value})
