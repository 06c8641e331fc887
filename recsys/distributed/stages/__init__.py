"""One batch on its way through sharded tables; each stage reads the layout and knows no strategy.

``input_dist`` (over ``batch_segments``, ``id_routes``, ``weight_gradients``) brings ids to the
ranks that own their rows, ``lookup`` looks them up, ``output_dist`` or ``sequence_dist`` (over
``exchange``) brings embeddings back. ``awaitable`` is what is under way.
"""
