"""Asynchronous collectives of the stages, and results of modules in progress.

With one rank every exchange is the identity and no process group is needed. Over NCCL a tensor is
exchanged on the process group's own stream; `Pending.wait` makes the current stream wait for it and
does not block the host. Over gloo it blocks. `LazyAwaitable` is the result of a module in progress.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.base import step_stages
from recsys.base.arguments import wrong_type
from recsys.base.contact import explained, raise_explained
from recsys.base.lazy import moved_names
from recsys.base.step_stages import Stage, exchange_finished, exchange_started, waiting
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import EXACT, WireFormat

T = TypeVar("T")


@final
@dataclass(eq=False, slots=True)
class Pending:
    """A tensor that an exchange is filling.

    Attributes:
        tensor: The tensor.
        work: The exchange, if there is one.
        keep: The input, which must exist until the exchange has ended.
        decode: Converts the received tensor to the result.
        env: Ranks of the exchange.
        what: Purpose of the exchange, for messages.
    """

    tensor: Tensor
    work: dist.Work | None = None
    keep: Tensor | None = None
    decode: Callable[[Tensor], Tensor] | None = None
    env: ShardingEnv | None = None
    what: str = ""

    def wait(self, decode: bool = True) -> Tensor:
        """Wait for the exchange and return the tensor.

        Args:
            decode: Whether to convert the received tensor to the result.

        Raises:
            LostContactError: Contact with another rank is lost.
        """
        if self.work is not None:
            try:
                with step_stages.running((Stage.WAIT, self.what)):
                    self.work.wait()
            except RuntimeError as error:
                assert self.env is not None
                raise_explained(error, self.env.process_group, self.what)
            if step_stages.observers:
                exchange_finished(self)
            self.work = self.keep = None
        if decode and self.decode is not None:
            self.tensor = self.decode(self.tensor)
            self.decode = None
        return self.tensor


def all_to_all(
    env: ShardingEnv,
    what: ExchangeName,
    send: Tensor,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    out: Tensor | None = None,
    wire: WireFormat = EXACT,
) -> Pending:
    """Start an all-to-all of blocks of a flat tensor.

    Args:
        env: Ranks of the exchange.
        what: Name of the exchange.
        send: `[sum(send_sizes)]`, starting with the block for rank 0. Do not change it before the
            wait.
        send_sizes: Number of elements for each rank.
        recv_sizes: Number of elements from each rank.
        out: `[sum(recv_sizes)]`, the output buffer; allocated if None.
        wire: Format of fp32 values during the exchange.

    Returns:
        The pending `[sum(recv_sizes)]`, starting with the block from rank 0.
    """
    rank = env.rank
    if env.world_size == 1:
        if out is None:
            return Pending(send)
        return Pending(out.copy_(send))
    decode = None
    if wire is not EXACT:
        final, value_sizes = out, recv_sizes
        send, send_sizes = wire.encode(send, send_sizes)
        out, recv_sizes = None, wire.encoded_sizes(recv_sizes)

        def decode(received: Tensor) -> Tensor:
            return wire.decode(received, value_sizes, final)

    if out is None:
        out = send.new_empty(sum(recv_sizes))
    send_sizes, recv_sizes = list(send_sizes), list(recv_sizes)
    sent, received = send, out
    if send.device.type == "cpu" and rank in (0, env.world_size - 1):
        # gloo copies a rank's own block slowly; the first and last rank can omit theirs
        own_size = send_sizes[rank]
        kept = slice(own_size, None) if rank == 0 else slice(0, send.numel() - own_size)
        into = slice(own_size, None) if rank == 0 else slice(0, out.numel() - own_size)
        sent, received = send[kept], out[into]
        send_sizes[rank] = recv_sizes[rank] = 0
    try:
        work = dist.all_to_all_single(
            received, sent, recv_sizes, send_sizes, group=env.process_group, async_op=True
        )
    except RuntimeError as error:
        raise_explained(error, env.process_group, what)
    pending = Pending(out, work, send, decode, env, what)
    if step_stages.observers:
        exchange_started(pending)
    if received is not out:  # copied during the exchange
        own_to = slice(0, own_size) if rank == 0 else slice(out.numel() - own_size, None)
        own_from = slice(0, own_size) if rank == 0 else slice(send.numel() - own_size, None)
        out[own_to].copy_(send[own_from])
    return pending


def all_reduce(
    env: ShardingEnv,
    what: ExchangeName,
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Pending:
    """Start an in-place sum over ranks, or another reduction; arguments as for `all_to_all`."""
    if env.world_size == 1:
        return Pending(tensor)
    return _start(Pending(tensor, env=env, what=what), partial(dist.all_reduce, op=op), tensor)


def reduce_scatter(env: ShardingEnv, what: ExchangeName, send: Tensor, out: Tensor) -> Pending:
    """Start a sum over ranks that gives each rank one block, in no fixed order of the ranks.

    Args:
        env: Ranks of the exchange, more than one.
        what: Name of the exchange.
        send: `[R * N]`, starting with the block for rank 0. Do not change it before the wait.
        out: `[N]`, the output buffer.
    """
    return _start(Pending(out, None, send, None, env, what), _reduce_scatter, out, send)


def all_gather(env: ShardingEnv, what: ExchangeName, send: Tensor) -> Pending:
    """Start to gather `[N]` of each rank as `[R * N]` on all; arguments as for `all_to_all`."""
    out = send.new_empty(env.world_size * send.numel())
    return _start(Pending(out, None, send, None, env, what), _all_gather, out, send)


# renamed in newer PyTorch; support both
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _start(pending: Pending, exchange: Callable[..., Any], *args: Any) -> Pending:
    env = pending.env
    assert env is not None
    try:
        pending.work = exchange(*args, group=env.process_group, async_op=True)
    except RuntimeError as error:
        raise_explained(error, env.process_group, pending.what)
    if step_stages.observers:
        exchange_started(pending)
    return pending


def gather_objects(group: dist.ProcessGroup | None, what: str, own: T) -> list[T]:
    """Return the object of each rank, by rank. Every rank must call it.

    Args:
        group: The ranks; None for this process alone.
        what: Action in messages, such as "agree on a plan".
        own: Object of this rank; small, and picklable.

    Raises:
        LostContactError: Contact with another rank is lost.
    """
    if group is None or group.size() == 1:
        return [own]
    gathered = [own] * group.size()
    with explained(group, what), waiting(what):
        dist.all_gather_object(gathered, own, group=group)
    return gathered


def broadcast_object(group: dist.ProcessGroup, what: str, own: T, source: int = 0) -> T:
    """Return the object of rank `source` of the group; arguments as for `gather_objects`."""
    box = [own]
    with explained(group, what), waiting(what):
        dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def broadcast(env: ShardingEnv, what: ExchangeName, tensor: Tensor, source: int = 0) -> None:
    """Fill `tensor` on every rank with the values of rank `source`; `what` as for `all_to_all`."""
    if env.world_size > 1:
        with explained(env.process_group, what), waiting(what):
            dist.broadcast(tensor, group=env.process_group, group_src=source)


@contextmanager
def set_context(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for the duration of a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


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


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
