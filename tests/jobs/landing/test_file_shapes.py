"""What stands around the rows of a file that another program wrote: found, left out and said. No Spark."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.landing import csv_parquet
from jobs.landing.csv_parquet import list_parts, read, read_dialect, read_part, read_settings
from jobs.landing.dialects import describe_header
from jobs.landing.raw_rows import CORRUPT, FIELDS, MISSHAPEN, NOT_UTF8
from jobs.landing.values.rejected import explain_shape
from jobs.specs.files import Files

A = [
    ("2024-01-01T00:00:00Z", "a", "1.5"),
    ("2024-01-01T01:00:00Z", "a", "2.5"),
    ("2024-01-01T02:00:00Z", "b", "4"),
]
COLUMNS = ["at", "sensor", "value"]


def lines(rows: list[tuple[str, ...]] = A, separator: str = ",", end: str = "\n") -> str:
    return "".join(separator.join(row) + end for row in rows)


INFLUX_NOTES = (
    "#group,false,false,false,true,false\n#datatype,string,long,dateTime:RFC3339,string,double\n"
    "#default,mean,,,,\n"
)
INFLUX = INFLUX_NOTES + ",result,table,at,sensor,value\n" + "".join(f",,0,{','.join(row)}\n" for row in A)

# name: content; the spec's columns are COLUMNS, and a person reads the rows A from each
SHAPES: dict[str, str | bytes] = {
    "as most files": "at,sensor,value\n" + lines(),
    "sep of Excel": "sep=;\nat;sensor;value\n" + lines(separator=";"),
    "quoted sep of Excel": '"sep=,"\r\nat,sensor,value\r\n' + lines(end="\r\n"),
    "sep and mark": b"\xef\xbb\xbfsep=\t\r\n" + ("at\tsensor\tvalue\n" + lines(separator="\t")).encode(),
    "annotations of InfluxDB": INFLUX,
    "tables of InfluxDB": INFLUX + "\n" + INFLUX_NOTES + ",result,table,at,sensor,value\n",
    "comments": "# a logger\n# of somebody, 2024\nat,sensor,value\n" + lines(),
    "comments between rows": "# a\nat,sensor,value\n"
    + lines(A[:1])
    + "# restarted, by hand\n"
    + lines(A[1:]),
    "header in a comment": "# Station 5\n# at,sensor,value\n" + lines(),
    "other comments": "% exported\n% twice\nat,sensor,value\n" + lines(),
    "TOA5 of Campbell": '"TOA5","st","CR1000","2","x","y","z"\n"at","sensor","value"\n"TS","RN","Deg C"\n"","","Avg"\n'
    + lines(),
    "titles": "Station: Vienna\nHeight, 200 m\n\nat,sensor,value\n" + lines(),
    "titles filled to the width": "Report,,\nStation:,Vienna,\n,,\nat,sensor,value\n" + lines(),
    "units below": "at;sensor;value\nyyyy-mm-dd;-;kWh\n" + lines(separator=";"),
    "units in brackets": "at,sensor,value\n[UTC],[],[m/s]\n" + lines(),
    "units of energy": "at,sensor,value\n,,W/m2\n" + lines(),
    "repeated headers": "at,sensor,value\n" + lines(A[:1]) + "at,sensor,value\n" + lines(A[1:]),
    "trailing separators": "at,sensor,value\n" + lines([(*row, "") for row in A]),
    "trailing separators everywhere": "at,sensor,value,,\n" + lines([(*row, "", "") for row in A]),
    "names of rows as R writes": '"at","sensor","value"\n'
    + "".join(f'"{n}",{",".join(row)}\n' for n, row in enumerate(A, 1)),
    "write.table of R": '"at" "sensor" "value"\n'
    + "".join(f'"{n}" "{row[0]}" "{row[1]}" {row[2]}\n' for n, row in enumerate(A, 1)),
    "UTF-16 with a mark": ("at,sensor,value\n" + lines()).encode("utf-16"),
    "big-endian UTF-16": b"\xfe\xff" + ("at,sensor,value\n" + lines()).encode("utf-16-be"),
    "UTF-16 without a mark": ("at;sensor;value\r\n" + lines(separator=";", end="\r\n")).encode("utf-16-le"),
    "UTF-16 with sep": ("sep=;\r\nat;sensor;value\r\n" + lines(separator=";")).encode("utf-16"),
    "carriage returns": "at,sensor,value\r" + lines(end="\r"),
    "carriage returns below comments": "# x\r# y\rat,sensor,value\r" + lines(end="\r"),
    "apostrophes": "'at','sensor','value'\n" + "".join("'{}','{}','{}'\n".format(*row) for row in A),
    "blanks": "at                     sensor  value\n"
    + "".join("{:22} {:>6} {:>8}\n".format(*row) for row in A),
    "blanks around": "  at sensor value \n" + "".join("   {}   {}  {}  \n".format(*row) for row in A),
    "blanks and tabs": "# NOAA\nat \t sensor  value\n" + lines(separator="\t "),
}


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def rows_of(path: Path, named: Files = Files(), size: int | None = None) -> list[tuple[str | None, ...]]:  # noqa: B008
    """Return the rows of COLUMNS as `filter` reads them; with a size as a task of `ingest` does, piece by piece."""
    if size is None:
        source = read(path, COLUMNS, named)
        assert MISSHAPEN not in source.reasons()
        return list(zip(*(source.columns[name].to_pylist() for name in COLUMNS), strict=True))
    found: list[tuple[str | None, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_parquet, "PIECE_BYTES", size)
        for part in list_parts(path, columns=COLUMNS, named=named):
            for source in read_part(part):
                assert MISSHAPEN not in source.reasons()
                found += zip(*(source.columns[name].to_pylist() for name in COLUMNS), strict=True)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_file_of_any_shape_gives_the_rows_that_a_person_reads(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "rows.csv", SHAPES[name])
    assert rows_of(path) == A
    assert rows_of(path, size=30) == A
    content = path.read_bytes()
    packed = tmp_path / "packed.csv.gz"
    packed.write_bytes(gzip.compress(content))
    assert rows_of(packed) == rows_of(packed, size=30) == A


@pytest.mark.parametrize("name", [name for name in SHAPES if "R" not in name.split()])
def test_the_shape_is_found_without_the_names_of_the_columns(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "rows.csv", SHAPES[name])
    found = read(path)
    assert [name for name in found.columns if name in COLUMNS] == COLUMNS, list(found.columns)
    assert list(zip(*(found.columns[name].to_pylist() for name in COLUMNS), strict=True)) == A


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("as most files", []),
        ("sep of Excel", ["the header is line 2, and the line above it is left out"]),
        ("TOA5 of Campbell", ["the header is line 2", "2 rows of units below the header left out"]),
        ("titles", ["the header is line 4, and the 3 lines above it are left out"]),
        ("comments", ["the header is line 3", "lines that begin with # left out"]),
        ("UTF-16 with a mark", ["text in utf-16"]),
        ("names of rows as R writes", ["no name for the first column, which is called row_names"]),
    ],
)
def test_what_was_found_is_said(tmp_path: Path, name: str, said: list[str]) -> None:
    path = written(tmp_path / "rows.csv", SHAPES[name])
    words = "; ".join(describe_header(read_dialect(path, COLUMNS)))
    assert bool(words) is bool(said)
    for one in said:
        assert one in words


@pytest.mark.parametrize(
    ("named", "content"),
    [
        (Files(skip_lines=2), "at,sensor,value\n1,2,3\nat,sensor,value\n" + lines()),
        (Files(skip_lines=0, units_rows=2), "at,sensor,value\nx,y,z\nu,v,w\n" + lines()),
        (Files(units_rows=1, separator=";"), "at;sensor;value\nfurlong;a,b;z\n" + lines(separator=";")),
        (Files(comment="//"), "// x\nat,sensor,value\n// y,z\n" + lines() + "// the end\n"),
        (Files(comment="!"), "!x\n!y\nat,sensor,value\n" + lines(A[:2]) + "!z\n" + lines(A[2:])),
        (Files(columns=COLUMNS, skip_lines=1), "Vienna\n" + lines()),
        (Files(separator="blanks"), "at sensor value\n" + lines(separator="  ")),
        (Files(encoding="windows-1252"), "at,sensor,value\n" + lines()),
    ],
)
def test_the_spec_can_say_what_is_not_sure(tmp_path: Path, named: Files, content: str) -> None:
    path = written(tmp_path / "rows.csv", content)
    assert rows_of(path, named) == rows_of(path, named, 20) == A


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("windows-1252", "Köln €"), ("latin-1", "Ærø"), ("cp1250", "Łódź"), ("utf-16", "京都")],
)
def test_text_in_another_encoding_is_read_where_the_spec_names_it(
    tmp_path: Path, encoding: str, name: str
) -> None:
    rows = [(at, name, value) for at, _, value in A]
    path = written(tmp_path / "rows.csv", ("at,sensor,value\n" + lines(rows)).encode(encoding))
    assert rows_of(path, Files(encoding=encoding)) == rows_of(path, Files(encoding=encoding), 7) == rows


def test_a_row_in_another_encoding_is_not_taken(tmp_path: Path) -> None:
    path = written(
        tmp_path / "rows.csv", ("at,sensor,value\n" + lines([("x", "Köln", "1")])).encode("latin-1")
    )
    source = read(path, COLUMNS)
    assert set(source.reasons()) == {NOT_UTF8}
    with pytest.raises(UserError, match="is not UTF-16"):
        read(written(path, b"\xff\xfea\x00\x00\xd8"), COLUMNS)


def test_a_table_with_other_columns_is_refused(tmp_path: Path) -> None:
    other = INFLUX_NOTES + ",result,table,at,value,sensor\n,,1,2024-01-01T00:00:00Z,3,c\n"
    path = written(tmp_path / "rows.csv", INFLUX + "\n" + other)
    with pytest.raises(UserError, match="another table with other columns begins between its rows"):
        read(path, COLUMNS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("at,sensor,value\n2024-01-01,a,3,14\n2024-01-02,a,2\n", "a comma before a fraction"),
        ("at,value,sensor\n2024-01-01,3,14,a\n2024-01-02,2,a\n", "a comma before a fraction"),
        (
            "at,sensor,value\n2024-01-01,Wien, Mitte,3\n2024-01-01,a,2\n",
            "a separator within a text needs quotation",
        ),
        ("at;sensor;value\n2024-01-01;a;3\n2024-01-02;a\n", "the file was cut off while it was written"),
        ("at;sensor;value\n2024-01-01;a;3\nTotal 3\n", "if it is a title, a total or a remark, it is no row"),
        ("at;sensor;value\n2024-01-01;a;3\n2024-01-02,a,3\n", "if its fields have another separator"),
        (
            "at\tsensor\tvalue\n2024-01-01\ta\t3\t\n2024-01-02\ta\t3\n2024-01-02\ta\tb\tc\n",
            "it ends with a tab",
        ),
    ],
)
def test_a_row_of_another_width_names_the_cause(tmp_path: Path, content: str, said: str) -> None:
    source = read(written(tmp_path / "rows.csv", content))
    place = source.reasons().tolist().index(MISSHAPEN)
    row = {name: source.columns[name][place].as_py() for name in (CORRUPT, FIELDS)}
    assert said in explain_shape(row)


FIELDS_OF = st.tuples(
    st.datetimes().map(lambda at: f"{at:%Y-%m-%d %H:%M:%S}".rjust(19, "0")),
    st.sampled_from(["a", "Wien", "x y", "12"]),
    st.integers(-999, 999).map(lambda number: f"{number / 8}"),
)
TITLES = st.lists(st.text("abc :-%!/", min_size=1, max_size=20), max_size=5)
NOTES = st.lists(st.text("abc ,;", max_size=20).map("# {}".format), min_size=1, max_size=4)
UNITS = st.lists(st.sampled_from([("UTC", "", "kWh"), ("TS", "RN", "Deg C"), ("-", "-", "m/s")]), max_size=2)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(TITLES, NOTES),
    UNITS,
    st.lists(FIELDS_OF, min_size=3, max_size=9),
    st.sampled_from(",;\t|"),
    st.booleans(),
)
@example([" "], [], [("2000-01-01 00:00:00", "a", "0.0")] * 3, "\t", True)
def test_lines_around_the_rows_are_left_out(
    tmp_path_factory: pytest.TempPathFactory,
    above: list[str],
    units: list[tuple[str, ...]],
    rows: list[tuple[str, ...]],
    separator: str,
    known: bool,
) -> None:
    text = "\n".join([*above, lines([tuple(COLUMNS), *units, *rows], separator)])
    path = written(tmp_path_factory.mktemp("shapes") / "rows.csv", text)
    source = read(path, COLUMNS if known else None)
    assert list(zip(*(source.columns[name].to_pylist() for name in COLUMNS), strict=True)) == rows


@settings(max_examples=100, deadline=None)
@given(
    st.lists(FIELDS_OF, min_size=3, max_size=12),
    st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"]),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.sampled_from([0, 1, 3]),
    st.integers(1, 60),
)
def test_any_encoding_line_end_and_trailing_separator_give_the_rows(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, ...]],
    encoding: str,
    end: str,
    trailing: int,
    size: int,
) -> None:
    text = "at;sensor;value" + end + lines([(*row, *[""] * trailing) for row in rows], ";", end)
    path = written(tmp_path_factory.mktemp("shapes") / "rows.csv", text.encode(encoding))
    assert rows_of(path) == rows_of(path, size=size) == rows


@pytest.mark.parametrize(
    ("content", "settings_written"),
    [
        ("at,a\n2024-01-01,1\n2024-01-02,2\n", Files()),
        ("# x\n2024-01-01,1\n2024-01-02,2\n", Files(columns=["c1", "c2"], skip_lines=1, comment="#")),
        ("Logger\n\nat,a\nUTC,V\n2024-01-01,1\n2024-01-02,2\n", Files(skip_lines=2, units_rows=1)),
        ("at,höhe\n2024-01-01,1\n2024-01-02,2\n", Files(encoding="cp1252")),
        ("at;Ort\n2024-01-01;Köln €\n2024-01-02;Paris\n", Files(encoding="cp1252")),
    ],
)
def test_init_writes_what_it_found(tmp_path: Path, content: str, settings_written: Files) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode(settings_written.encoding or "utf-8"))
    found = read_settings(path)
    assert found == settings_written
    columns = found.columns or list(read(path, named=found).columns)
    again = read(path, columns, found)
    assert again.rows == 2 and again.problems is None


def test_lines_between_the_rows_are_counted(tmp_path: Path) -> None:
    content = "# a\nat,sensor,value\n" + lines(A[:1]) + "# b, c\nat,sensor,value\n" + lines(A[1:]) + "#d\n"
    assert read(written(tmp_path / "rows.csv", content), COLUMNS).left_out == 3
    assert read(written(tmp_path / "rows.csv", SHAPES["repeated headers"]), COLUMNS).left_out == 1
    assert read(written(tmp_path / "rows.csv", SHAPES["as most files"]), COLUMNS).left_out == 0


UNITS_ROWS = {
    1: ["UTC,,degC"],
    2: ["yyyy-mm-dd,name,V", "1,2,3"],
    3: ["time,text,", "UTC,-,m/s", "a,b,c"],
}


@pytest.mark.parametrize("rows", [1, 2, 3])
@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 5),
    st.sampled_from(["2024-03-01T00:00:0{}Z", "01.03.2024 00:0{}", "170000000{}"]),
    st.sampled_from(["", "NA", "1.5", "-3"]),
)
def test_a_file_without_its_rows_of_units_loses_no_row(
    tmp_path_factory: pytest.TempPathFactory, rows: int, count: int, form: str, first: str
) -> None:
    folder = tmp_path_factory.mktemp("units")
    drawn = [(form.format(place), "s", first if place == 0 else f"{place}.5") for place in range(count)]
    head = "at,sensor,value\n"
    bare = written(folder / "bare.csv", head + lines(drawn))
    unlike = rows != 2 or not form.startswith("17")  # beside counts of seconds, a row of numbers is measured
    whole = written(
        folder / "whole.csv", head + "".join(f"{one}\n" for one in UNITS_ROWS[rows]) + lines(drawn)
    )
    right = [(at, sensor, value or None) for at, sensor, value in drawn]
    assert rows_of(bare, Files(units_rows=rows)) == right
    if unlike and count:
        assert rows_of(whole, Files(units_rows=rows)) == right
