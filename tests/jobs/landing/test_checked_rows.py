"""The rows of a file are checked alike whole and in pieces by several processes, and none is lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import ingest
from jobs.core.errors import UserError
from jobs.landing import csv_parquet, file_landing, file_parts
from jobs.landing.checking import check_rows
from jobs.landing.csv_parquet import read
from jobs.landing.raw_rows import RawRows
from jobs.landing.values.keys import derive_key_types
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import PAYLOAD, REASON
from tests.jobs.support.pipeline import Pipeline, random_walk_spec

ROWS = '''id,at,a,b,comment
1,2024-03-01T00:00:00Z,1.5,2.5,fits
2,yesterday,1,1,no time
3,2024-03-01T00:00:00Z,many,1,no number
4,2024-03-01T00:00:00.123456789+01:00,NA,.5,fits
,2024-03-01T00:00:00Z,1,1,no key
5,2024-03-01T00:00:00Z,,1e999,infinite
6,2024-03-01T00:00:00Z,1
7,2024-03-01,3,4,"fits, ""quoted"""
8,2024-03-01,3,4,too,many
'''


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": "m",
            "version": 1,
            "key": ["k"],
            "time": "at",
            "measurement": ["v"],
            "states": ["x"],
            "process": {"kind": "random_walk"},
            "observation": {},
            "initial": {"diffuse": True},
            **changes,
        }
    )


def source(k: pa.Array) -> RawRows:
    at = pa.array([0] * len(k), pa.timestamp("us", "UTC"))
    return RawRows({"k": k, "at": at, "v": pa.array([1.0] * len(k))}, len(k))


@pytest.mark.parametrize(
    ("given", "wanted", "keys"),
    [
        (pa.array([1, 2, None], pa.int32()), "bigint", [1, 2, None]),
        (pa.array(["1", "-7", " -7 ", "1.0", "one", ""]), "bigint", [1, -7, None, None, None, None]),
        (pa.array(["9223372036854775808"]), "bigint", [None]),
        (pa.array([1.0, 1.5, float("nan"), 1e300]), "bigint", [1, None, None, None]),
        (pa.array([1, 2]), "string", ["1", "2"]),
        (pa.array(["a", " ", "", None]), "string", ["a", " ", None, None]),
        (pa.array([2**64 - 1], pa.uint64()), "string", ["18446744073709551615"]),
    ],
)  # fmt: skip
def test_a_key_keeps_its_value_or_is_rejected(given: pa.Array, wanted: str, keys: list[Any]) -> None:
    checked = check_rows(spec(), source(given), {"k": wanted}, "rows")
    fits = [reason is None for reason in checked.column(REASON).to_pylist()]
    found = [key if well else None for key, well in zip(checked.column("k").to_pylist(), fits, strict=True)]
    assert found == keys
    assert set(checked.column(REASON).to_pylist()) <= {None, "key k: missing", "key k: not a whole number"}


@pytest.mark.parametrize(
    ("given", "wanted", "ids", "reasons"),
    [
        (pa.array([7, None, -1]), "bigint", [7, None, -1], {None}),
        (pa.array([7, None, -1]), "string", ["7", None, "-1"], {None}),
        (pa.array(["7", " NaN ", "", "x"]), "bigint", [7, None, None, None], {None, "id no: not a whole number"}),
        (pa.array(["a", "na", None, " "]), "string", ["a", None, None, None], {None}),
        (pa.nulls(2), "string", [None, None], {None}),
    ],
)  # fmt: skip
def test_an_id_keeps_its_value_or_is_missing(
    given: pa.Array, wanted: str, ids: list[Any], reasons: set[Any]
) -> None:
    with_id = spec(duplicates={"id": "no", "within": "1h"})
    rows = source(pa.array([1] * len(given)))
    rows.columns["no"] = given
    checked = check_rows(with_id, rows, {"k": "bigint", "no": wanted}, "rows")
    assert checked.column("no").to_pylist() == ids
    assert set(checked.column(REASON).to_pylist()) == reasons
    rows.columns["no"] = pa.array([0.5] * len(given))
    with pytest.raises(UserError, match="rows: id column 'no' holds double; an id is text or a whole number"):
        check_rows(with_id, rows, {"k": "bigint", "no": wanted}, "rows")


def test_only_whole_numbers_of_64_bits_are_integer_keys() -> None:
    kinds = [pa.int8(), pa.int64(), pa.uint32(), pa.uint64(), pa.float64(), pa.string()]
    found = [derive_key_types(["k"], pa.schema([("k", kind)]))["k"] for kind in kinds]
    assert found == ["bigint", "bigint", "bigint", "string", "string", "string"]


def test_a_rejected_row_keeps_its_whole_payload(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(ROWS)
    model = ModelSpec.model_validate(random_walk_spec())
    checked = check_rows(model, read(path), {"id": "bigint"}, "rows")
    reasons = checked.column(REASON).to_pylist()
    payloads: list[Any] = [
        None if text is None else json.loads(text) for text in checked.column(PAYLOAD).to_pylist()
    ]
    assert [reason is None for reason in reasons] == [payload is None for payload in payloads]
    assert payloads[1] == {"id": "2", "at": "yesterday", "a": "1", "b": "1", "comment": "no time"}
    assert payloads[6]["_corrupt"] == "6,2024-03-01T00:00:00Z,1"
    assert payloads[8]["_corrupt"] == "8,2024-03-01,3,4,too,many"


def odd_csv(random: Random) -> bytes:
    """Return a CSV file with everything that readers disagree about."""
    rows = []
    for number in range(400):
        fields = [
            random.choice(
                [b"%d" % number, b"\xff", b"\xfe", b'"7"', b"\xef\xbf\xbd", b"", b" 8", b'5"', b"k\xc3\xa9y"]
            ),
            random.choice([b"2024-03-01", b'"2024-03-01T00:00:00Z"', b"soon", b"10000-01-01"]),
            random.choice([b"1.5", b'"2"', b"", b"many", b"1e999"]),
            b"1",
            random.choice(
                [
                    b'"so\n9,2024-03-01,1,1,forged"',
                    b'"a ""b"""',
                    b"c\\",
                    b"it's 5\" long",
                    b'"x"y',
                    b"\xfc",
                    b"",
                ]
            ),
        ]
        cut = random.choice([5, 5, 5, 5, 5, 4, 6])
        rows.append(
            b",".join([*fields, b"more"][:cut]) + random.choice([b"\n", b"\n", b"\r\n", b"\n\n", b"\r"])
        )
    return b"\xef\xbb\xbf\r\nid,at,a,b,comment\n" + b"".join(rows)


def odd_json(random: Random) -> bytes:
    rows = [
        b'{"id": "%s", "at": "2024-03-01", "a": %s, "b": 1, "more": "%s"}'
        % (
            random.choice([b"7", b"\xff", b"\xfe", b"\\ud800"]),
            random.choice([b"1", b"1.5", b'"2"', b"null", b"NaN"]),
            random.choice([b"x", b"\xff", b"a\rb", b"\xc2\x85"]),
        )
        + random.choice([b"\n", b"\r\n", b"\n \n", b"\r"])
        for _ in range(300)
    ]
    return b"\xef\xbb\xbf" + b"".join(rows)


def odd_parquet(path: Path) -> None:
    at = [0, 2**63 - 1, None, -(2**63), 1_709_251_200_000]
    table = pa.table(
        {
            "id": pa.array(["a", "b", "c", "d", "e"] * 40).dictionary_encode(),
            "at": pa.array(at * 40, pa.int64()).cast(pa.timestamp("ms", "UTC")),
            "a": [1.0, float("nan"), None, 2.0, float("inf")] * 40,
            "b": pa.array([1, 2, 3, 4, 5] * 40, pa.int16()),
            "seen": pa.array([2**31 - 1, None, 0, -(2**31), 1] * 40, pa.int32()).cast(pa.date32()),
            "sent": pa.array([0, 2**62 + 1, None, -1, 5] * 40, pa.int64()).cast(pa.timestamp("ns")),
        }
    )
    pq.write_table(table, path, row_group_size=30)


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "rows.jsonl", "rows.parquet"])
def test_small_and_large_files_are_read_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / name
    if name.endswith(".parquet"):
        odd_parquet(path)
    else:
        content = odd_json(Random(1)) if "json" in name else odd_csv(Random(2))
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = []
    for limit, piece in ((file_landing.INLINE_BYTES, 8 << 20), (0, 1000)):
        monkeypatch.setattr(file_landing, "INLINE_BYTES", limit)
        monkeypatch.setattr(csv_parquet, "PIECE_BYTES", piece)
        monkeypatch.setattr(file_parts, "PIECE_BYTES", piece)
        pipeline = Pipeline(tmp_path / str(limit), random_walk_spec())
        said = ingest.run(pipeline.settings, "walk", [str(path)])
        assert ingest.run(pipeline.settings, "walk", [str(path)]).data["files_landed_before"] == 1
        rows = [{**row, "_landed_at": None} for row in pipeline.tables.rows("measurements/walk")]
        kept = pipeline.tables.rows("quarantine", columns=["reason", "payload"])
        assert (said.data["rows"], said.data["quarantined"]) == (len(rows), len(kept))
        found.append((sorted(map(str, rows)), sorted(map(str, kept)), said.data["reasons"]))
        assert not [row for row in rows if "\\x" in row["id"]]
    assert len(found[0][0]) > 2 and len(found[0][1]) > 5
    assert found[0] == found[1]
