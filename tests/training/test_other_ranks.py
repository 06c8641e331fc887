"""A job that continues on other numbers of ranks within an epoch trains on each row once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from recsys import DistributedModelParallel, EmbeddingBagCollection, EmbeddingBagConfig
from recsys.datasets import readers
from recsys.datasets.utils import Batch
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tests.datasets.clicks import SPEC, write_clicks
from tests.ranks import RankPool
from tests.training.job import trainer_of


class _Recorded(DLRMTrain):
    """Writes the rows that it trains on."""

    def __init__(self, model: DLRM, path: Path) -> None:
        super().__init__(model)
        self.path = path

    def forward(self, batch: Batch) -> tuple[Any, Any]:
        with self.path.open("a") as rows:
            rows.writelines(f"{row}\n" for row in batch.sparse_features["row"].values().tolist())
        return super().forward(batch)


def _train(folder: str, part: int, settings: dict[str, Any], stop: int | None) -> None:
    torch.manual_seed(0)
    table = EmbeddingBagConfig(10_000, 4, "t", feature_names=["row"])
    dlrm = DLRM(EmbeddingBagCollection(tables=[table]), 1, [4], [4, 1])
    apply_optimizer_in_backward(RowWiseAdagrad, dlrm.sparse_arch.parameters(), {"lr": 0.1})
    train = readers.parquet(Path(folder, "data"), SPEC, **settings)
    path = Path(folder, f"rows-{part}-{train.rank}")
    model = DistributedModelParallel(_Recorded(dlrm, path), device=torch.device("cpu"))
    until: dict[str, Any] = {"epochs": 2} if stop is None else {"steps": stop}
    trainer = trainer_of(
        f"{folder}/job", model=model, resume=True, uneven="join", save_every=None, **until
    )
    trainer.fit(train)


@pytest.mark.parametrize("divide", ["row_groups", "batches"])
@pytest.mark.parametrize("seed", range(2))
def test_each_row_is_trained_on_once(
    ranks: RankPool, tmp_path: Path, seed: int, divide: str
) -> None:
    draw = random.Random(seed)
    (tmp_path / "data").mkdir()
    table = write_clicks(tmp_path / "data", [(7, 2, 13), (9, 6, 3), (5, 5)])
    expected = sorted(table["row"].to_pylist() * 2)
    stop = 0
    settings = {"divide": divide, "shuffle": True, "window_rows": draw.choice([1, 8])}
    for part in range(6):
        world_size, stop = draw.choice([1, 2, 3]), stop + draw.randrange(1, 4)
        batch_size = draw.choice([3, 4])
        arguments = {**settings, "batch_size": batch_size}
        ranks(world_size, _train, str(tmp_path), part, arguments, None if part == 5 else stop)
    rows = [int(row) for path in tmp_path.glob("rows-*") for row in path.read_text().split()]
    assert sorted(rows) == expected
