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
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import torch
from torch import Tensor

from recsys.distributed.placement.layout import LookupGroup
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.stages.batch_segments import BatchCutter, Segments
from recsys.distributed.stages.id_routes import (
    BATCH,
    COUNTS,
    FLAG,
    IdRoute,
    index_tensor,
    lookup_order,
)
from recsys.distributed.stages.weight_gradients import WeightRoute, carry_weights
from recsys.kernels import ops
from recsys.kernels.types import BoundsCheckMode
from recsys.sparse import KeyedJaggedTensor

# bits of the header's flag: raise everywhere, warn on the sender, send weight gradients back, and
# the sender has no batch after this one
_FAILED, _WARNED, _WEIGHTS_NEED_GRAD, _IS_LAST = 1, 2, 4, 8


def _warnings_raise() -> bool:
    """Whether Python is set to raise warnings, such as by ``python -W error``."""
    for action, message, category, module, line in warnings.filters:
        if message is None and module is None and line == 0 and issubclass(UserWarning, category):
            return action == "error"
    return False


@final
class LastBatches:
    """What ranks tell each other of the end of their data.

    Attributes:
        is_last: whether this rank's batch is its last; goes into the header.
        ranks: ``[R]`` bool, what the last header said; None before it.
        error: what this rank's data raised in place of a batch; the next header takes it to all.
    """

    def __init__(self) -> None:
        self.is_last = False
        self.error: Exception | None = None
        self.ranks: np.ndarray | None = None

    def heard(self) -> np.ndarray | None:
        """Returns what the last header said, and forgets it."""
        said, self.ranks = self.ranks, None
        return said


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bags:
    """What one lookup reads: ``indices [N]``, ``offsets [F*T+1]``, ``weights [N]`` or None.

    ``stream_ids`` are the ids of each stream of the lookup, of all ranks; None for replicas.
    """

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    stream_ids: np.ndarray | None = None


@final
class InputDist:
    """Sends ids to their owners.

    Args:
        cutter: cuts this rank's batches.
        env: the ranks.
    """

    def __init__(self, cutter: BatchCutter, env: ShardingEnv) -> None:
        self.cutter = cutter
        self.env = env
        self.layout = layout = cutter.layout
        self.device = device = cutter.device
        self.is_weighted = is_weighted = cutter.is_weighted
        self.last_batches: LastBatches | None = None
        self.num_streams = len(layout.send_segments[env.rank])
        self.header_width = self.num_streams + COUNTS  # words that each rank sends this one
        self.has_streams = any(layout.send_segments)
        self.header_sizes = [len(segments) + COUNTS for segments in layout.send_segments]
        narrow = all(rect.num_rows < 2**31 for table in layout.tables for rect in table.rects)
        self._word = torch.int32 if narrow else torch.int64
        self._weight_word = torch.float32 if narrow else torch.float64
        reading = lookup_order(layout.groups[env.rank], env.world_size, pooled=cutter.pooled)
        self.by_rank = index_tensor(np.argsort(reading), device)
        # payload of one source rank: lengths, ids, weights, each [S]; wanted: each as it is read
        parts = 3 if is_weighted else 2
        order = np.arange(env.world_size * parts * self.num_streams).reshape(
            env.world_size, parts, self.num_streams
        )
        by_part = order.transpose(1, 0, 2).reshape(parts, -1)
        self._unpack = index_tensor(by_part[:, reading].reshape(-1), device)
        counts = np.arange(COUNTS, COUNTS + self.num_streams)
        self._recv_lengths = index_tensor(
            np.concatenate([np.full(self.num_streams, BATCH), *([counts] * (parts - 1))]), device
        )

    def start(self, features: KeyedJaggedTensor) -> Trip:
        """Checks the batch, cuts it into segments, and starts the header exchange."""
        (trip,) = start_together([(self, features)])
        return trip

    def cut(self, features: KeyedJaggedTensor | Exception) -> Segments | Exception:
        """Checks and cuts a batch; every rank hears of an error, which raises from the header."""
        if self.last_batches is not None and self.last_batches.error is not None:
            return self.last_batches.error
        try:
            return self.cutter.cut(features)
        except Exception as error:
            return error

    def header_of(self, batch: Segments | Exception) -> Tensor:
        """Builds ``[flag, batch size, ids per stream]`` per destination; a failure is all ones."""
        if isinstance(batch, Exception):
            total = sum(self.header_sizes)
            return torch.full((total,), _FAILED, dtype=torch.int64, device=self.device)
        flag = _WEIGHTS_NEED_GRAD if batch.weights_need_grad else 0
        if self.last_batches is not None and self.last_batches.is_last:
            flag |= _IS_LAST
        head = ops.upload([flag, batch.batch_size], self.device)
        if batch.bad_N is not None:
            mode = self.cutter.mode
            # what is an error here must be one on all ranks
            fails = mode is BoundsCheckMode.FATAL or (
                mode is BoundsCheckMode.WARNING and _warnings_raise()
            )
            head[FLAG] |= batch.bad_N.any() * (_FAILED if fails else _WARNED)
        if batch.is_bad is not None:
            head[FLAG] |= batch.is_bad * _FAILED
        return torch.cat([head, batch.counts_G])[batch.routes.header]

    def payload_of(self, batch: Segments, total: int) -> Tensor:
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

    def unpack(self, payload: Tensor, header_RH: Tensor, host_RH: np.ndarray) -> Bags:
        """Takes a received payload apart into the bags of all streams of this rank."""
        num_samples = int(host_RH[:, BATCH].sum())
        if self.env.world_size > 1:
            sizes = header_RH.index_select(1, self._recv_lengths).flatten()
            _, payload, _ = ops.permute_1d(self._unpack, sizes, payload, None, payload.numel())
        num_lengths = self.num_streams * num_samples
        num_ids = int(host_RH[:, COUNTS:].sum())
        weights = None
        if self.is_weighted:
            bits = payload[num_lengths + num_ids :]
            weights = bits.view(self._weight_word).float()
        return Bags(
            indices=payload[num_lengths : num_lengths + num_ids],
            offsets=ops.complete_cumsum(payload[:num_lengths]),
            weights=weights,
        )

    def replica_bags(
        self, batch: Segments, host_counts: np.ndarray
    ) -> tuple[tuple[Bags, ...], list[Tensor]]:
        """Selects the bags of the replicated tables from this rank's own batch.

        Returns:
            Per replica group its bags; and, where embeddings return to their ids, the ids' places.
        """
        features = batch.source
        bags: list[Bags] = []
        places: list[Tensor] = []
        if not batch.routes.replicas:
            return (), places
        lengths_KB = features.lengths().view(batch.routes.num_keys, batch.batch_size)
        carried = features.weights_or_none() if self.is_weighted else None
        if not self.cutter.pooled:
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
            if not self.cutter.pooled:
                assert picked is not None
                places.append(picked)
        return tuple(bags), places


def split_bags(
    groups: Sequence[LookupGroup], bags: Bags, stream_ids: np.ndarray, num_samples: int
) -> tuple[Bags, ...]:
    """Cuts the bags of all streams of a rank into those of its lookup groups."""
    if len(groups) == 1:
        return (replace(bags, stream_ids=stream_ids),)
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
                stream_ids=stream_ids[first:last],
            )
        )
    return tuple(parts)


def start_together(requests: Sequence[tuple[InputDist, KeyedJaggedTensor]]) -> list[Trip]:
    """Starts the trips of several modules of the same ranks with one header exchange.

    Args:
        requests: stages and their batches, in the same order on every rank.
    """
    stages = [stage for stage, _ in requests]
    batches = [stage.cut(features) for stage, features in requests]
    headers = [stage.header_of(batch) for stage, batch in zip(stages, batches, strict=True)]
    sent, sizes = headers[0], stages[0].header_sizes
    if len(stages) > 1:
        parts = [h.split(s.header_sizes) for h, s in zip(headers, stages, strict=True)]
        sent = torch.cat([part for to_rank in zip(*parts, strict=True) for part in to_rank])
        sizes = [sum(of_rank) for of_rank in zip(*(s.header_sizes for s in stages), strict=True)]
    env = stages[0].env
    own = [sum(stage.header_width for stage in stages)] * env.world_size
    pending = comm.all_to_all(env, "tell how many ids come", sent, sizes, own)
    trips = [Trip(stage, batch) for stage, batch in zip(stages, batches, strict=True)]
    for trip in trips:
        trip.headers = pending, trips
    return trips


def _read_headers(pending: comm.Pending, trips: Sequence[Trip]) -> None:
    """Waits for the headers of trips that started together, and tells each what the ranks said."""
    widths = [trip.stage.header_width for trip in trips]
    header_RH = pending.wait().view(-1, sum(widths))
    counts = [
        counts
        for trip in trips
        if isinstance(trip.batch, Segments)
        for counts in (trip.batch.counts_G, trip.batch.given_counts)
    ]
    flat = [header_RH.flatten(), *(own.to(header_RH.dtype) for own in counts)]
    host = torch.cat(flat).cpu().numpy()  # the one device-to-host read
    edges = np.cumsum([header_RH.numel()] + [own.numel() for own in counts])
    first, *on_host = np.split(host, edges[:-1])
    counts_of = iter(on_host)
    host_RH = first.reshape(tuple(header_RH.shape))
    at = 0
    for trip, width in zip(trips, widths, strict=True):
        trip.header_RH = header_RH[:, at : at + width]
        trip.host_RH = host_RH[:, at : at + width]
        if isinstance(trip.batch, Segments):
            trip.counts_G, trip.given_counts = next(counts_of), next(counts_of)
        trip.headers = None
        at += width


@final
class Trip:
    """One batch of one module on its way through the stages: all that belongs to it.

    :func:`start_together` has sent its header; :meth:`send` reads the headers and sends the ids;
    :meth:`ids` waits for those that this rank looks up. The output stage reads the rest.

    Attributes:
        stage: the module's, whose batch it is.
        batch: cut, or why it could not be; None once the ids are there.
        headers: what is on its way, for it and those that started with it; None once it was read.
        header_RH: what the ranks said, on the device.
        host_RH: the same, on the host.
        counts_G: of the batch, on the host.
        given_counts: of the batch, on the host.
        features: the batch as given.
        batch_sizes: samples of each rank.
        lookups: the bags of each lookup group.
        replicas: the bags of each replica group.
        bag_counts: ``[len(split_slots), B]`` ids per bag of the row-split slots, or None if there
            are none.
        route: for embeddings that are not pooled.
        anchor: ``[0]``, through which a backward pass reaches the weights' way back on every rank;
            None if no rank's weights need gradients.
    """

    headers: tuple[comm.Pending, Sequence[Trip]] | None
    header_RH: Tensor
    host_RH: np.ndarray
    counts_G: np.ndarray
    given_counts: np.ndarray
    features: KeyedJaggedTensor
    batch_sizes: tuple[int, ...]
    lookups: tuple[Bags, ...] = ()
    replicas: tuple[Bags, ...] = ()
    bag_counts: Tensor | None
    route: IdRoute | None = None
    anchor: Tensor | None = None

    def __init__(self, stage: InputDist, batch: Segments | Exception) -> None:
        self.stage = stage
        self.batch: Segments | Exception | None = batch
        self._received: comm.Pending | None = None

    def send(self) -> Trip:
        """Waits for the headers and starts sending ids.

        Raises:
            Exception: the error of the lowest rank that found one in its input, on every rank.
        """
        if self.headers is not None:
            _read_headers(*self.headers)
        stage, batch, host_RH = self.stage, self.batch, self.host_RH
        warning = self._raise_faults()
        if stage.last_batches is not None:
            stage.last_batches.ranks = (host_RH[:, FLAG] & _IS_LAST) != 0
        assert isinstance(batch, Segments)
        parts = 2 if stage.is_weighted else 1
        segments = batch.routes.segments
        self._to_ranks = [int(self.counts_G[to_rank].sum()) for to_rank in segments]
        send_sizes = [
            len(to_rank) * batch.batch_size + parts * count
            for to_rank, count in zip(segments, self._to_ranks, strict=True)
        ]
        recv_sizes = (
            host_RH[:, BATCH] * stage.num_streams + parts * host_RH[:, COUNTS:].sum(1)
        ).tolist()
        if stage.has_streams and not batch.routes.is_identity:
            payload = stage.payload_of(batch, sum(send_sizes))
            self._received = comm.all_to_all(
                stage.env, "send ids to their owners", payload, send_sizes, recv_sizes
            )
        if warning:
            warnings.warn(f"{warning} Row 0 is read instead.", UserWarning, stacklevel=2)
        return self

    def _raise_faults(self) -> str:
        """Raises what any rank found wrong; returns what this rank warns of."""
        stage, batch, host_RH = self.stage, self.batch, self.host_RH
        error = batch if isinstance(batch, Exception) else None
        own_flag = host_RH[stage.env.rank, FLAG]
        message = ""
        if isinstance(batch, Segments) and own_flag & (_FAILED | _WARNED):
            error = batch.fault_of_bags()
            if error is None:
                assert batch.bad_N is not None
                message = stage.cutter.describe_bad_ids(batch.checked, batch.bad_N)
                if own_flag & _FAILED:
                    error = IndexError(message)
        if (host_RH[:, FLAG] & _FAILED).any():
            comm.raise_together(stage.env, "tell of a bad batch", error)
        return message if stage.cutter.mode is BoundsCheckMode.WARNING else ""

    def ids(self) -> Trip:
        """Waits for the ids, and orders them for the lookups."""
        stage, batch, host_RH = self.stage, self.batch, self.host_RH
        assert isinstance(batch, Segments)
        groups = stage.layout.groups[stage.env.rank]
        batch_sizes, counts_RS = host_RH[:, BATCH], host_RH[:, COUNTS:]
        self.features, self.bag_counts = batch.given, batch.bag_counts
        self.batch_sizes = tuple(batch_sizes.tolist())
        self.replicas, places = stage.replica_bags(batch, self.counts_G)
        if self._received is not None:
            bags = stage.unpack(self._received.wait(), self.header_RH, host_RH)
            if (host_RH[:, FLAG] & _WEIGHTS_NEED_GRAD).any():
                bags = self._with_weight_gradients(batch, bags)
            self.lookups = split_bags(groups, bags, counts_RS.sum(0), int(batch_sizes.sum()))
        elif batch.routes.is_identity:
            features = batch.source
            bags = Bags(
                indices=features.values(),
                offsets=features.offsets().to(features.values().dtype),
                weights=features.weights() if stage.is_weighted else None,
            )
            self.lookups = split_bags(groups, bags, self.counts_G, batch.batch_size)
        if not stage.cutter.pooled:
            self.route = batch.id_route(
                self.counts_G, self.given_counts, self._to_ranks, counts_RS, places
            )
        self.batch = self._received = None  # what was sent is not kept
        return self

    def _with_weight_gradients(self, batch: Segments, bags: Bags) -> Bags:
        assert bags.weights is not None
        sent = batch.sent_places(self._to_ranks) if batch.weights_need_grad else None
        route = WeightRoute(
            env=self.stage.env,
            places=sent,
            num_ids=batch.source.values().numel(),
            sent_counts=self._to_ranks,
            received_counts=self.host_RH[:, COUNTS:].sum(1).tolist(),
            stream_counts=self.header_RH[:, COUNTS:].t().flatten(),
            by_rank=self.stage.by_rank,
        )
        weights, self.anchor = carry_weights(route, batch.source.weights(), bags.weights)
        return Bags(indices=bags.indices, offsets=bags.offsets, weights=weights)
