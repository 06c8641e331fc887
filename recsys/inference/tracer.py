"""Graphs of models with jagged batches, which `torch.jit.script` can compile.

`Tracer` is a tracer of `torch.fx`. It records the lookup of a trainable collection as a call of one
operation, and the lookup of a quantized collection as a call of its exported form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

from torch import fx, nn

from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.lookup import Served
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["Tracer", "symbolic_trace"]

_CONTAINERS = JaggedTensor, KeyedJaggedTensor, KeyedTensor


class Tracer(fx.Tracer):
    """Tracer of models with collections.

    Args:
        leaf_modules: Names of module classes that are called instead of traced.

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
        # TorchScript does not support the strings of `from __future__ import annotations`
        if any(isinstance(node.type, str) for node in graph.nodes):
            hints = get_type_hints(root.forward if isinstance(root, nn.Module) else root)
            for node in graph.nodes:
                if isinstance(node.type, str):
                    node.type = hints["return" if node.op == "output" else node.target]
        for node in graph.find_nodes(op="placeholder"):
            # a batch that the trace uses is not None
            kinds = [kind for kind in get_args(node.type) if kind is not type(None)]
            if node.users and not node.args and len(kinds) == 1 and kinds[0] in _CONTAINERS:
                node.type = kinds[0]
        return graph

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is called instead of traced."""
        return type(m).__name__ in self._leaf_names or super().is_leaf_module(
            m, module_qualified_name
        )

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace the call of a module; for a quantized collection, of its exported form."""
        is_quantized = isinstance(m, QuantizedCollection)
        path = self.path_of_module(m) + ".served" * is_quantized
        if not isinstance(m, QuantizedCollection | Served) or self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        (features,) = (*args, *kwargs.values())
        served = m.served if isinstance(m, QuantizedCollection) else m
        proxy = self.create_proxy("call_module", path.lstrip("."), (features,), {})
        return proxy if isinstance(features, fx.Proxy) else served.wrap_proxy(proxy, features)

    def create_arg(self, a: Any) -> Any:
        """Convert an argument of a traced call.

        A batch made of proxies becomes a call that builds the batch.
        """
        if isinstance(a, JaggedTensor | KeyedJaggedTensor):
            parts: dict[str, Any] = {"weights": a.weights_or_none(), "lengths": a.lengths()}
            if not isinstance(a, KeyedJaggedTensor):
                return self._built(type(a), (a.values(),), parts)
            strides, inverse = a.stride_per_key_per_rank(), a.inverse_indices_or_none()
            more = {
                "stride_per_key_per_rank": None if inverse and _are_proxies(strides) else strides,
                "length_per_key": a.length_per_key_or_none(),
                "inverse_indices": inverse,
            }
            parts |= {name: part for name, part in more.items() if part}
            return self._built(type(a), (a.keys(), a.values()), parts)
        if isinstance(a, KeyedTensor):
            widths = a.keys(), a.length_per_key()
            return self._built(KeyedTensor, (*widths, a.values(), a.key_dim()), {})
        return super().create_arg(a)

    def _built(self, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        return self.create_proxy("call_function", kind, args, kwargs).node


def _are_proxies(strides: list[list[int]]) -> bool:
    return any(isinstance(size, fx.Proxy) for sizes in strides for size in sizes)


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: Sequence[str] | None = None,
) -> fx.GraphModule:
    """Trace a model to a graph module.

    Args:
        root: The model, or a function.
        concrete_args: Constant arguments, by name.
        leaf_modules: As for `Tracer`.

    Returns:
        A module that runs the graph of the model.

    Raises:
        torch.fx.proxy.TraceError: The model branches on traced values.

    Example:
        >>> import torch
        >>> symbolic_trace(torch.nn.Linear(2, 2))(torch.zeros(1, 2)).shape
        torch.Size([1, 2])
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    name = type(root).__name__ if isinstance(root, nn.Module) else root.__name__
    return fx.GraphModule(tracer.root, graph, name)
