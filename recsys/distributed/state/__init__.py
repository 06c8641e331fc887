"""What outlives a batch: the shards of tables and their optimizers.

`table_shards` holds them and `sharded_table` is a table as a whole to checkpoints;
`row_updates` applies what backward left, `fused_optimizer` shows what it applied itself, with
the settings of `fused_params`.
"""
