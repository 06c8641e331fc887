import gzip

import pytest

from recsys.datasets.criteo import DEFAULT_COLUMN_NAMES
from recsys.datasets.rows import criteo_kaggle, criteo_terabyte, movielens_20m, movielens_25m

LINES = [
    ["1", *map(str, range(13)), *(f"{i:08x}" for i in range(26))],
    ["0", "-2", *[""] * 12, "ee6b2800", *[""] * 25],
]


def write(path, lines):
    text = "".join("\t".join(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def test_criteo_rows(tmp_path):
    path = write(tmp_path / "train.txt", LINES)
    data = criteo_kaggle(path)
    for _ in range(2):  # epochs
        first, second = data
        assert list(first) == DEFAULT_COLUMN_NAMES
        assert list(first.values()) == [1, *range(13), *LINES[0][14:]]
        assert list(second.values()) == [0, -2, *[0] * 12, "ee6b2800", *[""] * 25]
    days = [path, write(tmp_path / "day_1.gz", LINES[:1])]
    assert list(criteo_terabyte(iter(days))) == [first, second, first]
    assert list(criteo_kaggle(path, row_mapper=None)) == LINES
    assert list(criteo_kaggle(path, row_mapper=lambda f: f[1], encoding="ascii")) == ["0", "-2"]


def test_a_number_is_no_path():
    for read in (criteo_terabyte, lambda path: criteo_kaggle(path[0])):
        with pytest.raises(TypeError, match="must be a path"):  # open(1) is the standard output
            read([1])


def test_damaged_criteo_rows(tmp_path):
    path = write(tmp_path / "train.txt", [LINES[0], LINES[1][:7]])
    with pytest.raises(ValueError, match=r"train.txt, line 2: .* 7 fields"):
        list(criteo_kaggle(path))
    path = write(tmp_path / "train.txt", [LINES[0], LINES[0][1:]])
    with pytest.raises(ValueError, match=r"line 2: .* 40 fields.* 39"):
        list(criteo_kaggle(path))
    for count in ("1_000", "9" * 20, "5.5", "\u0663"):
        path = write(tmp_path / "train.txt", [["1", count, *LINES[0][2:]]])
        with pytest.raises(ValueError, match="for a whole number of 64"):
            list(criteo_kaggle(path))
    path = write(tmp_path / "train.txt", [["x", *LINES[0][1:]]])
    with pytest.raises(ValueError, match="received 'x' for a label"):
        list(criteo_kaggle(path))
    with pytest.raises(FileNotFoundError):
        list(criteo_kaggle(str(tmp_path / "nothing")))


@pytest.mark.parametrize("read", [movielens_20m, movielens_25m])
def test_movielens_rows(tmp_path, read):
    header = "userId,movieId,rating,timestamp\n"
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5,1112486027\n2,20,4.0,5\n")
    (tmp_path / "movies.csv").write_text(
        'movieId,title,genres\n10,"One, the film (1995)",X|Y\n20,Zoë,Z\n', encoding="utf-8"
    )
    rated = {"userId": 2, "movieId": 20, "rating": 4.0, "timestamp": 5}
    first, second = read(str(tmp_path))
    assert second == rated
    assert [type(value) for value in first.values()] == [int, int, float, int]
    first, second = read(str(tmp_path), include_movies_data=True)
    assert first["title"] == "One, the film (1995)"
    assert second == rated | {"title": "Zoë", "genres": "Z"}
    assert list(read(str(tmp_path), row_mapper=None))[1] == ["2", "20", "4.0", "5"]
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5,1112486027\n2,21,4.0,5\n")
    with pytest.raises(ValueError, match=r"line 3: must rate .*movies\.csv"):
        list(read(str(tmp_path), include_movies_data=True))
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5\n")
    with pytest.raises(ValueError, match=r"line 2: must .* 3 fields"):
        list(read(str(tmp_path)))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_criteo_rows_without_labels(tmp_path, ending):
    (tmp_path / "test.txt").write_bytes(
        "".join("\t".join(line[1:]) + ending for line in LINES).encode()
    )
    first, second = criteo_kaggle(str(tmp_path / "test.txt"))
    assert list(first) == DEFAULT_COLUMN_NAMES[1:]
    assert list(first.values()) == [*range(13), *LINES[0][14:]]
    assert second["int_0"] == -2


@pytest.mark.parametrize(
    "header", ["", "userId,movieId,rating,timestamp\n", "\ufeffUserId, movieId,rating,timestamp\n"]
)
def test_a_file_without_header_keeps_its_first_rating(tmp_path, header):
    (tmp_path / "ratings.csv").write_text(header + "1,10,3.5,7\n2,20,4,5\n", encoding="utf-8")
    assert [row["userId"] for row in movielens_20m(str(tmp_path))] == [1, 2]
    assert next(iter(movielens_20m(str(tmp_path), row_mapper=None))) == ["1", "10", "3.5", "7"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,10,nan,7", "line 1: .*received 'nan' for"),
        ("1,10,inf,7", "received 'inf' for a rating"),
        ("1,10,5.5,7", "received '5.5' for a rating"),
        ("1,10,-1,7", "received '-1' for a rating"),
        ("99999999999999999999,10,3,7", "received '99999999999999999999' for a whole number"),
        ("9223372036854775808,10,3,7", "received '9223372036854775808' for a whole number"),
        ("1,-10,3,7", "received '-10' for an id"),
        ("1,1_0,3,7", "received '1_0' for a whole number"),
        ("1,10,3,7.5", "received '7.5' for a whole number"),
        ("user,item,rating,time", "received 'user' for a whole number"),
    ],
)  # fmt: skip
def test_ratings_and_ids_that_cannot_be_are_refused(tmp_path, line, message):
    (tmp_path / "ratings.csv").write_text(f"{line}\n1,10,3.5,7\n")
    with pytest.raises(ValueError, match=message):
        list(movielens_20m(str(tmp_path)))
