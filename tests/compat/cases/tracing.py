"""TorchScript and graphs of containers and modules; results under way."""

import operator
from collections.abc import Callable
from typing import Any, Dict, List, Optional  # noqa: UP035  # TorchScript reads these

import torch
from torch import Tensor, nn

from tests.compat.answers import raises


def _batch(is_weighted: bool = False) -> Any:
    from torchrec import KeyedJaggedTensor

    torch.manual_seed(1)  # tables that were built before drew numbers of their own
    values = torch.randint(0, 10, (7,))
    weights = torch.rand(7) if is_weighted else None
    return KeyedJaggedTensor(["a", "b"], values, weights, torch.tensor([2, 0, 1, 1, 0, 3]))


def _of_different_sizes() -> Any:
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        lengths=torch.tensor([2, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )


def _filled(module: Any) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return module


def _tables(kind: str, **more: Any) -> Any:
    import torchrec

    config = getattr(torchrec, f"{kind}Config")(
        name="t", embedding_dim=4, num_embeddings=10, feature_names=["a", "b"]
    )
    return _filled(getattr(torchrec, f"{kind}Collection")(tables=[config], **more))


def _scripted(module: nn.Module, *inputs: Any) -> Any:
    import torchrec

    # TorchScript looks up the names in annotations here, and not in the functions around a class
    for name in ("JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"):
        globals()[name] = getattr(torchrec, name)
    return torch.jit.script(module)(*inputs)


def _in_graph(module: nn.Module, *inputs: Any) -> Any:
    from torchrec.fx import symbolic_trace

    return symbolic_trace(module)(*inputs)


def _scripted_graph(module: nn.Module, *inputs: Any) -> Any:
    from torchrec.fx import symbolic_trace

    return _scripted(symbolic_trace(module), *inputs)


_WAYS: list[Callable[..., Any]] = [_scripted, _in_graph, _scripted_graph]


def _parts(bags: Any) -> Any:
    keys = bags.keys() if hasattr(bags, "keys") else None
    return [keys, bags.values(), bags.lengths(), bags.offsets(), bags.weights_or_none()]


def _all_parts(bags: Any) -> Any:
    return [[key, _parts(one)] for key, one in bags.items()]


def what_an_exchange_sends() -> Any:
    from torchrec import KeyedJaggedTensor

    class Labels(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> List[str]:  # noqa: UP006
            return kjt.dist_labels()

    class Splits(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> List[List[int]]:  # noqa: UP006
            return kjt.dist_splits([1, 1])

    class Sent(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> List[Tensor]:  # noqa: UP006
            return kjt.dist_tensors()

    batch = _batch(True)
    return [[way(part(), batch) for part in (Labels, Splits, Sent)] for way in _WAYS]


def split_and_permuted() -> Any:
    from torchrec import KeyedJaggedTensor

    class Split(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> List[KeyedJaggedTensor]:  # noqa: UP006
            return kjt.split([1, 0, 1])

    class Permuted(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return kjt.permute([1, 0, 1])

    batch = _batch(True)
    return [
        [[part.values() for part in way(Split(), batch)], _parts(way(Permuted(), batch))]
        for way in _WAYS
    ]


def different_batch_sizes() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    class Features(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> Dict[str, JaggedTensor]:  # noqa: UP006
            return kjt.to_dict()

    class Permuted(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return kjt.permute([1, 0])

    batch = _of_different_sizes()
    found = []
    for way in _WAYS:
        permuted = way(Permuted(), batch)
        found += [_all_parts(way(Features(), batch)), _parts(permuted), permuted.stride_per_key()]
    return found


def batch_built_with_all_arguments() -> Any:
    from torchrec import KeyedJaggedTensor

    class Build(nn.Module):
        def forward(self, values: Tensor, weights: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(
                keys=["a", "b"],
                values=values,
                weights=weights,
                lengths=lengths,
                offsets=None,
                stride=2,
                stride_per_key_per_rank=None,
                length_per_key=[2, 2],
                offset_per_key=[0, 2, 4],
                index_per_key={"a": 0, "b": 1},
                jt_dict=None,
                inverse_indices=None,
            )

    inputs = torch.arange(4), torch.rand(4), torch.tensor([2, 0, 1, 1])
    found = [way(Build(), *inputs) for way in _WAYS]
    return [[_parts(kjt), kjt.length_per_key_or_none(), kjt.stride()] for kjt in found]


def batch_built_with_different_batch_sizes() -> Any:
    from torchrec import KeyedJaggedTensor

    class Build(nn.Module):
        def forward(self, values: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor(
                ["a", "b"], values, lengths=lengths, stride_per_key_per_rank=[[1], [2]]
            )

    found = [way(Build(), torch.arange(4), torch.tensor([2, 1, 1])) for way in _WAYS]
    return [[_parts(kjt), kjt.stride_per_key(), kjt.stride()] for kjt in found]


def batch_built_with_inverse_indices() -> Any:
    from torchrec import KeyedJaggedTensor

    class Build(nn.Module):
        def forward(self, values: Tensor, lengths: Tensor, rows: Tensor) -> KeyedJaggedTensor:
            inverse = (["a", "b"], rows)
            return KeyedJaggedTensor(["a", "b"], values, lengths=lengths, inverse_indices=inverse)

    rows = torch.tensor([[0, 1], [1, 0]])
    found = [way(Build(), torch.arange(4), torch.tensor([2, 0, 1, 1]), rows) for way in _WAYS]
    return [[_parts(kjt), kjt.inverse_indices_or_none()] for kjt in found]


def batch_built_and_synced() -> Any:
    from torchrec import KeyedJaggedTensor

    class Lengths(nn.Module):
        def forward(self, values: Tensor, lengths: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths, stride=2)

    class Offsets(nn.Module):
        def forward(self, values: Tensor, offsets: Tensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, offsets)

    values, lengths = torch.arange(4), torch.tensor([2, 0, 1, 1])
    offsets = torch.tensor([0, 2, 2, 3, 4])
    return [
        [_parts(way(Lengths(), values, lengths)), _parts(way(Offsets(), values, offsets))]
        for way in _WAYS
    ]


def jagged_of_dense_bags() -> Any:
    from torchrec import JaggedTensor

    class Build(nn.Module):
        def forward(self, bags: List[Tensor], weights: List[Tensor]) -> JaggedTensor:  # noqa: UP006
            return JaggedTensor.from_dense(bags, weights)

    bags = [torch.rand(2), torch.rand(0), torch.rand(1)]
    return _parts(_scripted(Build(), bags, [torch.ones(2), torch.rand(0), torch.zeros(1)]))


def jagged_of_a_padded_tensor() -> Any:
    from torchrec import JaggedTensor

    class Build(nn.Module):
        def forward(self, padded: Tensor, lengths: Tensor) -> JaggedTensor:
            return JaggedTensor.from_dense_lengths(padded, lengths)

    return _parts(_in_graph(Build(), torch.rand(2, 3), torch.tensor([2, 1])))


def jagged_to_dense() -> Any:
    from torchrec import JaggedTensor

    class Bags(nn.Module):
        def forward(self, jt: JaggedTensor) -> List[Tensor]:  # noqa: UP006
            return jt.to_dense()

    class Weights(nn.Module):
        def forward(self, jt: JaggedTensor) -> Optional[List[Tensor]]:  # noqa: UP006, UP045
            return jt.to_dense_weights()

    class Padded(nn.Module):
        def forward(self, jt: JaggedTensor) -> Tensor:
            return jt.to_padded_dense(desired_length=2, padding_value=-1.0)

    class PaddedWeights(nn.Module):
        def forward(self, jt: JaggedTensor) -> Optional[Tensor]:  # noqa: UP045
            return jt.to_padded_dense_weights(3)

    bags = JaggedTensor(torch.rand(5), torch.rand(5), torch.tensor([3, 0, 2]))
    asked = Bags, Weights, Padded, PaddedWeights
    return [[way(part(), bags) for part in asked] for way in _WAYS]


def a_feature_of_a_batch_passed_on() -> Any:
    from torchrec import JaggedTensor

    class Doubled(nn.Module):
        def forward(self, jt: JaggedTensor) -> JaggedTensor:
            return JaggedTensor(
                values=jt.values() * 2, weights=jt.weights_or_none(), offsets=jt.offsets()
            )

    return [_parts(way(Doubled(), _batch(True).to_dict()["b"])) for way in _WAYS]


def batch_of_a_dict() -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor

    class Build(nn.Module):
        def forward(self, bags: Dict[str, JaggedTensor]) -> KeyedJaggedTensor:  # noqa: UP006
            return KeyedJaggedTensor.from_jt_dict(bags)

    batch = _batch()
    bags = {"b": batch["b"], "a": JaggedTensor(torch.arange(2), lengths=torch.tensor([0, 1, 1]))}
    return _parts(_scripted(Build(), bags))


def batches_side_by_side() -> Any:
    from torchrec import KeyedJaggedTensor

    class Both(nn.Module):
        def forward(self, one: KeyedJaggedTensor, other: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor.concat([one, other])

    other = KeyedJaggedTensor(["c"], torch.arange(4), lengths=torch.tensor([1, 2, 1]))
    return [_parts(way(Both(), _batch(), other)) for way in _WAYS]


def empty_batches() -> Any:
    from torchrec import KeyedJaggedTensor

    class Empty(nn.Module):
        def forward(self) -> KeyedJaggedTensor:
            return KeyedJaggedTensor.empty()

    class Like(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return KeyedJaggedTensor.empty_like(kjt)

    return [[_parts(way(Empty())), _parts(way(Like(), _batch()))] for way in _WAYS]


def host_side_questions() -> Any:
    from torchrec import KeyedJaggedTensor

    class Asked(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> List[List[int]]:  # noqa: UP006
            kjt = kjt.sync()
            return [
                kjt.length_per_key(),
                kjt.offset_per_key(),
                kjt.lengths_offset_per_key(),
                kjt.stride_per_key(),
                [kjt.stride(), kjt.size_in_bytes()],
            ]

    return [way(Asked(), _batch(True)) for way in (_scripted, _in_graph)]


def batch_moved_to_a_dtype() -> Any:
    from torchrec import KeyedJaggedTensor

    class Moved(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
            return kjt.to(torch.device("cpu"), non_blocking=True, dtype=torch.float64)

    return [_parts(way(Moved(), _batch(True))) for way in _WAYS]


def loops_over_features() -> Any:
    from torchrec import KeyedJaggedTensor

    class OfKeys(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
            total = torch.zeros(1)
            for key in kjt.keys():  # noqa: SIM118
                total = total + kjt[key].values().sum()
            return total

    class OfParts(nn.Module):
        def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
            total = torch.zeros(1)
            for part in kjt.split([1, 1]):
                total = total * 3 + part.values().sum()
            return total

    batch = _batch()
    scripted = [_scripted(OfKeys(), batch), _scripted(OfParts(), batch)]
    return [*scripted, raises(lambda: _in_graph(OfKeys(), batch))]


def columns_regrouped() -> Any:
    from torchrec import KeyedTensor

    class Regrouped(nn.Module):
        def forward(self, kt: KeyedTensor) -> List[Tensor]:  # noqa: UP006
            return KeyedTensor.regroup([kt], [["y"], ["x", "y"]])

    class Named(nn.Module):
        def forward(self, kt: KeyedTensor) -> Dict[str, Tensor]:  # noqa: UP006
            return KeyedTensor.regroup_as_dict([kt], [["y"], ["x"]], ["p", "q"])

    kt = KeyedTensor(["x", "y"], [1, 2], torch.rand(2, 3))
    return [[way(Regrouped(), kt), way(Named(), kt)] for way in _WAYS]


def columns_built() -> Any:
    from torchrec import KeyedTensor

    class Build(nn.Module):
        def forward(self, values: Tensor) -> KeyedTensor:
            return KeyedTensor(
                keys=["x", "y"],
                length_per_key=[1, 2],
                values=values,
                key_dim=1,
                offset_per_key=None,
                index_per_key=None,
            )

    class OfList(nn.Module):
        def forward(self, tensors: List[Tensor]) -> KeyedTensor:  # noqa: UP006
            return KeyedTensor.from_tensor_list(["x", "y"], tensors)

    found = [way(Build(), torch.rand(2, 3)) for way in _WAYS]
    found.append(_scripted(OfList(), [torch.rand(2, 1), torch.rand(2, 2)]))
    return [[kt.keys(), kt.values(), kt.offset_per_key(), kt["y"]] for kt in found]


def bag_collections() -> Any:
    found = []
    for is_weighted in (False, True):
        tables, batch = _tables("EmbeddingBag", is_weighted=is_weighted), _batch(is_weighted)
        found += [way(tables, batch) for way in _WAYS]
    return [[kt.keys(), kt.values(), kt.length_per_key()] for kt in found]


def sequence_collections() -> Any:
    tables, batch = _tables("Embedding"), _batch()
    return [
        [[key, one.values(), one.lengths()] for key, one in way(tables, batch).items()]
        for way in _WAYS
    ]


def collection_inside_of_a_model() -> Any:
    from torchrec import KeyedJaggedTensor

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pooled = _tables("EmbeddingBag")
            self.sequences = _tables("Embedding")

        def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
            padded = self.sequences(kjt)["b"].to_padded_dense(2)
            return self.pooled(kjt)["a"] + padded.flatten(1)[:, :4]

    return [way(Model(), _batch()) for way in _WAYS]


def bags_on_meta() -> Any:
    meta = torch.device("meta")
    found = []
    for is_weighted in (False, True):
        tables = _tables("EmbeddingBag", is_weighted=is_weighted, device=meta)
        pooled = tables(_batch(is_weighted).to(meta))
        found.append([pooled.keys(), pooled.length_per_key(), pooled.values().shape])
        found.append([pooled.values().device, pooled["b"].shape])
    return found


def position_weighted_collections() -> Any:
    from torchrec.modules.feature_processor_ import (
        PositionWeightedModule,
        PositionWeightedModuleCollection,
    )
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

    each = {key: PositionWeightedModule(max_feature_length=3) for key in "ab"}
    found = []
    for processors in (each, PositionWeightedModuleCollection({"a": 3, "b": 3})):
        tables = _tables("EmbeddingBag", is_weighted=True)
        weighted = _filled(FeatureProcessedEmbeddingBagCollection(tables, processors))
        ways = [lambda module, kjt: module(kjt), _in_graph, _scripted_graph]
        found += [way(weighted, _batch()) for way in ways]
    return [[kt.keys(), kt.values()] for kt in found]


def position_weights() -> Any:
    from torchrec.modules.feature_processor_ import (
        PositionWeightedModule,
        PositionWeightedModuleCollection,
    )

    one = _filled(PositionWeightedModule(max_feature_length=3))
    many = _filled(PositionWeightedModuleCollection({"a": 3, "b": 3}))
    batch = _batch()
    return [
        [way(one, batch["b"]).weights_or_none(), way(many, batch).weights_or_none()]
        for way in _WAYS
    ]


def factorization_machines() -> Any:
    from torchrec.modules.deepfm import DeepFM, FactorizationMachine

    embeddings = [torch.rand(2, 3), torch.rand(2, 2, 2)]
    deep = _filled(DeepFM(dense_module=nn.Linear(7, 2)))
    machine = FactorizationMachine()
    return [[way(deep, embeddings), way(machine, embeddings)] for way in _WAYS]


def factorization_machine_inside_of_a_model() -> Any:
    from torchrec.modules.deepfm import FactorizationMachine

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.machine = FactorizationMachine()

        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return self.machine([one, other]) * 2

    return [way(Model(), torch.rand(2, 3), torch.rand(2, 4)) for way in _WAYS]


def models() -> Any:
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM

    dlrm = DLRM(
        embedding_bag_collection=_tables("EmbeddingBag"),
        dense_in_features=3,
        dense_arch_layer_sizes=[5, 4],
        over_arch_layer_sizes=[3, 1],
    )
    deep = SimpleDeepFMNN(
        num_dense_features=3,
        embedding_bag_collection=_tables("EmbeddingBag"),
        hidden_layer_size=4,
        deep_fm_dimension=3,
    )
    batch, dense = _batch(), torch.rand(3, 3)
    return [way(_filled(model), dense, batch) for model in (dlrm, deep) for way in _WAYS]


def _later(value: Any, kind: Any = None) -> Any:
    from torchrec.distributed.types import LazyAwaitable

    class Later(LazyAwaitable):
        def __init__(self) -> None:
            super().__init__()

        def _wait_impl(self) -> Any:
            return value

    return Later()


def arithmetic_of_results_under_way() -> Any:
    one, two = torch.arange(1.0, 4.0), torch.tensor([3.0, 1.0, 2.0])
    names = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "lt", "le", "gt", "ge")
    found = []
    for name in names:
        act = getattr(operator, name)
        found.append([act(_later(one), two), act(one, _later(two)), act(_later(one), _later(two))])
        found.append([act(_later(one), 2), act(2, _later(one))])
    bits, mask = torch.tensor([1, 6]), torch.tensor([3, 4])
    for name in ("and_", "or_", "xor", "lshift", "rshift"):
        found.append(getattr(operator, name)(_later(bits), mask))
    return [*found, -_later(one), +_later(one), ~_later(bits), _later(one) @ two, 2 ^ _later(bits)]


def classes_of_results_under_way() -> Any:
    from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyNoWait, NoWait

    later = _later(torch.ones(2))
    kinds = Awaitable, LazyAwaitable, torch.Tensor
    results = later, NoWait(1), LazyNoWait(torch.ones(1))
    return [[isinstance(one, kind) for kind in kinds] for one in results]


def uses_of_results_under_way() -> Any:
    from torchrec import KeyedTensor

    later = _later(torch.arange(6.0).view(2, 3))
    torch_functions = [torch.cat([later, later]), torch.add(later, 1), torch.relu(later)]
    layer = _filled(nn.Linear(3, 2))
    kt = _later(KeyedTensor(["x", "y"], [1, 2], torch.rand(2, 3)))
    return [
        [*torch_functions, layer(later), later.shape, later.sum(), later[1], later.dtype],
        [kt["y"], kt.keys(), kt.values(), KeyedTensor.regroup([kt], [["y"]])],
        [raises(lambda: later.no_such_name), _later({"a": 3})["a"]],
    ]


def callbacks_of_results_under_way() -> Any:
    later = _later(torch.ones(2))
    later.callbacks.append(lambda result: result + 1)
    later.callbacks.append(lambda result: result * 10)
    return later.wait()


def entries_of_results_under_way() -> Any:
    from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin

    waits = []

    class Later(LazyGetItemMixin, LazyAwaitable):
        def __init__(self) -> None:
            super().__init__()

        def _wait_impl(self) -> Any:
            waits.append(1)
            return {"a": torch.ones(2), "b": torch.zeros(1)}

    later = Later()
    entry, none = later["a"], later["c"]
    before = len(waits)
    found = [isinstance(entry, LazyAwaitable), before, entry + 1, later["b"].wait()]
    return [*found, raises(lambda: none.wait())]


def results_under_way_in_graphs() -> Any:
    from torchrec.distributed.types import LazyAwaitable

    class Later(LazyAwaitable):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self._tensor = tensor

        def _wait_impl(self) -> Tensor:
            return self._tensor * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _filled(nn.Linear(3, 2))

        def forward(self, given: Tensor) -> Tensor:
            later = Later(given)
            return self.layer(later).sum(1) + later.wait().sum() + torch.cat([later, given])[:2, 0]

    given = torch.rand(2, 3)
    return [_in_graph(Model(), given), torch.fx.symbolic_trace(Model())(given)]
