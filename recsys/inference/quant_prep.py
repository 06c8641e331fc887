"""Public path of options of quantized collections, which are in `recsys.inference.quant`."""

from recsys.inference.quant.options import (
    quant_prep_customize_row_alignment,
    quant_prep_enable_cache_features_order,
    quant_prep_enable_quant_state_dict_split_scale_bias,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
    set_pruning_data,
)

__all__ = [
    "quant_prep_customize_row_alignment",
    "quant_prep_enable_cache_features_order",
    "quant_prep_enable_quant_state_dict_split_scale_bias",
    "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
    "set_pruning_data",
]
