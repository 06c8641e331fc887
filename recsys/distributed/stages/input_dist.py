"""First stage: the ids of each rank's batch go to the ranks that own their rows and columns.

Two exchanges, whatever the mix of strategies. The *header* tells every destination how many ids
come, for how many samples, and whether the sender found something wrong with its input; the host
reads it, which is the one device-to-host read of the stage. The *payload* is one buffer of 32-bit
words: the lengths, the ids and, for weighted features, the bits of the weights. Both ends build
and take apart the payload with one segment permutation. Where bags of row-split tables are short
on all ranks, which the header says, too, no lengths of theirs travel. On a GPU without other ranks
the host reads nothing where it knows the sizes of all that follows, see `InputDist.skip_header`:
what is wrong with a batch is raised with a later one.

What travels are segments: whole features, or the parts of features whose ids fall in one block of
rows of a row-split table (see `layout`).

Shape names: `B` samples of this rank, `K` features of the given batch, `G` segments, `S`
streams of this rank, `R` ranks, `T` samples of all ranks, `N` ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from math import inf
from typing import Any, NamedTuple, TypeAlias, cast, final
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import Layout
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.bags import (
    joined,
    keep_distinct,
    one_bag_per_key,
    smallest_table,
    with_one_batch_size,
)
from recsys.distributed.stages.routes import (
    BATCH,
    COUNTS,
    FLAG,
    Positions,
    Routes,
    SplitRound,
    build_routes,
    lookup_order,
)
from recsys.kernels import ops
from recsys.kernels.bounds import OVERWRITTEN, LateChecks, bad_id_message, find_bad_ids
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_inputs import (
    are_checked_by_triton,
    make_safe,
    safe_features,
    safe_inverse_indices,
)
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_jagged import Parts, check_features
from recsys.step_stages import Stage, in_stage
from recsys.streamable import Multistreamable

# bits of the header's flag: raise everywhere, warn on the sender, send weight gradients back, the
# sender has no batch after this one, the sender will train on it, its features have batch sizes of
# their own, its bags are short, its batch lacks the features; above them, which module it is of
_FAILED, _WARNED, _WEIGHTS_NEED_GRAD, _IS_LAST, _TRAINS, _VARIABLE, _SHORT, _ABSENT = (
    1 << bit for bit in range(8)
)
_MODULE = ~0xFF
_COUNT_BITS = 40  # of a word that says how many ids come; above them how many bags, if `_VARIABLE`
_MAX_KEPT = 0.9  # bags are left out where no more of what would be sent than this is of bags
_MAX_IDS = 0.5  # bags are short that have no more ids than this share of their row parts,
_MIN_VALUES = 1 << 16  # and worth the effort if so many values would be sent back for them


_Copied: TypeAlias = tuple[list[Tensor], Tensor, torch.cuda.Event | None]
"""Headers and counts where they are, the same on the host, and when they are there."""

_paths: dict[int, str] = {}
"""Of the modules that there were, by how their headers say it."""


def _warnings_raise() -> bool:
    """Return whether Python is set to raise warnings, such as by `python -W error`."""
    for action, message, category, module, line in warnings.filters:
        if message is None and module is None and line == 0 and issubclass(UserWarning, category):
            return action == "error"
    return False


@final
class FeaturesAbsentError(ValueError):
    """A batch lacks the features of a module: an error unless it does on every rank."""


@final
class LastBatches:
    """What ranks tell each other of the end of their data.

    Attributes:
        is_last: whether this rank's batch is its last; goes into the header.
        ranks: `[R]` bool, what the last header said; None before it.
        error: what this rank's data raised in place of a batch; the next header takes it to all.
    """

    def __init__(self) -> None:
        self.is_last = False
        self.error: Exception | None = None
        self.ranks: np.ndarray | None = None

    def heard(self) -> np.ndarray | None:
        """Return what the last header said, and forget it."""
        said, self.ranks = self.ranks, None
        return said


@final
class Bags(NamedTuple):
    """What one lookup reads."""

    indices: Tensor
    """`[N]`."""
    offsets: Tensor
    """`[F*T+1]`."""
    weights: Tensor | None
    """`[N]`, or None."""
    ids_of_tables: list[int] | None = None
    """Ids that read each table, on a device, where the host knows them; else None."""
    of_features: np.ndarray | None = None
    """`[F, R]` bags that each rank has of each feature, where they differ; the offsets are `[their
    sum + 1]` then, and rows are looked up rank by rank."""


@final
class InputDist:
    """Sends ids to their owners.

    Args:
        layout: the compiled placement.
        feature_names: the module's distinct features, in the layout's numbering.
        env: the ranks.
        device: where batches and tables are.
        mode: what to do with an id outside its table.
        is_weighted: whether the features carry weights.
        distinct: whether each id of a feature travels once, where embeddings return to their ids;
            means nothing without other ranks.
        trains: whether any of the tables does.
        owner: who looks up, for messages.
        path: of the module in its model, for messages, and to tell modules apart.

    Attributes:
        late: what is checked on the device in batches without a header.
        may_skip_header: whether batches whose sizes the host knows need none.
        most_ids: as the output stage has it.
    """

    def __init__(
        self,
        layout: Layout,
        feature_names: Sequence[str],
        env: ShardingEnv,
        device: torch.device,
        mode: BoundsCheckMode,
        *,
        is_weighted: bool = False,
        distinct: bool = False,
        trains: bool = True,
        owner: str = "A sharded collection",
        path: str = "",
    ) -> None:
        self.layout, self.feature_names, self.env = layout, tuple(feature_names), env
        self.device, self.mode, self.owner = device, mode, owner
        self.path, self.trains = path, trains
        self._mark = (crc32(path.encode()) & 0xFFFFFF) << 8
        _paths[self._mark] = path
        self.is_weighted, self.distinct = is_weighted, distinct and env.world_size > 1
        self.is_ordered = device.type == "cuda" and env.exchanges_in_streams
        self.pooled = pooled = layout.is_pooled
        self.late = LateChecks()
        is_alone = device.type == "cuda" and env.world_size == 1
        # how many ids are in a block of rows only the device knows
        self.may_skip_header = is_alone and not layout.split_slots
        self.last_batches: LastBatches | None = None
        self.num_streams = len(layout.send_segments[env.rank])
        self.header_width = self.num_streams + COUNTS  # words that each rank sends this one
        self.has_streams = any(layout.send_segments)
        self.header_sizes = [len(segments) + COUNTS for segments in layout.send_segments]
        narrow = all(rect.num_rows < 2**31 for table in layout.tables for rect in table.rects)
        self._word = torch.int32 if narrow else torch.int64
        self._weight_word = torch.float32 if narrow else torch.float64
        reading = lookup_order(layout.groups[env.rank], env.world_size, pooled=pooled)
        self.by_rank = np.argsort(reading).astype(np.int32)
        # payload of one source rank: lengths, ids, weights, each [S]; wanted: each as it is read
        self.num_parts = 3 if is_weighted else 2
        order = np.arange(env.world_size * self.num_parts * self.num_streams).reshape(
            env.world_size, self.num_parts, self.num_streams
        )
        by_part = order.transpose(1, 0, 2).reshape(self.num_parts, -1)
        self._reading = reading
        self._unpack_order = by_part[:, reading].reshape(-1).astype(np.int32)
        self._keys: list[str] | None = None
        self._routes: Routes
        # of the streams of all destinations, whose edges between them these are
        self.sent_edges = np.cumsum([0, *map(len, layout.streams)])
        streams = [stream for of_rank in layout.streams for stream in of_rank]
        cols = np.array([stream.cols for stream in streams], dtype=np.int64).reshape(-1, 2)
        self.sent_dims = cols[:, 1] - cols[:, 0]
        split_slots = set(layout.split_slots)
        self.is_split = np.array([stream.slot in split_slots for stream in streams], dtype=bool)
        self._split_dims = self.sent_dims[self.is_split]
        ranks = np.repeat(np.arange(env.world_size), np.diff(self.sent_edges))
        self._count_words = np.arange(len(streams)) + (ranks + 1) * COUNTS
        own = slice(*self.sent_edges[env.rank : env.rank + 2])
        self.own_dims, self.own_is_split = self.sent_dims[own], self.is_split[own]
        # a padded bag is sent back where ranks of a node add up, or where kernels are missing
        can_leave_out = device.type == "cpu" or (device.type == "cuda" and ops.HAS_TRITON)
        self.leaves_out = pooled and can_leave_out and not layout.is_hierarchical
        self.most_ids = inf
        self.goes_by_id = self.leaves_out and env.world_size > 1 and bool(split_slots)

    def __repr__(self) -> str:
        received = f"{self.num_streams} streams from each of {self.env.world_size} ranks"
        return f"InputDist(sends {len(self.feature_names)} features, receives {received})"

    @in_stage(Stage.INPUT_DIST)
    def prepare(self, features: KeyedJaggedTensor | Exception, trip: Trip | None = None) -> Trip:
        """Check a batch and take it apart.

        An error is noted in the trip: every rank hears of it, and raises it from the header. So are
        bad ids and, on a device, bad lengths.

        Args:
            features: the batch; or why there is none.
            trip: a new one, which goes with the batch; made here if None.
        """
        trip = trip or Trip(self)
        trip.given = trip.safe = cast(KeyedJaggedTensor, features)
        news = trip.last_batches = self.last_batches
        try:
            if news is not None and news.error is not None:
                raise news.error
            if isinstance(features, Exception):
                raise features
            self._take_apart(trip, self._checked(trip, features))
        except Exception as error:
            trip.error = error
        return trip

    def _checked(self, trip: Trip, features: KeyedJaggedTensor) -> Parts:
        """Return a batch's bags, with one batch size, id 0 in place of bad ones."""
        features, bags = check_features(
            features,
            self.owner,
            self.device,
            is_pooled=self.pooled,
            is_weighted=self.is_weighted,
            names=self.feature_names,
        )
        trip.given = trip.safe = features
        keys = bags.keys
        if keys != self._keys:
            num_padding = 1 if self.distinct else 0
            self._routes = build_routes(
                self.layout, self.feature_names, keys, self.is_weighted, self.device, num_padding
            )
            self._keys = list(keys)
        routes = trip.routes = self._routes
        is_variable, by_kernels = bags.stride_per_key_per_rank is not None, False
        if self.device.type != "cpu":  # there check_features has raised
            needs_sizes = self.may_skip_header and not (self.pooled and routes.reads_whole)
            if not needs_sizes:  # what is told is to be checked, which costs an upload
                bags = bags._replace(length_per_key=None)
            # sequences give lengths back, which are not to be padded
            fits = self.pooled or not is_variable
            by_kernels = fits and are_checked_by_triton(bags, self.mode)
            if not by_kernels:
                trip.safe, trip.has_bad_bags = safe_features(features, bags.length_per_key)
                bags = trip.safe.parts()
        given = bags
        if is_variable:
            strides = features.stride_per_key()
            bags = with_one_batch_size(bags, strides)
            if self.leaves_out and self.env.world_size > 1:
                trip.own_bags = self._bags_of_streams(trip, np.array(strides), bags.stride)
        trip.checked = bags
        if by_kernels:
            return self._made_safe(trip, bags, given)
        bad_N = self._find_bad_ids(bags, routes)
        if bad_N is None:
            return bags
        trip.has_bad_ids = self._without_unread(bad_N, bags, routes).any()
        # no table has these: the batch can be taken apart, and nothing foreign is read
        return bags._replace(values=bags.values.masked_fill(bad_N, 0))

    def _made_safe(self, trip: Trip, bags: Parts, given: Parts) -> Parts:
        """Return bags that can be read, as `_checked` does, by kernels."""
        unpadded = None if given is bags else given
        trip.found, safe, trip.counts = make_safe(bags, trip.routes.check_rows, unpadded)
        inverse, is_foreign = safe_inverse_indices(trip.given)
        if is_foreign is not None:
            trip.found[:1].logical_or_(is_foreign)
            parts = given._replace(inverse_indices=inverse)
            trip.safe = KeyedJaggedTensor.from_parts(**parts._asdict())
        trip.has_bad_bags, trip.has_bad_ids = trip.found.unbind()
        if not self.pooled:  # whose output has lengths, too
            trip.safe = KeyedJaggedTensor.from_parts(
                bags.keys, bags.values, None, safe.lengths, safe.offsets, stride=bags.stride
            )
        return safe

    @staticmethod
    def _without_unread(bad_N: Tensor, bags: Parts, routes: Routes) -> Tensor:
        """Return which ids are bad and read: a feature that no table reads may have any."""
        if routes.unread is None:
            return bad_N
        counts_K = ids_per_key(bags)
        return bad_N & ~routes.unread.repeat_interleave(counts_K, output_size=bad_N.numel())

    def _find_bad_ids(self, bags: Parts, routes: Routes) -> Tensor | None:
        """Return `[N]` bool for ids outside their table; None: certainly none."""
        if self.mode is BoundsCheckMode.NONE or not bags.values.numel():
            return None
        if bags.values.is_cpu:
            low, high = torch.aminmax(bags.values)
            if low >= 0 and high < routes.min_rows:
                return None
        return find_bad_ids(bags.values, bags.offsets, routes.check_rows)

    def _take_apart(self, trip: Trip, bags: Parts) -> None:
        """Note a batch's segments in its trip."""
        routes = trip.routes
        counts_K = ids_per_key(bags) if trip.found is None else trip.counts
        if not self.pooled:  # bags do not matter: each feature is one
            bags = one_bag_per_key(bags, counts_K)
        if self.distinct:
            trip.own_counts = bags.lengths
            bags, trip.inverse = keep_distinct(bags)
            counts_K = bags.lengths
        trip.bags, trip.batch_size = bags, bags.stride
        trip.is_short = self.goes_by_id and self._are_bags_short(trip)
        weights_N = None
        if self.is_weighted:
            assert bags.weights is not None
            weights_N = bags.weights.detach()
            trip.weights_need_grad = torch.is_grad_enabled() and bags.weights.requires_grad
        places_N = None
        if trip.weights_need_grad or not self.pooled:
            places_N = torch.arange(bags.values.numel(), device=self.device)
        counts = [counts_K]
        if routes.use_raw:
            trip.add_segments(bags.lengths, bags.values, weights_N, places_N)
        if routes.split_keys is not None:
            lengths_KB = bags.lengths.view(routes.num_keys, trip.batch_size)
            trip.bag_counts = lengths_KB.index_select(0, routes.split_keys)
            for round_ in routes.rounds:
                lengths = self._bucketize(trip, round_, lengths_KB, weights_N, places_N)
                counts.append(lengths.view(round_.num_blocks, trip.batch_size).sum(1))
        parts = [c.long() for c in counts]
        trip.counts = parts[0] if len(parts) == 1 else torch.cat(parts)

    def _bucketize(
        self,
        trip: Trip,
        round_: SplitRound,
        lengths_KB: Tensor,
        weights_N: Tensor | None,
        places_N: Tensor | None,
    ) -> Tensor:
        """Add the segments of one round to the trip; return its blocks' bag lengths."""
        lengths_F, values_N = lengths_KB.flatten(), trip.bags.values
        trip.split_offsets = trip.bags.offsets
        if round_.select is not None:
            lengths_FB, values_N, weights_N = ops.permute_2d(
                round_.select, lengths_KB, values_N, weights_N
            )
            lengths_F = lengths_FB.flatten()
            if trip.is_short:
                trip.split_offsets = ops.complete_cumsum(lengths_F)
            if places_N is not None:
                _, places_N, _ = ops.permute_2d(round_.select, lengths_KB, places_N)
        if values_N.dtype not in round_.blocks:  # int32 ids of a table beyond int32
            values_N = values_N.long()
        block_sizes, boundaries = round_.blocks[values_N.dtype]
        lengths, values, weights, moved_to = ops.block_bucketize(
            lengths_F,
            values_N,
            weights_N,
            block_sizes,
            self.layout.num_buckets,
            boundaries,
            return_positions=trip.is_short or places_N is not None,
        )
        if trip.is_short:
            assert moved_to is not None
            trip.moved_to.append(moved_to)
        if places_N is not None:
            assert moved_to is not None
            places_N = torch.empty_like(places_N).index_copy_(0, moved_to.long(), places_N)
        trip.add_segments(lengths, values, weights, places_N)
        return lengths

    @in_stage(Stage.INPUT_DIST)
    def skip_header(self, trip: Trip) -> bool:
        """Note what the header would tell where the host knows it, but for bad values.

        It does if it was told how many ids each feature has, or if it needs no such number: where
        every lookup reads the whole batch. A later batch reads what the device finds wrong.

        Returns:
            Whether it does; else there must be a header.
        """
        if not self.may_skip_header:
            return False
        if trip.error is not None:  # nothing else will be read
            trip.flag = _failure_flag(trip.error)
            trip.host_RH = np.array([[trip.flag]])
            return True
        bags, routes = trip.bags, trip.routes
        told, num_ids = bags.length_per_key, bags.values.numel()
        if told is None and (len(bags.keys) == 1 or not num_ids):
            told = [num_ids] * len(bags.keys)
        if told is not None:
            trip.counts_G = np.array(told, dtype=np.int64)
            counts_S = trip.counts_G[routes.segments].tolist()
        elif self.pooled and routes.reads_whole:
            counts_S = []
            if not routes.is_identity:
                trip.lookups = trip.select(routes.lookups)
        else:
            return False
        is_last = trip.last_batches is not None and trip.last_batches.is_last
        trip.flag = _IS_LAST if is_last else 0
        if trip.weights_need_grad:
            trip.flag |= _WEIGHTS_NEED_GRAD
        trip.host_RH = np.array([[trip.flag, trip.batch_size, *counts_S]])
        bad, checks_ids = trip.found, self.mode is not BoundsCheckMode.IGNORE
        if bad is None or not checks_ids:
            faults = trip.has_bad_bags, trip.has_bad_ids if checks_ids else None
            known = [fault for fault in faults if fault is not None]
            bad = torch.stack(known) if known else None
        if bad is not None:
            self.late.add(bad, trip.complain)
        return True

    def flag_of_bad_ids(self) -> int:
        """Return what a header says of bad ids."""
        # what is an error here must be one on all ranks
        fails = self.mode is BoundsCheckMode.FATAL or (
            self.mode is BoundsCheckMode.WARNING and _warnings_raise()
        )
        return _FAILED if fails else _WARNED

    @in_stage(Stage.INPUT_DIST)
    def header_of(self, trip: Trip) -> Tensor:
        """Build `[flag, batch size, ids per stream]` per destination; a failure is all flags."""
        flag = self._mark
        if self.trains and torch.is_grad_enabled():
            flag |= _TRAINS
        if trip.last_batches is not None and trip.last_batches.is_last:
            flag |= _IS_LAST
        if trip.error is not None:
            trip.flag = flag | _failure_flag(trip.error)
            total = sum(self.header_sizes)
            return torch.full((total,), trip.flag, dtype=torch.int64, device=self.device)
        if trip.weights_need_grad:
            flag |= _WEIGHTS_NEED_GRAD
        if trip.own_bags is not None:
            flag |= _VARIABLE
        if trip.is_short:
            flag |= _SHORT
        trip.flag, if_ids = flag, 0
        if trip.has_bad_ids is not None:
            if_ids = self.flag_of_bad_ids()
        size, header = trip.batch_size, trip.routes.header
        if trip.found is not None:
            from recsys.kernels.ops_triton import build_header

            words = build_header(header, trip.counts, trip.found, flag, size, _FAILED, if_ids)
        else:
            head = ops.upload([flag, size], self.device)
            if trip.has_bad_ids is not None:
                head[FLAG] |= trip.has_bad_ids * if_ids
            if trip.has_bad_bags is not None:
                head[FLAG] |= trip.has_bad_bags * _FAILED
            words = torch.cat([head, trip.counts])[header]
        if trip.own_bags is not None:
            words += ops.upload(self._bag_words(trip.own_bags), self.device)
        return words

    def _bag_words(self, own_bags: np.ndarray) -> np.ndarray:
        """Return what is added to a header for the bags of each stream of each destination."""
        words = np.zeros(sum(self.header_sizes), dtype=np.int64)
        words[self._count_words] = own_bags << _COUNT_BITS
        return words

    def _bags_of_streams(self, trip: Trip, strides: np.ndarray, longest: int) -> np.ndarray | None:
        """Return how many bags each stream of each destination has, if that is worth telling.

        Args:
            trip: whose batch it is.
            strides: `[K]` bags of each feature.
            longest: the most of them.
        """
        own_bags = strides[trip.routes.stream_keys]
        kept, padded = int(own_bags @ self.sent_dims), longest * int(self.sent_dims.sum())
        fits = longest < 1 << (63 - _COUNT_BITS)
        return own_bags if fits and padded and kept <= _MAX_KEPT * padded else None

    def _are_bags_short(self, trip: Trip) -> bool:
        """Return whether a row for each id is less than one for each bag of each row part.

        The host knows the ids of the whole batch, without waiting, and takes them for those of
        row-split tables.
        """
        num_ids, dims = trip.bags.values.numel(), self._split_dims
        if trip.own_bags is None:
            num_bags, num_values = trip.batch_size * len(dims), trip.batch_size * int(dims.sum())
        else:
            bags = trip.own_bags[self.is_split]
            num_bags, num_values = int(bags.sum()), int(bags @ dims)
        most_ids = min(_MAX_IDS, self.most_ids) * num_bags
        is_worth_it = num_values >= _MIN_VALUES and num_ids <= most_ids
        return is_worth_it or not num_ids

    def per_rank(self, values_S: np.ndarray) -> list[int]:
        """Add up, for each destination, what there is of its streams."""
        ends = np.concatenate([[0], values_S.cumsum()])
        found: list[int] = np.diff(ends[self.sent_edges]).tolist()
        return found

    def payload_of(self, trip: Trip) -> Tensor:
        """Build the payload: per destination its lengths, ids and weights."""
        counts = trip.sent_segments(trip.counts_G)
        sizes = [np.full_like(counts, trip.batch_size), *[counts] * (self.num_parts - 1)]
        order_P, sizes_M = trip.routes.payload, np.concatenate(sizes)
        if trip.sent_lengths is not None:  # only the first of a segment: it counts as two
            kept_M = sizes_M.copy()
            kept_M[trip.routes.sent] = trip.sent_lengths
            order_P, sizes_M = 2 * order_P, np.stack([kept_M, sizes_M - kept_M], 1).ravel()
        if self.device.type == "cuda" and ops.HAS_TRITON and len(trip.values) == 1:
            from recsys.kernels.ops_triton import pack

            plan, total = ops.plan_of_moves(order_P, sizes_M)
            weights_N = trip.weights[0] if trip.weights else None
            words = trip.lengths[0], trip.values[0], weights_N
            return pack(*words, ops.upload(plan, self.device), total, self._word)
        parts = [*trip.lengths, *trip.values]
        for weights in trip.weights:
            parts.append(weights.to(self._weight_word).view(self._word))
        num_words = sum(map(torch.numel, parts))
        source, at = torch.empty(num_words, dtype=self._word, device=self.device), 0
        for part in parts:
            source[at : at + part.numel()].copy_(part)
            at += part.numel()
        return ops.move_segments(source, order_P, sizes_M)

    def unpack(self, payload: Tensor, trip: Trip, num_bags: int) -> Bags:
        """Take a received payload apart into the bags of all streams of this rank."""
        counts_RS = trip.received_counts
        if self.env.world_size > 1:
            parts = [trip.received_lengths, *[counts_RS] * (self.num_parts - 1)]
            order, sizes = self._unpack_order, np.stack(parts, 1).ravel()
            if trip.by_id is not None:
                # lengths of bags of one id did not travel: they stand behind the payload
                by_id = trip.by_id[0].ravel()
                ones = np.where(by_id, counts_RS.ravel(), 0)
                payload = torch.cat([payload, payload.new_ones(int(ones.sum()))])
                order, (lengths,) = order.copy(), np.nonzero(by_id[self._reading])
                order[lengths] = len(sizes) + self._reading[lengths]
                sizes = np.concatenate([sizes, ones])
            payload = ops.move_segments(payload, order, sizes)
        num_ids = int(counts_RS.sum())
        weights = None
        if self.is_weighted:
            weights = payload[num_bags + num_ids :].view(self._weight_word).float()
        indices = payload[num_bags : num_bags + num_ids]
        return Bags(indices, ops.complete_cumsum(payload[:num_bags]), weights)

    def split_bags(
        self, bags: Bags, stream_ids: np.ndarray, bags_RS: np.ndarray, *, are_ragged: bool = False
    ) -> list[Bags]:
        """Shorten the bags of all streams of this rank into those of its lookup groups.

        Args:
            bags: of all streams.
            stream_ids: ids of each stream, of all ranks.
            bags_RS: bags of each stream, of each rank.
            are_ragged: whether streams may have different numbers of them.
        """
        groups = self.layout.groups[self.env.rank]
        found = []
        start = first_bag = 0
        for group in groups:
            first, last = group.streams.start, group.streams.stop
            own = bags
            if len(groups) > 1:
                end = start + int(stream_ids[first:last].sum())
                last_bag = first_bag + int(bags_RS[:, first:last].sum())
                offsets = bags.offsets[first_bag : last_bag + 1]
                own = Bags(
                    bags.indices[start:end],
                    offsets - start,
                    None if bags.weights is None else bags.weights[start:end],
                )
                start, first_bag = end, last_bag
            if are_ragged:
                own = own._replace(of_features=bags_RS[:, first:last].T)
            if bags.indices.is_cuda:
                of_tables = np.bincount(
                    group.feature_table_map, stream_ids[first:last], len(group.tables)
                )
                own = own._replace(ids_of_tables=of_tables.astype(np.int64).tolist())
            found.append(own)
        return found


def _failure_flag(error: Exception) -> int:
    """Return the header's flag for a batch that cannot be sent."""
    return _FAILED | _ABSENT if isinstance(error, FeaturesAbsentError) else _FAILED


def ids_per_key(bags: Parts) -> Tensor:
    """Return `[K]`, for features of one batch size."""
    if bags.stride == 0:
        return bags.lengths.new_zeros(len(bags.keys))
    return bags.lengths if bags.stride == 1 else bags.offsets[:: bags.stride].diff()


def start_together(trips: Sequence[Trip]) -> None:
    """Start the trips of modules, with one header exchange for those of the same ranks.

    Args:
        trips: prepared ones, in the same order on every rank.
    """
    stage = trips[0].stage
    if any(trip.stage.env.process_group is not stage.env.process_group for trip in trips[1:]):
        of_groups: dict[int, list[Trip]] = {}
        for trip in trips:
            of_groups.setdefault(id(trip.stage.env.process_group), []).append(trip)
        for alike in of_groups.values():
            start_together(alike)
        return
    if stage.env.world_size == 1:
        trips = [trip for trip in trips if not trip.stage.skip_header(trip)]
        if not trips:
            return
        stage = trips[0].stage
    sent = stage.header_of(trips[0])
    env, sizes, width = stage.env, stage.header_sizes, stage.header_width
    if len(trips) > 1:
        headers = [sent, *(trip.stage.header_of(trip) for trip in trips[1:])]
        stages = [trip.stage for trip in trips]
        parts = [h.split(s.header_sizes) for h, s in zip(headers, stages, strict=True)]
        sent = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
        sizes = [sum(of_rank) for of_rank in zip(*(s.header_sizes for s in stages), strict=True)]
        width = sum(stage.header_width for stage in stages)
    own = [width] * env.world_size
    pending = comm.all_to_all(env.for_ids, ExchangeName.ID_COUNTS, sent, sizes, own)
    if stage.is_ordered:
        _bring_headers(pending, trips, read=False)
    else:
        for trip in trips:
            trip.headers = pending, trips, None


def _bring_headers(
    pending: comm.Pending,
    trips: Sequence[Trip],
    copied: _Copied | None = None,
    read: bool = True,
) -> None:
    """Bring the headers of trips that started together to this rank's host, and tell each its own.

    On a GPU they are copied to pinned memory behind an event. Where the ranks exchange in the order
    of streams, as under NCCL, the copy is queued at once: whoever reads them a step later waits for
    nothing.

    Args:
        pending: what the ranks tell each other.
        trips: whose headers they are.
        copied: what an earlier call queued.
        read: whether to wait for them; False only queues their copy.
    """
    if copied is None:
        arrived = pending.wait()
        parts = [arrived]
        for trip in trips:
            if trip.error is None:
                parts += [trip.counts.to(arrived.dtype), trip.own_counts.to(arrived.dtype)]
        host, event = torch.cat(parts), None
        if host.is_cuda:
            whole, host = host, torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
            host.copy_(whole, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        copied = parts, host, event
    if not read:
        for trip in trips:
            trip.headers = pending, trips, copied
        return
    parts, host, event = copied
    if event is not None:
        event.synchronize()  # the one wait of the host
    edges = np.cumsum([part.numel() for part in parts])
    headers, *counts = np.split(host.numpy(), edges[:-1])
    num_ranks = trips[0].stage.env.world_size
    host_RH = headers.reshape(num_ranks, -1)
    at = 0
    for trip in trips:
        end = at + trip.stage.header_width
        trip.host_RH = host_RH[:, at:end]
        if trip.error is None:
            trip.counts_G, trip.given_counts, *counts = counts
        trip.headers = None
        at = end


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, Routes | SplitRound):
        yield from _tensors_in([getattr(value, field.name) for field in fields(value)])


@final
class Trip(Multistreamable):
    """One batch of one module on its way through the stages: all that belongs to it.

    `prepare` checks the batch; `start_together` sends its header; `send` reads the headers and
    sends the ids; `ids` waits for those that this rank looks up. The output stage reads the rest.
    A loop over the stages of a sharded module gets one by `create_context`.

    Attributes:
        stage: the module's, whose batch it is.
        given: the batch as the user gave it.
        safe: the same; on a device with lengths and inverse indices that can be read.
        error: why it cannot travel, or None.
        is_absent: whether the batches of all ranks lack the features; known once `send` has run.
        flag: what its header says of it before its ids are looked at.
        last_batches: of the epoch that the batch belongs to, or None.
        routes: the ways of its segments.
        checked: its bags with one batch size, before bad ids were replaced.
        has_bad_ids: `[]`, whether ids are outside their tables; None: certainly not.
        has_bad_bags: `[]`, whether lengths or inverse indices were bad and others took their
            place; None: certainly not.
        found: `[2]`, both, if kernels of Triton found them.
        bags: what was taken apart into segments.
        batch_size: its samples.
        lengths: of the whole features' bags and of the row blocks' bags, where there are any.
        values: their ids.
        weights: their weights, if weighted.
        places: where `values` are in `bags`, if something returns to the ids.
        weights_need_grad: whether a gradient must return to the weights.
        counts: `[G]` ids of each segment, whole features first, then row blocks; `counts_G`
            on the host, if there is a header.
        own_counts: `[K]` ids of each key as given, if they were made distinct, else `[0]`;
            `given_counts` on the host.
        inverse: `[N]` place among the distinct ids of each id, if they were made distinct.
        own_bags: `[streams of all destinations]` bags, if features have batch sizes of their own.
        by_id: if all ranks' bags are short: `[R, S]` whether each id that a rank sends to a stream
            is looked up as a bag of its own, and returns as a row; and `[streams of all
            destinations]` of those that this rank sends. So it is where a row-split table has fewer
            ids than bags.
        num_bags: if so, or if features of any rank have batch sizes of their own: `[R, S]` bags
            that each rank has for each stream of this one; and `[streams of all destinations]` of
            this one's.
        received_lengths: `[R, S]` lengths that come of each stream.
        sent_lengths: `[streams of all destinations]` lengths sent, if not those of all bags.
        is_short: whether this rank's bags are short.
        moved_to: if they go by id, per round `[N]` of the ids' dtype: the place of each id of the
            bags that were split among the round's ids, which are in the order of their segments.
        split_offsets: `[F * B + 1]` of these bags, of F features, the same in each round.
        bag_counts: `[len(split_slots), B]` ids per bag of the row-split slots, or None if there
            are none.
        headers: what is on its way, for it and those that started with it; None once it was read.
        host_RH: what the ranks said; without the counts if there is no header.
        batch_sizes: `[R]` samples of each rank.
        received_counts: `[R, S]` ids that each rank sends to each stream.
        lookups: the bags of each lookup group.
        replicas: the bags of each replica group.
        anchor: `[0]`, through which a backward pass reaches the weights' way back on every rank;
            None if no rank's weights need gradients.
    """

    given: KeyedJaggedTensor
    safe: KeyedJaggedTensor
    flag: int
    routes: Routes
    checked: Parts
    bags: Parts
    batch_size: int
    split_offsets: Tensor
    counts: Tensor
    counts_G: np.ndarray
    given_counts: np.ndarray
    host_RH: np.ndarray
    batch_sizes: np.ndarray
    received_counts: np.ndarray
    received_lengths: np.ndarray

    def __init__(self, stage: InputDist) -> None:
        self.stage = stage
        self.error: Exception | None = None
        self.is_absent = False
        self.last_batches: LastBatches | None = None
        self.has_bad_ids: Tensor | None = None
        self.has_bad_bags: Tensor | None = None
        self.found: Tensor | None = None
        self.lengths: list[Tensor] = []
        self.values: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.places: list[Tensor] = []
        self.weights_need_grad = False
        self.own_counts = torch.empty(0, dtype=torch.int64, device=stage.device)
        self.inverse: Tensor | None = None
        self.bag_counts: Tensor | None = None
        self.own_bags: np.ndarray | None = None
        self.by_id: tuple[np.ndarray, np.ndarray] | None = None
        self.num_bags: tuple[np.ndarray, np.ndarray] | None = None
        self.sent_lengths: np.ndarray | None = None
        self.is_short = False
        self.moved_to: list[Tensor] = []
        self.headers: tuple[comm.Pending, Sequence[Trip], _Copied | None] | None = None
        self.lookups: Sequence[Bags] = ()
        self.replicas: list[Bags] = []
        self.anchor: Tensor | None = None
        self._received: comm.Pending | None = None
        self._replica_places: list[Tensor] = []

    @property
    def path(self) -> str:
        """The path of the batch's module."""
        return self.stage.path

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory from being used anew until work that is now in a stream is done.

        Args:
            stream: where the batch is looked up, if its input stage ran on another one.
        """
        batches = [self.given] if self.safe is self.given else [self.given, self.safe]
        for batch in batches:
            if isinstance(batch, KeyedJaggedTensor):  # and not what was given in its place
                batch.record_stream(stream)  # type: ignore[arg-type]  # of any device
        for tensor in _tensors_in(list(vars(self).values())):
            tensor.record_stream(stream)

    def add_segments(
        self, lengths: Tensor, values: Tensor, weights: Tensor | None, places: Tensor | None
    ) -> None:
        """Add segments that may travel."""
        self.lengths.append(lengths)
        self.values.append(values)
        if weights is not None:
            self.weights.append(weights)
        if places is not None:
            self.places.append(places)

    def sent_segments(self, of_segments: np.ndarray) -> np.ndarray:
        """Leave out whole features where none of them travels."""
        return of_segments if self.routes.use_raw else of_segments[self.routes.num_keys :]

    @in_stage(Stage.INPUT_DIST)
    def send(self) -> Trip:
        """Wait for the headers and start sending ids.

        Raises:
            Exception: the error of the lowest rank that found one in its input, on every rank; or
                what was wrong with an earlier batch that had no header.
        """
        if self.headers is not None:
            _bring_headers(*self.headers)
        stage, host_RH = self.stage, self.host_RH
        if stage.late.pending:
            stage.late.read_arrived()
        flags = host_RH[:, FLAG]
        is_usual = self.error is None and bool((flags == self.flag).all())
        self.is_absent = not is_usual and bool((flags & _ABSENT).all())
        warning = "" if is_usual or self.is_absent else self._raise_faults(flags)
        if self.last_batches is not None:
            self.last_batches.ranks = (flags & _IS_LAST) != 0
        if self.is_absent:
            return self
        self.batch_sizes = host_RH[:, BATCH]
        self.received_counts = host_RH[:, COUNTS:]
        if stage.has_streams and not (self.lookups or self.routes.is_identity):
            counts_S = self.counts_G[self.routes.segments]
            sent_lengths = np.full_like(counts_S, self.batch_size)
            self.received_lengths = np.repeat(self.batch_sizes[:, None], stage.num_streams, 1)
            if (flags & (_VARIABLE | _SHORT)).any():
                sent_lengths = self._take_bags(flags, counts_S, sent_lengths)
            send_sizes = stage.per_rank(sent_lengths + (stage.num_parts - 1) * counts_S)
            received = self.received_lengths + (stage.num_parts - 1) * self.received_counts
            recv_sizes = received.sum(1)
            payload = stage.payload_of(self)
            self._received = comm.all_to_all(
                stage.env.for_ids,
                ExchangeName.IDS,
                payload,
                send_sizes,
                recv_sizes.tolist(),
            )
        self.lengths = self.values = self.weights = []  # what was sent is not kept
        if self.by_id is None:
            self.moved_to = []
        if warning:
            warnings.warn(f"{warning} Row 0 is read instead.", UserWarning, stacklevel=2)
        return self

    def complain(self) -> None:
        """Raise, or warn of, what the device found wrong with a batch that had no header."""
        are_bags_bad = self.has_bad_bags is not None and bool(self.has_bad_bags)
        flag = _FAILED if are_bags_bad else self.stage.flag_of_bad_ids()
        warning = self._raise_faults(np.array([flag]))
        if warning:
            warnings.warn(f"{warning} Row 0 is read instead.", UserWarning, stacklevel=4)

    def _take_bags(
        self, flags: np.ndarray, counts_S: np.ndarray, lengths_S: np.ndarray
    ) -> np.ndarray:
        """Note which bags travel, and which are looked up, where it is not one for each sample.

        Args:
            flags: `[R]` of the headers.
            counts_S: `[streams of all destinations]` ids that go.
            lengths_S: `[streams of all destinations]` lengths that go otherwise.

        Returns:
            `[streams of all destinations]` lengths that go.
        """
        stage, is_variable = self.stage, (flags & _VARIABLE) != 0
        are_short = bool((flags & _SHORT).all())
        if not (are_short or is_variable.any()):
            return lengths_S
        sent = lengths_S if self.own_bags is None else self.own_bags
        words_RS, received = self.received_counts, self.received_lengths
        received = np.where(is_variable[:, None], words_RS >> _COUNT_BITS, received)
        self.received_counts = counts_RS = words_RS & ((1 << _COUNT_BITS) - 1)
        self.num_bags = received, sent
        if are_short:
            by_id_RS = stage.own_is_split & (counts_RS < received)
            by_id_S = stage.is_split & (counts_S < sent)
            self.by_id = by_id_RS, by_id_S
            self.num_bags = (
                np.where(by_id_RS, counts_RS, received),
                np.where(by_id_S, counts_S, sent),
            )
            received, sent = np.where(by_id_RS, 0, received), np.where(by_id_S, 0, sent)
        self.received_lengths, self.sent_lengths = received, sent
        return sent

    def _raise_faults(self, flags: np.ndarray) -> str:
        """Raise what any rank found wrong; return what this rank warns of."""
        stage, error = self.stage, self.error
        own_flag = flags[stage.env.rank]
        self._check_in_step(flags)
        message = ""
        if error is None and own_flag & (_FAILED | _WARNED):
            error = self._fault_of_bags()
            if error is None:
                message = self._describe_bad_ids()
                if own_flag & _FAILED:
                    error = IndexError(message)
        if (flags & _FAILED).any():
            comm.raise_together(stage.env, "tell of a bad batch", error)
        return message if stage.mode is BoundsCheckMode.WARNING else ""

    def _check_in_step(self, flags: np.ndarray) -> None:
        """Raise, on every rank alike, if the ranks are not at the same call of the same model."""
        what = flags & (_MODULE | _TRAINS)
        (others,) = np.nonzero(what != what[0])
        if not others.size:
            return
        calls = [
            f"rank {rank} calls {_paths.get(int(what[rank] & _MODULE), 'another module')!r} "
            f"{'with' if what[rank] & _TRAINS else 'without'} gradients"
            for rank in (0, int(others[0]))
        ]
        raise ValueError(
            "All ranks must call the sharded modules of a model in one order, and all with "
            f"gradients or all without; {', '.join(calls)}. Look for a call that depends on the "
            "rank or on its batch, such as an evaluation on rank 0 alone."
        )

    def _fault_of_bags(self) -> ValueError | None:
        """Return what is wrong with the lengths or inverse indices; wait for the device."""
        if self.has_bad_bags is not None and bool(self.has_bad_bags):
            try:
                self.given.validate()
            except ValueError as error:
                return error
            return ValueError("The lengths or inverse indices of the batch do not fit its ids.")
        return None

    def _describe_bad_ids(self) -> str:
        """Return the text for the first of the ids that are outside their tables."""
        stage, keys, bags = self.stage, self.given.keys(), self.checked
        bad_N = find_bad_ids(bags.values, bags.offsets, self.routes.check_rows)
        bad_N = stage._without_unread(bad_N, bags, self.routes)
        if not bool(bad_N.any()):
            return OVERWRITTEN
        tables = [smallest_table(stage.layout, stage.feature_names, key) for key in keys]
        return bad_id_message(
            bad_N,
            bags.values,
            bags.offsets,
            self.routes.check_rows,
            keys,
            tables,
        )

    @in_stage(Stage.INPUT_DIST)
    def ids(self) -> Trip:
        """Wait for the ids, and order them for the lookups."""
        stage = self.stage
        if self.routes.replicas:
            self.replicas = self.select(self.routes.replicas)
        if self._received is not None:
            bags_RS = self.received_lengths if self.num_bags is None else self.num_bags[0]
            bags = stage.unpack(self._received.wait(), self, int(bags_RS.sum()))
            self._received = None
            if stage.is_weighted and (self.host_RH[:, FLAG] & _WEIGHTS_NEED_GRAD).any():
                bags = self._with_weight_gradients(bags)
            ids_S, are_ragged = self.received_counts.sum(0), self.num_bags is not None
            self.lookups = stage.split_bags(bags, ids_S, bags_RS, are_ragged=are_ragged)
        elif self.routes.is_identity:
            own = self.bags
            bags = Bags(own.values, own.offsets.to(own.values.dtype), own.weights)
            if stage.may_skip_header and self.routes.reads_whole:  # one lookup needs no counts
                self.lookups = [bags]
            else:
                bags_RS = np.full((1, len(self.counts_G)), self.batch_size)
                self.lookups = stage.split_bags(bags, self.counts_G, bags_RS)
        return self

    def select(self, features: Sequence[Positions]) -> list[Bags]:
        """Select bags from this rank's own batch.

        Args:
            features: per lookup those that it reads.
        """
        stage, bags, found = self.stage, self.bags, []
        num_ids, num_keys = bags.values.numel(), self.routes.num_keys
        lengths_KB = bags.lengths.view(num_keys, self.batch_size)
        carried = bags.weights if stage.is_weighted else None
        if not stage.pooled:
            carried = torch.arange(num_ids, device=stage.device)
        is_plan = not self.routes.reads_whole and (carried is None or not carried.requires_grad)
        for select, positions in features:
            values, offsets, picked = bags.values, bags.offsets, carried
            if select is not None and is_plan:
                counts = self.counts_G[:num_keys]
                values = ops.move_segments(values, positions, counts)
                picked = None if carried is None else ops.move_segments(carried, positions, counts)
                offsets = ops.complete_cumsum(lengths_KB.index_select(0, select).flatten())
            elif select is not None:
                total = num_ids
                if not self.routes.reads_whole:
                    total = int(self.counts_G[positions].sum())
                lengths, values, picked = ops.permute_2d(select, lengths_KB, values, carried, total)
                offsets = ops.complete_cumsum(lengths.flatten())
            weights = picked if stage.is_weighted else None
            found.append(Bags(values, offsets.to(values.dtype), weights))
            if not stage.pooled:
                assert picked is not None
                self._replica_places.append(picked)
        return found

    def sent_places(self) -> Tensor:
        """Return the places in the batch of the ids sent, rank by rank and stream by stream.

        Then come those of the replicas' ids, where embeddings return to their ids.
        """
        found = list(self._replica_places)
        if self.places:
            counts = self.sent_segments(self.counts_G)
            found.insert(0, ops.move_segments(joined(self.places), self.routes.sent, counts))
        return joined(found) if found else self.counts.new_empty(0)

    def _with_weight_gradients(self, bags: Bags) -> Bags:
        """Let gradients flow from the received weights to the given ones.

        Weights travel with their ids, so their gradients return as embeddings without pooling do:
        one float per id that was sent, in one exchange of the backward pass. They are those of this
        rank's own loss, not divided by the number of ranks: what computes the weights is
        replicated, and its gradient averaged by DistributedDataParallel.
        """
        given_N = self.bags.weights
        assert given_N is not None
        if not given_N.requires_grad:  # those of another rank do
            given_N = given_N.detach().requires_grad_()
        places = self.sent_places() if self.weights_need_grad else None
        num_ids, env, by_rank = self.bags.values.numel(), self.stage.env, self.stage.by_rank
        sent = self.stage.per_rank(self.counts_G[self.routes.segments])
        received = self.received_counts.sum(1).tolist()
        stream_counts = self.received_counts.T.reshape(-1)

        def send_back(grad_M: Tensor) -> Tensor | None:
            returned = ops.move_segments(grad_M, by_rank, stream_counts)
            what = ExchangeName.GRADIENTS_OF_WEIGHTS
            arrived = comm.all_to_all(env.for_embeddings, what, returned, received, sent).wait()
            if places is None:
                return None
            # the output stage divided it, for the tables' sake
            whole = arrived * env.world_size
            return whole.new_zeros(num_ids).index_add_(0, places, whole)

        weights, self.anchor = _CarryWeights.apply(  # type: ignore[no-untyped-call]
            send_back, given_N, bags.weights
        )
        return bags._replace(weights=weights)


class _CarryWeights(torch.autograd.Function):
    """The given weights to those received, in the graph, and an anchor `[0]`.

    A module's output must depend on the anchor, so that backward reaches every rank, also one that
    received nothing.
    """

    @staticmethod
    def forward(
        ctx: Any,
        send_back: Callable[[Tensor], Tensor | None],
        given_N: Tensor,
        received_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.send_back = send_back
        return received_M.view_as(received_M), given_N.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor, anchor: Tensor) -> tuple[None, Tensor | None, None]:
        return None, ctx.send_back(grad_M), None
