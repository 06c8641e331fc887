"""A batch, tables and a slow reference that shares no code with the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from recsys.kernels.backend import POOLING_CODES
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
        lengths = torch.randint(
            0, 4, (num_features, self.batch_size), generator=generator, dtype=torch.int64
        )
        lengths[rows_F == 0] = 0
        offsets = torch.nn.functional.pad(lengths.flatten().cumsum(0), (1, 0))
        count = int(offsets[-1])
        limit = rows_F.repeat_interleave(lengths.sum(1))
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
def cases(draw: st.DrawFn, neighbours: bool = False, max_tables: int = 3) -> Case:
    pooling = draw(st.sampled_from(list(POOLING_CODES)))
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
    return Case(
        rows=rows,
        dims=dims,
        feature_table_map=tuple(features),
        pooling=pooling,
        weighted=pooling is not PoolingType.NONE and draw(st.booleans()),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        batch_size=draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 1000)),
    )
