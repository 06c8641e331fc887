"""Which of our objects stands for which TorchRec name, read from the table in names.txt.

Only public names that exist here are in the table, so whatever is missing fails at import.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

PEER_VERSION = "1.8.0"
"""The TorchRec release whose module paths these are."""


@final
class Home(NamedTuple):
    """Where one of our objects lives."""

    module: str
    name: str


def _read_table(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield a TorchRec module, one of ours, and the words that say what it gets from it."""
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
"""Rows of the table: a TorchRec module, one of ours, and names, as `ours=theirs` if they differ."""


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
"""The table, unfolded: TorchRec module (parents of modules included) -> name -> ours."""

_SCRIPTS = "torchrec.datasets.scripts."
_FIRST_HOMES: dict[str, Home] = {
    name: home
    for module, names in reversed(HOMES.items())
    if not module.startswith(_SCRIPTS)  # each has its own `main`
    for name, home in names.items()
}
"""Name -> where ours lives; if several modules have the name, the first in the table decides."""

_OTHERS: frozenset[str] = frozenset(
    (
        "torchrec.distributed.mc_modules.EmbeddingCollectionContext",
        "torchrec.distributed.quant_embedding.EmbeddingCollectionContext",
        "torchrec.modules.embedding_configs.ShardingType",
    )
)
"""TorchRec objects whose name the table has for a different object."""


def home_of(module: str, name: str) -> Home | None:
    """Return where our object for a TorchRec name lives.

    Args:
        module: a TorchRec module.
        name: one that it defines, or imports from another TorchRec module.

    Returns:
        The entry of this module in the table. Without one, the entry of the first module that has
        the name. None if no module has it, or if it names a submodule of this one.

    Example:
        >>> home_of("torchrec.metrics.rec_metric", "RecTaskInfo")
        Home(module='recsys.metrics.metrics_config', name='RecTaskInfo')
    """
    dotted = f"{module}.{name}"
    if name in HOMES.get(module, {}):
        return HOMES[module][name]
    return None if dotted in HOMES or dotted in _OTHERS else _FIRST_HOMES.get(name)


_ENGINE = "The engine inside is another one: docs/engine.md."
_EXCHANGE = "Batches are exchanged by recsys.distributed.stages.input_dist.InputDist."
_LAYOUT = "A sharded collection's `layout` says what is where, for all sharding types."
_LOOKUP = "Tables are looked up by recsys.kernels.tbe.TableBatchedEmbedding."
_HASH = "Ids must be in their table: hash them before the model, by recsys.sparse.hash_ids."
_MACHINE = "Topology(world_size, compute_device, hbm_cap=..., ...) takes and checks all of it."
_POOLS = "A pool is served unsharded; its rows travel by recsys.distributed.stages.pool_rows."
_PIPELINES = "Pipelines do not trace the model: docs/pipelines.md."
_PRUNING = (
    "TorchRec prunes in training by operators that fbgemm_gpu's CPU build lacks. Prune as a table "
    "is quantized: recsys.inference.quant_prep.set_pruning_data."
)
_SEMISYNC = "It steps by a `global_step`, which no public optimizer has: DMPCollection averages."
_TRACKER = "There is no tracker of changed rows; save a checkpoint: docs/checkpoints.md."

INSTEAD: dict[str, str] = {
    "torchrec.distributed.batched_embedding_kernel": _LOOKUP,
    "torchrec.distributed.comm._": "Call intra_and_cross_node_pg(), which makes the groups once.",
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
    "torchrec.distributed.model_tracker": _TRACKER,
    "torchrec.distributed.object_pool": _POOLS,
    "torchrec.distributed.planner.dry_run.cli": "To plan for another machine, describe it: "
    "docs/planner.md.",
    "torchrec.distributed.planner.enumerators._get_tower_index": "Collections in a tower are "
    "planned as all others.",
    "torchrec.distributed.planner.estimator.": "Set speeds or coefficients, or write a "
    "forward_compute: docs/planner.md.",
    "torchrec.distributed.planner.types.TopologyFactory": _MACHINE,
    "torchrec.distributed.planner.types.HardwareConfig": _MACHINE,
    "torchrec.distributed.planner.types.KernelConfig": _MACHINE,
    "torchrec.distributed.planner.types.TrainerConfig": _MACHINE,
    "torchrec.distributed.sharding.": _LAYOUT,
    "torchrec.distributed.tensor_pool.": _POOLS,
    "torchrec.distributed.tensor_sharding": _POOLS,
    "torchrec.distributed.train_pipeline.ArgInfo": _PIPELINES,
    "torchrec.distributed.train_pipeline.CallArgs": _PIPELINES,
    "torchrec.distributed.train_pipeline.TrainPipelineSparseDistCompAutograd": "Autograd that is "
    "compiled misses tables that update in backward: use TrainPipelineSparseDist.",
    "torchrec.distributed.train_pipeline.tracing.": _PIPELINES,
    "torchrec.distributed.train_pipeline.utils.": "The pipelines inside are others: "
    "docs/pipelines.md.",
    "torchrec.fx.": "To export a model, call recsys.inference.export_torchscript or export_aoti.",
    "torchrec.modules.hash_mc_": _HASH,
    "torchrec.modules.itep_": _PRUNING,
    "torchrec.modules.mc_": _HASH,
    "torchrec.modules.object_pool_lookups": "A pool holds its rows itself: "
    "recsys.modules.object_pools.",
    "torchrec.optim.SemisyncOptimizer": _SEMISYNC,
    "torchrec.optim.semi_sync": _SEMISYNC,
    "torchrec.modules.sorted_index_select": "Call torch.index_select: a lookup sorts what its "
    "gradients are added to by itself.",
    "torchrec.metrics.rec_metric.": "Metrics here are formulas of sums: derive from "
    "recsys.metrics.sum_metrics.SumMetric, as docs/metrics.md shows.",
    "torchrec.metrics.output": "Use TensorWeightedAvgMetric for the mean of any output.",
    "torchrec.metrics.segmented_ne.GroupingKeyConfig": "Build a metric per grouping key.",
    "torchrec.metrics.cpu_": "An update is cheap enough for the training thread: RecMetricModule.",
    "torchrec.metrics.deferrable_metrics": "compute() returns a dict.",
    "torchrec.metrics.metric_job_types": "An update needs no other thread: RecMetricModule.",
    "torchrec.metrics.metric_state_snapshot": "Use state_dict().",
    "torchrec.metrics.noop_metric_module": "Use EmptyMetricsConfig.",
}
"""What to write instead of a name that is not here, by how its dotted name begins."""


def reason_of(dotted: str) -> str | None:
    """Return why recsys has no counterpart of a TorchRec name; None if nothing says so.

    Args:
        dotted: module and name.

    Example:
        >>> reason_of("torchrec.distributed.dist_data.SplitsAllToAllAwaitable")
        'Batches are exchanged by recsys.distributed.stages.input_dist.InputDist.'
    """
    starts = [start for start in INSTEAD if dotted.startswith(start)]
    return INSTEAD[max(starts, key=len)] if starts else None
