"""Input stage: sends the ids of each rank's batch to the ranks that own their rows and columns.

There are two exchanges, whatever the mix of strategies. The *header* contains id counts, batch
sizes and flags for each destination; the host reads it, which is the only device-to-host read of
the stage. The *payload* contains lengths, ids and weights. On a GPU without other ranks the host
reads nothing if it knows the sizes of the batch (`InputDist.skip_header`); faults of a batch are
then raised with a later one.

Ids are sent in segments: whole features, or the ids of a feature in one block of rows of a
row-split table (see `layout`).

Shape names: `B` samples of this rank, `K` features of the given batch, `G` segments, `S` streams
of this rank, `D` streams of all destinations, `R` ranks, `N` ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import inf
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import Layout
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.bags import keep_distinct, one_bag_per_key, select_bags
from recsys.distributed.stages.batch import (
    Bags,
    BatchContext,
    CheckedBatch,
    PreparedBatch,
    ReceivedBatch,
    Segments,
)
from recsys.distributed.stages.batch_checker import BatchChecker
from recsys.distributed.stages.header import (
    COUNT_BITS,
    EndOfData,
    Flag,
    Header,
    check_same_call,
    failure_flag,
    module_bits,
    shape_of,
)
from recsys.distributed.stages.header_exchange import read_headers
from recsys.distributed.stages.payload import PayloadFormat
from recsys.distributed.stages.routes import (
    COUNTS,
    FLAG,
    Positions,
    Routes,
    SplitRound,
    build_routes,
)
from recsys.distributed.stages.weight_gradients import with_weight_gradients
from recsys.kernels import ops
from recsys.kernels.bounds import LateChecks
from recsys.kernels.types import BoundsCheckMode
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_jagged import check_features
from recsys.step_stages import Stage, in_stage

_MAX_KEPT = 0.9  # padding is left out if at most this share of the values would be kept
_MAX_IDS = 0.5  # bags are short that have at most this share of ids per bag of a row block,
_MIN_VALUES = 1 << 16  # if so many values or more would return for them
_NO_BAGS = np.zeros(0, dtype=np.int64)


@final
class InputDist:
    """Sends ids to their owners.

    Args:
        layout: The compiled placement.
        feature_names: The module's distinct features, in the layout's numbering.
        env: The ranks.
        device: Device of batches and tables.
        mode: Handling of ids outside their table.
        is_weighted: Whether ids have weights.
        distinct: Whether to send each id of a feature once, for sequences. Ignored without other
            ranks.
        trains: Whether any of the tables trains.
        owner: Class name of the module, for messages.
        path: Path of the module in its model, for messages and to identify the module.

    Attributes:
        late: Checks whose results are read after the step, of batches without a header.
        may_skip_header: Whether batches whose sizes the host knows need no header.
        end_of_data: End-of-data status of the current epoch; None without `EvenBatches`.
        most_ids: Largest share of ids per bag for which the output stage can send a row per id.
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
        self.device, self.owner, self.path, self.trains = device, owner, path, trains
        self._module_bits = module_bits(path)
        self.is_weighted, self.distinct = is_weighted, distinct and env.world_size > 1
        self.is_ordered = device.type == "cuda" and env.exchanges_in_streams
        self.pooled = pooled = layout.is_pooled
        self.late = LateChecks()
        is_alone = device.type == "cuda" and env.world_size == 1
        # only the device knows how many ids are in a block of rows
        self.may_skip_header = is_alone and not layout.split_slots
        self._checker = BatchChecker(
            layout, self.feature_names, device, mode, needs_sizes=self.may_skip_header
        )
        self.payload = PayloadFormat(
            layout, env.rank, env.world_size, device, is_weighted=is_weighted
        )
        self.end_of_data: EndOfData | None = None
        self.num_streams = len(layout.send_segments[env.rank])
        self.header_width = self.num_streams + COUNTS  # words received from each rank
        self.has_streams = any(layout.send_segments)
        self.header_sizes = [len(segments) + COUNTS for segments in layout.send_segments]
        self._routes: dict[tuple[str, ...], Routes] = {}
        self.sent_edges = np.cumsum([0, *map(len, layout.streams)])  # of D, between destinations
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
        # a padded bag is sent back if ranks of a node add up, or without the kernels
        can_leave_out = device.type == "cpu" or (device.type == "cuda" and ops.HAS_TRITON)
        self.leaves_out = pooled and can_leave_out and not layout.is_hierarchical
        self.most_ids = inf
        self.goes_by_id = self.leaves_out and env.world_size > 1 and bool(split_slots)

    def __repr__(self) -> str:
        received = f"{self.num_streams} streams from each of {self.env.world_size} ranks"
        return f"InputDist(sends {len(self.feature_names)} features, receives {received})"

    # -- prepare ----------------------------------------------------------------------------------

    @in_stage(Stage.INPUT_DIST)
    def prepare(
        self, features: KeyedJaggedTensor | Exception, ctx: BatchContext | None = None
    ) -> BatchContext:
        """Check a batch and split it into segments.

        An error is kept in the context. The header reports it, and every rank raises it.

        Args:
            features: The batch, or the exception raised instead.
            ctx: A new context; made here if None.
        """
        ctx = ctx or BatchContext(self)
        ctx.given, ctx.end_of_data = features, self.end_of_data
        try:
            if ctx.end_of_data is not None and ctx.end_of_data.error is not None:
                raise ctx.end_of_data.error
            if isinstance(features, Exception):
                raise features
            features, bags = check_features(
                features,
                self.owner,
                self.device,
                is_pooled=self.pooled,
                is_weighted=self.is_weighted,
                names=self.feature_names,
            )
            ctx.checked = self._checker.check(features, bags, self._routes_for(bags.keys))
            ctx.prepared = self._split(ctx.checked)
        except Exception as error:
            ctx.error = error
        return ctx

    def _routes_for(self, keys: Sequence[str]) -> Routes:
        """Return the index tensors for batches with these keys; those of the last keys are kept."""
        known = self._routes.get(tuple(keys))
        if known is None:
            padding, names = 1 if self.distinct else 0, self.feature_names
            known = build_routes(self.layout, names, keys, self.is_weighted, self.device, padding)
            self._routes = {tuple(keys): known}
        return known

    def _split(self, checked: CheckedBatch) -> PreparedBatch:
        """Split a batch into segments."""
        routes, counts_K, inverse = checked.routes, checked.counts_K, None
        bags = checked.bags if self.pooled else one_bag_per_key(checked.bags, counts_K)
        given_counts_K = counts_K[:0]
        if self.distinct:
            given_counts_K = bags.lengths
            bags, inverse = keep_distinct(bags)
            counts_K = bags.lengths
        bags_D = self._bags_of_streams(checked)
        is_short = self.goes_by_id and self._are_bags_short(
            bags.values.numel(), bags.stride, bags_D
        )
        weights_N, needs_grad = None, False
        if self.is_weighted:
            assert bags.weights is not None
            weights_N = bags.weights.detach()
            needs_grad = torch.is_grad_enabled() and bags.weights.requires_grad
        places_N = None
        if needs_grad or not self.pooled:
            places_N = torch.arange(bags.values.numel(), device=self.device)
        segments, counts = Segments(), [counts_K]
        if routes.use_raw:
            segments.append(bags.lengths, bags.values, weights_N, places_N)
        bag_counts, offsets = None, bags.offsets
        if routes.split_keys is not None:
            lengths_KB = bags.lengths.view(routes.num_keys, bags.stride)
            bag_counts = lengths_KB.index_select(0, routes.split_keys)
            for round_ in routes.rounds:
                lengths_F, values_F, weights_F, places_F = (
                    lengths_KB.flatten(),
                    bags.values,
                    weights_N,
                    places_N,
                )
                if round_.select is not None:
                    lengths_FB, values_F, weights_F = ops.permute_2d(
                        round_.select, lengths_KB, values_F, weights_F
                    )
                    lengths_F = lengths_FB.flatten()
                    if is_short:
                        offsets = ops.complete_cumsum(lengths_F)
                    if places_N is not None:
                        _, places_F, _ = ops.permute_2d(round_.select, lengths_KB, places_N)
                lengths = self._bucketize(
                    round_, segments, lengths_F, values_F, weights_F, places_F, is_short
                )
                counts.append(lengths.view(round_.num_blocks, bags.stride).sum(1))
        parts = [c.long() for c in counts]
        return PreparedBatch(
            bags=bags,
            batch_size=bags.stride,
            segments=segments,
            counts_G=parts[0] if len(parts) == 1 else torch.cat(parts),
            given_counts_K=given_counts_K,
            inverse=inverse,
            bags_D=bags_D,
            bag_counts=bag_counts,
            split_offsets=offsets,
            is_short=is_short,
            weights_need_grad=needs_grad,
        )

    def _bucketize(
        self,
        round_: SplitRound,
        segments: Segments,
        lengths_F: Tensor,
        values_N: Tensor,
        weights_N: Tensor | None,
        places_N: Tensor | None,
        is_short: bool,
    ) -> Tensor:
        """Append the segments of one round; return the bag lengths of its blocks.

        Args:
            round_: The round.
            segments: The segments so far.
            lengths_F: Bag lengths of the round's features.
            values_N: Their ids.
            weights_N: Their weights.
            places_N: Their positions in the batch.
            is_short: Whether bags have few ids.
        """
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
            return_positions=is_short or places_N is not None,
        )
        if places_N is not None:
            assert moved_to is not None
            places_N = torch.empty_like(places_N).index_copy_(0, moved_to.long(), places_N)
        segments.append(lengths, values, weights, places_N)
        if is_short:
            assert moved_to is not None
            segments.moved_to.append(moved_to)
        return lengths

    def _bags_of_streams(self, checked: CheckedBatch) -> np.ndarray:
        """Return `[D]` bags of each stream if they differ and it saves enough; else `[0]`."""
        features, longest = checked.given, checked.bags.stride
        is_variable = features.variable_stride_per_key()
        if not is_variable or not self.leaves_out or self.env.world_size == 1:
            return _NO_BAGS
        bags_D = np.array(features.stride_per_key())[checked.routes.stream_keys]
        kept, padded = int(bags_D @ self.sent_dims), longest * int(self.sent_dims.sum())
        fits = longest < 1 << (63 - COUNT_BITS)
        return bags_D if fits and padded and kept <= _MAX_KEPT * padded else _NO_BAGS

    def _are_bags_short(self, num_ids: int, batch_size: int, bags_D: np.ndarray) -> bool:
        """Return whether a row per id is less than a row per bag of each row block.

        Args:
            num_ids: Ids of the whole batch, as an estimate of those of row-split tables: the host
                knows them without waiting.
            batch_size: Bags of each feature, if `bags_D` is empty.
            bags_D: `[D]` or `[0]` bags of each stream.
        """
        dims = self._split_dims
        if bags_D.size:
            bags = bags_D[self.is_split]
            num_bags, num_values = int(bags.sum()), int(bags @ dims)
        else:
            num_bags, num_values = batch_size * len(dims), batch_size * int(dims.sum())
        most_ids = min(_MAX_IDS, self.most_ids) * num_bags
        is_worth_it = num_values >= _MIN_VALUES and num_ids <= most_ids
        return is_worth_it or not num_ids

    # -- header -----------------------------------------------------------------------------------

    @in_stage(Stage.INPUT_DIST)
    def skip_header(self, ctx: BatchContext) -> bool:
        """Set the context's header without an exchange, if the host knows the sizes.

        It does if it knows how many ids each feature has, or if it needs no such number because
        every lookup reads the whole batch. Faults on the device are read with a later batch.

        Returns:
            Whether it does; else there must be a header.
        """
        if not self.may_skip_header:
            return False
        if ctx.error is not None:  # nothing else will be read
            ctx.flag = failure_flag(ctx.error)
            ctx.header = Header(np.array([[ctx.flag, 0]]), _NO_BAGS, _NO_BAGS)
            return True
        prepared, routes = ctx.prepared, ctx.checked.routes
        bags = prepared.bags
        known, num_ids = bags.length_per_key, bags.values.numel()
        if known is None and (len(bags.keys) == 1 or not num_ids):
            known = [num_ids] * len(bags.keys)
        if known is None and not (self.pooled and routes.reads_whole):
            return False
        counts_G = _NO_BAGS if known is None else np.array(known, dtype=np.int64)
        is_last = ctx.end_of_data is not None and ctx.end_of_data.is_last
        ctx.flag = Flag.IS_LAST if is_last else 0
        if prepared.weights_need_grad:
            ctx.flag |= Flag.WEIGHTS_NEED_GRAD
        counts_S = [] if known is None else counts_G[routes.segments].tolist()
        words = np.array([[ctx.flag, prepared.batch_size, *counts_S]])
        ctx.header = Header(words, counts_G, _NO_BAGS)
        late = self._checker.flags_to_check_late(ctx.checked.faults)
        if late is not None:
            self.late.add(late, lambda: self._report_late(ctx))
        return True

    @in_stage(Stage.INPUT_DIST)
    def header_of(self, ctx: BatchContext) -> Tensor:
        """Build `[flag, batch size, ids per stream]` per destination; an error is all flags."""
        flag = self._module_bits
        if self.trains and torch.is_grad_enabled():
            flag |= Flag.TRAINS
        if ctx.end_of_data is not None and ctx.end_of_data.is_last:
            flag |= Flag.IS_LAST
        if ctx.error is not None:
            ctx.flag = flag | failure_flag(ctx.error)
            total = sum(self.header_sizes)
            return torch.full((total,), ctx.flag, dtype=torch.int64, device=self.device)
        prepared, faults = ctx.prepared, ctx.checked.faults
        if prepared.weights_need_grad:
            flag |= Flag.WEIGHTS_NEED_GRAD
        if prepared.bags_D.size:
            flag |= Flag.VARIABLE
        if prepared.is_short:
            flag |= Flag.SHORT
        ctx.flag = flag
        of_bad_ids = 0 if faults.ids is None else self._checker.flag_of_bad_ids()
        size, order, counts_G = prepared.batch_size, ctx.checked.routes.header, prepared.counts_G
        if faults.both is not None:
            from recsys.kernels.ops_triton import build_header

            words = build_header(order, counts_G, faults.both, flag, size, Flag.FAILED, of_bad_ids)
        else:
            head = ops.upload([flag, size], self.device)
            if faults.ids is not None:
                head[FLAG] |= faults.ids * of_bad_ids
            if faults.bags is not None:
                head[FLAG] |= faults.bags * Flag.FAILED
            words = torch.cat([head, counts_G])[order]
        if prepared.bags_D.size:
            bags = np.zeros(sum(self.header_sizes), dtype=np.int64)
            bags[self._count_words] = prepared.bags_D << COUNT_BITS
            words += ops.upload(bags, self.device)
        return words

    # -- send and receive -------------------------------------------------------------------------

    @in_stage(Stage.INPUT_DIST)
    def send(self, ctx: BatchContext) -> BatchContext:
        """Wait for the headers and start sending ids.

        Raises:
            Exception: The error of the lowest rank with an error in its batch, on every rank; or
                the fault of an earlier batch that had no header.
        """
        if ctx.pending_header is not None:
            read_headers(*ctx.pending_header)
        header = ctx.header
        if self.late.pending:
            self.late.read_arrived()
        flags_R = header.flags_R
        is_usual = ctx.error is None and bool((flags_R == ctx.flag).all())
        ctx.is_absent = not is_usual and header.has_all(Flag.ABSENT)
        warning = "" if is_usual or ctx.is_absent else self._raise_faults(ctx, flags_R)
        if ctx.end_of_data is not None:
            ctx.end_of_data.last_R = (flags_R & Flag.IS_LAST) != 0
        if ctx.is_absent:
            return ctx
        routes, prepared = ctx.checked.routes, ctx.prepared
        ctx.shape = shape = shape_of(
            header, self, routes.segments, prepared.batch_size, prepared.bags_D
        )
        if self.has_streams and header.has_counts and not routes.is_identity:
            segments, size = prepared.segments, prepared.batch_size
            ctx.pending_ids = comm.all_to_all(
                self.env.for_ids,
                ExchangeName.IDS,
                self.payload.pack(segments, routes, header, size, shape),
                self.per_rank(self.payload.sent_sizes(shape)),
                self.payload.received_sizes(shape),
            )
        prepared.segments.free(is_by_id=shape.is_by_id)
        if warning:
            warnings.warn(f"{warning} Row 0 is read instead.", UserWarning, stacklevel=3)
        return ctx

    def per_rank(self, values_D: np.ndarray) -> list[int]:
        """Return the sum over the streams of each destination."""
        ends = np.concatenate([[0], values_D.cumsum()])
        found: list[int] = np.diff(ends[self.sent_edges]).tolist()
        return found

    def _raise_faults(self, ctx: BatchContext, flags_R: np.ndarray) -> str:
        """Raise the error of any rank; return the warning of this rank."""
        error, own_flag, warning = ctx.error, int(flags_R[self.env.rank]), ""
        check_same_call(flags_R)
        if error is None and own_flag & (Flag.FAILED | Flag.WARNED):
            error, warning = self._checker.describe(ctx.checked, own_flag)
        if (flags_R & Flag.FAILED).any():
            comm.raise_together(self.env, "tell of a bad batch", error)
        return warning

    def _report_late(self, ctx: BatchContext) -> None:
        """Raise or warn of the faults of a batch that had no header."""
        bad_bags = ctx.checked.faults.bags
        are_bags_bad = bad_bags is not None and bool(bad_bags)
        flag = Flag.FAILED if are_bags_bad else self._checker.flag_of_bad_ids()
        warning = self._raise_faults(ctx, np.array([flag]))
        if warning:
            warnings.warn(f"{warning} Row 0 is read instead.", UserWarning, stacklevel=4)

    @in_stage(Stage.INPUT_DIST)
    def ids(self, ctx: BatchContext) -> BatchContext:
        """Wait for the ids, and order them for the lookups."""
        routes, prepared, header, shape = (
            ctx.checked.routes,
            ctx.prepared,
            ctx.header,
            ctx.shape,
        )
        replicas, places = self._select(ctx, routes.replicas)
        lookups, anchor = list[Bags](), None
        if ctx.pending_ids is not None:
            bags = self.payload.unpack(ctx.pending_ids.wait(), shape)
            ctx.pending_ids = None
            if self.is_weighted and header.has_any(Flag.WEIGHTS_NEED_GRAD):
                bags, anchor = with_weight_gradients(ctx, bags)
            ids_S, bags_RS = shape.ids_received_RS.sum(0), shape.bags_received_RS
            lookups = self.payload.split_bags(bags, ids_S, bags_RS, is_ragged=shape.is_ragged)
        elif routes.is_identity:
            own = prepared.bags
            bags = Bags(own.values, own.offsets.to(own.values.dtype), own.weights)
            if self.may_skip_header and routes.reads_whole:  # one lookup needs no counts
                lookups = [bags]
            else:
                bags_RS = np.full((1, len(header.counts_G)), prepared.batch_size)
                lookups = self.payload.split_bags(bags, header.counts_G, bags_RS, is_ragged=False)
        elif not header.has_counts:  # each lookup reads every feature of this rank's batch
            lookups, _ = self._select(ctx, routes.lookups)
        ctx.received = ReceivedBatch(lookups, replicas, places, anchor)
        return ctx

    def _select(
        self, ctx: BatchContext, features: Sequence[Positions]
    ) -> tuple[list[Bags], list[Tensor]]:
        if not features:
            return [], []
        routes, prepared, header = ctx.checked.routes, ctx.prepared, ctx.header
        return select_bags(
            features,
            prepared,
            routes,
            header,
            is_weighted=self.is_weighted,
            is_pooled=self.pooled,
        )
