"""What to say about modules before they are quantized.

`from_float` of a quantized collection, and so `quantize_dynamic`, `quantize_embeddings` and
`quantize_inference_model`, reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = [
    "PREPARED",
    "quant_prep_customize_row_alignment",
    "quant_prep_enable_cache_features_order",
    "quant_prep_enable_quant_state_dict_split_scale_bias",
    "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
]

PREPARED = "_quantized_with"
"""The attribute of a module with arguments, by name, of the quantized one."""


def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: Sequence[type[nn.Module]], row_alignment: int
) -> None:
    """Says in multiples of how many bytes rows will be stored: 16 if nothing is said.

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
    _prepare_types(module, module_types, "row_alignment", row_alignment)


def quant_prep_enable_cache_features_order(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Says that quantized collections will remember the order of a batch's features.

    Args:
        module: a model that will be quantized.
        module_types: the classes of the collections in it that are meant.
    """
    _prepare_types(module, module_types, "cache_features_order", True)


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Says that the quantized collection's scales and biases will be buffers of their own.

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


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """The same for all collections of some classes in a model.

    Args:
        module: the model.
        module_types: the classes.
    """
    _prepare_types(module, module_types, "quant_state_dict_split_scale_bias", True)


def _prepare_types(
    model: nn.Module, types: Sequence[type[nn.Module]], option: str, value: object
) -> None:
    for module in model.modules():
        if isinstance(module, tuple(types)):
            _prepare(module, option, value)


def _prepare(module: nn.Module, option: str, value: object) -> None:
    setattr(module, PREPARED, {**getattr(module, PREPARED, {}), option: value})
