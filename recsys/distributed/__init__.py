"""Placing embedding tables on many devices and moving a batch through them.

The files read in run order: ``types`` (what a plan says) -> ``planner`` (finds one) -> ``layout``
(compiles it) -> ``input_dist`` -> ``lookup`` -> ``output_dist`` (over ``comm``) ->
``embeddingbag`` (the sharded module) -> ``model_parallel`` (a whole model) -> ``checkpoint``.
"""
