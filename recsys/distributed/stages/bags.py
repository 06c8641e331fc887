"""Operations on the bags of one rank's batch, before they are sent or looked up.

Shapes: `B` samples of this rank, `K` features of the given batch, `N` ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import IdHash
from recsys.distributed.stages.batch import BatchContext, LookupInput, PreparedBatch
from recsys.distributed.stages.header import COUNT_BITS, BatchHeader
from recsys.distributed.stages.routes import Positions, Routes
from recsys.distributed.stages.streams import Streams
from recsys.kernels import ops
from recsys.kernels.hashed import build, native
from recsys.kernels.hashed.twin import mix64, signed
from recsys.modules.tables.batch_checker import NO_FAULTS, CheckedBatch
from recsys.sparse.keyed_bags import Parts

# see docs/decisions/ragged.md, "Missing bags are not returned"
_MAX_KEPT = 0.9  # padding is left out if at most this share of the values would be kept
_FEW_SEGMENTS = 8  # up to this number, segments are moved one by one, which saves a copy


def one_bag_per_key(bags: Parts, counts_K: Tensor) -> Parts:
    """Put the ids of each feature into one bag, without weights.

    Args:
        bags: The bags, of one batch size.
        counts_K: Ids of each feature.
    """
    # a batch without samples has one offset, which stands for all features
    offsets = bags.offsets[:: bags.stride or 1].expand(len(bags.keys) + 1)
    return bags._replace(weights=None, lengths=counts_K, offsets=offsets, stride=1)


_ID_BITS = 40  # one word has an id and, above it, the number of its feature
_ID_MASK = (1 << _ID_BITS) - 1  # only ids of features without a table may be larger


def rows_of_regions(
    ids_N: Tensor, counts_F: Tensor, hashes: Sequence[IdHash | None]
) -> tuple[Tensor, Tensor]:
    """Return a row of the region of each hashed id, by which ids are bucketized.

    Args:
        ids_N: int64 ids, ordered by feature.
        counts_F: Ids of each feature.
        hashes: Assignment of each feature's ids to regions; None for row numbers.

    Returns:
        `[N]` rows; and `[N]` bool, which ids are hashed, or `[0]` if all are.
    """
    known = [index_hash or _NO_HASH for index_hash in hashes]
    constants = np.array(
        [[signed(h.seed), (h.num_regions - 1).bit_length(), h.region_rows] for h in known],
        dtype=np.int64,
    )
    is_hashed_N = NO_FAULTS
    if not all(hashes):
        is_hashed_F = ops.upload(constants[:, 2] > 0, ids_N.device)
        is_hashed_N = is_hashed_F.repeat_interleave(counts_F, output_size=ids_N.numel())
    library = build.library() if ids_N.is_cpu else None
    if library is not None:
        return native.region_rows(library, ids_N, counts_F.tolist(), constants), is_hashed_N
    seed_N, bits_N, rows_N = (
        ops.upload(constants, ids_N.device)
        .repeat_interleave(counts_F, dim=0, output_size=ids_N.numel())
        .unbind(1)
    )
    # the C library computes the same bits; a region must not depend on the device of the batch
    mixed = mix64(ids_N ^ seed_N)
    # the clamp avoids a shift by 64 (one region); the mask removes the copied sign bits
    regions = (mixed >> (64 - bits_N).clamp(max=63)) & ((1 << bits_N) - 1)
    return torch.where(rows_N > 0, regions * rows_N, ids_N), is_hashed_N


_NO_HASH = IdHash(seed=0, num_regions=1, region_rows=0)


def keep_distinct(bags: Parts, *, are_wide: bool = False) -> tuple[Parts, Tensor]:
    """Deduplicate the ids of each feature.

    The number of ids stays the same, because the host does not know the number of distinct ids. The
    rest belongs to one more feature, which no table reads.

    Args:
        bags: One bag per feature.
        are_wide: Whether ids may have more than 40 bits.

    Returns:
        The bags, and `[N]` the position of each given id among the distinct ids.
    """
    num_keys, num_ids, counts_K = len(bags.keys), bags.values.numel(), bags.lengths
    key_N = torch.arange(num_keys, device=counts_K.device).repeat_interleave(
        counts_K, output_size=num_ids
    )
    if are_wide:  # two words per id
        words, order = torch.sort(bags.values.long())
        # stable: equal ids of a feature stay adjacent
        keys_sorted, by_key = torch.sort(key_N[order], stable=True)
        words, order = words[by_key], order[by_key]
        is_first = torch.ones_like(words, dtype=torch.bool)
        is_first[1:] = (words[1:] != words[:-1]) | (keys_sorted[1:] != keys_sorted[:-1])
    else:
        words, order = torch.sort((key_N << _ID_BITS) + (bags.values & _ID_MASK))
        is_first = torch.ones_like(words, dtype=torch.bool)
        torch.ne(words[1:], words[:-1], out=is_first[1:])
        keys_sorted = words >> _ID_BITS
    place_N = is_first.cumsum(0) - 1
    inverse = torch.empty_like(order).index_copy_(0, order, place_N)
    # repeated ids are written to the same position
    kept = torch.zeros_like(words).index_copy_(0, place_N, words)
    values = (kept if are_wide else kept & _ID_MASK).to(bags.values.dtype)
    lengths = counts_K.new_zeros(num_keys + 1)
    lengths.index_add_(0, keys_sorted, is_first.to(lengths.dtype))
    # positions after the last distinct id belong to the extra feature
    # docs/decisions/exchange.md, "The host waits for the device once per step"
    lengths[num_keys] = num_ids - lengths.sum()
    offsets, keys = ops.complete_cumsum(lengths), [*bags.keys, ""]
    return bags._replace(keys=keys, values=values, lengths=lengths, offsets=offsets), inverse


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def in_order(blocks: Sequence[Tensor], sizes: Sequence[np.ndarray], order_P: np.ndarray) -> Tensor:
    """Return segments of flat tensors in another order.

    Args:
        blocks: The tensors.
        sizes: Per tensor the sizes of its segments.
        order_P: int32, numbers of the segments, counted over all blocks, in their new order.
    """
    if len(order_P) > _FEW_SEGMENTS:
        return ops.move_segments(joined(blocks), order_P, np.concatenate(sizes))
    split = [block.split(of.tolist()) for block, of in zip(blocks, sizes, strict=True)]
    segments = [segment for of_block in split for segment in of_block]
    return torch.cat([segments[i] for i in order_P.tolist()])


def select_bags(
    features: Sequence[Positions], ctx: BatchContext
) -> tuple[list[LookupInput], list[Tensor]]:
    """Select bags of this rank's own batch.

    Args:
        features: Positions of the features of each lookup.
        ctx: The batch, whose header was read.

    Returns:
        The bags of each lookup; and for sequences the positions in the batch of their ids.
    """
    module, header = ctx.stage.module, ctx.header
    prepared, routes = ctx.prepared, ctx.routes
    bags, selected_weights, places = prepared.bags, [], []
    num_ids, num_keys = bags.values.numel(), routes.num_keys
    lengths_KB = bags.lengths.view(num_keys, bags.stride)
    carried = list[Tensor]()
    if not module.is_pooled:
        carried = [torch.arange(num_ids, device=bags.values.device)]
    elif module.is_weighted:
        assert bags.weights is not None
        carried = [bags.weights]
    # move_segments has no autograd: weights that need a gradient take the other path
    on_host = not routes.reads_whole and not (carried and carried[0].requires_grad)
    for select, positions, is_whole in features:
        values, offsets, picked = bags.values, bags.offsets, carried
        if not is_whole and on_host:
            counts = header.counts_G[:num_keys]
            values = ops.move_segments(values, positions, counts)
            for of_ids in carried:
                picked = [ops.move_segments(of_ids, positions, counts)]
            offsets = ops.complete_cumsum(lengths_KB.index_select(0, select).flatten())
        elif not is_whole:
            total = num_ids if routes.reads_whole else int(header.counts_G[positions].sum())
            carried_value = (*carried, None)[0]
            lengths, values, selected = ops.permute_2d(
                select, lengths_KB, values, carried_value, total
            )
            offsets, picked = (
                ops.complete_cumsum(lengths.flatten()),
                [] if selected is None else [selected],
            )
        weights = picked[0] if module.is_weighted else None
        selected_weights.append(LookupInput(values, offsets.to(values.dtype), weights))
        if not module.is_pooled:
            places += picked
    return selected_weights, places


def bags_of_streams(streams: Streams, routes: Routes, checked: CheckedBatch) -> np.ndarray:
    """Return `[D]` bags of each stream if leaving out padding saves enough; else `[0]`.

    Args:
        streams: The module's streams.
        routes: Index tensors of the batch.
        checked: The batch, whose features have their own batch sizes.
    """
    longest = checked.bags.stride
    bags_D: np.ndarray = np.array(checked.given.stride_per_key())[routes.stream_keys]
    kept, padded = int(bags_D @ streams.dims_D), longest * int(streams.dims_D.sum())
    # the number of bags has the bits above COUNT_BITS, below the sign
    fits = longest < 1 << (63 - COUNT_BITS)
    return bags_D if fits and padded and kept <= _MAX_KEPT * padded else bags_D[:0]


def sent_places(
    routes: Routes, prepared: PreparedBatch, header: BatchHeader, replica_places: Sequence[Tensor]
) -> Tensor:
    """Return the positions in the batch of the ids sent, by rank and stream.

    Args:
        routes: Index tensors of the batch.
        prepared: The batch.
        header: Its counts.
        replica_places: Positions of the ids of replicated lookups, which come last.
    """
    sent, places = list(replica_places), prepared.segments.places
    if places:
        counts = header.counts_G if routes.use_raw else header.counts_G[routes.num_keys :]
        # received rows first, then rows of replicas, as in the buffer of Exchange.start_forward
        sent.insert(0, ops.move_segments(joined(places), routes.sent, counts))
    return joined(sent) if sent else prepared.counts_G.new_empty(0)
