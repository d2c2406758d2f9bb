"""JSON documents: Arrow reads many at once with the result of Python's reader for each."""

from __future__ import annotations

import random
from datetime import UTC, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest

from jobs.core.times import TimeParser
from jobs.landing import file_parts, json_rows
from jobs.landing.checking import check_rows
from jobs.landing.json_rows import (
    _read_singly,
    _Wanted,
    list_json_parts,
    read_json_documents,
    read_objects,
    read_part,
)
from jobs.landing.values import times
from jobs.specs.model_spec import ModelSpec
from tests.jobs.support.pipeline import random_walk_spec

DOCUMENTS = [
    b'{"id":"k1","at":"2024-01-01T00:00:00Z","x":1.5,"z":{"a":[1,{"b":null}]}}',
    b'{"id":"k1","at":"2024-01-01","x":null}',
    b'{"id":"\xc3\xa4","x":-0.5e-3}',
    b'{"id":"q\\"uo}{te","at":"t","x":7}',
    b'{"id":12,"at":1700000000,"x":"3"}',
    b"{}",
]
PIECES = [
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"null",
        b"NaN",
        b"\\",
        b"\\ud800",
        b"1",
        b"e400",
        b"-",
        b" ",
    ),
    *(b"\n", b"\x00", b"\xff", b"true", b"."),
]


def changed(document: bytes, chance: random.Random) -> bytes:
    """Damage a document in a few places."""
    text = bytearray(document)
    for _ in range(chance.randint(1, 4)):
        place, how = chance.randint(0, len(text)), chance.randint(0, 3)
        if how == 0:
            text[place:place] = chance.choice(PIECES)
        elif how == 1 and text:
            del text[min(place, len(text) - 1)]
        elif how == 2 and text:
            text[min(place, len(text) - 1)] = chance.randint(0, 255)
        else:
            text[place:] = b""
    return bytes(text)


def plain(value: object, number: bool) -> object:
    if value is None or not number:
        return None if value is None else str(value)
    try:
        return float(value)  # type: ignore[arg-type]
    except ValueError:
        return value


@pytest.mark.parametrize("seed", range(3))
def test_many_at_once_are_read_as_each_by_itself(seed: int) -> None:
    chance = random.Random(seed)
    names, keys, exact = ("id", "at", "x"), ("id",), ("id", "at")
    for _ in range(120):
        size = chance.choice([1, 5, 100])
        documents = [chance.choice(DOCUMENTS[: chance.choice([1, 2, 6])]) for _ in range(size)]
        for _ in range(chance.choice([0, 1, 3, size])):
            documents[chance.randrange(size)] = changed(chance.choice(DOCUMENTS), chance)
        array = pa.array(documents, pa.binary())
        found = read_objects(array, names, keys, ["at"])
        expected = _read_singly(array, _Wanted(names, keys, exact))
        assert list(found.reasons()) == list(expected.reasons())
        for name in names:
            for at, document in enumerate(documents):
                if expected.reasons()[at] is None:
                    left, right = (one.columns[name][at].as_py() for one in (found, expected))
                    same = plain(left, name == "x"), plain(right, name == "x")
                    assert same[0] == same[1] or (same[0] != same[0] and same[1] != same[1]), document


@pytest.mark.parametrize("zone", [UTC, ZoneInfo("America/New_York")], ids=["utc", "local"])
def test_times_parsed_at_once_equal_those_of_the_parser(
    zone: tzinfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(times, "ARROW_FROM", 0)
    chance, parser = random.Random(3), TimeParser(None, zone)

    def text() -> str:
        year = chance.choice(["2024", "0001", "9999", "1969", "0000", "1582", "1883"])
        day = f"{year}-{chance.choice(['01', '02', '03', '11', '13'])}-{chance.choice(['01', '03', '10', '29', '31'])}"
        clock = f"{chance.choice('T t')}{chance.choice(['00', '02', '23', '24'])}:{chance.choice(['00', '59', '60'])}"
        second = chance.choice(["", ":00", ":59", ":60", ":07.25", ":07.123456", ":07.12345678"])
        return (
            day
            + chance.choice(["", clock + second])
            + chance.choice(["", "Z", "+01:00", " Z", "z", " UTC", "GMT", " CET", " EST"])
        )

    for size in (1, 3) * 700:
        texts = [*(text() for _ in range(size)), None]
        micros, known = times.read_times(pa.array(texts, pa.string()), None, zone, "at")
        expected = [None if one is None else parser(one) for one in texts]
        assert [int(m) if k else None for m, k in zip(micros, known, strict=True)] == expected


def test_an_invalid_document_does_not_affect_the_others() -> None:
    documents = [b'{"id":"a","x":%d}' % n for n in range(5000)]
    documents[77], documents[4000] = b"nope", b'{"id":"b","x":"4"}'
    found = read_objects(pa.array(documents, pa.binary()), ["id", "x"], ["id"])
    assert [at for at, problem in enumerate(found.reasons()) if problem] == [77]
    values = np.array([float(one) for at, one in enumerate(found.columns["x"].to_pylist()) if at != 77])
    assert values[[0, 76, 77, -1]].tolist() == [0.0, 76.0, 78.0, 4999.0]


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_parts_of_any_size_have_the_documents_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'{"x": 1}', b" ", b"", b'{"x": "\xff"}\r', b'\xef\xbb\xbf{"x": 2}', b'{"x":\t3} \r', b"\r"] * 9
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    monkeypatch.setattr(file_parts, "PIECE_BYTES", size)
    cut = list_json_parts(path)
    monkeypatch.undo()  # a worker reads a part whole
    found = [one for part in cut for some in read_part(part) for one in some.to_pylist()]
    assert (
        found == read_json_documents(path) == [line.strip(b" \t\r") for line in lines if line.strip(b" \t\r")]
    )
    assert (len(cut) == 1) is (size == 1000)
    model, none = ModelSpec.model_validate(random_walk_spec()), pa.array([], pa.binary())
    empty = check_rows(model, json_rows.parse_documents(model, none, "rows"), {"id": "string"}, "rows")
    assert empty.num_rows == 0
