"""Batch types: the inputs and outputs of embedding collections.

`JaggedTensor` is a batch of variable-length lists, `KeyedJaggedTensor` has the jagged tensors of
several features in one buffer, and `KeyedTensor` has the pooled embeddings of several features.
Constructors make O(1) checks and never wait for a GPU. `validate()` checks all contents;
`set_debug(True)` or `RECSYS_DEBUG=1` calls it at every construction.
"""

from recsys.base.streamable import Pipelineable
from recsys.sparse import tree  # noqa: F401  (registers the classes with torch's pytrees)
from recsys.sparse.columns import from_columns
from recsys.sparse.equality import jt_is_equal, kjt_is_equal
from recsys.sparse.hashing import hash_ids
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.script import add_forms
from recsys.sparse.script_modules import watch_script
from recsys.sparse.validate import is_debug, set_debug
from recsys.sparse.value_checks import finish_value_checks, has_value_checks, set_value_checks

__all__ = [
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "finish_value_checks",
    "from_columns",
    "has_value_checks",
    "hash_ids",
    "is_debug",
    "jt_is_equal",
    "kjt_is_equal",
    "set_debug",
    "set_value_checks",
]

for _kind in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    Pipelineable.register(_kind)
add_forms()
watch_script()
