"""TorchScript forms of JaggedTensor and KeyedJaggedTensor: see `script`.

A form has the attributes of its batch type, which TorchScript copies at calls from Python, and the
methods that models call. As in Python, values may be longer than the bags, and features may have
different batch sizes.
"""

# TorchScript does not evaluate annotations; for attributes it needs the names of `typing`
# ruff: noqa: UP006, UP035, UP045

from typing import List, Optional, Tuple

import torch
from torch import Tensor
from torch.jit import annotate

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed_bags import InverseIndices
from recsys.sparse.keyed_jagged import KeyedJaggedTensor


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def _parts_of(tensor: Tensor, sizes: list[int]) -> list[Tensor]:
    """Split a tensor into parts of these sizes; the rest is dropped."""
    return list(tensor[: sum(sizes)].split(sizes))


def _selected(tensor: Tensor, sizes: list[int], indices: list[int]) -> Tensor:
    """Split a tensor into parts of these sizes, and concatenate the parts at `indices`."""
    parts = _parts_of(tensor, sizes)
    return torch.cat([parts[i] for i in indices] + [tensor[:0]])


def _running_sum(sizes: list[int]) -> list[int]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums


def _sums_of_runs(sizes: list[int], run_lengths: list[int]) -> list[int]:
    sums = annotate(list[int], [])
    start = 0
    for length in run_lengths:
        sums.append(sum(sizes[start : start + length]))
        start += length
    return sums  # type: ignore[no-any-return]


def _padded(
    tensor: Tensor, lengths: Tensor, desired_length: int | None, padding_value: float
) -> Tensor:
    width = 0
    if desired_length is not None:
        width = desired_length
    elif lengths.numel() > 0:
        width = int(lengths.max())
    sizes = annotate(list[int], lengths.tolist())
    shape = [len(sizes), width] + list(tensor.shape[1:])  # noqa: RUF005
    padded = tensor.new_full(shape, padding_value)
    for i, bag in enumerate(_parts_of(tensor, sizes)):
        count = min(width, bag.shape[0])
        padded[i, :count] = bag[:count]
    return padded


class _JaggedForm:
    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ):
        # a property in Python, where parts may be views that do not exist yet
        self._state: Tuple[Tensor, Optional[Tensor], Optional[Tensor], Optional[Tensor]] = (
            values,
            weights,
            lengths,
            offsets,
        )

    def values(self) -> Tensor:
        return self._state[0]

    def weights(self) -> Tensor:
        weights = self._state[1]
        if weights is None:
            raise ValueError("JaggedTensor has no weights.")
        return weights

    def weights_or_none(self) -> Tensor | None:
        return self._state[1]

    def lengths(self) -> Tensor:
        values, weights, lengths, offsets = self._state
        if lengths is None:
            assert offsets is not None
            lengths = offsets.diff()
            self._state = (values, weights, lengths, offsets)
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        return self._state[2]

    def offsets(self) -> Tensor:
        lengths = self.lengths()
        offsets = self._state[3]
        if offsets is None:
            offsets = _offsets_of(lengths)
            self._state = (self._state[0], self._state[1], lengths, offsets)
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        return self._state[3]

    def to_dense(self) -> list[Tensor]:
        return _parts_of(self.values(), annotate(list[int], self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        weights = self.weights_or_none()
        if weights is None:
            return None
        return _parts_of(weights, annotate(list[int], self.lengths().tolist()))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        return _padded(self.values(), self.lengths(), desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        weights = self.weights_or_none()
        if weights is None:
            return None
        return _padded(weights, self.lengths(), desired_length, padding_value)

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        weights = self.weights_or_none()
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
        return JaggedTensor(
            self.values().to(device, non_blocking=non_blocking),
            weights,
            self.lengths().to(device, non_blocking=non_blocking),
            None,
        )


class _KeyedJaggedForm:
    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | List[List[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ):
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        if lengths is not None:
            lengths = lengths.reshape(-1)
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        per_rank = annotate(Optional[List[List[int]]], None)
        if isinstance(stride_per_key_per_rank, Tensor):
            per_rank = annotate(List[List[int]], stride_per_key_per_rank.tolist())
        elif stride_per_key_per_rank is not None and len(stride_per_key_per_rank) > 0:
            per_rank = stride_per_key_per_rank
        if per_rank is None and stride_per_key is not None:
            per_rank = [[size] for size in stride_per_key]
        if stride is None:
            if per_rank is not None:
                stride = max([0] + [sum(sizes) for sizes in per_rank])
            else:
                bags = 0
                if lengths is not None:
                    bags = lengths.numel()
                elif offsets is not None:
                    bags = offsets.numel() - 1
                stride = bags // max(len(keys), 1)
        if inverse_indices is not None:
            if per_rank is None:
                per_rank = [[stride] for _ in keys]
            stride = inverse_indices[1].size(1)
        self._stride: int = stride
        self._stride_per_key = annotate(Optional[list[int]], None)
        self._stride_per_key_per_rank: list[list[int]] | None = per_rank
        self._inverse_indices: InverseIndices | None = inverse_indices
        self._length_per_key: list[int] | None = length_per_key
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key

    def weights(self) -> Tensor:
        weights = self._weights
        if weights is None:
            raise ValueError("KeyedJaggedTensor has no weights.")
        return weights

    def lengths(self) -> Tensor:
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None
            lengths = offsets.diff()
            self._lengths = lengths
        return lengths

    def offsets(self) -> Tensor:
        offsets = self._offsets
        if offsets is None:
            offsets = _offsets_of(self.lengths())
            self._offsets = offsets
        return offsets

    def stride_per_key(self) -> list[int]:
        strides = self._stride_per_key
        if strides is None:
            per_rank = self._stride_per_key_per_rank
            if per_rank is None:
                strides = [self._stride for _ in self._keys]
            else:
                strides = [sum(sizes) for sizes in per_rank]
        return strides  # type: ignore[no-any-return]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        per_rank = self._stride_per_key_per_rank
        return annotate(list[list[int]], []) if per_rank is None else per_rank

    def inverse_indices(self) -> InverseIndices:
        inverse = self._inverse_indices
        if inverse is None:
            raise ValueError("KeyedJaggedTensor has no inverse indices.")
        return inverse

    def index_per_key(self) -> dict[str, int]:
        index: dict[str, int] = {}
        for i, key in enumerate(self._keys):
            index[key] = i
        return index

    def length_per_key(self) -> list[int]:
        known = self._length_per_key
        if known is None:
            bags = _parts_of(self.lengths(), self.stride_per_key())
            known = annotate(list[int], [])
            if len(bags) > 0:
                known = annotate(list[int], torch.stack([part.sum() for part in bags]).tolist())
            self._length_per_key = known
        return known

    def offset_per_key(self) -> list[int]:
        known = self._offset_per_key
        if known is None:
            known = _running_sum(self.length_per_key())
            self._offset_per_key = known
        return known

    def lengths_offset_per_key(self) -> list[int]:
        return _running_sum(self.stride_per_key())

    def sync(self) -> KeyedJaggedTensor:
        self.offset_per_key()
        return self  # type: ignore[return-value]

    def unsync(self) -> KeyedJaggedTensor:
        self._length_per_key = None
        self._offset_per_key = None
        return self  # type: ignore[return-value]

    def flatten_lengths(self) -> KeyedJaggedTensor:
        return self  # type: ignore[return-value]

    def size_in_bytes(self) -> int:
        size = self._values.numel() * self._values.element_size()
        for part in [self._weights, self._lengths, self._offsets]:
            if part is not None:
                size += part.numel() * part.element_size()
        inverse = self._inverse_indices
        if inverse is not None:
            size += inverse[1].numel() * inverse[1].element_size()
        return size

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(f"KeyedJaggedTensor has no key {key}; received keys {self._keys}.")
        place = self._keys.index(key)
        sizes, strides = self.length_per_key(), self.stride_per_key()
        start, end = sum(sizes[:place]), sum(sizes[: place + 1])
        weights: Tensor | None = None
        if self._weights is not None:
            weights = self.weights()[start:end]
        first = sum(strides[:place])
        lengths = self.lengths()[first : first + strides[place]]
        return JaggedTensor(self._values[start:end], weights, lengths)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        features: dict[str, JaggedTensor] = {}
        for key in self._keys:
            features[key] = self[key]
        return features

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> KeyedJaggedTensor:
        sizes, size = self.length_per_key(), len(self._keys)
        for i in indices:
            if i < 0 or i >= size:
                raise IndexError(
                    f"KeyedJaggedTensor.permute: indices must be in 0..{size - 1}; received {i}."
                )
        weights: Tensor | None = None
        if self._weights is not None:
            weights = _selected(self.weights(), sizes, indices)
        per_rank = self._stride_per_key_per_rank
        if per_rank is not None:
            per_rank = [per_rank[i] for i in indices]
        return KeyedJaggedTensor(
            [self._keys[i] for i in indices],
            _selected(self._values, sizes, indices),
            weights,
            _selected(self.lengths(), self.stride_per_key(), indices),
            None,
            self._stride,
            per_rank,
            None,
            [sizes[i] for i in indices],
            None,
            None,
            None,
            None,
            self._inverse_indices,
        )

    def split(self, segments: list[int]) -> List[KeyedJaggedTensor]:
        if sum(segments) != len(self._keys):
            raise ValueError(
                "KeyedJaggedTensor.split: segments must be counts that add up to the number of "
                f"keys, {len(self._keys)}; received {segments}."
            )
        parts = annotate(List[KeyedJaggedTensor], [])
        start = 0
        for size in segments:
            parts.append(self.permute(list(range(start, start + size)), None))
            start += size
        return parts  # type: ignore[no-any-return]

    def dist_labels(self) -> list[str]:
        labels = ["lengths", "values"]
        if self._stride_per_key_per_rank is not None:
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        values = _sums_of_runs(self.length_per_key(), key_splits)
        splits = [_sums_of_runs(self.stride_per_key(), key_splits), values]
        if self._stride_per_key_per_rank is not None:
            splits.append(key_splits)
        if self._weights is not None:
            splits.append(values)
        return splits

    def dist_tensors(self) -> list[Tensor]:
        total = sum(self.length_per_key())
        tensors = [self.lengths(), self._values[:total]]
        if self._stride_per_key_per_rank is not None:
            tensors.append(torch.tensor(self.stride_per_key(), device=self._values.device))
        if self._weights is not None:
            tensors.append(self.weights()[:total])
        return tensors

    def with_values(self, values: Tensor) -> KeyedJaggedTensor:
        return self._with(values, self._weights, self.lengths(), self._inverse_indices)

    def to(
        self,
        device: torch.device,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        weights = self._weights
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
            if dtype is not None:
                weights = weights.to(dtype)
        inverse = self._inverse_indices
        if inverse is not None:
            inverse = (inverse[0], inverse[1].to(device, non_blocking=non_blocking))
        values = self._values.to(device, non_blocking=non_blocking)
        lengths = self.lengths().to(device, non_blocking=non_blocking)
        return self._with(values, weights, lengths, inverse)

    def pin_memory(self) -> KeyedJaggedTensor:
        weights, inverse = self._weights, self._inverse_indices
        if weights is not None:
            weights = weights.pin_memory()
        if inverse is not None:
            inverse = (inverse[0], inverse[1].pin_memory())
        return self._with(self._values.pin_memory(), weights, self.lengths().pin_memory(), inverse)

    def _with(
        self,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        inverse: InverseIndices | None,
    ) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            self._keys,
            values,
            weights,
            lengths,
            None,
            self._stride,
            self._stride_per_key_per_rank,
            None,
            self._length_per_key,
            None,
            self._offset_per_key,
            self._index_per_key,
            None,
            inverse,
        )
