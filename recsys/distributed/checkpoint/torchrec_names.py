"""TorchRec's names of optimizer state, in files of `torch.distributed.checkpoint`.

The state of a table contains the table's name again:
`optimizer.state.<table>.weight.<table>.<key>`. If an optimizer has only one state, such as the sum
of Adagrad, its name is `momentum1`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_STATE = re.compile(r"(optimizer\.state\.(?:.+\.)?([^.]+)\.weight)\.\2\.([^.]+)")


def own_names(saved: Iterable[str], live: Collection[str]) -> dict[str, str]:
    """Return this model's names of values that TorchRec saved under other names.

    Args:
        saved: Names in the checkpoint.
        live: Names of the loading model, `model.<name>` and `optimizer.state.<parameter>.<key>`.

    Example:
        >>> own_names(
        ...     ["optimizer.state.ebc.t1.weight.t1.momentum1"],
        ...     ["model.ebc.t1.weight", "optimizer.state.ebc.t1.weight.sum"],
        ... )
        {'optimizer.state.ebc.t1.weight.t1.momentum1': 'optimizer.state.ebc.t1.weight.sum'}
    """
    names = {}
    for name in saved:
        if match := _STATE.fullmatch(name):
            param, _, key = match.groups()
            if key == "momentum1":
                only = [key for key in ("sum", "momentum_buffer") if f"{param}.{key}" in live]
                key = only[0] if only else key
            names[name] = f"{param}.{key}"
    return names
