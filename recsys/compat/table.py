"""Map of TorchRec names to recsys objects, read from names.txt.

The table has only names with a counterpart; an import of any other name fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

PEER_VERSION = "1.8.0"
"""TorchRec release of the module paths in the table."""


@final
class Home(NamedTuple):
    """Module and name of a recsys object."""

    module: str
    name: str


def _read_table(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield a TorchRec module, a recsys module, and the entries that name its objects."""
    theirs = ours = ""
    words: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_more = line.startswith("    ")
        if words and not is_more:
            yield theirs, ours, words
            words = []
        if is_more:
            words += line.split()
        elif line.startswith("  "):
            ours, _, names = line.strip().partition(": ")
            words = names.split()
        elif not line.startswith("#"):
            theirs = line


TABLE: tuple[tuple[str, str, list[str]], ...] = tuple(
    _read_table(Path(__file__).with_name("names.txt").read_text())
)
"""Rows of the table: a TorchRec module, a recsys module, and names.

A name is `recsys_name=torchrec_name` if the two differ.
"""


def _build_homes() -> dict[str, dict[str, Home]]:
    homes: dict[str, dict[str, Home]] = {}
    for theirs, ours, words in TABLE:
        module = homes.setdefault(theirs, {})
        for parent in _parents(theirs):
            homes.setdefault(parent, {})
        for word in words:
            name, _, alias = word.partition("=")
            assert (alias or name) not in module, f"{theirs} lists {alias or name} twice"
            module[alias or name] = Home(ours, name)
    return homes


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


HOMES: dict[str, dict[str, Home]] = _build_homes()
"""recsys objects by TorchRec module and name. Parents of listed modules are included."""

_SCRIPTS = "torchrec.datasets.scripts."
_FIRST_HOMES: dict[str, Home] = {
    name: home
    for module, names in reversed(HOMES.items())
    if not module.startswith(_SCRIPTS)  # each has its own `main`
    for name, home in names.items()
}
"""recsys objects by TorchRec name. If several modules have a name, the first in the table wins."""

_OTHERS: frozenset[str] = frozenset(
    (
        "torchrec.distributed.mc_modules.EmbeddingCollectionContext",
        "torchrec.distributed.quant_embedding.EmbeddingCollectionContext",
        "torchrec.modules.embedding_configs.ShardingType",
    )
)
"""TorchRec objects without a counterpart whose name the table has for another object."""


def home_of(module: str, name: str) -> Home | None:
    """Return module and name of the recsys object for a TorchRec name.

    Args:
        module: TorchRec module.
        name: Name that it defines, or imports from another TorchRec module.

    Returns:
        The entry of this module in the table. Without one, the entry of the first module that has
        the name. None if no module has it, or if it is a submodule of `module`.

    Example:
        >>> home_of("torchrec.metrics.rec_metric", "RecTaskInfo")
        Home(module='recsys.metrics.metrics_config', name='RecTaskInfo')
    """
    dotted = f"{module}.{name}"
    if name in HOMES.get(module, {}):
        return HOMES[module][name]
    return None if dotted in HOMES or dotted in _OTHERS else _FIRST_HOMES.get(name)


_ENGINE = "The engine has a different structure: see docs/engine.md."
_EXCHANGE = "recsys.distributed.stages.input_dist.InputDist exchanges batches."
_LAYOUT = "A sharded collection's `layout` contains the shard placement, for all sharding types."
_LOOKUP = "Use recsys.kernels.tbe.TableBatchedEmbedding for lookups."
_HASH = "A table with ids=HashedIds(...) has the index of its ids: see docs/hashed_ids.md."
_MACHINE = (
    "Pass the machine's properties to Topology(world_size, compute_device, hbm_cap=..., ...)."
)
_POOLS = "Serve a pool unsharded. recsys.distributed.stages.pool_rows exchanges its rows."
_PIPELINES = "Pipelines do not trace the model: see docs/pipelines.md."
_PRUNING = (
    "Pruning in training needs operators that fbgemm_gpu's CPU build lacks. Prune during "
    "quantization: recsys.inference.quant_prep.set_pruning_data."
)
_SEMISYNC = (
    "It needs an optimizer with `global_step`; no public optimizer has it. Use DMPCollection."
)
_TRACKER = "recsys.distributed.changed_rows.ChangedRows returns the rows that changed."

INSTEAD: dict[str, str] = {
    "torchrec.distributed.batched_embedding_kernel": _LOOKUP,
    "torchrec.distributed.comm._": "Call intra_and_cross_node_pg(), which creates the groups once.",
    "torchrec.distributed.comm_ops": _ENGINE,
    "torchrec.distributed.composable.table_batched_embedding_slice": "A table's weight is a view "
    "of its lookup's storage: ebc.embedding_bags[name].weight.",
    "torchrec.distributed.dist_data": _EXCHANGE,
    "torchrec.distributed.embedding_kernel": _LOOKUP,
    "torchrec.distributed.embedding_lookup": _LOOKUP,
    "torchrec.distributed.embedding_sharding": _EXCHANGE,
    "torchrec.distributed.embedding_sharding.EmbeddingSharding": _LAYOUT,
    "torchrec.distributed.embedding_types.": _ENGINE,
    "torchrec.distributed.embedding_types.GroupedEmbeddingConfig": _LAYOUT,
    "torchrec.distributed.embedding_types.ShardedEmbeddingTable": _LAYOUT,
    "torchrec.distributed.embeddingbag._create_mean_pooling_divisor": "A lookup divides sums by "
    "the lengths of its bags.",
    "torchrec.distributed.itep_": _PRUNING,
    "torchrec.distributed.keyed_jagged_tensor_pool.": _POOLS,
    "torchrec.distributed.mc_": _HASH,
    "torchrec.distributed.model_tracker.": _TRACKER,
    "torchrec.distributed.model_tracker.trackers": _HASH,
    "torchrec.distributed.object_pool": _POOLS,
    "torchrec.distributed.planner.dry_run.cli": "Describe the other machine by a "
    "Topology: see docs/planner.md.",
    "torchrec.distributed.planner.enumerators._get_tower_index": "Collections in a tower are "
    "planned like all others.",
    "torchrec.distributed.planner.estimator.": "Set speeds or coefficients, or write a "
    "forward_compute: see docs/planner_internals.md.",
    "torchrec.distributed.planner.types.TopologyFactory": _MACHINE,
    "torchrec.distributed.planner.types.HardwareConfig": _MACHINE,
    "torchrec.distributed.planner.types.KernelConfig": _MACHINE,
    "torchrec.distributed.planner.types.TrainerConfig": _MACHINE,
    "torchrec.distributed.sharding.": _LAYOUT,
    "torchrec.distributed.tensor_pool.": _POOLS,
    "torchrec.distributed.tensor_sharding": _POOLS,
    "torchrec.distributed.train_pipeline.ArgInfo": _PIPELINES,
    "torchrec.distributed.train_pipeline.CallArgs": _PIPELINES,
    "torchrec.distributed.train_pipeline.TrainPipelineSparseDistCompAutograd": "Compiled "
    "autograd skips table updates in backward: use TrainPipelineSparseDist.",
    "torchrec.distributed.train_pipeline.tracing.": _PIPELINES,
    "torchrec.distributed.train_pipeline.utils.": "The pipelines have a different "
    "structure: see docs/pipelines.md.",
    "torchrec.fx.": "To export a model, call recsys.inference.export_torchscript or export_aoti.",
    "torchrec.modules.hash_mc_": _HASH,
    "torchrec.modules.itep_": _PRUNING,
    "torchrec.modules.mc_": _HASH,
    "torchrec.modules.object_pool_lookups": "A pool stores its rows itself: "
    "see recsys.modules.object_pools.",
    "torchrec.optim.SemisyncOptimizer": _SEMISYNC,
    "torchrec.optim.semi_sync": _SEMISYNC,
    "torchrec.modules.sorted_index_select": "Call torch.index_select. The backward pass of "
    "a lookup sorts its ids itself.",
    "torchrec.metrics.rec_metric.": "Derive metrics from "
    "recsys.metrics.sum_metrics.SumMetric: see docs/metrics.md.",
    "torchrec.metrics.output": "Use TensorWeightedAvgMetric for the mean of any output.",
    "torchrec.metrics.segmented_ne.GroupingKeyConfig": "Build a metric per grouping key.",
    "torchrec.metrics.cpu_": "Use RecMetricModule: updates are fast enough for the training "
    "thread.",
    "torchrec.metrics.deferrable_metrics": "compute() returns a dict.",
    "torchrec.metrics.metric_job_types": "Use RecMetricModule: updates need no other thread.",
    "torchrec.metrics.metric_state_snapshot": "Use state_dict().",
    "torchrec.metrics.noop_metric_module": "Use EmptyMetricsConfig.",
}
"""Advice for names without a counterpart, by the start of the dotted name."""


def reason_of(dotted: str) -> str | None:
    """Return the advice for a TorchRec name without a counterpart; None if there is none.

    Args:
        dotted: Module and name, joined by a dot.

    Example:
        >>> reason_of("torchrec.distributed.dist_data.SplitsAllToAllAwaitable")
        'recsys.distributed.stages.input_dist.InputDist exchanges batches.'
    """
    starts = [start for start in INSTEAD if dotted.startswith(start)]
    return INSTEAD[max(starts, key=len)] if starts else None
