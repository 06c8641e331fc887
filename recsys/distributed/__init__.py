"""Placing embedding tables on many devices and moving a batch through them.

The files read in run order: ``types`` (what a plan says) -> ``planner`` (finds one) -> ``layout``
(compiles it) -> ``input_dist`` -> ``lookup`` -> ``output_dist`` or ``sequence_dist`` (both over
``exchange`` and ``comm``) -> ``embeddingbag`` and ``embedding`` (the sharded modules, over
``sharded_collection``) -> ``model_parallel`` (a whole model) -> ``checkpoint``.
"""
