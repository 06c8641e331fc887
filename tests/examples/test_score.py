"""`examples/dlrm/score.py` ends at a damaged program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recsys.inference import export_torchscript
from recsys.kernels.tbe_fbgemm import has_cpu_ops
from tests.base.test_checksums import flip
from tests.inference.test_export import dlrm, inputs_of, plain_tensors

SCRIPT = Path(__file__).parents[2] / "examples" / "dlrm" / "score.py"

pytestmark = pytest.mark.skipif(not has_cpu_ops(), reason="fbgemm_gpu is not installed")


def test_a_damaged_program_is_not_scored(tmp_path: Path) -> None:
    model, inputs = dlrm(), inputs_of(6)
    export_torchscript(model, tmp_path / "model.pt", inputs)
    labels = torch.tensor([0.0, 1, 0, 1, 1, 0])
    test = {"inputs": [plain_tensors(*inputs)], "labels": [labels]}
    torch.save(test, tmp_path / "test.pt")

    def score() -> subprocess.CompletedProcess[str]:
        names = ["model.pt", "test.pt", "scores.pt"]
        return subprocess.run(
            [sys.executable, str(SCRIPT), *names], cwd=tmp_path, capture_output=True, text=True
        )

    done = score()
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "scores.pt"), [model(*inputs)])
    (tmp_path / "scores.pt").unlink()
    flip(tmp_path / "model.pt", 8 * 5000)
    done = score()
    assert done.returncode == 1
    assert done.stderr.endswith(
        "model.pt is damaged: it does not match its checksum in model.pt.sha256.\n"
    )
    assert not (tmp_path / "scores.pt").exists()
