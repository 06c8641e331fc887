"""Jagged operations on plain tensors: FBGEMM's kernels, each with a pure-PyTorch twin.

The twin is used if fbgemm_gpu is missing, if its kernel does not support the dtype or the gradient,
and if `RECSYS_KERNELS=torch` is set. Results are equal bit for bit.

Shapes: `F` features, `B` batch size, `M` segments (bags), `N` values, `P` segments picked,
`D` columns, `W` buckets.
"""

import importlib.util
import logging
import os
import shutil
import sysconfig
import warnings
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor, fx


def _is_kept(record: logging.LogRecord) -> bool:
    """Return whether to print a record that FBGEMM logs while it is imported.

    FBGEMM 1.6 warns 14 times that its own table has no entry for version 1.6. `recsys doctor`
    checks the version instead.
    """
    return "_fbgemm_torch_compat_table has no entry" not in record.getMessage()


logging.getLogger().addFilter(_is_kept)
try:
    import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)

    HAS_FBGEMM = True
except ModuleNotFoundError as error:
    if error.name != "fbgemm_gpu":
        raise
    HAS_FBGEMM = False
except (ImportError, OSError, RuntimeError) as error:
    # An fbgemm_gpu built for another torch fails to load its library.
    warnings.warn(
        f"fbgemm_gpu is installed but cannot be loaded ({error}); using the slower PyTorch "
        "kernels. Run `python -m recsys doctor` to see which versions fit.",
        RuntimeWarning,
        stacklevel=2,
    )
    HAS_FBGEMM = False
finally:
    logging.getLogger().removeFilter(_is_kept)

# The CPU build of FBGEMM beside a CUDA build of torch has no kernels for CUDA tensors.
FBGEMM_DEVICES = frozenset(
    device
    for device, key in (("cpu", "CPU"), ("cuda", "CUDA"))
    if HAS_FBGEMM
    and os.environ.get("RECSYS_KERNELS", "fbgemm") != "torch"
    and torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::asynchronous_complete_cumsum", key)
)
"""Types of devices on which FBGEMM's kernels are used.

Functions read it directly, without a helper function, because each batch calls them often.
"""


def _why_triton_fails() -> str:
    """Return the reason for which Triton cannot compile its launcher; empty if it can."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler; install gcc or clang, or set CC"
    scheme = sysconfig.get_default_scheme()
    header = sysconfig.get_path("include", scheme.replace("posix_local", "posix_prefix"))
    if not os.path.exists(os.path.join(header, "Python.h")):
        return f"Triton finds no {header}/Python.h; install Python's headers, such as python3-dev"
    return ""


_HAS_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_IS_TRITON_WANTED = os.environ.get("RECSYS_KERNELS", "fbgemm") != "torch"
WHY_TRITON_FAILS = ""
"""Reason for which Triton is installed but does not work; empty if it works."""
if _HAS_TRITON_INSTALLED and _IS_TRITON_WANTED and os.environ.get("TRITON_INTERPRET") != "1":
    WHY_TRITON_FAILS = _why_triton_fails()
HAS_TRITON = _HAS_TRITON_INSTALLED and _IS_TRITON_WANTED and not WHY_TRITON_FAILS
"""True if kernels on CUDA can use Triton, a part of PyTorch's CUDA builds on Linux."""

_CUDA = frozenset(("cuda",))
_INT_DTYPES = frozenset((torch.int32, torch.int64))
_VALUE_DTYPES = frozenset((torch.int32, torch.int64, torch.float32))
_BUCKET_WEIGHT_DTYPES = frozenset((torch.float32, torch.float64))


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a kernel of Triton can run now: nothing is traced, and no tensor is fake."""
    is_traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return type(tensor) is Tensor and not is_traced


def complete_cumsum(lengths_M: Tensor) -> Tensor:
    """Convert lengths to offsets: the running sum with a leading zero.

    Args:
        lengths_M: `[M]`, int32 or int64.

    Returns:
        Offsets `[M + 1]` of the same dtype.

    Example:
        >>> complete_cumsum(torch.tensor([2, 0, 3]))
        tensor([0, 2, 2, 5])
    """
    device_type = lengths_M.device.type  # a proxy's of `torch.fx` is neither
    if HAS_TRITON and device_type in _CUDA and _has_memory(lengths_M):
        from recsys.kernels import ops_triton

        return ops_triton.complete_cumsum(lengths_M)
    if device_type in FBGEMM_DEVICES:
        return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths_M)  # type: ignore[no-any-return]
    # without `dtype`, `cumsum` widens int32 to int64
    return torch.nn.functional.pad(lengths_M.cumsum(0, dtype=lengths_M.dtype), (1, 0))


def segment_sum(values_N: Tensor, offsets_M1: Tensor) -> Tensor:
    """Sum integers within each segment, e.g. bag lengths within each feature.

    Args:
        values_N: `[N]`, int32 or int64.
        offsets_M1: `[M + 1]`, int32 or int64; segment `i` is `values[offsets[i]:offsets[i + 1]]`.

    Returns:
        `[M]`, of the values' dtype.

    Example:
        >>> segment_sum(torch.tensor([2, 0, 3]), torch.tensor([0, 2, 3]))
        tensor([2, 3])
    """
    if values_N.device.type in FBGEMM_DEVICES and values_N.dtype in _INT_DTYPES:
        return torch.ops.fbgemm.segment_sum_csr(1, offsets_M1, values_N)  # type: ignore[no-any-return]
    return complete_cumsum(values_N).index_select(0, offsets_M1).diff()


def permute_1d(
    permute_P: Tensor,
    lengths: Tensor,
    values_N: Tensor,
    weights_N: Tensor | None = None,
    total: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pick segments of a jagged tensor, or whole features of a feature-major batch, in a new order.

    Args:
        permute_P: `[P]`, int32 or int64: the segments or features to pick, in order; repeats and
            omissions are fine.
        lengths: `[M]` values per segment, or `[F, B]` values per bag; int32 or int64.
        values_N: `[N]`, or `[N, ...]` rows, of any dtype; differentiable.
        weights_N: `[N]`, or `[N, ...]`, of any dtype; differentiable.
        total: The number of values picked, where known; saves a device-to-host read on GPU.

    Returns:
        Lengths `[P]` or `[P, B]`, picked values and weights.

    Example:
        >>> permute_1d(torch.tensor([1, 0]), torch.tensor([2, 1]), torch.tensor([7, 8, 9]))
        (tensor([1, 2]), tensor([9, 7, 8]), None)
        >>> lengths = torch.tensor([[2, 0], [1, 1]])
        >>> permute_2d(torch.tensor([1]), lengths, torch.tensor([5, 6, 7, 8]))
        (tensor([[1, 1]]), tensor([7, 8]), None)
    """
    # FBGEMM's permutes lack autograd and silently misread rows `[N, D]`
    fits = (
        lengths.device.type in FBGEMM_DEVICES
        and values_N.dtype in _VALUE_DTYPES
        and values_N.dim() == 1
        and not (values_N.requires_grad and torch.is_grad_enabled())
    )
    if weights_N is not None:
        fits = (
            fits
            and weights_N.dtype is torch.float32
            and weights_N.dim() == 1
            and not (weights_N.requires_grad and torch.is_grad_enabled())
        )
    if lengths.dim() == 2:
        if fits and lengths.is_cuda:
            return torch.ops.fbgemm.permute_2D_sparse_data(  # type: ignore[no-any-return]
                permute_P.int(), lengths, values_N, weights_N, total
            )
        # On CPU whole features move as blocks: measured 5 times faster at 1,000 features than
        # FBGEMM's 2-D kernel, which copies bag by bag.
        values_per_feature_F = lengths.sum(1, dtype=lengths.dtype)
        _, values, weights = permute_1d(permute_P, values_per_feature_F, values_N, weights_N, total)
        return lengths.index_select(0, permute_P), values, weights
    if fits:
        return torch.ops.fbgemm.permute_1D_sparse_data(  # type: ignore[no-any-return]
            permute_P.int(), lengths, values_N, weights_N, total
        )
    lengths_P = lengths.index_select(0, permute_P)
    starts_M = complete_cumsum(lengths)
    starts_P = complete_cumsum(lengths_P)
    # A picked value is as far from its segment's start as in the source.
    shift_P = starts_M.index_select(0, permute_P) - starts_P[:-1]
    index = shift_P.repeat_interleave(lengths_P, output_size=total)
    index += torch.arange(index.numel(), device=index.device)
    return (
        lengths_P,
        values_N.index_select(0, index),
        None if weights_N is None else weights_N.index_select(0, index),
    )


permute_2d = permute_1d
"""FBGEMM's name of `permute_1d` for lengths `[F, B]`."""


def move_segments(source_N: Tensor, order_P: np.ndarray, sizes_M: np.ndarray) -> Tensor:
    """Pick segments in a new order, as `permute_1d` does, if the host knows their sizes.

    On CUDA with Triton, it is one upload and one kernel.

    Args:
        source_N: `[N]` values of any dtype, one dim, segment by segment.
        order_P: `[P]` int32: the segments to pick, in order.
        sizes_M: `[M]` int64: values per segment.

    Returns:
        The picked values; no autograd.

    Example:
        >>> values = torch.tensor([1, 2, 3])
        >>> move_segments(values, np.array([1, 0], dtype=np.int32), np.array([2, 1]))
        tensor([3, 1, 2])
    """
    device = source_N.device
    if device.type != "cuda":
        order, sizes = torch.from_numpy(order_P), torch.from_numpy(sizes_M)
        if device.type in FBGEMM_DEVICES and source_N.dtype in _VALUE_DTYPES:
            return torch.ops.fbgemm.permute_1D_sparse_data(order, sizes, source_N)[1]  # type: ignore[no-any-return]
        return permute_1d(order, sizes, source_N)[1]
    plan, total = plan_of_moves(order_P, sizes_M)
    if not HAS_TRITON:
        order, sizes = upload(order_P, device), upload(sizes_M, device)
        return permute_1d(order, sizes, source_N, None, total)[1]
    from recsys.kernels.ops_triton import move_segments as move

    return move(source_N, upload(plan, device), total)


def swap_segments(values_N: Tensor, sizes_OI: np.ndarray) -> Tensor:
    """Reorder segments from `[outer][inner]` to `[inner][outer]`.

    Args:
        values_N: `[N]` values of any dtype, one dim, segment by segment.
        sizes_OI: `[O, I]` int64: values of each segment.

    Returns:
        `[N]`; no autograd. Inverse: the same function with `sizes_OI.T`.

    Example:
        >>> swap_segments(torch.tensor([1, 2, 2, 3, 4]), np.array([[1, 2], [1, 1]]))
        tensor([1, 3, 2, 2, 4])
    """
    order = np.arange(sizes_OI.size, dtype=np.int32).reshape(sizes_OI.shape).T.ravel()
    return move_segments(values_N, order, sizes_OI.ravel())


def plan_of_moves(order_P: np.ndarray, sizes_M: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the starts and the shifts of the picked segments; see `ops_triton`.

    Args:
        order_P: `[P]` the segments to pick, in order.
        sizes_M: `[M]` values per segment.

    Returns:
        `[2P]` int64, and the number of values picked.
    """
    sizes_P = sizes_M[order_P]
    ends_P = np.cumsum(sizes_P)
    begins_P, starts_M = ends_P - sizes_P, np.cumsum(sizes_M) - sizes_M
    plan = np.concatenate([begins_P, starts_M[order_P] - begins_P])
    return plan, int(ends_P[-1]) if ends_P.size else 0


def block_bucketize(
    lengths_FB: Tensor,
    values_N: Tensor,
    weights_N: Tensor | None,
    block_sizes_F: Tensor,
    num_buckets: int,
    boundaries: Sequence[Tensor] | None = None,
    return_positions: bool = False,
    *,
    batch_size_per_feature: Tensor | None = None,
    max_batch_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sort ids by the owner of their row block.

    Ids must be in range (see `find_bad_ids`): bad ids go to an unspecified bucket.

    Args:
        lengths_FB: `[F * B]`, feature-major, int32 or int64: ids per bag.
        values_N: `[N]` row ids, int32 or int64.
        weights_N: `[N]` per-id weights, or None.
        block_sizes_F: `[F]`, of the ids' dtype: rows per bucket, at least 1; bucket `w` of
            feature `f` owns the rows from `w * block_sizes[f]` up to the next bucket's first.
            FBGEMM reads a 0 as "id modulo num_buckets", so a 0 on the CPU raises an error.
        num_buckets: `W`, number of owners.
        boundaries: For uneven blocks: per feature the first row of each bucket and, last, the
            number of rows, `[W + 1]` of the ids' dtype. `block_sizes_F` is then not read.
        return_positions: Also return the new position of each id.
        batch_size_per_feature: `[F]`, of the ids' dtype, where features have different batch
            sizes; lengths are then `[sum of batch sizes]`.
        max_batch_size: The largest of `batch_size_per_feature`, required with it.

    Returns:
        Lengths `[W * F * B]`, ids `[N]` relative to their block's first row, weights `[N]` or
        None, ordered `[bucket][feature][sample]`; and `position` with
        `new_values[position[i]]` coming from `values_N[i]`, or None.

    Raises:
        ValueError: If a block size on CPU is below 1.

    Example:
        >>> lengths, ids = torch.tensor([2, 1]), torch.tensor([0, 7, 6])
        >>> block_bucketize(lengths, ids, None, torch.tensor([5]), 2)
        (tensor([1, 0, 1, 1]), tensor([0, 2, 1]), None, None)
    """
    if block_sizes_F.is_cpu and boundaries is None and bool((block_sizes_F < 1).any()):
        raise ValueError(
            "block_bucketize: every block size must be at least 1 row; received "
            f"{block_sizes_F.tolist()}. Give an empty table's features a block size of 1."
        )
    if not lengths_FB.numel():  # FBGEMM would launch a CUDA kernel with no blocks, which fails
        positions = torch.empty_like(values_N) if return_positions else None
        return lengths_FB, values_N, weights_N, positions
    fits = lengths_FB.device.type in FBGEMM_DEVICES
    if weights_N is not None and fits:  # FBGEMM's bucketizing lacks autograd
        wants_grad = weights_N.requires_grad and torch.is_grad_enabled()
        fits = weights_N.dtype in _BUCKET_WEIGHT_DTYPES and not wants_grad
    if fits:
        if batch_size_per_feature is not None:
            batch_size_per_feature = batch_size_per_feature.to(lengths_FB.dtype)
        lengths, ids, weights, _, positions = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths_FB,
            values_N,
            bucketize_pos=False,
            sequence=return_positions,
            block_sizes=block_sizes_F if boundaries is None else torch.ones_like(block_sizes_F),
            my_size=num_buckets,
            weights=weights_N,
            batch_size_per_feature=batch_size_per_feature,
            max_B=-1 if max_batch_size is None else max_batch_size,
            block_bucketize_pos=None if boundaries is None else list(boundaries),
        )
        return lengths, ids, weights, positions

    num_bags = lengths_FB.numel()
    bag_N = torch.arange(num_bags, device=values_N.device).repeat_interleave(
        lengths_FB, output_size=values_N.numel()
    )
    feature_N = _features_of(bag_N, num_bags, block_sizes_F.numel(), batch_size_per_feature)
    bucket_N, start_N = _find_buckets(values_N, feature_N, block_sizes_F, num_buckets, boundaries)
    destination_N = bucket_N * num_bags + bag_N
    # stable, as in FBGEMM: ids of a bag keep their order inside a bucket
    order_N = destination_N.argsort(stable=True)
    lengths = lengths_FB.new_zeros(num_buckets * num_bags)
    lengths.index_add_(0, destination_N, torch.ones_like(destination_N, dtype=lengths.dtype))
    positions = torch.empty_like(values_N) if return_positions else None
    if positions is not None:
        positions[order_N] = torch.arange(len(order_N), device=order_N.device).to(positions.dtype)
    return (
        lengths,
        (values_N - start_N).index_select(0, order_N),
        None if weights_N is None else weights_N.index_select(0, order_N),
        positions,
    )


def jagged_to_padded_dense(
    values_N: Tensor, offsets_M1: Tensor, max_length: int, padding_value: float = 0.0
) -> Tensor:
    """Convert segments to rows of a matrix, padded or truncated to `max_length`.

    Args:
        values_N: `[N]`, or `[N, D]` rows, of any dtype; differentiable.
        offsets_M1: `[M + 1]`, int32 or int64.
        max_length: Columns of the result.
        padding_value: Value of the padding.

    Returns:
        `[M, max_length]`, or `[M, max_length, D]`, of the values' dtype.

    Example:
        >>> jagged_to_padded_dense(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), 2)
        tensor([[1, 0],
                [2, 3]])
    """
    # proxies of torch.fx have neither device nor dtype
    if isinstance(cast(object, values_N), fx.Proxy) or (
        values_N.device.type in FBGEMM_DEVICES
        and values_N.dtype in _VALUE_DTYPES
        and values_N.dim() <= 2
    ):
        return torch.ops.fbgemm.jagged_to_padded_dense(  # type: ignore[no-any-return]
            values_N, [offsets_M1], [max_length], padding_value
        )
    column = torch.arange(max_length, device=values_N.device)
    filled = column < offsets_M1.diff().unsqueeze(1)
    padded = values_N.new_full((*filled.shape, *values_N.shape[1:]), padding_value)
    kept = (offsets_M1[:-1].unsqueeze(1) + column)[filled]
    return padded.index_put((filled,), values_N.index_select(0, kept))


def upload(
    values: Sequence[int] | np.ndarray | Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copy numbers from the host to a device without waiting for it.

    Args:
        values: Numbers of any shape; a list holds integers, which become int64.
        device: Target device.
        dtype: Of the result; None: the values'.

    Returns:
        The tensor. On CPU it may share the memory of `values`.

    Example:
        >>> upload([1, 2], torch.device("cpu"))
        tensor([1, 2])
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return tensor.to(device)
    # from pageable memory a copy would wait for all work queued on the stream
    return tensor.pin_memory().to(device, non_blocking=True)


def copy_to(tensor: Tensor, device: torch.device | str, non_blocking: bool = False) -> Tensor:
    """Copy a tensor to a device; with `non_blocking` the host does not wait, pinned or not.

    `Tensor.to(device, non_blocking=True)` waits if the host memory is not pinned.

    Args:
        tensor: Of any shape.
        device: Target device.
        non_blocking: Whether the host continues while a GPU copies.

    Example:
        >>> copy_to(torch.ones(2), "cpu", non_blocking=True)
        tensor([1., 1.])
    """
    if (
        non_blocking
        and torch.device(device).type == "cuda"
        and isinstance(tensor, Tensor)  # no proxy of `torch.fx`
        and tensor.is_cpu
    ):
        return upload(tensor, torch.device(device))
    return tensor.to(device, non_blocking=non_blocking)


def _features_of(
    bag_N: Tensor, num_bags: int, num_features: int, batch_size_per_feature: Tensor | None
) -> Tensor:
    """Return the feature of each bag."""
    if batch_size_per_feature is None:
        return bag_N // max(1, num_bags // max(1, num_features))
    ends_F = batch_size_per_feature.cumsum(0)
    return torch.searchsorted(ends_F, bag_N.to(ends_F.dtype), right=True)


def _find_buckets(
    values_N: Tensor,
    feature_N: Tensor,
    block_sizes_F: Tensor,
    num_buckets: int,
    boundaries: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Return the bucket of each id and the first row of that bucket."""
    if boundaries is None:
        size_N = block_sizes_F.index_select(0, feature_N)
        bucket_N = (values_N // size_N).clamp(0, num_buckets - 1)
        return bucket_N, bucket_N * size_N
    # Concatenated tables make one sorted list of block starts, so one search finds every id.
    # Of several blocks starting at the same row all but the last are empty; `right` finds the last.
    boundaries_FW = torch.stack(list(boundaries)).long()
    rows_F = boundaries_FW[:, -1]
    base_F = rows_F.cumsum(0) - rows_F
    starts_FW = boundaries_FW[:, :-1]
    found_N = torch.searchsorted(
        (starts_FW + base_F.unsqueeze(1)).flatten(),
        base_F.index_select(0, feature_N) + values_N,
        right=True,
    )
    bucket_N = (found_N - 1 - feature_N * num_buckets).clamp(0, num_buckets - 1)
    return bucket_N, starts_FW[feature_N, bucket_N].to(values_N.dtype)
