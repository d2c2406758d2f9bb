"""CSV bytes give the rows of Python's `csv`, however they are cut and whichever reader takes them. No Spark."""

from __future__ import annotations

import base64
import csv
import gzip
import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.landing import csv_parquet, csv_records
from jobs.landing.csv_parquet import is_record_start, list_parts, read, read_dialect, read_part, read_schema
from jobs.landing.raw_rows import BYTES, CORRUPT, MISSHAPEN, NOT_UTF8
from jobs.specs.files import Files

NAMES = ["x", "y", "z"]
Row = tuple[list[str | None], str | None]

ODD = ['"', ",", "\n", "\r\n", "\r", "a", "1", '""', " ", "é", "\x00", "\ufeff", "\\", "\t", "\u2028", "\x85"]
PIECES = st.sampled_from([*(one.encode() for one in ODD), b"\xff", b"\xfe", b"\xc3", b"\xed\xb3\xbf"])


def quoted(field: str) -> bytes:
    return b'"' + field.replace('"', '""').encode() + b'"'


FIELDS = st.text(alphabet='a1é," \r\n', max_size=4)
PLAIN = st.text(alphabet="a1é .", max_size=4).map(str.encode)
LINES = st.lists(st.lists(st.one_of(PLAIN, FIELDS.map(quoted)), min_size=3, max_size=3).map(b",".join))
BREAKS = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\r"])
CHAOS = st.lists(PIECES, max_size=60).map(b"".join)
TIDY = st.builds(lambda lines, end: end.join([*lines, b""]), LINES, BREAKS)
CONTENT = st.one_of(CHAOS, TIDY, st.builds(lambda a, b, c: a + b + c, TIDY, CHAOS, TIDY))


def by_csv(data: bytes, names: Sequence[str]) -> list[Row]:
    """Return each row's fields, and why it is invalid."""
    text = data.decode("utf-8", "surrogateescape")
    rows: list[Row] = []
    for fields in csv.reader(io.StringIO(text, newline="")):
        if fields:
            escaped = re.search("[\udc80-\udcff]", "".join(fields)) is not None
            shown = [
                one.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for one in fields
            ]
            width = len(names)
            problem = MISSHAPEN if len(fields) != width else NOT_UTF8 if escaped else None
            rows.append(([one or None for one in shown + [""] * width][:width], problem))
    return rows


def by_pieces(data: bytes, names: Sequence[str], size: int) -> list[Row]:
    rows: list[Row] = []
    cut = list(csv_records.cut_pieces(io.BytesIO(data), size))
    assert b"".join(cut) == data
    for piece in cut:
        found = csv_records.parse_records(piece, names)
        columns = [found.columns[name].to_pylist() for name in names]
        rows += [([column[at] for column in columns], one) for at, one in enumerate(found.reasons())]
    return rows


@settings(max_examples=200, deadline=None)
@given(CONTENT, st.integers(1, 40))
def test_pieces_of_any_size_give_the_rows_of_the_whole_content(data: bytes, size: int) -> None:
    assert by_pieces(data, NAMES, size) == by_csv(data, NAMES)


@settings(max_examples=60, deadline=None)
@given(CONTENT, st.integers(1, 40), st.booleans(), st.booleans())
def test_a_file_gives_the_same_rows_whole_and_in_parts(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, size: int, mark: bool, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("csv") / ("rows.csv.gz" if packed else "rows.csv")
    content = (csv_records.BOM if mark else b"") + b'\r\nx,"y\n""",z\n' + data
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    names = ["x", 'y\n"', "z"]
    assert read_schema(path, names).names == names
    as_written = Files(separator=",", skip_lines=0, units_rows=0)
    dialect = read_dialect(path, (), as_written)
    assume(
        not dialect.extra and dialect.first is None and dialect.quote == '"'
    )  # rows of another width that are read
    with pytest.MonkeyPatch.context() as patch:
        whole = read(path, named=as_written)
        patch.setattr(csv_parquet, "PIECE_BYTES", size)
        some = [source for part in list_parts(path, named=as_written) for source in read_part(part)]
    for name in [*names, CORRUPT, BYTES]:
        nothing = [None] * whole.rows
        found = [
            one
            for source in some
            for one in (source.columns[name].to_pylist() if name in source.columns else [None] * source.rows)
        ]
        assert found == (whole.columns[name].to_pylist() if name in whole.columns else nothing)
    assert [row[1] for row in by_csv(data, names)] == [one for source in some for one in source.reasons()]


def test_rows_that_are_not_utf_8_keep_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b'x,y,z\n\xff,1,"a, b"\n\xfe,1,2\nok,1,2\nM\xfcnchen,1\n')
    found = read(path)
    assert found.columns["x"].to_pylist() == ["\\xff", "\\xfe", "ok", "M\\xfcnchen"]
    assert found.reasons().tolist() == [NOT_UTF8, NOT_UTF8, None, MISSHAPEN]
    kept = [one and base64.b64decode(one) for one in found.columns[BYTES].to_pylist()]
    assert kept == [b'\xff,1,"a, b"', b"\xfe,1,2", None, b"M\xfcnchen,1"]
    assert found.columns[CORRUPT].to_pylist()[3] == "M\\xfcnchen,1"


@pytest.mark.parametrize("size", [1, 8 << 20])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n\r\n", "is empty"),
        (b"x,\xff\n1,2\n", "is not UTF-8 text"),
        (b'x,y\n1,"' + b"2,3\n" * 100_000, "quotation mark .* that nothing closes"),
    ],
)
def test_a_file_that_is_no_csv_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, said: str, size: int
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    monkeypatch.setattr(csv_parquet, "PIECE_BYTES", max(size, len(content) // 7))
    with pytest.raises(UserError, match=said):
        for part in list_parts(path):
            list(read_part(part))


@pytest.mark.parametrize("begin", [b"x,y\n1,", b"x,y\n1,2\n3,", b""])
def test_a_row_that_does_not_end_is_told_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    """A small compressed file may hold any number of bytes; each block would be searched with all before it."""
    monkeypatch.setattr(csv_records, "LONGEST_RECORD", 100_000)
    monkeypatch.setattr(csv_records, "HEADER_BYTES", 10_000)
    seen: list[int] = []

    class Endless(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            seen.append(size or 0)
            return super().read(size) if len(seen) == 1 else b"1" * (size or 0)

    with pytest.raises(csv.Error, match="a row has more than 100,000 bytes"):
        stream = Endless(begin)
        assert csv_records.read_header(stream) is not None
        list(csv_records.cut_pieces(stream, 10_000))
    assert sum(seen) < 300_000
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(begin + b"1" * 20_000_000))
    with pytest.raises(
        UserError, match=r"rows.csv.gz: a row has more than 100,000 bytes: write one row on each line"
    ):
        read(path)


@pytest.mark.parametrize("quote", [b"", b'"'])
@pytest.mark.parametrize("size", [1, 8 << 20])
def test_a_long_field_is_a_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quote: bytes, size: int
) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(b"x,y\n1," + quote + b"2" * 200_000 + quote + b"\n3,4\n")
    monkeypatch.setattr(csv_parquet, "PIECE_BYTES", max(size, 30_000))
    found = [source for part in list_parts(path) for source in read_part(part)]
    assert [value for source in found for value in source.columns["y"].to_pylist()] == ["2" * 200_000, "4"]


@settings(max_examples=100, deadline=None)
@given(TIDY, TIDY, st.sampled_from([b"", b'1,2,"a\n']))
def test_a_place_begins_a_record_if_the_rows_before_it_end_there(
    tmp_path_factory: pytest.TempPathFactory, first: bytes, second: bytes, unfinished: bytes
) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    first += b"1,2,3\n" + unfinished
    path.write_bytes(b"x,y,z\n" + first + second)
    assert is_record_start(path, 6 + len(first), ["x", "y", "z"]) is not bool(unfinished)


@pytest.mark.parametrize("row", [b"a,1\n", b"a,1,2,3\n"])
def test_a_misshapen_row_says_how_many_fields_it_has_whichever_columns_are_wanted(row: bytes) -> None:
    found = csv_records.parse_records(row + b"b,2,3\n", ["k", "v", "w"], ["k"])
    assert found.columns["_fields"].to_pylist() == [f"{row.count(b',') + 1}, the header 3", None]
