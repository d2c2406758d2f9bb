"""The spec's decimal mark holds for the texts of every source: files of all formats, messages and quarantined rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import orc, parquet

from jobs import filter, init
from jobs.core.settings import Settings
from jobs.landing.checking import parse
from jobs.landing.file_rows import read_rows
from jobs.landing.messages import MessageChecker
from jobs.landing.rejected.replay import recheck_payloads
from jobs.specs.model_spec import ModelSpec
from jobs.storage.quarantine import REASON
from tests.jobs.support.pipeline import random_walk_spec

FILES = {"decimal": ",", "thousands": "."}


def spec(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(
        random_walk_spec(
            measurement=["a"],
            states=["a"],
            process={"kind": "random_walk", "variance": 1.0},
            observation={"R": [[1.0]]},
            initial={"diffuse": True},
            files=FILES,
        )
        | changes
    )


def table(texts: list[str]) -> pa.Table:
    at = [f"2024-01-01T00:{place:02}:00Z" for place in range(len(texts))]
    return pa.table({"id": ["k"] * len(texts), "at": at, "a": texts})


def write_lines(rows: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))


def write_separated(rows: pa.Table, path: Path) -> None:
    path.write_text("id;at;a\n" + "".join(";".join(row.values()) + "\n" for row in rows.to_pylist()))


WRITERS: dict[str, Callable[[pa.Table, Path], object]] = {
    "csv": write_separated,
    "jsonl": write_lines,
    "json": lambda rows, path: path.write_text(json.dumps(rows.to_pylist())),
    "parquet": lambda rows, path: parquet.write_table(rows, path),
    "orc": lambda rows, path: orc.write_table(rows, path),
}


def numbers_of(model: ModelSpec, path: Path) -> list[float | None]:
    """Return the number of each row of a file; None for a rejected row."""
    rows = parse(model, read_rows(model, str(path)), str(path))
    good = (one is None for one in rows.reason)
    return [value if fits else None for value, fits in zip(rows.y[0].tolist(), good, strict=True)]


def german(number: float, digits: int, point: bool) -> str:
    """Write a number with a decimal comma, and points between thousands if `point`."""
    text = f"{number:,.{digits}f}" if point else f"{number:.{digits}f}"
    return text.translate(str.maketrans(",.", ".,"))


@pytest.mark.parametrize("ending", WRITERS)
@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(-9_999_999, 9_999_999), st.integers(0, 3), st.booleans()),
        min_size=1,
        max_size=9,
    )
)
def test_a_text_is_the_same_number_in_every_format(
    tmp_path_factory: pytest.TempPathFactory, ending: str, drawn: list[tuple[int, int, bool]]
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"rows.{ending}"
    numbers = [whole / 10**digits for whole, digits, _ in drawn]
    WRITERS[ending](table([german(one, *how[1:]) for one, how in zip(numbers, drawn, strict=True)]), path)
    assert numbers_of(spec(), path) == numbers


@pytest.mark.parametrize("ending", WRITERS)
def test_a_decimal_point_is_refused_alike(tmp_path: Path, ending: str) -> None:
    WRITERS[ending](table(["1.234", "3.5", "1,5", "1.234,5"]), tmp_path / f"rows.{ending}")
    assert numbers_of(spec(), tmp_path / f"rows.{ending}") == [1234.0, None, 1.5, 1234.5]


def test_numbers_of_json_beside_texts_stay_numbers(tmp_path: Path) -> None:
    rng = random.Random(5)
    kinds = [rng.random() < 0.5 for _ in range(300)]
    rows = [(1.5 + place, kind) for place, kind in enumerate(kinds)] + [(1e-7, False), (0.125, False)] * 40
    documents = [
        {"id": "k", "at": 1_700_000_000.5 + place, "a": german(value, 1, True) if is_text else value}
        for place, (value, is_text) in enumerate(rows)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    model = spec(time_format="epoch_seconds")
    assert numbers_of(model, tmp_path / "a.jsonl") == [value for value, _ in rows]
    micros = parse(model, read_rows(model, str(tmp_path / "a.jsonl")), "a").time
    assert (micros == np.array([round(one["at"] * 1e6) for one in documents])).all()


def test_a_message_and_its_replay_read_texts_as_a_file_does() -> None:
    model = spec(source={"kind": "kafka", "topic": "t"})
    values = [
        b'{"id":"k","at":"2024-01-01","a":%s}' % one for one in (b'"1.234"', b'"1,5"', b"1.234", b'"3.5"')
    ]
    batch = pa.RecordBatch.from_pydict(
        {"value": values, "key": [None] * 4, "partition": pa.array([0] * 4, pa.int32()), "offset": range(4)}
    )
    assert model.source is not None
    rows = MessageChecker(model, model.source, {"id": "string"})(batch)
    bad = "measurement a: not a number"
    assert rows.column(REASON).to_pylist() == [None, None, None, bad]
    assert rows.column("a").to_pylist()[:3] == [1234.0, 1.5, 1.234]
    again = recheck_payloads(model, {"id": "string"}, [value.decode() for value in values])
    assert again.reasons == [None, None, None, bad]
    assert [json.loads(one or "{}")["a"] for one in again.landings[:3]] == [1234.0, 1.5, 1.234]


def test_the_spec_that_init_writes_for_json_reads_that_file(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [
        {
            "at": f"2024-01-{1 + place // 24:02}T{place % 24:02}:00:00Z",
            "temp": german(20 + rng.gauss(0, 1), 1, True),
        }
        for place in range(200)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = Settings.load(str(tmp_path / "warehouse"), str(tmp_path / "models"), None)
    init.run(places, str(path), name="case", quick=True, no_picture=True)
    data = filter.run(places, "case", str(path), str(tmp_path / "out.csv")).data
    assert (data["rows"], data["rejected"]) == (200, 0)
