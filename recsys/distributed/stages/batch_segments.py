"""One rank's batch: checked, and cut into the segments that travel.

A segment is a whole feature, or the part of a feature whose ids fall in one block of rows of a
row-split table (see ``layout``).

Shape names: ``B`` samples of this rank, ``K`` features of the given batch, ``G`` segments, ``N``
ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import Layout
from recsys.distributed.stages.id_routes import IdRoute, Routes, SplitRound, build_routes
from recsys.kernels import ops
from recsys.kernels.bounds import bad_id_message, find_bad_ids
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_inputs import check_features, safe_features
from recsys.sparse import KeyedJaggedTensor


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
        is_bad: ``[]`` bool, whether lengths or inverse indices were bad and others took their
            place; None: certainly not.
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
    is_bad: Tensor | None
    inverse: Tensor | None
    given_counts: Tensor
    weights_need_grad: bool

    def fault_of_bags(self) -> ValueError | None:
        """Returns what is wrong with the lengths or inverse indices; waits for the device."""
        if self.is_bad is not None and bool(self.is_bad):
            try:
                self.given.validate()
            except ValueError as error:
                return error
            return ValueError("The lengths or inverse indices of the batch do not fit its ids.")
        return None

    def sent_places(self, to_ranks: Sequence[int]) -> Tensor:
        """Returns the places in the batch of the ids sent, rank by rank and stream by stream.

        Args:
            to_ranks: ids sent to each rank.
        """
        routes = self.routes
        if not self.places:
            return self.counts_G.new_empty(0)
        counts = self.counts_G if routes.use_raw else self.counts_G[routes.num_keys :]
        places = _cat(self.places)
        _, sent, _ = ops.permute_1d(routes.sent, counts, places, None, sum(to_ranks))
        return sent

    def id_route(
        self,
        counts_G: np.ndarray,
        given_counts: np.ndarray,
        to_ranks: Sequence[int],
        received_counts: np.ndarray,
        replica_places: Sequence[Tensor],
    ) -> IdRoute:
        """Returns how embeddings find back to the ids of this batch.

        Args:
            counts_G: on the host.
            given_counts: on the host.
            to_ranks: ids sent to each rank.
            received_counts: ids received from each rank in each stream of this rank.
            replica_places: places in the batch of the ids of each replica group.
        """
        routes = self.routes
        slots = routes.slot_keys
        counts_K = counts_G[: routes.num_keys]
        starts_K = np.cumsum(counts_K) - counts_K
        sent_counts = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [counts_G[s] for s in routes.segments]
            + [counts_K[p] for p in routes.replica_positions]
        )
        return IdRoute(
            positions=_cat([self.sent_places(to_ranks), *replica_places]),
            sent_counts=sent_counts,
            received_counts=received_counts,
            slot_counts=counts_K[slots],
            slot_starts=starts_K[slots],
            inverse=self.inverse,
            slot_keys=slots,
            key_counts=counts_K if self.inverse is None else given_counts,
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
        owner: who looks up, for messages.
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
        owner: str = "A sharded collection",
    ) -> None:
        assert not (pooled and distinct)
        self.layout = layout
        self.feature_names = tuple(feature_names)
        self.is_weighted = is_weighted
        self.device = device
        self.mode = mode
        self.pooled = pooled
        self.distinct = distinct
        self.owner = owner
        self._keys: list[str] | None = None
        self._routes: Routes

    def cut(self, features: KeyedJaggedTensor | Exception) -> Segments:
        """Checks a batch and cuts it.

        Bad ids, and on a device bad lengths, are noted in the result, not raised.

        Args:
            features: the batch; or why there is none, which is raised.

        Raises:
            KeyError: if it lacks a feature.
            TypeError: if it is no KeyedJaggedTensor, ids are not integers or weights no floats.
            ValueError: if it is on another device, lacks weights or inverse indices, or has
                lengths, offsets or inverse indices that do not fit.
        """
        if isinstance(features, Exception):
            raise features
        check_features(
            features,
            self.owner,
            self.device,
            is_pooled=self.pooled,
            is_weighted=self.is_weighted,
        )
        routes = self._routes_for(features.keys())
        safe, is_bad = safe_features(features)
        checked = _with_one_batch_size(safe)
        bad_N = self._find_bad_ids(checked, routes)
        source = checked
        if bad_N is not None:
            source = _without(checked, bad_N)
            if routes.unread is not None:  # whatever ids a feature has that no table reads
                counts_K = _ids_per_key(checked)
                bad_N &= ~routes.unread.repeat_interleave(counts_K, output_size=bad_N.numel())
        return self._cut(features, checked, source, routes, bad_N, is_bad)

    def _routes_for(self, keys: list[str]) -> Routes:
        if keys != self._keys:
            self._routes = build_routes(
                self.layout,
                self.feature_names,
                keys,
                self.is_weighted,
                self.device,
                num_padding=1 if self.distinct else 0,
            )
            self._keys = list(keys)
        return self._routes

    def _find_bad_ids(self, features: KeyedJaggedTensor, routes: Routes) -> Tensor | None:
        """Returns ``[N]`` bool for ids outside their table; None: certainly none."""
        values_N = features.values()
        if self.mode is BoundsCheckMode.NONE or values_N.numel() == 0:
            return None
        if values_N.device.type == "cpu":
            low, high = torch.aminmax(values_N)
            if low >= 0 and high < routes.min_rows:
                return None
        return find_bad_ids(values_N, features.offsets(), routes.check_rows)

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
        is_bad: Tensor | None,
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
        if routes.split_keys is not None:
            lengths_KB = features.lengths().view(routes.num_keys, batch_size)
            bag_counts = lengths_KB.index_select(0, routes.split_keys)
            for round_ in routes.rounds:
                block_lengths = self._cut_by_rows(
                    round_, features, weights_N, places_N, values, weights, places
                )
                lengths.append(block_lengths)
                num_blocks = self.layout.num_buckets * len(next(iter(round_.blocks.values()))[0])
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
            is_bad=is_bad,
            inverse=inverse,
            given_counts=given_counts,
            weights_need_grad=weights_need_grad,
        )

    def _cut_by_rows(
        self,
        round_: SplitRound,
        features: KeyedJaggedTensor,
        weights_N: Tensor | None,
        places_N: Tensor | None,
        values: list[Tensor],
        weights: list[Tensor],
        places: list[Tensor],
    ) -> Tensor:
        """Appends the ids, weights and places of one round; returns its blocks' bag lengths."""
        lengths_F, values_N = features.lengths(), features.values()
        if round_.select is not None:
            lengths_KB = lengths_F.view(len(features.keys()), -1)
            lengths_FB, values_N, weights_N = ops.permute_2d(
                round_.select, lengths_KB, values_N, weights_N
            )
            lengths_F = lengths_FB.flatten()
            if places_N is not None:
                _, places_N, _ = ops.permute_2d(round_.select, lengths_KB, places_N)
        if values_N.dtype not in round_.blocks:  # int32 ids of a table beyond int32
            values_N = values_N.long()
        block_sizes, boundaries = round_.blocks[values_N.dtype]
        block_lengths, block_values, block_weights, moved_to = ops.block_bucketize(
            lengths_F,
            values_N,
            weights_N,
            block_sizes,
            self.layout.num_buckets,
            boundaries,
            return_positions=places_N is not None,
        )
        values.append(block_values)
        if block_weights is not None:
            weights.append(block_weights)
        if places_N is not None:
            assert moved_to is not None
            places.append(torch.empty_like(places_N).index_copy_(0, moved_to.long(), places_N))
        return block_lengths


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
_ID_MASK = (1 << _ID_BITS) - 1  # ids that nobody reads may be larger


def _distinct(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor]:
    """Leaves each id of a feature once; and where each given id is found among those ``[N]``.

    There are as many ids as before, as the host does not know how many are distinct: what is left
    over belongs to one more feature, which nobody reads.
    """
    num_keys, num_ids = len(features.keys()), features.values().numel()
    counts_K = _ids_per_key(features)
    key_N = torch.arange(num_keys, device=counts_K.device).repeat_interleave(
        counts_K, output_size=num_ids
    )
    words, order = torch.sort((key_N << _ID_BITS) + (features.values() & _ID_MASK))
    is_first = torch.ones_like(words, dtype=torch.bool)
    torch.ne(words[1:], words[:-1], out=is_first[1:])
    place_N = is_first.cumsum(0) - 1
    inverse = torch.empty_like(order).index_copy_(0, order, place_N)
    # an id that comes up again is written again to the same place
    distinct = torch.zeros_like(words).index_copy_(0, place_N, words)
    values = (distinct & _ID_MASK).to(features.values().dtype)
    lengths = counts_K.new_zeros(num_keys + 1)
    lengths.index_add_(0, words >> _ID_BITS, is_first.to(lengths.dtype))
    lengths[num_keys] = num_ids - lengths.sum()
    keys = [*features.keys(), ""]
    bags = KeyedJaggedTensor.from_parts(keys, values, None, lengths, None, stride=1)
    return bags, inverse


def _ids_per_key(features: KeyedJaggedTensor) -> Tensor:
    offsets, batch_size = features.offsets(), features.stride()
    if batch_size == 0:
        return offsets.new_zeros(len(features.keys()))
    return offsets[::batch_size].diff()
