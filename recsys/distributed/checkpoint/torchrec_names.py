"""What TorchRec calls the optimizer's state of a table, in files of `torch.distributed.checkpoint`.

The state of a table has the table's name once more: `optimizer.state.<table>.weight.<table>.<key>`.
The only state that an optimizer keeps, such as the sum of Adagrad, is called `momentum1`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_STATE = re.compile(r"(optimizer\.state\.(?:.+\.)?([^.]+)\.weight)\.\2\.([^.]+)")


def own_names(saved: Iterable[str], live: Collection[str]) -> dict[str, str]:
    """Return by what names this model has the values that TorchRec saved under others.

    Args:
        saved: names in the checkpoint.
        live: of the model that loads, `model.<name>` and `optimizer.state.<parameter>.<key>`.

    Example:
        >>> own_names(
        ...     ["optimizer.state.ebc.t1.weight.t1.momentum1"],
        ...     ["model.ebc.t1.weight", "optimizer.state.ebc.t1.weight.sum"],
        ... )
        {'optimizer.state.ebc.t1.weight.t1.momentum1': 'optimizer.state.ebc.t1.weight.sum'}
    """
    found = {}
    for name in saved:
        if match := _STATE.fullmatch(name):
            param, _, key = match.groups()
            if key == "momentum1":
                only = [key for key in ("sum", "momentum_buffer") if f"{param}.{key}" in live]
                key = only[0] if only else key
            found[name] = f"{param}.{key}"
    return found
