"""Dense parts captured as graphs train as before; a stand-in replays them, as no GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from dlrm.graphed import graph_dense
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from recsys.datasets.random import RandomRecDataset
from recsys.datasets.utils import Batch
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward, in_backward_optimizer_filter
from tests.ranks import RankPool

SCRIPT = Path(__file__).parents[2] / "examples" / "dlrm" / "train.py"
CPU, SIZE, DENSE = torch.device("cpu"), 4, 3
SIZES = (SIZE, SIZE, 3, SIZE, 1, SIZE)  # sizes 3 and 1 do not fit


class _Graph:
    """A part with one place for each input, output and gradient, as a CUDA graph has."""

    def __init__(self, part: nn.Module, given: tuple[Tensor, ...]) -> None:
        assert not part._forward_hooks
        self.replays, self._call = 0, part.forward
        self._inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in given]
        self._parameters = list(part.parameters())
        self._output = part.forward(*self._inputs)
        self._shown = self._output.detach().clone()
        self._read = [t for t in (*self._inputs, *self._parameters) if t.requires_grad]
        found = torch.autograd.grad(self._output, self._read, torch.ones_like(self._output))
        self._gradients = [gradient.clone() for gradient in found]

    def replay(self, *given: Tensor) -> Tensor:
        """Overwrite the output of the last replay; inputs may broadcast, as on a GPU."""
        graph = self

        class Replay(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Tensor) -> Tensor:
                for own, new in zip(graph._inputs, inputs, strict=False):
                    own.data.copy_(new)
                with torch.enable_grad():
                    graph._output = graph._call(*graph._inputs)
                graph.replays += 1
                return graph._shown.copy_(graph._output.detach()).detach()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
                found = torch.autograd.grad(graph._output, graph._read, gradient)
                for own, new in zip(graph._gradients, found, strict=True):
                    own.copy_(new)
                left = iter(graph._gradients)
                inputs = (*graph._inputs, *graph._parameters)
                return tuple(next(left).detach() if t.requires_grad else None for t in inputs)

        return Replay.apply(*given, *self._parameters)  # type: ignore[no-any-return,no-untyped-call]


def _stand_in(
    graphs: list[_Graph], parts: tuple[nn.Module, ...], samples: tuple[tuple[Tensor, ...], ...]
) -> None:
    """Does what `torch.cuda.make_graphed_callables` does to modules."""

    def forward(part: nn.Module, graph: _Graph, eager: Callable[..., Tensor], *x: Tensor) -> Tensor:
        return graph.replay(*x) if part.training else eager(*x)

    for part, given in zip(parts, samples, strict=True):
        graphs.append(_Graph(part, given))
        part.forward = partial(forward, part, graphs[-1], part.forward)


def _model() -> DLRM:
    tables = [EmbeddingBagConfig(10, 8, f"t_{f}", feature_names=[f]) for f in ("a", "b")]
    torch.manual_seed(0)
    model = DLRM(EmbeddingBagCollection(tables=tables), DENSE, [8, 8], [8, 1])
    apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": 0.1})
    return model


def _batch(step: int, size: int) -> Batch:
    seed = 10 * step + (dist.get_rank() if dist.is_initialized() else 0)
    data = RandomRecDataset(
        ["a", "b"], size, hash_size=10, num_dense=DENSE, num_batches=1, manual_seed=seed
    )
    return next(iter(data))


def _train(is_graphed: bool) -> tuple[list[Tensor], list[Tensor], list[int]]:
    model, graphs = _model(), list[_Graph]()
    sharded = DistributedModelParallel(
        DLRMTrain(model), device=CPU, init_data_parallel=not is_graphed
    )
    if is_graphed:
        stand_in = partial(_stand_in, graphs)
        with (
            mock.patch.object(torch.cuda, "is_available", return_value=True),
            mock.patch.object(torch.cuda, "make_graphed_callables", stand_in),
        ):
            graph_dense(model, torch.zeros(SIZE, DENSE))
        sharded.init_data_parallel()
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = torch.optim.Adam(dense.values(), lr=0.01)
    seen = []
    for step, size in enumerate(SIZES):
        optimizer.zero_grad()
        loss, (_, logits, _) = sharded(_batch(step, size))
        loss.backward()
        optimizer.step()
        seen += [loss.detach(), logits.clone()]
        sharded.eval()
        with torch.no_grad():
            seen.append(sharded(_batch(step, SIZE))[0])
        sharded.train()
    wrapped = isinstance(sharded._dmp_wrapped_module, DistributedDataParallel)
    assert wrapped == (dist.is_initialized() and dist.get_world_size() > 1)
    return seen, [p.detach() for p in dense.values()], [graph.replays for graph in graphs]


def _train_both() -> None:
    eager, graphed = _train(False), _train(True)
    for mine, theirs in zip(eager[:2], graphed[:2], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert graphed[2] == [SIZES.count(SIZE)] * 3  # in training only, and where the size fits


def test_graphed_parts_train_as_before_on_one_process() -> None:
    _train_both()


def test_graphed_parts_train_as_before_under_ddp(ranks: RankPool) -> None:
    ranks(2, _train_both)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(RuntimeError, match="needs a CUDA device; torch sees"):
        graph_dense(_model(), torch.zeros(SIZE, DENSE))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--graph-dense", "--no-tf32"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--graph-dense needs a CUDA device; torch sees none" in done.stderr
