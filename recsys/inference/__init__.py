"""Serving of a trained model: quantize the tables, shard them, and export a program."""

from typing import TYPE_CHECKING

from recsys.base.checksums import verify_checksum
from recsys.base.lazy import lazy_names
from recsys.inference.export import export_aoti, export_torchscript
from recsys.inference.packages.check import inspect, verify
from recsys.inference.packages.deltas import read_delta, write_delta, write_delta_between
from recsys.inference.packages.follow import follow
from recsys.inference.packages.predictor import Predictor
from recsys.inference.packages.server_configs import kserve
from recsys.inference.packages.writer import package
from recsys.inference.programs import load_aoti, load_torchscript
from recsys.inference.publisher import Publisher
from recsys.inference.quant.modules import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
)
from recsys.inference.quantize import quantize_embeddings, quantize_inference_model
from recsys.inference.report import (
    QuantizationReport,
    QuantizedTableReport,
    quantization_report,
)
from recsys.inference.shard import shard_quant_model

if TYPE_CHECKING:  # needs pyarrow
    from recsys.inference.scoring import score

__all__ = [
    "Predictor",
    "Publisher",
    "QuantEmbeddingBagCollection",
    "QuantEmbeddingCollection",
    "QuantFeatureProcessedEmbeddingBagCollection",
    "QuantizationReport",
    "QuantizedTableReport",
    "export_aoti",
    "export_torchscript",
    "follow",
    "inspect",
    "kserve",
    "load_aoti",
    "load_torchscript",
    "package",
    "quantization_report",
    "quantize_embeddings",
    "quantize_inference_model",
    "read_delta",
    "score",
    "shard_quant_model",
    "verify",
    "verify_checksum",
    "write_delta",
    "write_delta_between",
]

__getattr__ = lazy_names(__name__, {"score": "inference.scoring"})
