"""The client and the server of examples/serving, without Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from movielens.data import build_movielens
from serving.client import read_request
from serving.package import write_requests as write_requests_of
from serving.triton_server import errors_of, find_server, free_ports, stop, triton_server

from tests.examples.movielens.case import made_up_ratings


def write_requests(path: Path) -> None:
    np.savez(
        path,
        age=np.arange(4.0),
        user_id=np.array([7, 8, 7, 9]),
        year=np.array([1990, 0, 0, 1995]),
        **{"year.missing": np.array([False, True, True, False])},
        genres=np.array(["War", "Drama", "Comedy", "War", "Western"]),
        **{"genres.lengths": np.array([2, 1, 0, 2])},
    )


@pytest.mark.parametrize(
    ("user", "ages", "missing", "genres", "lengths"),
    [
        (7, [0.0, 2.0], [False, True], ["War", "Drama"], [2, 0]),
        (9, [3.0], [False], ["War", "Western"], [2]),
    ],
)
def test_a_request_has_the_rows_of_a_user(
    tmp_path: Path,
    user: int,
    ages: list[float],
    missing: list[bool],
    genres: list[str],
    lengths: list[int],
) -> None:
    path = tmp_path / "requests.npz"
    write_requests(path)
    request = read_request(path, user)
    assert {name: array.tolist() for name, array in request.items()} == {
        "age": ages,
        "user_id": [user] * len(ages),
        "year": [0 if one else 1990 + 5 * (user == 9) for one in missing],
        "year.missing": missing,
        "genres": genres,
        "genres.lengths": lengths,
    }


def test_requests_have_the_features_of_the_table(tmp_path: Path) -> None:
    data = build_movielens(made_up_ratings(), split="random")
    write_requests_of(data.spec, data.test, tmp_path / "requests.npz")
    rows = data.test.filter(pc.field("user_id") == 104)
    request = read_request(tmp_path / "requests.npz", 104)
    columns = {}
    for name in data.spec.column_names(labels=False):
        column = pa.array(request[name], from_pandas=True, mask=request.get(f"{name}.missing"))
        if f"{name}.lengths" in request:
            offsets = np.concatenate([[0], request[f"{name}.lengths"].cumsum()])
            column = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), column)
        columns[name] = column
    found = data.spec.transform(pa.table(columns), labels=False)
    expected = data.spec.transform(rows, labels=False)
    assert len(rows) > 1
    assert torch.equal(found.dense_features, expected.dense_features)
    for name, bags in expected.sparse_features.to_dict().items():
        assert found.sparse_features[name].values().tolist() == bags.values().tolist()
        assert found.sparse_features[name].lengths().tolist() == bags.lengths().tolist()


def test_an_unknown_user_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "requests.npz"
    write_requests(path)
    with pytest.raises(SystemExit, match=r"such as \[7, 8, 9\]"):
        read_request(path, 6)


def test_a_folder_without_triton_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must contain an unpacked nvidia-pytriton"):
        find_server(tmp_path)


def write_server(folder: Path, body: str) -> Path:
    """A program that takes Triton's place."""
    program = folder / "pytriton/tritonserver/bin/tritonserver"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\n{body}\n")
    return find_server(folder)


def test_the_errors_of_a_server_that_ends_are_raised(tmp_path: Path) -> None:
    program = write_server(tmp_path, "print('I1 fine')\nprint('E1 bad model')\nraise SystemExit(1)")
    log = tmp_path / "log"
    with (
        pytest.raises(RuntimeError, match=r"exit code 1\. E1 bad model$"),
        triton_server(program, tmp_path, tmp_path, log=log),
    ):
        pass
    assert errors_of(None) == "See the log above."


READY = """
import http.server, sys
given = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
port = int(given["--http-port"])
http.server.HTTPServer((given["--http-address"], port), Handler).serve_forever()
"""


def test_a_server_is_awaited_and_stopped(tmp_path: Path) -> None:
    program = write_server(tmp_path, READY)
    ports = tuple(free_ports(2))
    with triton_server(program, tmp_path, tmp_path, ports=ports, log=tmp_path / "log") as server:
        assert (server.http_port, server.grpc_port) == ports
        assert server.process.poll() is None
    assert server.process.poll() is not None


def test_a_server_that_does_not_stop_is_killed() -> None:
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"import signal, time; {ignore}; print(flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout as output:
        output.readline()
        stop(process, seconds=0.1)
    assert process.returncode == -9
    assert not os.path.exists(f"/proc/{process.pid}")
