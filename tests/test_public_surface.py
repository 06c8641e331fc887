"""The names that a package gives out, frozen: a change here is a change for users."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import recsys

SURFACE = {
    "recsys": """
        DataType DistributedModelParallel EmbeddingBagCollection EmbeddingBagCollectionInterface
        EmbeddingBagConfig EmbeddingCollection EmbeddingCollectionInterface EmbeddingConfig
        JaggedTensor KeyedJaggedTensor KeyedTensor PoolingType
    """,
    "recsys.compat": "",
    "recsys.datasets": "",
    "recsys.distributed": "",
    "recsys.distributed.planner": """
        CustomTopologyData EmbeddingEnumerator EmbeddingShardingPlanner
        FixedPercentageStorageReservation Hardware HeuristicalStorageReservation
        ParameterConstraints PlannerError PoolingStats Topology
    """,
    "recsys.inference": """
        QuantEmbeddingBagCollection export_torchscript quantize_embeddings shard_quant_model
        trace_model
    """,
    "recsys.kernels": "",
    "recsys.metrics": """
        AUC BinnedAUC NormalizedEntropy ThroughputMetric auc log_loss normalized_entropy
    """,
    "recsys.modules": "",
    "recsys.optim": """
        Adagrad Adam CombinedOptimizer GradScaler GradientClipping GradientClippingOptimizer
        KeyedOptimizer KeyedOptimizerWrapper LAMB LarsSGD OptimizerWrapper PartialRowWiseAdam
        RowWiseAdagrad SGD WarmupOptimizer WarmupPolicy WarmupStage apply_optimizer_in_backward
        in_backward_optimizer_filter
    """,
    "recsys.sparse": """
        JaggedTensor KeyedJaggedTensor KeyedTensor is_debug jt_is_equal kjt_is_equal set_debug
    """,
}


@pytest.mark.parametrize("package", SURFACE)
def test_names(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert sorted(names) == sorted(SURFACE[package].split())
    assert all(hasattr(module, name) for name in names)


def test_all_packages_are_frozen() -> None:
    rooms = {f"recsys.{room}" for room in recsys._ROOMS}
    assert {package for package in SURFACE if package.count(".") == 1} == rooms


def test_top_level_names_are_what_type_checkers_see() -> None:
    source = Path(recsys.__file__).read_text()
    seen = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == set(recsys.__all__) == set(recsys._HOMES)


def test_unknown_top_level_name() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute 'Nothing'\. Here are DataType, "):
        recsys.Nothing
    assert {"KeyedJaggedTensor", "sparse", "__version__"} <= set(dir(recsys))
