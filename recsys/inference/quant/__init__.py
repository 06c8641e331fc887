"""Quantized embedding collections; public names are in `recsys.inference`."""

import sys

from recsys.inference.quant import lookup, modules, rows

# pickles of quantized models of recsys 0.1 name the classes by these paths
_OLD_PATHS = {"quant_modules": modules, "quantized_tables": lookup, "served_indexes": rows}
sys.modules |= {f"recsys.inference.{path}": module for path, module in _OLD_PATHS.items()}
