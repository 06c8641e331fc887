"""Results of modules in progress, and entries of such results."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from recsys.kernels.arguments import wrong_type

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Awaitable(abc.ABC, Generic[T]):
    """A result in progress.

    Subclasses define `_wait_impl`, which returns the result.

    Example:
        >>> class Ones(Awaitable[torch.Tensor]):
        ...     def _wait_impl(self) -> torch.Tensor:
        ...         return torch.ones(2)
        >>> Ones().wait().tolist()
        [1.0, 1.0]
    """

    _callbacks: list[Callable[[T], T]] | None = None

    @abc.abstractmethod
    def _wait_impl(self) -> T:
        """Wait for the result and return it."""

    @property
    def callbacks(self) -> list[Callable[[T], T]]:
        """Functions that `wait` applies to the result in order; append to it."""
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    def wait(self) -> T:
        """Wait for the result and return it."""
        result = self._wait_impl()
        for callback in self._callbacks or ():
            result = callback(result)
        return result


class NoWait(Awaitable[T]):
    """A result that is available already.

    Args:
        obj: The result.
    """

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


_UNSET: Any = object()


class LazyAwaitable(Awaitable[T]):
    """A result in progress that is awaited by `wait` or by its first use.

    Attributes, indexing, iteration, arithmetic and torch functions wait first, so that code for the
    result itself works unchanged. So do `copy`, `deepcopy` and `pickle`, whose copies hold the
    result. A pytree has it as one leaf: call `wait` to map the result's tensors. Subclasses may
    define `_wait_impl` instead of passing `finish`.

    Args:
        finish: Computes the result; called once, at the first use.

    Example:
        >>> later = LazyAwaitable(lambda: torch.ones(3))
        >>> (later + 1).tolist()
        [2.0, 2.0, 2.0]
    """

    _finish: Callable[[], T] | None = None
    _result: T = _UNSET

    def __init__(self, finish: Callable[[], T] | None = None) -> None:
        if finish is not None and not callable(finish):
            wrong_type(f"{type(self).__name__}.finish", "a function, or None", finish)
        if finish is None and type(self)._wait_impl is LazyAwaitable._wait_impl:
            raise TypeError(
                f"{type(self).__name__} needs a function that computes its result; received none. "
                "Pass finish, or define _wait_impl in a subclass."
            )
        self._finish = finish

    def _wait_impl(self) -> T:
        assert self._finish is not None
        return self._finish()

    def wait(self) -> T:
        """Wait for the result and return it; the same object at every call."""
        if self._result is _UNSET:
            result = self._wait_impl() if self._finish is None else self._finish()
            for callback in self._callbacks or ():
                result = callback(result)
            self._result, self._finish = result, None
        return self._result

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Wait: only the result can be copied or pickled, not the exchange."""
        return LazyNoWait, (self.wait(),)

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """Wait: a graph of `torch.fx` contains the result."""
        return tracer.create_arg(self.wait())

    def __repr__(self) -> str:
        state = "in progress" if self._result is _UNSET else repr(self._result)
        return f"{type(self).__name__}({state})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying, pickling, probing
            raise AttributeError(name)
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        resolve = torch.utils._pytree.tree_map_only
        args, kwargs = resolve(LazyAwaitable, lambda lazy: lazy.wait(), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload, no-any-return]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self.wait())

    def __int__(self) -> int:
        return int(self.wait())  # type: ignore[call-overload, no-any-return]

    def __float__(self) -> float:
        return float(self.wait())  # type: ignore[arg-type]


def _forward_operator(name: str) -> Callable[..., Any]:
    def operate(self: LazyAwaitable[Any], *others: Any) -> Any:
        others = tuple(o.wait() if isinstance(o, LazyAwaitable) else o for o in others)
        return getattr(self.wait(), name)(*others)

    return operate


_OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv matmul rmatmul floordiv rfloordiv mod rmod pow "
    "rpow neg pos abs and rand or ror xor rxor invert lshift rlshift rshift rrshift eq ne lt le gt "
    "ge setitem contains"
)
for _name in _OPERATORS.split():
    setattr(LazyAwaitable, f"__{_name}__", _forward_operator(f"__{_name}__"))
LazyAwaitable.__hash__ = object.__hash__  # type: ignore[method-assign]


class LazyNoWait(LazyAwaitable[T]):
    """A result that is available already.

    Args:
        obj: The result.
    """

    def __init__(self, obj: T) -> None:
        super().__init__(lambda: obj)
        self.wait()


class GetItemLazyAwaitable(LazyAwaitable[V]):
    """An entry of a result in progress; it is available with the result.

    Args:
        parent: The result.
        key: Key of the entry.

    Example:
        >>> GetItemLazyAwaitable(LazyAwaitable(lambda: {"a": 3}), "a").wait()
        3
    """

    def __init__(self, parent: LazyAwaitable[Any], key: object) -> None:
        super().__init__(lambda: parent.wait()[key])


class LazyGetItemMixin(Generic[K, V]):
    """Mixin that makes entries of a `LazyAwaitable` awaitable: `pending[key]` does not wait.

    Name it before `LazyAwaitable` among the bases of a class.

    Example:
        >>> class Pending(LazyGetItemMixin[str, int], LazyAwaitable[dict[str, int]]):
        ...     def _wait_impl(self):
        ...         print("waits")
        ...         return {"a": 3}
        >>> entry = Pending()["a"]
        >>> entry + 1
        waits
        4
    """

    def __getitem__(self, key: K) -> GetItemLazyAwaitable[V]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]  # a LazyAwaitable
