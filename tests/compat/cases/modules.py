"""Models and modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.compat.answers import raises


def _batch() -> Any:
    from torchrec import KeyedJaggedTensor

    torch.manual_seed(2)
    values, lengths = torch.randint(0, 10, (7,)), torch.tensor([2, 0, 1, 1, 3, 0])
    return KeyedJaggedTensor(["f", "g"], values, lengths=lengths)


def _tables() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"]),
            EmbeddingBagConfig(name="u", num_embeddings=10, embedding_dim=4, feature_names=["g"]),
        ]
    )


def _filled(module: nn.Module) -> nn.Module:
    """Set the same weights on both sides, for any initial ones."""
    generator = torch.Generator().manual_seed(1)
    for _, parameter in sorted(module.named_parameters()):
        parameter.data = torch.rand(parameter.shape, generator=generator) - 0.5
    return module


def _input() -> Any:
    return SimpleNamespace(
        idlist_features=_batch(),
        float_features=torch.rand(3, 2),
        label=torch.tensor([1.0, 0.0, 1.0]),
    )


def pairs_of_features() -> Any:
    from torchrec.models.dlrm import choose

    return [choose(n, k) for n, k in ((5, 2), (27, 2), (3, 3), (2, 3), (0, 0))]


def dlrm_of_one_input() -> Any:
    from torchrec.models.dlrm import DLRMWrapper

    model = _filled(DLRMWrapper(_tables(), 2, [4], [3, 1]))
    given = _input()
    return [model(given), model.eval()(given), list(model.state_dict())]


def deepfm_of_one_input() -> Any:
    from torchrec.models.deepfm import SimpleDeepFMNNWrapper

    model = _filled(SimpleDeepFMNNWrapper(2, _tables(), 3, 4))
    given = _input()
    return [model(given), model.eval()(given), list(model.state_dict())]


def dlrm_with_attention() -> Any:
    from torchrec.models.experimental.transformerdlrm import DLRM_Transformer

    model = _filled(DLRM_Transformer(_tables(), 2, [4], [3, 1], nhead=2, ntransformer_layers=1))
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    return [model.eval()(torch.ones(3, 2), _batch()), shapes]


def interaction_by_attention() -> Any:
    from torchrec.models.experimental.transformerdlrm import InteractionTransformerArch

    arch = _filled(InteractionTransformerArch(2, 4, 2, 2)).eval()
    dense = torch.rand(3, 4)
    alone = InteractionTransformerArch(0, 4, 2, 1)(dense, torch.rand(3, 0, 4))
    return [arch(dense, torch.rand(3, 2, 4)), torch.equal(alone, dense)]


def position_weights_by_feature() -> Any:
    from torchrec.modules.feature_processor import PositionWeightedModule

    module = PositionWeightedModule({"f": 4})
    ones = module.state_dict()
    _filled(module)
    weighted = module(_batch().to_dict())
    return [ones, weighted["f"].weights(), weighted["g"].weights_or_none()]


def positions_in_bags() -> Any:
    from torchrec.modules.feature_processor import offsets_to_range_traceble

    return offsets_to_range_traceble(torch.tensor([0, 2, 2, 5]), torch.rand(5))


def function_after_the_first_pass() -> Any:
    from torchrec.modules.lazy_extension import lazy_apply

    model, calls = nn.Sequential(nn.LazyLinear(2)), []
    lazy_apply(model, lambda module: calls.append(type(module).__name__))
    counts = [len(calls)]
    for _ in range(2):
        model(torch.rand(1, 3))
        counts.append(len(calls))
    return [calls, counts]


def modules_from_modules() -> Any:
    from torchrec.modules.utils import (
        check_module_output_dimension,
        construct_modulelist_from_single_module,
        convert_list_of_modules_to_modulelist,
        extract_module_or_tensor_callable,
        get_module_output_dimension,
    )

    linear = nn.Linear(3, 4)
    copies = construct_modulelist_from_single_module(linear, (2, 3))
    nested = convert_list_of_modules_to_modulelist([[linear, linear], [linear, linear]], (2, 2))
    return [
        get_module_output_dimension(linear, 3),
        [check_module_output_dimension([linear, linear], 3, out) for out in (4, 5)],
        [len(copies), len(copies[0]), copies[0][0] is linear, float(copies[1][2].bias.abs().sum())],
        torch.equal(copies[0][0].weight, copies[0][1].weight),
        [type(nested[0]).__name__, nested[1][0] is linear],
        extract_module_or_tensor_callable(lambda: linear) is linear,
        extract_module_or_tensor_callable(torch.relu) is torch.relu,
        raises(lambda: convert_list_of_modules_to_modulelist([linear], (2,))),
    ]


def weights_of_glorot() -> Any:
    from torchrec.modules.utils import init_mlp_weights_xavier_uniform

    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    torch.manual_seed(3)
    return model.apply(init_mlp_weights_xavier_uniform).state_dict()


def pooled_embeddings_of_distinct_samples() -> Any:
    from torchrec.modules.embedding_modules import (
        process_pooled_embeddings,
        reorder_inverse_indices,
    )

    inverse = (["a", "b", "c"], torch.randint(0, 2, (3, 4)))
    chosen = reorder_inverse_indices(inverse, ["c", "a"])
    pooled = process_pooled_embeddings([torch.rand(2, 3), torch.rand(2, 2)], chosen)
    return [chosen, pooled, reorder_inverse_indices(None, ["a"]).numel()]


def collections_without_tables() -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingCollection

    rows = EmbeddingCollection(tables=[])
    return [list(rows(_batch())), rows.state_dict(), EmbeddingBagCollection(tables=[]).state_dict()]


def configs_that_clients_read() -> Any:
    from torchrec import EmbeddingCollection, EmbeddingConfig

    config = EmbeddingConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
    rows, bags = EmbeddingCollection(tables=[config]), _tables()
    return [
        [c.name for c in rows._embedding_configs],
        [c.name for c in bags._embedding_bag_configs],
        rows.embedding_names_by_table(),
    ]


def table_of_an_engine() -> Any:
    from torchrec.distributed.embedding_types import EmbeddingTableConfig

    config = EmbeddingTableConfig(num_embeddings=9, embedding_dim=4, name="t", is_weighted=True)
    return [config.pooling, config.is_weighted, config.has_feature_processor, config.data_type]


def signatures_that_stay_compatible() -> Any:
    import inspect

    from torchrec.schema.utils import is_signature_compatible

    def of(text: str) -> inspect.Signature:
        found: dict[str, Any] = {}
        exec(f"def function({text}: pass", found)
        return inspect.signature(found["function"])

    before = "self, a: int, b: int = 1)"
    after = [
        before,
        "self, a: int, b: int = 1, c: int = 2)",
        "self, a: int, b: int = 1, *, c: int)",
        "self, a: int, b: int = 1, *args, **kwargs)",
        "self, a: int)",
        "self, a: int, z: int = 1)",
        "self, a: int, b: int = 5)",
        "self, a: int, b: int)",
        "self, a: int, b: str = 1)",
        "self, a: int, *, b: int = 1)",
        "self, a: int, b: int = 1) -> int",
        "self, a: int, c: int = 3, b: int = 1)",
    ]
    by_keyword = ["*, a=1, b=1)", "*, b=1, a=1)", "*, c, a=1, b=1)", "*, a=1)", "a=1, b=1)"]
    numbers = [
        "a, *args, **kw)",
        "a, *more, **others)",
        "a, **kw)",
        "a, *args)",
        "a, b=1, *c, **d)",
    ]
    return [
        [is_signature_compatible(of(texts[0]), of(text)) for text in texts]
        for texts in ([before, *after], by_keyword, numbers)
    ]


def lazy_modules() -> Any:
    from torchrec.modules.lazy_extension import LazyModuleExtensionMixin, lazy_apply

    class Scaled(LazyModuleExtensionMixin, torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.UninitializedParameter()
            self.seen: list[Any] = []

        def initialize_parameters(self, x: Any, *, scale: float = 1.0) -> None:
            self.seen.append([list(x.shape), scale])
            if self.has_uninitialized_params():
                with torch.no_grad():
                    self.weight.materialize((x.shape[1],))
                    self.weight.fill_(scale)

        def forward(self, x: Any, *, scale: float = 1.0) -> Any:
            return x * self.weight

    class Plain(LazyModuleExtensionMixin, torch.nn.Module):
        def initialize_parameters(self, x: Any) -> None: ...

        def forward(self, x: Any) -> Any:
            return x

    names: list[str] = []
    module, outer = Scaled(), torch.nn.Sequential(Scaled(), torch.nn.Linear(3, 1))
    early = [raises(lambda one=one: one.apply(print)) for one in (module, outer, Plain())]
    lazy_apply(outer, lambda one: names.append(type(one).__name__))
    outer(torch.rand(2, 3))
    outer(torch.rand(2, 3))
    values = [module(torch.ones(2, 3), scale=2.0), module(torch.ones(2, 3))]
    applied = module.apply(lambda one: names.append("late")) is module
    return [early, values, module.seen, applied, names, type(module).__name__]
