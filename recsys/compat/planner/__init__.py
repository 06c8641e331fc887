"""Parts that a planner's users write themselves, under TorchRec's names.

`types` has the classes to extend and what they work on, `topology` a machine whose memory can
be taken from; `enumerators`, `shard_estimators`, `proposers`, `partitioners`,
`perf_models`, `storage_reservations` and `stats` are the parts that there are, and
`planners` runs them over the costs and the memory model of `planner`.
"""
