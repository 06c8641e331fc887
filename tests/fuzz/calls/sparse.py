"""Calls of `recsys.sparse`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from recsys.compat.sparse import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    pad_vbe_kjt_lengths,
    permute_multi_embedding,
    regroup_kts,
)
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.sparse import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    from_columns,
    hash_ids,
    jt_is_equal,
    kjt_is_equal,
    set_debug,
    set_value_checks,
)
from recsys.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor
from recsys.sparse.kjt_list import KJTList
from tests.fuzz.argument_kinds import (
    DEVICE,
    DTYPE,
    JT,
    KJT,
    KT,
    Kind,
    anything,
    either,
    flag,
    made,
    many,
    mapping,
    maybe,
    number,
    tensor,
    texts,
    whole,
    wholes,
)
from tests.fuzz.calls.call import Call, method


def _ints(*numbers: int) -> Kind:
    return tensor(lambda: torch.tensor(numbers))


def _floats(*numbers: float) -> Kind:
    return tensor(lambda: torch.tensor(numbers))


def _set_back(switch: Callable[[bool], None]) -> Callable[..., object]:
    def call(enabled: bool) -> None:
        switch(enabled)
        switch(switch is set_value_checks)  # the default

    return call


def _of_jt(name: str, arguments: dict[str, Kind]) -> Call:
    return Call(f"JaggedTensor.{name}", method(JT.right, name), arguments)


def _of_kjt(name: str, arguments: dict[str, Kind], words: Any = None) -> Call:
    return Call(f"KeyedJaggedTensor.{name}", method(KJT.right, name), arguments, words or {})


def _of_kt(name: str, arguments: dict[str, Kind]) -> Call:
    return Call(f"KeyedTensor.{name}", method(KT.right, name), arguments)


def _equal(function: Callable[..., bool], kind: Kind, names: tuple[str, str]) -> Call:
    return Call(function.__name__, function, dict.fromkeys(names, anything(kind.right)))


VALUES, WEIGHTS, LENGTHS = _ints(1, 2, 3), maybe(_floats(0.5, 1, 2)), _ints(1, 1, 1, 0)
KEYS = texts(["a", "b"])
PARTS = {
    "keys": KEYS,
    "values": VALUES,
    "weights": WEIGHTS,
    "lengths": LENGTHS,
    "stride": maybe(whole(2, 0)),
    "stride_per_key_per_rank": maybe(either(many(lambda: [[2], [2]], wholes([2])), _ints(1))),
    "inverse_indices": maybe(
        Kind(
            lambda: (["a", "b"], torch.tensor([[0, 1], [1, 0]])),
            lambda value: None if isinstance(value, tuple) else False,
        )
    ),
}
NEW_SIZE = {"desired_length": maybe(whole(2, 0)), "padding_value": number(0.0, is_finite=False)}
EMPTY = {
    "is_weighted": flag(False),
    "device": maybe(DEVICE),
    "values_dtype": maybe(DTYPE),
    "weights_dtype": maybe(DTYPE),
    "lengths_dtype": Kind(
        lambda: torch.int32,
        lambda value: None if isinstance(value, torch.dtype) else False,
    ),
}
NON_BLOCKING = Kind(lambda: False, flag(False).is_legal)  # torch itself takes no NumPy bool
MOVE = {"device": DEVICE, "non_blocking": NON_BLOCKING}
REGROUP = {
    "keyed_tensors": many(lambda: [KT.right()], KT),
    "groups": many(lambda: [["b"], ["a", "b"]], KEYS),
}

_SWITCHES = set_debug, set_value_checks

CALLS = [
    *(Call(switch.__name__, _set_back(switch), {"enabled": flag(False)}) for switch in _SWITCHES),
    Call("JaggedTensor", JaggedTensor, {
        "values": VALUES, "weights": WEIGHTS, "lengths": maybe(_ints(1, 2)),
        "offsets": maybe(_ints(0, 1, 3)),
    }),
    Call("JaggedTensor.from_dense", JaggedTensor.from_dense, {
        "values": many(lambda: [torch.ones(2), torch.ones(1)], VALUES),
        "weights": maybe(many(lambda: [torch.ones(2), torch.ones(1)], VALUES)),
    }),
    Call("JaggedTensor.from_dense_lengths", JaggedTensor.from_dense_lengths, {
        "values": tensor(lambda: torch.ones(2, 3)), "lengths": _ints(1, 3),
        "weights": maybe(tensor(lambda: torch.ones(2, 3))),
    }),
    Call("JaggedTensor.empty", JaggedTensor.empty, EMPTY),
    Call("JaggedTensor.empty_like", JaggedTensor.empty_like, {"jt": JT, "device": maybe(DEVICE)}),
    _of_jt("to_padded_dense", NEW_SIZE),
    Call("JaggedTensor.to_padded_dense_weights", method(
        lambda: JaggedTensor(torch.ones(3), torch.ones(3), torch.tensor([1, 2])),
        "to_padded_dense_weights"), NEW_SIZE),
    _of_jt("to", MOVE),
    _of_jt("copy_", {"jt": JT, "non_blocking": NON_BLOCKING}),
    Call("KeyedJaggedTensor", KeyedJaggedTensor, PARTS | {
        "lengths": maybe(LENGTHS),
        "offsets": maybe(_ints(0, 1, 2, 3, 3)),
        "stride_per_key": maybe(wholes([2, 2])),
        "length_per_key": maybe(wholes([2, 1])),
        "lengths_offset_per_key": maybe(wholes([0, 2, 4])),
        "offset_per_key": maybe(wholes([0, 2, 3])),
        "index_per_key": maybe(mapping(lambda: {"a": 0, "b": 1}, whole(0, 0))),
        "jt_dict": maybe(mapping(lambda: {"a": JT.right(), "b": JT.right()}, JT)),
    }),
    Call("KeyedJaggedTensor.from_lengths_sync", KeyedJaggedTensor.from_lengths_sync, PARTS),
    Call("KeyedJaggedTensor.from_offsets_sync", KeyedJaggedTensor.from_offsets_sync, {
        "keys": KEYS, "values": VALUES, "weights": WEIGHTS, "offsets": _ints(0, 1, 2, 3, 3),
        **{name: PARTS[name] for name in (
            "stride", "stride_per_key_per_rank", "inverse_indices")},
    }),
    Call("KeyedJaggedTensor.from_jt_dict", KeyedJaggedTensor.from_jt_dict, {
        "jt_dict": mapping(lambda: {"a": JT.right(), "b": JT.right()}, JT),
    }),
    Call("KeyedJaggedTensor.concat", KeyedJaggedTensor.concat, {
        "kjt_list": many(lambda: [KJT.right()], KJT, 1),
    }),
    Call("KeyedJaggedTensor.empty", KeyedJaggedTensor.empty, EMPTY),
    Call("KeyedJaggedTensor.empty_like", KeyedJaggedTensor.empty_like, {
        "kjt": KJT, "device": maybe(DEVICE),
    }),
    _of_kjt("to_dict", {"compute_offsets": anything(lambda: True)}),
    _of_kjt("split", {"segments": wholes([1, 1])}),
    _of_kjt("permute", {"indices": wholes([1, 0]), "indices_tensor": maybe(_ints(1, 0))}),
    _of_kjt("with_values", {"values": VALUES}),
    _of_kjt("to", MOVE | {"dtype": maybe(DTYPE)}),
    _of_kjt("copy_", {"kjt": KJT, "non_blocking": NON_BLOCKING}),
    _of_kjt("dist_splits", {"key_splits": wholes([1, 1])}),
    _of_kjt("__getitem__", {"key": Kind(
        lambda: "a", lambda value: None if isinstance(value, str) else False)}),
    Call("KeyedTensor", KeyedTensor, {
        "keys": KEYS, "length_per_key": wholes([1, 2]),
        "values": tensor(lambda: torch.ones(2, 3)), "key_dim": whole(1, -2, 1),
        "offset_per_key": maybe(wholes([0, 1, 3])),
        "index_per_key": maybe(mapping(lambda: {"a": 0, "b": 1}, whole(0, 0))),
    }),
    Call("KeyedTensor.from_tensor_list", KeyedTensor.from_tensor_list, {
        "keys": KEYS, "tensors": many(lambda: [torch.ones(2, 1), torch.ones(2, 2)], VALUES),
        "key_dim": whole(1, -2, 1), "cat_dim": whole(1, -2, 1),
    }),
    Call("KeyedTensor.regroup", KeyedTensor.regroup, REGROUP),
    Call("KeyedTensor.regroup_as_dict", KeyedTensor.regroup_as_dict, REGROUP | {
        "keys": many(lambda: ["x", "y"], anything(lambda: "x")),
    }),
    _of_kt("to", MOVE),
    _of_kt("__getitem__", {"key": Kind(
        lambda: "a", lambda value: None if isinstance(value, str) else False)}),
    Call("regroup_kts", regroup_kts, REGROUP),
    Call("permute_multi_embedding", permute_multi_embedding, REGROUP),
    Call("pad_vbe_kjt_lengths", pad_vbe_kjt_lengths, {"features": KJT}),
    Call("ComputeJTDictToKJT", lambda **given: ComputeJTDictToKJT()(**given), {
        "jt_dict": mapping(lambda: {"a": JT.right()}, JT),
    }),
    Call("ComputeKJTToJTDict", lambda **given: ComputeKJTToJTDict()(**given), {
        "keyed_jagged_tensor": KJT,
    }),
    Call("KJTList", KJTList, {"features": many(lambda: [KJT.right()], KJT)}),
    Call("KJTList.to", method(lambda: KJTList([KJT.right()]), "to"), MOVE),
    Call("from_columns", from_columns, {
        "columns": anything(lambda: {"a": [[1], [2, 3]]}),
        "weights": maybe(mapping(lambda: {"a": [[1.0], [0.5, 2.0]]})),
        "padding": maybe(whole(-1, None)),
    }),
    Call("hash_ids", hash_ids, {
        "features": KJT, "num_embeddings": mapping(lambda: {"a": 5, "b": 5}, whole(5)),
    }),
    _equal(jt_is_equal, JT, ("jt_1", "jt_2")),
    _equal(kjt_is_equal, KJT, ("kjt_1", "kjt_2")),
    Call("validate_keyed_jagged_tensor", validate_keyed_jagged_tensor, {
        "kjt": KJT,
        "configs": maybe(many(
            lambda: [EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"])],
            made(lambda: EmbeddingBagConfig(9, 4, "t", feature_names=["a", "b"])),
        )),
    }),
]  # fmt: skip
