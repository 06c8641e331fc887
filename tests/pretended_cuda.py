"""A pretended CUDA device, which records where code on a GPU would wait.

Under :class:`PretendedCuda` memory of the CPU answers as memory of ``cuda:0``: ``tensor.device``,
``is_cuda`` and ``is_cpu`` report it, so that code takes its CUDA branches, with real values. Every
storage is followed: results made on the device, or computed from tensors on it, are on it. Notes
are taken, in the order of events, of

- reads: values of the device that the host asks for (``item``, ``tolist``, ``cpu()``, ``bool``),
  and events that it waits for;
- sizes: operations whose result has a size that depends on values, so that the host must read it;
- uploads that wait: from memory that is not pinned, or without ``non_blocking``;
- mixtures: operations on tensors of the device and of the host, which raise on CUDA.

Operations inside kernels, time and the order of streams are not seen. Triton's kernels run in its
interpreter.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.kernels import ops, tbe_fbgemm_module
from tests.fast_scans import fast_scans

KERNELS = {
    "attention_grad_triton": ("attention_backward",),
    "attention_triton": ("attention_forward",),
    "ops_triton": (
        "build_header",
        "complete_cumsum",
        "make_safe",
        "move_segments",
        "pack",
        "places_of_bags",
        "row_ids",
    ),
    "output_triton": ("gather", "scatter_grad"),
    "ragged_triton": ("gather_ragged", "scatter_grad_ragged"),
    "sequence_triton": ("gather_rows", "scatter_grad_rows"),
    "update_triton": ("sum_and_update", "sum_by_row", "sum_into", "update_entries"),
}
CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_ANSWERS = {name: getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu")}
_RUN_BACKWARD = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
_READS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "numpy", "__array__"}
_SIZED = {
    "aten.nonzero.default",
    "aten.masked_select.default",
    "aten._unique2.default",
    "aten.unique_consecutive.default",
    "aten.unique_dim.default",
    "aten.equal.default",
}
_MAY_MIX = {"copy_", "_to_copy", "set_", "_pin_memory", "detach", "alias", "view"}


# of all that were ever pretended: the library may keep a tensor from one to the next
_ON_DEVICE: dict[int, StorageWeakRef] = {}
_PINNED: dict[int, StorageWeakRef] = {}


class _Event:
    """An event that is done, or not yet; the host's wait for it is noted."""

    def __init__(self, device: PretendedCuda) -> None:
        self._device, self._is_awaited = device, False

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def query(self) -> bool:
        """Done unless the device is behind."""
        return self._is_awaited or not self._device.is_behind

    def synchronize(self) -> None:
        """Note that the host waits."""
        self._is_awaited = True
        self._device.note("read", "an event")


class PretendedCuda(TorchFunctionMode):
    """See the module.

    Args:
        triton: whether Triton's kernels are used.

    Attributes:
        notes: ``(kind, what, where)`` since the last :meth:`forget`.
        launched: names of Triton's kernels that ran.
        is_behind: whether events are not done until the host waits for them.
    """

    def __init__(self, triton: bool = False) -> None:
        super().__init__()
        self._triton, self._is_inside = triton, False
        self.is_behind = False
        self.notes: list[tuple[str, str, str]] = []
        self.launched: set[str] = set()
        self._device, self._pinned = _ON_DEVICE, _PINNED
        self._operations = _Operations(self)
        self._patches = contextlib.ExitStack()
        self._depth = 0

    def __enter__(self) -> PretendedCuda:
        super().__enter__()
        if not self._depth:
            self._operations.__enter__()
            for holder, name, value in (
                (torch.cuda, "Event", lambda: _Event(self)),
                (torch.cuda, "current_stream", lambda device=None: None),
                (torch.cuda, "current_device", lambda: 0),
                (torch.cuda, "is_current_stream_capturing", lambda: False),
                (torch.cuda, "set_device", lambda device: None),
                (ops, "FBGEMM_DEVICES", frozenset(("cpu", "cuda"))),
                (ops, "HAS_TRITON", self._triton),
                (tbe_fbgemm_module, "has_cuda_ops", lambda: False),  # of lookups
                (torch.autograd, "_engine_run_backward", self._run_backward),
                *(self._kernels() if self._triton else ()),
            ):
                self._patches.enter_context(mock.patch.object(holder, name, value))
            if self._triton:
                self._patches.enter_context(fast_scans())
        self._depth += 1
        return self

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.is_behind = False  # else later tests wait for its checks
            self._patches.close()
            self._operations.__exit__(*error)
        super().__exit__(*error)

    def _kernels(self) -> Iterator[tuple[object, str, object]]:
        """Triton's kernels, each as one operation on the device."""

        def on_device(name: str, kernel: Callable[..., Any], *args: Any) -> Any:
            if self._is_inside:  # a comparison at the first use of a kernel
                return kernel(*args)
            assert all(map(self.is_on_device, _tensors(args)))
            self.launched.add(name)
            self._is_inside = True
            try:
                found = kernel(*args)
            finally:
                self._is_inside = False
            self.put(found)
            return found

        for file, names in KERNELS.items():
            module = importlib.import_module(f"recsys.kernels.{file}")
            for name in names:
                yield module, name, partial(on_device, name, getattr(module, name))

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        with self:  # no mode is on while `backward` is called: this one must see its operations
            return _RUN_BACKWARD(*args, **kwargs)

    def forget(self) -> None:
        """Drops the notes."""
        self.notes = []

    def is_on_device(self, tensor: object) -> bool:
        """Return True if a tensor's memory is the device's."""
        return isinstance(tensor, Tensor) and _holds(self._device, tensor)

    def put(self, tree: object) -> None:
        """Puts the memory of tensors on the device."""
        for tensor in _tensors(tree):
            self._device[_key(tensor)] = StorageWeakRef(tensor.untyped_storage())

    def note(self, kind: str, what: str) -> None:
        """Notes something, and the line of the library that caused it."""
        frame, where = sys._getframe(1), "?"
        while frame is not None:
            path = frame.f_code.co_filename
            if "/recsys/" in path and "/tests/" not in path:
                where = f"{path[path.rfind('/recsys/') + 1 :]}:{frame.f_lineno}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        self.notes.append((kind, what, where))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_inside:
            return func(*args, **kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func == _ANSWERS["device"]:
            return CUDA if self.is_on_device(first) else func(*args)
        if func == _ANSWERS["is_cuda"]:
            return self.is_on_device(first)
        if func == _ANSWERS["is_cpu"]:
            return not self.is_on_device(first) and func(*args)
        name = getattr(func, "__name__", "")
        if name in _READS:
            if self.is_on_device(first):
                self.note("read", name)
            return func(*args, **kwargs)
        if name == "is_pinned" and first is not None:
            return _holds(self._pinned, first)
        if name == "pin_memory" and first is not None:
            if _holds(self._pinned, first):
                return first
            pinned = first.clone()
            self._pinned[_key(pinned)] = StorageWeakRef(pinned.untyped_storage())
            return pinned
        if name in ("to", "cpu", "cuda") and first is not None:
            return self._move(name, first, list(args[1:]), kwargs)
        return self._make(name, func, args, kwargs)

    def _move(self, name: str, tensor: Tensor, rest: list[Any], kwargs: dict[str, Any]) -> Tensor:
        source = target = self.is_on_device(tensor)
        given = [*rest, kwargs.pop("device", None)]
        dtype = kwargs.get("dtype", tensor.dtype)
        if name != "to":
            target = name == "cuda"
        for value in given:
            if isinstance(value, torch.device | str):
                target = torch.device(value).type == "cuda"
            elif isinstance(value, Tensor):
                target, dtype = self.is_on_device(value), value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
        if source == target:
            moved = Tensor.to(tensor, dtype)
        else:
            moved = Tensor.to(tensor, dtype, copy=True)
            if source:
                self.note("read", "a copy to the host")
                self._device.pop(_key(moved), None)
            elif not (_holds(self._pinned, tensor) and kwargs.get("non_blocking")):
                self.note("upload", "a blocking copy to the device")
        if target:
            self.put(moved)
        return moved

    def _make(self, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        on_device = device is not None and torch.device(device).type == "cuda"
        is_pinned = bool(kwargs.pop("pin_memory", False)) if "pin_memory" in kwargs else False
        if on_device:
            kwargs["device"] = _CPU
            if name in ("tensor", "as_tensor", "asarray"):
                self.note("upload", f"torch.{name} on the device")
        out = func(*args, **kwargs)
        if on_device:
            self.put(out)
        if is_pinned:
            for tensor in _tensors(out):
                self._pinned[_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return out


class _Operations(TorchDispatchMode):
    """Notes of every operation, also in backward."""

    def __init__(self, device: PretendedCuda) -> None:
        super().__init__()
        self._of = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._of._is_inside:
            return func(*args, **kwargs)
        cuda, name = self._of, str(func)
        given = _tensors((args, kwargs))
        on_device = [cuda.is_on_device(tensor) for tensor in given]
        if any(on_device) and not name.startswith("c10d"):
            self._note(name, args, kwargs, given, on_device)
        out = func(*args, **kwargs)
        if any(on_device) and not name.startswith(("c10d", "aten.copy_", "aten._local_scalar")):
            seen = {_key(tensor) for tensor in given}
            cuda.put([tensor for tensor in _tensors(out) if _key(tensor) not in seen])
        return out

    def _note(
        self, name: str, args: Any, kwargs: Any, given: list[Tensor], on_device: list[bool]
    ) -> None:
        cuda = self._of
        short = name.split(".")[1]
        if name in _SIZED:
            cuda.note("size", short)
        elif name == "aten.repeat_interleave.Tensor" and kwargs.get("output_size") is None:
            cuda.note("size", "repeat_interleave without output_size")
        elif short in ("permute_1D_sparse_data", "permute_2D_sparse_data"):
            total = args[4] if len(args) > 4 else kwargs.get("permuted_lengths_sum")
            if total is None:
                cuda.note("size", f"{short} without a total")
        elif name.startswith(("aten.index.Tensor", "aten.index_put")):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                cuda.note("size", "a mask as an index")
        elif name == "fbgemm.block_bucketize_sparse_features.default" and not args[0].numel():
            cuda.note("launch", "a kernel with no blocks")
        elif name == "aten.copy_.default" and on_device[0] != on_device[1]:
            is_pinned = any(_holds(cuda._pinned, tensor) for tensor in given)
            if not (is_pinned and (kwargs.get("non_blocking") or args[2:] == (True,))):
                cuda.note("upload" if on_device[0] else "read", "copy_")
        if short not in _MAY_MIX:
            for tensor, here in zip(given, on_device, strict=True):
                if not here and tensor.dim():
                    cuda.note("mixture", f"{short} with a host tensor {tuple(tensor.shape)}")


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _holds(places: dict[int, StorageWeakRef], tensor: Tensor) -> bool:
    found = places.get(_key(tensor))
    return found is not None and not found.expired()
