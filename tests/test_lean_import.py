"""``import recsys`` costs nothing: no torch, no CUDA, no process group, no optional package.

One interpreter of its own serves all that must be seen in a fresh one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.all_modules import TRITON_MODULES, all_modules

OPTIONAL = {"matplotlib", "pandas", "scipy", "sklearn", "torchrec", "tqdm", "yaml"}
# Reached from the package alone.
NAMES = [
    "distributed.DistributedModelParallel",
    "distributed.model_parallel.DistributedModelParallel",
    "distributed.planner.EmbeddingShardingPlanner",
    "distributed.embeddingbag.EmbeddingBagCollectionSharder",
    "modules.embedding_configs.EmbeddingBagConfig",
    "modules.ctr.DCNV2",
    "modules.dlrm.DLRM",
    "sparse.KeyedJaggedTensor",
    "optim.keyed.KeyedOptimizerWrapper",
    "datasets.random.RandomRecDataset",
    "inference.quantize_embeddings",
]
SCRIPT = """
import contextlib, functools, importlib, json, sys
def modules():
    return sorted({name.partition(".")[0] for name in sys.modules})
import recsys
found = {"alone": modules()}
import torch
with contextlib.suppress(ImportError):
    import fbgemm_gpu
with contextlib.suppress(ImportError):
    import pyarrow.dataset
found["by_others"] = modules()
found["names"] = [functools.reduce(getattr, n.split("."), recsys).__name__ for n in NAMES]
for name in MODULES:
    importlib.import_module(name)
found["everything"] = modules()
found["cuda"] = torch.cuda.is_initialized()
found["process_group"] = torch.distributed.is_initialized()
found["debug"] = recsys.sparse.is_debug()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", f"NAMES = {NAMES}\nMODULES = {all_modules()}\n{SCRIPT}"],
        env=os.environ | {"RECSYS_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    state: dict[str, Any] = json.loads(done.stdout)
    return state


def test_the_package_alone_does_not_even_import_torch(found: dict[str, Any]) -> None:
    assert "recsys" in found["alone"]
    assert "torch" not in found["alone"]


def test_the_package_alone_reaches_the_documented_names(found: dict[str, Any]) -> None:
    assert found["names"] == [name.rpartition(".")[2] for name in NAMES]


def test_all_modules_leave_cuda_and_processes_alone(found: dict[str, Any]) -> None:
    assert found["cuda"] is False
    assert found["process_group"] is False
    # Packages that torch and pyarrow import where they are installed are not ours.
    assert OPTIONAL & (set(found["everything"]) - set(found["by_others"])) == set()


def test_the_environment_turns_full_checks_on(found: dict[str, Any]) -> None:
    assert found["debug"] is True


def test_without_triton_and_fbgemm_all_but_the_optional_modules_import() -> None:
    script = """
import importlib, json, sys
sys.modules["triton"] = sys.modules["fbgemm_gpu"] = None  # importing them raises
raised = {}
for name in MODULES:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raised[name] = str(error)
print(json.dumps(raised))
"""
    modules = sorted({*all_modules(), *TRITON_MODULES})
    done = subprocess.run(
        [sys.executable, "-c", f"MODULES = {modules}\n{script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    raised: dict[str, str] = json.loads(done.stdout)
    assert set(raised) == TRITON_MODULES
    for message in raised.values():
        assert "optional" in message
        assert "pip install 'recsys-torch[triton]'" in message


@pytest.mark.parametrize(
    "name", ["features.FeatureSpec", "datasets.parquet", "datasets.synthetic", "inference.score"]
)
def test_a_missing_package_is_named_with_its_extra(name: str) -> None:
    program = f"import sys; sys.modules['pyarrow'] = None; import recsys; recsys.{name}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    message = f"recsys.{name} needs pyarrow. Install it: pip install 'recsys-torch[data]'"
    assert done.stderr.rstrip().endswith(f"ImportError: {message}"), done.stderr


def test_models_packages_and_readers_of_batches_work_without_pyarrow() -> None:
    modules = (
        "datasets.balance, recsys.datasets.criteo, recsys.datasets.random, "
        "recsys.features.hash_index, recsys.inference.packages.predictor, "
        "recsys.inference.quantize, recsys.training"
    )
    program = f"import sys; sys.modules['pyarrow'] = None; import recsys.{modules}"
    subprocess.run([sys.executable, "-c", program], check=True)
