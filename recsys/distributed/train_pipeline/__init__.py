"""Who moves batches through a sharded model, and when.

`ahead` sends the inputs of a model's modules together; `even_batches` ends an epoch on all
ranks when one runs out of data.
"""
