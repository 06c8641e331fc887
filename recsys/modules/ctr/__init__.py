"""Models of clicks and of several tasks: each reads dense features and ids, and returns logits.

They have the arguments of `DLRM`, `forward(dense_features, sparse_features)`, so `DLRMTrain` and
`recsys.training.Trainer` train them, and `DistributedModelParallel` shards their tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:  # _HOMES for editors and type checkers
    from recsys.modules.ctr.autoint import AutoInt
    from recsys.modules.ctr.dcn_v2 import DCNV2
    from recsys.modules.ctr.din import DIN
    from recsys.modules.ctr.final_mlp import FinalMLP
    from recsys.modules.ctr.multi_task import PLE, MMoE, MultiTask

__all__ = ["DCNV2", "DIN", "PLE", "AutoInt", "FinalMLP", "MMoE", "MultiTask"]

_HOMES = {
    "AutoInt": "modules.ctr.autoint",
    "DCNV2": "modules.ctr.dcn_v2",
    "DIN": "modules.ctr.din",
    "FinalMLP": "modules.ctr.final_mlp",
    "MMoE": "modules.ctr.multi_task",
    "MultiTask": "modules.ctr.multi_task",
    "PLE": "modules.ctr.multi_task",
}

__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
