"""Score the films of a user by a Triton server; needs only tritonclient and numpy.

python examples/serving/client.py --user 405
python examples/serving/client.py --user 405 --port 8001 --grpc
"""

import argparse
import importlib
from pathlib import Path

import numpy as np

DATATYPES = {"f": "FP64", "i": "INT64", "b": "BOOL", "U": "BYTES"}


def read_request(path: Path, user: int) -> dict[str, np.ndarray]:
    """Return the raw columns of a user's rows, with the lengths of lists."""
    with np.load(path) as file:
        arrays = dict(file)
    rows = np.flatnonzero(arrays["user_id"] == user)
    if len(rows) == 0:
        users = np.unique(arrays["user_id"])
        raise SystemExit(f"--user must be one of the test users, such as {users[:10].tolist()}.")
    request = {}
    for name, array in arrays.items():
        if f"{name}.lengths" in arrays:
            bags = np.split(array, np.cumsum(arrays[f"{name}.lengths"])[:-1])
            request[name] = np.concatenate([bags[row] for row in rows])
        else:
            request[name] = array[rows]
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
        one = protocol.InferInput(name, list(array.shape), DATATYPES[array.dtype.kind])
        one.set_data_from_numpy(array.astype(object) if array.dtype.kind == "U" else array)
        inputs.append(one)
    client = protocol.InferenceServerClient(f"127.0.0.1:{options.port}")
    scores = client.infer(options.model, inputs).as_numpy("output")[:, 0]
    for row in np.argsort(-scores):
        print(f"film {request['item_id'][row]:5}: {1 / (1 + np.exp(-scores[row])):.3f}")


if __name__ == "__main__":
    main()
