"""Asynchronous collectives of the stages, and errors that are raised on all ranks.

With one rank every exchange is the identity and no process group is needed. A CUDA tensor is
exchanged on the process group's own stream; `Pending.wait` makes the current stream wait for it and
does not block the host.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar, final

import torch.distributed as dist
from torch import Tensor

from recsys import step_stages
from recsys.contact import LostContactError, explained, raise_explained
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.wire import WireFormat
from recsys.step_stages import Stage, exchange_finished, exchange_started, waiting

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
    wire: WireFormat | None = None,
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
        wire: Format of fp32 values during the exchange; None to send them unchanged.

    Returns:
        The pending `[sum(recv_sizes)]`, starting with the block from rank 0.
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

        def decode(received: Tensor) -> Tensor:
            return wire.decode(received, value_sizes, final)

    if out is None:
        out = send.new_empty(sum(recv_sizes))
    send_sizes, recv_sizes = list(send_sizes), list(recv_sizes)
    sent, received = send, out
    if send.device.type == "cpu" and rank in (0, env.world_size - 1):
        # gloo copies a rank's own block slowly; the first and last rank can omit theirs
        own = send_sizes[rank]
        kept = slice(own, None) if rank == 0 else slice(0, send.numel() - own)
        into = slice(own, None) if rank == 0 else slice(0, out.numel() - own)
        sent, received = send[kept], out[into]
        send_sizes[rank] = recv_sizes[rank] = 0
    pending = Pending(out, None, send, decode, env, what)
    _start(pending, dist.all_to_all_single, received, sent, recv_sizes, send_sizes)
    if received is not out:  # copied during the exchange
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


# the name in newer PyTorch, and in older
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


def broadcast(env: ShardingEnv, what: ExchangeName, tensor: Tensor) -> None:
    """Fill `tensor` on every rank with the values of rank 0; `what` as for `all_to_all`."""
    if env.world_size > 1:
        with explained(env.process_group, what), waiting(what):
            dist.broadcast(tensor, group=env.process_group, group_src=0)


def raise_together(env: ShardingEnv, what: str, error: Exception | None) -> None:
    """Raise the same error on every rank if any rank has one.

    Every rank must call it. The error of the lowest failing rank is raised; its message starts with
    that rank's number.

    Args:
        env: The ranks.
        what: Action in messages, such as "load a state dict".
        error: This rank's error, or None.
    """
    if isinstance(error, LostContactError):
        raise error
    for rank, failure in enumerate(gather_objects(env.process_group, what, failure_of(error))):
        if failure is not None:
            raise_failure(rank, failure, error)


_caller_handles_errors: ContextVar[bool] = ContextVar("caller_handles_errors", default=False)


@contextmanager
def set_context(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable for the duration of a block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def caller_handles_errors() -> AbstractContextManager[None]:
    """Disable error propagation in `run_on_all_ranks`; the caller handles it."""
    return set_context(_caller_handles_errors, True)


def run_on_all_ranks(env: ShardingEnv, what: str, work: Callable[[], T]) -> T:
    """Call a function on every rank, and raise an error of one rank on all ranks.

    Args:
        env: The ranks; each must call it.
        what: Action in messages, such as "load a state dict".
        work: The function.
    """
    if env.world_size == 1 or _caller_handles_errors.get():
        return work()
    result, error = None, None
    try:
        result = work()
    except Exception as raised:  # any error: the other ranks would continue otherwise
        error = raised
    raise_together(env, what, error)
    return result  # type: ignore[return-value]  # no error: it is one


Failure: TypeAlias = tuple[str, str]
"""An error in an exchange: the name of its type, and its message."""


def failure_of(error: Exception | None) -> Failure | None:
    """Return an error in the form that is sent to other ranks."""
    if error is None:
        return None
    known = (kind for kind in type(error).__mro__ if _kind_of(kind.__name__) is kind)
    return next(known).__name__, text_of(error)


def raise_failure(rank: int, failure: Failure, cause: Exception | None) -> NoReturn:
    """Raise a rank's error, with the rank's number at its start.

    Args:
        rank: The failed rank.
        failure: Its error.
        cause: This rank's own error, or None.
    """
    name, text = failure
    text = f"On rank {rank}: {text}"
    try:
        error = _kind_of(name)(text)
    except TypeError:  # a type with further arguments
        error = RuntimeError(text)
    error._of_rank = rank  # type: ignore[attr-defined]  # a watchdog shows the traceback of this rank
    raise error from cause


def _kind_of(name: str) -> type[Exception]:
    """Return the error type of this name, from Python or derived from its ValueError."""
    ours = {kind.__name__: kind for kind in ValueError.__subclasses__()}
    kind = getattr(builtins, name, ours.get(name))
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def text_of(error: Exception) -> str:
    """Return the message of an error, or the name of its type if it has none."""
    if isinstance(error, KeyError) and error.args:  # str() would quote it
        return str(error.args[0])
    return str(error) or type(error).__name__
