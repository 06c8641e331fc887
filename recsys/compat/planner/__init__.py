"""Planner components that users extend, under TorchRec's names.

`types` has the base classes and the data that they process, `topology` a machine with mutable
memory. `enumerators`, `shard_estimators`, `proposers`, `partitioners`, `perf_models`,
`storage_reservations` and `stats` contain the components. `planners` runs them with the costs and
the memory model of `recsys.distributed.planner`.
"""
