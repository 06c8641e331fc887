"""Rows of the tables of a quantized model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.inference.quant.collection import QuantizedCollection, Weights

__all__ = [
    "assign_weights_to_tbe",
    "get_table_to_weights_from_tbe",
]


@checked
def get_table_to_weights_from_tbe(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return the rows of a quantized model's tables.

    Args:
        model: A model with quantized collections.

    Returns:
        Rows, uint8 `[rows, bytes]`, and scales and biases, uint8 `[rows, 4]` with two float16 per
        row, by table name; tables of float16 or float32 have no scales: None. Quantized
        collections take this as `table_name_to_quantized_weights`.

    Example:
        >>> import torch
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(10, 64, "t", feature_names=["f"])
        >>> model = quantize_embeddings(EmbeddingBagCollection(tables=[table]), torch.int8)
        >>> [part.shape for part in get_table_to_weights_from_tbe(model)["t"]]
        [torch.Size([10, 64]), torch.Size([10, 4])]
    """
    weights: dict[str, tuple[Tensor, Tensor | None]] = {}
    for collection in _collections(model):
        weights.update(collection.quantized_weights())
    return weights


@checked
def assign_weights_to_tbe(model: nn.Module, table_to_weight: Weights) -> None:
    """Write the rows of a quantized model's tables, in place.

    Args:
        model: A model with quantized collections.
        table_to_weight: As returned by `get_table_to_weights_from_tbe`; it may have other tables.

    Raises:
        ValueError: A table of the model is missing, or its rows have another shape.
    """
    collections = _collections(model)
    names = [config.name for collection in collections for config in collection.configs()]
    missing = [name for name in names if name not in table_to_weight]
    if missing:
        raise ValueError(
            "table_to_weight must have every table of the model; received "
            f"{sorted(table_to_weight)}, without {missing}."
        )
    for collection in collections:
        collection.assign({c.name: table_to_weight[c.name] for c in collection.configs()})


def _collections(model: nn.Module) -> list[QuantizedCollection]:
    return [module for module in model.modules() if isinstance(module, QuantizedCollection)]


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
