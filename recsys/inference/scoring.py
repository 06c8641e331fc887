"""Batch scoring: tables in, Parquet files of keys and predictions out."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast, final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn

from recsys.base.arguments import shown, whole
from recsys.base.checked import checked
from recsys.base.logs import logger
from recsys.datasets.files import File
from recsys.datasets.sources import read_parts
from recsys.datasets.tables import Paths, files_of, unify_types
from recsys.features.spec import FeatureSpec
from recsys.inference.packages.columns import arguments_of, is_optional, load_spec, names_of
from recsys.inference.packages.predictor import Predictor
from recsys.inference.records.rows import column_of_output
from recsys.inference.score_results import (
    METADATA,
    Origin,
    difference,
    input_of,
    model_of,
    named_outputs,
    package_of,
)
from recsys.inference.served_part import model_inside
from recsys.modules.modes import evaluation_mode
from recsys.modules.tables.fingerprints import check_spec

__all__ = ["add_arguments", "main", "score"]

_Outputs: TypeAlias = dict[str, np.ndarray[Any, Any]]


@checked
def score(
    model: nn.Module | str | Path,
    data: Any,
    out: str | Path,
    *,
    spec: Any = None,
    keys: Sequence[str] = (),
    batch_size: int = 4096,
    rank: int = 0,
    world_size: int = 1,
    progress: bool = True,
    probabilities: bool = False,
) -> list[Path]:
    """Score files and write a Parquet file of keys and predictions for each.

    Args:
        model: A version of a serving package that was written with a spec, such as
            "models/movies/1", or a model with `spec`; of a `DLRMTrain`, the model inside. The
            arguments of the model are the dense features, if the spec has any, and the features
            with ids.
        data: Paths, globs, folders or URLs of Parquet, CSV or TSV files. Further columns are
            ignored. An optional column, and one that states the value of missing numbers, such as
            `Numeric("age", missing=0.0)`, may be absent.
        out: A folder for the results, `NAME-CHECKSUM.parquet` for each file of `data`, with the
            CRC-32 of its path. A result appears when it is complete, so a stopped job continues,
            and new files are added. A result that exists is kept if it is of this model, these
            settings, and a file of the same size and time; others are computed again, and a line of
            the logger `recsys` counts them.
        spec: The fitted `FeatureSpec` of a module.
        keys: Columns of the data to copy into the results. If a label is among them, the output of
            its task is named `NAME_output`.
        batch_size: Rows per call of the model.
        rank: This process, from 0. Process i of n scores the files i, i + n, i + 2n, ...
        world_size: Number of processes.
        progress: Whether to show a progress bar, on a terminal where tqdm is installed.
        probabilities: Whether to add the probability of each logit: `probability` beside `output`,
            and `NAME_probability` beside the output `NAME`.

    Returns:
        The results of this process. Their columns are the keys and the outputs of the model: by
        their names in a dict; by the names of the labels if a model of several labels returns a
        tensor with a column for each; otherwise `output`.

    Raises:
        FileNotFoundError: There is no file, or no package.
        KeyError: A file does not have a column.
        TypeError: A column has another type.
        ValueError: A file is damaged or a value is out of its range; `spec` is missing; or an
            output of the model does not have one row per sample, has the name of a key, or is not
            a logit although `probabilities` is set.

    Example:
        >>> score("models/movies/1", "events/*.parquet", "scores", keys=["user"])  # doctest: +SKIP
        [PosixPath('scores/day_0-1c291ca3.parquet')]
    """
    whole("score.batch_size", batch_size)
    whole("score.world_size", world_size)
    whole("score.rank", rank, 0, world_size - 1)
    share = _Share(rank, world_size, progress and rank == 0, lambda file, part: None)
    return _score_files(model, data, Path(out), spec, keys, batch_size, probabilities, share)


class _Share(NamedTuple):
    """The files of one process."""

    rank: int
    world_size: int
    has_bar: bool
    begin: Callable[[str, Path], None]
    """Called with each file, and the unfinished result that is deleted if the process is lost."""


def _score_files(
    model: nn.Module | str | Path,
    data: Any,
    folder: Path,
    spec: FeatureSpec | None,
    keys: Sequence[str],
    batch_size: int,
    probabilities: bool,
    share: _Share,
) -> list[Path]:
    files = files_of(data)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        scorer = open_scorer(model, spec, stack)
        required = [name for name in scorer.names if name not in scorer.optional]
        # Text files must give a column one type, even if some of the files lack it.
        kinds = {**dict.fromkeys(scorer.optional, "number"), **scorer.kinds}
        mine = [
            (file, folder / f"{Path(file.path).stem}-{zlib.crc32(file.path.encode()):08x}.parquet")
            for number, file in enumerate(unify_types(files, required, kinds))
            if number % share.world_size == share.rank
        ]
        bar = stack.enter_context(_bar(share.has_bar, len(mine)))
        columns_of: list[list[str]] = []
        for file, _ in mine:
            present = [name for name in scorer.optional if name in file.schema.names]
            columns = [*dict.fromkeys([*keys, *required, *present])]
            file.check_columns(columns)
            columns_of.append(columns or file.schema.names[:1])  # for the number of rows
        settings = {"keys": list(keys), "probabilities": probabilities}
        origins = [
            {"model": scorer.origin, "settings": settings, "input": input_of(file, columns)}
            for (file, _), columns in zip(mine, columns_of, strict=True)
        ]
        are_current = _are_current([target for _, target in mine], origins, folder)

        def named(table: Any) -> _Outputs:
            outputs = named_outputs(scorer.predict(table), scorer.tasks, probabilities)
            copied = {*keys} & {*scorer.tasks}
            return {f"{n}_output" if n in copied else n: values for n, values in outputs.items()}

        for (file, target), columns, origin, is_kept in zip(
            mine, columns_of, origins, are_current, strict=True
        ):
            if not is_kept:
                part = target.with_name(f".{target.name}-{secrets.token_hex(8)}")
                share.begin(file.path, part)
                _score_file(file, part, named, keys, columns, batch_size, bar, origin)
                os.replace(part, target)
            bar(0, 1)
    return [target for _, target in mine]


def _are_current(results: Sequence[Path], origins: Sequence[Origin], folder: Path) -> list[bool]:
    """Return True for each result that can be kept, and log the number of outdated results.

    Args:
        results: Files of results, which may not exist.
        origins: The origin of each result of this call.
        folder: The folder of the results, for the message.
    """
    differences = [
        difference(result, origin) if result.exists() else None
        for result, origin in zip(results, origins, strict=True)
    ]
    changed = [text for text in differences if text is not None]
    if changed:
        logger.warning(
            "score computes %s of %s results in %s again: they are of %s.",
            len(changed), len(results), folder, ", or ".join(dict.fromkeys(changed)),
        )  # fmt: skip
    return [
        result.exists() and text is None for result, text in zip(results, differences, strict=True)
    ]


def _score_file(
    file: File,
    part: Path,
    predict: Callable[[Any], _Outputs],
    keys: Sequence[str],
    columns: Sequence[str],
    batch_size: int,
    bar: Callable[[int, int], None],
    origin: Origin,
) -> None:
    """Write the result of a file."""
    writer: Any = None
    try:
        for rows in read_parts(file, columns):
            for start in range(0, rows.table.num_rows, batch_size):
                samples = rows.slice(start, batch_size)
                with samples.located():
                    outputs = predict(samples.table)
                result = _joined(samples.table, keys, outputs, origin)
                writer = writer or pq.ParquetWriter(part, result.schema)
                writer.write_table(result)
                bar(samples.table.num_rows, 0)
        if writer is None:  # an empty file: a row of missing values has the same columns
            row = pa.table({name: pa.nulls(1, file.schema.field(name).type) for name in columns})
            writer = pq.ParquetWriter(part, _joined(row, keys, predict(row), origin).schema)
        writer.close()
    except BaseException:
        if writer is not None:
            writer.close()
        part.unlink(missing_ok=True)
        raise


def _joined(rows: Any, keys: Sequence[str], outputs: _Outputs, origin: Origin) -> Any:
    """Return a table of the keys and the outputs of rows, with their origin."""
    if taken := sorted(set(keys) & set(outputs)):
        raise ValueError(
            f"keys must not be outputs of the model; received {taken}. Leave them out, or rename "
            "these columns of the data."
        )
    columns = {name: rows.column(name) for name in keys}
    named = {name: column_of_output(values) for name, values in outputs.items()}
    table = pa.table({**columns, **named})
    return table.replace_schema_metadata({METADATA: json.dumps(origin)})


@final
class Scorer(NamedTuple):
    """A model, open for scoring."""

    predict: Callable[[Any], _Outputs]
    """Scores a table."""
    names: list[str]
    """The columns that it reads."""
    optional: list[str]
    """Columns that files may lack, as they state the value of missing numbers."""
    kinds: dict[str, str | None]
    """Kinds of keys."""
    tasks: list[str]
    """The labels of its spec."""
    origin: Origin


def open_scorer(
    model: nn.Module | str | Path, spec: FeatureSpec | None, stack: contextlib.ExitStack
) -> Scorer:
    """Open a model for scoring.

    Args:
        model: As for `score`.
        spec: As for `score`.
        stack: Closes the model.

    Raises:
        ValueError: As for `score`.
    """
    if isinstance(model, nn.Module):
        if not isinstance(spec, FeatureSpec):
            raise ValueError("score needs a fitted FeatureSpec with a model; received none.")
        model, fitted = model_inside(model), spec
        check_spec("score: spec", fitted, model)
        stack.enter_context(evaluation_mode(model))
        names = fitted.column_names(labels=False)
        kinds = {name: kind for name, kind in fitted.column_kinds().items() if name in names}
        optional = [column.name for column in fitted.columns if column.is_optional]
        optional = [*dict.fromkeys([*optional, *fitted.optional_names()])]
        origin, tasks = model_of(model, fitted), fitted.label_names
        return Scorer(
            lambda table: _run(model, fitted, table), names, optional, kinds, tasks, origin
        )
    predictor = stack.enter_context(Predictor(model))
    columns = predictor.manifest["columns"]
    if not columns:
        raise ValueError(
            f"{model} must be a package with raw columns. Write it by package(..., spec=spec)."
        )
    names = names_of(columns)
    kinds = {
        described["name"]: described["type"]
        for described in columns
        if "type" in described and not described["is_list"]
    }
    in_texts = [described for described in columns if described.get("separator") is not None]
    kinds |= dict.fromkeys(names_of(in_texts), "text")
    optional = names_of([described for described in columns if is_optional(described)])
    tasks, origin = load_spec(Path(model)).label_names, package_of(Path(model), predictor)
    return Scorer(lambda table: dict(predictor(table)), names, optional, kinds, tasks, origin)


@torch.no_grad()
def _run(model: nn.Module, spec: FeatureSpec, table: Any) -> _Outputs:
    batch = spec.transform(table, labels=False)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    output = model(*arguments_of(spec, batch.to(device)))
    outputs = output if isinstance(output, dict) else {"output": output}
    for name, value in outputs.items():
        if not isinstance(value, Tensor) or value.shape[:1] != (table.num_rows,):
            received = f"shape {list(value.shape)}" if isinstance(value, Tensor) else shown(value)
            raise ValueError(
                f"model must return a tensor, or a dict of tensors, with {table.num_rows} rows; "
                f"received {received} for {name!r}."
            )
    return {name: _host(value) for name, value in outputs.items()}


def _host(value: Tensor) -> np.ndarray[Any, Any]:
    return value.float().cpu().numpy() if value.is_floating_point() else value.cpu().numpy()


@contextlib.contextmanager
def _bar(is_shown: bool, num_files: int) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that counts rows and files."""
    if not (is_shown and sys.stderr.isatty() and importlib.util.find_spec("tqdm")):
        yield lambda rows, files: None
        return
    from tqdm import tqdm

    with tqdm(unit=" rows", unit_scale=True, desc=f"0 of {num_files} files") as bar:
        done = 0

        def count(rows: int, files: int) -> None:
            nonlocal done
            done += files
            bar.set_description(f"{done} of {num_files} files", refresh=False)
            bar.update(rows)

        yield count


# -- command ---------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m recsys score`."""
    parser.add_argument("version", type=Path, help="a version of a package with raw columns")
    parser.add_argument("--input", nargs="+", required=True, help="files, globs, folders or URLs")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument("--keys", nargs="*", default=[], help="columns to copy")
    parser.add_argument("--batch-size", type=int, default=4096, help="rows per call")
    parser.add_argument(
        "--probabilities", action="store_true", help="add the probability of each logit"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes on this machine")


def main(options: argparse.Namespace) -> int:
    """Run the command; errors go to stderr."""
    try:
        if whole("--processes", options.processes) == 1:
            paths: Paths = options.input
            score(
                options.version,
                paths,
                options.output,
                keys=options.keys,
                batch_size=options.batch_size,
                probabilities=options.probabilities,
            )
        else:
            _score_by_processes(options)
    except (OSError, ValueError, TypeError, KeyError) as error:
        print(f"recsys score: {error}", file=sys.stderr)
        return 1
    return 0


def _score_by_processes(options: argparse.Namespace) -> None:
    """Run the processes of the command.

    Raises:
        ChildProcessError: A process was lost. The message names the file that it scored.
    """
    context = multiprocessing.get_context("spawn")
    waiting: dict[Connection, Any] = {}
    begun: dict[Connection, tuple[str, Path]] = {}
    try:
        for rank in range(options.processes):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(options, rank, sender), daemon=True)
            process.start()
            sender.close()  # the end of the process is now the end of the messages
            waiting[receiver] = process
        while waiting:
            for receiver in cast(list[Connection], wait([*waiting])):
                try:
                    message = receiver.recv()
                except EOFError:
                    raise _lost(waiting[receiver], begun.get(receiver)) from None
                if isinstance(message, tuple):
                    begun[receiver] = message
                    continue
                process = waiting.pop(receiver)
                begun.pop(receiver, None)
                if message is not None:
                    raise message
                process.join()
    finally:
        for process in waiting.values():
            process.terminate()
            process.join()
        for _, part in begun.values():
            part.unlink(missing_ok=True)


def _lost(process: Any, begun: tuple[str, Path] | None) -> ChildProcessError:
    process.join()
    code = process.exitcode
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    place = "before its first file" if begun is None else f"while it scored {begun[0]}"
    return ChildProcessError(
        f"--processes: a process ended by {how} {place}. The other processes are stopped, and "
        "complete results stay. Run the command again, with fewer processes if memory ran out."
    )


def _work(options: argparse.Namespace, rank: int, messages: Connection) -> None:
    count = options.processes
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    share = _Share(rank, count, rank == 0, lambda file, part: messages.send((file, part)))
    files = options.version, options.input, options.output
    try:
        _score_files(*files, None, options.keys, options.batch_size, options.probabilities, share)
    except Exception as error:
        messages.send(error)
    else:
        messages.send(None)
