"""TorchScript compiles the modules that only TorchRec scripts use, as the modules of the core."""

from __future__ import annotations

from torch import Tensor, nn

from recsys.compat.dlrm_variants import DLRM_Projection
from recsys.compat.modules import PositionWeightedProcessor
from recsys.compat.sparse import KTRegroupAsDict
from recsys.sparse import KeyedJaggedTensor
from tests.compat.again import again
from tests.sparse import test_script_modules as core
from tests.sparse.test_script_modules import bags


class Regrouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.regroup = bags(), KTRegroupAsDict([["user", "film"], ["film"]], ["a", "b"])

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.regroup([self.bags(features)])
        return found


def projection() -> nn.Module:
    return DLRM_Projection(bags(), 3, [8, 8], [8, 1], [16, 8], [16, 8])


test_models_are_compiled_as_they_are = again(
    core.test_models_are_compiled_as_they_are,
    ("build", "num_dense"),
    {
        "regrouped": (Regrouped, 0),
        "processor": (lambda: PositionWeightedProcessor({"user": 4}), 0),
        "projection": (projection, 3),
    },
)
