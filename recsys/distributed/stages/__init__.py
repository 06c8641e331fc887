"""Stages of a batch in sharded tables. Each stage reads the layout and has no code per strategy.

`input_dist` sends ids to the ranks that own their rows, `lookup` looks them up, `output_dist` and
`sequence_dist` send embeddings back. The state of a batch is its `BatchContext` (`batch`).
"""
