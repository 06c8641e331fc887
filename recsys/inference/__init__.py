"""From a trained model to one that is served: quantize the tables, shard them, export a program."""

from recsys.inference.export import export_torchscript, trace_model
from recsys.inference.quantize import QuantEmbeddingBagCollection, quantize_embeddings
from recsys.inference.shard import shard_quant_model

__all__ = [
    "QuantEmbeddingBagCollection",
    "export_torchscript",
    "quantize_embeddings",
    "shard_quant_model",
    "trace_model",
]
