"""The part of a trained model that is packaged and exported."""

from __future__ import annotations

from torch import nn

from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.sharded.sharder import is_sharded
from recsys.kernels.ops import HAS_FBGEMM
from recsys.modules.dlrm import DLRMTrain
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["served_part"]


def served_part(model: nn.Module) -> nn.Module:
    """Return the model inside a training wrapper, or the model itself, checked.

    Raises:
        ImportError: fbgemm_gpu is not installed.
        ValueError: The model is in training mode, or has tables that are sharded or not quantized.
    """
    if not HAS_FBGEMM:
        raise ImportError(
            "Exported programs call FBGEMM's kernels, but fbgemm_gpu is not installed. `python -m "
            "recsys doctor` shows the matching release."
        )
    model = get_unwrapped_module(model)
    if isinstance(model, DLRMTrain):
        model = model.model
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
