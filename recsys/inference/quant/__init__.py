"""Quantized embedding collections; public names are in `recsys.inference`."""
