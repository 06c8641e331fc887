"""Input stage: sends the ids of each rank's batch to the ranks that own their rows and columns.

There are two exchanges for any mix of strategies. The *header* contains flags, batch sizes
and id counts (see `header`); the host reads it, which is the only device-to-host read of the stage.
The *payload* is one buffer of 32-bit words (64-bit if a shard has 2^31 rows): per destination
the lengths, the ids and the bits of the weights. Both ends pack and unpack it by one permutation of
segments: whole features, or the ids of a feature in one block of rows of a row-split table (see
`layout`).

Every batch passes through this file; the special cases are elsewhere: faults (`faults`),
ragged batches (`header`), replicated tables (`bags`), gradients of weights (`weight_gradients`).

Shapes: `B` samples of this rank, `K` features of the given batch, `G` segments, `S` streams
of this rank, `D` streams of all destinations, `R` ranks, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast, final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.ranks.stop import stop
from recsys.distributed.stages.bags import (
    bags_of_streams,
    keep_distinct,
    one_bag_per_key,
    rows_of_regions,
    select_bags,
)
from recsys.distributed.stages.batch import (
    BatchContext,
    CopiedHeaders,
    LookupInput,
    PreparedBatch,
    ReceivedBatch,
    Segments,
    known_header,
)
from recsys.distributed.stages.faults import flag_of_bad_ids, raise_faults, report_late
from recsys.distributed.stages.header import (
    COUNT_BITS,
    BatchHeader,
    BatchShape,
    EndOfData,
    Flag,
    failure_flag,
    module_bits,
    ragged_shape,
)
from recsys.distributed.stages.lookup import GroupSettings, can_train
from recsys.distributed.stages.routes import (
    BATCH,
    COUNTS,
    FLAG,
    Routes,
    SplitRound,
    build_routes,
)
from recsys.distributed.stages.streams import StagedModule, Streams, readers_of, streams_of
from recsys.distributed.stages.weight_gradients import with_weight_gradients
from recsys.kernels import ops
from recsys.kernels.bounds import AsyncChecks
from recsys.modules.ids.hashed_group import HashedGroup, refuse_training
from recsys.modules.tables.batch_checker import (
    NO_COUNTS,
    NO_FAULTS,
    BatchChecker,
    CheckedBatch,
    RowLimits,
    warn_of_bad_ids,
)
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import Parts, check_features

# see docs/decisions/row_split.md, "Short bags: rows return by id"
_MAX_IDS = 0.5  # bags are short that have at most this share of ids per bag of a row block,
_MIN_VALUES = 1 << 16  # if so many values or more would return for them
_NONE = np.zeros(0, dtype=np.int64)
_NO_FLAGS = np.zeros(0, dtype=bool)


@final
class InputDist:
    """Sends ids to their owners.

    Args:
        module: The module.
        most_ids: Largest share of ids per bag for which the output stage can return a row per id.
        hashed: Per lookup of this rank the indexes of its tables, if they have hashed ids.

    Attributes:
        is_training: Whether the module is in training mode.
        keeps_places: Whether to keep the positions of ids in the batch.
        checker: Checks batches.
        streams: Constants of the exchanges.
        late: Checks whose results are read after the step, of batches without a header.
        may_skip_header: Whether batches whose sizes the host knows need no header.
        end_of_data: End-of-data status of the current epoch, set by `EvenBatches`.
        leaves_out: Whether bags that features do not have are left out.
        goes_by_id: Whether ids of row-split tables may return a row each.
    """

    def __init__(
        self, module: StagedModule, most_ids: float, hashed: Sequence[HashedGroup | None]
    ) -> None:
        self.module, self.most_ids, self.hashed = module, most_ids, hashed
        self.is_training, self.keeps_places = True, False
        self.late = AsyncChecks()
        self.end_of_data = EndOfData()
        layout, device, num_ranks = module.layout, module.device.type, module.env.world_size
        # only the device knows how many ids are in a block of rows
        self._has_hashed_ids = any(table.hashed for table in layout.tables)
        self._not_trained = [  # tables with hashed ids that no optimizer updates in training
            table.name
            for table in layout.tables
            if table.hashed and not can_train(cast(GroupSettings, table.group))
        ]
        self.may_skip_header = (
            device == "cuda" and num_ranks == 1 and not (layout.split_slots or self._has_hashed_ids)
        )
        self.checker = BatchChecker(
            readers_of(module), module.mode, module.device, is_pooled=module.is_pooled
        )
        self.streams = streams_of(module)
        self._module_bits = module_bits(module.path)
        self._keys: list[str] | None = None
        self._routes: tuple[Routes, RowLimits]
        # padding is sent too if sums are reduced inside a node, or without the kernels
        can_leave_out = device == "cpu" or (device == "cuda" and ops.HAS_TRITON)
        self.leaves_out = layout.is_pooled and can_leave_out and not layout.is_hierarchical
        self.goes_by_id = self.leaves_out and num_ranks > 1 and bool(layout.split_slots)

    def __repr__(self) -> str:
        names, num_ranks = self.module.feature_names, self.module.env.world_size
        received = f"{self.streams.num_received} streams from each of {num_ranks} ranks"
        return f"InputDist(sends {len(names)} features, receives {received})"

    # -- prepare ----------------------------------------------------------------------------------

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
            for error in ctx.end_of_data.errors:
                raise error
            if isinstance(features, Exception):
                raise features
            if self._not_trained and self._admits():
                refuse_training(self._not_trained[0])
            ctx.routes, ctx.checked = routes, checked = self._check(features)
            ctx.prepared = self._split(checked.bags, routes, checked)
        # the other ranks wait for this rank's header, with or without an error
        # docs/decisions/exchange.md, "One payload behind one header"
        except Exception as error:
            ctx.is_good, ctx.error, ctx.flag = False, error, failure_flag(error)
        return ctx

    def _check(self, features: KeyedJaggedTensor) -> tuple[Routes, CheckedBatch]:
        """Return the batch with one batch size and valid ids."""
        features, bags = check_features(
            features,
            self.module.owner,
            self.module.device,
            is_pooled=self.module.is_pooled,
            is_weighted=self.module.is_weighted,
            names=self.module.feature_names,
        )
        if bags.keys != self._keys:
            # the feature that has the rest of the batch after its distinct ids
            num_padding = 1 if self.module.distinct else 0
            routes = build_routes(
                self.module.layout,
                self.module.feature_names,
                bags.keys,
                self.module.is_weighted,
                self.module.device,
                num_padding,
            )
            self._routes = routes, self.checker.limits_of(bags.keys)
            self._keys = list(bags.keys)
        routes, limits = self._routes
        needs_sizes = self.may_skip_header and not (self.module.is_pooled and routes.reads_whole)
        return routes, self.checker.check(features, bags, limits, needs_sizes=needs_sizes)

    def _split(self, bags: Parts, routes: Routes, checked: CheckedBatch) -> PreparedBatch:
        """Split a batch into segments."""
        counts_K = checked.counts_K if checked.counts_K.numel() else bags.ids_per_key()
        given_counts_K = inverse = counts_K[:0]
        bags_D = _NONE
        if not self.module.is_pooled:
            bags = one_bag_per_key(bags, counts_K)
        elif self.leaves_out and checked.is_variable and self.module.env.world_size > 1:
            bags_D = bags_of_streams(self.streams, routes, checked)
        if self.module.distinct:
            given_counts_K = counts_K
            bags, inverse = keep_distinct(bags, are_wide=self._has_hashed_ids)
            counts_K = bags.lengths
        is_short = self.goes_by_id and _are_bags_short(self.streams, bags, bags_D, self.most_ids)
        weights, needs_grad, places = list[Tensor](), False, list[Tensor]()
        if self.module.is_weighted:
            assert bags.weights is not None
            # their gradients return by an exchange of their own: see with_weight_gradients
            weights = [bags.weights.detach()]
            needs_grad = torch.is_grad_enabled() and bags.weights.requires_grad
        if needs_grad or self.keeps_places or not self.module.is_pooled:
            places = [torch.arange(bags.values.numel(), device=self.module.device)]
        segments, counts_G = Segments([], [], [], [], []), counts_K.long()
        if routes.use_raw:
            segments = Segments([bags.lengths], [bags.values], [*weights], [*places], [])
        bag_counts, offsets = NO_COUNTS, bags.offsets
        if routes.rounds:
            lengths_KB = bags.lengths.view(routes.num_keys, bags.stride)
            bag_counts, counts = lengths_KB.index_select(0, routes.split_keys), [counts_G]
            for round_ in routes.rounds:
                ids = lengths_KB, bags.values, weights, places
                of_blocks, offsets = self._bucketize(round_, segments, *ids, offsets, is_short)
                counts.append(of_blocks.view(round_.num_blocks, bags.stride).sum(1).long())
            counts_G = torch.cat(counts)
        return PreparedBatch(
            bags,
            segments,
            counts_G,
            given_counts_K,
            inverse,
            bags_D,
            bag_counts,
            offsets,
            is_short,
            needs_grad,
        )

    def _bucketize(
        self,
        round_: SplitRound,
        segments: Segments,
        lengths_KB: Tensor,
        values_N: Tensor,
        weights: Sequence[Tensor],
        places: Sequence[Tensor],
        offsets: Tensor,
        is_short: bool,
    ) -> tuple[Tensor, Tensor]:
        """Append the segments of one round; return bag lengths per block, and bag offsets."""
        lengths_FB = lengths_KB
        if not round_.features.is_whole:
            select = round_.features.select
            lengths_FB, values_N, picked = ops.permute_2d(
                select, lengths_KB, values_N, weights[0] if weights else None
            )
            weights = [] if picked is None else [picked]
            places = [ops.permute_2d(select, lengths_KB, place_N)[1] for place_N in places]
            if is_short:
                offsets = ops.complete_cumsum(lengths_FB.flatten())
        if values_N.dtype not in round_.blocks or round_.hashes:
            values_N = values_N.long()  # int32 ids of a table beyond int32, or of any 64-bit id
        block_sizes, boundaries = round_.blocks[values_N.dtype]
        rows_N, is_hashed_N = values_N, NO_FAULTS
        if round_.hashes:
            rows_N, is_hashed_N = rows_of_regions(values_N, lengths_FB.sum(1), round_.hashes)
        lengths, values, new_weights, moved_to = ops.block_bucketize(
            lengths_FB.flatten(),
            rows_N,
            weights[0] if weights else None,
            block_sizes,
            self.module.layout.num_buckets,
            boundaries,
            return_positions=is_short or bool(places) or bool(round_.hashes),
        )
        if round_.hashes:  # their owner receives the ids themselves
            assert moved_to is not None
            to = moved_to.long()
            ids = torch.empty_like(values_N).index_copy_(0, to, values_N)
            if is_hashed_N.numel():
                is_hashed = torch.empty_like(is_hashed_N).index_copy_(0, to, is_hashed_N)
                ids = torch.where(is_hashed, ids, values)
            values = ids
        segments.lengths.append(lengths)
        segments.values.append(values)
        if new_weights is not None:
            segments.weights.append(new_weights)
        if moved_to is not None and is_short:
            segments.moved_to.append(moved_to)
        for places_N in places:
            assert moved_to is not None
            moved = torch.empty_like(places_N).index_copy_(0, moved_to.long(), places_N)
            segments.places.append(moved)
        return lengths, offsets

    def _admits(self) -> bool:
        """Return whether new ids of this rank's batch get rows of tables with hashed ids."""
        return self.is_training and self.module.trains and torch.is_grad_enabled()

    # -- header -----------------------------------------------------------------------------------

    def skip_header(self, ctx: BatchContext) -> bool:
        """Set the context's header without an exchange, if the host knows the sizes.

        On a GPU without other ranks it does if it knows how many ids each feature has, or if every
        lookup reads the whole batch. Faults found on the device are raised with a later batch.

        Returns:
            Whether it does; else there must be a header.
        """
        header = known_header(ctx) if self.may_skip_header else None
        if header is None:
            return False
        ctx.header, ctx.flag = header, int(header.flags_R[0])
        if ctx.is_good:
            late = self.checker.flags_to_check_late(ctx.checked.faults)
            if late.is_cuda:
                self.late.add(late, partial(report_late, self, ctx.checked))
        return True

    def header_of(self, ctx: BatchContext) -> Tensor:
        """Build the header for each destination. If the batch failed, every word is the flag."""
        flag, streams = ctx.flag | self._module_bits, self.streams
        if self.module.trains and torch.is_grad_enabled():
            flag |= Flag.TRAINS
        if self._has_hashed_ids and self._admits():
            flag |= Flag.ADMITS
        if ctx.end_of_data.is_last:
            flag |= Flag.IS_LAST
        if stop.is_requested:
            flag |= Flag.STOPS
        if not ctx.is_good:
            ctx.flag = flag
            total = sum(streams.header_sizes)
            # receivers read only the first word of a failed batch
            return torch.full((total,), flag, dtype=torch.int64, device=self.module.device)
        prepared, faults = ctx.prepared, ctx.checked.faults
        if prepared.weights_need_grad:
            flag |= Flag.WEIGHTS_NEED_GRAD
        if prepared.bags_D.size:
            flag |= Flag.VARIABLE
        if prepared.is_short:
            flag |= Flag.SHORT
        ctx.flag = flag
        size, order, counts_G = prepared.bags.stride, ctx.routes.header, prepared.counts_G
        if faults.is_cuda and ops.HAS_TRITON:
            from recsys.kernels.ops_triton import build_header

            bits = Flag.FAILED, flag_of_bad_ids(self.checker)
            words = build_header(order, counts_G, faults.int(), flag, size, *bits)
        else:
            head = ops.upload([flag, size], self.module.device)
            if faults.numel():
                # set on the device, as the host would have to wait for the faults
                # docs/decisions/exchange.md, "The host waits for the device once per step"
                head[FLAG] |= faults[0] * Flag.FAILED
                head[FLAG] |= faults[1] * flag_of_bad_ids(self.checker)
            words = torch.cat([head, counts_G])[order]
        if prepared.bags_D.size:
            bags = np.zeros(sum(streams.header_sizes), dtype=np.int64)
            bags[streams.count_words] = prepared.bags_D << COUNT_BITS
            words += ops.upload(bags, self.module.device)
        return words

    # -- send -------------------------------------------------------------------------------------

    def send(self, ctx: BatchContext) -> BatchContext:
        """Wait for the headers and start sending ids.

        Raises:
            Exception: The error of the lowest rank with an error in its batch, on every rank; or
                the fault of an earlier batch that had no header.
        """
        for pending in ctx.pending_headers:
            _read_headers(*pending)
        header, warning = ctx.header, ""
        if self.late.pending:
            self.late.read_arrived()
        flags_R = header.flags_R
        # `ctx.flag` lacks the bits that header_of adds for faults: equal flags mean no fault
        is_usual = ctx.is_good and bool((flags_R == ctx.flag).all())
        if not is_usual or ctx.flag & Flag.STOPS:
            stop.is_agreed |= bool((flags_R & Flag.STOPS).any())
        if not is_usual:
            ctx.is_absent = bool((flags_R & Flag.ABSENT).all())
            if not ctx.is_absent:
                warning = raise_faults(ctx, flags_R)
        ctx.end_of_data.flags_R = flags_R
        if ctx.is_absent:
            return ctx
        routes, prepared, streams = ctx.routes, ctx.prepared, self.streams
        segments, sizes_R = prepared.segments, header.batch_sizes_R
        bags_RS = np.repeat(sizes_R[:, None], streams.num_received, 1)
        bags_D, ids_D = prepared.bags_D, header.counts_G
        if not bags_D.size:
            bags_D = np.full(len(routes.segments), prepared.bags.stride)
        if ids_D.size:
            ids_D = ids_D[routes.segments]
        none = _NO_FLAGS
        counts_RS = header.words_RS
        shape = BatchShape(
            sizes_R, counts_RS, bags_RS, bags_RS, ids_D, bags_D, bags_D, none, none, False, False
        )
        # one variable rank makes all ranks ragged; one rank with long bags keeps all by bag
        # docs/decisions/ragged.md, "Missing bags are not returned"
        if (flags_R & Flag.VARIABLE).any() or (flags_R & Flag.SHORT).all():
            shape = ragged_shape(shape, header, streams)
        ctx.shape = shape
        # equal on all ranks: edges[-1] counts all destinations, and a header always has the counts
        if streams.edges[-1] and ids_D.size and not routes.is_identity:
            per_id = streams.num_parts - 1
            received_RS = shape.lengths_received_RS + per_id * shape.ids_received_RS
            ctx.pending_ids = comm.all_to_all(
                self.module.env.for_ids,
                ExchangeName.IDS,
                _pack(self, segments, routes, header.counts_G, prepared.bags.stride, shape),
                self.per_rank(shape.lengths_sent_D + per_id * ids_D),
                received_RS.sum(1).tolist(),
            )
        # the payload has copies of these tensors, so their memory is free for the next batch:
        # docs/decisions/structure.md, "One value per batch, one class per exchange"
        for sent in (segments.lengths, segments.values, segments.weights):
            sent.clear()
        if not shape.is_by_id:
            segments.moved_to.clear()
        if warning:
            warn_of_bad_ids(warning)
        return ctx

    def per_rank(self, values_D: np.ndarray) -> list[int]:
        """Return the sum over the streams of each destination."""
        ends = np.concatenate([[0], values_D.cumsum()])
        sums: list[int] = np.diff(ends[self.streams.edges]).tolist()
        return sums

    # -- receive ----------------------------------------------------------------------------------

    def receive(self, ctx: BatchContext) -> BatchContext:
        """Wait for the ids, and order them for the lookups."""
        routes, shape, header = ctx.routes, ctx.shape, ctx.header
        replicas, places, lookups = list[LookupInput](), list[Tensor](), list[LookupInput]()
        anchors: list[Tensor] = []
        # before the wait below, so that this work overlaps with the exchange
        if routes.replicas:
            replicas, places = select_bags(routes.replicas, ctx)
        if ctx.pending_ids is not None:
            bags = _unpack(self, ctx.pending_ids.wait(), shape)
            ctx.pending_ids = None
            if self.module.is_weighted and (header.flags_R & Flag.WEIGHTS_NEED_GRAD).any():
                bags, anchor = with_weight_gradients(ctx, bags)
                anchors.append(anchor)
            lookups = _split_bags(self, bags, shape, shape.ids_received_RS.sum(0))
        elif routes.is_identity:
            sent_bags = ctx.prepared.bags
            bags = LookupInput(
                sent_bags.values, sent_bags.offsets.to(sent_bags.values.dtype), sent_bags.weights
            )
            if self.may_skip_header and routes.reads_whole:  # one lookup needs no counts
                lookups = [bags]
            else:
                lookups = _split_bags(self, bags, shape, header.counts_G)
        elif routes.lookups and not header.counts_G.size:  # all of them read the whole batch
            lookups, _ = select_bags(routes.lookups, ctx)
        if self._has_hashed_ids:
            is_training = bool((header.flags_R & Flag.ADMITS).all())
            lookups = [
                bags if group is None else _with_rows(bags, group, is_training)
                for bags, group in zip(lookups, self.hashed, strict=True)
            ]
        ctx.received = ReceivedBatch(lookups, replicas, places, anchors)
        return ctx


def _pack(
    stage: InputDist,
    segments: Segments,
    routes: Routes,
    counts_G: np.ndarray,
    batch_size: int,
    shape: BatchShape,
) -> Tensor:
    """Return the payload: per destination its lengths, ids and weights."""
    counts = counts_G if routes.use_raw else counts_G[routes.num_keys :]
    sizes = [np.full_like(counts, batch_size), *[counts] * (stage.streams.num_parts - 1)]
    order_P, sizes_M = routes.payload, np.concatenate(sizes)
    if shape.is_ragged:  # of a segment's lengths the first are sent: it counts as two
        kept_M = sizes_M.copy()
        kept_M[routes.sent] = shape.lengths_sent_D
        order_P, sizes_M = 2 * order_P, np.stack([kept_M, sizes_M - kept_M], 1).ravel()
    word = stage.streams.word
    if stage.module.device.type == "cuda" and ops.HAS_TRITON and len(segments.values) == 1:
        from recsys.kernels.ops_triton import pack

        plan, total = ops.plan_of_moves(order_P, sizes_M)
        weights_N = segments.weights[0] if segments.weights else None
        words = segments.lengths[0], segments.values[0], weights_N
        return pack(*words, ops.upload(plan, stage.module.device), total, word)
    parts = [*segments.lengths, *segments.values]
    for weights in segments.weights:
        # the bits of a weight, in a float type as wide as the words
        # docs/decisions/exchange.md, "One payload behind one header"
        parts.append(weights.to(stage.streams.weight_word).view(word))
    total, at = sum(map(torch.numel, parts)), 0
    source = torch.empty(total, dtype=word, device=stage.module.device)
    for part in parts:
        source[at : at + part.numel()].copy_(part)
        at += part.numel()
    return ops.move_segments(source, order_P, sizes_M)


def _unpack(stage: InputDist, payload: Tensor, shape: BatchShape) -> LookupInput:
    """Return the bags of all streams of this rank from a received payload."""
    streams, counts_RS = stage.streams, shape.ids_received_RS
    if stage.module.env.world_size > 1:
        parts = [shape.lengths_received_RS, *[counts_RS] * (streams.num_parts - 1)]
        order, sizes = streams.unpack_order, np.stack(parts, 1).ravel()
        if shape.is_by_id:  # lengths of bags of one id were not sent: they are appended
            by_id = shape.by_id_RS.ravel()
            ones = np.where(by_id, counts_RS.ravel(), 0)
            payload = torch.cat([payload, payload.new_ones(int(ones.sum()))])
            order, (lengths,) = order.copy(), np.nonzero(by_id[streams.reading])
            order[lengths] = len(sizes) + streams.reading[lengths]
            sizes = np.concatenate([sizes, ones])
        payload = ops.move_segments(payload, order, sizes)
    num_bags, num_ids = int(shape.bags_received_RS.sum()), int(counts_RS.sum())
    weights = None
    if stage.module.is_weighted:
        weights = payload[num_bags + num_ids :].view(streams.weight_word).float()
    indices = payload[num_bags : num_bags + num_ids]
    return LookupInput(indices, ops.complete_cumsum(payload[:num_bags]), weights)


def _split_bags(
    stage: InputDist, bags: LookupInput, shape: BatchShape, ids_S: np.ndarray
) -> list[LookupInput]:
    """Split the bags of all streams of this rank by lookup."""
    groups, bags_RS = stage.module.layout.groups[stage.module.env.rank], shape.bags_received_RS
    parts = []
    start = first_bag = 0
    for group in groups:
        first, last = group.streams.start, group.streams.stop
        part = bags
        if len(groups) > 1:
            end = start + int(ids_S[first:last].sum())
            last_bag = first_bag + int(bags_RS[:, first:last].sum())
            part = LookupInput(
                bags.indices[start:end],
                bags.offsets[first_bag : last_bag + 1] - start,
                None if bags.weights is None else bags.weights[start:end],
            )
            start, first_bag = end, last_bag
        if shape.is_ragged:
            part = part._replace(of_features=bags_RS[:, first:last].T)
        if bags.indices.is_cuda or group.is_hashed:
            of_tables = np.bincount(group.feature_table_map, ids_S[first:last], len(group.tables))
            # bincount with weights returns float64, which is exact up to 2^53
            part = part._replace(ids_of_tables=of_tables.astype(np.int64).tolist())
        parts.append(part)
    return parts


def _with_rows(bags: LookupInput, group: HashedGroup, is_training: bool) -> LookupInput:
    """Return the bags of a lookup with the rows of its ids, unless these are found later."""
    if group.maps_at_lookup(is_training):
        return bags._replace(are_ids=True)
    sizes = bags.ids_of_tables
    assert sizes is not None
    rows = group.rows_of(bags.indices, sizes, is_training).to(bags.indices.dtype)
    return bags._replace(indices=rows, ids_of_tables=sizes if rows.is_cuda else None)


def _are_bags_short(streams: Streams, bags: Parts, bags_D: np.ndarray, most_ids: float) -> bool:
    """Return whether a row per id is less than a row per bag of each row block.

    The estimate takes the ids of the whole batch for the ids of row-split tables, because the host
    knows their number without waiting.
    """
    num_ids, dims = bags.values.numel(), streams.split_dims
    if bags_D.size:
        split_D = bags_D[streams.is_split]
        num_bags, num_values = int(split_D.sum()), int(split_D @ dims)
    else:
        num_bags, num_values = bags.stride * len(dims), bags.stride * int(dims.sum())
    is_worth_it = num_values >= _MIN_VALUES and num_ids <= min(_MAX_IDS, most_ids) * num_bags
    # a rank without ids must not keep the other ranks from returning rows by id
    return is_worth_it or not num_ids


# -- header exchange ------------------------------------------------------------------------------


def start_together(contexts: Sequence[BatchContext]) -> None:
    """Start the header exchange of prepared batches: one exchange for modules on the same ranks.

    Args:
        contexts: Prepared batches of different modules, in the same order on every rank.
    """
    stage = contexts[0].stage
    if len({id(ctx.stage.module.env.process_group) for ctx in contexts}) > 1:
        of_groups: dict[int, list[BatchContext]] = {}
        for ctx in contexts:
            of_groups.setdefault(id(ctx.stage.module.env.process_group), []).append(ctx)
        for alike in of_groups.values():
            start_together(alike)
        return
    if stage.module.env.world_size == 1:
        contexts = [ctx for ctx in contexts if not ctx.stage.skip_header(ctx)]
        if not contexts:
            return
        stage = contexts[0].stage
    sent, env, streams = stage.header_of(contexts[0]), stage.module.env, stage.streams
    sizes, width = streams.header_sizes, streams.header_width
    if len(contexts) > 1:
        headers = [sent, *(ctx.stage.header_of(ctx) for ctx in contexts[1:])]
        all_sizes = [ctx.stage.streams.header_sizes for ctx in contexts]
        parts = [h.split(of_stage) for h, of_stage in zip(headers, all_sizes, strict=True)]
        # all-to-all sends one block per rank: the words of all modules for a rank must be adjacent
        sent = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
        sizes = [sum(of_rank) for of_rank in zip(*all_sizes, strict=True)]
        width = sum(ctx.stage.streams.header_width for ctx in contexts)
    widths = [width] * env.world_size
    pending = comm.all_to_all(env.for_ids, ExchangeName.ID_COUNTS, sent, sizes, widths)
    copied = None
    if stage.module.device.type == "cuda" and env.exchanges_in_streams:
        # under NCCL the copy is queued behind the exchange: reading it a step later does not wait
        copied = _copy_headers(pending, contexts)
    for ctx in contexts:
        ctx.pending_headers = [(pending, contexts, copied)]


def _copy_headers(pending: comm.Pending, contexts: Sequence[BatchContext]) -> CopiedHeaders:
    """Start to copy received headers and the batches' counts to the host, in pinned memory."""
    arrived = pending.wait()
    parts = [arrived]
    for ctx in contexts:
        if ctx.is_good:
            parts += [ctx.prepared.counts_G, ctx.prepared.given_counts_K.to(arrived.dtype)]
    host, event = torch.cat(parts), None
    if host.is_cuda:
        # a copy to memory that is not pinned would block the host here
        # docs/decisions/exchange.md, "Pipelines read headers a step after they were sent"
        whole, host = host, torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
        host.copy_(whole, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
    return parts, host, event


def _read_headers(
    pending: comm.Pending, contexts: Sequence[BatchContext], copied: CopiedHeaders | None
) -> None:
    """Set the headers of batches whose headers were exchanged together."""
    parts, host, event = copied or _copy_headers(pending, contexts)
    if event is not None:
        event.synchronize()  # over NCCL the only wait of the host, for a good batch
    edges = np.cumsum(list(map(torch.numel, parts)))
    headers, *counts = np.split(host.numpy(), edges[:-1])
    words_RH = headers.reshape(contexts[0].stage.module.env.world_size, -1)
    at = 0
    for ctx in contexts:
        own_RH = words_RH[:, at : at + ctx.stage.streams.header_width]
        counts_G, given_counts_K = _NONE, _NONE
        if ctx.is_good:
            counts_G, given_counts_K, *counts = counts
        ctx.header = BatchHeader(
            own_RH[:, FLAG], own_RH[:, BATCH], own_RH[:, COUNTS:], counts_G, given_counts_K
        )
        ctx.pending_headers = ()
        at += ctx.stage.streams.header_width
