"""``import torchrec`` after ``install()``: ours where there is one, a helpful error where not."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import recsys
from recsys.compat import torchrec as compat
from recsys.sparse import KeyedJaggedTensor

SCRIPT = """
import sys

import torch
import torch.distributed as dist
import torchrec
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name="t", embedding_dim=8, num_embeddings=20, feature_names=["a", "b"]
            )
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = torch.nn.Linear(16, 1)

    def forward(self, features):
        pooled = self.ebc(features)
        return self.over(torch.cat([pooled["a"], pooled["b"]], dim=1)).squeeze(1)


def main(store):
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
    model = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.1})
    model = DistributedModelParallel(model, device=torch.device("cpu"))
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    features = KeyedJaggedTensor.from_lengths_sync(
        keys=["a", "b"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 0, 2])
    )
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        logits, labels = model(features), torch.tensor([0.0, 1.0])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    dist.destroy_process_group()
    assert losses[-1] < 0.8 * losses[0], losses
    print(*sorted(model.state_dict()), torchrec.distributed.ShardingEnv.__module__)


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture
def torchrec(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name in [m for m in sys.modules if m.partition(".")[0] == "torchrec"]:
        monkeypatch.delitem(sys.modules, name)  # a real one that another test has imported
    compat.install()
    yield importlib.import_module("torchrec")
    compat.uninstall()


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_runs_unchanged(tmp_path: Path) -> None:
    script, store = tmp_path / "train.py", tmp_path / "store"
    script.write_text(SCRIPT)
    last_line = run("-m", "recsys.compat", str(script), str(store)).splitlines()[-1]
    assert last_line == (
        "ebc.embedding_bags.t.weight over.bias over.weight recsys.distributed.ranks.env"
    )


def test_a_script_runs_with_two_more_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    two_lines = "import recsys.compat.torchrec as compat\ncompat.install()\n"
    script.write_text(two_lines + SCRIPT)
    assert "over.weight" in run(str(script), str(tmp_path / "store"))


def test_the_snippets_of_the_guide_run() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    collection, error = run("-c", "".join(snippets)).splitlines()
    assert collection == "recsys.modules.embedding_bag_collection"
    assert "Topology(world_size, compute_device, hbm_cap=..., ...)" in error


def test_modules_hold_our_objects(torchrec: Any) -> None:
    import torchrec.distributed.planner as planner
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    assert KeyedJaggedTensor is torchrec.KeyedJaggedTensor is recsys.KeyedJaggedTensor
    assert planner.Topology is torchrec.distributed.planner.types.Topology
    assert torchrec.quant.EmbeddingBagCollection is not torchrec.EmbeddingBagCollection
    assert torchrec.__version__ == "1.8.0+recsys"


def test_a_module_serves_what_others_define(torchrec: Any) -> None:
    """Modules have the names that they import from each other, as TorchRec's do."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollection
    from torchrec.distributed.shard import get_default_sharders
    from torchrec.metrics.rec_metric import RecComputeMode, RecTaskInfo

    assert EmbeddingBagCollection is torchrec.EmbeddingBagCollection  # not the quantized one
    assert get_default_sharders is torchrec.distributed.sharding_plan.get_default_sharders
    assert RecTaskInfo is torchrec.metrics.metrics_config.RecTaskInfo
    assert RecComputeMode is torchrec.metrics.metrics_config.RecComputeMode
    assert isinstance(torchrec.distributed.shard, ModuleType)  # before the function of that name


def test_a_name_of_another_object_is_not_served(torchrec: Any) -> None:
    assert torchrec.distributed.embedding.EmbeddingCollectionContext
    assert not hasattr(torchrec.modules.embedding_configs, "ShardingType")


def test_importing_fx_is_importing_ours(torchrec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With which TorchScript compiles the containers, though no name of it is read."""
    monkeypatch.delitem(sys.modules, "recsys.fx", raising=False)
    importlib.import_module("torchrec.fx")
    assert "recsys.fx" in sys.modules


def test_star_import(torchrec: Any) -> None:
    names: dict[str, object] = {}
    exec("from torchrec.optim import *", names)
    assert names["KeyedOptimizer"] is recsys.optim.KeyedOptimizer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "from torchrec.distributed.types import Topolgy",
            "no counterpart of torchrec.distributed.types.Topolgy. "
            "The nearest is torchrec.distributed.planner.types.Topology.",
        ),
        (
            "from torchrec import EmbeddingBagColection",
            "The nearest is torchrec.EmbeddingBagCollection.",
        ),
        (
            "from torchrec.sparse.jagged_tensor import _zxqj",
            "no counterpart of torchrec.sparse.jagged_tensor._zxqj. "
            "No name is similar. All names are in recsys/compat/names.txt. "
            "See docs/migrating.md for the differences.",
        ),
        (
            "from torchrec.distributed.train_pipeline.utils import _rewrite_model",
            "no counterpart of torchrec.distributed.train_pipeline.utils._rewrite_model. The",
        ),
        (
            "from torchrec.modules.mc_modules import MCHEvictionPolicy",
            "no counterpart of torchrec.modules.mc_modules.MCHEvictionPolicy. A table with ids=",
        ),
        ("import torchrec.github", "no counterpart of torchrec.github."),
        ("import torchrec.github.scripts", "no counterpart of torchrec.github."),
    ],
)
def test_missing_names_do_not_import(torchrec: Any, statement: str, message: str) -> None:
    with pytest.raises(ImportError) as error:
        exec(statement)
    assert message in str(error.value)


def test_missing_attributes(torchrec: Any) -> None:
    with pytest.raises(AttributeError, match=r"no counterpart of torchrec\.optim\.Lion"):
        torchrec.optim.Lion
    assert not hasattr(torchrec, "nothing")


def test_real_torchrec_already_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ModuleType("torchrec")
    real.__file__ = "/site-packages/torchrec/__init__.py"
    monkeypatch.setitem(sys.modules, "torchrec", real)
    with pytest.raises(
        ImportError, match=r"must run before anything imports TorchRec; received .*site-packages"
    ):
        compat.install()
    assert not compat.is_installed()


def test_install_twice_and_uninstall(torchrec: Any) -> None:
    before = list(sys.meta_path)
    compat.install()
    assert sys.meta_path == before
    compat.uninstall()
    assert not compat.is_installed()
    assert not [m for m in sys.modules if m.partition(".")[0] == "torchrec"]
    compat.uninstall()


_SHOWS_ITSELF = """
import json
import sys

from . import beside

spec = sys.modules["__main__"].__spec__
print(json.dumps([__name__, sys.argv, sys.path[0], __file__, spec.name, beside.VALUE]))
{more}
"""


def test_a_module_runs_as_by_python_itself(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "beside.py").write_text("VALUE = 7")
    (package / "plain.py").write_text(_SHOWS_ITSELF.format(more=""))
    (package / "__main__.py").write_text(_SHOWS_ITSELF.format(more="import torchrec"))

    def output(*arguments: str) -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-m", *arguments, "--lr", "0.1", "-m"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(Path(recsys.__file__).parents[1])},
        )
        assert done.returncode == 0, done.stderr
        found: list[Any] = json.loads(done.stdout.splitlines()[0])
        return found

    expected = output("package.plain")
    assert output("recsys.compat", "-m", "package.plain") == expected
    assert expected[1][1:] == ["--lr", "0.1", "-m"]
    found = output("recsys.compat", "-m", "package")
    assert found[4:] == ["package.__main__", 7]


@pytest.mark.parametrize("arguments", [[], ["-m"], ["--help"]])
def test_usage_without_a_script(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "recsys.compat", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "usage: python -m recsys.compat SCRIPT" in done.stderr
    assert "python -m recsys.compat -m MODULE" in done.stderr


def test_a_batch_on_meta_has_equal_numbers_of_values() -> None:
    keys, lengths = ["a", "b", "c"], torch.ones(6, dtype=torch.int64, device="meta")
    values = torch.empty(8, device="meta")
    try:
        compat.install()
        kjt = KeyedJaggedTensor(keys, values, lengths=lengths)
        assert kjt.length_per_key() == [4, 2, 2]
        assert kjt.offset_per_key() == [0, 4, 6, 8]
        assert [part.values().shape for part in kjt.split([1, 0, 2])] == [(4,), (0,), (4,)]
        assert kjt.permute([2, 0, 0]).values().shape == (10,)
        assert kjt["b"].values().shape == (2,)
        assert [kjt.to_dict()[key].values().numel() for key in keys] == [4, 2, 2]
        assert KeyedJaggedTensor([], values[:0], lengths=lengths[:0]).length_per_key() == []
        known = KeyedJaggedTensor(keys, values, lengths=lengths, length_per_key=[1, 3, 4])
        assert known.length_per_key() == [1, 3, 4]
    finally:
        compat.uninstall()
    with pytest.raises(ValueError, match=r"length_per_key needs .*meta device"):
        KeyedJaggedTensor(keys, values, lengths=lengths).length_per_key()


def test_the_package_alone_reaches_the_install() -> None:
    program = "import recsys; print(recsys.compat.torchrec.install.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "install\n", done.stderr
