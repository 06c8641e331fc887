"""Package the DLRM that `make train` left in runs/dlrm, and write requests of its test users.

    python examples/serving/package.py --run runs/dlrm --out runs/serving

Writes `OUT/models/movies`, a folder that Triton serves, and `OUT/requests.npz` for client.py.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dlrm"))
from data import Data, load_data
from model import build_model

import recsys.inference
from recsys.distributed.checkpoint import load_checkpoint
from recsys.distributed.types import ShardingEnv
from recsys.modules.dlrm import DLRMTrain


def load_model(run: Path, data: Data, embedding_dim: int) -> torch.nn.Module:
    """Load the checkpoint into the unsharded model and quantize its tables."""
    options = argparse.Namespace(embedding_dim=embedding_dim)
    model = DLRMTrain(build_model(data, options, torch.device("cpu")))
    load_checkpoint(run / "best", model)
    return recsys.inference.quantize_embeddings(model.model.eval(), torch.int8)


def write_requests(data: Data, path: Path) -> None:
    """Write the features of the test ratings, with the user and the film of each."""
    batches = list(data.whole_test)
    arrays = {"dense_features": torch.cat([batch.dense_features for batch in batches])}
    for name in data.feature_names:
        features = [batch.sparse_features[name] for batch in batches]
        arrays[name] = torch.cat([one.values() for one in features]).long()
        arrays[f"{name}.lengths"] = torch.cat([one.lengths() for one in features]).long()
    np.savez(path, **{name: array.numpy() for name, array in arrays.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/dlrm"))
    parser.add_argument("--out", type=Path, default=Path("runs/serving"))
    parser.add_argument("--embedding-dim", type=int, default=64, help="as in training")
    options = parser.parse_args()
    if not (options.run / "best").is_dir():
        parser.error(f"--run {options.run} must have a checkpoint. Run make train first.")
    choices = {"dataset": "movielens", "data": None, "split": "time", "batch_size": 256, "seed": 0}
    data = load_data(argparse.Namespace(**choices), ShardingEnv.default())
    options.out.mkdir(parents=True, exist_ok=True)
    write_requests(data, options.out / "requests.npz")
    batch = next(iter(data.whole_test))
    recsys.inference.package(
        load_model(options.run, data, options.embedding_dim),
        options.out / "models/movies",
        (batch.dense_features, batch.sparse_features),
    )
    print(f"The package is {options.out / 'models/movies'}.")


if __name__ == "__main__":
    main()
