"""Recommendation models with huge embedding tables, in PyTorch.

The rooms, in the order in which a batch walks through them; each imports only from those before it:

``kernels`` (fused lookups on plain tensors) -> ``sparse`` (jagged data) -> ``optim`` -> ``modules``
(authored on one device) -> ``distributed`` (placed on many) -> ``inference`` (quantized, exported).
"""

__version__ = "0.1.0.dev0"
