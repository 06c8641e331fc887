"""One batch on its way through sharded tables; each stage reads the layout and knows no strategy.

`input_dist` (over `routes` and `bags`) brings ids to the ranks that own their rows,
`lookup` looks them up, `output_dist` or `sequence_dist` brings embeddings back. What belongs
to a batch is its `BatchContext`, which `input_dist` starts.
"""
