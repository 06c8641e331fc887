"""A batch of one sharded module in its phases: checked, prepared, sent, received.

Each phase is a value whose fields are all set. `BatchContext` has the phases that a batch has
reached; `InputDist` makes them one after the other.

Shapes: `B` samples of this rank, `F` features of a lookup, `G` segments, `K` features of the
given batch, `N` ids, `D` streams of all destinations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from recsys.base.streamable import Multistreamable
from recsys.distributed.ranks import comm
from recsys.distributed.stages.header import (
    BatchHeader,
    BatchShape,
    EndOfData,
    Flag,
)
from recsys.distributed.stages.routes import Routes
from recsys.modules.tables.batch_checker import CheckedBatch
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import Parts

if TYPE_CHECKING:
    from recsys.distributed.stages.input_dist import InputDist


@final
class LookupInput(NamedTuple):
    """Input of one lookup. `F` features, `T` samples of all ranks."""

    indices: Tensor
    """`[N]` int32 or int64, rows of this rank's shards, in the order of `offsets`."""
    offsets: Tensor
    """`[F*T+1]`, dtype of `indices`. Bags are ordered by feature, then rank, then sample."""
    weights: Tensor | None
    """`[N]` float32, or None."""
    ids_of_tables: list[int] | None = None
    """Number of ids for each table, on a device and if the host knows them; else None."""
    of_features: np.ndarray | None = None
    """`[F, R]` bags of each feature from each rank, if they differ. The offsets then are
    `[their sum + 1]`, and the output is ordered by rank, then feature."""
    are_ids: bool = False
    """True if `indices` are hashed ids, whose rows are found at the lookup."""


@final
class Segments(NamedTuple):
    """Segments of a batch: whole features, then row blocks. The payload orders them by owner.

    Lists are emptied once their tensors are sent.

    Attributes:
        lengths: Bag lengths.
        values: Ids.
        weights: Weights, if weighted.
        places: Positions of the ids in the batch, if gradients or embeddings return to them.
        moved_to: If bags have few ids, per round of row-split tables `[N]`: position of each id
            among the round's segments.
    """

    lengths: list[Tensor]
    values: list[Tensor]
    weights: list[Tensor]
    places: list[Tensor]
    moved_to: list[Tensor]


@final
class PreparedBatch(NamedTuple):
    """A batch as segments that can be sent.

    Attributes:
        bags: The bags: deduplicated, or one bag per feature, if the module needs it.
        segments: The segments.
        counts_G: `[G]` ids of each segment, on the device.
        given_counts_K: `[K]` ids of each feature before deduplication; empty without it.
        inverse: `[N]` position of each id among the distinct ids; empty without deduplication.
        bags_D: `[D]` bags of each stream if features have batch sizes of their own and it is worth
            sending them; else empty.
        bag_counts: `[row-split slots, B]` ids per bag of row-split tables; `[0]` without any.
        split_offsets: `[features * B + 1]` of these bags; the same in each round.
        is_short: Whether these bags have few ids.
        weights_need_grad: Whether gradients return to the weights.
    """

    bags: Parts
    segments: Segments
    counts_G: Tensor
    given_counts_K: Tensor
    inverse: Tensor
    bags_D: np.ndarray
    bag_counts: Tensor
    split_offsets: Tensor
    is_short: bool
    weights_need_grad: bool


@final
class ReceivedBatch(NamedTuple):
    """Inputs of this rank's lookups.

    Attributes:
        lookups: Bags of each lookup.
        replicas: Bags of each replicated lookup, from this rank's own batch.
        replica_places: Positions in the batch of the ids of `replicas`, for sequences.
        anchors: `[0]`, through which backward reaches the exchange of weight gradients on every
            rank; none if no rank's weights need gradients.
    """

    lookups: Sequence[LookupInput]
    replicas: Sequence[LookupInput]
    replica_places: Sequence[Tensor]
    anchors: Sequence[Tensor]


CopiedHeaders: TypeAlias = tuple[list[Tensor], Tensor, torch.cuda.Event | None]
"""Headers and counts on their device, the copy on the host, and the event after the copy."""


@final
@dataclass(eq=False)
class BatchContext(Multistreamable):
    """A batch of one module, from `input_dist` to `output_dist`. Each phase is set once.

    Attributes:
        stage: Input stage of the module.
        given: The batch as given, or the exception raised instead; None before `prepare`.
        is_good: Whether this rank's batch has no error.
        error: Exception of this rank's batch; None if it is good.
        end_of_data: End-of-data status of the epoch.
        flag: Flag of this rank's header.
        is_absent: Whether the batches of all ranks lack the module's features.
        routes: Set by `prepare`, if the batch is good.
        checked: Set by `prepare`, if the batch is good.
        prepared: Set by `prepare`, if the batch is good.
        pending_headers: The header exchange, with its contexts and their copy on the way to the
            host; empty after it was read.
        header: Set by `send`, for all contexts whose headers were sent together.
        shape: Set by `send`.
        pending_ids: The exchange of ids; None if there is none.
        received: Set by `receive`.
    """

    stage: InputDist
    given: KeyedJaggedTensor | Exception | None = None
    is_good: bool = True
    error: Exception | None = None
    end_of_data: EndOfData = field(init=False)
    flag: int = 0
    is_absent: bool = False
    routes: Routes = field(init=False)
    checked: CheckedBatch = field(init=False)
    prepared: PreparedBatch = field(init=False)
    pending_headers: Sequence[
        tuple[comm.Pending, Sequence[BatchContext], CopiedHeaders | None]
    ] = ()
    header: BatchHeader = field(init=False)
    shape: BatchShape = field(init=False)
    pending_ids: comm.Pending | None = None
    received: ReceivedBatch = field(init=False)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the batch's memory until the queued work of a stream is done.

        Args:
            stream: The stream of the lookups, if the input stage ran on another one.
        """
        for value in vars(self).values():
            _record_stream(value, stream)


def known_header(ctx: BatchContext) -> BatchHeader | None:
    """Return the header of a batch without other ranks; None if the host lacks sizes.

    The host needs the number of ids of each feature, unless every lookup reads the whole batch.
    """
    none = np.zeros(0, dtype=np.int64)
    if not ctx.is_good:  # only the flag is read
        return BatchHeader(np.array([ctx.flag]), none, none, none, none)
    prepared, routes = ctx.prepared, ctx.routes
    bags = prepared.bags
    known, num_keys, num_ids = bags.length_per_key or [], len(bags.keys), bags.values.numel()
    if not known and (num_keys == 1 or not num_ids):
        known = [num_ids] * num_keys
    if len(known) < num_keys and not (ctx.stage.module.is_pooled and routes.reads_whole):
        return None
    flag = Flag.IS_LAST if ctx.end_of_data.is_last else 0
    if prepared.weights_need_grad:
        flag |= Flag.WEIGHTS_NEED_GRAD
    counts_G = np.array(known, dtype=np.int64)
    counts_S = counts_G[routes.segments] if known else counts_G
    return BatchHeader(np.array([flag]), np.array([bags.stride]), counts_S[None], counts_G, none)


def _record_stream(value: object, stream: torch.Stream) -> None:
    """Record a stream for all tensors in a value."""
    if isinstance(value, Tensor | KeyedJaggedTensor):
        value.record_stream(stream)  # type: ignore[arg-type]  # of any device
        return
    inner: Sequence[object] = ()
    if isinstance(value, Sequence) and not isinstance(value, str):
        inner = value
    elif isinstance(value, Mapping):
        inner = list(value.values())
    # pending_headers contains the contexts again: without the exception the recursion has no end
    elif is_dataclass(value) and not isinstance(value, comm.Pending | BatchContext):
        inner = [getattr(value, entry.name) for entry in fields(value)]
    for part in inner:
        _record_stream(part, stream)
