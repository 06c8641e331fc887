"""Costs of a step besides its kernels: Python calls, operations, copies and collectives.

The counts are the same on every run. They may fall; where they must rise, the commit of the new
number gives the reason.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import recsys
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import counted_collectives
from tests.ranks import RankPool

S = ShardingType
LIBRARY = str(Path(recsys.__file__).parent)
CASES: dict[str, tuple[tuple[ShardingType, ...], str]] = {
    "data_parallel": ((S.DATA_PARALLEL,), "pooled"),
    "table_wise": ((S.TABLE_WISE,), "pooled"),
    "column_wise": ((S.COLUMN_WISE,), "pooled"),
    "row_wise": ((S.ROW_WISE,), "pooled"),
    "mixed": ((S.TABLE_WISE, S.ROW_WISE, S.DATA_PARALLEL), "pooled"),
    "sequence table_wise": ((S.TABLE_WISE,), "sequence"),
    "sequence row_wise": ((S.ROW_WISE,), "sequence"),
    "variable batches": ((S.TABLE_WISE,), "variable"),
}


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _batch(kind: str) -> KeyedJaggedTensor:
    keys = [f"f{i}" for i in range(6)]
    strides = [4 - 2 * (i % 2) if kind == "variable" else 4 for i in range(6)]
    lengths = torch.full((sum(strides),), 2)
    inverse = keys, torch.stack([torch.arange(4) % n for n in strides])
    return KeyedJaggedTensor(
        keys,
        torch.arange(int(lengths.sum())) % 10,
        lengths=lengths,
        stride_per_key=strides if kind == "variable" else None,
        inverse_indices=inverse if kind == "variable" else None,
    )


def _sharded(types: tuple[ShardingType, ...], kind: str) -> Any:
    """A collection of six tables on two ranks."""
    config: Any = EmbeddingConfig if kind == "sequence" else EmbeddingBagConfig
    tables = [config(10, 8, f"t{i}", feature_names=[f"f{i}"]) for i in range(6)]
    plan = EmbeddingModuleShardingPlan(
        {
            table.name: parameter_sharding(
                types[i % len(types)],
                10,
                8,
                [i % 2] if types[i % len(types)] is S.TABLE_WISE else [0, 1],
            )
            for i, table in enumerate(tables)
        }
    )
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    fused = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "learning_rate": 0.1}
    if kind == "sequence":
        sequences = EmbeddingCollection(tables=tables)
        return EmbeddingCollectionSharder(fused).shard(sequences, plan, env)
    bags = EmbeddingBagCollection(tables=tables)
    return EmbeddingBagCollectionSharder(fused).shard(bags, plan, env)


def _count(types: tuple[ShardingType, ...], kind: str) -> tuple[int, int, int, int]:
    """Count calls of the library's functions, operations, copies and collectives."""
    sharded = _sharded(types, kind)

    def step() -> None:
        found = sharded(_batch(kind)).wait()
        values = found if isinstance(found, dict) else {"": found}
        sum(value.values().sum() for value in values.values()).backward()  # type: ignore[union-attr]

    for _ in range(3):
        step()
    calls = 0

    def on_event(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(LIBRARY)

    operations = _Operations()
    with counted_collectives() as collectives:
        sys.setprofile(on_event)
        try:
            step()
        finally:
            sys.setprofile(None)
    with operations:
        step()
    copies = sum(
        number
        for name, number in operations.names.items()
        if any(word in name for word in ("copy", "cat.", "clone", "permute_1D", "permute_2D"))
    )
    return calls, operations.names.total(), copies, collectives.total()


EXPECTED = {  # with 1 to 5 calls that ask whether rows are to be marked, and 1 that checks ids
    "data_parallel": (118, 90, 4, 2),  # exchanges start by one function, rates are of tables
    "table_wise": (99, 102, 10, 4),
    "column_wise": (155, 185, 20, 5),
    "row_wise": (102, 112, 11, 4),  # asks whether bags are short
    "mixed": (159, 153, 16, 5),
    "sequence table_wise": (127, 140, 12, 4),
    "sequence row_wise": (128, 160, 16, 4),  # rows are laid out by an object of the batch
    # half the embeddings are not looked up, nor sent
    "variable batches": (142, 174, 17, 4),
}
"""Calls of functions of the library, operations, copies among them, and collectives."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_costs_what_it_did(ranks: RankPool, name: str) -> None:
    found = ranks(2, _count, *CASES[name])
    calls, operations, copies, collectives = EXPECTED[name]
    assert found[0][0] <= calls, found
    assert found[0][3] == collectives, found
    if torch.__version__.startswith("2.13"):  # other versions have other operations
        assert found[0][1] <= operations, found
        assert found[0][2] <= copies, found


def _way(kind: ShardingType) -> tuple[list[str], list[str], int]:
    """Classes and files of the library that a forward pass goes through, and calls of it."""
    sharded, batch = _sharded((kind,), "pooled"), _batch("pooled")
    sharded(batch).to_dict()
    classes, files, calls = set(), set(), 0

    def on_event(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(LIBRARY):
            calls += 1
            files.add(code.co_filename)
            if "self" in frame.f_locals:
                classes.add(type(frame.f_locals["self"]).__qualname__)
            elif code.co_name == "forward":  # of an autograd function
                classes.add(code.co_qualname)

    sys.setprofile(on_event)
    try:
        sharded(batch).to_dict()
    finally:
        sys.setprofile(None)
    return sorted(classes), sorted(files), calls


@pytest.mark.parametrize("kind", [S.TABLE_WISE, S.ROW_WISE, S.COLUMN_WISE], ids=str)
def test_a_batch_goes_through_few_classes_files_and_calls(
    ranks: RankPool, kind: ShardingType
) -> None:
    """Counts of the sharded collection; DistributedModelParallel adds one class and one file."""
    for classes, files, calls in ranks(2, _way, kind):
        assert len(classes) <= 17, classes  # also of the one check of ids
        assert len(files) <= 11, files
        assert calls <= 63, calls
