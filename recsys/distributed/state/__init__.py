"""Shards of tables and their optimizers, which live longer than a batch.

`table_shards` holds the shards, and `sharded_table` is a whole table in state dicts. `moves` sends
tables to other ranks. `row_updates` applies gradients after backward. `fused_optimizer` is the
optimizer of all tables, with the settings of `fused_params`. `replica_average` averages tables over
groups of ranks.
"""
