"""Package the DLRM that `make train` left in runs/dlrm, and write requests of its test users.

    python examples/serving/package.py --run runs/dlrm --out runs/serving

Writes `OUT/models/movies`, a folder that Triton serves, and `OUT/requests.npz` for client.py. The
package contains the description of the raw columns, so requests have users and films by their ids.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "dlrm"))
from model import build_model
from movielens.data import load_movielens

import recsys.inference
from recsys.distributed.checkpoint import load_checkpoint
from recsys.features import FeatureSpec
from recsys.modules.dlrm import DLRMTrain


def load_model(run: Path, spec: FeatureSpec, embedding_dim: int) -> torch.nn.Module:
    """Load the checkpoint into the unsharded model and quantize its tables."""
    model = DLRMTrain(build_model(spec, embedding_dim, torch.device("cpu")))
    load_checkpoint(run / "best", model)
    return recsys.inference.quantize_embeddings(model.model.eval(), torch.int8)


def write_requests(spec: FeatureSpec, table: pa.Table, path: Path) -> None:
    """Write the raw columns of ratings: values, and lengths of lists and missing values."""
    arrays = {}
    for name in spec.column_names(labels=False):
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            arrays[f"{name}.lengths"] = column.value_lengths().fill_null(0).cast(pa.int64())
            column = column.flatten()
        if name in spec.dense_names:
            column = column.cast(pa.float64())  # a missing number is a NaN
        elif column.null_count:
            arrays[f"{name}.missing"] = column.is_null()
            column = column.fill_null(0)
        arrays[name] = column
    found = {name: array.to_numpy(zero_copy_only=False) for name, array in arrays.items()}
    np.savez(path, **{n: a.astype(str) if a.dtype == object else a for n, a in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("runs/dlrm"))
    parser.add_argument("--out", type=Path, default=Path("runs/serving"))
    parser.add_argument("--embedding-dim", type=int, default=64, help="as in training")
    options = parser.parse_args()
    if not (options.run / "best").is_dir():
        parser.error(f"--run {options.run} must have a checkpoint. Run make train first.")
    spec, test = FeatureSpec.load(options.run / "features"), load_movielens().test
    options.out.mkdir(parents=True, exist_ok=True)
    write_requests(spec, test, options.out / "requests.npz")
    recsys.inference.package(
        load_model(options.run, spec, options.embedding_dim),
        options.out / "models/movies",
        test.select(spec.column_names(labels=False)).slice(0, 2),
        spec=spec,
    )
    print(f"The package is {options.out / 'models/movies'}.")


if __name__ == "__main__":
    main()
