"""Which of our objects stands for which TorchRec name, as one table.

A row reads as two import statements: what users write, `from <TorchRec module> import <names>`,
is served by `from <our module> import <names>`. `Ours as Theirs` renames. A module may have
several rows. Only public names that exist here are in it, so whatever is missing fails at import.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, final

PEER_VERSION = "1.8.0"
"""The TorchRec release whose module paths these are."""

_METRICS = """\
accuracy metrics.sum_metrics AccuracyMetric
accuracy compat.metrics THRESHOLD, compute_accuracy, compute_accuracy_sum, get_accuracy_states
auc metrics.rank_metrics AUCMetric
auc compat.metrics GROUPING_KEYS, LABELS, PREDICTIONS, REQUIRED_INPUTS, WEIGHTS, compute_auc,
  compute_auc_per_group
auprc metrics.rank_metrics AUPRCMetric
auprc compat.metrics compute_auprc, compute_auprc_per_group
average metrics.sum_metrics AverageMetric
average compat.metrics LABEL_SUM, PREDICTION_SUM, WEIGHTED_NUM_SAMPLES, compute_average,
  get_average_states
cali_free_ne metrics.sum_metrics CaliFreeNEMetric
cali_free_ne compat.metrics compute_cali_free_ne, compute_cross_entropy, get_cali_free_ne_states
calibration metrics.sum_metrics CalibrationMetric
calibration compat.metrics CALIBRATION_DENOM, CALIBRATION_NUM, compute_calibration,
  get_calibration_states
calibration_with_recalibration metrics.sum_metrics RecalibratedCalibrationMetric
ctr metrics.sum_metrics CTRMetric
ctr compat.metrics CTR_DENOM, CTR_NUM, compute_ctr, get_ctr_states
gauc metrics.session_metrics GAUCMetric
gauc compat.metrics compute_window_auc, get_auc_states
hindsight_target_pr metrics.rank_metrics HindsightTargetPRMetric
hindsight_target_pr compat.metrics TARGET_PRECISION, THRESHOLD_GRANULARITY, compute_precision,
  compute_recall, compute_threshold_idx, false_neg_sums as compute_false_neg_sum, false_pos_sums as
  compute_false_pos_sum, get_pr_states, true_pos_sums as compute_true_pos_sum
mae metrics.sum_metrics MAEMetric
mae compat.metrics ERROR_SUM, absolute_error_sum as compute_error_sum, compute_mae, get_mae_states
metric_module metrics.metric_module REC_METRICS_MAPPING, RecMetricModule, StateMetric,
  generate_metric_module
metric_module compat.metrics MODEL_METRIC_LABEL, STATE_METRICS_NAMESPACE_MAPPING
metrics_config metrics.metrics_config BatchSizeStage, DefaultMetricsConfig, DefaultTaskInfo,
  EmptyMetricsConfig, MetricsConfig, RecComputeMode, RecMetricDef, RecMetricEnum,
  RecMetricEnumBase, RecTaskInfo, SessionMetricDef, StateMetricEnum, ThroughputDef,
  validate_batch_size_stages
metrics_namespace metrics.metrics_namespace MetricName, MetricNameBase, MetricNamespace,
  MetricNamespaceBase, MetricPrefix, StrValueMixin, compose_customized_metric_key,
  compose_metric_key, compose_metric_namespace, task_wildcard_metrics_pattern
model_utils metrics.model_utils is_empty_signals, parse_model_outputs, parse_required_inputs,
  parse_task_model_outputs, session_ids_to_tensor
mse metrics.sum_metrics MSEMetric
mse compat.metrics LABEL_SQUARED_SUM, compute_mse, compute_r_squared, compute_rmse, get_mse_states,
  squared_error_sum as compute_error_sum
multi_label_precision metrics.sum_metrics MultiLabelPrecisionMetric
multi_label_precision compat.metrics compute_multi_label_precision
multiclass_recall metrics.sum_metrics MulticlassRecallMetric
multiclass_recall compat.metrics compute_multiclass_recall_at_k, compute_true_positives_at_k,
  get_multiclass_recall_states
ndcg metrics.session_metrics NDCGMetric
ndcg compat.metrics NUM_SESSIONS, SESSION_KEY, SUM_NDCG
ne metrics.sum_metrics NEMetric
ne compat.metrics compute_logloss, compute_ne, get_ne_states
ne_positive metrics.sum_metrics NEPositiveMetric
ne_positive compat.metrics compute_cross_entropy_positive, compute_ne_positive,
  get_ne_positive_states
ne_with_recalibration metrics.sum_metrics RecalibratedNEMetric
nmse metrics.sum_metrics NMSEMetric
nmse compat.metrics CONST_PRED_ERROR_SUM, compute_norm, get_norm_mse_states, squared_error_sum as
  compute_error_sum
num_missing_labels metrics.sum_metrics NumMissingLabelsMetric
num_missing_labels compat.metrics compute_missing_label_sum, get_num_missing_labels_states
num_positive_samples metrics.sum_metrics NumPositiveSamplesMetric
num_positive_samples compat.metrics compute_weighted_pos_sum, get_num_positive_sample_states
precision metrics.sum_metrics PrecisionMetric
precision compat.metrics compute_false_pos_sum, compute_true_pos_sum, get_precision_states
precision_session metrics.session_metrics PrecisionSessionMetric
precision_session compat.metrics NUM_FALSE_POS, NUM_TRUE_POS
rauc metrics.rank_metrics RAUCMetric
rauc compat.metrics compute_rauc, compute_rauc_per_group
rec_metric metrics.rec_metric RecMetric, RecMetricList
rec_metric metrics.errors RecMetricException
recall metrics.sum_metrics RecallMetric
recall compat.metrics compute_false_neg_sum, compute_true_pos_sum, get_recall_states
recall_session metrics.session_metrics RecallSessionMetric
recall_session compat.metrics NUM_FALSE_NEGATIVE, ranking_within_session
scalar metrics.sum_metrics ScalarMetric
segmented_ne metrics.sum_metrics SegmentedNEMetric
segmented_ne compat.metrics compute_ne_fused, compute_ne_helper, get_segemented_ne_states,
  get_segemented_ne_states_fused, segmented_ne as compute_ne
serving_calibration metrics.sum_metrics ServingCalibrationMetric
serving_calibration compat.metrics NUM_EXAMPLES
serving_ne metrics.sum_metrics ServingNEMetric
sum_weights metrics.sum_metrics SumWeightsMetric
sum_weights compat.metrics compute_weighted_sum, get_weighted_sum_states
tensor_weighted_avg metrics.sum_metrics TensorWeightedAvgMetric
tensor_weighted_avg compat.metrics get_mean
throughput metrics.throughput ThroughputMetric
tower_qps metrics.throughput TowerQPSMetric
tower_qps compat.metrics TIME_LAPSE, WARMUP_EXAMPLES, WARMUP_STEPS
unweighted_ne metrics.sum_metrics UnweightedNEMetric
unweighted_ne compat.metrics get_unweighted_ne_states
weighted_avg metrics.sum_metrics WeightedAvgMetric
weighted_sum_predictions metrics.sum_metrics WeightedSumPredictionsMetric
weighted_sum_predictions compat.metrics compute_weighted_predictions_sum,
  get_weighted_sum_prediction_states
xauc metrics.session_metrics XAUCMetric
xauc compat.metrics WEIGHTED_NUM_PAIRS, compute_weighted_num_pairs, compute_xauc, get_xauc_states,
  ordered_pairs_sum as compute_error_sum
"""
"""Rows of `torchrec.metrics`: its module, our module, names. Continuation lines are indented."""

TABLE: tuple[tuple[str, str, str], ...] = (
    # the package itself
    ("torchrec", "recsys.sparse", "JaggedTensor, KeyedJaggedTensor, KeyedTensor"),
    (
        "torchrec",
        "recsys.modules.embedding_configs",
        "DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType",
    ),
    (
        "torchrec",
        "recsys.modules.embedding_modules",
        "EmbeddingBagCollection, EmbeddingBagCollectionInterface, EmbeddingCollection",
    ),
    ("torchrec.types", "recsys.modules.embedding_configs", "DataType"),
    ("torchrec", "recsys.streamable", "Multistreamable, Pipelineable"),
    ("torchrec.streamable", "recsys.streamable", "Multistreamable, Pipelineable"),
    (
        "torchrec.optim.fused",
        "recsys.optim.fused",
        "EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule",
    ),
    (
        "torchrec.distributed.planner.constants",
        "recsys.distributed.planner.constants",
        "BATCH_SIZE, BIGINT_DTYPE, NUM_POOLINGS, POOLING_FACTOR, UVM_CACHING_RATIO",
    ),
    (
        "torchrec.distributed.planner.utils",
        "recsys.distributed.planner.constants",
        "bytes_to_gb, bytes_to_mb, gb_to_bytes, mb_to_bytes, sharder_name",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.distributed.planner.constants",
        "sharder_name",
    ),
    ("torchrec.distributed.planner.types", "recsys.distributed.planner.types", "PlannerErrorType"),
    ("torchrec.fx", "recsys.fx", "Tracer, symbolic_trace"),
    ("torchrec.fx.tracer", "recsys.fx", "Tracer, symbolic_trace"),
    ("torchrec.fx.utils", "recsys.tracing", "assert_fx_safe"),
    (
        "torchrec.pt2.checks",
        "recsys.tracing",
        "is_non_strict_exporting, is_pt2_compiling, is_torchdynamo_compiling",
    ),
    # sparse
    (
        "torchrec.sparse.jagged_tensor_validator",
        "recsys.sparse.jagged_tensor_validator",
        "validate_keyed_jagged_tensor",
    ),
    (
        "torchrec.sparse.jagged_tensor",
        "recsys.sparse",
        "JaggedTensor, KeyedJaggedTensor, KeyedTensor, jt_is_equal, kjt_is_equal",
    ),
    (
        "torchrec.sparse.jagged_tensor",
        "recsys.sparse.conversions",
        "ComputeJTDictToKJT, ComputeKJTToJTDict, permute_multi_embedding, regroup_kts",
    ),
    ("torchrec.distributed.embedding", "recsys.sparse.conversions", "pad_vbe_kjt_lengths"),
    ("torchrec.distributed.types", "recsys.compat.planner.values", "KeyValueParams, PipelineType"),
    (
        "torchrec.distributed.sharding_plan",
        "recsys.compat.planner.values",
        "column_shards as _calculate_cw_shard_sizes_and_offsets, "
        "uneven_row_shards as _calculate_uneven_rw_shard_sizes_and_offsets",
    ),
    # modules
    (
        "torchrec.modules.embedding_configs",
        "recsys.modules.embedding_configs",
        "BaseEmbeddingConfig, DATA_TYPE_NUM_BITS, DataType, EmbeddingBagConfig, EmbeddingConfig, "
        "EmbeddingTableConfig, PoolingType, QuantConfig, data_type_to_dtype, dtype_to_data_type, "
        "pooling_type_to_pooling_mode, pooling_type_to_str",
    ),
    (
        "torchrec.modules.embedding_modules",
        "recsys.modules.embedding_modules",
        "EmbeddingBagCollection, EmbeddingBagCollectionInterface, EmbeddingCollection, "
        "EmbeddingCollectionInterface, get_embedding_names_by_table",
    ),
    ("torchrec.modules.activation", "recsys.modules.activation", "SwishLayerNorm"),
    (
        "torchrec.modules.crossnet",
        "recsys.modules.crossnet",
        "CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet",
    ),
    ("torchrec.modules.deepfm", "recsys.modules.deepfm", "DeepFM, FactorizationMachine"),
    (
        "torchrec.modules.embedding_tower",
        "recsys.modules.embedding_tower",
        "EmbeddingTower, EmbeddingTowerCollection, tower_input_params",
    ),
    (
        "torchrec.modules.fused_embedding_modules",
        "recsys.modules.fused_embedding_modules",
        "FusedEmbeddingBagCollection, FusedEmbeddingCollection, fuse_embedding_optimizer",
    ),
    (
        "torchrec.modules.feature_processor",
        "recsys.modules.feature_processor",
        "BaseFeatureProcessor, BaseGroupedFeatureProcessor, PositionWeightedProcessor",
    ),
    (
        "torchrec.modules.feature_processor_",
        "recsys.modules.feature_processor",
        "FeatureProcessor, FeatureProcessorsCollection, PositionWeightedModule, "
        "PositionWeightedModuleCollection",
    ),
    (
        "torchrec.modules.fp_embedding_modules",
        "recsys.modules.fp_embedding_modules",
        "FeatureProcessedEmbeddingBagCollection, FeatureProcessorDictWrapper",
    ),
    (
        "torchrec.modules.feature_processor",
        "recsys.compat.modules",
        "PositionWeightedModule, offsets_to_range_traceble",
    ),
    (
        "torchrec.modules.utils",
        "recsys.compat.modules",
        "check_module_output_dimension, construct_modulelist_from_single_module, "
        "convert_list_of_modules_to_modulelist, extract_module_or_tensor_callable, "
        "get_module_output_dimension, init_mlp_weights_xavier_uniform",
    ),
    (
        "torchrec.modules.embedding_modules",
        "recsys.compat.modules",
        "process_pooled_embeddings, reorder_inverse_indices",
    ),
    (
        "torchrec.distributed.embedding_tower_sharding",
        "recsys.distributed.embeddingbag",
        "EmbeddingBagCollectionSharder as EmbeddingTowerCollectionSharder, "
        "EmbeddingBagCollectionSharder as EmbeddingTowerSharder",
    ),
    (
        "torchrec.distributed.collective_utils",
        "recsys.compat.distributed",
        "invoke_on_rank_and_broadcast_result, is_leader, run_on_leader",
    ),
    (
        "torchrec.distributed.utils",
        "recsys.compat.distributed",
        "add_prefix_to_state_dict, append_prefix, filter_state_dict, get_unsharded_module_names, "
        "init_parameters, sharded_model_copy",
    ),
    (
        "torchrec.distributed.types",
        "recsys.compat.distributed",
        "ShardingPlanner, get_tensor_size_bytes, rank_device",
    ),
    (
        "torchrec.distributed.train_pipeline",
        "recsys.compat.distributed",
        "DataLoadingThread, TorchCompileConfig, TrainPipelinePT2",
    ),
    (
        "torchrec.distributed.planner.planners",
        "recsys.compat.planner.planners",
        "EmbeddingShardingPlanner as EmbeddingPlannerBase",
    ),
    ("torchrec.distributed.comm", "recsys.compat.distributed", "get_group_rank, get_num_groups"),
    ("torchrec.distributed.planner.planners", "recsys.compat.distributed", "extract_plan"),
    (
        "torchrec.inference.modules",
        "recsys.compat.distributed",
        "DEFAULT_FUSED_PARAMS, DEFAULT_QUANTIZATION_DTYPE, DEFAULT_QUANT_MAPPING, DEFAULT_SHARDERS",
    ),
    ("torchrec.modules.lazy_extension", "recsys.compat.modules", "lazy_apply"),
    ("torchrec.sparse.tensor_dict", "recsys.compat.modules", "maybe_td_to_kjt"),
    ("torchrec.modules.mlp", "recsys.modules.mlp", "MLP, Perceptron"),
    ("torchrec.modules.regroup", "recsys.modules.regroup", "KTRegroupAsDict"),
    (
        "torchrec.models.dlrm",
        "recsys.modules.dlrm",
        "DLRM, DLRMTrain, DenseArch, InteractionArch, OverArch, SparseArch",
    ),
    (
        "torchrec.models.dlrm",
        "recsys.modules.dlrm_variants",
        "DLRM_DCN, DLRM_Projection, InteractionDCNArch, InteractionProjectionArch",
    ),
    ("torchrec.models.dlrm", "math", "comb as choose"),
    ("torchrec.models.dlrm", "recsys.compat.modules", "DLRMWrapper"),
    (
        "torchrec.models.experimental.transformerdlrm",
        "recsys.modules.dlrm_variants",
        "DLRM_Transformer, InteractionTransformerArch",
    ),
    (
        "torchrec.models.deepfm",
        "recsys.modules.deepfm_model",
        "DenseArch, FMInteractionArch, OverArch, SimpleDeepFMNN, SparseArch",
    ),
    ("torchrec.models.deepfm", "recsys.compat.modules", "SimpleDeepFMNNWrapper"),
    # optim
    (
        "torchrec.optim",
        "recsys.optim",
        "Adagrad, Adam, CombinedOptimizer, GradientClipping, GradientClippingOptimizer, "
        "KeyedOptimizer, KeyedOptimizerWrapper, LAMB, LarsSGD, OptimizerWrapper, "
        "PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad, SGD, WarmupOptimizer, "
        "WarmupPolicy, WarmupStage, apply_optimizer_in_backward",
    ),
    (
        "torchrec.optim.apply_optimizer_in_backward",
        "recsys.optim.apply_optimizer_in_backward",
        "apply_optimizer_in_backward",
    ),
    (
        "torchrec.optim.clipping",
        "recsys.optim.clipping",
        "GradientClipping, GradientClippingOptimizer",
    ),
    (
        "torchrec.optim.keyed",
        "recsys.optim.keyed",
        "CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper",
    ),
    (
        "torchrec.optim.optimizers",
        "recsys.optim.optimizers",
        "Adagrad, Adam, LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, SGD, "
        "in_backward_optimizer_filter",
    ),
    ("torchrec.optim.rowwise_adagrad", "recsys.optim.rowwise_adagrad", "RowWiseAdagrad"),
    (
        "torchrec.optim.warmup",
        "recsys.optim.warmup",
        "WarmupOptimizer, WarmupPolicy, WarmupStage",
    ),
    # distributed
    (
        "torchrec.distributed",
        "recsys.distributed.model_parallel",
        "DistributedModelParallel",
    ),
    (
        "torchrec.distributed",
        "recsys.distributed.types",
        "Awaitable, ModuleSharder, NoWait, ParameterSharding, ShardedModule, ShardingEnv",
    ),
    ("torchrec.distributed", "recsys.distributed.ranks.node", "get_local_rank, get_local_size"),
    (
        "torchrec.distributed.types",
        "recsys.distributed.state.sharded_table",
        "Shard, ShardedTable as ShardedTensor, ShardedTensorMetadata",
    ),
    (
        "torchrec.distributed.types",
        "recsys.distributed.types",
        "Awaitable, CacheParams, EmbeddingModuleShardingPlan, EnumerableShardingSpec, "
        "LazyAwaitable, LazyNoWait, ModuleSharder, NoWait, ParameterSharding, ShardMetadata, "
        "ShardedModule, ShardingEnv, ShardingPlan, ShardingType",
    ),
    ("torchrec.distributed.types", "recsys.distributed.dmp_collection", "DMPCollectionConfig"),
    ("torchrec.distributed.types", "recsys.distributed.ranks.wire", "CommOp, QuantizedCommCodecs"),
    ("torchrec.distributed.types", "recsys.kernels.types", "BoundsCheckMode"),
    (
        "torchrec.distributed.embedding_types",
        "recsys.distributed.types",
        "EmbeddingComputeKernel, ShardingType, compute_kernel_to_embedding_location",
    ),
    ("torchrec.distributed.embedding_types", "recsys.sparse.kjt_list", "KJTList"),
    (
        "torchrec.distributed.utils",
        "recsys.distributed.placement.fused_params",
        "add_params_from_parameter_sharding, convert_to_fbgemm_types, merge_fused_params",
    ),
    ("torchrec.distributed.utils", "recsys.distributed.types", "copy_to_device"),
    ("torchrec.distributed.utils", "recsys.optim.specs", "optimizer_type_to_emb_opt_type"),
    (
        "torchrec.distributed.embedding_types",
        "recsys.modules.feature_processor",
        "BaseGroupedFeatureProcessor",
    ),
    (
        "torchrec.distributed.embeddingbag",
        "recsys.distributed.embeddingbag",
        "EmbeddingBagCollectionAwaitable, EmbeddingBagCollectionSharder, "
        "ShardedEmbeddingBagCollection",
    ),
    (
        "torchrec.distributed.embeddingbag",
        "recsys.distributed.nn_embeddingbag",
        "EmbeddingBagSharder, ShardedEmbeddingBag",
    ),
    (
        "torchrec.distributed.fused_embeddingbag",
        "recsys.distributed.fused_embedding",
        "FusedEmbeddingBagCollectionSharder",
    ),
    (
        "torchrec.distributed.fused_embedding",
        "recsys.distributed.fused_embedding",
        "FusedEmbeddingCollectionSharder",
    ),
    (
        "torchrec.distributed.embedding",
        "recsys.distributed.embedding",
        "EmbeddingCollectionAwaitable, EmbeddingCollectionSharder, ShardedEmbeddingCollection",
    ),
    (
        "torchrec.distributed.embedding",
        "recsys.distributed.stages.input_dist",
        "Trip as EmbeddingCollectionContext",
    ),
    (
        "torchrec.distributed.embeddingbag",
        "recsys.distributed.stages.input_dist",
        "Trip as EmbeddingBagCollectionContext",
    ),
    (
        "torchrec.distributed.model_parallel",
        "recsys.distributed.model_parallel",
        "DataParallelWrapper, DefaultDataParallelWrapper, DistributedModelParallel, "
        "get_default_sharders, get_module, get_unwrapped_module",
    ),
    ("torchrec.distributed.model_parallel", "recsys.distributed.dmp_collection", "DMPCollection"),
    ("torchrec.distributed.model_parallel", "recsys.distributed.types", "ShardedModule"),
    (
        "torchrec.distributed.fp_embeddingbag",
        "recsys.distributed.fp_embeddingbag",
        "FeatureProcessedEmbeddingBagCollectionSharder, "
        "ShardedFeatureProcessedEmbeddingBagCollection",
    ),
    (
        "torchrec.distributed.fbgemm_qcomm_codec",
        "recsys.distributed.ranks.wire",
        "CommType, QCommsConfig, get_qcomm_codecs_registry",
    ),
    (
        "torchrec.distributed.shard",
        "recsys.distributed.shard",
        "shard, shard_modules, shard_modules as _shard_modules",
    ),
    (
        "torchrec.distributed.sharding_plan",
        "recsys.distributed.default_sharders",
        "get_default_sharders, get_module_to_default_sharders",
    ),
    (
        "torchrec.distributed.sharding_plan",
        "recsys.distributed.sharding_plan",
        "ParameterShardingGenerator, apply_to_all, calculate_shard_sizes_and_offsets, column_wise, "
        "construct_module_sharding_plan, data_parallel, get_sharding_constructor_from_type, "
        "grid_shard, placement, placement_helper, row_wise, table_row_wise, table_wise",
    ),
    (
        "torchrec.distributed.comm",
        "recsys.distributed.ranks.node",
        "get_local_rank, get_local_size, intra_and_cross_node_pg",
    ),
    # distributed.planner
    (
        "torchrec.distributed.planner",
        "recsys.compat.planner.planners",
        "EmbeddingShardingPlanner",
    ),
    ("torchrec.distributed.planner", "recsys.compat.planner.topology", "Topology"),
    ("torchrec.distributed.planner", "recsys.distributed.planner.types", "ParameterConstraints"),
    (
        "torchrec.distributed.planner.constants",
        "recsys.compat.planner.shard_estimators",
        "KV_CACHING_RATIO",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.distributed.planner.types",
        "ParameterConstraints",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.distributed.types",
        "EmbeddingComputeKernel",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.modules.embedding_tower",
        "EmbeddingTower, EmbeddingTowerCollection",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.compat.planner.enumerators",
        "EmbeddingEnumerator, GUARDED_COMPUTE_KERNELS, GUARDED_SHARDING_TYPES_FOR_FP_MODULES, "
        "get_partition_by_type",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.compat.planner.types",
        "Enumerator, PartitionByType, Shard, ShardEstimator, SharderDataMap, ShardingOption",
    ),
    (
        "torchrec.distributed.planner.partitioners",
        "recsys.compat.planner.partitioners",
        "GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy",
    ),
    (
        "torchrec.distributed.planner.perf_models",
        "recsys.compat.planner.perf_models",
        "NoopPerfModel, NoopStorageModel",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.distributed.sharding_plan",
        "calculate_shard_sizes_and_offsets",
    ),
    (
        "torchrec.distributed.planner.planners",
        "recsys.compat.planner.planners",
        "EmbeddingShardingPlanner, to_sharding_plan",
    ),
    (
        "torchrec.distributed.planner.proposers",
        "recsys.compat.planner.proposers",
        "DynamicProgrammingProposer, GreedyProposer, GridSearchProposer, UniformProposer, "
        "proposers_to_proposals_list",
    ),
    (
        "torchrec.distributed.planner.shard_estimators",
        "recsys.compat.planner.shard_estimators",
        "EmbeddingPerfEstimator, EmbeddingStorageEstimator, KV_CACHING_RATIO, "
        "calculate_shard_storages",
    ),
    (
        "torchrec.distributed.planner.shard_estimators",
        "recsys.compat.planner.types",
        "get_num_poolings",
    ),
    (
        "torchrec.distributed.planner.estimator.estimator",
        "recsys.compat.planner.shard_estimators",
        "EmbeddingPerfEstimator, EmbeddingPerfEstimator as EmbeddingPerfEstimatorV2",
    ),
    (
        "torchrec.distributed.planner.estimator.estimator",
        "recsys.compat.planner.annotations",
        "EmbeddingPerfEstimatorFactory",
    ),
    (
        "torchrec.distributed.planner.estimator.annotations",
        "recsys.compat.planner.annotations",
        "backward_compute, bwd_coefficient, device_bw, forward_compute, fwd_coefficient, "
        "output_write_size, ssd_mem_bw, supported_sharding_types",
    ),
    (
        "torchrec.distributed.planner.estimator.config",
        "recsys.compat.planner.estimator_types",
        "HardwarePerfConfig as EmbeddingPerfEstimatorConfig",
    ),
    (
        "torchrec.distributed.planner.estimator.types",
        "recsys.compat.planner.estimator_types",
        "EstimatorPerfCoefficients, HardwarePerfConfig, PerfCoefficient, PerfCoefficientConfig, "
        "ShardPerfContext",
    ),
    (
        "torchrec.utils.emo_logger",
        "recsys.compat.decisions",
        "DecisionCategory, EMODecision, EMOLogger, EMOSummary, get_logger, log_emo_decision",
    ),
    (
        "torchrec.distributed.planner.stats",
        "recsys.compat.planner.stats",
        "EmbeddingStats, NoopEmbeddingStats",
    ),
    (
        "torchrec.distributed.planner.storage_reservations",
        "recsys.compat.planner.storage_reservations",
        "FixedAbsoluteStorageReservation, FixedPercentageStorageReservation, "
        "HeuristicalStorageReservation, InferenceStorageReservation",
    ),
    (
        "torchrec.distributed.planner.types",
        "recsys.compat.planner.topology",
        "DeviceHardware, Perf, Storage, Topology",
    ),
    (
        "torchrec.distributed.planner.types",
        "recsys.compat.planner.types",
        "Enumerator, PartitionByType, Partitioner, PerfModel, Proposer, Shard, ShardEstimator, "
        "SharderData, SharderDataMap, ShardingOption, Stats, StorageReservation",
    ),
    (
        "torchrec.distributed.planner.types",
        "recsys.distributed.planner",
        "CustomTopologyData",
    ),
    (
        "torchrec.distributed.planner.types",
        "recsys.distributed.planner.types",
        "ParameterConstraints, PlannerError",
    ),
    ("torchrec.distributed.planner.types", "recsys.distributed.types", "ShardingPlan"),
    (
        "torchrec.distributed.planner.utils",
        "recsys.compat.planner.shard_estimators",
        "build_sharder_data_map",
    ),
    (
        "torchrec.distributed.planner.utils",
        "recsys.compat.planner.types",
        "get_num_poolings, reset_shard_rank, storage_repr_in_gb",
    ),
    (
        "torchrec.distributed.planner.constants",
        "recsys.compat.planner.constants",
        "BATCHED_COPY_PERF_FACTOR, BWD_COMPUTE_MULTIPLIER, CROSS_NODE_BANDWIDTH, DDR_CAP, "
        "DDR_MEM_BW, DEFAULT_PERF_ESTIMATOR, DP_ELEMENTWISE_KERNELS_PERF_FACTOR, "
        "FULL_BLOCK_EMB_DIM, HALF_BLOCK_PENALTY, HBM_CAP, HBM_MEM_BW, HBM_TO_DDR_MEM_BW, "
        "HUNDRED_GB, INTRA_NODE_BANDWIDTH, MAX_SIZE, MIN_CW_DIM, QUARTER_BLOCK_PENALTY, "
        "SSD_CAP, SSD_MEM_BW, WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER, "
        "WEIGHTED_KERNEL_MULTIPLIER",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.distributed.planner.constants",
        "POOLING_FACTOR",
    ),
    (
        "torchrec.distributed.planner.enumerators",
        "recsys.compat.planner.constants",
        "DEFAULT_PERF_ESTIMATOR",
    ),
    (
        "torchrec.distributed.planner.estimator.types",
        "recsys.distributed.planner.constants",
        "BIGINT_DTYPE",
    ),
    (
        "torchrec.distributed.planner.estimator.types",
        "recsys.compat.planner.constants",
        "BWD_COMPUTE_MULTIPLIER, DDR_MEM_BW, HBM_MEM_BW, SSD_MEM_BW, "
        "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER, WEIGHTED_KERNEL_MULTIPLIER",
    ),
    (
        "torchrec.distributed.planner.planners",
        "recsys.distributed.planner.constants",
        "BATCH_SIZE",
    ),
    (
        "torchrec.distributed.planner.planners",
        "recsys.compat.planner.constants",
        "MAX_SIZE",
    ),
    (
        "torchrec.distributed.planner.proposers",
        "recsys.compat.planner.constants",
        "MAX_PROPOSALS",
    ),
    (
        "torchrec.distributed.planner.shard_estimators",
        "recsys.distributed.planner.constants",
        "BIGINT_DTYPE, NUM_POOLINGS, UVM_CACHING_RATIO",
    ),
    (
        "torchrec.distributed.planner.storage_reservations",
        "recsys.distributed.planner.constants",
        "BIGINT_DTYPE, POOLING_FACTOR",
    ),
    (
        "torchrec.distributed.planner.types",
        "recsys.distributed.planner.constants",
        "BATCH_SIZE, POOLING_FACTOR",
    ),
    (
        "torchrec.distributed.planner.types",
        "recsys.compat.planner.constants",
        "BWD_COMPUTE_MULTIPLIER, CROSS_NODE_BANDWIDTH, DDR_CAP, DDR_MEM_BW, HBM_CAP, "
        "HBM_MEM_BW, HBM_TO_DDR_MEM_BW, HUNDRED_GB, INTRA_NODE_BANDWIDTH, SSD_CAP, "
        "SSD_MEM_BW, WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER",
    ),
    (
        "torchrec.distributed.planner.utils",
        "math",
        "prod",
    ),
    (
        "torchrec.distributed.planner.utils",
        "recsys.distributed.placement.strategies",
        "placement",
    ),
    # pipelines
    (
        "torchrec.distributed.train_pipeline.train_pipelines",
        "recsys.distributed.train_pipeline.pipelines",
        "EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipeline, "
        "TrainPipelineBase, TrainPipelineFusedSparseDist, TrainPipelineSemiSync, "
        "TrainPipelineSparseDist",
    ),
    (
        "torchrec.distributed.train_pipeline",
        "recsys.distributed.train_pipeline.pipelines",
        "EvalPipelineSparseDist, In, Out, PrefetchTrainPipelineSparseDist, TrainPipeline, "
        "TrainPipelineBase, TrainPipelineContext, TrainPipelineFusedSparseDist, "
        "TrainPipelineSparseDist",
    ),
    (
        "torchrec.distributed.train_pipeline.pipeline_context",
        "recsys.distributed.train_pipeline.pipelines",
        "In, Out, TrainPipelineContext",
    ),
    (
        "torchrec.distributed",
        "recsys.distributed.train_pipeline.pipelines",
        "EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipeline, "
        "TrainPipelineBase, TrainPipelineSparseDist",
    ),
    (
        "torchrec.distributed.train_pipeline",
        "recsys.distributed.train_pipeline.staged",
        "SparseDataDistUtil, StageOut, StagedTrainPipeline",
    ),
    (
        "torchrec.distributed.train_pipeline.train_pipelines",
        "recsys.distributed.train_pipeline.staged",
        "StagedTrainPipeline",
    ),
    (
        "torchrec.distributed.train_pipeline.pipeline_stage",
        "recsys.distributed.train_pipeline.staged",
        "PipelineStage, SparseDataDistUtil, StageOut",
    ),
    (
        "torchrec.distributed.train_pipeline",
        "recsys.distributed.train_pipeline.gradient_accumulation",
        "GradientAccumulationConfig, GradientAccumulationWrapper",
    ),
    (
        "torchrec.distributed.train_pipeline.gradient_accumulation",
        "recsys.distributed.train_pipeline.gradient_accumulation",
        "GradientAccumulationConfig, GradientAccumulationWrapper",
    ),
    (
        "torchrec.distributed.train_pipeline",
        "recsys.fx",
        "Tracer",
    ),
    (
        "torchrec.distributed.train_pipeline.utils",
        "recsys.fx",
        "Tracer",
    ),
    (
        "torchrec.distributed.train_pipeline.tracing",
        "recsys.fx",
        "Tracer",
    ),
    # inference
    (
        "torchrec.inference.state_dict_transform",
        "recsys.inference.state_dict_transform",
        "state_dict_all_gather_keys, state_dict_gather, state_dict_to_device",
    ),
    (
        "torchrec.inference.modules",
        "recsys.inference",
        "QuantEmbeddingBagCollection, QuantEmbeddingCollection, "
        "QuantFeatureProcessedEmbeddingBagCollection, quantize_embeddings, "
        "quantize_inference_model, shard_quant_model",
    ),
    (
        "torchrec.inference.modules",
        "recsys.inference.modules",
        "BatchingMetadata, PredictFactory, PredictModule, QualNameMetadata, "
        "assign_weights_to_tbe, get_table_to_weights_from_tbe, quantize_dense, quantize_feature, "
        "trim_torch_package_prefix_from_typename",
    ),
    (
        "torchrec.inference.model_packager",
        "recsys.inference.model_packager",
        "PredictFactoryPackager, load_config_text, load_pickle_config",
    ),
    ("torchrec.inference.modules", "recsys.inference.quant_prep", "set_pruning_data"),
    (
        "torchrec.distributed.quant_embeddingbag",
        "recsys.inference.quant_sharders",
        "QuantEmbeddingBagCollectionSharder, QuantFeatureProcessedEmbeddingBagCollectionSharder",
    ),
    (
        "torchrec.distributed.quant_embedding",
        "recsys.inference.quant_sharders",
        "QuantEmbeddingCollectionSharder",
    ),
    (
        "torchrec.quant",
        "recsys.inference",
        "QuantEmbeddingBagCollection as EmbeddingBagCollection",
    ),
    (
        "torchrec.quant.embedding_modules",
        "recsys.inference",
        "QuantEmbeddingBagCollection as EmbeddingBagCollection, "
        "QuantEmbeddingCollection as EmbeddingCollection, "
        "QuantFeatureProcessedEmbeddingBagCollection as FeatureProcessedEmbeddingBagCollection",
    ),
    ("torchrec.quant.embedding_modules", "recsys.inference.quantize", "quantize_state_dict"),
    (
        "torchrec.quant.embedding_modules",
        "recsys.inference.quant_prep",
        "quant_prep_customize_row_alignment, quant_prep_enable_cache_features_order, "
        "quant_prep_enable_quant_state_dict_split_scale_bias, "
        "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
    ),
    # datasets, metrics
    (
        "torchrec.datasets.criteo",
        "recsys.datasets.criteo",
        "CAT_FEATURE_COUNT, DAYS, DEFAULT_CAT_NAMES, DEFAULT_COLUMN_NAMES, DEFAULT_INT_NAMES, "
        "DEFAULT_LABEL_NAME, INT_FEATURE_COUNT, TOTAL_TRAINING_SAMPLES",
    ),
    (
        "torchrec.datasets.criteo",
        "recsys.datasets.criteo_binary",
        "InMemoryBinaryCriteoIterDataPipe",
    ),
    (
        "torchrec.datasets.criteo",
        "recsys.datasets.criteo_utils",
        "BinaryCriteoUtils, FREQUENCY_THRESHOLD",
    ),
    ("torchrec.datasets.criteo", "recsys.datasets.rows", "criteo_kaggle, criteo_terabyte"),
    ("torchrec.datasets.criteo", "recsys.datasets.utils", "PATH_MANAGER_KEY"),
    (
        "torchrec.datasets.utils",
        "recsys.compat.datasets",
        "Limit, LoadFiles, ParallelReadConcat, ReadLinesFromCSV, idx_split_train_val, "
        "rand_split_train_val, safe_cast, train_filter, val_filter",
    ),
    ("torchrec.datasets.test_utils.criteo_test_utils", "recsys.compat.testing", "CriteoTest"),
    ("torchrec.optim.test_utils", "recsys.compat.testing", "DummyKeyedOptimizer"),
    ("torchrec.sparse.test_utils", "recsys.compat.testing", "keyed_jagged_tensor_equals"),
    (
        "torchrec.test_utils",
        "recsys.compat.testing",
        "assert_state_buffers_parameters_equal, get_free_port, get_state_buffers_parameters, "
        "init_distributed_single_host, is_asan, is_asan_or_tsan, is_tsan, seed_and_log, "
        "skip_if_asan, skip_if_asan_class",
    ),
    (
        "torchrec.datasets.movielens",
        "recsys.datasets.rows",
        "DEFAULT_MOVIES_COLUMN_NAMES, DEFAULT_RATINGS_COLUMN_NAMES, movielens_20m, movielens_25m",
    ),
    ("torchrec.datasets.random", "recsys.datasets.random", "RandomRecDataset"),
    ("torchrec.datasets.utils", "recsys.datasets.utils", "Batch, PATH_MANAGER_KEY"),
    *(
        (f"torchrec.metrics.{theirs}", f"recsys.{ours}", names)
        for theirs, ours, names in (
            row.split(maxsplit=2) for row in _METRICS.replace("\n  ", " ").splitlines()
        )
    ),
)


@final
class Home(NamedTuple):
    """Where one of our objects lives."""

    module: str
    name: str


def _build_homes() -> dict[str, dict[str, Home]]:
    homes: dict[str, dict[str, Home]] = {}
    for theirs, ours, names in TABLE:
        module = homes.setdefault(theirs, {})
        for parent in _parents(theirs):
            homes.setdefault(parent, {})
        for clause in names.split(", "):
            name, _, alias = clause.partition(" as ")
            assert (alias or name) not in module, f"{theirs} lists {alias or name} twice"
            module[alias or name] = Home(ours, name)
    return homes


def _parents(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


HOMES: dict[str, dict[str, Home]] = _build_homes()
"""The table, unfolded: TorchRec module (parents of modules included) -> name -> ours."""

_FIRST_HOMES: dict[str, Home] = {
    name: home for names in reversed(HOMES.values()) for name, home in names.items()
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
_PIPELINES = "Pipelines do not trace the model: docs/pipelines.md."
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
    "torchrec.distributed.mc_": _HASH,
    "torchrec.distributed.model_tracker": _TRACKER,
    "torchrec.distributed.planner.dry_run": "To plan for another machine, describe it: "
    "docs/planner.md.",
    "torchrec.distributed.planner.enumerators._get_tower_index": "Collections in a tower are "
    "planned as all others.",
    "torchrec.distributed.planner.estimator.": "Set speeds or coefficients, or write a "
    "forward_compute: docs/planner.md.",
    "torchrec.distributed.sharding.": _LAYOUT,
    "torchrec.distributed.train_pipeline.ArgInfo": _PIPELINES,
    "torchrec.distributed.train_pipeline.CallArgs": _PIPELINES,
    "torchrec.distributed.train_pipeline.TrainPipelineSparseDistCompAutograd": "Autograd that is "
    "compiled misses tables that update in backward: use TrainPipelineSparseDist.",
    "torchrec.distributed.train_pipeline.tracing.": _PIPELINES,
    "torchrec.distributed.train_pipeline.utils.": "The pipelines inside are others: "
    "docs/pipelines.md.",
    "torchrec.fx.": "To export a model, call recsys.inference.export_torchscript or export_aoti.",
    "torchrec.modules.hash_mc_": _HASH,
    "torchrec.modules.itep_": "Rows are pruned as a table is quantized: "
    "recsys.inference.quant_prep.set_pruning_data.",
    "torchrec.modules.mc_": _HASH,
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
