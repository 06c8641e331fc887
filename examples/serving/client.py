"""Score the films of a user by a Triton server; needs only tritonclient and numpy.

python examples/serving/client.py --user 405
python examples/serving/client.py --user 405 --port 8001 --grpc
"""

import argparse
import importlib
from pathlib import Path

import numpy as np

DATATYPES = {"float32": "FP32", "int64": "INT64"}


def read_request(path: Path, user: int) -> dict[str, np.ndarray]:
    """Return the tensors of a user's rows: dense features, and ids and lengths per feature."""
    with np.load(path) as file:
        arrays = dict(file)
    rows = np.flatnonzero(arrays["user_id"] == user)
    if len(rows) == 0:
        users = np.unique(arrays["user_id"])
        raise SystemExit(f"--user must be one of the test users, such as {users[:10].tolist()}.")
    request = {"dense_features": arrays.pop("dense_features")[rows]}
    for name in [name for name in arrays if f"{name}.lengths" in arrays]:
        lengths = arrays[f"{name}.lengths"]
        bags = np.split(arrays[name], np.cumsum(lengths)[:-1])
        request[name] = np.concatenate([bags[row] for row in rows])
        request[f"{name}.lengths"] = lengths[rows]
    return request


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--user", type=int, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--grpc", action="store_true", help="use gRPC instead of HTTP")
    parser.add_argument("--model", default="movies")
    parser.add_argument("--requests", type=Path, default=Path("runs/serving/requests.npz"))
    options = parser.parse_args()
    request = read_request(options.requests, options.user)
    protocol = importlib.import_module(f"tritonclient.{'grpc' if options.grpc else 'http'}")
    inputs = []
    for name, array in request.items():
        one = protocol.InferInput(name, list(array.shape), DATATYPES[array.dtype.name])
        one.set_data_from_numpy(array)
        inputs.append(one)
    client = protocol.InferenceServerClient(f"127.0.0.1:{options.port}")
    scores = client.infer(options.model, inputs).as_numpy("output")[:, 0]
    for row in np.argsort(-scores):
        print(f"film {request['item_id'][row]:5}: {1 / (1 + np.exp(-scores[row])):.3f}")


if __name__ == "__main__":
    main()
