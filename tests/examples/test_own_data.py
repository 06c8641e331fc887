"""The example of a user's own table, on one, two and three ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

from recsys.datasets.synthetic import ClickModel
from recsys.inference import score

EXAMPLE = Path(__file__).parents[2] / "examples/own_data/train.py"
TEST_BEGINS = np.datetime64("2024-01-26T04:48:00")


@pytest.mark.slow
def test_ranks_agree_and_the_package_scores_as_the_model(tmp_path: Path) -> None:
    """Equal metrics for 1 to 3 ranks; raw rows give equal scores in another process."""
    table = ClickModel(seed=0).draw(20_000).table
    data = tmp_path / "clicks.parquet"
    pq.write_table(table, data, row_group_size=2_000)
    aucs = []
    for ranks in (1, 2, 3):
        launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone"]
        launcher += [] if ranks == 1 else [f"--nproc-per-node={ranks}"]
        command = [sys.executable, *launcher, str(EXAMPLE), str(data), str(tmp_path / f"{ranks}")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        found = set(re.findall(r"test \{'auc': ([0-9.]+)", done.stdout))
        assert len(found) == 1, done.stdout  # the same on all ranks
        aucs.append(float(found.pop()))
    assert max(aucs) - min(aucs) < 2e-3, aucs
    assert aucs[0] > 0.68
    [written] = (tmp_path / "1/scores").iterdir()
    scores = pq.read_table(written)["output"].to_numpy()
    is_test = table["time"].to_numpy() >= TEST_BEGINS
    auc = roc_auc_score(table["click"].to_numpy()[is_test], scores[is_test])
    assert abs(auc - aucs[0]) < 1e-3  # the rows of the package are quantized
    [again] = score(tmp_path / "1/models/clicks/1", data, tmp_path / "again")
    assert np.array_equal(pq.read_table(again)["output"].to_numpy(), scores)
