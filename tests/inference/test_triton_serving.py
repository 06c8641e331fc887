"""The backend in a Triton server on loopback, over HTTP and gRPC."""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
from serving.triton_server import Server, find_server, triton_server

from recsys.inference import Predictor, package, quantize_embeddings
from tests.inference.packages.model_cases import arguments_of, build, request_of
from tests.inference.packages.test_recommenders import NUMBERS, TEXTS, histories_of
from tests.inference.packages.test_recommenders import build as recommender
from tests.inference.raw_package import raw_spec, raw_table, write_raw_version
from tests.inference.small_package import Request, random_request, score, write_version

ROOT = Path(__file__).parents[2]
TRITON = Path(os.environ.get("RECSYS_TRITON", ROOT / ".cache/triton"))
BACKENDS = Path(os.environ.get("RECSYS_BACKENDS", ROOT / "build/predictor/backends"))

http = pytest.importorskip("tritonclient.http", reason="needs tritonclient: make serve installs it")
grpc = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient: make serve installs it")

pytestmark = [
    pytest.mark.skipif(
        not (TRITON / "pytriton").is_dir(),
        reason=f"needs Triton in {TRITON}: make serve unpacks it",
    ),
    pytest.mark.skipif(
        not (BACKENDS / "recsys/libtriton_recsys.so").exists(),
        reason=f"needs the backend in {BACKENDS}: make predictor builds it",
    ),
    # Clients of HTTP and gRPC leave sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

DATATYPES = {torch.float32: "FP32", torch.int64: "INT64", torch.int32: "INT32"}
PROTOCOLS = ("http", "grpc")


class Client:
    """A client of one protocol."""

    def __init__(self, server: Server, protocol: str) -> None:
        self.module: Any = {"http": http, "grpc": grpc}[protocol]
        port = {"http": server.http_port, "grpc": server.grpc_port}[protocol]
        self.client = self.module.InferenceServerClient(f"127.0.0.1:{port}")

    def infer(self, request: Request, version: str = "") -> np.ndarray:
        scores: np.ndarray = self.result(request, version).as_numpy("output")
        return scores

    def result(self, request: Request, version: str = "") -> Any:
        inputs = []
        for name, tensor in request.items():
            one = self.module.InferInput(name, list(tensor.shape), DATATYPES[tensor.dtype])
            one.set_data_from_numpy(tensor.numpy())
            inputs.append(one)
        return self.client.infer("movies", inputs, model_version=version)

    def error(self, request: Request) -> tuple[str, str]:
        """Status and message of the error of a bad request."""
        with pytest.raises(Exception, match=r".") as caught:
            self.infer(request)
        error: Any = caught.value
        return str(error.status()), str(error.message())


def start(models: Path, arguments: Sequence[str] = ()) -> Any:
    log = models.parent / "triton.log"
    return triton_server(find_server(TRITON), models, BACKENDS, arguments, log=log)


EXPLICIT = ("--model-control-mode=explicit", "--load-model=movies")
BAD_STATUS = {"400", "StatusCode.INVALID_ARGUMENT"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    models = tmp_path_factory.mktemp("served") / "models"
    model = write_version(models / "movies", 1, seed=1)
    with start(models) as server:
        yield server, model


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_scores_are_those_of_python(served: tuple[Server, Any], protocol: str) -> None:
    server, model = served
    client = Client(server, protocol)
    for num_rows in (0, 1, 7, 64):
        request = random_request(num_rows, seed=num_rows)
        np.testing.assert_allclose(client.infer(request), score(model, request), 1e-5, 1e-6)


def test_a_compiled_hstu_recommends_as_in_python(tmp_path: Path) -> None:
    """Items and scores, with the index of items inside the program."""
    case = build("hstu")
    example = arguments_of(case, request_of(case, 3, seed=1))
    version = package(case.model, tmp_path / "models/movies", example, programs=["aoti"])
    with start(tmp_path / "models") as server, Predictor(version) as predictor:
        client = Client(server, "http")
        for size in (1, 2, 17, 0):
            request = request_of(case, size, seed=size)
            result, of_python = client.result(request), predictor(request)
            with torch.no_grad():
                wanted = case.model(*arguments_of(case, request))
            for (name, one), part in zip(of_python.items(), wanted, strict=True):
                for found in (one, result.as_numpy(name)):
                    np.testing.assert_allclose(found, part.numpy(), 1e-4, 1e-5)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_missing_features_have_no_ids(served: tuple[Server, Any], protocol: str) -> None:
    server, model = served
    request = random_request(3, seed=3)
    without = {name: t for name, t in request.items() if not name.startswith("tag")}
    empty = {
        **request,
        "tag": torch.zeros(0, dtype=torch.int64),
        "tag.lengths": torch.zeros(3).long(),
    }
    np.testing.assert_allclose(
        Client(server, protocol).infer(without), score(model, empty), 1e-5, 1e-6
    )


def bad_requests() -> list[tuple[Request, str]]:
    """Requests with one mistake each, and a part of the message."""
    good = random_request(2, seed=5) | {
        "film": torch.tensor([1, 2, 3]),
        "film.lengths": torch.tensor([1, 2]),
    }

    def without(name: str) -> Request:
        return {key: tensor for key, tensor in good.items() if key != name}

    return [
        (good | {"film": torch.tensor([1, 1000, 3])}, "Id 1000 at position 1 of feature 'film'"),
        (good | {"film": torch.tensor([-1, 2, 3])}, "Id -1 at position 0 of feature 'film'"),
        (good | {"film": torch.tensor([1, 2])}, "film"),
        (good | {"film.lengths": torch.tensor([1, 3])}, "film"),
        (good | {"film.lengths": torch.tensor([-1, 4])}, "film.lengths"),
        (good | {"film.lengths": torch.tensor([1, 1, 1])}, "film.lengths"),
        (good | {"dense_features": torch.zeros(3, 3)}, "dense_features"),
        (good | {"dense_features": torch.zeros(2, 4)}, "dense_features"),
        (without("dense_features"), "dense_features"),
        (random_request(65, seed=65), "at most 64 rows; received 65"),
        (without("film"), "film"),
        (good | {"director": torch.tensor([1])}, "director"),
        (good | {"film": torch.tensor([1, 2, 3], dtype=torch.int32)}, "film"),
    ]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_300_bad_requests_among_good_ones(served: tuple[Server, Any], protocol: str) -> None:
    server, model = served
    bad = bad_requests()
    is_done = threading.Event()

    def check_good(seed: int) -> int:
        client, count = Client(server, protocol), 0
        while not is_done.is_set():
            request = random_request(1 + count % 5, seed=seed * 1000 + count)
            np.testing.assert_allclose(client.infer(request), score(model, request), 1e-5, 1e-6)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        good = [pool.submit(check_good, seed) for seed in range(3)]
        client = Client(server, protocol)
        try:
            for i in range(300):
                request, message = bad[i % len(bad)]
                status, text = client.error(request)
                assert status in BAD_STATUS, text
                assert message in text
        finally:
            is_done.set()
        assert min(future.result() for future in good) > 0
    assert server.process.poll() is None


def test_requests_that_wait_are_merged_by_rows(served: tuple[Server, Any]) -> None:
    server, model = served
    client = Client(server, "http")
    before = client.client.get_inference_statistics("movies")["model_stats"][0]

    def send(seed: int) -> None:
        own = Client(server, "http")
        for i in range(40):
            request = random_request(1 + (seed + i) % 40, seed=seed * 100 + i)
            np.testing.assert_allclose(own.infer(request), score(model, request), 1e-5, 1e-6)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(8)))
    after = client.client.get_inference_statistics("movies")["model_stats"][0]
    requests = after["inference_count"] - before["inference_count"]
    assert requests == 320
    assert after["execution_count"] - before["execution_count"] < requests
    assert after["inference_stats"]["success"]["count"] >= 320


def memory_of(process: int) -> float:
    """MiB that a process alone has in memory."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text()
    fields = dict(line.split(":") for line in text.splitlines()[1:])
    return sum(int(fields[f"Private_{kind}"].split()[0]) for kind in ("Clean", "Dirty")) / 1024


def temporary_files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("program", ["torchscript", "aoti"])
def test_versions_are_replaced_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    models, temporary, request = (
        tmp_path / "models",
        tmp_path / "temporary",
        random_request(4, seed=9),
    )
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    package = models / "movies"
    wanted = [
        score(write_version(tmp_path / f"{seed}/movies", 1, seed, program), request)
        for seed in range(2)
    ]
    shutil.copytree(tmp_path / "1/movies", package)
    is_done, failures, answers = threading.Event(), [], []

    def load(server: Server) -> None:
        client = Client(server, "http")
        while not is_done.is_set():
            try:
                answers.append(float(client.infer(request)[0, 0]))
            except Exception as error:
                failures.append(str(error))

    with start(models, EXPLICIT) as server, ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(load, server) for _ in range(2)]
        control = Client(server, "http")
        try:
            memory = []
            for version in range(2, 23):
                part = Path(
                    shutil.copytree(tmp_path / f"{version % 2}/movies/1", tmp_path / "part")
                )
                part.rename(package / str(version))
                begin = time.monotonic()
                control.client.load_model("movies")
                np.testing.assert_allclose(control.infer(request), wanted[version % 2], 1e-5, 1e-6)
                assert time.monotonic() - begin < 1
                time.sleep(0.2)
                memory.append(memory_of(server.process.pid))
        finally:
            is_done.set()
        for client in clients:
            client.result()
        assert failures == []
        known = [float(scores[0, 0]) for scores in wanted]
        assert all(min(abs(one - answer) for one in known) < 1e-5 for answer in answers)
        # the allocator reaches its size in ten swaps; ten more leave nothing
        assert memory[-1] - memory[10] < 4, memory
        assert temporary_files(temporary) == set()
        server.process.kill()
    with start(models, EXPLICIT) as server:
        Client(server, "http").infer(request)
    assert temporary_files(temporary) == set()


def raw_inputs(module: Any, table: pa.Table) -> list[Any]:
    """The inputs of a request with the columns of a table."""
    arrays: dict[str, np.ndarray] = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pa.types.is_list(column.type):
            arrays[f"{name}.lengths"] = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
            column = column.flatten()
        values = column.fill_null("" if pa.types.is_string(column.type) else 0)
        if pa.types.is_uint64(values.type):
            arrays[name] = values.to_numpy().view(np.int64)
        elif pa.types.is_integer(values.type) and name != "level":
            arrays[name] = values.to_numpy().astype(np.int64)
        elif name == "level":
            arrays[name] = values.to_numpy().astype(np.float64)
        else:
            arrays[name] = values.to_numpy(zero_copy_only=False)
        if name != "weight":
            arrays[f"{name}.missing"] = column.is_null().to_numpy(zero_copy_only=False)
    arrays.pop("weight.lengths", None)
    kinds = {"f": "FP32", "i": "INT64", "b": "BOOL", "O": "BYTES"}
    inputs = []
    for name, array in arrays.items():
        kind = "FP64" if array.dtype == np.float64 else kinds[array.dtype.kind]
        array = array.astype(np.int64) if kind == "INT64" else array
        one = module.InferInput(name, list(array.shape), kind)
        one.set_data_from_numpy(array)
        inputs.append(one)
    return inputs


def test_requests_have_raw_columns(tmp_path: Path) -> None:
    """Texts, numbers and lists with missing values, over both protocols; bad ones are named."""
    spec = raw_spec(is_weighted=True)
    version, _ = write_raw_version(tmp_path / "models/movies", spec)
    with start(tmp_path / "models") as server, Predictor(version) as plain:
        for protocol in PROTOCOLS:
            client = Client(server, protocol)
            for seed in range(5):
                table = raw_table(30 + seed, seed + 20).drop_columns(["ok"])
                inputs = raw_inputs(client.module, table)
                found = client.client.infer("movies", inputs).as_numpy("output")
                np.testing.assert_allclose(found, plain(table)["output"], rtol=1e-5, atol=1e-6)
            bad = client.module.InferInput("row", [2], "INT64")
            bad.set_data_from_numpy(np.array([3, 25]))
            with pytest.raises(Exception, match=r"Id 25 .*1 of feature 'row'") as caught:
                client.client.infer("movies", [bad])
            error: Any = caught.value
            assert str(error.status()) in BAD_STATUS


@pytest.mark.parametrize("items", [TEXTS, NUMBERS], ids=["texts", "numbers"])
def test_recommenders_answer_with_the_values_of_python(tmp_path: Path, items: Any) -> None:
    """Value by value; also a configuration without values, and a client that wants some outputs."""
    recommend, spec = recommender(items)
    table = histories_of(items)
    quantized = quantize_embeddings(recommend)
    version = package(quantized, tmp_path / "models/movies", table, spec=spec)
    shutil.copytree(version.parent, old := tmp_path / "models/old")
    config = (old / "config.pbtxt").read_text().replace('"movies"', '"old"')
    lines = config.splitlines()
    kept = [line for line in lines if not line.startswith('output { name: "values')]
    assert len(kept) == len(lines) - 2
    (old / "config.pbtxt").write_text("\n".join(kept))
    with start(tmp_path / "models") as server, Predictor(version) as plain:
        wanted = plain(table)["values"]
        for protocol in PROTOCOLS:
            client = Client(server, protocol)
            inputs = raw_inputs(client.module, table)
            found = client.client.infer("movies", inputs)
            rows = client.client.infer("old", inputs)
            assert rows.as_numpy("values") is None
            assert rows.as_numpy("1").tolist() == found.as_numpy("1").tolist()
            one = [client.module.InferRequestedOutput("values")]
            for answer in (found, client.client.infer("movies", inputs, outputs=one)):
                values = answer.as_numpy("values")
                texts = (
                    values
                    if isinstance(items[0], int)
                    else np.vectorize(decoded, otypes=[object])(values)
                )
                none = "" if isinstance(items[0], str) else 0
                assert texts.tolist() == [[none if v is None else v for v in r] for r in wanted]
            is_missing = found.as_numpy("values.missing").tolist()
            assert is_missing == [[v is None for v in row] for row in wanted]


def decoded(value: Any) -> str:
    """The text of a `BYTES` tensor."""
    return value.decode() if isinstance(value, bytes) else value


def test_a_broken_version_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "models/movies"
    model = write_version(package, 1, seed=1)
    request = random_request(4, seed=9)
    with start(package.parent, EXPLICIT) as server:
        client = Client(server, "http")
        write_version(package, 2, seed=2)
        program = package / "2/program.pt"
        content = bytearray(program.read_bytes())
        content[random.Random(0).randrange(len(content))] ^= 1
        program.write_bytes(content)
        with pytest.raises(Exception, match=r"program\.pt"):
            client.client.load_model("movies")
        np.testing.assert_allclose(client.infer(request), score(model, request), 1e-5, 1e-6)
        np.testing.assert_allclose(client.infer(request, "1"), score(model, request), 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_batch_size: 0", "max_batch_size: 8", "max_batch_size must be 0; received 8"),
        ('"poll_ms"', '"poll"', "received 'poll'"),
        ('string_value: "100"', 'string_value: "x"', "poll_ms must be a number"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    package = tmp_path / "models/movies"
    write_version(package, 1, seed=1)
    config = package / "config.pbtxt"
    config.write_text(config.read_text().replace(old, new))
    with pytest.raises(RuntimeError, match=message), start(package.parent):
        pass
