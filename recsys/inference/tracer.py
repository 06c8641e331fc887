"""Graphs of models that take jagged batches, and TorchScript of these graphs.

`Tracer` is `torch.fx`'s, which sees the collections of this library as their lookups: a trainable
one as a call of one operation, a quantized one as a module of plain tensors. With this module
imported, `torch.jit.script` compiles what it traces, and any module that takes or returns a
KeyedJaggedTensor, a JaggedTensor or a KeyedTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast, get_type_hints

from torch import Tensor, fx, nn

from recsys.inference.quantized_collection import QuantizedCollection
from recsys.inference.quantized_tables import PositionWeightsOfKeys, QuantizedTables
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessorDictWrapper
from recsys.modules.position_weights import with_weights
from recsys.sparse.script import add_forms

__all__ = ["Tracer", "symbolic_trace"]

add_forms()

_LEAVES = QuantizedTables, PositionWeightsOfKeys


class Tracer(fx.Tracer):
    """Traces a model of collections to a graph.

    Args:
        leaf_modules: Names of classes of modules that are called as they are, not seen through.

    Example:
        >>> import torch
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "films", feature_names=["f"])])
        >>> graph = torch.fx.GraphModule(ebc, Tracer().trace(ebc))
        >>> features = KeyedJaggedTensor(["f"], torch.tensor([3]), lengths=torch.tensor([1, 0]))
        >>> torch.equal(graph(features).values(), ebc(features).values())
        True
    """

    def __init__(self, leaf_modules: Sequence[str] | None = None) -> None:
        super().__init__()
        self._leaf_names = frozenset(leaf_modules or ())

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> fx.Graph:
        """Trace a model or a function to a graph; arguments as `symbolic_trace`."""
        graph = super().trace(root, concrete_args)
        # under `from __future__ import annotations` they are texts, which TorchScript cannot read
        if any(isinstance(node.type, str) for node in graph.nodes):
            hints = get_type_hints(root.forward if isinstance(root, nn.Module) else root)
            for node in graph.nodes:
                if isinstance(node.type, str):
                    node.type = hints["return" if node.op == "output" else node.target]
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is called as it is."""
        return (
            isinstance(m, _LEAVES)
            or type(m).__name__ in self._leaf_names
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace the call of a module; position weights are seen as a module of plain tensors."""
        weights = _position_weights(m)
        if weights is None:
            return super().call_module(m, forward, args, kwargs)
        (features,) = (*args, *kwargs.values())
        if isinstance(features, fx.Proxy):
            raise fx.proxy.TraceError(
                f"{type(m).__name__} needs the keys of the batch, which a traced batch does not "
                "have. Use recsys.inference.trace_model, which is told the feature_names."
            )
        leaf = PositionWeightsOfKeys(weights, features.keys())
        return with_weights(features, leaf(features.values(), features.lengths()))

    def path_of_module(self, mod: nn.Module) -> str:
        """Return the path by which a graph calls a module."""
        if not isinstance(mod, _LEAVES):
            return super().path_of_module(mod)
        root = self.root
        for path, child in root.named_modules():
            if isinstance(child, QuantizedCollection) and child.served_lookups is mod:
                return f"{path}.served_lookups".lstrip(".")
        name = f"position_weights_{len(list(root.children()))}"
        root.add_module(name, mod)
        return name


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: Sequence[str] | None = None,
) -> fx.GraphModule:
    """Trace a model to a graph module.

    Args:
        root: The model, or a function.
        concrete_args: Arguments by name that are not traced but fixed.
        leaf_modules: As for `Tracer`.

    Returns:
        A module that does what the model does, by its graph.

    Raises:
        torch.fx.proxy.TraceError: The model branches on the values of what is traced.

    Example:
        >>> import torch
        >>> symbolic_trace(torch.nn.Linear(2, 2))(torch.zeros(1, 2)).shape
        torch.Size([1, 2])
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    name = type(root).__name__ if isinstance(root, nn.Module) else root.__name__
    return fx.GraphModule(tracer.root, graph, name)


def _position_weights(module: nn.Module) -> dict[str, Tensor] | None:
    """Return the position weights of a feature processor, by feature, if it has only such."""
    if type(module) is PositionWeightedModuleCollection:
        return dict(module.position_weights_dict)
    if isinstance(module, FeatureProcessorDictWrapper):
        parts = dict(module.named_children())
        if all(type(part) is PositionWeightedModule for part in parts.values()):
            # as an attribute it would be a proxy by now
            return {n: cast(Tensor, p._parameters["position_weight"]) for n, p in parts.items()}
    return None
