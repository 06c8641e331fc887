"""Tables with hashed ids train like a dict of rows by id."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.types import ShardingEnv
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.hashed_ids import LFU, AtLeast, DistanceLFU, HashedIds, Probability
from recsys.modules.ids.table_index import index_row_bytes
from recsys.modules.tables.embedding_init import init_ids
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor

DIM, LR = 4, 0.5
NAMES = ("a", "b")


def bags_of(rng: np.random.Generator, num_ids: int, size: int = 8) -> KeyedJaggedTensor:
    """A batch of two features whose ids lie anywhere among 64-bit numbers."""
    lengths = torch.from_numpy(rng.integers(0, 4, 2 * size))
    numbers = rng.integers(0, num_ids, int(lengths.sum()))
    ids = torch.from_numpy(numbers) * 0x5851F42D4C957F2D - 2**63
    return KeyedJaggedTensor(list(NAMES), ids, lengths=lengths)


def bags(rows: int = 64, optimizer: Any = torch.optim.SGD, **rules: Any) -> Any:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(rows, DIM, "t", feature_names=list(NAMES), ids=HashedIds(**rules))]
    ebc = EmbeddingBagCollection(tables=tables)
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": LR})
    return ebc


def table_of(collection: Any) -> Any:
    return next(iter(collection._tables()))


class Dict:
    """Rows by id, in float64; it asks the index which ids have a row, and nothing else."""

    def __init__(self, table: Any, config: Any, is_adagrad: bool) -> None:
        self.table, self.config, self.is_adagrad = table, config, is_adagrad
        self.rows: dict[int, Any] = {}
        self.sums: dict[int, float] = {}
        self.shared: dict[int, Any] = {}

    def read(self, ids: Tensor) -> list[Any]:
        """The row of each id; call it after the collection has read the same ids."""
        index = self.table.index
        known = set(index.pairs()[0].tolist())
        for gone in set(self.rows) - known:
            del self.rows[gone], self.sums[gone]
        found = []
        for id_ in ids.tolist():
            if id_ in known and id_ not in self.rows:
                values = init_ids(index.init_seed_number, torch.tensor([id_]), 1, self.config)
                self.rows[id_], self.sums[id_] = values[0].double().numpy(), 0.0
            found.append(self.rows.get(id_))
        return found

    def update(self, gradients: dict[int, Any]) -> None:
        for id_, gradient in gradients.items():
            if id_ in self.rows:
                rate = LR
                if self.is_adagrad:
                    self.sums[id_] += float((gradient**2).mean())
                    rate = LR / (np.sqrt(self.sums[id_]) + 1e-8)
                self.rows[id_] = self.rows[id_] - rate * gradient


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad])
@pytest.mark.parametrize("pooling", ["sum", "mean", ""])
@pytest.mark.parametrize(("rows", "num_ids"), [(512, 100), (64, 300)])
def test_trains_as_a_dict(rows: int, num_ids: int, pooling: str, optimizer: Any) -> None:
    """Also while ids lose their rows to others; unknown ids read zeros."""
    torch.manual_seed(0)
    rules = HashedIds(unknown="zero", admission=AtLeast(2) if rows == 64 else None)
    if pooling:
        config: Any = EmbeddingBagConfig(
            rows, DIM, "t", feature_names=list(NAMES), pooling=pooling, ids=rules
        )
        collection: Any = EmbeddingBagCollection(tables=[config])
    else:
        config = EmbeddingConfig(rows, DIM, "t", feature_names=list(NAMES), ids=rules)
        collection = EmbeddingCollection(tables=[config])
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": LR})
    oracle = Dict(table_of(collection), config, optimizer is RowWiseAdagrad)
    rng, columns = np.random.default_rng(0), np.arange(1.0, DIM + 1) / 7
    for step in range(60):
        batch = bags_of(rng, num_ids)
        collection.train(step % 5 != 4)
        found, loss = collection(batch), torch.zeros(())
        gradients: dict[int, Any] = {}
        for name in NAMES:
            ids, lengths = batch[name].values(), batch[name].lengths().numpy()
            read = [np.zeros(DIM) if row is None else row for row in oracle.read(ids)]
            values = np.array(read).reshape(-1, DIM)
            bag_of = np.repeat(np.arange(len(lengths)), lengths)
            share = np.ones(len(ids)) if pooling != "mean" else 1 / lengths[bag_of]
            output = found[name] if pooling else found[name].values()
            wanted = values
            if pooling:
                wanted = np.zeros((len(lengths), DIM))
                np.add.at(wanted, bag_of, values * share[:, None])
            torch.testing.assert_close(
                output.detach().double(), torch.from_numpy(wanted), rtol=1e-4, atol=1e-5
            )
            factors = np.arange(1.0, len(output) + 1)
            loss = loss + (output * torch.from_numpy(factors[:, None] * columns)).sum()
            of_ids = factors[bag_of] * share if pooling else factors
            for id_, factor in zip(ids.tolist(), of_ids, strict=True):
                gradients[id_] = gradients.get(id_, 0) + factor * columns
        if collection.training:
            loss.backward()
            oracle.update(gradients)
    stats = table_of(collection).index.stats()
    assert stats.used == len(oracle.rows)
    assert (stats.evicted > 0) == (num_ids == 300)


def test_rows_in_flight_keep_their_ids() -> None:
    """Two batches before the backward of the first: the second takes no row of the first."""
    ebc = bags(64, eviction=LFU())
    rng = np.random.default_rng(1)
    for _ in range(40):  # full
        ebc(bags_of(rng, 500)).values().sum().backward()
    index = table_of(ebc).index
    first = ebc(bags_of(rng, 10**6, 16)).values()
    held = index.ids[index.last_used == index.step].tolist()
    others = [ebc(bags_of(rng, 10**6, 16)).values() for _ in range(4)]
    assert set(held) <= set(index.pairs()[0].tolist())
    assert index.stats().refused > 0
    first.sum().backward()
    del others  # graphs that are freed end the hold, too
    for _ in range(10):
        ebc(bags_of(rng, 10**6, 16)).values().sum().backward()
    assert not set(held) <= set(index.pairs()[0].tolist())


def test_evaluation_writes_nothing() -> None:
    ebc = bags(128, RowWiseAdagrad, eviction=LFU(3), ttl=5)
    rng = np.random.default_rng(2)
    for _ in range(5):
        ebc(bags_of(rng, 100)).values().sum().backward()
    before = copy.deepcopy(ebc.state_dict())
    ebc.eval()
    ebc(bags_of(rng, 1000))
    ebc.train()
    with torch.no_grad():
        ebc(bags_of(rng, 1000))
    for name, value in ebc.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_unknown_ids_share_a_trained_row() -> None:
    ebc = bags(64, admission=AtLeast(200))
    batch = bags_of(np.random.default_rng(3), 10**6)
    first = ebc(batch).values()
    first.sum().backward()
    assert table_of(ebc).index.stats().used == 0
    assert not torch.equal(ebc(batch).values(), first)
    lengths = batch.lengths().view(2, -1).t().reshape(-1, 1)
    rows = first.view(-1, DIM) / lengths.clamp(1)
    assert len(torch.unique(rows[lengths.flatten() > 0].round(decimals=5), dim=0)) == 1


@pytest.mark.parametrize("way", ["checkpoint", "pickle", "deepcopy", "state_dict"])
def test_training_goes_on_after_a_copy(way: str, tmp_path: Path) -> None:
    rules = {"eviction": LFU(4), "ttl": 9, "admission": AtLeast(2)}
    first = bags(128, RowWiseAdagrad, **rules)
    rng = np.random.default_rng(4)
    batches = [bags_of(rng, 300) for _ in range(40)]
    for batch in batches[:20]:
        first(batch).values().sum().backward()
    torch.manual_seed(1)
    second = bags(128, RowWiseAdagrad, **rules)
    second(batches[-1]).values().sum().backward()
    if way == "checkpoint":
        with pytest.warns(UserWarning, match="lacks the optimizer state"):
            save_checkpoint(tmp_path / "c", first)
        load_checkpoint(tmp_path / "c", second)
    elif way == "pickle":
        second = pickle.loads(pickle.dumps(first))
    elif way == "deepcopy":
        second = copy.deepcopy(first)
    else:
        second.load_state_dict(first.state_dict())
    if way in ("checkpoint", "state_dict"):  # without the optimizer's state
        for collection in (first, second):
            for states in collection.optimizer_states().values():
                for state in states.values():
                    state.zero_()
    for batch in batches[20:]:
        outputs = [collection(batch).values() for collection in (first, second)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
    assert table_of(first).index.pairs()[0].equal(table_of(second).index.pairs()[0])


def test_two_tables_and_tables_of_row_numbers() -> None:
    """Tables of both kinds, also of one feature; only row numbers have limits."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(100, DIM, "t", feature_names=["a"], ids=HashedIds()),
        EmbeddingBagConfig(50, DIM, "rows", feature_names=["b"]),
        EmbeddingBagConfig(100, DIM, "u", feature_names=["b", "a"], ids=HashedIds(seed=3)),
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": LR})
    lengths = torch.tensor([1, 1, 1, 1])
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([-1, 2**63 - 1, 4, 49]), lengths=lengths)
    out = ebc(batch)
    assert torch.equal(out["b@rows"], ebc.embedding_bags["rows"].weight[[4, 49]])
    for name, table in (("a@t", "t"), ("a@u", "u"), ("b@u", "u")):
        index = ebc.embedding_bags[table].index
        ids, rows = index.pairs()
        place = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        wanted = [place[i] for i in batch[name[0]].values().tolist()]
        assert torch.equal(out[name], ebc.embedding_bags[table].weight[wanted])
    bad = KeyedJaggedTensor(["a", "b"], torch.tensor([-1, 2**63 - 1, 4, 50]), lengths=lengths)
    with pytest.raises(IndexError, match=r"Id 50 .*of feature 'b'.*Table 'rows'"):
        ebc(bad)


def test_the_output_has_the_ids_as_given() -> None:
    torch.manual_seed(0)
    config = EmbeddingConfig(64, DIM, "t", feature_names=list(NAMES), ids=HashedIds())
    collection = EmbeddingCollection(tables=[config], need_indices=True)
    batch = bags_of(np.random.default_rng(5), 40)
    with torch.no_grad():
        found = collection(batch)
    assert torch.equal(torch.cat([found[n].weights() for n in NAMES]), batch.values())


def test_initial_values_depend_on_the_id_alone() -> None:
    batch = bags_of(np.random.default_rng(6), 20)
    found = []
    for rows in (64, 4096):
        ebc = bags(rows)
        found.append(ebc(batch).values() * rows**0.5)  # of the range of values
    torch.testing.assert_close(*found)


def test_an_init_fn_fills_new_rows() -> None:
    def fill(rows: Tensor) -> Tensor:
        return torch.arange(1.0, len(rows) + 1)[:, None].expand(-1, DIM)

    config = EmbeddingConfig(64, DIM, "t", feature_names=["a"], ids=HashedIds(), init_fn=fill)
    collection = EmbeddingCollection(tables=[config])
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": LR})
    batch = KeyedJaggedTensor(["a"], torch.tensor([9, -9, 0, 9]), lengths=torch.tensor([4]))
    assert collection(batch)["a"].values()[:, 0].tolist() == [3, 1, 2, 3]


def test_errors_name_the_table(tmp_path: Path) -> None:
    ebc = bags(64, None)
    batch = bags_of(np.random.default_rng(7), 5)
    with pytest.raises(ValueError, match="'t' with HashedIds needs an optimizer"):
        ebc(batch)
    ebc.eval()(batch)
    with pytest.raises(ValueError, match="compiled by TorchScript; received table 't'"):
        torch.jit.script(ebc)
    with pytest.raises(ValueError, match=r"traced or exported; received \['t'\]"):
        torch.fx.symbolic_trace(ebc)
    other = bags(4096, seed=1)
    ebc.train()
    trained = bags(4096)
    trained(batch).values().sum().backward()
    with pytest.raises(ValueError, match="'t' must be loaded with the"):
        other.load_state_dict(trained.state_dict())


def test_rows_are_rounded_up_to_whole_regions() -> None:
    for rows, wanted in ((1, 64), (64, 64), (65, 128), (300, 512), (100_000, 102_400)):
        config = EmbeddingBagConfig(rows, DIM, "t", feature_names=["a"], ids=HashedIds())
        assert config.num_embeddings == wanted
        config.__post_init__()
        assert config.num_embeddings == wanted


@pytest.mark.parametrize(
    "rules", [{}, {"eviction": LFU()}, {"admission": AtLeast(2)}, {"eviction": DistanceLFU()}]
)
def test_bytes_of_an_index_are_those_of_its_arrays(rules: dict[str, Any]) -> None:
    index = table_of(bags(1000, **rules)).index
    arrays = [a for a in index.buffers() if a.dim()]
    assert sum(a.nbytes for a in arrays) == 1024 * index_row_bytes(index.rules)


def group_of(collection: Any) -> Any:
    return collection._lookups.groups[0]._hashed


def test_a_hold_of_a_node_of_cpp_ends_with_its_graph() -> None:
    """Kernels of other libraries return outputs of such nodes."""
    ebc = bags()
    ebc(bags_of(np.random.default_rng(8), 5))
    group = group_of(ebc)
    for ends in ("backward", "free"):
        assert not group._in_flight
        output = torch.ones(2, requires_grad=True) * 2
        assert "Backward0" in type(output.grad_fn).__name__
        group.hold(output)
        assert len(group._in_flight) == 1
        if ends == "backward":
            output.sum().backward()
            assert not group._in_flight
        del output


def test_the_end_of_a_hold_does_not_end_another() -> None:
    ebc = bags()
    batch = bags_of(np.random.default_rng(8), 5)
    ebc(batch).values().sum().backward()
    group, output = group_of(ebc), torch.ones(2, requires_grad=True)
    first, second = output * 2, output * 3
    group.hold(first)
    group.hold(second)
    first.sum().backward()
    del first
    assert len(group._in_flight) == 1
    del second
    assert not group._in_flight


def test_tables_of_one_lookup_count_their_own_batches(tmp_path: Path) -> None:
    """Tables count their own batches, also after one table was loaded alone."""
    rules = HashedIds(eviction=DistanceLFU(2), ttl=30, admission=Probability(0.5), num_regions=1)

    def tables_of(*names: str) -> Any:
        torch.manual_seed(0)
        tables = [EmbeddingBagConfig(64, DIM, n, feature_names=[f"f{n}"], ids=rules) for n in names]
        ebc = EmbeddingBagCollection(tables=tables)
        apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": LR})
        return ebc

    rng = np.random.default_rng(9)

    def train(collections: Any, count: int) -> None:
        """Table "b" of all collections gets the same ids."""
        for _ in range(count):
            ids = {f"f{n}": torch.from_numpy(rng.integers(0, 200, 6)) for n in "abc"}
            for ebc in collections:
                keys = [f"f{table.name}" for table in ebc.configs()]
                values = torch.cat([ids[key] for key in keys])
                ones = torch.ones(len(values), dtype=torch.int64)
                ebc(KeyedJaggedTensor(keys, values, lengths=ones)).values().sum().backward()

    joined, alone = tables_of("a", "b", "c"), tables_of("b")
    train([joined], 50)
    alone_index, index = alone.embedding_bags["b"].index, joined.embedding_bags["b"].index
    train([alone], 7)
    index.load_state_dict(alone_index.state_dict())
    joined.embedding_bags["b"].weight.data.copy_(alone.embedding_bags["b"].weight.data)
    index.init_seed_number = alone_index.init_seed_number
    train([joined, alone], 60)
    assert [joined.embedding_bags[n].index.step for n in "abc"] == [110, 67, 110]
    for name, value in alone_index.state_dict().items():
        assert torch.equal(index.state_dict()[name], value), name
    assert index.stats().evicted > 0


def test_a_load_of_other_modules_changes_nothing() -> None:
    first, second = bags(), bags()
    rng = np.random.default_rng(10)
    batches = [bags_of(rng, 300) for _ in range(40)]
    for step, batch in enumerate(batches):
        if step == 20:
            whole = torch.nn.ModuleDict({"ebc": first, "over": torch.nn.Linear(1, 1)})
            whole.load_state_dict({"over.weight": torch.ones(1, 1)}, strict=False)
        outputs = [collection(batch).values() for collection in (first, second)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
    assert table_of(first).index.step == 40
    assert table_of(first).index.stats() == table_of(second).index.stats()


def is_zero(collection: Any) -> bool:
    """Return True if an id that the table does not have reads zeros."""
    batch = KeyedJaggedTensor(list(NAMES), torch.tensor([-9]), lengths=torch.tensor([1, 0]))
    was_training = collection.training
    with torch.no_grad():
        found = collection.eval()(batch).values()
    collection.train(was_training)
    return not bool(found.any())


def one_rank(**rules: Any) -> Any:
    """A sharded collection whose updates wait for a step."""
    ebc = bags(64, None, **rules)
    apply_optimizer_in_backward(
        RowWiseAdagrad, ebc.parameters(), {"lr": LR}, update_mode="deferred"
    )
    model = torch.nn.ModuleDict({"ebc": ebc})
    return DistributedModelParallel(model, env=ShardingEnv.from_local(), device=torch.device("cpu"))


UNKNOWN = {"unknown": "zero", "admission": AtLeast(200)}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_unknown_ids_read_zeros_after_a_load(is_sharded: bool) -> None:
    def new() -> Any:
        return one_rank(**UNKNOWN).module["ebc"] if is_sharded else bags(64, **UNKNOWN)

    first, second = new(), new()
    state = {name: torch.ones_like(value) for name, value in bags(64).state_dict().items()}
    weights = {name: value for name, value in state.items() if name.endswith("weight")}
    for given in (first.state_dict(), weights):
        assert is_zero(second)
        for table in (first, second):
            shards = table._stages.tables["t"].shards if is_sharded else []
            for weight in [s.parameter for s in shards] or [table_of(table).weight]:
                weight.data.fill_(1.0 if table is first else 0.0)
        second.load_state_dict(given, strict=False)
        assert is_zero(second)


def test_unknown_ids_read_zeros_after_a_backward_pass_in_evaluation() -> None:
    ebc = bags(64, **UNKNOWN).eval()
    assert is_zero(ebc)
    ebc(bags_of(np.random.default_rng(11), 100)).values().sum().backward()
    assert is_zero(ebc)


def test_unknown_ids_read_zeros_between_backward_and_step() -> None:
    model = one_rank(**UNKNOWN)
    ebc = model.module["ebc"]
    for _ in range(2):
        ebc(bags_of(np.random.default_rng(11), 100)).values().sum().backward()
        assert is_zero(ebc)
        model.fused_optimizer.step()
        assert is_zero(ebc)


@pytest.mark.parametrize("rules", [{}, {"eviction": LFU(), "admission": AtLeast(2)}])
def test_a_load_assigns_to_tables_without_memory(rules: dict[str, Any]) -> None:
    trained = bags(128, **rules)
    rng = np.random.default_rng(12)
    for _ in range(10):
        trained(bags_of(rng, 100)).values().sum().backward()
    table = EmbeddingBagConfig(128, DIM, "t", feature_names=list(NAMES), ids=HashedIds(**rules))
    loaded = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    loaded.load_state_dict(copy.deepcopy(trained.state_dict()), assign=True)
    apply_optimizer_in_backward(torch.optim.SGD, loaded.parameters(), {"lr": LR})
    for _ in range(10):
        batch = bags_of(rng, 100)
        outputs = [collection(batch).values() for collection in (trained, loaded)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
