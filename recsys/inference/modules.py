"""What a serving process is given: a module that predicts, and a factory that makes it.

The factory says how requests are batched, which only the server that asks it knows the meaning of.
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

from recsys.inference.quantized_collection import QuantizedCollection, Weights
from recsys.kernels.arguments import device_of
from recsys.kernels.checked import check_fields, checked
from recsys.modules.embedding_modules import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
)

__all__ = [
    "BatchingMetadata",
    "PredictFactory",
    "PredictModule",
    "QualNameMetadata",
    "assign_weights_to_tbe",
    "get_table_to_weights_from_tbe",
    "quantize_dense",
    "quantize_feature",
    "trim_torch_package_prefix_from_typename",
]


class PredictModule(nn.Module, abc.ABC):
    """Calls a model with a batch of named tensors, without gradients.

    A class of your own defines `predict_forward`. The state dict is that of the model: no
    name says that it is wrapped.

    Args:
        module: the model.
        device: where it computes, such as "cuda:1": that GPU is the current one during a call.
            None: whichever is.

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
            batch: tensors by name.

        Returns:
            What the server sends back, in a form that it knows.
        """

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Call `predict_forward` in inference mode, on the device.

        Args:
            batch: tensors by name.
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
        """Return the model's state dict; argument are those of `torch.nn.Module`."""
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
    """How a server makes a batch of one input from those of several requests.

    Args:
        type: such as "dense", "sparse" or "embedding".
        device: where the batch goes, "cpu" or "cuda".
        pinned: names of the tensors that are made in pinned memory.
    """

    type: str
    device: str
    pinned: list[str]

    def __post_init__(self) -> None:
        check_fields(self)


@final
@dataclass
class QualNameMetadata:
    """What a server has to know of a method that it calls.

    Args:
        need_preproc: whether requests must be preprocessed.
    """

    need_preproc: bool

    def __post_init__(self) -> None:
        check_fields(self)


class PredictFactory(abc.ABC):
    """Makes a model in the process that serves it, and says how that is to call it.

    A class of your own defines the five abstract methods.
    `PredictFactoryPackager` writes it to a file with its
    code and its configs.

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
        """Return the model, with or without weights; a server loads them later."""

    @abc.abstractmethod
    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        """Return how each input is batched, by its name."""

    def batching_metadata_json(self) -> str:
        """Return `batching_metadata` as JSON."""
        return json.dumps({name: asdict(data) for name, data in self.batching_metadata().items()})

    @abc.abstractmethod
    def result_metadata(self) -> str:
        """Return how a server splits the result over the requests, in its words."""

    @abc.abstractmethod
    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        """Change the model before it has weights, such as by quantizing its tables.

        Args:
            predict_module: of `create_predict_module`.
        """

    @abc.abstractmethod
    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        """Change the model once it has weights.

        Args:
            predict_module: with its weights.
        """

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        """Return what a server has to know of the methods that it calls: by default nothing."""
        return {}

    def qualname_metadata_json(self) -> str:
        """Return `qualname_metadata` as JSON."""
        return json.dumps({name: asdict(data) for name, data in self.qualname_metadata().items()})

    def model_inputs_data(self) -> dict[str, Any]:
        """Return examples of inputs, such as for benchmarks: by default none."""
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
        predict_module: the model. What is below embedding collections, quantized or not, stays.
        dtype: `torch.float16`.
        additional_embedding_module_type: other classes of modules that stay.

    Returns:
        The model.

    Raises:
        ValueError: if it is another dtype.

    Example:
        >>> class Predict(PredictModule):
        ...     def predict_forward(self, batch: dict[str, Tensor]) -> Tensor:
        ...         return self.predict_module(batch["dense"])
        >>> quantize_dense(Predict(nn.Linear(2, 1)), torch.float16).predict_module.weight.dtype
        torch.float16
    """
    if dtype is not torch.float16:
        raise ValueError(
            f"quantize_dense casts to torch.float16; received {dtype}. For int8 layers use torchao."
        )
    for part in _dense_parts(predict_module, additional_embedding_module_type):
        part._apply(lambda t: t.to(dtype) if t.is_floating_point() else t, recurse=False)
    return predict_module


def quantize_feature(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the inputs of a model, floating-point ones in the dtype of its dense parameters.

    Args:
        module: the model. Tables of embedding collections do not count as dense.
        inputs: tensors of any dtype.

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
    """Yield the modules that are not embedding collections or others, nor below them."""
    kept: tuple[Any, ...] = (
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
        *others,
    )
    if isinstance(module, kept):
        return
    yield module
    for child in module.children():
        yield from _dense_parts(child, others)


@checked
def get_table_to_weights_from_tbe(model: nn.Module) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return the rows of a quantized model's tables.

    Args:
        model: with quantized collections.

    Returns:
        By table name its rows, uint8 `[rows, bytes]`, and their scales and biases, uint8
        `[rows, 4]`, two numbers of float16 per row; None for tables of float16 or float32. So
        quantized collections take them as `table_name_to_quantized_weights`.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(10, 64, "t", feature_names=["f"])
        >>> model = quantize_embeddings(EmbeddingBagCollection(tables=[table]), torch.int8)
        >>> [part.shape for part in get_table_to_weights_from_tbe(model)["t"]]
        [torch.Size([10, 64]), torch.Size([10, 4])]
    """
    found: dict[str, tuple[Tensor, Tensor | None]] = {}
    for collection in _collections(model):
        found.update(collection.quantized_weights())
    return found


@checked
def assign_weights_to_tbe(model: nn.Module, table_to_weight: Weights) -> None:
    """Write the rows of a quantized model's tables, in place.

    Args:
        model: with quantized collections.
        table_to_weight: as of `get_table_to_weights_from_tbe`; it may hold other tables too.

    Raises:
        ValueError: if a table of the model is missing, or its rows do not fit.
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


@checked
def trim_torch_package_prefix_from_typename(typename: str) -> str:
    """Return the name of a type without what `torch.package` puts before it.

    Args:
        typename: such as the name of a module's class with its module.

    Example:
        >>> trim_torch_package_prefix_from_typename("<torch_package_0>.models.Ranker")
        'models.Ranker'
    """
    first, dot, rest = typename.partition(".")
    is_prefix = first.startswith("<torch_package_") and first.endswith(">")
    return rest if dot and is_prefix else typename
