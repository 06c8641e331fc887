"""The part of a trained model that is scored, packaged and exported."""

from __future__ import annotations

from torch import nn

from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.sharded.sharder import is_sharded
from recsys.kernels.ops import HAS_FBGEMM
from recsys.modules.dlrm import DLRMTrain
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.sequences.masked_item import MaskedItem
from recsys.modules.sequences.next_item import NextItem

__all__ = ["model_inside", "served_part"]


def model_inside(model: nn.Module) -> nn.Module:
    """Return the model inside a `DLRMTrain`, which may be wrapped; another model as it is.

    Raises:
        ValueError: The model returns the loss of sequences.
    """
    inner = get_unwrapped_module(model)
    if isinstance(inner, MaskedItem | NextItem):
        raise ValueError(
            f"The model must return scores; received {type(inner).__name__}, which returns the "
            "loss of training. Package Recommend(model, ItemIndex(model.items(num_items, device)), "
            "k=10), and score the package."
        )
    return inner.model if isinstance(inner, DLRMTrain) else model


def served_part(model: nn.Module) -> nn.Module:
    """Return the model inside a training wrapper, or the model itself, checked.

    Raises:
        ImportError: fbgemm_gpu is not installed.
        ValueError: The model is in training mode, has tables that are sharded or not quantized, or
            returns the loss of sequences.
    """
    if not HAS_FBGEMM:
        raise ImportError(
            "Exported programs call FBGEMM's kernels, but fbgemm_gpu is not installed. `python -m "
            "recsys doctor` shows the matching release."
        )
    model = get_unwrapped_module(model_inside(model))
    if model.training:
        raise ValueError("The model must be in evaluation mode; call model.eval() first.")
    for path, child in model.named_modules():
        if is_sharded(child):
            raise ValueError(
                f"An exported model must be unsharded, with quantized tables; received the sharded "
                f"{type(child).__name__} {path!r}. Pass quantize_embeddings(model), which every "
                "rank must call, or load a checkpoint into the unsharded model first."
            )
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            raise ValueError(
                f"An exported model must have quantized tables only; received the "
                f"{type(child).__name__} {path!r}. Call quantize_embeddings first; "
                "torch.float32 keeps all values."
            )
    return model
