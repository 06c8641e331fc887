"""Placing embedding tables on many devices and moving a batch through them.

The files read in run order: ``types`` (what a plan says) -> ``planner`` (finds one) or
``sharding_plan`` (written by hand) -> ``strategies`` (rectangles) -> ``layout`` (compiles them;
``plan_layout``, ``traffic`` and ``layout_plot`` show it) -> ``input_dist`` (over
``batch_segments``, ``id_routes``, ``weight_gradients``) -> ``lookup`` and ``row_updates`` ->
``output_dist`` or ``sequence_dist`` (over ``exchange``, ``comm``, ``wire``) -> ``embeddingbag``,
``embedding`` and ``fp_embeddingbag`` (the sharded modules, over ``sharded_collection``) ->
``shard`` and ``model_parallel`` (a whole model; ``ahead``) -> ``even_batches``, ``checkpoint``.
"""
