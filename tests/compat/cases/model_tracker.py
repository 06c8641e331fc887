"""The tracker of changed rows on one rank, and its store of lookups."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from tests.compat.answers import raises


def _store(mode: str) -> Any:
    from torchrec.distributed.model_tracker.delta_store import DeltaStoreTrec
    from torchrec.distributed.model_tracker.types import UpdateMode

    store = DeltaStoreTrec(updateMode=UpdateMode[mode])
    for number in range(6):
        ids = torch.randint(0, 9, (5,))
        states = None if mode == "NONE" else torch.rand(5, 2)
        store.append(batch_idx=number, fqn="ab"[number % 2], ids=ids, states=states)
    return store


def _sorted(rows: Any) -> Any:
    ids, order = rows.ids.sort()
    return ids, None if rows.states is None else rows.states[order]


def _seen(store: Any) -> Any:
    numbers = {
        fqn: [lookup.batch_idx for lookup in lookups]
        for fqn, lookups in store.per_fqn_lookups.items()
    }
    unique = [
        {fqn: _sorted(rows) for fqn, rows in store.get_unique(from_idx=first).items()}
        for first in (0, 3)
    ]
    between = store.get_indexed_lookups(start_idx=1, end_idx=5)
    return numbers, unique, {fqn: len(lookups) for fqn, lookups in between.items()}


def stores() -> Any:
    return {mode: _seen(_store(mode)) for mode in ("NONE", "FIRST", "LAST")}


def stores_after_compaction() -> Any:
    found = {}
    for mode in ("NONE", "FIRST", "LAST"):
        store = _store(mode)
        store.compact(start_idx=0, end_idx=4)
        found[mode] = _seen(store)
    return found


def stores_after_deletion() -> Any:
    store = _store("LAST")
    store.delete(up_to_idx=3)
    kept = _seen(store)
    store.delete()
    return kept, store.get_unique()


def which_stores_raise() -> Any:
    def unique(mode: str, states: torch.Tensor | None) -> Any:
        store = _store(mode)
        store.append(batch_idx=9, fqn="a", ids=torch.tensor([1]), states=states)
        return store.get_unique()

    return {
        "an empty range": raises(lambda: _store("NONE").compact(3, 3)),
        "no states": raises(lambda: unique("FIRST", None)),
        "states": raises(lambda: unique("FIRST", torch.rand(1, 2))),
    }


def tracked_rows() -> Any:
    import torchrec
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    cpu, config = torch.device("cpu"), torchrec.EmbeddingBagConfig
    tables = [
        config(name="t", embedding_dim=4, num_embeddings=20, feature_names=["a", "b"]),
        config(name="u", embedding_dim=4, num_embeddings=20, feature_names=["c"]),
    ]
    bags = torchrec.EmbeddingBagCollection(tables=tables, device=cpu)
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    found: list[Any] = []
    rng = torch.Generator().manual_seed(0)

    def named(rows: Any) -> Any:
        return {name.removeprefix("_dmp_wrapped_module."): value for name, value in rows.items()}

    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            model = DistributedModelParallel(torch.nn.ModuleDict({"ebc": bags}), device=cpu)
            tracker = ModelDeltaTrackerTrec(model, consumers=["x", "y"])
            for step in range(4):
                tracker.step()
                ids = torch.randint(0, 20, (6,), generator=rng)
                lengths = torch.full((6,), 1)
                batch = torchrec.KeyedJaggedTensor(["a", "b", "c"], ids, lengths=lengths)
                model.module["ebc"](batch).values().sum().backward()
                found.append(named(tracker.get_unique_ids("x")))
                if step == 2:
                    found.append(named(tracker.get_unique("y")))
            found.append(named(tracker.get_unique_ids("y")))
            found.append(raises(lambda: tracker.get_unique_ids("z")))
            found.append(raises(tracker.get_unique_ids))
            found.append(named(tracker.fqn_to_feature_names()))
        finally:
            dist.destroy_process_group()
    return found
