"""The C++ core with torch: a compiled package in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsys.inference import Predictor, package, quantize_embeddings
from recsys.inference.packages.library import Library
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.cmake import built
from tests.inference.cpp.test_core import MISSING
from tests.inference.packages.model_cases import TOGETHER, arguments_of, request_of, together
from tests.inference.packages.test_recommenders import NUMBERS, TEXTS, build, histories_of
from tests.inference.raw_package import raw_spec, raw_table, write_raw_version

SOURCE = Path(__file__).parents[3] / "recsys/inference/cpp"

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the core is for Linux"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def library() -> Path:
    """Build the core."""
    return built(SOURCE, "recsys_predictor", needs_torch=True) / "librecsys_predictor.so"


@pytest.mark.slow
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
def test_raw_columns_score_as_in_python(library: Path, tmp_path: Path, is_weighted: bool) -> None:
    """Equal to the last bit, for missing values of all kinds of columns."""
    spec = raw_spec(is_weighted)
    version, _ = write_raw_version(tmp_path / "m", spec)
    with Predictor(version) as plain, Predictor(version, library=library, num_threads=1) as core:
        names = spec.column_names(labels=False)
        tables = [raw_table(1 + 17 * seed, seed + 10).select(names) for seed in range(12)]
        for table, merged in zip(tables, core.run(tables), strict=True):
            wanted = plain(table)["output"]
            assert isinstance(merged, dict)
            np.testing.assert_allclose(merged["output"], wanted, rtol=1e-5, atol=1e-6)
            assert np.array_equal(core(table)["output"], wanted)
        whole = raw_table(9, 0)  # with a further column
        for part in (whole, whole.drop_columns(["level"])):  # which states its missing value
            assert np.array_equal(core(part)["output"], plain(part)["output"])


@pytest.mark.slow
@pytest.mark.parametrize("items", [TEXTS, NUMBERS], ids=["texts", "numbers"])
def test_recommenders_answer_with_the_values_of_python(
    library: Path, tmp_path: Path, items: Sequence[Any]
) -> None:
    """Value by value, merged, with histories that leave fewer items than are wanted."""
    recommend, spec = build(items)
    whole = histories_of(items)
    version = package(quantize_embeddings(recommend), tmp_path / "m", whole, spec=spec)
    tables = [whole, whole.slice(1, 2), whole.slice(0, 0)]
    with Predictor(version) as plain, Predictor(version, library=library, num_threads=1) as core:
        for table, merged in zip(tables, core.run(tables), strict=True):
            wanted = plain(table)
            assert isinstance(merged, dict)
            assert merged.keys() == wanted.keys()
            assert merged["values"].dtype == wanted["values"].dtype
            assert merged["values"].tolist() == wanted["values"].tolist()
            assert merged["values"].tolist() == spec.values_of("items", wanted["1"]).tolist()
        for left, row in zip([3, 4, 5, 4, 0], core(whole)["values"].tolist(), strict=True):
            assert {*row[:left]} <= {*items}
            assert row[left:] == [None] * (5 - left)


@pytest.mark.slow
def test_versions_leave_no_memory_and_no_folder(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both languages give the same scores; swaps and a killed process leave nothing."""
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(50, 8, "films", feature_names=["film"])]
    model = quantize_embeddings(
        DLRM(EmbeddingBagCollection(tables=tables), 2, [8, 8], [8, 1]).eval()
    )
    batch = KeyedJaggedTensor(["film"], torch.tensor([3, 4]), lengths=torch.tensor([1, 1]))
    first = package(model, tmp_path / "m", [torch.rand(2, 2), batch])
    second = Path(shutil.copytree(first, tmp_path / "m" / "2"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    request = {"dense_features": torch.rand(3, 2), "film": torch.tensor([1, 49, 0])}
    with Predictor(first) as plain:
        wanted = plain(request)["output"]
    core = Library(library, first, {"num_threads": 1})
    for i in range(6):
        core.swap((second, first)[i % 2])
        # a thread keeps a program that it has called in memory
        thread = threading.Thread(target=core.run, args=([request],))
        thread.start()
        thread.join()
    maps = Path("/proc/self/maps").read_text().splitlines()
    for text in ("recsys-predictor-", "dense.safetensors", "films.rows"):
        mapped = {line.split(None, 5)[0] for line in maps if text in line and str(tmp_path) in line}
        one = 8 if text == "recsys-predictor-" else 1  # parts of a library
        assert len(mapped) <= 2 * one, text
    [found] = core.run([request])
    assert isinstance(found, dict)
    torch.testing.assert_close(found["output"].numpy(), wanted)
    assert os.listdir(temporary) == []
    swaps = (
        "import ctypes, sys\n"
        "core, p = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()\n"
        "folder = sys.argv[2].encode()\n"
        "assert core.recsys_open(folder, None, ctypes.byref(p)) == 0\n"
        "print('open', flush=True)\n"
        "while True: core.recsys_swap(p, folder)\n"
    )
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", swaps, str(library), str(first)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"open\n"
        child.kill()
        child.communicate(timeout=30)
    core.swap(second)
    core.close()
    assert os.listdir(temporary) == []


@pytest.mark.slow
@pytest.mark.timeout(600)  # with the build of the core, on a machine that has other work
@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # nn.GRU
@pytest.mark.parametrize("kinds", TOGETHER.values(), ids=TOGETHER.keys())
def test_models_score_as_in_python(library: Path, tmp_path: Path, kinds: Sequence[str]) -> None:
    """A compiled package in Python, and in the core by merged requests; with empty histories."""
    case = together(kinds)
    version = package(case.model, tmp_path / "m", arguments_of(case, request_of(case, 3, seed=1)))
    requests = [request_of(case, size, seed=size + 10) for size in (1, 2, 5, 17, 0)]
    with Predictor(version) as plain, Predictor(version, library=library, num_threads=1) as core:
        for request, merged in zip(requests, core.run(requests), strict=True):
            with torch.no_grad():
                wanted = case.model(*arguments_of(case, request))
            for found in (plain(request), merged):
                assert isinstance(found, dict)
                assert found.keys() == wanted.keys()
                for name, part in wanted.items():
                    np.testing.assert_allclose(found[name], part.numpy(), 1e-4, 1e-5, err_msg=name)
