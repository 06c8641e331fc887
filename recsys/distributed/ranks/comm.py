"""Collectives as the stages use them: plain tensors in, plain tensors out, finished later.

With one rank every exchange is the identity and no process group is needed. A CUDA tensor is
exchanged on the process group's own stream; `Pending.wait` makes the current stream wait for it
and does not block the host. `LazyAwaitable` is the result of a module that is under way.
"""

from __future__ import annotations

import abc
import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from recsys import step_stages
from recsys.contact import LostContactError, raise_explained
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import WireFormat
from recsys.kernels.arguments import wrong_type
from recsys.step_stages import Stage, exchange_finished, exchange_started, waiting

T = TypeVar("T")


@final
@dataclass(eq=False, slots=True)
class Pending:
    """A tensor that an exchange is filling.

    Attributes:
        tensor: what is being filled.
        work: the exchange, if there is one.
        keep: the input, which must outlive the exchange.
        decode: turns what arrived into the result.
        env: the ranks that take part.
        what: the ranks do in the exchange, for messages.
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
            decode: whether to turn what arrived into the result.

        Raises:
            LostContactError: if contact with another rank is lost.
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
    wire: WireFormat | None = None,
) -> Pending:
    """Start an all-to-all of stretches of a flat tensor.

    Args:
        env: the ranks that take part.
        what: the exchange.
        send: `[sum(send_sizes)]`, the stretch for rank 0 first. Do not change it before the wait.
        send_sizes: elements for each rank.
        recv_sizes: elements from each rank.
        out: `[sum(recv_sizes)]`, to receive into; allocated if None.
        wire: what fp32 values look like while they travel; None: as they are.

    Returns:
        The pending `[sum(recv_sizes)]`, the stretch from rank 0 first.
    """
    rank = env.rank
    if env.world_size == 1:
        if out is None:
            return Pending(send)
        return Pending(out.copy_(send))
    decode = None
    if wire is not None:
        final, value_sizes = out, recv_sizes
        send, send_sizes = wire.encode(send, send_sizes)
        out, recv_sizes = None, wire.encoded_sizes(recv_sizes)

        def decode(arrived: Tensor) -> Tensor:
            return wire.decode(arrived, value_sizes, final)

    if out is None:
        out = send.new_empty(sum(recv_sizes))
    send_sizes, recv_sizes = list(send_sizes), list(recv_sizes)
    sent, received = send, out
    if send.device.type == "cpu" and rank in (0, env.world_size - 1):
        # gloo moves a rank's own stretch slower than a copy does; at either end it can be left out
        own = send_sizes[rank]
        kept = slice(own, None) if rank == 0 else slice(0, send.numel() - own)
        into = slice(own, None) if rank == 0 else slice(0, out.numel() - own)
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
    if received is not out:  # while the others' stretches are under way
        own_to = slice(0, own) if rank == 0 else slice(out.numel() - own, None)
        own_from = slice(0, own) if rank == 0 else slice(send.numel() - own, None)
        out[own_to].copy_(send[own_from])
    return pending


def all_reduce(
    env: ShardingEnv,
    what: ExchangeName,
    tensor: Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Pending:
    """Start an in-place sum over ranks, or another reduction; `what` as for `all_to_all`."""
    if env.world_size == 1:
        return Pending(tensor)
    return _start(env, what, partial(dist.all_reduce, op=op), tensor)


def reduce_scatter(env: ShardingEnv, what: ExchangeName, send: Tensor, out: Tensor) -> Pending:
    """Start a sum over ranks of which each gets a stretch, in no fixed order of the ranks.

    Args:
        env: the ranks that take part, more than one.
        what: as for `all_to_all`.
        send: `[R * N]`, the stretch for rank 0 first. Do not change it before the wait.
        out: `[N]`, to receive into.
    """
    return _start(env, what, _reduce_scatter, out, send)


def all_gather(env: ShardingEnv, what: ExchangeName, send: Tensor) -> Pending:
    """Start to gather what all ranks have: `[N]` each, `[R * N]` on all; else as before."""
    out = send.new_empty(env.world_size * send.numel())
    return _start(env, what, _all_gather, out, send)


# of newer PyTorch, and of older
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _start(
    env: ShardingEnv,
    what: ExchangeName,
    exchange: Callable[..., Any],
    out: Tensor,
    send: Tensor | None = None,
) -> Pending:
    tensors = (out,) if send is None else (out, send)
    try:
        work: dist.Work = exchange(*tensors, group=env.process_group, async_op=True)
    except RuntimeError as error:
        raise_explained(error, env.process_group, what)
    pending = Pending(out, work, send, env=env, what=what)
    if step_stages.observers:
        exchange_started(pending)
    return pending


def gather_objects(group: dist.ProcessGroup | None, what: str, own: T) -> list[T]:
    """Return what each rank has, by rank; every rank must call it.

    Args:
        group: the ranks; None for this process alone.
        what: the ranks do in it, for messages, such as "agree on a plan".
        own: what this rank has; small, and picklable.

    Raises:
        LostContactError: if contact with another rank is lost.
    """
    if group is None or group.size() == 1:
        return [own]
    gathered = [own] * group.size()
    try:
        with waiting(what):
            dist.all_gather_object(gathered, own, group=group)
    except RuntimeError as error:
        raise_explained(error, group, what)
    return gathered


def broadcast_object(group: dist.ProcessGroup, what: str, own: T, source: int = 0) -> T:
    """Return what rank `source` of the group has; else as `gather_objects`."""
    box = [own]
    try:
        with waiting(what):
            dist.broadcast_object_list(box, group=group, group_src=source)
    except RuntimeError as error:
        raise_explained(error, group, what)
    return box[0]


def broadcast(env: ShardingEnv, what: ExchangeName, tensor: Tensor) -> None:
    """Fill `tensor` on every rank with what rank 0 has; `what` as for `all_to_all`."""
    if env.world_size == 1:
        return
    try:
        with waiting(what):
            dist.broadcast(tensor, group=env.process_group, group_src=0)
    except RuntimeError as error:
        raise_explained(error, env.process_group, what)


def raise_together(env: ShardingEnv, what: str, error: Exception | None) -> None:
    """Raise the same error on every rank if any rank has one.

    Every rank must call it. The error of the lowest failing rank is raised, its message led by
    that rank's number.

    Args:
        env: the ranks that take part.
        what: they have done, for messages, such as "load a state dict".
        error: this rank's error, or None.
    """
    if isinstance(error, LostContactError):
        raise error
    for rank, failure in enumerate(gather_objects(env.process_group, what, failure_of(error))):
        if failure is not None:
            raise_failure(rank, failure, error)


_caller_handles_errors: ContextVar[bool] = ContextVar("caller_handles_errors", default=False)


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable a value for as long as the block runs."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def caller_handles_errors() -> AbstractContextManager[None]:
    """Leave it to the caller to tell the other ranks of errors: `together` only works."""
    return holding(_caller_handles_errors, True)


def together(env: ShardingEnv, what: str, work: Callable[[], T]) -> T:
    """Call a function on every rank; an error on one of them is raised on all.

    Args:
        env: the ranks that take part; each must call it.
        what: the function does, for messages, such as "load a state dict".
        work: the function.
    """
    if env.world_size == 1 or _caller_handles_errors.get():
        return work()
    result, error = None, None
    try:
        result = work()
    except Exception as raised:  # whatever it is: the other ranks go on otherwise
        error = raised
    raise_together(env, what, error)
    return result  # type: ignore[return-value]  # no error: it is one


Failure: TypeAlias = tuple[str, str]
"""An error as it travels: the name of its type, and its text."""


def failure_of(error: Exception | None) -> Failure | None:
    """Return what other ranks are told of an error."""
    if error is None:
        return None
    known = (kind for kind in type(error).__mro__ if _kind_of(kind.__name__) is kind)
    return next(known).__name__, text_of(error)


def raise_failure(rank: int, failure: Failure, cause: Exception | None) -> NoReturn:
    """Raise a rank's error, led by its number.

    Args:
        rank: which failed.
        failure: its error.
        cause: this rank's own error, if it has one.
    """
    name, text = failure
    text = f"On rank {rank}: {text}"
    try:
        error = _kind_of(name)(text)
    except TypeError:  # a type that takes more than a text
        error = RuntimeError(text)
    error._of_rank = rank  # type: ignore[attr-defined]  # whose traceback a watchdog shows
    raise error from cause


def _kind_of(name: str) -> type[Exception]:
    """Return the error of this name, of Python or made from its ValueError."""
    ours = {kind.__name__: kind for kind in ValueError.__subclasses__()}
    kind = getattr(builtins, name, ours.get(name))
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def text_of(error: Exception) -> str:
    """Return the message of an error, or the name of its type if it has none."""
    if isinstance(error, KeyError) and error.args:  # str() would quote it
        return str(error.args[0])
    return str(error) or type(error).__name__


class Awaitable(abc.ABC, Generic[T]):
    """A result that is under way.

    A class of your own defines `_wait_impl`, which returns the result.

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
        """Block until the result is there and return it."""

    @property
    def callbacks(self) -> list[Callable[[T], T]]:
        """Function that `wait` applies to the result, one after the other; append to it."""
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    def wait(self) -> T:
        """Block until the result is there and return it."""
        result = self._wait_impl()
        for callback in self._callbacks or ():
            result = callback(result)
        return result


class NoWait(Awaitable[T]):
    """A result that is there already.

    Args:
        obj: the result.
    """

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


_UNSET: Any = object()


class LazyAwaitable(Awaitable[T]):
    """A result that is under way, and arrives by `wait` or by being used.

    Attributes, indexing, iteration, arithmetic and torch functions all wait first, so that code
    written for the result itself works unchanged; so do `copy`, `deepcopy` and `pickle`, whose
    copies hold the result. A pytree takes it as one leaf: call `wait` to map the result's tensors.
    A class of your own may define `_wait_impl` in place of passing `finish`.

    Args:
        finish: computes the result; called once, at the first use.

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
                f"{type(self).__name__} needs a way to its result: pass a function, or define "
                "_wait_impl in a class of your own."
            )
        self._finish = finish

    def _wait_impl(self) -> T:
        assert self._finish is not None
        return self._finish()

    def wait(self) -> T:
        """Block until the result is there and return it; the same object at every call."""
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
        """Wait: a graph of `torch.fx` takes the result."""
        return tracer.create_arg(self.wait())

    def __repr__(self) -> str:
        state = "under way" if self._result is _UNSET else repr(self._result)
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
    """A result that is already there.

    Args:
        obj: the result.
    """

    def __init__(self, obj: T) -> None:
        super().__init__(lambda: obj)
        self.wait()
