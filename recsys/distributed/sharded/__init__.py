"""Engine of sharded modules; users name them by `embedding`, `embeddingbag` and their neighbours.

`sharder` has the base classes of sharded modules and of their sharders, `collection` a sharded
collection of tables. `collection_stages` builds its stages from the settings of `table_options`,
and `reshard` checks plans that move tables. `module_tree` finds modules in a model, and `devices`
chooses the device of a rank.
"""
