"""Old paths of the objects that moved to `recsys.compat`.

`recsys.base.lazy.moved_names` reads the table. Old paths work for two minor releases
(docs/stability.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_ROWS = (
    (
        "recsys.tracing",
        "recsys.compat.tracing",
        "assert_fx_safe is_non_strict_exporting is_pt2_compiling is_torchdynamo_compiling",
    ),
    (
        "recsys.sparse.conversions",
        "recsys.compat.sparse",
        "ComputeJTDictToKJT ComputeKJTToJTDict pad_vbe_kjt_lengths "
        "permute_multi_embedding regroup_kts",
    ),
    ("recsys.modules.regroup", "recsys.compat.sparse", "KTRegroupAsDict"),
    (
        "recsys.distributed.planner.constants",
        "recsys.compat.planner.constants",
        "bytes_to_gb bytes_to_mb gb_to_bytes mb_to_bytes sharder_name",
    ),
    ("recsys.optim.fused", "recsys.compat.optim", "EmptyFusedOptimizer FusedOptimizerModule"),
    ("recsys.optim.specs", "recsys.compat.optim", "optimizer_type_to_emb_opt_type"),
    (
        "recsys.distributed.ranks.comm",
        "recsys.compat.distributed",
        "GetItemLazyAwaitable LazyGetItemMixin",
    ),
    (
        "recsys.distributed.placement.fused_params",
        "recsys.compat.fused_params",
        "add_params_from_parameter_sharding convert_to_fbgemm_types merge_fused_params",
    ),
    (
        "recsys.modules.embedding_tower",
        "recsys.compat.towers",
        "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    ),
    (
        "recsys.distributed.nn_embeddingbag",
        "recsys.compat.nn_embeddingbag",
        "EmbeddingBagSharder ShardedEmbeddingBag",
    ),
    (
        "recsys.modules.dlrm_variants",
        "recsys.compat.dlrm_variants",
        "DLRM_Projection DLRM_Transformer InteractionProjectionArch InteractionTransformerArch",
    ),
    (
        "recsys.inference.modules",
        "recsys.compat.inference",
        "BatchingMetadata PredictFactory PredictModule QualNameMetadata quantize_dense "
        "quantize_feature trim_torch_package_prefix_from_typename",
    ),
    (
        "recsys.inference.model_packager",
        "recsys.compat.model_packager",
        "PredictFactoryPackager load_config_text load_pickle_config",
    ),
    (
        "recsys.inference.state_dict_transform",
        "recsys.compat.state_dict_transform",
        "state_dict_all_gather_keys state_dict_gather state_dict_to_device",
    ),
    (
        "recsys.metrics.model_utils",
        "recsys.compat.model_utils",
        "is_empty_signals parse_model_outputs parse_required_inputs "
        "parse_task_model_outputs session_ids_to_tensor",
    ),
    (
        "recsys.modules.feature_processor",
        "recsys.compat.modules",
        "BaseFeatureProcessor BaseGroupedFeatureProcessor PositionWeightedProcessor",
    ),
    (
        "recsys.modules.embedding_configs",
        "recsys.compat.modules",
        "EmbeddingTableConfig pooling_type_to_pooling_mode pooling_type_to_str",
    ),
    (
        "recsys.modules.fused_embedding_modules",
        "recsys.compat.modules",
        "fuse_embedding_optimizer",
    ),
    ("recsys.distributed.ranks.node", "recsys.compat.distributed", "intra_and_cross_node_pg"),
    (
        "recsys.distributed.sharding_plan",
        "recsys.compat.distributed",
        "get_sharding_constructor_from_type",
    ),
)

MOVED: Final[Mapping[str, str]] = {
    f"{old}.{name}": f"{new}.{name}" for old, new, names in _ROWS for name in names.split()
}
"""New dotted path by old dotted path."""
