"""The dense parts of a DLRM as CUDA graphs: one launch per direction instead of one per kernel.

With small batches a GPU waits for the host, which launches the kernels of the MLPs one by one. The
lookup and the exchanges are not captured, because the number of ids differs from batch to batch.
`python -m benchmarks.gpu` measures a step with and without graphs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from recsys.modules.dlrm import DLRM


def graph_dense(model: DLRM, dense_features: Tensor) -> None:
    """Let the dense parts of a model train as CUDA graphs, in place.

    Call it when they are on the GPU, before DistributedDataParallel wraps them, because its hooks
    must stay outside the graphs: build with `init_data_parallel=False`, call this, then
    `init_data_parallel()`. Batches of another size, and `eval()`, run as before. Graphs read the
    parameters in place: load into them, do not replace or move them. Each step overwrites the
    outputs and gradients of the previous step: copy outputs that you keep longer, such as logits,
    and clear gradients in each step.

    Args:
        model: its tables may be sharded.
        dense_features: `[B, dense_in_features]` of any values, on the GPU.

    Raises:
        RuntimeError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            "graph_dense needs a CUDA device; torch sees none. Leave --graph-dense out on a CPU."
        )
    parts = model.dense_arch, model.inter_arch, model.over_arch
    tables = model.sparse_arch
    with torch.no_grad():
        dense = model.dense_arch(dense_features)
        embedded = dense.new_zeros(len(dense), tables.F, tables.D)
        pairs = model.inter_arch(dense, embedded)
    for tensor in (dense, embedded, pairs):  # as in training
        tensor.requires_grad_()
    samples = (dense_features,), (dense, embedded), (pairs,)
    plain = [part.forward for part in parts]
    torch.cuda.make_graphed_callables(parts, samples)
    for part, eager, given in zip(parts, plain, samples, strict=True):
        shapes = [tensor.shape for tensor in given]
        part.forward = _where_shapes_fit(shapes, part.forward, eager)


def _where_shapes_fit(
    shapes: list[torch.Size], graphed: Callable[..., Tensor], eager: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Call the graph only with the captured shapes; it would repeat a smaller batch."""

    def forward(*given: Tensor) -> Tensor:
        fits = [tensor.shape for tensor in given] == shapes
        return (graphed if fits else eager)(*given)

    return forward
