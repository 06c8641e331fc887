import pytest
from movielens.files import read_movielens

FLAGS = {"Comedy": 5, "Drama": 8}


def item_100k(number, year, *genres):
    flags = ["1" if place in [FLAGS[genre] for genre in genres] else "0" for place in range(19)]
    date = f"01-Jan-{year}" if year else ""
    return "|".join([str(number), f"Caf\u00e9 ({year})", date, "", "http://x", *flags]) + "\n"


LAYOUTS = {
    "100k": {
        "u.data": "1\t10\t3\t881250949\n2\t20\t5\t891717742\n",
        "u.user": "1|24|M|technician|85711\n2|53|F|other|94043\n",
        "u.item": item_100k(10, 1995, "Comedy", "Drama") + item_100k(20, 0),
    },
    "1m": {
        "ratings.dat": "1::10::3::881250949\n2::20::5::891717742\n",
        "users.dat": "1::M::24::technician::85711\n2::F::53::other::94043\n",
        "movies.dat": "10::Caf\u00e9 (1995)::Comedy|Drama\n20::No year::\n",
    },
    "25m": {
        "ratings.csv": "userId,movieId,rating,timestamp\n1,10,3.0,881250949\n2,20,5.0,891717742\n",
        "movies.csv": 'movieId,title,genres\n10,"Caf\u00e9, The (1995)",Comedy|Drama\n'
        "20,No year,(no genres listed)\n",
    },
    "recbole": {
        "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "1\t10\t3\t881250949\n2\t20\t5\t891717742\n",
        "ml-100k.user": "user_id:token\tage:token\tgender:token\toccupation:token\tzip:token\n"
        "1\t24\tM\ttechnician\t85711\n2\t53\tF\tother\t94043\n",
        "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:x\n"
        "10\tCaf\u00e9\t1995\tComedy Drama\n20\tNo year\tV\tunkonwn\n",
    },
}
USERS = {
    "age": [24, 53],
    "gender": ["M", "F"],
    "occupation": ["technician", "other"],
    "zip": ["85711", "94043"],
}


def write(folder, layout, **changes):
    for name, text in (LAYOUTS[layout] | changes).items():
        encoding = "latin-1" if layout in ("100k", "1m") else "utf-8"
        (folder / name).write_bytes(text.encode(encoding))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_read_alike(tmp_path, layout):
    write(tmp_path, layout)
    assert read_movielens(tmp_path).to_pydict() == {
        "user_id": [1, 2],
        "item_id": [10, 20],
        "rating": [3.0, 5.0],
        "timestamp": [881250949, 891717742],
        "year": [1995, None],
        "genres": [["Comedy", "Drama"], None],
        **({name: [None, None] for name in USERS} if layout == "25m" else USERS),
    }


def test_10m_has_no_users(tmp_path):
    write(tmp_path, "1m")
    (tmp_path / "users.dat").unlink()
    assert read_movielens(tmp_path)["age"].to_pylist() == [None, None]


CSV = "userId,movieId,rating,timestamp\n"
RATINGS = {"100k": "u.data", "1m": "ratings.dat", "25m": "ratings.csv", "recbole": "ml-100k.inter"}


@pytest.mark.parametrize(("layout", "name"), RATINGS.items())
@pytest.mark.parametrize("missing", [1, 3, 12])
def test_truncated_ratings_are_named(tmp_path, layout, name, missing):
    write(tmp_path, layout)
    text = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(text[:-missing])
    last_line = text.count(b"\n")
    with pytest.raises(ValueError, match=rf"{name}: line {last_line} must .*newline"):
        read_movielens(tmp_path)


@pytest.mark.parametrize(
    ("layout", "name", "text", "message"),
    [
        ("100k", "u.data", "1\t10\t3\t8\n1\tx\t3\t8\n", r"u.data: .*Row #2: .*value 'x'"),
        ("100k", "u.data", "1\t10\t3\t8\n\n1\t10\t3\n", r"u.data: .*Expected 4 columns, got 3"),
        ("100k", "u.data", "1\t10\t9\t8\n", "u.data: ratings must .*to 5; .*9"),
        ("100k", "u.data", "", "u.data: line 1 must .*newline"),
        ("25m", "ratings.csv", CSV + "1,10,3.0\n", r"ratings.csv: .*Expected 4 columns, got 3"),
        (
            "25m",
            "ratings.csv",
            "1,10,3.0,8\n",
            "line 1 must .*header 'userId,movieId.*received b'1",
        ),
        (
            "25m",
            "ratings.csv",
            "movieId,userId,rating,timestamp\n10,1,3.0,8\n",
            "line 1 must .*header .*received b'movieId,userId",
        ),
        ("100k", "u.user", "1|24|M|x|1\n2|5", "u.user: line 2 must .*newline"),
        ("100k", "u.user", "1|24|M|x|1\n2|53\n", "u.user: .*Row #2: .*5 columns.*2"),
        ("100k", "u.user", "1|x|M|x|1\n", "u.user: .*Row #1: .*int64: .*'x'"),
        ("1m", "movies.dat", "10::Title\n", r"movies.dat: .*Expected 3 columns, got 2"),
        ("25m", "movies.csv", "h\n10,Title\n", "movies.csv: line 1 must .*header"),
    ],
)
def test_damaged_line_is_named(tmp_path, layout, name, text, message):
    write(tmp_path, layout, **{name: text})
    with pytest.raises(ValueError, match=message):
        read_movielens(tmp_path)


@pytest.mark.parametrize(
    ("layout", "users", "items"),
    [
        ("100k", "u.user", "u.item"),
        ("1m", "users.dat", "movies.dat"),
        ("25m", None, "movies.csv"),
        ("recbole", "ml-100k.user", "ml-100k.item"),
    ],
)
def test_ratings_of_unknown_users_and_items_are_named(tmp_path, layout, users, items):
    for kind, listed in (("user", users), ("item", items)):
        write(tmp_path, layout)
        assert len(read_movielens(tmp_path)) == 2
        if listed is None:
            continue
        whole = (tmp_path / listed).read_bytes().splitlines(keepends=True)
        (tmp_path / listed).write_bytes(b"".join(whole[:-1]))  # except its last line
        with pytest.raises(ValueError, match=f"of 1 {kind}_ids .* in .*{listed}"):
            read_movielens(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"one of the files ml-100k.inter, u.data"):
        read_movielens(tmp_path)
    write(tmp_path, "100k")
    (tmp_path / "u.item").unlink()
    with pytest.raises(FileNotFoundError, match=r"u.item must be beside the ratings"):
        read_movielens(tmp_path)
