"""A package of a model on a GPU, by torch and by the C++ core, equals the model on the CPU."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recsys.inference import Predictor, package, quantize_embeddings, verify
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.inference.packages.test_writer import Rows, bags_of, request_of, tables_of

CORE = os.environ.get("RECSYS_PREDICTOR", "")
ENGINES = [
    "",
    pytest.param(
        CORE,
        marks=pytest.mark.skipif(not CORE, reason="RECSYS_PREDICTOR names no library"),
        id="core",
    ),
]


def _dlrm() -> nn.Module:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(tables=tables_of(EmbeddingBagConfig))
    return quantize_embeddings(DLRM(tables, 2, [8, 8], [8, 1]).eval())


@pytest.mark.parametrize("library", ENGINES)
@pytest.mark.parametrize("kind", ["aoti", "torchscript"])
def test_scores_and_updates_as_the_model_on_the_cpu(
    kind: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECSYS_PREDICTOR", raising=False)
    model = _dlrm()
    moved: Any = copy.deepcopy(model).to("cuda")
    cuda = torch.device("cuda")
    dense = [torch.rand(3, 2) for _ in range(3)]
    inputs = [dense[0].to(cuda), bags_of().to(cuda)]
    version = package(moved, tmp_path / "movies", inputs, programs=[kind])
    verify(version)
    requests = [request_of(bags_of(i), dense_features=dense[i]) for i in range(3)]
    with Predictor(version, library=library or None) as predictor:
        assert predictor.manifest["programs"][0]["device"] == "cuda"

        def check() -> None:
            bad = requests[0] | {"film": requests[0]["film"] + 1_000}
            *found, error = predictor.run([*requests, bad])
            for i, one in enumerate(found):
                assert isinstance(one, dict), one
                with torch.no_grad():
                    wanted = model(dense[i], bags_of(i))
                output = torch.from_numpy(one["output"])
                torch.testing.assert_close(output, wanted, rtol=1e-3, atol=1e-4)
            assert "film" in str(error)
            assert isinstance(error, Exception)

        check()
        [collection] = [m for m in model.modules() if hasattr(m, "lookups")]
        [lookup] = collection.lookups().lookups
        rows = lookup.stored_tables()[0]
        rows[:5] = rows[5:10].clone()
        predictor.update("films", torch.arange(5), rows[:5])
        check()
        predictor.swap(version)


def test_sequences_and_values_made_in_forward(tmp_path: Path) -> None:
    class OnDevice(Rows):
        def forward(self, dense: Any, ids: Any) -> dict[str, Any]:
            found = self.rows(ids)
            return {"scaled": dense * torch.tensor([1.0, 2.0], device=dense.device), **found}

    model = quantize_embeddings(OnDevice())
    cuda, dense = torch.device("cuda"), torch.rand(3, 2)
    wanted = model(dense, bags_of())
    inputs = [dense.to(cuda), bags_of().to(cuda)]
    version = package(copy.deepcopy(model).to("cuda"), tmp_path / "rows", inputs)
    with Predictor(version) as predictor:
        found = predictor(request_of(bags_of(), dense=dense))
    torch.testing.assert_close(found["scaled"], wanted["scaled"].numpy(), rtol=1e-6, atol=0)
    for name in ("film", "user"):
        torch.testing.assert_close(
            found[f"{name}.values"], wanted[name].values().numpy(), rtol=1e-3, atol=1e-4
        )
