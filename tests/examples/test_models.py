"""Scripts of clicks, several labels and next items: planted tastes, other data, clear refusals."""

from __future__ import annotations

import argparse
import ast
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from ctr import data as clicks
from ctr import train as ctr
from multi_task import train as multi_task
from sequences import train as sequences

from benchmarks import models

ROOT = Path(__file__).parents[2]
USERS, FILMS, TASTES = 60, 80, 4
SCORES = {"auc": 0.5, "loss": 0.7}
OPTIONS = {
    "dim": 16,
    "dropout": 0.0,
    "lr": 0.01,
    "embedding_lr": 0.02,
    "weight_decay": 0.0,
    "batch_size": 64,
    "seed": 0,
}


def write_release(folder: Path, is_liked: Callable[[int, int], bool]) -> Path:
    """Write the files of MovieLens 1M."""
    draw, second, ratings = random.Random(0), 956_703_932, list[str]()
    for user in range(USERS):
        for film in draw.sample(range(FILMS), 50):
            second += draw.randint(1, 99)
            stars = 5 if is_liked(user, film) else draw.randint(1, 3)
            ratings.append(f"{user + 1}::{film + 1}::{stars}::{second}")
    users = [f"{user + 1}::F::25::{user % 9}::1{user:04}" for user in range(USERS)]
    films = [f"{film + 1}::Misérables, Les {film} (1995)::Drama|War" for film in range(FILMS)]
    for name, lines in (("ratings", ratings), ("users", users), ("movies", films)):
        (folder / f"{name}.dat").write_bytes(("\n".join(lines) + "\n").encode("latin-1"))
    return folder


@pytest.fixture(scope="module")
def ml_1m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release in which users like the films of their own taste alone."""
    folder = tmp_path_factory.mktemp("ml-1m")
    return write_release(folder, lambda user, film: film % TASTES == user % TASTES)


def options(model: str, data: Path, out: Path, **others: Any) -> argparse.Namespace:
    return argparse.Namespace(**OPTIONS | {"model": model, "data": data, "out": out} | others)


def test_din_learns_tastes(ml_1m: Path, tmp_path: Path) -> None:
    assert ctr.scores(options("din", ml_1m, tmp_path, epochs=8))["auc"] > 0.9


def test_hstu_reads_earlier_ratings(tmp_path: Path) -> None:
    """Every second user likes all films, which only the ratings of the history show."""
    release = write_release(tmp_path, lambda user, film: user % 2 == 0)
    assert ctr.scores(options("hstu", release, tmp_path / "out", epochs=3))["auc"] > 0.9


@pytest.mark.parametrize("model", multi_task.MODELS)
def test_every_task_learns_tastes(ml_1m: Path, tmp_path: Path, model: str) -> None:
    found = multi_task.scores(options(model, ml_1m, tmp_path, epochs=10))
    assert list(found) == ["auc/liked", "auc/loved", "loss/liked", "loss/loved"]
    assert found["auc/liked"] > 0.9
    assert found["auc/loved"] > 0.9


def test_labels_of_tasks(ml_1m: Path) -> None:
    for part in multi_task.load(ml_1m).values():
        rows = part.to_pylist()
        assert all(row["liked"] == (row["rating"] >= 4) for row in rows)
        assert all(row["loved"] == (row["rating"] == 5) for row in rows)


@pytest.mark.parametrize("family", ["ctr", "multi_task"])
def test_two_ranks_train_as_one(ml_1m: Path, tmp_path: Path, family: str) -> None:
    model = {"ctr": "hstu", "multi_task": "ple"}[family]
    found = []
    for ranks, batch in ((1, 64), (2, 32)):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*launch[: 4 * (ranks > 1)], str(ROOT / "examples" / family / "train.py")]
        command += ["--model", model, "--data", str(ml_1m), "--epochs", "1", "--dropout", "0"]
        done = subprocess.run(
            [sys.executable, *command, "--batch-size", str(batch), "--out", str(tmp_path / "out")],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        *_, last = done.stdout.splitlines()
        found.append(ast.literal_eval(last))
        assert done.stdout.count(last) == 1  # one rank prints
    assert found[0] == pytest.approx(found[1], abs=2e-3)


def test_lists_of_earlier_ratings(ml_1m: Path) -> None:
    data = clicks.load_rated(ml_1m, 5)
    everything = pa.concat_tables(data.parts.values()).to_pylist()
    for row in everything[::37]:
        past = sorted(
            (other["timestamp"], other["item_id"], round(2 * other["rating"]))
            for other in everything
            if other["user_id"] == row["user_id"] and other["timestamp"] < row["timestamp"]
        )[-5:]
        assert [*zip(row["times"], row["rated"], row["half_stars"], strict=True)] == past


def write_parts(folder: Path, kind: str, num_rows: int = 200) -> dict[str, pd.DataFrame]:
    """Write three parts of a table as a kind of files."""
    draw, parts = random.Random(0), {}
    for part, stem in (("train", "train"), ("validation", "valid"), ("test", "test")):
        rows = [
            (draw.randint(0, 1), draw.randint(0, 9), draw.choice(["NA", "ES", "7", "Åland"]))
            for _ in range(num_rows)
        ]
        frame = pd.DataFrame(rows, columns=["label", "item", "country"])
        if part == "train":
            frame["country"] = frame["country"].replace("NA", "7")
        parts[part] = frame
        if kind == "csv":
            frame.to_csv(folder / f"{stem}.csv", index=False)
        elif kind == "parquet":
            frame.to_parquet(folder / f"{stem}.parquet")
        else:
            lines = [f"{1 if y else -1} {item}:1 {country}:1" for y, item, country in rows]
            (folder / f"some.{part}.libfm").write_text("\n".join(lines) + "\n")
    return parts


@pytest.mark.parametrize("kind", ["csv", "parquet", "libfm"])
def test_tables_of_categories(tmp_path: Path, kind: str) -> None:
    expected = write_parts(tmp_path, kind)
    found = clicks.load(tmp_path)
    for part, frame in expected.items():
        table = found.parts[part]
        assert table["label"].to_pylist() == frame["label"].tolist()
        if kind != "libfm":
            items = [str(item) for item in table["item"].to_pylist()]
            assert items == frame["item"].astype(str).tolist()
            assert table["country"].to_pylist() == frame["country"].tolist()
        else:
            items = [item.removesuffix(":1") for item in table["column 1"].to_pylist()]
            assert items == frame["item"].astype(str).tolist()
    scores = ctr.scores(options("logistic_regression", tmp_path, tmp_path))
    assert 0.3 < scores["auc"] < 0.7
    assert ctr.scores(options("dcn_v2", tmp_path, tmp_path / "out", epochs=1))["loss"] < 2


def test_text_that_appears_only_in_the_test(tmp_path: Path) -> None:
    """A column of numbers in the first file and of texts in another is one of texts."""
    for stem, user in (("train", "7"), ("valid", "8"), ("test", "u9")):
        (tmp_path / f"{stem}.csv").write_text(f"label,user\n1,{user}\n0,\n")
    found = clicks.load(tmp_path)
    assert [part["user"].to_pylist() for part in found.parts.values()] == [
        ["7", None],
        ["8", None],
        ["u9", None],
    ]
    ids = found.spec.transform(found.parts["test"]).sparse_features["user"].values()
    assert ids.tolist() == [1, 0]  # not in the training part; missing


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"frappe.csv": "user\titem\n1\t2\n"}, r"Received \['frappe.csv'\]. Use a published"),
        ({"train.csv": "label,u\n-1,2\n1,3\n"}, r"train.csv: labels must .* \[-1.0, 1"),
        ({"train.csv": "label,u\nyes,2\n"}, r"train.csv: must be a table; .*'yes'"),
        ({"train.csv": "label,u\n,2\n1,3\n"}, r"labels must .*received \[1.0, None\]"),
        ({"train.csv": "click,u\n1,2\n"}, r"must have a .*'label'; .*\['click', 'u'\]"),
        ({"train.csv": ""}, "train.csv: must .*received an error:"),
        ({"x.train.libfm": "1 2:0.5\n"}, "value 1, such .*1 has '2:0.5'"),
        ({"x.train.libfm": "1 2:1\n0 3:1 4:1\n"}, "must be a .*Expected 2 columns"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        if "train" in name:
            for part in ("validation", "test"):
                stem = part if "libfm" in name else part.removesuffix("ation")
                (tmp_path / name.replace("train", stem)).write_text(text)
    with pytest.raises(SystemExit, match=message):
        clicks.load(tmp_path)


def test_tables_have_no_histories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(tmp_path, "csv")
    with pytest.raises(SystemExit, match="--model din needs histories"):
        ctr.scores(options("din", tmp_path, tmp_path))
    ran = []
    monkeypatch.setattr(models, "run", lambda family, model, *_: ran.append(model) or SCORES)
    monkeypatch.setattr(sys, "argv", ["models", "ctr", "--data", str(tmp_path), "--seeds", "1"])
    models.main()
    assert "Without din and hstu: they need histories" in capsys.readouterr().out
    assert {*ran} == {"logistic_regression", *models.MODELS["ctr"]} - {"din", "hstu"}


def interactions() -> pd.DataFrame:
    """Each user reads the items in a circle; two users have fewer than 3 items."""
    rows = [(f"U{user}", f"B{(user + k) % 20:03}", 10 * k) for user in range(60) for k in range(6)]
    rows += [("few", "B003", 1), ("few", "only", 2), ("one", "B004", 1)]
    return pd.DataFrame(rows, columns=["user", "item", "time"])


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_items_of_a_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"beauty.{suffix}"
    frame = interactions().sample(frac=1, random_state=0).assign(rating=5)
    frame.to_csv(path, index=False) if suffix == "csv" else frame.to_parquet(path)
    parts, spec, num_items = sequences.load(path, 100)
    assert {*parts["test"]["user"].to_pylist()} == {f"U{user}" for user in range(60)}
    assert num_items == 2 + 20
    known = spec.fitted.vocabularies["items"]
    assert known.num_rows == num_items
    arguments = ["--data", str(path), "--out", str(tmp_path / "out"), "--epochs", "25"]
    arguments += ["--model", "sasrec", "--dim", "16", "--dropout", "0", "--lr", "0.01"]
    found = sequences.train(sequences.parse_options(arguments))
    assert found["hit_rate@10"] > 0.9
    assert sequences.baseline(sequences.parse_options([*arguments, "--model", "knn"]))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, "received no such file"),
        ("u.inter", "user\n", "received the suffix '.inter'"),
        ("beauty.csv", "A1,B2,5.0,1390\n", r"\['item', 'time', 'user'\] are missing"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(SystemExit, match=message):
        sequences.load(tmp_path / name, 100)


def test_next_items_of_movielens(ml_1m: Path, tmp_path: Path) -> None:
    arguments = sequences.parse_options(
        ["--data", str(ml_1m), "--model", "hstu", "--epochs", "1", "--out", str(tmp_path)]
    )
    assert 0 < sequences.train(arguments)["hit_rate@10"] < 1
