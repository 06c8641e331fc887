"""Modules for a serving process: a module that predicts, and a factory that builds it.

The factory provides metadata about batching, which the server interprets.
"""

from __future__ import annotations

import abc
import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import device_of
from recsys.base.checked import check_fields, checked
from recsys.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)


class PredictModule(nn.Module, abc.ABC):
    """Base of modules that call a model with a batch of named tensors, without gradients.

    A subclass defines `predict_forward`. The state dict has the names of the model, without a
    prefix.

    Args:
        module: The model.
        device: Device of the model, such as "cuda:1", which is the current GPU during a call. None:
            the current GPU is not changed.

    Example:
        >>> class Predict(PredictModule):
        ...     def predict_forward(self, batch: dict[str, Tensor]) -> Tensor:
        ...         return self.predict_module(batch["dense"])
        >>> predict = Predict(nn.Linear(2, 1), "cpu")
        >>> predict({"dense": torch.ones(3, 2)}).requires_grad, list(predict.state_dict())
        (False, ['weight', 'bias'])
    """

    @checked
    def __init__(self, module: nn.Module, device: str | None = None) -> None:
        super().__init__()
        self._module = module
        self._device = None if device is None else device_of("PredictModule.device", device)
        self.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
            _add_module_to_names
        )

    @property
    def predict_module(self) -> nn.Module:
        """The model."""
        return self._module

    @abc.abstractmethod
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        """Call the model.

        Args:
            batch: Tensors by name.

        Returns:
            The result, in a form that the server supports.
        """

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Call `predict_forward` in inference mode, on the device.

        Args:
            batch: Tensors by name.
        """
        on_cuda = self._device is not None and self._device.type == "cuda"
        current = torch.cuda.device(self._device) if on_cuda else contextlib.nullcontext()
        with current, torch.inference_mode():
            return self.predict_forward(batch)

    def state_dict(  # type: ignore[override]
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the model's state dict; arguments as for `torch.nn.Module`."""
        return self._module.state_dict(
            destination=destination,  # type: ignore[arg-type]
            prefix=prefix,
            keep_vars=keep_vars,
        )


def _add_module_to_names(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    for name in [name for name in state_dict if name.startswith(prefix)]:
        state_dict[f"{prefix}_module.{name.removeprefix(prefix)}"] = state_dict.pop(name)


@final
@dataclass
class BatchingMetadata:
    """Batching of one input over several requests.

    Args:
        type: Kind of input, such as "dense", "sparse" or "embedding".
        device: Device of the batch, "cpu" or "cuda".
        pinned: Names of the tensors in pinned memory.
    """

    type: str
    device: str
    pinned: list[str]

    def __post_init__(self) -> None:
        check_fields(self)


@final
@dataclass
class QualNameMetadata:
    """Metadata of a method that a server calls.

    Args:
        need_preproc: Requests must be preprocessed.
    """

    need_preproc: bool

    def __post_init__(self) -> None:
        check_fields(self)


class PredictFactory(abc.ABC):
    """Base of factories that build a model in a serving process and describe its inputs.

    A subclass defines the five abstract methods. `PredictFactoryPackager` writes it to a file with
    its code and configs.

    Example:
        >>> class Predict(PredictModule):
        ...     def predict_forward(self, batch: dict[str, Tensor]) -> Tensor:
        ...         return self.predict_module(batch["dense"])
        >>> class Factory(PredictFactory):
        ...     def create_predict_module(self) -> nn.Module:
        ...         return Predict(nn.Linear(2, 1))
        ...
        ...     def batching_metadata(self) -> dict[str, BatchingMetadata]:
        ...         return {"dense": BatchingMetadata("dense", "cpu", pinned=[])}
        ...
        ...     def result_metadata(self) -> str:
        ...         return "tensor"
        ...
        ...     def run_weights_independent_tranformations(self, predict_module):
        ...         return predict_module
        ...
        ...     def run_weights_dependent_transformations(self, predict_module):
        ...         return predict_module
        >>> Factory().batching_metadata_json()
        '{"dense": {"type": "dense", "device": "cpu", "pinned": []}}'
    """

    @abc.abstractmethod
    def create_predict_module(self) -> nn.Module:
        """Return the model, with or without weights, which a server can load later."""

    @abc.abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return the batching of each input, by name."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata` as JSON."""
        return json.dumps({name: asdict(data) for name, data in self.batching_metadata().items()})

    @abc.abstractmethod
    def result_metadata(self) -> str:
        """Return the kind of result, by which a server splits it over the requests."""

    @abc.abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Transform the model before it has weights, for example quantize its tables.

        Args:
            predict_module: The result of `create_predict_module`.
        """

    @abc.abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Transform the model with weights.

        Args:
            predict_module: The model with its weights.
        """

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return metadata of the methods that a server calls, by name; empty by default."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata` as JSON."""
        return json.dumps({name: asdict(data) for name, data in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """Return example inputs, for example for benchmarks; empty by default."""
        return {}


P = TypeVar("P", bound=PredictModule)


@checked
def quantize_dense(
    predict_module: P,
    dtype: torch.dtype,
    additional_embedding_module_type: Sequence[type[nn.Module]] = (),
) -> P:
    """Cast the dense parameters and buffers of a model to float16, in place.

    Args:
        predict_module: The model. Embedding collections, quantized or not, are not changed.
        dtype: `torch.float16`.
        additional_embedding_module_type: Other classes of modules that are not changed.

    Returns:
        The model.

    Raises:
        ValueError: The dtype is not `torch.float16`.

    Example:
        >>> class Predict(PredictModule):
        ...     def predict_forward(self, batch: dict[str, Tensor]) -> Tensor:
        ...         return self.predict_module(batch["dense"])
        >>> quantize_dense(Predict(nn.Linear(2, 1)), torch.float16).predict_module.weight.dtype
        torch.float16
    """
    if dtype is not torch.float16:
        raise ValueError(
            f"quantize_dense.dtype must be torch.float16; received {dtype}. For int8 use torchao."
        )
    for part in _dense_parts(predict_module, additional_embedding_module_type):
        part._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)
    return predict_module


def quantize_feature(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast the floating-point inputs of a model to the dtype of its dense parameters.

    Args:
        module: The model. Tables of embedding collections are not dense parameters.
        inputs: Tensors of any dtype.

    Example:
        >>> cast, ids = quantize_feature(nn.Linear(2, 1).half(), (torch.ones(2), torch.tensor([3])))
        >>> cast.dtype, ids.dtype
        (torch.float16, torch.int64)
    """
    parameters = (p for part in _dense_parts(module) for p in part.parameters(recurse=False))
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), None)
    if dtype is None:
        return inputs
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)


def _dense_parts(module: nn.Module, others: Sequence[type[nn.Module]] = ()) -> Iterator[nn.Module]:
    """Yield all modules except embedding collections and `others`, with their submodules."""
    kept: tuple[Any, ...] = EmbeddingBagCollectionInterface, EmbeddingCollectionInterface, *others
    if isinstance(module, kept):
        return
    yield module
    for child in module.children():
        yield from _dense_parts(child, others)


@checked
def trim_torch_package_prefix_from_typename(typename: str) -> str:
    """Return the name of a type without the prefix of `torch.package`.

    Args:
        typename: Full name of a class.

    Example:
        >>> trim_torch_package_prefix_from_typename("<torch_package_0>.models.Ranker")
        'models.Ranker'
    """
    first, dot, rest = typename.partition(".")
    is_prefix = first.startswith("<torch_package_") and first.endswith(">")
    return rest if dot and is_prefix else typename
