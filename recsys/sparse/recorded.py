"""Functions that `torch.fx` records as one node of a graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from torch import fx
from torch.fx import _symbolic_trace

_Function = TypeVar("_Function", bound=Callable[..., Any])


def recorded(function: _Function) -> _Function:
    """Record calls of a function with proxies of `torch.fx` as one node each.

    For functions that iterate over, or branch on, the value of a proxy, such as a list. Outside of
    a trace the cost is one flag test.

    Args:
        function: A function of a module, or the function of a static method. TorchScript compiles
            it without its decorators.

    Returns:
        The function, which records its calls in a trace.

    Example:
        >>> import torch
        >>> @recorded
        ... def total(tensors):
        ...     return sum(tensor.sum() for tensor in tensors)
        >>> graph = torch.fx.symbolic_trace(lambda tensors: total(tensors))
        >>> graph([torch.ones(2), torch.ones(3)])
        tensor(5.)
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _symbolic_trace.is_fx_symbolic_tracing():
            proxy = _first_proxy((args, kwargs))
            if proxy is not None:
                return proxy.tracer.create_proxy("call_function", call, args, kwargs)
        return function(*args, **kwargs)

    plain = inspect.unwrap(function)
    call.__prepare_scriptable__ = lambda: plain  # type: ignore[attr-defined]
    return cast(_Function, call)


def _first_proxy(given: Any) -> fx.Proxy | None:
    if isinstance(given, fx.Proxy):
        return given
    if not isinstance(given, Mapping | list | tuple):
        return None
    parts = given.values() if isinstance(given, Mapping) else given
    return next((proxy for part in parts if (proxy := _first_proxy(part)) is not None), None)
