"""From a quantized model to a file that runs without this library.

The exported program takes plain tensors and needs only torch and fbgemm_gpu to run, in Python or in
C++. It is made by torch.fx: the model runs once on symbolic inputs, which sees through the jagged
containers, so that only tensor operations are left; TorchScript compiles those.
"""

import inspect
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, fx, nn

from recsys.inference.quantized_collection import QuantizedCollection
from recsys.inference.tracer import Tracer
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


class _PlainInputs(nn.Module):
    """Calls a model of (dense features, jagged ids) with plain tensors."""

    def __init__(self, model: nn.Module, feature_names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self._names = list(feature_names)

    def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
        return self._call(dense, values, lengths, None)

    def _call(
        self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor | None
    ) -> Tensor:
        features = KeyedJaggedTensor.from_parts(
            self._names, values, weights, lengths, stride=lengths.numel() // len(self._names)
        )
        output: object = self.model(dense, features)
        if isinstance(output, KeyedTensor | KeyedJaggedTensor | JaggedTensor):
            raise TypeError(
                f"An exported model must return tensors; {type(self.model).__name__} returned a "
                f"{type(output).__name__}. Return its values()."
            )
        return cast(Tensor, output)


class _PlainWeightedInputs(_PlainInputs):
    """The same with per-id weights."""

    def forward(  # type: ignore[override]
        self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor
    ) -> Tensor:
        return self._call(dense, values, lengths, weights)


def trace_model(
    model: nn.Module, feature_names: Sequence[str], is_weighted: bool = False
) -> fx.GraphModule:
    """Trace a quantized model of dense features and jagged ids to tensor operations.

    Args:
        model: `model(dense, features)` returning a tensor, quantized, in evaluation mode.
        feature_names: the order of the features in the exported program's `lengths`.
        is_weighted: whether the program takes per-id weights.

    Returns:
        A module of `(dense [B, ...], values [N], lengths [K * B], weights [N] if weighted)`.

    Raises:
        TypeError: if the model takes or returns something else, or `feature_names` is one name.
        ValueError: if the model is in training mode or has tables that are not quantized, a feature
            is missing or named twice, or the weights are not what the model reads.
    """
    if model.training:
        raise ValueError("trace_model needs a model in evaluation mode; call model.eval() first.")
    _check_model(model)
    _check_names(model, feature_names)
    root = (_PlainWeightedInputs if is_weighted else _PlainInputs)(model, feature_names)
    try:
        graph = Tracer().trace(root)
    except fx.proxy.TraceError as error:
        error.add_note(
            "Models are exported by torch.fx: forward must not branch on the values of tensors. "
            "torch.where chooses between them."
        )
        raise
    if is_weighted and not next(n for n in graph.nodes if n.target == "weights").users:
        raise ValueError(
            f"is_weighted=True, but nothing in {type(model).__name__} reads weights. Leave it "
            "False, or build the collections with is_weighted=True."
        )
    return fx.GraphModule(root, graph)


def _check_model(model: nn.Module) -> None:
    try:
        inspect.signature(model.forward).bind(None, None)
    except TypeError as error:
        raise TypeError(
            f"An exported model is called as model(dense, features); received "
            f"{type(model).__name__}, whose forward takes {inspect.signature(model.forward)}. "
            "Export the model inside a training wrapper, or wrap it in a module that is called so."
        ) from error
    for path, child in model.named_modules():
        if isinstance(child, EmbeddingBagCollection | EmbeddingCollection):
            raise ValueError(
                f"An exported model has quantized tables only; received the "
                f"{type(child).__name__} {path!r}. Call quantize_embeddings first."
            )


def _check_names(model: nn.Module, feature_names: Sequence[str]) -> None:
    if isinstance(feature_names, str):
        raise TypeError(
            f"feature_names must be a sequence of names; received {feature_names!r}. "
            f"Write [{feature_names!r}]."
        )
    names = list(feature_names)
    read = {
        name
        for child in model.modules()
        if isinstance(child, QuantizedCollection)
        for config in child.configs()
        for name in config.feature_names
    }
    missing = sorted(read.difference(names))
    if missing or len(set(names)) < len(names) or not names:
        raise ValueError(
            f"feature_names must name each feature of the batches once; received {names}, without "
            f"{missing}, which the tables read."
        )


def export_torchscript(
    model: nn.Module, path: str | Path, feature_names: Sequence[str], is_weighted: bool = False
) -> torch.jit.ScriptModule:
    """Compile a quantized model by TorchScript and write it to a file.

    The file runs wherever torch and fbgemm_gpu do:
    `torch.jit.load(path)(dense, values, lengths)`.

    Args:
        model: as for `trace_model`.
        path: the file to write.
        feature_names: as for `trace_model`.
        is_weighted: as for `trace_model`.

    Returns:
        The compiled module that was written.
    """
    traced = trace_model(model, feature_names, is_weighted)
    with warnings.catch_warnings():
        # about an annotation in torch.fx.GraphModule's own __init__
        warnings.filterwarnings("ignore", "The TorchScript type system doesn't support instance")
        # TorchScript is in maintenance; `torch.jit.load` is what C++ servers call today
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        scripted: torch.jit.ScriptModule = torch.jit.script(traced)
    # whole or not at all: ranks of a job may write one path while others read it
    partial = f"{path}.{os.getpid()}.part"
    try:
        scripted.save(partial)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
    return scripted
