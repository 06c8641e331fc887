"""Modules in the form that TorchScript compiles, and cleanup after a compilation that failed.

`torch.jit.script` compiles the modules of a model as they are written. Some cannot be: the lookups
of a quantized collection are no part of its module tree, and a function with `*args` has no
TorchScript. Such a class defines `script_form`, which returns the module to compile in its place.

torch itself has `__prepare_scriptable__` for this, which replaces modules in the model that was
given. Here the model stays as it is: what contains a form is a shallow copy.
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
    """A module that TorchScript compiles in another form."""

    def script_form(self) -> nn.Module:
        """Return the module to compile: same inputs and outputs, and the same tensors."""


def watch_script() -> None:
    """Let `torch.jit.script` compile forms, and reset its store of types after a failure.

    torch keeps the type of a module whose methods failed to compile. It then refuses each module of
    this class with "Can't redefine method". More calls of this function change nothing.

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
            # as torch's own tests do; modules compiled from now on share no types with earlier ones
            _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
            raise

    create_script_module._takes_forms = True  # type: ignore[attr-defined]
    _recursive.create_script_module = create_script_module


def with_forms(module: nn.Module, found: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a model with the forms of its modules; the model itself if none has one.

    Args:
        module: The model, which stays as it is.
        found: What the modules met so far became.
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
    """Return whether the form is that of `forward`, and not of one that a subclass replaced."""

    def owner(name: str) -> type:
        return next(base for base in kind.__mro__ if name in vars(base))

    return issubclass(owner("script_form"), owner("forward"))


@contextlib.contextmanager
def without_torchscript_warnings() -> Iterator[None]:
    """Ignore torch's warnings that TorchScript is deprecated: the caller has chosen it."""
    with warnings.catch_warnings():
        # a FutureWarning from torch 2.14 on, before a DeprecationWarning
        warnings.filterwarnings("ignore", r"`torch\.jit\.")
        yield
