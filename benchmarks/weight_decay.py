"""Weight decay of tables: an optimizer in backward, whose decay touches the batch's rows only.

    python -m benchmarks.weight_decay [--seeds 1] [--out benchmarks/results/weight_decay-cpu.json]

The same DLRM is trained on MovieLens 100K with Adam attached to its tables, once with the L2
penalty of `torch.optim.Adam` and once with the decoupled decay of AdamW; and with
`torch.optim.Adam` stepping the same tables as plain parameters, whose decay shrinks every row at
every step. The dense layers' optimizer has no decay. One process; the data is fetched if needed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from recsys import datasets
from recsys.features import FeatureSpec
from recsys.metrics import auc
from recsys.modules.dlrm import DLRMTrain
from recsys.optim import AdamL2, AdamW, apply_optimizer_in_backward

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples/dlrm"))
from model import build_model
from movielens.data import MovieLens, load_movielens

DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
ATTACHED = {"attached L2": AdamL2, "attached AdamW": AdamW}
OWNERS = (*ATTACHED, "stepped L2")
DIM, BATCH, EPOCHS, RATE = 64, 256, 4, 0.001


def build(data: MovieLens) -> DLRMTrain:
    """Build the DLRM of examples/dlrm."""
    return DLRMTrain(build_model(data.spec, DIM, torch.device("cpu")))


def fit(data: MovieLens, owner: str, decay: float, seed: int) -> float:
    """Return the test AUC of the epoch that is best on validation."""
    torch.manual_seed(seed)
    model = build(data)
    tables = list(model.model.sparse_arch.parameters())
    held = {id(table) for table in tables}
    rest = [p for p in model.parameters() if id(p) not in held]
    settings = {"lr": RATE, "weight_decay": decay}
    groups = [{"params": rest, "weight_decay": 0.0}]
    if owner in ATTACHED:
        apply_optimizer_in_backward(ATTACHED[owner], tables, settings)
    else:
        groups.append({"params": tables, "weight_decay": decay})
    optimizer = torch.optim.Adam(groups, lr=RATE)
    batches = datasets.table(data.train, data.spec, BATCH, shuffle=True, seed=seed)
    found = []
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        for batch in batches:
            optimizer.zero_grad()
            model(batch)[0].backward()
            optimizer.step()
        found.append((score(model, data.spec, data.validation), score(model, data.spec, data.test)))
    return max(found)[1]


@torch.no_grad()
def score(model: DLRMTrain, spec: FeatureSpec, part: pa.Table) -> float:
    """Return the AUC of a part."""
    results = [model(batch)[1][1:] for batch in datasets.table(part, spec, 4096)]
    logits, labels = (torch.cat(values) for values in zip(*results, strict=True))
    return float(auc(logits.sigmoid(), labels))


def main() -> None:
    """Train all, print the table and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = load_movielens()
    rows = []
    heads = "".join(f"{owner:>16}" for owner in OWNERS)
    print(f"{'decay':>6}{heads}   test AUC, mean of the seeds", flush=True)
    for decay in DECAYS:
        aucs = {o: [fit(data, o, decay, s) for s in range(arguments.seeds)] for o in OWNERS}
        rows.append({"weight_decay": decay, "auc": aucs})
        print(f"{decay:6g}", *(f"{np.mean(aucs[owner]):15.4f}" for owner in OWNERS), flush=True)
        if arguments.out is not None:
            result = {
                "data": "MovieLens 100K, split by time",
                "model": f"DLRM, dim {DIM}, Adam at {RATE}, {EPOCHS} epochs of batches of {BATCH}",
                "rows": rows,
            }
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
