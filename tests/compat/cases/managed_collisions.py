"""Managed collision modules, their filters and policies, and the collections over them."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.answers import raises

CPU = torch.device("cpu")
COUNTS = torch.tensor([5, 1, 1, 9, 2, 1, 1, 40])


def _module(rows: int = 128, policy: Any = None, **options: Any) -> Any:
    from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

    return MCHManagedCollisionModule(
        zch_size=rows,
        device=CPU,
        eviction_policy=policy or LFU_EvictionPolicy(),
        eviction_interval=options.pop("eviction_interval", 1),
        **options,
    )


def _tables(kind: str) -> Any:
    import torchrec

    config = getattr(torchrec, kind)
    return [
        config(name="t", embedding_dim=4, num_embeddings=128, feature_names=["a", "b"]),
        config(name="u", embedding_dim=4, num_embeddings=256, feature_names=["c"]),
    ]


def _collisions(tables: Any) -> Any:
    from torchrec.modules.mc_modules import ManagedCollisionCollection

    return ManagedCollisionCollection(
        managed_collision_modules={t.name: _module(t.num_embeddings) for t in tables},
        embedding_configs=tables,
    )


def _features() -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.tensor([1, 1, 3, 0, 1, 2, 0, 2])
    return KeyedJaggedTensor(["c", "x", "a", "b"], torch.arange(10) * 1000, lengths=lengths)


def _seen(features: Any) -> Any:
    """Everything but the rows, which are other ones."""
    return {
        "keys": features.keys(),
        "dtype": features.values().dtype,
        "lengths": features.lengths(),
        "stride": features.stride(),
        "are rows": bool(((features.values() >= 0) & (features.values() < 256)).all()),
    }


def average() -> Any:
    from torchrec.modules.mc_modules import average_threshold_filter

    return average_threshold_filter(COUNTS), average_threshold_filter(torch.ones(5))


def dynamic() -> Any:
    from torchrec.modules.mc_modules import dynamic_threshold_filter

    factors = (0.5, 1.0, 3.0)
    return [dynamic_threshold_filter(COUNTS, f) for f in factors], dynamic_threshold_filter(COUNTS)


def probabilistic() -> Any:
    from torchrec.modules.mc_modules import probabilistic_threshold_filter

    counts = torch.randint(0, 200, (100,))
    return [probabilistic_threshold_filter(counts, p) for p in (0.01, 0.5)]


def sizes_of_a_module() -> Any:
    module = _module(input_hash_size=4000, buckets=4)
    sizes = module.output_size(), module.input_size(), module.buckets(), module.device
    slots = module.open_slots()
    return sizes, slots.dtype, slots.shape, module.evict()


def a_module_remaps() -> Any:
    from torchrec import JaggedTensor

    feature = JaggedTensor(torch.tensor([5, -6, 7]), lengths=torch.tensor([2, 1]))
    found = _module()({"t": feature})
    values = found["t"].values()
    return list(found), values.dtype, values.shape, found["t"].lengths()


def a_function_of_ids_comes_first() -> Any:
    from torchrec import JaggedTensor

    module = _module(input_hash_size=10, input_hash_func=lambda ids, size: ids % size)
    feature = JaggedTensor(torch.tensor([5, 16, 27]), lengths=torch.tensor([2, 1]))
    return module.preprocess({"t": feature})["t"].values()


def a_collection_remaps() -> Any:
    collisions = _collisions(_tables("EmbeddingBagConfig"))
    names = [config.name for config in collisions.embedding_configs()]
    slots = {name: slots.shape for name, slots in collisions.open_slots().items()}
    found = [_seen(collisions(_features())) for _ in range(3)]
    return names, slots, found, list(collisions.evict()), collisions.table_to_number_buckets()


def bags() -> Any:
    from torchrec import EmbeddingBagCollection
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

    found = []
    for returns in (False, True):
        tables = _tables("EmbeddingBagConfig")
        module = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables), _collisions(tables), returns
        )
        pooled, remapped = module.eval()(_features())
        rows = _seen(remapped) if returns else remapped
        found.append((pooled.keys(), pooled.values().shape, rows))
    weights = [name for name, _ in module.named_parameters()]
    return found, sorted(weights)


def sequences() -> Any:
    from torchrec import EmbeddingCollection
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

    tables = _tables("EmbeddingConfig")
    module = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=tables), _collisions(tables), return_remapped_features=True
    )
    found, remapped = module.eval()(_features())
    shapes = {name: [f.values().shape, f.lengths()] for name, f in sorted(found.items())}
    return shapes, _seen(remapped)


def which_modules_raise() -> Any:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, LRU_EvictionPolicy

    return {
        "no rows": raises(lambda: _module(0)),
        "negative rows": raises(lambda: _module(-5)),
        "no interval": raises(lambda: _module(eviction_interval=0)),
        "another policy": raises(lambda: _module(policy="lfu")),
        "sizes of old releases": raises(lambda: _module(mch_size=5)),
        "least recently used": raises(lambda: _module(policy=LRU_EvictionPolicy(2.0))),
        "by distance": raises(lambda: _module(policy=DistanceLFU_EvictionPolicy(2.0))),
    }


def which_hashed_modules_raise() -> Any:
    from torchrec.modules.hash_mc_evictions import (
        HashZchEvictionConfig,
        HashZchEvictionPolicyName,
    )
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    def made(**options: Any) -> Any:
        given: dict[str, Any] = {"zch_size": 128, "device": CPU, "total_num_buckets": 2}
        return HashZchManagedCollisionModule(**given | options)

    config = HashZchEvictionConfig(features=["a"], single_ttl=3)
    ttl = HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
    return {
        "plain": raises(made),
        "all reserved": raises(lambda: made(percent_reserved_slots=100)),
        "opt-in without reserved": raises(lambda: made(opt_in_prob=5)),
        "opt-in": raises(lambda: made(opt_in_prob=5, percent_reserved_slots=10)),
        "time": raises(lambda: made(eviction_policy_name=ttl, eviction_config=config)),
        "both": raises(lambda: made(track_id_freq=True, write_runtime_meta_dim=1)),
        "output size": made().output_size(),
        "config": [config.features, config.single_ttl, config.per_feature_ttl],
        "names": [policy.value for policy in HashZchEvictionPolicyName],
    }


def which_collections_raise() -> Any:
    from torchrec import EmbeddingBagCollection
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import ManagedCollisionCollection

    tables = _tables("EmbeddingBagConfig")
    few = EmbeddingBagCollection(tables=tables[:1])
    small = {table.name: _module(1000) for table in tables}
    return {
        "no module": raises(lambda: ManagedCollisionCollection({"t": _module()}, tables)),
        "another size": raises(lambda: ManagedCollisionCollection(small, tables)),
        "other tables": raises(
            lambda: ManagedCollisionEmbeddingBagCollection(few, _collisions(tables))
        ),
    }


def which_modules_pool() -> Any:
    import torchrec
    from torchrec.distributed.planner.types import ShardingOption
    from torchrec.modules import mc_embedding_modules

    found = []
    for kind in ("EmbeddingBag", "Embedding"):
        tables = _tables(f"{kind}Config")
        inner = getattr(torchrec, f"{kind}Collection")(tables=tables)
        managed = getattr(mc_embedding_modules, f"ManagedCollision{kind}Collection")
        module = managed(inner, _collisions(tables))
        found.append([ShardingOption.module_pooled(one, "t") for one in (inner, module)])
    return found
