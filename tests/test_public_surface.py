"""The names that a package gives out, frozen: a change here is a change for users."""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.abc
import inspect
import pkgutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import recsys
from tests.all_modules import all_modules
from tests.without_compat import HAS_COMPAT

SURFACE = {
    "recsys": """
        DataType DistributedModelParallel EmbeddingBagCollection EmbeddingBagCollectionInterface
        EmbeddingBagConfig EmbeddingCollection EmbeddingCollectionInterface EmbeddingConfig
        JaggedTensor KeyedJaggedTensor KeyedTensor Multistreamable Pipelineable PoolingType
    """,
    "recsys.base": "",
    "recsys.datasets": "Follower Split TableReader TableVersion TimeSplit csv follow parquet table",
    "recsys.distributed": """
        Awaitable DistributedModelParallel EvalPipelineSparseDist ModuleSharder NoWait
        ParameterSharding PrefetchTrainPipelineSparseDist ShardedModule ShardingEnv TrainPipeline
        TrainPipelineBase TrainPipelineSparseDist get_local_rank get_local_size
    """,
    "recsys.distributed.planner": """
        CustomTopologyData EmbeddingEnumerator EmbeddingShardingPlanner
        FixedPercentageStorageReservation Hardware HeuristicalStorageReservation
        ParameterConstraints PlannerError PlannerErrorType PoolingStats Topology
    """,
    "recsys.distributed.train_pipeline": """
        EvalPipelineSparseDist EvenBatches GradientAccumulationConfig GradientAccumulationWrapper
        PipelineStage PrefetchTrainPipelineSparseDist SparseDataDistUtil StagedTrainPipeline
        TrainPipeline TrainPipelineBase TrainPipelineContext TrainPipelineFusedSparseDist
        TrainPipelineSemiSync TrainPipelineSparseDist UnevenPolicy
    """,
    "recsys.features": """
        Categorical FeatureSpec Group Hashed Ids Label Numeric SampleWeight Timestamp Vector
    """,
    "recsys.inference": """
        QuantEmbeddingBagCollection QuantEmbeddingCollection
        QuantFeatureProcessedEmbeddingBagCollection export_aoti export_torchscript
        QuantizationReport QuantizedTableReport quantization_report read_delta write_delta
        write_delta_between Predictor Publisher follow inspect kserve package verify
        load_aoti load_torchscript quantize_embeddings quantize_inference_model score
        shard_quant_model verify_checksum
    """,
    "recsys.kernels": "",
    "recsys.metrics": """
        AUC BinnedAUC MetricsConfig NormalizedEntropy RecMetricDef RecMetricEnum RecMetricModule
        RecTaskInfo ThroughputDef ThroughputMetric auc generate_metric_module log_loss
        normalized_entropy
    """,
    "recsys.modules": "",
    "recsys.modules.ctr": "AutoInt DCNV2 DIN FinalMLP MMoE MultiTask PLE",
    "recsys.optim": """
        Adagrad Adam AdamL2 AdamW CombinedOptimizer GradScaler GradientClipping
        GradientClippingOptimizer KeyedOptimizer KeyedOptimizerWrapper LAMB LarsSGD
        OptimizerWrapper PartialRowWiseAdam PartialRowWiseLAMB RowWiseAdagrad SGD WarmupOptimizer
        WarmupPolicy WarmupStage
        apply_optimizer_in_backward in_backward_optimizer_filter set_learning_rate
    """,
    "recsys.sparse": """
        JaggedTensor KeyedJaggedTensor KeyedTensor finish_value_checks from_columns
        has_value_checks hash_ids is_debug jt_is_equal kjt_is_equal set_debug set_value_checks
    """,
    "recsys.training": """
        BinaryMetrics FitResult FullRanking JsonLines Lines Logger MLflow Metrics
        NamedMetrics ProgressiveValidation TensorBoard Trainer WandB exit_on_error
    """,
}
if HAS_COMPAT:
    SURFACE["recsys.compat"] = ""


@pytest.mark.parametrize("package", SURFACE)
def test_names(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    assert sorted(names) == sorted(SURFACE[package].split())
    assert all(hasattr(module, name) for name in names)


def test_all_packages_are_frozen() -> None:
    rooms = {f"recsys.{info.name}" for info in pkgutil.iter_modules(recsys.__path__) if info.ispkg}
    assert {package for package in SURFACE if package.count(".") == 1} == rooms


@pytest.mark.parametrize(
    "package",
    [recsys, recsys.distributed, recsys.modules.ctr],
    ids=lambda package: package.__name__,
)
def test_lazy_names_are_what_type_checkers_see(package: Any) -> None:
    source = Path(package.__file__).read_text()
    seen = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        for statement in node.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert seen == set(package.__all__) == set(package._HOMES)


def test_unknown_top_level_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        recsys.Nothing
    assert {"KeyedJaggedTensor", "sparse", "__version__"} <= set(dir(recsys))


def test_promised_names_are_there() -> None:
    lines = (Path(__file__).parent / "promised_names.txt").read_text().splitlines()
    gone = {}
    for line in lines:
        if line.startswith("#"):
            continue
        path, _, name = line.partition(" ")
        try:
            module = importlib.import_module(path)
            with warnings.catch_warnings():  # of moved names: see tests/compat/test_moved.py
                warnings.filterwarnings("ignore", ".* has moved to ", DeprecationWarning)
                assert not name or hasattr(module, name)
        except (ImportError, AssertionError) as error:
            gone[line] = repr(error)
    assert gone == {}


def test_enums_are_not_final() -> None:
    """Tools that read types, such as LightningCLI, take a final class for a record."""
    final = [
        f"{module}.{name}"
        for module in all_modules()
        for name, value in vars(importlib.import_module(module)).items()
        if inspect.isclass(value)
        and issubclass(value, enum.Enum)
        and getattr(value, "__final__", False)
    ]
    assert final == []


class WithoutCompat(importlib.abc.MetaPathFinder):
    """Finder of an installation without `recsys.compat`."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname.startswith("recsys.compat"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name="recsys.compat")


def test_old_paths_without_compat(monkeypatch: pytest.MonkeyPatch) -> None:
    import recsys.tracing

    for name in [name for name in sys.modules if name.startswith("recsys.compat")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutCompat(), *sys.meta_path])
    with pytest.raises(AttributeError, match=r"in recsys\.compat, which is not installed"):
        recsys.tracing.assert_fx_safe
