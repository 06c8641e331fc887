"""TorchScript forms of modules, and cleanup after a failed compilation.

TorchScript cannot compile some modules: the lookups of a quantized collection are not in its module
tree, and functions with `*args` are not supported. Such a class defines `script_form`, which
returns a module to compile in its place.

`__prepare_scriptable__` of torch would replace modules in the given model. Forms leave the model
unchanged: modules that contain a form are shallow copies.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.jit import ScriptModule, _recursive

__all__ = ["HasScriptForm", "watch_script", "without_torchscript_warnings"]


@runtime_checkable
class HasScriptForm(Protocol):
    """A module with another form for TorchScript."""

    def script_form(self) -> nn.Module:
        """Return the module to compile, with the same inputs, outputs and tensors."""


def watch_script() -> None:
    """Make `torch.jit.script` compile forms, and reset its type store after a failure.

    Without the reset, torch keeps the type of a module that failed to compile, and raises "Can't
    redefine method" for other modules of the class. Further calls have no effect.

    Example:
        >>> import torch
        >>> watch_script()
        >>> class Head(nn.Module):
        ...     def __init__(self, is_wrong: bool) -> None:
        ...         super().__init__()
        ...         self.is_wrong = is_wrong
        ...
        ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
        ...         return x.unknown() if self.is_wrong else x
        >>> torch.jit.script(Head(True))
        Traceback (most recent call last):
        RuntimeError: ...
        >>> torch.jit.script(nn.Identity())(torch.ones(1))
        tensor([1.])
    """
    create = _recursive.create_script_module
    if hasattr(create, "_takes_forms"):
        return

    @functools.wraps(create)
    def create_script_module(
        nn_module: nn.Module, stubs_fn: Any, share_types: bool = True, is_tracing: bool = False
    ) -> ScriptModule:
        module = nn_module if is_tracing else with_forms(nn_module, {})
        try:
            return create(  # type: ignore[no-any-return, no-untyped-call]
                module, stubs_fn, share_types, is_tracing
            )
        except BaseException:
            # as in the tests of torch; later modules share no types with earlier ones
            _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
            raise

    create_script_module._takes_forms = True  # type: ignore[attr-defined]
    _recursive.create_script_module = create_script_module


def with_forms(module: nn.Module, found: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a model with the forms of its modules, or the model itself without any.

    Args:
        module: The model; unchanged.
        found: The results for modules that were visited before.
    """
    if module in found or isinstance(module, ScriptModule):
        return found.get(module, module)
    if isinstance(module, HasScriptForm) and _is_of_one_class(type(module)):
        new = with_forms(module.script_form(), found)
    else:
        children = {
            name: child if child is None else with_forms(child, found)
            for name, child in module._modules.items()
        }
        new = module
        if any(children[name] is not child for name, child in module._modules.items()):
            new = object.__new__(type(module))
            new.__dict__.update(module.__dict__, _modules=children)
    found[module] = new
    return new


def _is_of_one_class(kind: type) -> bool:
    """Return whether the form matches `forward`, and no subclass has overridden `forward`."""

    def owner(name: str) -> type:
        return next(base for base in kind.__mro__ if name in vars(base))

    return issubclass(owner("script_form"), owner("forward"))


@contextlib.contextmanager
def without_torchscript_warnings() -> Iterator[None]:
    """Suppress the warnings of torch that TorchScript is deprecated."""
    with warnings.catch_warnings():
        # FutureWarning since torch 2.14, DeprecationWarning before
        warnings.filterwarnings("ignore", r"`torch\.jit\.")
        yield
