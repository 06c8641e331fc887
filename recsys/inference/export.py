"""From a quantized model to a file that runs without this library.

The exported program takes plain tensors and needs only torch and fbgemm_gpu to run, in Python or in
C++. It is made by torch.fx: the model runs once on symbolic inputs, which sees through the jagged
containers, so that only tensor operations are left; TorchScript compiles those.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, fx, nn

from recsys.inference.quantize import QuantizedBags
from recsys.sparse import KeyedJaggedTensor


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, QuantizedBags) or super().is_leaf_module(m, module_qualified_name)


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
        output: Tensor = self.model(dense, features)
        return output


class _PlainWeightedInputs(_PlainInputs):
    """The same with per-id weights."""

    def forward(  # type: ignore[override]
        self, dense: Tensor, values: Tensor, lengths: Tensor, weights: Tensor
    ) -> Tensor:
        return self._call(dense, values, lengths, weights)


def trace_model(
    model: nn.Module, feature_names: Sequence[str], is_weighted: bool = False
) -> fx.GraphModule:
    """Traces a quantized model of dense features and jagged ids to tensor operations.

    Args:
        model: ``model(dense, features)`` returning a tensor, quantized, in evaluation mode.
        feature_names: the order of the features in the exported program's ``lengths``.
        is_weighted: whether the program takes per-id weights.

    Returns:
        A module of ``(dense [B, ...], values [N], lengths [K * B], weights [N] if weighted)``.

    Raises:
        ValueError: if the model is in training mode.
    """
    if model.training:
        raise ValueError("trace_model needs a model in evaluation mode; call model.eval() first.")
    root = (_PlainWeightedInputs if is_weighted else _PlainInputs)(model, feature_names)
    return fx.GraphModule(root, _Tracer().trace(root))


def export_torchscript(
    model: nn.Module, path: str | Path, feature_names: Sequence[str], is_weighted: bool = False
) -> torch.jit.ScriptModule:
    """Compiles a quantized model by TorchScript and writes it to a file.

    The file runs wherever torch and fbgemm_gpu do:
    ``torch.jit.load(path)(dense, values, lengths)``.

    Args:
        model: as for :func:`trace_model`.
        path: the file to write.
        feature_names: as for :func:`trace_model`.
        is_weighted: as for :func:`trace_model`.

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
    scripted.save(str(path))
    return scripted
