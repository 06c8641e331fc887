"""Deletion of values, such as users who ask for it: from a model, and from older files.

`values` converts values to rows and ids, `forget` removes them from a model that trains, and
`find_values` lists the files that still have them.
"""

from recsys.inference.deletion.find_values import FoundValues, ValuesReport, find_values
from recsys.inference.deletion.forget import forget

__all__ = ["FoundValues", "ValuesReport", "find_values", "forget"]
