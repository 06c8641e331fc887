"""First stage: the ids of each rank's batch go to the ranks that own their rows and columns.

Two exchanges, whatever the mix of strategies. The *header* tells every destination how many ids
come, for how many samples, and whether the sender found something wrong with its input; the host
reads it, which is the one device-to-host read of the stage. The *payload* is one buffer of 32-bit
words: the lengths, the ids and, for weighted features, the bits of the weights. Both ends build
and take apart the payload with one segment permutation.

Shape names: ``B`` samples of this rank, ``K`` features of the given batch, ``G`` segments (see
``layout``), ``S`` streams of this rank, ``R`` ranks, ``T`` samples of all ranks, ``N`` ids.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed import comm
from recsys.distributed.layout import Layout, LookupGroup
from recsys.distributed.types import ShardingEnv
from recsys.kernels import ops
from recsys.kernels.bounds import bad_id_message, find_bad_ids
from recsys.kernels.types import BoundsCheckMode
from recsys.sparse import KeyedJaggedTensor

_FLAG, _BATCH, _COUNTS = 0, 1, 2  # places in one rank's part of the header
_FAILED, _WARNED = 1, 2  # what the flag says: raise everywhere; or warn on the sender


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bags:
    """What one lookup reads: ``indices [N]``, ``offsets [F*T+1]``, ``weights [N]`` or None."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class IdRoute:
    """Where each id that a rank sent came from, for embeddings that return to their ids.

    Attributes:
        positions: ``[N]`` places in the batch of the ids sent, rank by rank and stream by stream,
            then of the replicas' ids.
        sent_counts: ids in each of those streams.
        received_counts: ``[R, S]`` ids received from each rank in each stream.
        slot_counts: ids of each slot.
        slot_starts: places in the batch at which each slot's ids begin.
        inverse: where ids were made distinct: per slot the place among its distinct ids of each
            given id, one after the other; else None.
        given_counts: ids of each slot as given.
    """

    positions: Tensor
    sent_counts: np.ndarray
    received_counts: np.ndarray
    slot_counts: np.ndarray
    slot_starts: np.ndarray
    inverse: Tensor | None
    given_counts: np.ndarray


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What the output stage must know of a batch.

    Attributes:
        features: the batch as given.
        batch_sizes: samples of each rank.
        counts: ``[len(split_slots), B]`` ids per bag of the row-split slots, or None if there are
            none.
        route: for embeddings that are not pooled.
    """

    features: KeyedJaggedTensor
    batch_sizes: tuple[int, ...]
    counts: Tensor | None
    route: IdRoute | None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalIds:
    """The ids this rank looks up: one :class:`Bags` per lookup group and per replica group."""

    lookups: tuple[Bags, ...]
    replicas: tuple[Bags, ...]
    receipt: Receipt


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Routes:
    """Index tensors for batches with one particular order of keys, on the device."""

    split: Tensor | None  # positions in the batch of the row-split slots' features
    replicas: tuple[Tensor, ...]  # per replica group, positions in the batch of its features
    replica_positions: tuple[np.ndarray, ...]
    use_raw: bool  # whether any destination is sent whole features
    num_keys: int
    slot_keys: np.ndarray  # per slot the position in the batch of its feature
    header: Tensor  # [H] gathers the header from [flag, batch size, counts_G]
    payload: Tensor  # [2S or 3S of all destinations] gathers segments
    segments: tuple[np.ndarray, ...]  # per destination, its segments
    sent: Tensor  # [streams of all destinations] gathers the ids' places in the batch
    check_rows: Tensor  # [K] rows of the smallest table that reads each feature of the batch
    min_rows: int  # the least of them
    unread: Tensor | None  # [K] bool: features that no table reads, None if there are none
    is_identity: bool  # one rank whose streams are the batch as it is


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """One rank's input in segments; ``counts_G`` has whole features first, then row blocks."""

    batch_size: int
    lengths: list[Tensor]
    values: list[Tensor]
    weights: list[Tensor]
    counts_G: Tensor
    source: KeyedJaggedTensor
    routes: _Routes
    bag_counts: Tensor | None
    given: KeyedJaggedTensor  # as the user gave it
    checked: KeyedJaggedTensor  # with one batch size, before bad ids were replaced
    bad_N: Tensor | None
    positions: list[Tensor]  # as `values`: places in the source, where embeddings return to ids
    inverse: Tensor | None  # [N] place among the distinct ids of each id
    given_counts: Tensor  # [K] ids of each key, if they were made distinct, else [0]


@final
class InputDist:
    """Sends ids to their owners.

    Args:
        layout: the compiled placement.
        feature_names: the module's distinct features, in the layout's numbering.
        is_weighted: whether the features carry weights.
        env: the ranks.
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
        env: ShardingEnv,
        device: torch.device,
        mode: BoundsCheckMode = BoundsCheckMode.FATAL,
        *,
        pooled: bool = True,
        distinct: bool = False,
    ) -> None:
        assert not (pooled and distinct)
        self.pooled = pooled
        self.distinct = distinct
        self.layout = layout
        self.feature_names = tuple(feature_names)
        self.is_weighted = is_weighted
        self.mode = mode
        self.env = env
        self.device = device
        self.num_streams = len(layout.send_segments[env.rank])
        self.has_streams = any(layout.send_segments)
        self._keys: list[str] | None = None
        self._routes: _Routes
        self._narrow = all(rect.num_rows < 2**31 for table in layout.tables for rect in table.rects)
        self._word = torch.int32 if self._narrow else torch.int64
        self._weight_word = torch.float32 if self._narrow else torch.float64
        self._blocks = {
            dtype: self._split_blocks(dtype)
            for dtype in (torch.int32, torch.int64)
            if layout.split_slots
            and max(layout.tables[layout.slots[i].table].num_rows for i in layout.split_slots)
            <= torch.iinfo(dtype).max
        }
        # payload of one source rank: lengths, ids, weights, each [S]; wanted: each [S][R]
        parts = 3 if is_weighted else 2
        order = np.arange(env.world_size * parts * self.num_streams).reshape(
            env.world_size, parts, self.num_streams
        )
        self._unpack = self._index(order.transpose(1, 2, 0).reshape(-1))
        counts = np.arange(_COUNTS, _COUNTS + self.num_streams)
        self._recv_lengths = self._index(
            np.concatenate([np.full(self.num_streams, _BATCH), *([counts] * (parts - 1))])
        )

    def start(self, features: KeyedJaggedTensor) -> HeaderExchange:
        """Checks the batch, cuts it into segments, and starts the header exchange."""
        error: Exception | None = None
        flag: Tensor | None = None
        batch: _Batch | None = None
        try:
            self._check_features(features)
            routes = self._routes_for(features.keys())
            checked = _with_one_batch_size(features)
            bad_N = self._find_bad_ids(checked, routes)
            source = checked
            if bad_N is not None:
                flag = bad_N.any() * (_FAILED if self.mode is BoundsCheckMode.FATAL else _WARNED)
                source = _without(checked, bad_N)
            batch = self._cut(features, checked, source, routes, bad_N)
        except Exception as raised:  # every rank must hear of it: it raises from the header
            error = raised
        sent = self._header(batch if error is None else None, flag)
        counts = [len(segments) + _COUNTS for segments in self.layout.send_segments]
        own = [self.num_streams + _COUNTS] * self.env.world_size
        received = comm.all_to_all(self.env, sent, counts, own)
        return HeaderExchange(self, batch, error, received)

    # -- what depends only on the layout and the order of keys -----------------------------------

    def _index(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(self.device)

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

    def _routes_for(self, keys: list[str]) -> _Routes:
        if keys != self._keys:
            self._routes = self._build_routes(keys)
            self._keys = list(keys)
        return self._routes

    def _build_routes(self, keys: list[str]) -> _Routes:
        layout = self.layout
        position = {key: i for i, key in enumerate(keys)}
        missing = [name for name in self.feature_names if name not in position]
        if missing:
            raise KeyError(
                f"The batch lacks the features {missing}, which the tables of this module read; "
                f"received the features {keys}. Add them (empty bags will do)."
            )
        at = np.array([position[name] for name in self.feature_names], dtype=np.int64)
        num_features = layout.num_features
        flat = [segment for segments in layout.send_segments for segment in segments]
        use_raw = any(segment < num_features for segment in flat)
        num_keys = len(keys)

        def in_batch(segments: tuple[int, ...]) -> np.ndarray:
            ids = np.array(segments, dtype=np.int64)
            raw = at[np.minimum(ids, num_features - 1)]
            return np.where(ids < num_features, raw, ids - num_features + num_keys)

        segments = tuple(in_batch(s) for s in layout.send_segments)
        skipped = 0 if use_raw else num_keys  # whole features are not in the payload's source
        num_segments = num_keys - skipped + layout.num_buckets * len(layout.split_slots)
        parts = 3 if self.is_weighted else 2
        header = np.concatenate([np.concatenate([[_FLAG, _BATCH], s + _COUNTS]) for s in segments])
        payload = np.concatenate(
            [s - skipped + part * num_segments for s in segments for part in range(parts)]
        )
        no_limit = np.iinfo(np.int64).max
        rows = np.full(num_keys, no_limit)
        for slot in layout.slots:
            place = at[slot.feature]
            rows[place] = min(rows[place], layout.tables[slot.table].num_rows)
        split = [at[layout.slots[i].feature] for i in layout.split_slots]
        replicas = tuple(
            np.array([at[f] for t in group.tables for f in layout.tables[t].features])
            for group in layout.replica_groups
        )
        return _Routes(
            split=self._index(np.array(split)) if split else None,
            replicas=tuple(self._index(r) for r in replicas),
            replica_positions=replicas,
            use_raw=use_raw,
            num_keys=num_keys,
            slot_keys=at[[slot.feature for slot in layout.slots]],
            header=self._index(header).long(),
            payload=self._index(payload),
            segments=segments,
            sent=self._index(np.concatenate([s - skipped for s in segments])),
            check_rows=torch.from_numpy(rows).to(self.device),
            min_rows=int(rows.min()),
            unread=torch.from_numpy(rows == no_limit).to(self.device)
            if (rows == no_limit).any()
            else None,
            is_identity=self.env.world_size == 1
            and not split
            and np.array_equal(segments[0], np.arange(num_keys)),
        )

    # -- per batch -------------------------------------------------------------------------------

    def _check_features(self, features: KeyedJaggedTensor) -> None:
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
        if self.is_weighted and torch.is_grad_enabled() and features.weights().requires_grad:
            raise ValueError(
                "A sharded collection carries no gradient to the weights of a batch; received "
                "weights that require one. Detach them, or leave the collection unsharded."
            )

    def _find_bad_ids(self, features: KeyedJaggedTensor, routes: _Routes) -> Tensor | None:
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
        routes: _Routes,
        bad_N: Tensor | None,
    ) -> _Batch:
        given_counts, inverse = features.offsets().new_empty(0), None
        if self.distinct:
            given_counts = _ids_per_key(features)
            features, inverse = _distinct(features)
        elif not self.pooled:  # bags do not matter: each feature is one
            features = _with_lengths(features, features.values(), _ids_per_key(features))
        batch_size = features.stride()
        lengths, values, weights, positions = [], [], [], []
        places_N = None
        if not self.pooled:
            places_N = torch.arange(features.values().numel(), device=self.device)
        counts = [_ids_per_key(features)]
        if routes.use_raw:
            lengths.append(features.lengths())
            values.append(features.values())
            if self.is_weighted:
                weights.append(features.weights())
            if places_N is not None:
                positions.append(places_N)
        bag_counts = None
        if routes.split is not None:
            lengths_KB = features.lengths().view(routes.num_keys, batch_size)
            split_lengths, split_values, carried = ops.permute_2d(
                routes.split,
                lengths_KB,
                features.values(),
                features.weights_or_none() if self.is_weighted else places_N,
            )
            bag_counts = split_lengths
            if split_values.dtype not in self._blocks:  # int32 ids of a table beyond int32
                split_values = split_values.long()
            block_sizes, boundaries = self._blocks[split_values.dtype]
            block_lengths, block_values, block_weights, moved_to = ops.block_bucketize(
                split_lengths.flatten(),
                split_values,
                carried if self.is_weighted else None,
                block_sizes,
                self.layout.num_buckets,
                boundaries,
                return_positions=not self.pooled,
            )
            lengths.append(block_lengths)
            values.append(block_values)
            if block_weights is not None:
                weights.append(block_weights)
            if moved_to is not None:
                assert carried is not None
                positions.append(torch.empty_like(carried).index_copy_(0, moved_to.long(), carried))
            num_blocks = self.layout.num_buckets * len(self.layout.split_slots)
            counts.append(block_lengths.view(num_blocks, batch_size).sum(1))
        return _Batch(
            batch_size=batch_size,
            lengths=lengths,
            values=values,
            weights=weights,
            counts_G=torch.cat([c.long() for c in counts]),
            source=features,
            routes=routes,
            bag_counts=bag_counts,
            given=given,
            checked=checked,
            bad_N=bad_N,
            positions=positions,
            inverse=inverse,
            given_counts=given_counts,
        )

    def _header(self, batch: _Batch | None, flag: Tensor | None) -> Tensor:
        """Builds ``[flag, batch size, ids per stream]`` per destination; a failure is all ones."""
        if batch is None:
            size = sum(len(s) + _COUNTS for s in self.layout.send_segments)
            return torch.ones(size, dtype=torch.int64, device=self.device)
        head = torch.zeros(_COUNTS, dtype=torch.int64, device=self.device)
        head[_BATCH] = batch.batch_size
        if flag is not None:
            head[_FLAG] = flag
        return torch.cat([head, batch.counts_G])[batch.routes.header]

    def payload_of(self, batch: _Batch, total: int) -> Tensor:
        """Builds the payload ``[total]``: per destination its lengths, ids and weights."""
        counts = batch.counts_G if batch.routes.use_raw else batch.counts_G[batch.routes.num_keys :]
        words = sum(t.numel() for t in (*batch.lengths, *batch.values, *batch.weights))
        source = torch.empty(words, dtype=self._word, device=self.device)
        at = 0
        for tensor in (*batch.lengths, *batch.values):
            source[at : at + tensor.numel()].copy_(tensor)
            at += tensor.numel()
        for tensor in batch.weights:
            source[at : at + tensor.numel()].copy_(tensor.to(self._weight_word).view(self._word))
            at += tensor.numel()
        batch_sizes = torch.full_like(counts, batch.batch_size)
        sizes = [batch_sizes, counts] + ([counts] if self.is_weighted else [])
        _, payload, _ = ops.permute_1d(batch.routes.payload, torch.cat(sizes), source, None, total)
        return payload

    def unpack(self, payload: Tensor, header_RH: Tensor, host_RH: np.ndarray) -> tuple[Bags, ...]:
        """Takes a received payload apart into the bags of this rank's lookups."""
        batch_sizes, counts_RS = host_RH[:, _BATCH], host_RH[:, _COUNTS:]
        num_samples = int(batch_sizes.sum())
        if self.env.world_size > 1:
            sizes = header_RH.index_select(1, self._recv_lengths).flatten()
            _, payload, _ = ops.permute_1d(self._unpack, sizes, payload, None, payload.numel())
        num_lengths = self.num_streams * num_samples
        num_ids = int(counts_RS.sum())
        offsets = ops.complete_cumsum(payload[:num_lengths])
        indices = payload[num_lengths : num_lengths + num_ids]
        weights = None
        if self.is_weighted:
            bits = payload[num_lengths + num_ids :]
            weights = bits.view(self._weight_word).float()
        stream_ids = counts_RS.sum(0)
        return split_bags(
            self.layout.groups[self.env.rank],
            Bags(indices=indices, offsets=offsets, weights=weights),
            stream_ids,
            num_samples,
        )

    def local_bags(self, batch: _Batch, counts_K: np.ndarray) -> tuple[Bags, ...]:
        """Returns the bags of a single rank whose streams are the batch as it is."""
        features = batch.source
        bags = Bags(
            indices=features.values(),
            offsets=features.offsets().to(features.values().dtype),
            weights=features.weights() if self.is_weighted else None,
        )
        return split_bags(self.layout.groups[0], bags, counts_K, batch.batch_size)

    def replica_bags(
        self, batch: _Batch, host_counts: np.ndarray
    ) -> tuple[tuple[Bags, ...], list[Tensor]]:
        """Selects the bags of the replicated tables from this rank's own batch.

        Returns:
            Per replica group its bags; and, where embeddings return to their ids, the ids' places.
        """
        features = batch.source
        bags, places = [], []
        lengths_KB = features.lengths().view(batch.routes.num_keys, batch.batch_size)
        carried = features.weights_or_none() if self.is_weighted else None
        if not self.pooled:
            carried = torch.arange(features.values().numel(), device=self.device)
        for select, positions in zip(
            batch.routes.replicas, batch.routes.replica_positions, strict=True
        ):
            total = int(host_counts[positions].sum())
            lengths, values, picked = ops.permute_2d(
                select, lengths_KB, features.values(), carried, total
            )
            offsets = ops.complete_cumsum(lengths.flatten()).to(values.dtype)
            weights = picked if self.is_weighted else None
            bags.append(Bags(indices=values, offsets=offsets, weights=weights))
            if not self.pooled:
                assert picked is not None
                places.append(picked)
        return tuple(bags), places

    def route_of(
        self,
        batch: _Batch,
        counts_G: np.ndarray,
        given_counts: np.ndarray,
        received_counts: np.ndarray,
        replica_places: list[Tensor],
    ) -> IdRoute:
        """Returns how embeddings find back to the ids of a batch."""
        routes = batch.routes
        slots = routes.slot_keys
        counts_K = counts_G[: routes.num_keys]
        starts_K = np.cumsum(counts_K) - counts_K
        sent_counts = np.concatenate(
            [np.zeros(0, dtype=np.int64)]
            + [counts_G[s] for s in routes.segments]
            + [counts_K[p] for p in routes.replica_positions]
        )
        places = replica_places
        if batch.positions:
            counts = batch.counts_G if routes.use_raw else batch.counts_G[routes.num_keys :]
            total = sum(int(counts_G[s].sum()) for s in routes.segments)
            _, sent, _ = ops.permute_1d(
                routes.sent, counts, torch.cat(batch.positions), None, total
            )
            places = [sent, *replica_places]
        inverse = None
        if batch.inverse is not None:
            parts = batch.inverse.split(given_counts.tolist())
            shifts = np.cumsum(counts_K[slots]) - counts_K[slots] - starts_K[slots]
            inverse = torch.cat([parts[k] + int(s) for k, s in zip(slots, shifts, strict=True)])
        return IdRoute(
            positions=torch.cat(places),
            sent_counts=sent_counts,
            received_counts=received_counts,
            slot_counts=counts_K[slots],
            slot_starts=starts_K[slots],
            inverse=inverse,
            given_counts=(counts_K if batch.inverse is None else given_counts)[slots],
        )


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


def split_bags(
    groups: Sequence[LookupGroup], bags: Bags, stream_ids: np.ndarray, num_samples: int
) -> tuple[Bags, ...]:
    """Cuts the bags of all streams of a rank into those of its lookup groups."""
    if len(groups) == 1:
        return (bags,)
    edges = np.concatenate([[0], np.cumsum(stream_ids)])
    parts = []
    for group in groups:
        first, last = group.streams.start, group.streams.stop
        ids = slice(int(edges[first]), int(edges[last]))
        offsets = bags.offsets[first * num_samples : last * num_samples + 1]
        parts.append(
            Bags(
                indices=bags.indices[ids],
                offsets=offsets - int(edges[first]),
                weights=None if bags.weights is None else bags.weights[ids],
            )
        )
    return tuple(parts)


@final
class HeaderExchange:
    """The header is under way; :meth:`send` reads it and sends the ids."""

    def __init__(
        self,
        stage: InputDist,
        batch: _Batch | None,
        error: Exception | None,
        received: comm.Pending,
    ) -> None:
        self._stage = stage
        self._batch = batch
        self._error = error
        self._received = received

    def send(self) -> IdExchange:
        """Waits for the header and starts the payload exchange.

        Raises:
            Exception: the error of the lowest rank that found one in its input, on every rank.
        """
        stage, batch = self._stage, self._batch
        num_ranks, width = stage.env.world_size, stage.num_streams + _COUNTS
        header = self._received.wait()
        own_counts = [] if batch is None else [batch.counts_G, batch.given_counts.to(header.dtype)]
        host = torch.cat([header, *own_counts]).cpu().numpy()  # the one device-to-host read
        host_RH = host[: num_ranks * width].reshape(num_ranks, width)
        own_flag = host_RH[stage.env.rank, _FLAG]
        if own_flag and batch is not None:
            assert batch.bad_N is not None
            message = stage.describe_bad_ids(batch.checked, batch.bad_N)
            if own_flag == _FAILED:
                self._error = IndexError(message)
        if (host_RH[:, _FLAG] == _FAILED).any():
            comm.raise_together(stage.env, self._error)
        assert batch is not None
        counts_G, given_counts = np.split(host[num_ranks * width :], [batch.counts_G.numel()])
        parts = 2 if stage.is_weighted else 1
        send_sizes = [
            len(segments) * batch.batch_size + parts * int(counts_G[segments].sum())
            for segments in batch.routes.segments
        ]
        recv_sizes = (
            host_RH[:, _BATCH] * stage.num_streams + parts * host_RH[:, _COUNTS:].sum(1)
        ).tolist()
        received = None
        if stage.has_streams and not batch.routes.is_identity:
            payload = stage.payload_of(batch, sum(send_sizes))
            received = comm.all_to_all(stage.env, payload, send_sizes, recv_sizes)
        if own_flag and stage.mode is BoundsCheckMode.WARNING:
            # after the exchange has begun: where warnings are errors, the others need not wait
            warnings.warn(f"{message} Row 0 is read instead.", UserWarning, stacklevel=2)
        return IdExchange(
            stage, batch, counts_G, given_counts, header.view(num_ranks, width), host_RH, received
        )


@final
class IdExchange:
    """The ids are under way; :meth:`wait` returns what this rank looks up."""

    def __init__(
        self,
        stage: InputDist,
        batch: _Batch,
        counts_G: np.ndarray,
        given_counts: np.ndarray,
        header_RH: Tensor,
        host_RH: np.ndarray,
        received: comm.Pending | None,
    ) -> None:
        self._stage = stage
        self._batch = batch
        self._counts_G = counts_G
        self._given_counts = given_counts
        self._header_RH = header_RH
        self._host_RH = host_RH
        self._received = received

    def wait(self) -> LocalIds:
        """Waits for the ids and orders them for the lookups."""
        stage, batch = self._stage, self._batch
        replicas, places = stage.replica_bags(batch, self._counts_G)
        lookups: tuple[Bags, ...] = ()
        if self._received is not None:
            payload = self._received.wait()
            lookups = stage.unpack(payload, self._header_RH, self._host_RH)
        elif batch.routes.is_identity:
            lookups = stage.local_bags(batch, self._counts_G)
        route = None
        if not stage.pooled:
            route = stage.route_of(
                batch, self._counts_G, self._given_counts, self._host_RH[:, _COUNTS:], places
            )
        return LocalIds(
            lookups=lookups,
            replicas=replicas,
            receipt=Receipt(
                features=batch.given,
                batch_sizes=tuple(self._host_RH[:, _BATCH].tolist()),
                counts=batch.bag_counts,
                route=route,
            ),
        )
