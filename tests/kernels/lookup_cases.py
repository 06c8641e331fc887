"""A batch, tables and a slow reference that shares no code with the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from recsys.kernels.backend import POOLING_CODES
from recsys.kernels.lookup_batch import RankedBags
from recsys.kernels.support import BACKENDS
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_fbgemm import has_cpu_ops
from recsys.kernels.types import OptimizerSpec, PoolingType, TableSpec, UpdateMode

CPU = torch.device("cpu")
CPU_BACKENDS = [
    backend.name
    for backend in BACKENDS
    if not backend.reads_quantized
    and (backend.device_types is None or "cpu" in backend.device_types)
    and (backend.name != "fbgemm" or has_cpu_ops())
]
"""Every one goes through the common tests."""


@dataclass(frozen=True)
class Case:
    rows: tuple[int, ...]
    dims: tuple[int, ...]
    feature_table_map: tuple[int, ...]
    pooling: PoolingType
    weighted: bool
    index_dtype: torch.dtype
    batch_size: int
    seed: int
    bags: tuple[int, ...] | None = None  # of each feature of a ragged batch
    num_ranks: int = 1  # that these are of

    @property
    def bags_F(self) -> np.ndarray | None:
        return None if self.bags is None else np.array(self.bags)

    @property
    def by_rank(self) -> RankedBags | None:
        """The bags of each rank, if there are several ranks."""
        if self.bags is None or self.num_ranks == 1:
            return None
        draws = np.random.default_rng(self.seed)
        share = [1 / self.num_ranks] * self.num_ranks
        return RankedBags(np.stack([draws.multinomial(count, share) for count in self.bags]))

    @property
    def given_bags(self) -> np.ndarray | None:
        """The numbers of bags, as an argument of `TableBatchedEmbedding`."""
        return self.bags_F if self.by_rank is None else self.by_rank.bags_FR

    def slices(self) -> list[slice]:
        """Return the slice of the flat output of each bag, feature by feature."""
        bags = self.given_bags
        assert bags is not None
        by_rank, place = bags.reshape(len(bags), -1), 0
        found: dict[tuple[int, int, int], slice] = {}
        for rank in range(by_rank.shape[1]):
            for feature, table in enumerate(self.feature_table_map):
                for i in range(by_rank[feature, rank]):
                    found[feature, rank, i] = slice(place, place + self.dims[table])
                    place += self.dims[table]
        return [found[bag] for bag in sorted(found)]

    @property
    def specs(self) -> list[TableSpec]:
        return [
            TableSpec(name=f"t{i}", num_rows=r, dim=d)
            for i, (r, d) in enumerate(zip(self.rows, self.dims, strict=True))
        ]

    def init(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            torch.randn(r, d, generator=generator)
            for r, d in zip(self.rows, self.dims, strict=True)
        ]

    def batch(self, step: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids with duplicates and empty bags, offsets, weights."""
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        num_features = len(self.feature_table_map)
        rows_F = torch.tensor([self.rows[t] for t in self.feature_table_map])
        bags_F = torch.tensor(self.bags or (self.batch_size,) * num_features)
        rows_B = rows_F.repeat_interleave(bags_F)
        lengths = torch.randint(0, 4, (len(rows_B),), generator=generator, dtype=torch.int64)
        lengths[rows_B == 0] = 0
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        count = int(offsets[-1])
        limit = rows_B.repeat_interleave(lengths)
        indices = (torch.rand(count, generator=generator) * limit).long()
        weights = torch.rand(count, generator=generator) if self.weighted else None
        return indices.to(self.index_dtype), offsets.to(self.index_dtype), weights

    def build(
        self,
        optimizer: OptimizerSpec | None,
        update_mode: UpdateMode,
        backend: str | None = None,
        weights_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        sparse_grad: bool = False,
    ) -> TableBatchedEmbedding:
        tbe = TableBatchedEmbedding(
            self.specs,
            feature_table_map=self.feature_table_map,
            pooling=self.pooling,
            weights_dtype=weights_dtype,
            output_dtype=output_dtype,
            optimizer=optimizer,
            update_mode=update_mode,
            device=CPU,
            backend=backend,  # type: ignore[arg-type]
            sparse_grad=sparse_grad,
        )
        for weight, value in zip(tbe.weights, self.init(), strict=True):
            weight.copy_(value)
        return tbe


def reference_lookup(
    case: Case, tables: list[Tensor], indices: Tensor, offsets: Tensor, weights: Tensor | None
) -> Tensor:
    """Bag by bag, differentiable."""
    bounds = offsets.tolist()
    columns = []
    for feature, table in enumerate(case.feature_table_map):
        bags = []
        for sample in range(case.batch_size):
            bag = feature * case.batch_size + sample
            part = slice(bounds[bag], bounds[bag + 1])
            rows = tables[table][indices[part].long()].float()
            if weights is not None:
                rows = rows * weights[part].unsqueeze(1)
            if case.pooling is PoolingType.NONE:
                bags.append(rows)
                continue
            pooled = rows.sum(0)
            if case.pooling is PoolingType.MEAN:
                pooled = pooled / max(1, bounds[bag + 1] - bounds[bag])
            bags.append(pooled)
        columns.append(torch.cat(bags) if case.pooling is PoolingType.NONE else torch.stack(bags))
    return torch.cat(columns, dim=0 if case.pooling is PoolingType.NONE else 1)


def output_gradient(case: Case, step: int, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step + 77 * case.seed))


@st.composite
def cases(
    draw: st.DrawFn, neighbours: bool = False, max_tables: int = 3, ragged: bool = False
) -> Case:
    poolings = [p for p in POOLING_CODES if not (ragged and p is PoolingType.NONE)]
    pooling = draw(st.sampled_from(poolings))
    num_tables = draw(st.integers(1, max_tables))
    if pooling is PoolingType.NONE:
        dims = (draw(st.integers(1, 9)),) * num_tables
    else:
        dims = tuple(draw(st.sampled_from([1, 3, 4, 8])) for _ in range(num_tables))
    rows = tuple(draw(st.sampled_from([0, 1, 2, 7])) for _ in range(num_tables))
    tables = st.integers(0, num_tables - 1)
    features = draw(st.lists(tables, min_size=1, max_size=4))
    if neighbours:
        features.sort()
    bags = tuple(draw(st.integers(0, 4)) for _ in features) if ragged else None
    return Case(
        rows=rows,
        dims=dims,
        feature_table_map=tuple(features),
        pooling=pooling,
        weighted=pooling is not PoolingType.NONE and draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        batch_size=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 1000)),
        bags=bags,
        num_ranks=draw(st.integers(1, 3)) if ragged else 1,
    )


@dataclass(frozen=True)
class Oracle:
    """Values and gradients of a ragged batch in float64, by loops over bags and ids."""

    out: np.ndarray
    of_tables: list[np.ndarray]
    of_weights: np.ndarray
    touched: list[set[int]]


def ragged_oracle(
    case: Case,
    tables: Sequence[Tensor],
    batch: tuple[Tensor, Tensor, Tensor | None],
    grad: Tensor | None = None,
) -> Oracle:
    assert case.bags is not None
    indices, offsets, weights = batch
    ids, bounds = indices.tolist(), offsets.tolist()
    factors = [1.0] * len(ids) if weights is None else weights.tolist()
    numbers = [table.double().numpy() for table in tables]
    of_tables = [np.zeros_like(number) for number in numbers]
    of_weights, touched = np.zeros(len(ids)), [set[int]() for _ in tables]
    size = sum(c * case.dims[t] for c, t in zip(case.bags, case.feature_table_map, strict=True))
    out, flat = np.zeros(size), np.zeros(size) if grad is None else grad.double().numpy()
    bag, places = 0, case.slices()
    for count, table in zip(case.bags, case.feature_table_map, strict=True):
        for _ in range(count):
            begin, end = bounds[bag], bounds[bag + 1]
            share = 1 / max(1, end - begin) if case.pooling is PoolingType.MEAN else 1.0
            own = places[bag]
            for i in range(begin, end):
                row = numbers[table][ids[i]]
                out[own] += share * factors[i] * row
                of_tables[table][ids[i]] += share * factors[i] * flat[own]
                of_weights[i] = share * (row @ flat[own])
                touched[table].add(ids[i])
            bag += 1
    return Oracle(out, of_tables, of_weights, touched)


def padded_offsets(case: Case, offsets: Tensor) -> Tensor:
    """Return offsets of a ragged batch with empty bags behind the bags of each feature."""
    assert case.bags is not None
    bounds, begin, padded = offsets.tolist(), 0, []
    for count in case.bags:
        padded += bounds[begin : begin + count]
        padded += [bounds[begin + count]] * (max(case.bags) - count)
        begin += count
    return torch.tensor([*padded, bounds[-1]], dtype=offsets.dtype)


def flat_of_padded(case: Case, padded: Tensor) -> Tensor:
    """Convert the output of a lookup of `padded_offsets` to the ragged output; has autograd."""
    assert case.bags is not None
    columns = padded.split([case.dims[t] for t in case.feature_table_map], dim=1)
    bags = [bag for c, n in zip(columns, case.bags, strict=True) for bag in c[:n].unbind()]
    starts = [own.start for own in case.slices()]
    return torch.cat([padded[:0].flatten(), *(bags[i] for i in np.argsort(starts))])
