"""Quantized collections equal lookups, in float64, of rows that this file quantizes by itself."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
    quantize_embeddings,
    quantize_inference_model,
)
from recsys.inference.quant.rows import whole_table
from recsys.inference.quant_prep import quant_prep_enable_quant_state_dict_split_scale_bias
from recsys.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModuleCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.sparse import KeyedJaggedTensor
from tests.inference.row_sizes import table_bytes
from tests.saved import through_torch_save

BITS = {
    torch.int8: 8,
    torch.quint4x2: 4,
    torch.quint2x4: 2,
    torch.float16: 16,
    torch.float32: 32,
}
KEYS = ["x", "y", "z", "unread"]
CPU = torch.device("cpu")


def _pooled(is_weighted: bool = False, dims: tuple[int, int, int] = (8, 12, 4)) -> Any:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(50, dims[0], "a", feature_names=["x", "y"]),
            EmbeddingBagConfig(30, dims[1], "b", feature_names=["y"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(20, dims[2], "c", feature_names=["z"]),
        ],
        is_weighted=is_weighted,
        device=CPU,
    )


def _sequence(dim: int = 8, need_indices: bool = False) -> Any:
    torch.manual_seed(0)
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(50, dim, "a", feature_names=["x", "y"]),
            EmbeddingConfig(30, dim, "b", feature_names=["y"]),
            EmbeddingConfig(20, dim, "c", feature_names=["z"]),
        ],
        device=CPU,
        need_indices=need_indices,
    )


def _processed() -> Any:
    processors = PositionWeightedModuleCollection({"x": 4, "y": 4, "z": 4})
    for weight in processors.position_weights.values():
        nn.init.uniform_(weight, 0.5, 2.0)
    return FeatureProcessedEmbeddingBagCollection(_pooled(is_weighted=True), processors)


def _batch(size: int = 3, is_weighted: bool = False, keys: list[str] | None = None) -> Any:
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(0, 4, (len(KEYS) * size,), generator=generator)
    num_ids = int(lengths.sum())
    values = torch.randint(0, 20, (num_ids,), generator=generator)
    weights = torch.rand(num_ids, generator=generator) if is_weighted else None
    batch = KeyedJaggedTensor(KEYS, values, weights, lengths, stride=size)
    return batch if keys is None else batch.permute([KEYS.index(key) for key in keys])


def _restored(weight: torch.Tensor, bits: int) -> NDArray[np.float64]:
    """Rows as they are after quantization: value = q * scale + bias, q from 0 to 2**bits - 1."""
    rows = weight.detach().numpy().astype(np.float64)
    if bits >= 16:
        return rows.astype(np.float16 if bits == 16 else np.float32).astype(np.float64)
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    bias = low.astype(np.float16).astype(np.float64)
    scale = ((high - bias) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    found = np.clip(np.rint((rows - bias) / scale), 0, 2**bits - 1) * scale + bias
    bound = scale / 2 + 2.0**-10 * (np.abs(rows).max(axis=1, keepdims=True) + (high - low))
    assert bool((np.abs(found - rows) <= bound).all())
    return found


def _bags(batch: KeyedJaggedTensor, feature: str) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    bags = batch[feature]
    if not bags.lengths().numel():
        return []
    ends = np.cumsum(bags.lengths().numpy())[:-1]
    weights = bags.weights_or_none()
    weight = (
        np.ones(bags.values().numel()) if weights is None else weights.detach().double().numpy()
    )
    return list(zip(np.split(bags.values().numpy(), ends), np.split(weight, ends), strict=True))


def _expected(
    collection: Any, batch: KeyedJaggedTensor, bits: dict[str, int]
) -> dict[tuple[str, str], NDArray[np.float64]]:
    """(Table, feature) to pooled bags."""
    found = {}
    for config in collection.embedding_bag_configs():
        rows = _restored(collection.embedding_bags[config.name].weight, bits[config.name])
        for feature in config.feature_names:
            pooled = []
            for ids, weights in _bags(batch, feature):
                total = (rows[ids] * weights[:, None]).sum(axis=0)
                is_mean = config.pooling is PoolingType.MEAN
                pooled.append(total / max(len(ids), 1) if is_mean else total)
            found[config.name, feature] = np.array(pooled).reshape(-1, config.embedding_dim)
    return found


def _assert_pooled(received: Any, expected: dict[Any, NDArray[np.float64]], **kwargs: Any) -> None:
    columns = torch.from_numpy(np.concatenate(list(expected.values()), axis=1))
    torch.testing.assert_close(received.values().double(), columns, **kwargs)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("size", [1, 5, 0])
@pytest.mark.parametrize("dtype", BITS)
def test_bags_equal_the_oracle(dtype: torch.dtype, size: int, is_weighted: bool) -> None:
    collection, batch = _pooled(is_weighted), _batch(size, is_weighted)
    quantized: Any = quantize_embeddings(collection, dtype)
    received = quantized(batch)
    assert received.keys() == collection(batch).keys() == ["x", "y@a", "y@b", "z"]
    expected = _expected(collection, batch, dict.fromkeys("abc", BITS[dtype]))
    _assert_pooled(received, expected, rtol=1e-5, atol=1e-6)
    assert received.values().dtype is torch.float32


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (torch.int8, (6, 10, 3)),
        (torch.quint4x2, (6, 10, 2)),
        (torch.float16, (6, 10, 3)),
        (torch.float32, (6, 10, 1)),
    ],
)
def test_dims_need_not_be_multiples_of_4(dtype: torch.dtype, dims: tuple[int, int, int]) -> None:
    collection, batch = _pooled(dims=dims), _batch()
    expected = _expected(collection, batch, dict.fromkeys("abc", BITS[dtype]))
    received = quantize_embeddings(collection, dtype)(batch)
    _assert_pooled(received, expected, rtol=1e-5, atol=1e-6)


def test_dims_that_do_not_fill_bytes_name_the_table() -> None:
    with pytest.raises(ValueError, match=r"Table 'b' cannot.* divisible by 4"):
        quantize_embeddings(_pooled(dims=(8, 6, 4)), torch.quint2x4)
    config = EmbeddingBagConfig(9, 3, "odd", data_type=DataType.INT4, feature_names=["x"])
    with pytest.raises(ValueError, match=r"Table 'odd' .*divisible by 2; .*3"):
        QuantEmbeddingBagCollection([config], False, CPU)


@pytest.mark.parametrize(
    ("output", "precision"), [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)]
)
@pytest.mark.parametrize("dtype", BITS)
def test_output_dtypes(dtype: torch.dtype, output: torch.dtype, precision: float) -> None:
    collection, batch = _pooled(), _batch()
    received = quantize_embeddings(collection, dtype, output_dtype=output)(batch)
    assert received.values().dtype is output
    expected = _expected(collection, batch, dict.fromkeys("abc", BITS[dtype]))
    _assert_pooled(received, expected, rtol=precision, atol=precision)
    sequence = quantize_embeddings(_sequence(), dtype, output_dtype=output)
    assert sequence.output_dtype() is sequence(batch)["x"].values().dtype is output


@pytest.mark.parametrize("need_indices", [False, True])
@pytest.mark.parametrize("size", [1, 5, 0])
@pytest.mark.parametrize("dtype", BITS)
def test_sequences_equal_the_oracle(dtype: torch.dtype, size: int, need_indices: bool) -> None:
    collection, batch = _sequence(need_indices=need_indices), _batch(size)
    quantized: Any = quantize_embeddings(collection, dtype)
    received, outputs = quantized(batch), collection(batch)
    assert list(received) == list(outputs) == ["x", "y@a", "y@b", "z"]
    for name, (table, feature) in zip(
        received, [("a", "x"), ("a", "y"), ("b", "y"), ("c", "z")], strict=True
    ):
        rows = _restored(collection.embeddings[table].weight, BITS[dtype])
        expected = torch.from_numpy(rows[batch[feature].values().numpy()])
        torch.testing.assert_close(received[name].values().double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(received[name].lengths(), outputs[name].lengths())
        if need_indices:
            assert torch.equal(received[name].weights(), batch[feature].values())
        else:
            assert received[name].weights_or_none() is None
    assert quantized.need_indices() is need_indices
    assert quantized.embedding_names_by_table() == [["x", "y@a"], ["y@b"], ["z"]]


@pytest.mark.parametrize("dim", [6, 3])
def test_sequences_need_no_multiples_of_4(dim: int) -> None:
    collection, batch = _sequence(dim), _batch()
    received = quantize_embeddings(collection)(batch)["y@b"].values()
    rows = _restored(collection.embeddings["b"].weight, 8)
    expected = torch.from_numpy(rows[batch["y"].values().numpy()])
    torch.testing.assert_close(received.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", BITS)
def test_processed_bags_equal_the_oracle(dtype: torch.dtype) -> None:
    module, batch = _processed(), _batch()
    quantized: Any = quantize_inference_model(module, fp_weight_dtype=dtype)
    assert type(quantized) is QuantFeatureProcessedEmbeddingBagCollection
    processors, collection = module.split()
    expected = _expected(collection, processors(batch), dict.fromkeys("abc", BITS[dtype]))
    _assert_pooled(quantized(batch), expected, rtol=1e-5, atol=1e-6)
    # the wrapper may stay, too
    wrapped: Any = quantize_embeddings(module, dtype)
    assert type(wrapped) is FeatureProcessedEmbeddingBagCollection
    assert torch.equal(wrapped(batch).values(), quantized(batch).values())


def test_processors_are_copied() -> None:
    module = _processed()
    quantized: Any = quantize_inference_model(module)
    before = quantized(_batch()).values()
    for weight in module.parameters():
        nn.init.zeros_(weight)
    assert torch.equal(quantized(_batch()).values(), before)


def test_processors_must_be_there() -> None:
    config = EmbeddingBagConfig(9, 4, "t", data_type=DataType.INT8, feature_names=["x"])
    with pytest.raises(TypeError, match=r"FeatureProcessorsCollection; received None"):
        QuantFeatureProcessedEmbeddingBagCollection([config], True, CPU)
    processors = PositionWeightedModuleCollection({"x": 3})
    with pytest.raises(ValueError, match=r"is_weighted must be True.*received False"):
        QuantFeatureProcessedEmbeddingBagCollection(
            [config], False, CPU, feature_processor=processors
        )


def test_each_table_may_have_its_dtype() -> None:
    collection, batch = _pooled(), _batch()
    dtypes = {"a": torch.quint2x4, "c": torch.float32}
    quantized: Any = quantize_embeddings(collection, torch.quint4x2, per_table_weight_dtype=dtypes)
    expected = _expected(collection, batch, {"a": 2, "b": 4, "c": 32})
    _assert_pooled(quantized(batch), expected, rtol=1e-5, atol=1e-6)
    configs = quantized.embedding_bag_configs()
    assert [c.data_type for c in configs] == [DataType.INT2, DataType.INT4, DataType.FP32]
    assert [c.data_type for c in collection.embedding_bag_configs()] == [DataType.FP32] * 3


@pytest.mark.parametrize("keys", [["z", "x", "unread", "y"], ["y", "z", "x"]])
def test_any_order_of_keys_and_others_between(keys: list[str]) -> None:
    pooled, sequence = quantize_embeddings(_pooled()), quantize_embeddings(_sequence())
    expected, received = pooled(_batch()), pooled(_batch(keys=keys))
    assert torch.equal(received.values(), expected.values())
    rows = sequence(_batch()), sequence(_batch(keys=keys))
    for name in rows[0]:
        assert torch.equal(rows[0][name].values(), rows[1][name].values())
        assert torch.equal(rows[0][name].lengths(), rows[1][name].lengths())


def _uneven() -> KeyedJaggedTensor:
    """Batch sizes 2, 3 and 1; four samples."""
    return KeyedJaggedTensor(
        ["x", "y", "z"],
        torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]),
        lengths=torch.tensor([2, 0, 1, 2, 1, 2]),
        stride_per_key_per_rank=[[2], [3], [1]],
        inverse_indices=(
            ["x", "y", "z"],
            torch.tensor([[0, 1, 1, 0], [2, 1, 0, 0], [0, 0, 0, 0]]),
        ),
    )


def test_features_may_have_different_batch_sizes() -> None:
    collection, batch = _pooled(), _uneven()
    quantized = quantize_embeddings(collection, torch.float32)
    torch.testing.assert_close(quantized(batch).values(), collection(batch).values())
    sequence = _sequence()
    received, expected = quantize_embeddings(sequence, torch.float32)(batch), sequence(batch)
    for name, bags in expected.items():
        torch.testing.assert_close(received[name].values(), bags.values())
        assert torch.equal(received[name].lengths(), bags.lengths())
    without = KeyedJaggedTensor(
        ["x", "y", "z"],
        batch.values(),
        lengths=batch.lengths(),
        stride_per_key_per_rank=[[2], [3], [1]],
    )
    with pytest.raises(ValueError, match="needs inverse_indices"):
        quantized(without)


# -- buffers ----------------------------------------------------------------------------------


MODULES: list[Callable[[], Any]] = [
    lambda: quantize_embeddings(_pooled(), per_table_weight_dtype={"b": torch.quint4x2}),
    lambda: quantize_embeddings(_sequence(), per_table_weight_dtype={"b": torch.quint4x2}),
    lambda: quantize_inference_model(_processed()),
    lambda: quantize_embeddings(_split(_pooled()), torch.quint4x2),
]


def _split(module: Any) -> Any:
    quant_prep_enable_quant_state_dict_split_scale_bias(module)
    return module


def _flat(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return torch.cat([bags.values() for bags in output.values()])
    values: torch.Tensor = output.values()
    return values


def test_tables_are_buffers_under_their_names() -> None:
    """Rows of 64 int8 values: 64 bytes, a scale and a bias of 2 each; in multiples of 16."""
    tables = [EmbeddingBagConfig(40, 64, name, feature_names=[name]) for name in ("user", "film")]
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables, device=CPU)})
    quantized: Any = quantize_embeddings(model)
    expected = {f"ebc.embedding_bags.{name}.weight": (40, 80) for name in ("user", "film")}
    assert {n: tuple(b.shape) for n, b in quantized.named_buffers()} == expected
    assert {n: tuple(b.shape) for n, b in quantized.state_dict().items()} == expected
    assert {b.dtype for b in quantized.buffers()} == {torch.uint8}
    assert list(quantized.parameters()) == []
    sequence = quantize_embeddings(_sequence())
    assert list(sequence.state_dict()) == [f"embeddings.{name}.weight" for name in "abc"]
    assert table_bytes(quantized["ebc"]) == [40 * 68] * 2


def test_row_alignment_is_the_callers() -> None:
    config = EmbeddingBagConfig(40, 64, "t", data_type=DataType.INT8, feature_names=["t"])
    for alignment, width in ((1, 68), (4, 68), (32, 96)):
        module = QuantEmbeddingBagCollection([config], False, CPU, row_alignment=alignment)
        assert module.embedding_bags["t"].weight.shape == (40, width)


@pytest.mark.parametrize("dtype", BITS)
def test_scales_and_biases_may_be_buffers_of_their_own(dtype: torch.dtype) -> None:
    module: Any = quantize_embeddings(_split(_sequence()), dtype)
    state = dict(module.embeddings["a"].state_dict())
    rows = state["weight"].contiguous().numpy()
    weight = _sequence().embeddings["a"].weight
    if BITS[dtype] >= 16:
        assert list(state) == ["weight"]
        return
    assert list(state) == ["weight", "weight_qscale", "weight_qbias"]
    assert rows.shape == (50, 8 * BITS[dtype] // 8)
    scale, bias = (state[f"weight_{part}"].double().numpy() for part in ("qscale", "qbias"))
    assert scale.shape == bias.shape == (50, 1)
    bits = np.unpackbits(rows[:, :, None], axis=2, bitorder="little").reshape(50, 8, BITS[dtype])
    values = (bits * 2 ** np.arange(BITS[dtype])).sum(axis=2)
    np.testing.assert_allclose(values * scale + bias, _restored(weight, BITS[dtype]), atol=1e-7)


@pytest.mark.parametrize("make", MODULES)
def test_memory_is_held_once(make: Callable[[], Any]) -> None:
    module = make()
    copied = copy.deepcopy(module)
    for each in (module, copied, copied.to("meta").to_empty(device="cpu")):
        each(_batch())
        buffers = dict(each.named_buffers())
        pointers = {buffer.untyped_storage().data_ptr() for buffer in buffers.values()}
        flats = [lookup.weights for lookup in each.lookups().lookups]
        assert pointers == {flat.untyped_storage().data_ptr() for flat in flats}
        rows = [b for name, b in buffers.items() if name.endswith("weight")]
        wanted = sum(len(b) * b.stride(0) for b in rows)
        assert wanted <= sum(flat.numel() for flat in flats) < wanted + 128 * len(rows)


def _by_state_dict(module: Any, assign: bool = False) -> Any:
    other = copy.deepcopy(module)
    for value in other.state_dict().values():
        value.zero_()
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), assign=assign)
    return other


def _through_meta(module: Any) -> Any:
    state = copy.deepcopy(module.state_dict())
    other = copy.deepcopy(module).to("meta").to_empty(device="cpu")
    other.load_state_dict(state)
    return other


def _constructed(module: Any) -> Any:
    """A new module of the same tables, all zeros, that loads the rows."""
    if isinstance(module, QuantEmbeddingCollection):
        other: Any = QuantEmbeddingCollection(module.embedding_configs(), CPU)
    elif isinstance(module, QuantFeatureProcessedEmbeddingBagCollection):
        other = QuantFeatureProcessedEmbeddingBagCollection(
            module.embedding_bag_configs(),
            True,
            CPU,
            feature_processor=PositionWeightedModuleCollection({"x": 4, "y": 4, "z": 4}),
        )
    else:
        splits = "embedding_bags.a.weight_qscale" in module.state_dict()
        other = QuantEmbeddingBagCollection(
            module.embedding_bag_configs(), False, CPU, quant_state_dict_split_scale_bias=splits
        )
    assert other.training
    assert not bool(_flat(other.eval()(_batch())).any())
    other.load_state_dict(module.state_dict())
    return other


def _replaced(module: Any) -> Any:
    other = copy.deepcopy(module)
    for child in other.modules():
        for name, buffer in child._buffers.items():
            setattr(child, name, buffer.clone())
    return other


OLD_PATHS = {
    "quant.lookup": "recsys.inference.quantized_tables",
    "quant.modules": "recsys.inference.quant_modules",
    "quant.options": "recsys.inference.quantized_tables",
    "quant.rows": "recsys.inference.served_indexes",
}
"""Paths of classes in pickles of recsys 0.1."""


def _by_old_paths(module: Any) -> Any:
    """Copy through a pickle that names classes as recsys 0.1 did."""
    pickled = pickle.dumps(module, protocol=2)  # names are lines of text
    for path, old in OLD_PATHS.items():
        pickled = pickled.replace(f"recsys.inference.{path}\n".encode(), old.encode() + b"\n")
    assert b"recsys.inference.quant." not in pickled
    return pickle.loads(pickled)


@pytest.mark.parametrize("make", MODULES)
@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        _by_old_paths,
        lambda module: copy.deepcopy(copy.deepcopy(module)),
        lambda module: pickle.loads(pickle.dumps(module)),
        through_torch_save,
        _by_state_dict,
        lambda module: _by_state_dict(module, assign=True),
        _through_meta,
        _constructed,
        _replaced,
        lambda module: copy.deepcopy(module).double().float(),
        lambda module: copy.deepcopy(module).share_memory(),
        lambda module: pickle.loads(pickle.dumps(module.share_memory())),
    ],
)
def test_copies_look_up_the_same(make: Callable[[], Any], copied: Callable[[Any], Any]) -> None:
    module = make()
    expected = _flat(module(_batch()))
    other = copied(module)
    torch.testing.assert_close(_flat(other(_batch())), expected, rtol=0, atol=0)
    assert list(other.state_dict()) == list(module.state_dict())
    assert other.training is module.training is False
    # and they are copies: their lookups read their own rows only
    for name, buffer in other.named_buffers():
        if "weight" in name:
            buffer.zero_()
    assert not torch.equal(_flat(other(_batch())), expected)
    if copied is not _replaced:
        torch.testing.assert_close(_flat(module(_batch())), expected, rtol=0, atol=0)


def test_pickled_rows_are_written_once() -> None:
    tables = [EmbeddingBagConfig(5000, 12, name, feature_names=[name]) for name in "abcd"]
    module: Any = quantize_embeddings(EmbeddingBagCollection(tables=tables, device=CPU))
    assert len(pickle.dumps(module)) < 4 * 5000 * 16 + 20_000


def test_a_trained_checkpoint_can_be_loaded_first() -> None:
    trained, batch = _pooled(), _batch()
    nn.init.normal_(trained.embedding_bags["a"].weight)
    fresh = _pooled()
    fresh.load_state_dict(trained.state_dict())
    received = quantize_embeddings(fresh)(batch).values()
    assert torch.equal(received, quantize_embeddings(trained)(batch).values())
    assert not torch.equal(received, quantize_embeddings(_pooled())(batch).values())


# -- constructors -----------------------------------------------------------------------------


def test_rows_may_be_given() -> None:
    config = EmbeddingBagConfig(2, 4, "t", data_type=DataType.INT8, feature_names=["x"])
    rows = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]], dtype=torch.uint8)
    header = torch.tensor([[0.5, 1.0], [2.0, -1.0]], dtype=torch.float16)  # scale, bias
    batch = KeyedJaggedTensor(["x"], torch.tensor([0, 1]), lengths=torch.tensor([1, 1]))
    expected = torch.tensor([[1.0, 1.5, 2.0, 2.5], [7.0, 9.0, 11.0, 13.0]])
    for given in (
        (rows, header.view(torch.uint8)),
        (torch.cat([header.view(torch.uint8), rows], dim=1), None),
    ):
        module = QuantEmbeddingBagCollection(
            [config], False, CPU, table_name_to_quantized_weights={"t": given}
        )
        assert torch.equal(module(batch).values(), expected)
    for wrong, message in (
        ({"u": (rows, None)}, r"exactly the collection's tables; received \['u'\] for \['t'\]"),
        ({"t": (rows, None)}, r"uint8 of shape \(2, 8\) with scales and biases; received .*\(2, 4"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantEmbeddingBagCollection([config], False, CPU, table_name_to_quantized_weights=wrong)


def test_rows_that_were_replaced_must_fit() -> None:
    for wrong, received in (
        (torch.zeros(49, 16, dtype=torch.uint8), r"uint8 of \(49, 12\)"),
        (torch.zeros(50, 10, dtype=torch.uint8), r"uint8 of \(50, 10\)"),
        (torch.zeros(50, 16), r"float32 of \(50, 12\)"),
    ):
        module: Any = quantize_embeddings(_pooled())
        module.embedding_bags["a"].weight = wrong
        message = r"embedding_bags\['a'\] must be uint8 of shape \(50, 12\).* received torch."
        with pytest.raises(ValueError, match=message + received):
            module(_batch())


def test_a_part_of_a_table_is_not_the_table() -> None:
    module: Any = quantize_embeddings(_pooled())
    table = module.embedding_bags["a"]
    table.weight = table.weight[:49]  # at the same address
    with pytest.raises(ValueError, match=r"shape \(50, 12\).*uint8 of \(49, 12\)"):
        module(_batch())


def test_a_feature_of_several_tables_is_checked_against_the_smallest() -> None:
    for sizes in ((20, 50), (50, 20)):
        tables = [
            EmbeddingConfig(rows, 4, name, feature_names=["x"])
            for rows, name in zip(sizes, "ab", strict=True)
        ]
        module = quantize_embeddings(EmbeddingCollection(tables=tables, device=CPU))
        batch = KeyedJaggedTensor(["x"], torch.tensor([20]), lengths=torch.tensor([1]))
        with pytest.raises(IndexError, match=r"Id 20 .*0 of feature 'x'"):
            module(batch)


@pytest.mark.parametrize("make", [_pooled, _sequence, _processed])
def test_tables_may_take_turns_between_shards(make: Any) -> None:
    module: Any = quantize_inference_model(make())
    shards = [
        (replace(whole_table(config), rank=rank),)
        for config, rank in zip(module.configs(), (0, 1, 0), strict=True)
    ]
    spread = module.placed(shards, lambda rank: CPU)
    outputs = module(_batch()), spread(_batch())
    assert torch.equal(_flat(outputs[0]), _flat(outputs[1]))
    assert list(outputs[0].keys()) == list(outputs[1].keys())


@pytest.mark.parametrize("given", [None, torch.tensor([1]), {"x": torch.tensor([1])}])
def test_batches_must_be_keyed_jagged_tensors(given: Any) -> None:
    for make in (_pooled, _sequence):
        with pytest.raises(TypeError, match=r"features must be a KeyedJaggedTensor; received"):
            quantize_embeddings(make())(given)


def test_constructors_refuse_what_they_cannot_serve() -> None:
    config = EmbeddingBagConfig(2, 4, "t", data_type=DataType.INT8, feature_names=["x"])
    other = EmbeddingBagConfig(2, 8, "u", data_type=DataType.BF16, feature_names=["x"])
    none = EmbeddingBagConfig(2, 8, "n", data_type=DataType.INT8, feature_names=["x"])
    none.pooling = PoolingType.NONE
    for tables, options, message in (
        ([config, other], {}, r"table 'u' needs a data_type that can be served.*received BF16"),
        (
            [none],
            {},
            "received PoolingType.NONE for table 'n'. Use an EmbeddingCollection or Quant",
        ),
        ([config], {"output_dtype": torch.int8}, r"output_dtype must be one of .*torch\.int8"),
        ([config], {"register_tbes": True}, "register_tbes is not supported; received True"),
        (
            [config],
            {"quant_state_dict_split_scale_bias": True, "row_alignment": 1},
            "row_alignment must be even.*received 1",
        ),
        ([config], {"row_alignment": 0}, "row_alignment must be .*; received 0"),
    ):
        with pytest.raises(ValueError, match=message):
            QuantEmbeddingBagCollection(tables, False, CPU, **options)
    rows = [
        EmbeddingConfig(2, dim, f"t{dim}", data_type=DataType.INT8, feature_names=["x"])
        for dim in (4, 8)
    ]
    with pytest.raises(ValueError, match=r"received {'t4': 4, 't8': 8}"):
        QuantEmbeddingCollection(rows, CPU)


def test_names_that_a_dict_has_for_itself() -> None:
    config = EmbeddingBagConfig(9, 4, "items", feature_names=["x"])
    quantized: Any = quantize_embeddings(EmbeddingBagCollection(tables=[config], device=CPU))
    assert list(quantized.state_dict()) == ["embedding_bags.items.weight"]
    assert quantized.device == CPU
    assert copy.deepcopy(quantized).embedding_bags["items"].weight.shape == (9, 16)
