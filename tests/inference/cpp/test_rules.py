"""Rules of docs/serving_rules.md: each has one case, which Python and the C++ core run.

The cases are in `tests/inference/cases/`. A case has a rule, a kind of package and steps. A step
has one action, and `error` if the action is refused: the text of both languages, or one for each.
"""

from __future__ import annotations

import json
import os
import re
from functools import reduce
from itertools import chain
from operator import getitem
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from recsys.inference import Predictor
from recsys.inference.packages import manifest as manifest_module
from recsys.inference.packages import predictor as predictor_module
from recsys.inference.packages.columns import Texts
from recsys.inference.packages.library import Library
from recsys.inference.packages.manifest import sha256_of
from recsys.inference.packages.requests import check_request, merge, split
from tests.inference.cpp import fake_package
from tests.inference.cpp.test_core import MISSING

TESTS = Path(__file__).parents[2]
FILES = sorted((TESTS / "inference" / "cases").glob("*.json"))
CASES = [case for file in FILES for case in json.loads(file.read_text())]
PAGE = TESTS.parent / "docs" / "serving_rules.md"


@final
class Server:
    """A version of the fake package in one language, which is opened when a step needs it."""

    def __init__(self, folder: Path, case: dict[str, Any], library: Path | None) -> None:
        self.version = folder / "1"
        self._library = library
        self._kind = case.get("package", "tensors")
        self._opened: Predictor | Library | None = None
        self._language = "python" if library is None else "core"
        self._files: dict[str, bytes] = {}
        if self._kind == "tensors":
            fake_package.write(self.version)
        elif self._kind == "columns":
            fake_package.write_raw(self.version)
        elif self._kind == "separated":
            fake_package.write_separated(self.version)
        elif self._kind == "vectors":
            fake_package.write_vectors(self.version)
        else:
            fake_package.write_recommender(self.version, case["values"])
        self._written = {path: path.read_bytes() for path in self.version.glob("tables/*")}

    def step(self, step: dict[str, Any]) -> None:
        [action] = step.keys() - {"error", "answers"}
        run = getattr(self, f"do_{action}")
        if "error" not in step:
            run(step[action], *([step["answers"]] if "answers" in step else []))
            return
        with pytest.raises((ValueError, FileNotFoundError), match=re.escape(self._text(step))):
            run(step[action])

    def _text(self, step: dict[str, Any]) -> str:
        error = step["error"]
        found: str = error if isinstance(error, str) else error[self._language]
        return found

    # -- requests -----------------------------------------------------------------------------

    def do_run(self, requests: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
        """Run requests in one call, and compare the answers."""
        has_columns = self._kind != "tensors"
        convert = tensors_of if not has_columns else columns_of if self._library else dict
        converted = [convert(request) for request in requests]
        found: list[Any] = list(self._engine().run(converted))  # type: ignore[arg-type]
        if self._library is None and not has_columns:
            self._check_merged(converted, found)
        for one, wanted in zip(found, answers, strict=True):
            if "error" in wanted:
                assert isinstance(one, Exception), one
                assert self._text(wanted) in str(one)
                continue
            assert isinstance(one, dict), one
            for name, values in wanted.items():
                answer = np.asarray(one[name])
                if isinstance(values, dict):
                    assert list(answer.shape) == values["shape"]
                elif answer.dtype == object:
                    assert answer.tolist() == values
                else:
                    answer = answer.flatten() if name == "score" else answer
                    np.testing.assert_allclose(answer, np.array(values), rtol=1e-6)

    def _check_merged(self, requests: list[Any], found: list[Any]) -> None:
        """Compare the answers of `Predictor`, which runs requests one by one, with merged ones."""
        good = [i for i, one in enumerate(found) if isinstance(one, dict)]
        engine: Any = self._engine()
        manifest, program = engine.manifest, engine._engine._program
        checked = [check_request(manifest, requests[i]) for i in good]
        if checked:
            outputs = program.run(merge(manifest, checked, program.indexes))
            for i, one in zip(
                good, split(manifest, outputs, [c.rows for c in checked]), strict=True
            ):
                assert one.keys() == found[i].keys()
                for name, output in one.items():
                    np.testing.assert_array_equal(output.numpy(), found[i][name])

    # -- files --------------------------------------------------------------------------------

    def do_open(self, _: object) -> None:
        """Open the version, again if it is open."""
        self.close()
        self._engine()

    def do_change(self, changes: list[tuple[list[Any], Any]]) -> None:
        """Change members of the manifest: their paths, and new values."""
        self.close()
        path = self.version / "manifest.json"
        manifest = json.loads(path.read_text())
        for (*parents, last), value in changes:
            reduce(getitem, parents, manifest)[last] = value
        path.write_text(json.dumps(manifest))

    def do_refused_texts(self, texts: list[str]) -> None:
        """Open manifests with a further member; each must be refused."""
        path = self.version / "manifest.json"
        text = path.read_text()
        for member in texts:
            path.write_text('{"further": ' + member + "," + text[1:])
            with pytest.raises(ValueError, match="must be a manifest"):
                self.do_open(None)
        path.write_text(text)

    def do_sample(self, changes: dict[str, Any]) -> None:
        """Write other tensors into the sample."""
        path = self.version / "sample.safetensors"
        other = {name: np.array(values, np.float32) for name, values in changes.items()}
        save_file({**fake_package.SAMPLE, **other}, path)
        about = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        self.do_change([(["files", path.name], about)])

    def do_flip(self, name: str) -> None:
        """Change one bit of a file; a second step restores it."""
        self.close()
        path = self.version / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def do_remove(self, name: str) -> None:
        """Remove a file; `restore` writes it again."""
        self.close()
        self._files[name] = (self.version / name).read_bytes()
        (self.version / name).unlink()

    def do_restore(self, name: str) -> None:
        (self.version / name).unlink(missing_ok=True)
        (self.version / name).write_bytes(self._files[name])

    def do_link(self, name: str) -> None:
        """Replace a file by a link to a file outside of the version."""
        self.do_remove(name)
        outside = self.version.parent / "outside"
        outside.write_bytes(self._files[name])
        os.symlink(outside, self.version / name)

    def do_swap(self, changes: dict[str, Any]) -> None:
        """Replace the open version by another one with changes in its manifest."""
        number = len([*self.version.parent.iterdir()]) + 1
        other = fake_package.write(self.version.parent / str(number), **changes)
        self._engine().swap(other)

    # -- deltas -------------------------------------------------------------------------------

    def do_delta(self, delta: dict[str, Any]) -> None:
        """Write a delta: the byte of each row of `t`, and the ids of rows of `h`."""
        rows, hashed = (
            None if part is None else {int(row): value for row, value in part.items()}
            for part in (delta.get("rows", {}), delta.get("hashed"))
        )
        rest = {key: value for key, value in delta.items() if key in ("lacks", "base")}
        fake_package.delta(self.version, delta["sequence"], rows or {}, hashed, **rest)

    def do_apply(self, sequence: int) -> None:
        """Apply a delta of the folder."""
        self._engine().apply(self.version / f"deltas/{sequence:012}.delta")

    def do_apply_foreign(self, rows: dict[str, int]) -> None:
        """Apply the first delta of another version."""
        other = fake_package.write(self.version.parent / "other", recsys="0.0.0")
        changed = {int(row): value for row, value in rows.items()}
        self._engine().apply(fake_package.delta(other, 1, changed))

    def do_update(self, update: dict[str, Any]) -> None:
        """Write rows of one byte."""
        ids = torch.tensor(update["ids"])
        size = update.get("row_bytes", fake_package.ROW_BYTES)
        rows = torch.full((len(ids), size), update["byte"], dtype=torch.uint8)
        self._engine().update(update["table"], ids, rows)

    def do_sequence(self, wanted: int) -> None:
        """Compare the number of the last applied delta."""
        sequence = self._engine().sequence
        assert (sequence if isinstance(sequence, int) else sequence()) == wanted

    # -----------------------------------------------------------------------------------------

    def _engine(self) -> Predictor | Library:
        if self._opened is None:
            library = self._library
            self._opened = (
                Predictor(self.version) if library is None else Library(library, self.version, {})
            )
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def check_tables(self) -> None:
        """Check that no server has written to the tables on the disk."""
        assert {path: path.read_bytes() for path in self._written} == self._written


def tensors_of(request: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a request: float32 for `dense` and weights, int64 for others."""
    found = {}
    for name, value in request.items():
        is_float = name == "dense" or name.endswith(".weights")
        given = value if isinstance(value, dict) else {"values": value}
        dtype = getattr(torch, given.get("dtype", "float32" if is_float else "int64"))
        shape = given.get("shape")
        found[name] = (
            torch.tensor(given["values"], dtype=dtype)
            if shape is None
            else torch.zeros(shape, dtype=dtype)
        )
    return found


def columns_of(request: dict[str, Any]) -> dict[str, torch.Tensor | Texts]:
    """Return the tensors of raw columns as a client of the C API sends them, unchecked."""
    found: dict[str, torch.Tensor | Texts] = {}
    for name, rows in request.items():
        values = rows
        if any(isinstance(row, list) for row in rows):
            values = [*chain(*(row or [] for row in rows))]
            found[f"{name}.lengths"] = torch.tensor([len(row or []) for row in rows])
        known = [value for value in values if value is not None]
        if any(isinstance(value, str) for value in known):
            found[name] = texts_of(values)
        elif known and all(isinstance(value, int) for value in known):
            found[name] = torch.tensor([value or 0 for value in values])
            if len(known) < len(values):
                found[f"{name}.missing"] = torch.tensor([value is None for value in values])
        elif values:
            numbers = [float("nan") if value is None else value for value in values]
            found[name] = torch.tensor(numbers, dtype=torch.float64)
    return found


def texts_of(values: list[str | None]) -> Texts:
    encoded = [(value or "").encode() for value in values]
    memory = np.frombuffer(b"".join(encoded) + b"\0", np.uint8).copy()
    ends = np.cumsum([0, *map(len, encoded)])
    views = np.zeros((len(values), 2), np.int64)
    for i, value in enumerate(values):
        if value is not None:
            views[i] = memory.ctypes.data + ends[i], len(encoded[i])
    return Texts(views, memory)


@pytest.mark.parametrize("language", ["python", "core"])
@pytest.mark.parametrize("case", CASES, ids=[case["rule"].replace(" ", "_") for case in CASES])
def test_both_languages_follow_each_rule(
    case: dict[str, Any],
    language: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if language == "core" and MISSING:
        pytest.skip(f"needs {', '.join(MISSING)}")
    monkeypatch.setattr(predictor_module, "open_program", fake_package.open_fake)
    monkeypatch.setattr(manifest_module, "torch", SimpleNamespace(__version__="2.13.0"))
    monkeypatch.setattr(manifest_module, "fbgemm_release", lambda: "1.8.0")
    library = request.getfixturevalue("library") if language == "core" else None
    server = Server(tmp_path, case, library)
    for step in case["steps"]:
        server.step(step)
    server.close()
    server.check_tables()


def test_the_page_has_each_rule_once() -> None:
    rules = re.findall(r"^- \*\*(.+?)\.\*\*", PAGE.read_text(), re.M)
    assert sorted(rules) == sorted(case["rule"] for case in CASES)
