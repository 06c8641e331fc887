"""From a trained model to one that is served: quantize the tables, export a program of plain tensors."""

from recsys.inference.export import export_torchscript, trace_model
from recsys.inference.quantize import QuantEmbeddingBagCollection, quantize_embeddings

__all__ = [
    "QuantEmbeddingBagCollection",
    "export_torchscript",
    "quantize_embeddings",
    "trace_model",
]
