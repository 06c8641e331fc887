"""Rows that go to the disk and come back, in an unsharded table, against a large one."""

from __future__ import annotations

import copy
import errno
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.inference import quantize_embeddings
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, HashedIds
from recsys.modules.ids.row_log import RecordField, RowLog
from recsys.modules.ids.row_store import RowStore, open_log
from recsys.optim import Adagrad, Adam, RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.modules.ids.test_row_log import limit_of_files

NAMES = ["a", "b"]


def batch_of(draw: random.Random, num_ids: int, size: int = 8) -> KeyedJaggedTensor:
    ids = [draw.randrange(num_ids) * 0x5851F42D4C957F2D % 2**64 - 2**63 for _ in range(4 * size)]
    weights = torch.tensor([draw.random() for _ in ids])
    lengths = torch.full((2 * size,), 2)
    return KeyedJaggedTensor(NAMES, torch.tensor(ids), weights, lengths)


def without_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(NAMES, batch.values(), lengths=batch.lengths())


def collection(
    folder: Path | None,
    rows: int = 256,
    optimizer: Any = RowWiseAdagrad,
    kind: str = "pooled",
    **fields: Any,
) -> Any:
    torch.manual_seed(0)
    overflow = None if folder is None else str(folder)
    config: Any = EmbeddingConfig if kind == "sequence" else EmbeddingBagConfig
    tables = [
        config(
            rows, 4, f"t{name}", feature_names=[name], weight_init_min=-0.5, weight_init_max=0.5,
            ids=HashedIds(eviction=eviction, unknown="zero", num_regions=2, overflow=overflow),
            **fields,
        )
        for name, eviction in (("a", LRU()), ("b", LFU(2)))
    ]  # fmt: skip
    made: Any
    if kind == "sequence":
        made = EmbeddingCollection(tables=tables)
    else:
        made = EmbeddingBagCollection(tables=tables, is_weighted=kind == "weighted")
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, made.parameters(), {"lr": 0.1})
    return made


def read(module: Any, batch: KeyedJaggedTensor, kind: str = "pooled") -> Tensor:
    if kind == "sequence":
        found = module(without_weights(batch))
        return torch.cat([found[name].values() for name in NAMES])
    values: Tensor = module(batch if kind == "weighted" else without_weights(batch)).values()
    return values


def train(module: Any, batch: KeyedJaggedTensor, kind: str = "pooled") -> Tensor:
    values = read(module, batch, kind)
    (values * values.detach().sin()).sum().backward()
    return values.detach()


def train_on(module: Any, batches: list[KeyedJaggedTensor]) -> None:
    for batch in batches:
        train(module, batch)


def indexes(module: Any) -> list[Any]:
    return [table.index for table in module._tables()]


def fill(module: Any, seed: int = 0, steps: int = 60) -> random.Random:
    draw = random.Random(seed)
    for _ in range(steps):
        train(module, batch_of(draw, 900))
    assert min(len(index.log) for index in indexes(module)) > 100
    return draw


def init(values: Tensor) -> Tensor:
    return torch.nn.init.normal_(values)


@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, Adagrad, RowWiseAdagrad, Adam])
def test_it_trains_as_a_large_table(tmp_path: Path, kind: str, optimizer: Any) -> None:
    fields = {"init_fn": init} if optimizer is Adagrad else {}
    small = collection(tmp_path, 256, optimizer, kind, **fields)
    large = collection(None, 16_384, optimizer, kind, **fields)
    draw = random.Random(1)
    for step in range(100):
        batch = batch_of(draw, 900)
        for module in (small, large):
            module.train(step % 4 < 3)
        if step % 4 < 3:
            assert torch.equal(train(small, batch, kind), train(large, batch, kind))
        else:
            with torch.inference_mode(step % 8 == 3):
                assert torch.equal(read(small, batch, kind), read(large, batch, kind))
    for index in indexes(small):
        stats = index.stats()
        assert stats.refused == 0
        assert len(index.log) > 100
        assert stats.admitted > stats.used + len(index.log) + 100  # so many have come back


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    module = collection(tmp_path, optimizer=Adam)
    draw = fill(module)
    arrays = [p.detach() for p in module.parameters()]
    arrays += [s for state in module.optimizer_states().values() for s in state.values()]
    arrays += [getattr(i, name) for i in indexes(module) for name in ("ids", "last_used", "seen")]
    before = [array.clone() for array in arrays], [i.stats() for i in indexes(module)]
    sizes = [(len(i.log), i.log.num_bytes, i.step) for i in indexes(module)]
    module.eval()
    known = {id_ for i in indexes(module) for id_ in i.pairs()[0].tolist()}
    batch = batch_of(draw, 900)
    assert set(batch.values().tolist()) - known
    assert read(module, batch).ne(0).any(1).all()
    assert all(map(torch.equal, arrays, before[0]))
    assert [i.stats() for i in indexes(module)] == before[1]
    assert [(len(i.log), i.log.num_bytes, i.step) for i in indexes(module)] == sizes


def test_a_batch_of_evaluation_with_more_ids_than_rows(tmp_path: Path) -> None:
    """Ids read their own rows until all rows are in use; other ids read the row of unknown ids."""
    module, large = collection(tmp_path, 64), collection(None, 16_384)
    draw = random.Random(0)
    for _ in range(300):
        batch = batch_of(draw, 400, size=1)
        for one in (module, large):
            train(one, batch)
    for one in (module, large):
        one.eval()
    ids = torch.arange(400) * 0x5851F42D4C957F2D - 2**63
    batch = KeyedJaggedTensor(NAMES, ids.repeat(2), lengths=torch.ones(800).long())
    found, expected = read(module, batch)[:, :4], read(large, batch)[:, :4]
    is_equal = (found == expected).all(1)
    is_trained = expected.ne(0).any(1)
    assert found[~is_equal].eq(0).all()
    assert 63 <= int((is_equal & is_trained).sum()) <= 128 < int(is_trained.sum())


def test_a_backward_pass_in_evaluation_is_refused(tmp_path: Path) -> None:
    module = collection(tmp_path)
    draw = fill(module)
    module.eval()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(ValueError, match="no backward pass; received a gradient"):
        read(module, batch_of(draw, 900)).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    module.train()
    train(module, batch_of(draw, 900))


def test_a_full_disk_ends_the_training(tmp_path: Path) -> None:
    module = collection(tmp_path)
    draw = fill(module)
    batches = [batch_of(draw, 900) for _ in range(20)]
    with limit_of_files(1000), pytest.raises(OSError, match="has its overflow in") as info:
        train_on(module, batches)
    assert info.value.errno == errno.EFBIG
    assert str(tmp_path) in str(info.value)
    with pytest.raises(OSError, match="rows may be missing now"):
        train_on(module, batches)


def test_a_failed_read_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = collection(tmp_path)
    draw = fill(module)
    module.eval()
    before = [p.detach().clone() for p in module.parameters()]

    def fail(numbers: Tensor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(indexes(module)[1].log, "read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read(module, batch_of(draw, 900))
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_the_folder_is_made_by_the_first_training_batch(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    module, batch = collection(tmp_path / "file"), batch_of(random.Random(0), 10)
    module.eval()
    read(module, batch)
    module.train()
    with pytest.raises(OSError, match="cannot create its folder"):
        train(module, batch)


def test_logs_go_with_the_model(tmp_path: Path) -> None:
    module = collection(tmp_path / "rows")
    fill(module)
    assert len(list((tmp_path / "rows").iterdir())) == 4
    del module
    assert not list((tmp_path / "rows").iterdir())


def test_the_state_of_other_modules_keeps_the_log(tmp_path: Path) -> None:
    module = collection(tmp_path)
    fill(module)
    sizes = [len(index.log) for index in indexes(module)]
    module.load_state_dict({}, strict=False)
    assert [len(index.log) for index in indexes(module)] == sizes
    module.load_state_dict(collection(None).state_dict())
    assert [len(index.log) for index in indexes(module)] == [0, 0]
    module.state_dict()


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"eviction": None}, "must have an eviction, .*eviction=None"),
        ({"ttl": 5}, "must have no ttl: .*ttl=5"),
        ({"admission": AtLeast(2)}, "must have no admission: .*admission=AtLeast"),
        ({"overflow": ""}, r"HashedIds\.overflow must not be empty; received ''"),
    ],
)
def test_rules_that_do_not_fit_are_named(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HashedIds(**{"overflow": "/rows"} | rules)


def test_an_overflow_is_text() -> None:
    with pytest.raises(TypeError, match=r"HashedIds\.overflow must be .*; received 5"):
        HashedIds(overflow=5)  # type: ignore[arg-type]


def test_ways_that_would_lose_rows_are_refused(tmp_path: Path) -> None:
    module = collection(tmp_path)
    copy.deepcopy(module).state_dict()  # nothing is on the disk yet
    fill(module)
    with pytest.raises(ValueError, match=r"A state dict .*'ta' with \d+"):
        module.state_dict()
    with pytest.raises(ValueError, match="cannot be copied or pickled"):
        copy.deepcopy(module)
    with pytest.raises(ValueError, match=r"A state dict .*'ta' with \d+"):
        DistributedModelParallel(module, env=ShardingEnv.from_local(), device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"Quantization needs all rows .*'ta'"):
        quantize_embeddings(module)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    module = collection(tmp_path, optimizer=torch.optim.SGD)
    fill(module)
    index = indexes(module)[0]
    fields = [*index.log.fields, RecordField("sum", torch.float32, 1)]
    with pytest.raises(ValueError, match=r"'ta' must .*\['weight', 'sum'\] .*of \['w"):
        open_log(index, "ta", fields)
    index.clear_log()
    assert open_log(index, "ta", fields).fields == tuple(fields)


def test_other_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = collection(tmp_path)
    [group] = module.marked_lookups()
    monkeypatch.setattr(group.tbe.layout, "device", torch.device("cuda"))
    with pytest.raises(ValueError, match=r"None for tables on cuda; .*'ta'"):
        RowStore(module.configs(), indexes(module), group.tbe)


def test_records_have_the_fields_of_the_optimizer(tmp_path: Path) -> None:
    expected = {
        torch.optim.SGD: [("weight", 4)],
        RowWiseAdagrad: [("weight", 4), ("sum", 1)],
        Adam: [("weight", 4), ("exp_avg", 4), ("exp_avg_sq", 4)],
    }
    for optimizer, fields in expected.items():
        module = collection(tmp_path, optimizer=optimizer)
        train(module, batch_of(random.Random(0), 10))
        log = indexes(module)[0].log
        assert isinstance(log, RowLog)
        assert [(field.name, field.values) for field in log.fields] == fields
