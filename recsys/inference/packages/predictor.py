"""Prediction by a serving package in Python: for notebooks, tests and batch scoring."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from recsys.base.checked import checked
from recsys.inference.packages.deltas import Delta, read_delta, read_deltas
from recsys.inference.packages.indexes import write_ids
from recsys.inference.packages.library import Library
from recsys.inference.packages.load import OpenProgram, open_program, program_of
from recsys.inference.packages.manifest import read_manifest, sha256_of, verify_files
from recsys.inference.packages.requests import Request, check_request, merge, split
from recsys.inference.packages.safetensors import read_tensors
from recsys.inference.records.settings import RecordCounts, Recording

if TYPE_CHECKING:  # needs pyarrow
    from recsys.inference.records.recorder import Recorder

__all__ = ["Predictor"]

Response = dict[str, NDArray[Any]]


@final
class Predictor:
    """Predictor over one version of a serving package.

    Requests have a tensor or array per input: dense inputs `[B, ...]`; and per feature ids `[N]`,
    int64 or int32, `<feature>.lengths` `[B]`, and `<feature>.weights` `[N]`, float32, if the input
    is weighted. Without lengths each row has one id; an absent feature has no ids. Inputs are
    checked before the program reads them.

    A package that was written with a `FeatureSpec` takes raw columns: a request is a table of
    Arrow, pandas or polars, or a dict of columns, as for `FeatureSpec.transform` without labels.
    The package of a `Recommend` then has a further output `values` `[B, K]`, objects: the values of
    the data that the recommended rows stand for, None where there is not an item.

    With the C++ core, calls run as in a server. Without it the program runs by torch. The program
    of a model that was on a GPU runs on the current CUDA device.

    Args:
        version: The folder of a version, such as "models/movies/1".
        library: `librecsys_predictor.so` of `make predictor`. None: the file that the environment
            variable `RECSYS_PREDICTOR` names, or torch if there is none.
        program: "aoti" or "torchscript"; "": the first of the package.
        num_threads: Threads of one operator, with the C++ core only; 0: torch's default.
        verify_tables: Compare the checksums of the tables, which reads them.
        poll_ms: Interval of reading new deltas in milliseconds, with the C++ core only; 0: deltas
            are read when the version is opened.
        record: Settings of a record of requests and answers, as Parquet files; None: no record.

    Raises:
        FileNotFoundError: The folder is not a version of a package, or a file is missing.
        ValueError: A file is damaged, this machine cannot run the program, or the package cannot be
            recorded.

    Example:
        >>> predictor = Predictor("models/movies/1")  # doctest: +SKIP
        >>> predictor({"film": torch.tensor([3, 4])})["film"].shape  # doctest: +SKIP
        (2, 4)
    """

    @checked
    def __init__(
        self,
        version: str | Path,
        *,
        library: str | Path | None = None,
        program: str = "",
        num_threads: int = 0,
        verify_tables: bool = True,
        poll_ms: int = 0,
        record: Recording | None = None,
    ) -> None:
        path = library or os.environ.get("RECSYS_PREDICTOR", "")
        if not path and (poll_ms or num_threads):
            raise ValueError(
                "poll_ms and num_threads need the C++ core; received no library. Build it by "
                "`make predictor`, and name it by RECSYS_PREDICTOR."
            )
        self._program = program
        self._verify_tables = verify_tables
        self._version = Path(version)
        self._spec: Any = None  # of the version, once it is needed
        self._engine: Library | _TorchEngine
        if path:
            on_gpu = program_of(read_manifest(Path(version)), program)["device"] == "cuda"
            options = {
                "program": program, "num_threads": num_threads,
                "verify_tables": int(verify_tables), "poll_ms": poll_ms,
                "device": torch.cuda.current_device() if on_gpu else -1,
            }  # fmt: skip
            self._engine = Library(Path(path), Path(version), options)
        else:
            self._engine = _TorchEngine(Path(version), program, verify_tables)
        self._manifest = self.manifest
        self._recorder = None if record is None else self._opened(record, path)

    def _opened(self, record: Recording, library: str | Path) -> Recorder:
        from recsys.inference.records.recorder import Recorder, check_recorded  # needs pyarrow

        check_recorded(record, self._manifest)
        shadow = None
        if record.shadow is not None:
            shadow = Predictor(
                record.shadow, library=library or None, verify_tables=self._verify_tables
            )
        return Recorder(record, shadow)

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the version."""
        manifest: dict[str, Any] = json.loads(self._engine.manifest())
        return manifest

    @property
    def sequence(self) -> int:
        """The number of the last applied delta; 0: none."""
        return self._engine.sequence()

    def __call__(self, request: Request | Any) -> Response:
        """Score a request.

        Returns:
            The outputs by name. A bfloat16 output is returned as float32.

        Raises:
            IndexError: An id is outside its table (without the C++ core).
            TypeError: A tensor has another dtype (without the C++ core).
            ValueError: The request does not match the package.
            RuntimeError: The program raised an error.
        """
        [result] = self.run([request])
        if isinstance(result, Exception):
            raise result
        return result

    def run(self, requests: Sequence[Request | Any]) -> list[Response | Exception]:
        """Score requests, which the C++ core merges; the entry of a bad request is its error."""
        converted = self._converted if self._manifest["columns"] else self._tensors
        tensors = [converted(request) for request in requests]
        answers = iter(self._engine.run([t for t in tensors if not isinstance(t, Exception)]))
        results = [
            request_tensors if isinstance(request_tensors, Exception) else next(answers)
            for request_tensors in tensors
        ]
        responses = [
            request_tensors
            if isinstance(request_tensors, Exception)
            else self._with_values({k: _array(v) for k, v in request_tensors.items()})
            for request_tensors in results
        ]
        if self._recorder is not None:
            served = str(self._version), self._manifest, self.sequence
            for request, response in zip(requests, responses, strict=True):
                if not isinstance(response, Exception):
                    self._recorder.add(request, response, served)
        return responses

    @property
    def record_counts(self) -> RecordCounts:
        """Numbers of rows of the record; zeros without one."""
        if self._recorder is None:
            return RecordCounts(0, 0, 0, 0, 0)
        return self._recorder.counts()

    def _with_values(self, response: Response) -> Response | Exception:
        """Add the values of recommended rows, if the engine does not; or return their error."""
        for output in self._manifest["outputs"]:
            if output.get("vocabulary") is not None and "values" not in response:
                rows = response[output["name"]]
                try:
                    response["values"] = self._loaded_spec().values_of(output["vocabulary"], rows)
                except ValueError as error:
                    return RuntimeError(str(error))
        return response

    def _loaded_spec(self) -> Any:
        """Return the spec of the version, which is read once."""
        from recsys.inference.packages.columns import load_spec

        if self._spec is None:
            self._spec = load_spec(self._version)
        return self._spec

    def _converted(self, request: Any) -> dict[str, Any] | Exception:
        """Convert a table of raw columns, or return the error of a bad value."""
        from recsys.inference.packages import columns as raw

        try:
            if isinstance(self._engine, Library):
                return dict(raw.raw_request(self._manifest["columns"], request))
            spec = self._loaded_spec()
            return dict(raw.model_request(spec, self._manifest["inputs"], request))
        except (KeyError, TypeError, ValueError) as error:
            return error

    def _tensors(self, request: Request) -> dict[str, Tensor] | Exception:
        """Convert a request to tensors, or return the error of a bad value."""
        tensors = {}
        for name, value in request.items():
            if self._recorder is not None and name == self._recorder.settings.key:
                continue
            try:
                tensor = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError) as error:
                return TypeError(f"{name} must be a tensor or an array of numbers; {error}.")
            tensors[name] = tensor.detach().cpu().contiguous()
        return tensors

    @checked
    def update(self, table: str, ids: Tensor, rows: Tensor) -> None:
        """Write rows of a table, in memory only.

        Args:
            table: Name of the table.
            ids: int64 `[R]` row numbers. The ids of a table with hashed ids stay: to move rows to
                other ids, apply a delta.
            rows: Quantized rows, uint8 `[R, row bytes]`.

        Raises:
            ValueError: The table, an id or the shape of the rows does not match the package.
        """
        ids, rows = ids.long().contiguous(), rows.contiguous()
        if ids.dim() != 1 or rows.dtype is not torch.uint8 or rows.shape[:1] != ids.shape:
            raise ValueError(
                f"Rows must be uint8 of [{len(ids)}, row bytes]; received {rows.dtype} of "
                f"{list(rows.shape)}."
            )
        self._engine.update(table, ids, rows)

    @checked
    def apply(self, file: str | Path) -> None:
        """Apply the next delta of the version, in memory only.

        Raises:
            FileNotFoundError: There is no such file (without the C++ core).
            ValueError: The delta is damaged, belongs to another version, or is not the next one.
        """
        self._engine.apply(Path(file))

    @checked
    def swap(self, version: str | Path) -> None:
        """Open another version in place of the current one, which is kept after an error."""
        if self._recorder is not None:
            from recsys.inference.records.recorder import check_recorded

            check_recorded(self._recorder.settings, read_manifest(Path(version)))
        if isinstance(self._engine, Library):
            self._engine.swap(Path(version))
        else:
            self._engine = _TorchEngine(Path(version), self._program, self._verify_tables)
        self._version, self._manifest, self._spec = Path(version), self.manifest, None

    def close(self) -> None:
        """Write the record and free the memory; the predictor cannot be used afterwards."""
        if self._recorder is not None:
            self._recorder.close()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@final
class _TorchEngine:
    """A version whose program runs by torch."""

    def __init__(self, version: Path, kind: str, verify_tables: bool) -> None:
        self._manifest = read_manifest(version)
        self._base = sha256_of(version / "manifest.json")
        verify_files(version, self._manifest, verify_tables)
        self._program: OpenProgram = open_program(version, self._manifest, kind)
        self._check_sample(version / "sample.safetensors")
        self._sequence = 0
        for delta in read_deltas(version):
            self._apply(delta)

    def _check_sample(self, path: Path) -> None:
        """Run the request of the package, and compare the outputs with its response."""
        sample = read_tensors(path)
        parts: dict[str, dict[str, Tensor]] = {"request": {}, "response": {}}
        for name, tensor in sample.items():
            part, _, key = name.partition(".")
            parts.setdefault(part, {})[key] = tensor
        outputs = self._run_one(parts["request"])
        if isinstance(outputs, Exception):
            raise ValueError(f"The sample of the package must be a request; {outputs}") from outputs
        for name, output in outputs.items():
            wanted = parts["response"].get(name)
            if wanted is None or not _are_close(output, wanted):
                raise ValueError(
                    f"The program must return the response of the sample; output {name} differs. "
                    "Write the package again."
                )

    def manifest(self) -> str:
        return json.dumps(self._manifest)

    def sequence(self) -> int:
        return self._sequence

    def run(self, requests: Sequence[Request]) -> list[dict[str, Any] | Exception]:
        return [self._run_one(request) for request in requests]

    def _run_one(self, request: Request) -> dict[str, Tensor] | Exception:
        try:
            checked_request = check_request(self._manifest, request)
        except (ValueError, TypeError, IndexError) as error:
            return error
        try:
            program = self._program
            outputs = program.run(merge(self._manifest, [checked_request], program.indexes))
            return split(self._manifest, outputs, [checked_request.rows])[0]
        except Exception as error:  # of the program
            return RuntimeError(str(error))

    def update(self, table: str, ids: Tensor, rows: Tensor) -> None:
        self._check(table, ids, rows)
        self._write(table, ids, rows)

    def apply(self, file: Path) -> None:
        delta = read_delta(file)
        if delta.sequence != self._sequence + 1:
            raise ValueError(
                f"{file} must have the sequence number {self._sequence + 1}; received "
                f"{delta.sequence}."
            )
        self._apply(delta)

    def close(self) -> None:
        del self._program

    def _apply(self, delta: Delta) -> None:
        if delta.base != self._base:
            raise ValueError(
                f"Delta {delta.sequence} must be of the version with manifest {self._base}; "
                f"received a delta of {delta.base}."
            )
        for table, (ids, rows, *_) in delta.tables.items():
            self._check(table, ids, rows)
        for table, (ids, rows, *index) in delta.tables.items():
            self._write(table, ids, rows)
            if index:
                write_ids(self._program.indexes[table], ids, *index)
        self._sequence = delta.sequence

    def _check(self, name: str, ids: Tensor, rows: Tensor) -> None:
        table = self._table(name)
        if rows.shape[1:] != (table["row_bytes"],):
            raise ValueError(
                f"Rows of table {name!r} must have {table['row_bytes']} bytes; received "
                f"{list(rows.shape[1:])}."
            )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= table["rows"]):
            raise ValueError(
                f"Row ids of table {name!r} must be from 0 to {table['rows'] - 1}; received "
                f"{int(ids.min())} to {int(ids.max())}."
            )

    def _table(self, name: str) -> Any:
        for table in self._manifest["tables"]:
            if table["name"] == name:
                return table
        raise ValueError(f"An update must name a table of the package; received {name!r}.")

    def _write(self, name: str, ids: Tensor, rows: Tensor) -> None:
        table = self._table(name)
        start, size = table["offset"], table["rows"] * table["row_bytes"]
        stored = self._program.buffers[table["buffer"]][start : start + size]
        stored = stored.view(table["rows"], table["row_bytes"])
        stored[ids.to(stored.device)] = rows.to(stored.device)


def _are_close(found: Tensor, wanted: Tensor) -> bool:
    if found.dtype != wanted.dtype or found.shape != wanted.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, wanted)
    return torch.allclose(found.double(), wanted.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def _array(output: Tensor | NDArray[Any]) -> NDArray[Any]:
    if not isinstance(output, Tensor):
        return output
    return (output.float() if output.dtype is torch.bfloat16 else output).numpy()
