from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from recsys.distributed.shard import shard
from recsys.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from recsys.distributed.types import ShardingEnv
from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
    quantize_embeddings,
    quantize_inference_model,
)
from recsys.inference.quantize import quantize_state_dict
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    QuantConfig,
)
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionInterface,
    EmbeddingCollection,
)
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor, KeyedTensor
from tests.inference.row_sizes import table_bytes
from tests.saved import through_torch_save

KINDS: Any = {
    EmbeddingBagCollection: QuantEmbeddingBagCollection,
    EmbeddingCollection: QuantEmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection: QuantFeatureProcessedEmbeddingBagCollection,
}


def _collection(is_weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(50, 8, "a", feature_names=["x", "y"]),
            EmbeddingBagConfig(30, 16, "b", feature_names=["y"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(20, 8, "c", feature_names=["z"]),
        ],
        is_weighted=is_weighted,
        device=torch.device("cpu"),
    )


def _mixed() -> nn.ModuleDict:
    """One collection of each kind."""
    rows = EmbeddingConfig(50, 8, "rows", feature_names=["x"])
    bags = EmbeddingBagConfig(50, 8, "weighed", feature_names=["x"])
    return nn.ModuleDict(
        {
            "pooled": _collection(),
            "sequence": EmbeddingCollection(tables=[rows]),
            "processed": FeatureProcessedEmbeddingBagCollection(
                EmbeddingBagCollection(tables=[bags], is_weighted=True),
                PositionWeightedModuleCollection({"x": 3}),
            ),
        }
    )


def _batch(is_weighted: bool = False, keys: str = "xyz") -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([2, 0, 1, 1, 3, 2])
    values = torch.randint(0, 20, (9,), generator=generator)
    weights = torch.rand(9, generator=generator) if is_weighted else None
    batch = KeyedJaggedTensor(["x", "y", "z"], values, weights, lengths)
    return batch.permute([["x", "y", "z"].index(key) for key in keys])


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize(
    ("dtype", "levels"), [(torch.int8, 255), (torch.quint4x2, 15), (torch.float16, 2**10)]
)
def test_output_is_close_to_the_float_collection(
    dtype: torch.dtype, levels: int, is_weighted: bool
) -> None:
    collection = _collection(is_weighted)
    quantized = quantize_embeddings(collection, dtype)
    expected, received = collection(_batch(is_weighted)), quantized(_batch(is_weighted))
    assert received.keys() == expected.keys()
    weights = [table.weight.detach() for table in collection.embedding_bags.values()]
    spread = max(float(weight.max() - weight.min()) for weight in weights)
    half_a_step = spread / levels / 2 + 1e-3 * spread  # fp16 scale and bias
    most_ids = 3
    difference = (received.values() - expected.values()).abs().max()
    assert difference <= most_ids * half_a_step
    assert difference > 0


def test_order_of_the_batch_does_not_matter() -> None:
    quantized = quantize_embeddings(_collection())
    expected, received = quantized(_batch()), quantized(_batch(keys="zxy"))
    torch.testing.assert_close(received.values(), expected.values(), rtol=0, atol=0)


def test_tables_may_have_different_dtypes() -> None:
    quantized = quantize_embeddings(_collection(), per_table_weight_dtype={"b": torch.quint4x2})
    assert table_bytes(quantized) == [50 * (4 + 8), 30 * (4 + 8), 20 * (4 + 8)]


def test_replaces_collections_inside_a_model() -> None:
    model = nn.ModuleDict({"inner": nn.ModuleList([_collection(), nn.Linear(2, 2)])})
    copy = quantize_embeddings(model)
    assert isinstance(copy["inner"][0], QuantEmbeddingBagCollection)
    assert isinstance(model["inner"][0], EmbeddingBagCollection)
    quantize_embeddings(model, inplace=True)
    assert isinstance(model["inner"][0], QuantEmbeddingBagCollection)


def test_bad_id_is_named() -> None:
    quantized = quantize_embeddings(_collection())
    values = torch.tensor([1, 2, 20])
    batch = KeyedJaggedTensor(["x", "y", "z"], values, lengths=torch.tensor([1, 1, 1]))
    with pytest.raises(IndexError, match=r"Id 20 .*'z' must .*to 19"):
        quantized(batch)


def test_missing_feature_is_named() -> None:
    quantized = quantize_embeddings(_collection())
    batch = KeyedJaggedTensor(["x", "y"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    with pytest.raises(KeyError, match=r"lacks the features \['z'\]"):
        quantized(batch)


def test_unknown_dtype_and_table_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.float16 or torch.float32; received torch.int32"):
        quantize_embeddings(_collection(), torch.int32)
    with pytest.raises(ValueError, match=r"tables of the model, .*received \['d'\]"):
        quantize_embeddings(_collection(), per_table_weight_dtype={"d": torch.int8})
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype; .*'int8'"):
        quantize_embeddings(_collection(), "int8")
    with pytest.raises(ValueError, match=r"output_dtype must be .* received torch\.int8"):
        quantize_embeddings(_collection(), output_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^Linear must contain one of"):
        quantize_embeddings(nn.Linear(1, 1))
    with pytest.raises(
        ValueError, match=r"QuantEmbeddingBagCollection must contain .*quantized again"
    ):
        quantize_embeddings(quantize_embeddings(_collection()))


def _by_torch(spec: Any, dtype: torch.dtype = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        model: nn.Module = torch.quantization.quantize_dynamic(
            nn.ModuleDict({"ebc": _collection()}),
            spec,
            dtype=dtype,
            mapping={EmbeddingBagCollection: QuantEmbeddingBagCollection},
        )
    return model["ebc"]


def _qconfig(dtype: torch.dtype) -> Any:
    observer = torch.quantization.PlaceholderObserver
    return torch.quantization.QConfig(
        activation=observer.with_args(dtype=torch.qint8), weight=observer.with_args(dtype=dtype)
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.qint8, torch.quint4x2, torch.float16])
def test_quantize_dynamic_honours_the_qconfig(dtype: torch.dtype) -> None:
    found = _by_torch({EmbeddingBagCollection: _qconfig(dtype)})
    expected = quantize_embeddings(_collection(), dtype)
    assert table_bytes(found) == table_bytes(expected)
    torch.testing.assert_close(found(_batch()).values(), expected(_batch()).values())


@pytest.mark.parametrize("output", [torch.float32, torch.float16, torch.bfloat16])
def test_quantize_dynamic_honours_the_quant_config(output: torch.dtype) -> None:
    observer = torch.quantization.PlaceholderObserver
    config = QuantConfig(
        activation=observer.with_args(dtype=output),
        weight=observer.with_args(dtype=torch.int8),
        per_table_weight_dtype={"b": torch.quint4x2, "of another collection": torch.float16},
    )
    found = _by_torch({EmbeddingBagCollection: config})
    expected = quantize_embeddings(
        _collection(), output_dtype=output, per_table_weight_dtype={"b": torch.quint4x2}
    )
    assert table_bytes(found) == table_bytes(expected) == [50 * 12, 30 * 12, 20 * 12]
    assert found(_batch()).values().dtype is found.output_dtype() is output
    assert torch.equal(found(_batch()).values(), expected(_batch()).values())
    other = config._replace(activation=observer.with_args(dtype=torch.quint8))
    with pytest.raises(ValueError, match=r"output_dtype must be .*received torch\.quint8"):
        _by_torch({EmbeddingBagCollection: other})


def test_quantize_dynamic_takes_every_kind_of_collection() -> None:
    observer = torch.quantization.PlaceholderObserver
    config = QuantConfig(
        activation=observer.with_args(dtype=torch.float16),
        weight=observer.with_args(dtype=torch.quint4x2),
    )
    model = _mixed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = torch.quantization.quantize_dynamic(
            model,
            qconfig_spec=dict.fromkeys(KINDS, config),
            mapping=KINDS,
            inplace=False,
        )
    assert [type(child) for child in found.values()] == list(KINDS.values())
    for child in found.values():
        assert {c.data_type for c in child.configs()} == {DataType.INT4}
        assert child.output_dtype() is torch.float16
    assert [type(child) for child in model.values()] == list(KINDS)


def test_quantize_dynamic_honours_its_dtype() -> None:
    for dtype, size in ((torch.qint8, 12), (torch.quint4x2, 8), (torch.float16, 16)):
        assert table_bytes(_by_torch({EmbeddingBagCollection}, dtype))[0] == 50 * size


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_quantize_dynamic_refuses_other_qconfigs_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"or torch.float32; received {dtype}"):
        _by_torch({EmbeddingBagCollection: _qconfig(dtype)})


def _by_state_dict(module: nn.Module) -> nn.Module:
    other = copy.deepcopy(module)
    for value in other.state_dict().values():
        value.zero_()
    other.load_state_dict(module.state_dict())
    return other


def _through_meta(module: nn.Module) -> nn.Module:
    state = module.state_dict()
    other = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    other.load_state_dict(state)
    return other


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        through_torch_save,
        _by_state_dict,
        _through_meta,
        lambda module: copy.deepcopy(module).half().double(),
        lambda module: copy.deepcopy(module).share_memory(),
    ],
)
def test_copies_look_up_the_same(copied: Callable[[nn.Module], nn.Module]) -> None:
    module = quantize_embeddings(_collection(), per_table_weight_dtype={"b": torch.quint4x2})
    found = copied(module)(_batch()).values()
    torch.testing.assert_close(found, module(_batch()).values(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "Table 'b' cannot be quantized.*finite weights"),
        (1e6, r"Table 'b' .*received .* to 1e\+06"),
    ],
)
def test_table_that_cannot_be_quantized_is_named(value: float, message: str) -> None:
    collection = _collection()
    nn.init.constant_(collection.embedding_bags["b"].weight, value)
    with pytest.raises(ValueError, match=message):
        quantize_embeddings(collection)


def test_tables_without_values_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Table 'a'.*a tensor on the meta"):
        quantize_embeddings(_collection().to("meta"))


def test_weights_ids_and_lengths_are_checked() -> None:
    lengths = torch.ones(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one weight per id; .*without"):
        quantize_embeddings(_collection(is_weighted=True))(_batch())
    with pytest.raises(TypeError, match="ids must be integers; received floats"):
        quantize_embeddings(_collection())(
            KeyedJaggedTensor(["x", "y", "z"], torch.rand(3), lengths=lengths)
        )
    bags = quantize_embeddings(_collection()).lookups()
    for wrong in ([1, 1, 2], [1, 1, 0], [-1, 3, 1]):
        with pytest.raises(ValueError, match="the number of ids, 3; received"):
            bags.look_up(torch.ones(3, dtype=torch.int64), torch.tensor(wrong), None, [0, 1, 2], 3)
    ids, ones = torch.ones(3, dtype=torch.int64), torch.tensor([1, 1, 1])
    with pytest.raises(ValueError, match=r"ids must have one dim; .*2"):
        bags.look_up(ids.view(3, 1), ones, None, [0, 1, 2], 3)
    for weights in (torch.ones(2), torch.ones(3, 1)):
        with pytest.raises(ValueError, match="one number per id, 3 of"):
            bags.look_up(ids, ones, weights, [0, 1, 2], 3)
    with pytest.raises(ValueError, match=r"feature and sample, 3 features; .*4"):
        bags.look_up(torch.ones(3, dtype=torch.int64), torch.ones(4), None, [0, 1, 2], 3)


def test_weights_may_be_of_any_precision() -> None:
    module, batch = quantize_embeddings(_collection(is_weighted=True)), _batch(is_weighted=True)
    double = KeyedJaggedTensor(
        batch.keys(), batch.values(), batch.weights().double(), batch.lengths()
    )
    torch.testing.assert_close(module(double).values(), module(batch).values(), rtol=0, atol=0)


# -- which modules ----------------------------------------------------------------------------


def test_no_collection_stays_as_it_was() -> None:
    model = _mixed()
    quantized: Any = quantize_embeddings(model)
    assert type(quantized["sequence"]) is QuantEmbeddingCollection
    assert type(quantized["processed"].split()[1]) is QuantEmbeddingBagCollection
    assert {b.dtype for n, b in quantized.named_buffers() if n.endswith("weight")} == {torch.uint8}
    assert not hasattr(model["pooled"], "qconfig")


def test_inference_models_have_every_kind_quantized() -> None:
    model = _mixed()
    quantized: Any = quantize_inference_model(
        model,
        per_table_weight_dtype={"b": torch.float16},
        fp_weight_dtype=torch.quint2x4,
        quantization_dtype=torch.quint4x2,
        output_dtype=torch.bfloat16,
    )
    assert quantized is model
    assert [type(child) for child in quantized.values()] == list(KINDS.values())
    types = {c.name: str(c.data_type) for child in quantized.values() for c in child.configs()}
    expected = {"a": "INT4", "b": "FP16", "c": "INT4", "rows": "INT4", "weighed": "INT2"}
    assert types == expected
    assert all(child.output_dtype() is torch.bfloat16 for child in quantized.values())
    assert not quantized.training


def test_a_mapping_names_what_is_replaced() -> None:
    mapping: Any = {
        "recsys.modules.embedding_modules.EmbeddingCollection": QuantEmbeddingCollection
    }
    quantized: Any = quantize_inference_model(_mixed(), mapping)
    assert type(quantized["sequence"]) is QuantEmbeddingCollection
    assert type(quantized["pooled"]) is EmbeddingBagCollection
    for name, message in (
        ("recsys.modules.Missing", r"must name classes, such as .* received 'recsys.modules.Miss"),
        ("recsys.modules.mlp", "must name classes of modules; received 'recsys.modules.mlp'"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_inference_model(_mixed(), {name: QuantEmbeddingCollection})


class _Half(nn.Module):
    """Quantizes a linear layer: another class that is made by `from_float`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    @classmethod
    def from_float(cls, module: nn.Module) -> _Half:
        return cls(module.qconfig.weight().dtype)


def test_other_classes_may_be_replaced_too() -> None:
    model = nn.ModuleDict({"tables": _collection(), "dense": nn.Linear(2, 2)})
    found: Any = quantize_embeddings(model, torch.float16, False, [nn.Linear], {nn.Linear: _Half})
    assert found["dense"].dtype is torch.float16
    assert isinstance(found["tables"], QuantEmbeddingBagCollection)
    assert isinstance(model["dense"], nn.Linear)
    for keys, mapping in (([nn.Linear], None), (None, {nn.Linear: _Half})):
        with pytest.raises(ValueError, match=r"received \['Linear'\] in only one"):
            quantize_embeddings(model, torch.float16, False, keys, mapping)


class _Own(EmbeddingBagCollectionInterface):
    """A collection of somebody's own."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        raise NotImplementedError

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return []

    def is_weighted(self) -> bool:
        return False


def test_collections_that_cannot_be_quantized_are_named() -> None:
    model = nn.ModuleDict({"tables": _collection(), "own": _Own()})
    for quantize in (quantize_embeddings, quantize_inference_model):
        with pytest.raises(ValueError, match=r"_Own 'ModuleDict.own' cannot be quantized"):
            quantize(model)


def test_sharded_collections_are_quantized_beside_others() -> None:
    plan = construct_module_sharding_plan(
        _collection(),
        {name: table_wise(rank=0) for name in "abc"},
        world_size=1,
        device_type="cpu",
    )
    env = ShardingEnv.from_local(1, 0)
    model = nn.ModuleDict({"sharded": shard(_collection(), plan, env), "plain": _collection()})
    found, expected = quantize_embeddings(model), quantize_embeddings(_collection())
    for child in found.values():
        assert type(child) is QuantEmbeddingBagCollection
        assert torch.equal(child(_batch()).values(), expected(_batch()).values())


def test_tables_may_be_named_in_any_collection() -> None:
    quantized: Any = quantize_embeddings(_mixed(), per_table_weight_dtype={"rows": torch.float32})
    assert quantized["sequence"].configs()[0].data_type is DataType.FP32
    assert quantized["pooled"].configs()[0].data_type is DataType.INT8


def test_a_subclass_of_a_collection_is_quantized() -> None:
    class _Derived(EmbeddingBagCollection):
        pass

    table = EmbeddingBagConfig(9, 4, "t", feature_names=["x"])
    assert isinstance(quantize_embeddings(_Derived(tables=[table])), QuantEmbeddingBagCollection)


def test_a_state_dict_is_quantized_for_the_constructor() -> None:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(20, 8, "a", feature_names=["x"]),
        EmbeddingBagConfig(20, 8, "b", feature_names=["y"]),
    ]
    trained = EmbeddingBagCollection(tables=tables)
    kinds = {"a": DataType.INT4, "b": DataType.FP16}
    rows: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
    assert quantize_state_dict(trained, rows, kinds, {"a": 5}) == torch.device("cpu")
    assert rows["a"][0].shape == (5, 4)
    assert rows["a"][1] is not None
    assert rows["a"][1].shape == (5, 4)
    assert rows["b"][0].shape == (20, 16)
    assert rows["b"][1] is None
    served = QuantEmbeddingBagCollection(
        [
            replace(tables[0], data_type=DataType.INT4, num_embeddings_post_pruning=5),
            replace(tables[1], data_type=DataType.FP16),
        ],
        False,
        torch.device("cpu"),
        table_name_to_quantized_weights=rows,
    )
    ids = KeyedJaggedTensor(["x", "y"], torch.tensor([4, 19]), lengths=torch.tensor([1, 1]))
    found, expected = served(ids).values(), trained(ids).values()
    low, high = expected[0, :8].min(), expected[0, :8].max()
    step = (high - low) / 15
    atol = 0.51 * step.item() + 2**-11
    torch.testing.assert_close(found[:, :8], expected[:, :8], atol=atol, rtol=0)
    assert torch.equal(found[:, 8:], expected[:, 8:].half().float())


def test_a_state_dict_that_cannot_be_quantized() -> None:
    trained = EmbeddingBagCollection(tables=[EmbeddingBagConfig(4, 3, "a", feature_names=["x"])])
    with pytest.raises(ValueError, match=r"every table; received \[\], without \['a'\]"):
        quantize_state_dict(trained, {}, {})
    with pytest.raises(ValueError, match="Table 'a' cannot be quantized"):
        quantize_state_dict(trained, {}, {"a": DataType.INT4})
    with pytest.raises(TypeError, match=r"EmbeddingBagCollection .*received Linear"):
        quantize_state_dict(nn.Linear(2, 2), {}, {})


def test_a_collection_without_tables_stays_what_it_is() -> None:
    table = EmbeddingBagConfig(4, 4, "t", feature_names=["f"])
    given = nn.ModuleList(
        [EmbeddingBagCollection(tables=[]), EmbeddingBagCollection(tables=[table])]
    )
    empty, quantized = quantize_embeddings(given, torch.int8, False)
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([0, 2]))
    assert isinstance(empty, EmbeddingBagCollection)
    assert empty(features).values().shape == (2, 0)
    assert isinstance(quantized, QuantEmbeddingBagCollection)
