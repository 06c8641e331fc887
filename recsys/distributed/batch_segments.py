"""One rank's batch: checked, and cut into the segments that travel.

A segment is a whole feature, or the part of a feature whose ids fall in one block of rows of a
row-split table (see ``layout``).

Shape names: ``B`` samples of this rank, ``K`` features of the given batch, ``G`` segments, ``N``
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.id_routes import IdRoute, Routes, build_routes
from recsys.distributed.layout import Layout
from recsys.kernels import ops
from recsys.kernels.bounds import bad_id_message, find_bad_ids
from recsys.kernels.types import BoundsCheckMode
from recsys.sparse import KeyedJaggedTensor


class HostCounts(NamedTuple):
    """Ids of a batch, as the host knows them once it has read the header.

    Attributes:
        of_segments: ``counts_G`` of :class:`Segments`.
        given: its ``given_counts``.
        to_ranks: ids sent to each rank.
    """

    of_segments: np.ndarray
    given: np.ndarray
    to_ranks: list[int]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """One rank's input in segments; ``counts_G`` has whole features first, then row blocks.

    Attributes:
        batch_size: samples.
        lengths: of the whole features' bags and of the row blocks' bags, where there are any.
        values: their ids.
        weights: their weights, if weighted.
        places: where ``values`` lie in ``source``, if something returns to the ids.
        counts_G: ids of each segment.
        source: the features that were cut.
        routes: their ways.
        bag_counts: ``[row-split slots, B]`` ids per bag.
        given: the batch as the user gave it.
        checked: with one batch size, before bad ids were replaced.
        bad_N: which ids are bad; None: none.
        inverse: ``[N]`` place among the distinct ids of each id.
        given_counts: ``[K]`` ids of each key, if they were made distinct, else ``[0]``.
        weights_need_grad: whether a gradient must return to the weights.
    """

    batch_size: int
    lengths: list[Tensor]
    values: list[Tensor]
    weights: list[Tensor]
    places: list[Tensor]
    counts_G: Tensor
    source: KeyedJaggedTensor
    routes: Routes
    bag_counts: Tensor | None
    given: KeyedJaggedTensor
    checked: KeyedJaggedTensor
    bad_N: Tensor | None
    inverse: Tensor | None
    given_counts: Tensor
    weights_need_grad: bool

    def sent_places(self, host: HostCounts) -> Tensor:
        """Returns the places in the batch of the ids sent, rank by rank and stream by stream."""
        routes = self.routes
        if not self.places:
            return self.counts_G.new_empty(0)
        counts = self.counts_G if routes.use_raw else self.counts_G[routes.num_keys :]
        places = _cat(self.places)
        _, sent, _ = ops.permute_1d(routes.sent, counts, places, None, sum(host.to_ranks))
        return sent

    def id_route(
        self,
        host: HostCounts,
        received_counts: np.ndarray,
        replica_places: Sequence[Tensor],
    ) -> IdRoute:
        """Returns how embeddings find back to the ids of this batch.

        Args:
            host: counts of this batch.
            received_counts: ids received from each rank in each stream of this rank.
            replica_places: places in the batch of the ids of each replica group.
        """
        routes = self.routes
        slots = routes.slot_keys
        counts_G, counts_K = host.of_segments, host.of_segments[: routes.num_keys]
        starts_K = np.cumsum(counts_K) - counts_K
        sent_counts = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [counts_G[s] for s in routes.segments]
            + [counts_K[p] for p in routes.replica_positions]
        )
        return IdRoute(
            positions=_cat([self.sent_places(host), *replica_places]),
            sent_counts=sent_counts,
            received_counts=received_counts,
            slot_counts=counts_K[slots],
            slot_starts=starts_K[slots],
            inverse=self.inverse,
            slot_keys=slots,
            key_counts=counts_K if self.inverse is None else host.given,
        )


@final
class BatchCutter:
    """Checks batches and cuts them.

    Args:
        layout: the compiled placement.
        feature_names: the module's distinct features, in the layout's numbering.
        is_weighted: whether the features carry weights.
        device: where batches and tables are.
        mode: what to do with an id outside its table.
        pooled: whether embeddings are pooled bag by bag; else they return to their ids.
        distinct: whether each id of a feature travels once (not with ``pooled``).
    """

    def __init__(
        self,
        layout: Layout,
        feature_names: Sequence[str],
        is_weighted: bool,
        device: torch.device,
        mode: BoundsCheckMode,
        *,
        pooled: bool = True,
        distinct: bool = False,
    ) -> None:
        assert not (pooled and distinct)
        self.layout = layout
        self.feature_names = tuple(feature_names)
        self.is_weighted = is_weighted
        self.device = device
        self.mode = mode
        self.pooled = pooled
        self.distinct = distinct
        self._keys: list[str] | None = None
        self._routes: Routes
        self._blocks = {
            dtype: self._split_blocks(dtype)
            for dtype in (torch.int32, torch.int64)
            if layout.split_slots
            and max(layout.tables[layout.slots[i].table].num_rows for i in layout.split_slots)
            <= torch.iinfo(dtype).max
        }

    def cut(self, features: KeyedJaggedTensor) -> Segments:
        """Checks a batch and cuts it.

        Bad ids are noted in the result, not raised.

        Raises:
            KeyError: if it lacks a feature.
            TypeError: if ids are not integers.
            ValueError: if it is on another device, lacks weights, or lacks inverse indices.
        """
        self._check(features)
        routes = self._routes_for(features.keys())
        checked = _with_one_batch_size(features)
        bad_N = self._find_bad_ids(checked, routes)
        source = checked if bad_N is None else _without(checked, bad_N)
        return self._cut(features, checked, source, routes, bad_N)

    def _split_blocks(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor] | None]:
        """Rows per block of each split slot; and the blocks' boundaries where a split is uneven."""
        tables = [self.layout.tables[self.layout.slots[i].table] for i in self.layout.split_slots]
        blocks = [table.row_starts[1] for table in tables]
        sizes = torch.tensor(blocks, dtype=dtype, device=self.device)
        if all(
            table.row_starts == tuple(range(0, table.num_rows, block))
            for table, block in zip(tables, blocks, strict=True)
        ):
            return sizes, None
        num_edges = self.layout.num_buckets + 1
        edges = [
            (list(table.row_starts) + [table.num_rows] * num_edges)[:num_edges] for table in tables
        ]
        return sizes, [torch.tensor(e, dtype=dtype, device=self.device) for e in edges]

    def _routes_for(self, keys: list[str]) -> Routes:
        if keys != self._keys:
            self._routes = build_routes(
                self.layout, self.feature_names, keys, self.is_weighted, self.device
            )
            self._keys = list(keys)
        return self._routes

    def _check(self, features: KeyedJaggedTensor) -> None:
        values = features.values()
        if values.dtype not in (torch.int32, torch.int64):
            raise TypeError(
                f"The ids of a batch must be int32 or int64; received {values.dtype}. "
                "Convert with values.long()."
            )
        if values.device != self.device:
            raise ValueError(
                f"The batch must be on the device of the tables, {self.device}; received a batch "
                f"on "
                f"{values.device}. Move it with features.to(device)."
            )
        if (
            self.pooled
            and features.variable_stride_per_key()
            and features.inverse_indices_or_none() is None
        ):
            raise ValueError(
                "A batch with a batch size per feature needs inverse_indices, which say the row of "
                "each sample: without them pooled embeddings have no common batch size; received "
                f"stride_per_key={features.stride_per_key()[:10]} and none. Pass inverse_indices "
                "to the KeyedJaggedTensor."
            )
        if self.is_weighted and features.weights_or_none() is None:
            raise ValueError(
                "This collection was made with is_weighted=True and needs a batch with weights; "
                "received a batch without."
            )

    def _find_bad_ids(self, features: KeyedJaggedTensor, routes: Routes) -> Tensor | None:
        """Returns ``[N]`` bool for ids outside their table; None: certainly none."""
        values_N = features.values()
        if self.mode is BoundsCheckMode.NONE or values_N.numel() == 0:
            return None
        if values_N.device.type == "cpu":
            low, high = torch.aminmax(values_N)
            if low >= 0 and high < routes.min_rows:
                return None
        bad_N = find_bad_ids(values_N, features.offsets(), routes.check_rows)
        if routes.unread is not None:  # whatever ids a feature has that no table reads
            counts_K = _ids_per_key(features)
            bad_N &= ~routes.unread.repeat_interleave(counts_K, output_size=values_N.numel())
        return bad_N

    def describe_bad_ids(self, features: KeyedJaggedTensor, bad_N: Tensor) -> str:
        """Returns the text for the first of some ids that lie outside their tables."""
        routes = self._routes_for(features.keys())
        keys = features.keys()
        tables = [self._smallest_table(key) for key in keys]
        return bad_id_message(
            bad_N,
            features.values(),
            features.offsets(),
            routes.check_rows,
            features.keys(),
            tables,
        )

    def _smallest_table(self, key: str) -> str:
        tables = [
            self.layout.tables[slot.table]
            for slot in self.layout.slots
            if self.feature_names[slot.feature] == key
        ]
        return min(tables, key=lambda t: t.num_rows).name if tables else ""

    def _cut(
        self,
        given: KeyedJaggedTensor,
        checked: KeyedJaggedTensor,
        features: KeyedJaggedTensor,
        routes: Routes,
        bad_N: Tensor | None,
    ) -> Segments:
        given_counts, inverse = features.offsets().new_empty(0), None
        if self.distinct:
            given_counts = _ids_per_key(features)
            features, inverse = _distinct(features)
        elif not self.pooled:  # bags do not matter: each feature is one
            features = _with_lengths(features, features.values(), _ids_per_key(features))
        batch_size = features.stride()
        weights_N = features.weights().detach() if self.is_weighted else None
        weights_need_grad = (
            self.is_weighted and torch.is_grad_enabled() and features.weights().requires_grad
        )
        places_N = None
        if weights_need_grad or not self.pooled:
            places_N = torch.arange(features.values().numel(), device=self.device)
        counts = [_ids_per_key(features)]
        lengths, values, weights, places = [
            [] if part is None or not routes.use_raw else [part]
            for part in (features.lengths(), features.values(), weights_N, places_N)
        ]
        bag_counts = None
        if routes.split is not None:
            lengths_KB = features.lengths().view(routes.num_keys, batch_size)
            bag_counts, split_values, split_weights = ops.permute_2d(
                routes.split, lengths_KB, features.values(), weights_N
            )
            if split_values.dtype not in self._blocks:  # int32 ids of a table beyond int32
                split_values = split_values.long()
            block_sizes, boundaries = self._blocks[split_values.dtype]
            block_lengths, block_values, block_weights, moved_to = ops.block_bucketize(
                bag_counts.flatten(),
                split_values,
                split_weights,
                block_sizes,
                self.layout.num_buckets,
                boundaries,
                return_positions=places_N is not None,
            )
            lengths.append(block_lengths)
            values.append(block_values)
            if block_weights is not None:
                weights.append(block_weights)
            if places_N is not None:
                assert moved_to is not None
                _, split_places, _ = ops.permute_2d(routes.split, lengths_KB, places_N)
                moved = torch.empty_like(split_places).index_copy_(0, moved_to.long(), split_places)
                places.append(moved)
            num_blocks = self.layout.num_buckets * len(self.layout.split_slots)
            counts.append(block_lengths.view(num_blocks, batch_size).sum(1))
        return Segments(
            batch_size=batch_size,
            lengths=lengths,
            values=values,
            weights=weights,
            places=places,
            counts_G=torch.cat([c.long() for c in counts]),
            source=features,
            routes=routes,
            bag_counts=bag_counts,
            given=given,
            checked=checked,
            bad_N=bad_N,
            inverse=inverse,
            given_counts=given_counts,
            weights_need_grad=weights_need_grad,
        )


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _without(features: KeyedJaggedTensor, bad_N: Tensor) -> KeyedJaggedTensor:
    """Replaces ids that no table has by 0: the batch can be cut, and nothing foreign is read."""
    return KeyedJaggedTensor.from_parts(
        features.keys(),
        features.values().masked_fill(bad_N, 0),
        features.weights_or_none(),
        features.lengths(),
        features.offsets(),
        stride=features.stride(),
    )


def _with_one_batch_size(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pads the features of fewer samples with empty bags."""
    if not features.variable_stride_per_key():
        return features
    strides = features.stride_per_key()
    longest = max(strides, default=0)
    lengths = torch.cat(
        [
            torch.nn.functional.pad(part, (0, longest - part.numel()))
            for part in features.lengths().split_with_sizes(strides)
        ]
    )
    return KeyedJaggedTensor.from_parts(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        lengths,
        None,
        stride=longest,
    )


def _with_lengths(
    features: KeyedJaggedTensor, values: Tensor, lengths_K: Tensor
) -> KeyedJaggedTensor:
    """Returns ids with one bag per feature."""
    return KeyedJaggedTensor.from_parts(features.keys(), values, None, lengths_K, None, stride=1)


_ID_BITS = 40  # of an id beside its feature's number, in one word


def _distinct(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
    """Leaves each id of a feature once; and where each given id is found among those ``[N]``."""
    num_keys = len(features.keys())
    counts_K = _ids_per_key(features)
    key_N = torch.arange(num_keys, device=counts_K.device).repeat_interleave(
        counts_K, output_size=features.values().numel()
    )
    words, inverse = torch.unique((key_N << _ID_BITS) + features.values(), return_inverse=True)
    values = (words & ((1 << _ID_BITS) - 1)).to(features.values().dtype)
    edges = torch.arange(num_keys + 1, device=words.device) << _ID_BITS
    lengths_K = torch.searchsorted(words, edges).diff()
    return _with_lengths(features, values, lengths_K), inverse


def _ids_per_key(features: KeyedJaggedTensor) -> Tensor:
    offsets, batch_size = features.offsets(), features.stride()
    if batch_size == 0:
        return offsets.new_zeros(len(features.keys()))
    return offsets[::batch_size].diff()
