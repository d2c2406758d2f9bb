"""Small files that hold very much, and lines without an end: each ends with a sentence, below 1 GB of memory.

| file | a careful person expects |
|---|---|
| numbers, ORC or Parquet, of far more rows than its bytes can mean | refused by its own account of its rows |
| a long text that a dictionary repeats, a page or stripe of 600 MB | refused while it is read |
| text that gzip packs 1000:1, empty lines among it | refused while it is read |
| a line of 1 GB, in CSV, JSON and text, packed or not | refused after some megabytes of it |
| a JSON array 100,000 deep | refused |
| a JSON array of any number of objects, which is read value by value | rows, or quarantine |
| a rejected JSON line, 100,000 deep; millions of short rows | rows, or quarantine |
| 5,000,000 rows in one row group or stripe; 200 MB of CSV in gzip | read |
"""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import orc

from jobs.core.errors import UserError
from jobs.landing import file_parts
from jobs.landing.csv_parquet import read, read_part
from jobs.landing.file_parts import FilePart, cut_line_parts, read_lines
from jobs.landing.rejected import held as edited_rows
from jobs.specs.files import Files

HEADER, MB = b"sensor,at,value\n", 1 << 20
ROW = b"a,2024-01-01T00:00:00Z,1.0\n"
OBJECT = b'{"sensor":"a","at":"2024-01-01T00:00:00Z","value":1}\n'
PAGE = "reading one piece of it .* takes more than {} MB of memory: write it in smaller pieces"
RATIO = "bytes, and its content takes at least .* MB, over 100 times as much"
LINE = "has a line of more than 16,777,216 bytes"

READ = """
import json, re, sys
from pathlib import Path
from jobs.core.errors import UserError
from jobs.landing.reading import select_reader
from jobs.specs.loading import load_spec

spec, path, most, check = load_spec(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) << 20, sys.argv[4] == "check"
types, rows, said = {"sensor": "string"}, 0, ""


def read_rows():
    reader = select_reader(spec, str(path))
    for part in (one._replace(most=most) for one in reader.pieces()):
        yield from reader.read(part, types) if check else reader.sources(part)


try:
    for one in read_rows():
        rows += one.num_rows if hasattr(one, "num_rows") else one.rows
except UserError as error:
    said = error.message
peak = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10
print(json.dumps({"rows": rows, "said": said, "peak": peak}))
"""

SPEC = r"""
name: s
version: 1
key: [sensor]
time: at
time_unit: hour
measurement: [value]
states: [level]
process: {kind: random_walk, variance: 0.5}
observation: {R: [[1.0]]}
initial: {diffuse: true}
line_pattern: '(?P<sensor>\w+),(?P<at>\S+),(?P<value>\S+)'
"""


def numbers(count: int) -> pa.Table:
    times = np.zeros(count, "M8[us]")
    return pa.table({"sensor": np.zeros(count, np.int64), "at": times, "value": np.zeros(count)})


def texts(text: str, count: int, once: bool = False) -> pa.Table:
    """Return rows with one text; once: in memory only once, by a dictionary, which ORC's writer does not take."""
    keys = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), [text]) if once else [text] * count
    return numbers(count).set_column(0, "sensor", [keys] if once else pa.array(keys))


def as_parquet(table: Callable[[], pa.Table]) -> Callable[[Path], None]:
    # Without the schema, in which Arrow says that the column was a dictionary.
    return lambda path: pq.write_table(
        table(), path, row_group_size=1 << 30, compression="zstd", store_schema=False
    )


def as_orc(table: Callable[[], pa.Table], times: int = 1) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        file = orc.ORCWriter(path, compression="zlib", stripe_size=1 << 30, dictionary_key_size_threshold=1.0)
        one = table()
        for _ in range(times):
            file.write(one)
        file.close()

    return write


def packed(first: bytes, block: bytes, times: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        # One member is packed once and repeated: so a bomb is made in a moment.
        path.write_bytes(gzip.compress(first) + gzip.compress(block) * times)

    return write


def sparse(first: bytes, size: int = 1 << 30) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.write(first)
            file.truncate(size)

    return write


def written(*blocks: bytes) -> Callable[[Path], None]:
    return lambda path: None if path.write_bytes(b"".join(blocks)) else None


ROW_OF_CSV = "a row has more than 67,108,864 bytes"
BOMBS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "ORC of 24 M rows": ("f.orc", as_orc(lambda: numbers(2_000_000), 12), RATIO),
    "ORC, a text of 100 KB repeated": ("f.orc", as_orc(lambda: texts("x" * 100_000, 1_000), 50), PAGE),
    "Parquet of 24 M rows": ("f.parquet", as_parquet(lambda: numbers(24_000_000)), RATIO),
    "Parquet, a text of 300 bytes repeated": (
        "f.parquet",
        as_parquet(lambda: texts("x" * 300, 2_500_000, once=True)),
        RATIO,
    ),
    "Parquet, a text of 6.7 MB repeated": (
        "f.parquet",
        as_parquet(lambda: texts(os.urandom(3_350_000).hex(), 100, once=True)),
        PAGE,
    ),
    "gzip, a line of 1 GB": ("f.csv.gz", packed(HEADER, b"x" * (8 * MB), 128), ROW_OF_CSV),
    "gzip, a line of 1 GB of text": ("f.txt.gz", packed(ROW, b"x" * (8 * MB), 128), LINE),
    "CSV, a line of 1 GB": ("f.csv", sparse(HEADER), ROW_OF_CSV),
    "CSV, 1 GB after a quotation mark": ("f.csv", sparse(HEADER + b'"'), ROW_OF_CSV),
    "JSON, a line of 1 GB": ("f.jsonl", sparse(OBJECT + b'{"a":"'), LINE),
    "text, a line of 1 GB": ("f.log", sparse(ROW), LINE),
    "a JSON array 100,000 deep": ("f.json", written(b"[" * 100_000, b"]" * 100_000), "is nested too deeply"),
}
SMALLER: dict[str, tuple[str, Callable[[Path], None], str, int]] = {
    "gzip 1000:1 of rows": ("f.csv.gz", packed(HEADER, ROW * 100_000, 400), RATIO, 96),
    "gzip 1000:1 of empty lines": ("f.csv.gz", packed(HEADER, b"\n" * (8 * MB), 200), RATIO, 96),
    "gzip 1000:1 of one object": ("f.jsonl.gz", packed(OBJECT, b" " * MB + OBJECT, 1_000), RATIO, 96),
    "ORC, one text of 40 MB": ("f.orc", as_orc(lambda: texts("x" * 40 * MB, 1)), PAGE, 32),
    "Parquet, a page of 40 MB": ("f.parquet", as_parquet(lambda: texts("x" * 40 * MB, 1)), PAGE, 32),
}
"""Files that a spec does not let pass with this files.memory_mb."""

ODD: dict[str, tuple[str, Callable[[Path], None], int]] = {
    "JSON 100,000 deep": (
        "f.jsonl",
        written(OBJECT * 3, b'{"sensor":', b"[" * 100_000, b"]" * 100_000, b"}\n"),
        4,
    ),
    "a JSON array of 200,000 objects": ("f.json", written(b"[", b"{}," * 200_000, b"{}]"), 200_001),
    "a JSON array of numbers": ("f.json", written(b"[", OBJECT[:-1] + b",", b"1," * 200_000, b"1]"), 200_002),
    "1 M rows, all rejected": ("f.csv", written(HEADER, b",,\n" * 1_000_000), 1_000_000),
}
LARGE: dict[str, tuple[str, Callable[[Path], None], int]] = {
    "a row group of 5 M rows": ("f.parquet", as_parquet(lambda: numbers(5_000_000)), 5_000_000),
    "a stripe of 5 M rows": ("f.orc", as_orc(lambda: numbers(5_000_000)), 5_000_000),
    "200 MB of CSV in gzip": ("f.csv.gz", packed(HEADER, ROW * 10_000, 777), 7_770_000),
}


QUICK = (
    "ORC, a text of 100 KB repeated",
    "Parquet of 24 M rows",
    "gzip, a line of 1 GB",
    "CSV, 1 GB after a quotation mark",
    "JSON, a line of 1 GB",
    "text, a line of 1 GB",
    "a JSON array 100,000 deep",
    "JSON 100,000 deep",
    "a JSON array of 200,000 objects",
    "a row group of 5 M rows",
)
"""Files of each reader, which are read in every run; the others are like one of them."""


def marked(files: Iterable[str]) -> list[Any]:
    """Return the names of files, of which those that are not quick have the mark `slow`."""
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in files]


def run(
    tmp_path: Path, name: str, write: Callable[[Path], None], most: int = 512, check: bool = True
) -> tuple[int, str]:
    """Return the rows that a process reads of a file, and its error, after checking that it takes less than 1 GB."""
    (tmp_path / "s.yaml").write_text(SPEC)
    write(tmp_path / name)
    words = [str(tmp_path / "s.yaml"), str(tmp_path / name), str(most), "check" if check else "read"]
    command = [sys.executable, "-c", READ, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    (tmp_path / name).unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["peak"] < 1000, found
    return found["rows"], found["said"]


@pytest.mark.parametrize("bomb", marked(BOMBS))
def test_a_bomb_ends_with_a_sentence_below_1_gb(tmp_path: Path, bomb: str) -> None:
    name, write, sentence = BOMBS[bomb]
    _, said = run(tmp_path, name, write)
    assert re.match(re.escape(str(tmp_path / name)) + ": .*" + sentence.format("[0-9]+"), said), said


@pytest.mark.parametrize("bomb", SMALLER)
def test_the_spec_sets_the_bound(tmp_path: Path, bomb: str) -> None:
    name, write, sentence, most = SMALLER[bomb]
    assert re.search(sentence.format("[0-9]+"), run(tmp_path, name, write, most)[1])


@pytest.mark.parametrize("what", marked(ODD))
def test_odd_rows_are_rows(tmp_path: Path, what: str) -> None:
    name, write, rows = ODD[what]
    assert run(tmp_path, name, write) == (rows, "")


@pytest.mark.parametrize("what", marked(LARGE))
def test_ordinary_large_files_are_read(tmp_path: Path, what: str) -> None:
    name, write, rows = LARGE[what]
    assert run(tmp_path, name, write, check=False) == (rows, "")


@settings(max_examples=12, deadline=None)
@given(rows=st.integers(1, 60), width=st.integers(0, 3 * MB), ending=st.sampled_from([".orc", ".parquet"]))
def test_what_any_stored_file_takes_is_bounded(
    tmp_path_factory: pytest.TempPathFactory, rows: int, width: int, ending: str
) -> None:
    """A text of any length, repeated any number of times, is read if its rows fit, and refused if they do not."""
    path = tmp_path_factory.mktemp("drawn") / f"f{ending}"
    (as_orc if ending == ".orc" else as_parquet)(lambda: texts("x" * width, rows))(path)
    most, taken = 32 * MB, rows * width
    try:
        read_rows = sum(one.rows for one in read_part(FilePart(str(path), 0, None, most=most)))
    except UserError as error:
        assert taken > most // 8 and "files.memory_mb" in error.message
    else:
        assert read_rows == rows and taken <= most


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(0, 3_000), max_size=12), packed_file=st.booleans())
def test_a_line_of_any_length_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], packed_file: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jobs.landing.file_parts.LONGEST", 1_000)
        patch.setattr("jobs.landing.file_parts.PIECE_BYTES", 100)
        path = tmp_path_factory.mktemp("drawn") / ("f.txt.gz" if packed_file else "f.txt")
        content = b"\n".join(b"x" * length for length in lengths)
        path.write_bytes(gzip.compress(content) if packed_file else content)
        try:
            lines = [
                line for part in cut_line_parts(path) for some in read_lines(part) for line in some if line
            ]
        except UserError as error:
            assert max(lengths) > 1_000 and "has a line of more than 1,000 bytes" in error.message
        else:
            assert lines == [b"x" * length for length in lengths if length]


def test_the_limit_is_lifted_after_each_piece_and_after_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(UserError, match="more than 32 MB of memory"), file_parts.limit_memory("f", 32 * MB):
        assert resource.getrlimit(resource.RLIMIT_DATA) != before
        bytearray(300 * MB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with file_parts.limit_memory("f", 32 * MB), file_parts.limit_memory("f", 16 * MB):
        pass
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(list(file_parts.limit_steps(iter(range(3)), "f"))) == 3
    with pytest.raises(ValueError), file_parts.limit_memory("f"):
        raise ValueError("another error stays as it is")


def test_a_spec_that_raises_the_bound_reads_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.parquet"
    as_parquet(lambda: numbers(1_000_000))(path)
    with pytest.raises(UserError, match=r"files.memory_mb in the spec \(now 16\)"):
        read(path, named=Files(memory_mb=16))
    assert read(path, named=Files(memory_mb=64)).rows == 1_000_000


def test_edited_rows_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edited_rows, "MOST_BYTES", 2_000)
    path = tmp_path / "edited.jsonl"
    path.write_text('{"id": "a", "payload": {"value": 1}}\n')
    assert edited_rows.read_edited(str(path)) == {"a": '{"value": 1}'}
    for content, why in {
        b" " * 3_000: "has more than 2,000 bytes, and its rows are replayed at once: split it between lines",
        b"[" * 1_500: "edited.jsonl:1: each line is a JSON object",
        b"\xff": "cannot be read",
    }.items():
        path.write_bytes(content)
        with pytest.raises(UserError, match=why):
            edited_rows.read_edited(str(path))
    with pytest.raises(UserError, match="lies in /proc or /sys"):
        edited_rows.read_edited("/proc/self/environ")
