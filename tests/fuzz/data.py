"""Random tables, sound and broken: a sound one gives the batch that plain Python makes of it.

A broken one raises an error that names column, row and value, and no table row changes. Tables are
dicts of lists, arrays and tensors, columns of pandas and Arrow, or tables of theirs.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from recsys.datasets.utils import Batch
from recsys.modules.deepfm_model import SimpleDeepFMNN
from recsys.modules.dlrm import DLRM, DLRMTrain
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.losses import mean_loss
from recsys.optim import SGD, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.ranks import RankPool

ROWS, DIM, PADDING = 50, 4, -1
TEXTS = ["b", "a", "long text", "ü", ""]
SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]


@dataclass
class Sparse:
    """A column of ids: its values in Python, and the form in which it is given."""

    bags: list[list[Any] | None]
    has_lists: bool
    column: Any = None
    weights: list[list[Any] | None] | None = None
    weights_column: Any = None


@dataclass
class Table:
    """The columns of a case."""

    num_rows: int
    sparse: dict[str, Sparse] = field(default_factory=dict)
    dense: dict[str, list[Any]] = field(default_factory=dict)
    label: list[Any] | None = None


@dataclass
class Broken:
    """An error that must be raised: what its text must have."""

    words: list[str]


# -- how columns are given ---------------------------------------------------------------------


def _fits(values: list[Any], dtype: str) -> bool:
    limits = np.iinfo(dtype)
    return all(type(v) is int and limits.min <= v <= limits.max for v in values)


def _pick(rng: Random, choices: list[Callable[[], Any]]) -> Any:
    return rng.choice(choices)()


def give_numbers(rng: Random, values: list[Any], kind: str) -> Any:
    """Gives a column of one number per row."""
    choices: dict[str, list[Callable[[], Any]]] = {
        "lists": [lambda: list(values), lambda: np.array(values, dtype=object)],
        "pandas": [lambda: pd.Series(values, dtype=object)],
        "arrow": [],
    }
    are_floats = all(isinstance(v, float | int | None) for v in values)
    are_there = None not in values
    are_small = all(v is None or not math.isfinite(v) or abs(v) < 1e30 for v in values)
    if are_floats:
        choices["pandas"].append(lambda: pd.Series(values, dtype="float64"))
        choices["pandas"].append(lambda: pd.Series(pd.array(values, dtype="Float64")))
        choices["arrow"].append(lambda: pa.array([*map(_float, values)], pa.float64()))
        half = len(values) // 2
        parts = [*map(_float, values[:half])], [*map(_float, values[half:])]
        choices["arrow"].append(lambda: pa.chunked_array(parts, pa.float64()))
    if are_floats and are_there:
        choices["lists"].append(lambda: np.array(values, dtype=np.float64))
        choices["lists"].append(lambda: torch.tensor(values, dtype=torch.float64))
        if are_small:
            choices["lists"].append(lambda: np.array(values, dtype=np.float32))
            choices["lists"].append(lambda: torch.tensor(values, dtype=torch.float32))
        choices["pandas"].append(lambda: pd.Series(pd.Categorical(values)))
    for dtype in SIGNED + UNSIGNED:
        if are_there and _fits(values, dtype):
            choices["lists"].append(lambda dtype=dtype: np.array(values, dtype=dtype))
            choices["pandas"].append(lambda dtype=dtype: pd.Series(values, dtype=dtype))
            choices["arrow"].append(lambda dtype=dtype: pa.array(values, getattr(pa, dtype)()))
    return _pick(rng, choices[kind] or choices["lists"])


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def give_ids(rng: Random, sparse: Sparse, kind: str) -> Any:
    """Gives a column of ids, or of lists of ids."""
    bags = sparse.bags
    flat = [value for bag in bags for value in bag or ()]
    are_ints = all(type(v) is int and -(2**63) <= v < 2**64 for v in flat)
    dtypes = [d for d in SIGNED + UNSIGNED if are_ints and _fits(flat, d)]
    choices: dict[str, list[Callable[[], Any]]] = {"lists": [], "pandas": [], "arrow": []}
    lists, pandas, arrow = choices.values()
    if sparse.has_lists:
        lists.append(lambda: [bag if bag is None else list(bag) for bag in bags])
        lists.append(lambda: [bag if bag is None else tuple(bag) for bag in bags])
        pandas.append(lambda: pd.Series(bags, dtype=object))
        for d in dtypes:
            kinds = [pa.list_(getattr(pa, d)()), pa.large_list(getattr(pa, d)())]
            arrow += [lambda k=k: pa.array(bags, k) for k in kinds]
            pandas += [
                lambda k=k: pd.Series(pa.array(bags, k), dtype=pd.ArrowDtype(k)) for k in kinds
            ]
            if None not in bags:
                lists.append(lambda d=d: [np.array(bag, dtype=d) for bag in bags])
                if all(0 <= value < 2**63 for value in flat):
                    lists += [
                        lambda d=d: _matrix(bags, d),
                        lambda d=d: torch.tensor(_matrix(bags, d)),
                    ]
        if flat and all(type(v) is str for v in flat):
            arrow.append(lambda: pa.array(bags, pa.list_(pa.string())))
    else:
        values = [bag[0] if bag else None for bag in bags]
        lists.append(lambda: values)
        pandas.append(lambda: pd.Series(values, dtype=object))
        for d in dtypes:
            arrow.append(lambda d=d: pa.array(values, getattr(pa, d)()))
            pandas.append(
                lambda d=d: pd.Series(pd.array(values, dtype=d.title().replace("Ui", "UI")))
            )
            pandas.append(lambda d=d: pd.Series(values, dtype=f"{d}[pyarrow]"))
            if None not in values:
                lists.append(lambda d=d: np.array(values, dtype=d))
                lists.append(lambda d=d: torch.from_numpy(np.array(values, dtype=d)))
                pandas.append(lambda d=d: pd.Series(values, dtype=d))
        if all(v is None or isinstance(v, float) or (are_ints and abs(v) < 2**53) for v in values):
            nans = [math.nan if v is None else float(v) for v in values]
            lists += [lambda: nans, lambda: np.array(nans), lambda: torch.tensor(nans).double()]
            pandas.append(lambda: pd.Series(nans))
            arrow.append(lambda: pa.array(nans))
        if flat and all(type(v) is str for v in flat):
            lists.append(lambda: np.array([v or "" for v in values]))
            pandas.append(lambda: pd.Series(values, dtype="string"))
            arrow.append(lambda: pa.array(values))
    return _pick(rng, choices[kind] or lists)


def _matrix(bags: list[Any], dtype: str) -> Any:
    """Lists as a matrix with padding, of a signed dtype that holds both."""
    wide = dtype if dtype in SIGNED else "int64"
    matrix = np.full((len(bags), max(map(len, bags), default=0) + 1), PADDING, dtype=wide)
    for row, bag in zip(matrix, bags, strict=True):
        row[: len(bag)] = bag
    return matrix


def give_categories(rng: Random, sparse: Sparse, kind: str) -> Any:
    """Gives a categorical or dictionary column, and sets the ids that it stands for."""
    texts = rng.sample(TEXTS, rng.randint(1, len(TEXTS)))
    if rng.random() < 0.3:  # whole numbers are ids themselves
        names: list[Any] = rng.sample(range(ROWS), len(texts))
        meant = names
    else:
        names, meant = texts, list(range(len(texts)))
    places = [None if rng.random() < 0.2 else rng.randrange(len(names)) for _ in sparse.bags]
    sparse.has_lists = False
    sparse.bags = [None if p is None else [meant[p]] for p in places]
    values = [None if p is None else names[p] for p in places]
    if kind == "arrow":
        index = rng.choice([pa.int8(), pa.int32(), pa.uint32()])
        return pa.DictionaryArray.from_arrays(pa.array(places, index), pa.array(names))
    categorical = pd.Categorical(values, categories=names, ordered=rng.random() < 0.5)
    return pd.Series(categorical) if kind == "pandas" or rng.random() < 0.5 else categorical


# -- cases -------------------------------------------------------------------------------------


def _draw_table(rng: Random, is_huge: bool, has_weights: bool) -> Table:
    table = Table(rng.choice([1, 1, 2, 3, 4, 6]))
    for number in range(rng.randint(1, 3)):
        has_lists = rng.random() < 0.5
        bags: list[list[Any] | None] = []
        for _ in range(table.num_rows):
            if rng.random() < 0.15:
                bags.append(None)
                continue
            size = rng.randint(0, 3) if has_lists else 1
            ids = [rng.randrange(ROWS) for _ in range(size)]
            if is_huge:
                ids = [rng.choice([rng.randrange(2**63), 2**53 + 1, 2**63 - 1, i]) for i in ids]
            bags.append(ids)
        table.sparse[f"ids {number}"] = Sparse(bags, has_lists)
    for number in range(rng.randint(0, 3)):
        draw = rng.choice(
            [lambda: rng.gauss(0, 9), lambda: rng.randrange(100), lambda: rng.random() < 0.5]
        )
        table.dense[f"dense {number}"] = [draw() for _ in range(table.num_rows)]
    if rng.random() < 0.8:
        table.label = [rng.randint(0, 1) for _ in range(table.num_rows)]
    if has_weights:
        for sparse in table.sparse.values():
            sparse.weights = [
                bag if bag is None else [rng.random() * 4 for _ in bag] for bag in sparse.bags
            ]
    return table


def _break(rng: Random, table: Table) -> Broken | None:
    """Put one fault into the columns, and return the expected message."""
    kinds = ["id", "rows"]
    kinds += ["dense"] * (2 * bool(table.dense)) + ["label"] * (table.label is not None)
    weighed = {k: s for k, s in table.sparse.items() if s.weights and any(map(bool, s.bags))}
    kinds += ["weights"] * (2 * bool(weighed))
    kind = rng.choice(kinds)
    row = rng.randrange(table.num_rows)
    bad = rng.choice([math.nan, math.inf, -math.inf, 1e300, None])
    if kind in ("dense", "label"):
        name = "label" if kind == "label" else rng.choice(list(table.dense))
        values = table.label if kind == "label" else table.dense[name]
        assert values is not None
        values[row] = bad
        return Broken([repr(name), f"row {row}", repr(math.nan if bad is None else bad)])
    if kind == "weights":
        name, sparse = rng.choice(list(weighed.items()))
        assert sparse.weights is not None
        row = rng.choice([r for r, bag in enumerate(sparse.bags) if bag])
        sparse.weights[row] = [bad, *(sparse.weights[row] or [])[1:]]
        is_missing = bad is None or math.isnan(bad)
        return Broken([f"weights of {name}", f"row {row}", *([] if is_missing else [repr(bad)])])
    name, sparse = rng.choice(list(table.sparse.items()))
    if kind == "rows" and len(table.sparse) + len(table.dense) > 1:
        sparse.bags = [*sparse.bags, [1]]
        sparse.weights = sparse.weights and [*sparse.weights, [1.0]]
        return Broken([repr(name) if name != "ids 0" else "'"])
    ids = [2**63 + 5, 2**64 - 1, 2**70, -(2**64), 1.5, math.inf, "a text", True, 2.0**60]
    value = rng.choice(ids)
    others = (sparse.bags[row] or [])[1:] if sparse.has_lists else []
    bag = [value, *others]
    if sparse.has_lists and rng.random() < 0.2:
        value = None
        bag = [*others, None]
    sparse.bags[row] = bag
    sparse.weights = sparse.weights and [b and [1.0] * len(b) for b in sparse.bags]
    if isinstance(value, bool) and any(type(v) is int for b in sparse.bags for v in b or ()):
        sparse.bags = [b and [True] * len(b) for b in sparse.bags]  # else it is a 1 for NumPy
        row = next(r for r, b in enumerate(sparse.bags) if b)
    if isinstance(value, float):  # floats of a column of floats
        sparse.bags = [
            b and [v if v is value or v is None else float(v % ROWS) for v in b]
            for b in sparse.bags
        ]
    if value is None:
        return Broken([repr(name), f"row {row}"])
    return Broken([repr(name), f"row {row}", repr(value)])


def _give(rng: Random, table: Table) -> dict[str, Any]:
    """Gives all columns, in one kind of table or in a dict of several kinds."""
    kind = rng.choice(["lists", "pandas", "arrow", "mixed"])
    columns: dict[str, Any] = {}

    def own() -> str:
        return rng.choice(["lists", "pandas", "arrow"]) if kind == "mixed" else kind

    for name, sparse in table.sparse.items():
        is_sound = all(type(v) is int and v < ROWS for b in sparse.bags for v in b or ())
        if is_sound and sparse.weights is None and own() != "lists" and rng.random() < 0.3:
            columns[name] = give_categories(rng, sparse, own())
        else:
            columns[name] = give_ids(rng, sparse, own())
        if sparse.weights is not None:
            values = [b and [*map(_float, b)] for b in sparse.weights]
            columns[f"weights of {name}"] = give_weights(rng, values, sparse.has_lists, own())
    for name, values in table.dense.items():
        columns[name] = give_numbers(rng, values, own())
    if table.label is not None:
        columns["label"] = give_numbers(rng, table.label, own())
    if len({len(column) for column in columns.values()}) == 1:
        if kind == "pandas" and all(isinstance(c, pd.Series) for c in columns.values()):
            return pd.DataFrame(columns)  # type: ignore[return-value]
        if kind == "arrow" and all(
            isinstance(c, pa.Array | pa.ChunkedArray) for c in columns.values()
        ):
            return pa.table(columns)  # type: ignore[no-any-return]
    return columns


def give_weights(rng: Random, values: list[Any], has_lists: bool, kind: str) -> Any:
    """Gives a column of weights, in the bags of its ids."""
    if not has_lists:
        flat = [b[0] if b else None for b in values]
        return (
            pa.array(flat, pa.float64()) if kind == "arrow" else rng.choice([flat, pd.Series(flat)])
        )
    if kind == "arrow":
        return pa.array(values, pa.list_(pa.float64()))
    return pd.Series(values, dtype=object) if kind == "pandas" else values


def _from(table: Table, columns: Any) -> Batch:
    weighed = {k: f"weights of {k}" for k, s in table.sparse.items() if s.weights is not None}
    return Batch.from_columns(
        columns,
        sparse=list(table.sparse),
        dense=list(table.dense),
        label=None if table.label is None else "label",
        weights=weighed or None,
        padding=PADDING,
    )


# -- expected values -------------------------------------------------------------------------------


def _float32(value: Any) -> float:
    return float(np.float32(float(value)))


def _wrong_batch(table: Table, batch: Batch) -> str | None:
    ids = batch.sparse_features
    if ids.keys() != list(table.sparse):
        return f"keys {ids.keys()}"
    for name, sparse in table.sparse.items():
        bags = [bag.tolist() for bag in ids[name].to_dense()]
        right = [[int(v) for v in bag or ()] for bag in sparse.bags]
        if bags != right:
            return f"{name}: {bags} for {right}"
        if sparse.weights is not None:
            found = ids[name].weights().tolist()
            wanted = [_float32(v) for bag in sparse.weights for v in bag or ()]
            if found != wanted:
                return f"weights of {name}: {found} for {wanted}"
    rows = [[_float32(v[r]) for v in table.dense.values()] for r in range(table.num_rows)]
    if batch.dense_features.tolist() != rows:
        return f"dense {batch.dense_features.tolist()} for {rows}"
    labels = [0.0] * table.num_rows if table.label is None else [*map(_float32, table.label)]
    if batch.labels.tolist() != labels:
        return f"labels {batch.labels.tolist()} for {labels}"
    return None


class _Model:
    """A model of a table's columns, whose tables learn in backward."""

    def __init__(self, rng: Random, table: Table, num_dense: int) -> None:
        torch.manual_seed(0)
        is_weighted = any(s.weights is not None for s in table.sparse.values())
        tables = [
            EmbeddingBagConfig(ROWS, DIM, f"t{i}", feature_names=[name])
            for i, name in enumerate(table.sparse)
        ]
        self.bags = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
        apply_optimizer_in_backward(SGD, self.bags.parameters(), {"lr": 0.1})
        self.is_deepfm = rng.random() < 0.3 and num_dense > 0
        if self.is_deepfm:
            self.model: torch.nn.Module = SimpleDeepFMNN(num_dense, self.bags, 4, 4)
        else:
            self.model = DLRM(self.bags, num_dense, [DIM], [4, 1])
        self.as_batch = rng.random() < 0.5 and not self.is_deepfm

    def step(self, batch: Batch) -> None:
        """Trains on a batch."""
        if self.as_batch:
            loss, _ = DLRMTrain(self.model)(batch)
        else:
            out = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
            loss = mean_loss(out, batch.labels)
        loss.backward()


def _travel(rng: Random, batch: Batch) -> Batch:
    """Copy a batch in a random way: not at all, by copy, pickle, `to` or a tree map."""
    ways: list[Callable[[Batch], Batch]] = [
        lambda b: b,
        copy.copy,
        copy.deepcopy,
        lambda b: pickle.loads(pickle.dumps(b)),
        lambda b: b.to(torch.device("cpu")),
        lambda b: torch.utils._pytree.tree_map(lambda leaf: leaf, b),
    ]
    return rng.choice(ways)(batch)


def _spoil(rng: Random, table: Table, batch: Batch) -> tuple[Batch, Broken]:
    """Puts a fault into a batch that was made, as code of the user's own may."""
    row = rng.randrange(table.num_rows)
    bad = rng.choice([math.nan, math.inf, -math.inf])
    kinds = ["label", "forgotten"] + ["dense"] * bool(table.dense)
    has_weights = any(s.weights is not None for s in table.sparse.values())
    kinds += ["weights"] * (has_weights and batch.sparse_features.values().numel() > 0)
    kind = rng.choice(kinds)
    has_names = rng.random() < 0.5
    if kind == "label":
        bad = rng.choice([bad, 5.0, -3.0, 1.5])
        batch.labels[row] = bad
        words = ["labels", f"row {row}", repr(bad)]
        words += ["'label'"] if has_names and table.label is not None else []
    elif kind == "dense":
        column = rng.randrange(len(table.dense))
        batch.dense_features[row, column] = bad
        name = repr(list(table.dense)[column]) if has_names else ""
        words = ["dense_features", f"row {row}", repr(bad), name]
        if not has_names and len(table.dense) > 1:
            words.append(f"column {column}")
    elif kind == "weights":
        ids = batch.sparse_features
        place = rng.randrange(ids.values().numel())
        weights = ids.weights().clone()
        weights[place] = bad
        bag = int(torch.searchsorted(ids.offsets(), place, right=True)) - 1
        feature, sample = divmod(bag, table.num_rows)
        other = KeyedJaggedTensor(ids.keys(), ids.values(), weights, ids.lengths())
        batch = Batch(batch.dense_features, other, batch.labels)
        return batch, Broken(["weights", repr(ids.keys()[feature]), f"bag {sample}", repr(bad)])
    else:
        size = rng.choice([n for n in (0, 1, 2, 5) if n != len(table.dense)])
        dense: Any = rng.choice([torch.zeros(table.num_rows, size), None])
        batch = Batch(dense, batch.sparse_features, batch.labels)
        return batch, Broken(["dense_features", "None" if dense is None else str(size)])
    if has_names:
        return _travel(rng, batch), Broken(words)
    return Batch(batch.dense_features.clone(), batch.sparse_features, batch.labels.clone()), Broken(
        words
    )


def _complaint_about_error(call: Callable[[], object], broken: Broken) -> str | None:
    try:
        got = call()
    except (KeyError, TypeError, ValueError) as error:
        missing = [word for word in broken.words if word not in str(error)]
        return f"{type(error).__name__} without {missing}: {str(error)[:200]}" if missing else None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return f"accepted silently, with {broken.words} wrong: {str(got)[:200]}"


def complaint_about(pool: RankPool, seed: int) -> str | None:
    """See `tests.fuzz.kinds`."""
    rng = Random(seed)
    is_huge, fate = rng.random() < 0.25, rng.choice(["sound", "broken", "spoiled"])
    table = _draw_table(rng, is_huge and fate != "spoiled", rng.random() < 0.3)
    if fate == "broken":
        broken = _break(rng, table)
        assert broken is not None
        columns = _give(rng, table)
        return _complaint_about_error(lambda: _from(table, columns), broken)
    columns = _give(rng, table)
    try:
        batch = _from(table, columns)
    except Exception as error:
        return f"a sound table is refused: {type(error).__name__}: {str(error)[:200]}"
    wrong = _wrong_batch(table, batch)
    if wrong is not None or is_huge:
        return wrong
    model = _Model(rng, table, len(table.dense))
    before = [p.detach().clone() for p in model.bags.parameters()]
    if fate == "sound":
        try:
            model.step(_travel(rng, batch))
        except Exception as error:
            return f"a sound batch is refused: {type(error).__name__}: {str(error)[:200]}"
        is_finite = all(bool(p.isfinite().all()) for p in model.bags.parameters())
        return None if is_finite else "not finite after a sound batch"
    batch, broken = _spoil(rng, table, batch)
    complaint = _complaint_about_error(lambda: model.step(batch), broken)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.bags.parameters(), strict=True)]
    return complaint or ("a table changed" if any(changed) else None)
