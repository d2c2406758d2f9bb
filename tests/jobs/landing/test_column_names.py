"""A spec can name any column that a file can have, in every format. No Spark."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.core.errors import UserError
from jobs.landing.checking import check_rows
from jobs.landing.file_rows import read_rows
from jobs.landing.json_rows import parse_documents
from jobs.landing.messages import MessageChecker
from jobs.landing.raw_rows import RawRows
from jobs.landing.reading import read_spec_schema
from jobs.landing.rejected.replay import recheck_payloads
from jobs.offline.ahead import read_future
from jobs.offline.key_inputs import read_inputs
from jobs.specs.loading import build_json_schema, load_spec
from jobs.specs.model_spec import ModelSpec
from jobs.specs.problems import SpecError
from jobs.storage.quarantine import PAYLOAD, REASON


def fields(**changes: Any) -> dict[str, Any]:
    one = {"kind": "random_walk", "variance": 1.0}
    return {
        "name": "m",
        "version": 1,
        "key": ["sensor"],
        "time": "at",
        "measurement": ["value"],
        "states": ["level"],
        "process": one,
        "observation": {"R": [[1.0]]},
        "initial": {"diffuse": True},
        **changes,
    }


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(fields(**changes))


NAMES = [
    ("Wind speed (m/s)", "Wind_speed_m_s"),
    ("_value", "value"),
    ("°C", "C"),
    ("%", "column"),
    ("", "unnamed"),
    ("  ", "unnamed"),
    ("2m temperature", "c_2m_temperature"),
    ("a.b.c", "a_b_c"),
    ("Ünïcode", "Ünïcode"),
    ("Temp[1];{x}=y,z", "Temp_1_x_y_z"),
    ("`back`", "back"),
    ('say "hi"', "say_hi"),
    ("x" * 200, "x" * 128),
    ("tab\there", "tab_here"),
    ("1", "c_1"),
    ("温度 (°C)", "温度_C"),
    ("level", "level"),
]


@pytest.mark.parametrize(("name", "plain"), NAMES)
def test_any_name_gets_a_plain_one(name: str, plain: str) -> None:
    model = spec(measurement=[name])
    assert model.measurement == [plain]
    assert model.files.names == ({} if name == plain else {plain: name})
    assert model.file_columns == ["sensor", "at", name]
    assert ModelSpec.model_validate(model.model_dump()) == model
    assert ModelSpec.model_validate_json(model.model_dump_json()) == model


def write(path: Path, columns: dict[str, list[Any]]) -> None:
    ending = path.suffix
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if ending == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.writer(stream)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
    elif ending == ".parquet":
        pq.write_table(pa.table(columns), path)
    elif ending == ".orc":
        orc.write_table(pa.table(columns), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("ending", ["csv", "parquet", "orc"])
@pytest.mark.parametrize("name", [name for name, _ in NAMES if name.strip() and "." not in name] + ["a.b"])
def test_rows_of_any_column_are_read_from_a_file(name: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"f.{ending}"
    write(path, {"sensor": ["x", "y"], "at": ["2024-01-01", "2024-01-02"], name: [1.5, 2.5], "other": [0, 0]})
    model = spec(measurement=[name])
    rows = read_rows(model, str(path))
    assert rows.columns[model.measurement[0]].cast(pa.float64()).to_pylist() == [1.5, 2.5]
    assert read_spec_schema(model, str(path)).names[:3] == model.columns


@pytest.mark.parametrize("name", [name for name, _ in NAMES])
def test_rows_of_any_member_are_read_from_json(name: str, tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    write(path, {"sensor": ["x", "y"], "at": ["2024-01-01", "2024-01-02"], name: [1.5, "high"]})
    model = spec(measurement=[name])
    lines = pa.array(path.read_bytes().splitlines(), pa.binary())
    rows = check_rows(model, parse_documents(model, lines, "f"), {"sensor": "string"}, "f")
    assert rows.schema.names == [REASON, PAYLOAD, *model.columns]
    assert rows.column(model.measurement[0]).to_pylist() == [1.5, None]
    assert json.loads(rows.column(PAYLOAD)[1].as_py())[name] == "high"
    assert "sensor" in read_spec_schema(model, str(path)).names


def test_the_index_of_pandas_and_names_that_differ_in_case(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text(",Temp,temp\n2024-01-01,1,10\n2024-01-02,2,20\n")
    model = spec(
        key=[],
        time="",
        measurement=["Temp", "temp"],
        states=["a", "b"],
        process={"kind": "sum", "parts": [{"name": n, "kind": "random_walk", "variance": 1.0} for n in "ab"]},
        observation={"H": [[1.0, 0.0], [0.0, 1.0]], "R": [[1.0, 0.0], [0.0, 1.0]]},
    )
    assert model.columns == ["unnamed", "Temp", "temp_2"]
    rows = read_rows(model, str(path))
    assert [rows.columns[name].to_pylist() for name in model.measurement] == [["1", "2"], ["10", "20"]]


def test_a_rejected_row_keeps_the_names_of_its_file() -> None:
    model = spec(key=["Station name"], measurement=["Wind (m/s)"])
    columns = {"Station name": ["s"], "at": ["2024-01-01"], "Wind (m/s)": ["calm"]}
    source = RawRows({name: pa.array(one) for name, one in columns.items()}, 1)
    rows = check_rows(model, source, {"Station_name": "string"}, "f")
    assert rows.column(REASON).to_pylist() == ["measurement Wind_m_s: not a number"]
    assert json.loads(rows.column(PAYLOAD)[0].as_py()) == {name: one[0] for name, one in columns.items()}


def test_members_of_messages_have_any_name_and_the_key_of_a_message_too() -> None:
    source = {"kind": "kafka", "topic": "t", "message_key": "_id"}
    model = spec(key=["_id", "Station no."], measurement=["Wind (m/s)"], source=source)
    assert model.source is not None and model.source.message_key == "id"
    values = [
        b'{"Station no.": "s", "at": "2024-01-01", "Wind (m/s)": %s}' % one for one in (b"1.5", b'"calm"')
    ]
    batch = pa.RecordBatch.from_pydict(
        {"value": values, "key": [b"k", b"k"], "partition": pa.array([0, 0], pa.int32()), "offset": [0, 1]}
    )
    rows = MessageChecker(model, model.source, {"id": "string", "Station_no": "string"})(batch)
    assert rows.column(REASON).to_pylist() == [None, "measurement Wind_m_s: not a number"]
    assert [rows.column(name)[0].as_py() for name in ("id", "Station_no", "Wind_m_s")] == ["k", "s", 1.5]
    payload = json.loads(rows.column(PAYLOAD)[1].as_py())
    assert payload == {"_id": "k", "Station no.": "s", "at": "2024-01-01", "Wind (m/s)": "calm"}
    again = recheck_payloads(
        model, {"id": "string", "Station_no": "string"}, [json.dumps({**payload, "Wind (m/s)": 2})]
    )
    assert again.reasons == [None] and json.loads(again.landings[0] or "{}")["id"] == "k"


def test_groups_of_lines_and_files_without_a_header_have_any_name(tmp_path: Path) -> None:
    lines, headless = tmp_path / "a.log", tmp_path / "b.csv"
    lines.write_text("x 2024-01-01 1.5\n")
    headless.write_text("x;2024-01-01;1.5\n")
    of_lines = spec(
        key=["_id"], time="_at", measurement=["_v"], line_pattern=r"(?P<_id>\S+) (?P<_at>\S+) (?P<_v>\S+)"
    )
    columns = ["Gerät (Nr.)", "Zeit/UTC", "°C"]
    files = {"columns": columns, "separator": ";"}
    without = spec(key=[columns[0]], time=columns[1], measurement=[columns[2]], files=files)
    for model, path in ((of_lines, lines), (without, headless)):
        rows = read_rows(model, str(path))
        assert [rows.columns[name].to_pylist() for name in model.columns] == [["x"], ["2024-01-01"], ["1.5"]]


def test_the_user_chooses_the_plain_name() -> None:
    model = spec(measurement=["wind"], files={"names": {"wind": "Wind (m/s)", "at": "Zeit (UTC)"}})
    assert model.columns == ["sensor", "at", "wind"] and model.file_columns == [
        "sensor",
        "Zeit (UTC)",
        "Wind (m/s)",
    ]
    same = spec(measurement=["Wind (m/s)"], time="Zeit (UTC)", files=model.files.model_dump())
    assert same == model and same.fingerprint() == model.fingerprint()


def test_names_of_outputs_and_references_follow() -> None:
    model = spec(
        key=["mean", "Station no."],
        learn={"parameters": ["process.variance"], "by": ["Station no."], "scope": "key"},
    )
    assert model.key == ["key_mean", "Station_no"] and model.learn is not None
    assert model.learn.by == ["Station_no"]
    named = spec(key=["Logger id"], key_from_name="Logger id")
    assert named.key == ["Logger_id"] == [named.key_from_name] and named.file_columns == ["at", "value"]
    kafka = spec(key=["_id"], source={"kind": "kafka", "topic": "t", "whole_keys": ["_id"]})
    assert kafka.source is not None and kafka.source.whole_keys == ["id"] == kafka.key


def test_plain_names_keep_their_columns() -> None:
    model = spec(key=["wind!"], measurement=["wind"])
    assert model.measurement == ["wind"] and model.key == ["wind_2"]
    assert spec().files.names == {} and spec().model_dump()["files"]["names"] == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"files": {"names": {"vlaue": "Value"}}},
            "'vlaue' is not a column of the spec; did you mean 'value'?",
        ),
        ({"files": {"names": {"value": ["a", "b"]}}}, "has several columns, which only the time can have"),
        (
            {"files": {"names": {"value": 3}}},
            "'value' must have the name of a column; put the name in quotes",
        ),
        ({"key": ["A b", "A b"]}, "column 'A_b' is named twice"),
        ({"key": ["A b"], "measurement": ["A b"]}, "column 'A_b' is already used in key"),
        (
            {"key": ["mean_level"]},
            "give the column another name in the spec: files: {names: {key_mean_level: mean_level}}",
        ),
    ],
)
def test_a_name_that_cannot_be_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(json.dumps(fields(**changes)))
    with pytest.raises(SpecError) as error:
        load_spec(path)
    assert said in str(error.value)


def test_a_missing_column_is_named_as_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.write_text("sensor,at,Wind speed (km/h)\nx,2024-01-01,1\n")
    with pytest.raises(
        UserError, match=r"there is no column 'Wind speed \(m/s\)'; did you mean 'Wind speed \(km/h\)'"
    ):
        read_rows(spec(measurement=["Wind speed (m/s)"]), str(path))


def test_future_rows_and_inputs_have_the_names_of_files_too(tmp_path: Path) -> None:
    model = spec(key=["Station no."], control=["Rain (mm)"], inputs={"columns": {"noise": "Noise (dB)"}})
    assert model.inputs is not None and model.inputs.columns == {"noise": "Noise_dB"}
    inputs, future = tmp_path / "i.csv", tmp_path / "f.csv"
    inputs.write_text("Station no.,Noise (dB)\nx,3\n")
    future.write_text("Station no.,at,Rain (mm),Noise (dB)\nx,2024-01-01,0.5,4\n")
    assert read_inputs(model, str(inputs)).u.tolist() == [[3.0]]
    rows = read_future(model, str(future))
    assert rows.control.tolist() == [[0.5]] and rows.inputs is not None and rows.inputs.tolist() == [[4.0]]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12), min_size=3, max_size=6, unique=True
    )
)
def test_any_names_are_told_apart_and_found(names: list[str]) -> None:
    key, time, *measured = names
    size = len(measured)
    model = spec(
        key=[key],
        time=time,
        measurement=measured,
        states=[f"s{i}" for i in range(size)],
        process={
            "kind": "sum",
            "parts": [{"name": f"s{i}", "kind": "random_walk", "variance": 1.0} for i in range(size)],
        },
        observation={"H": np.eye(size).tolist(), "R": np.eye(size).tolist()},
    )
    assert model.file_columns == names
    assert len({name.casefold() for name in model.columns}) == len(names)
    assert ModelSpec.model_validate(model.model_dump()) == model
    columns = {name: pa.array([str(place)]) for place, name in enumerate(names)} | {
        time: pa.array(["2024-01-01"])
    }
    rows = check_rows(model, RawRows(columns, 1), {model.key[0]: "string"}, "f")
    assert rows.column(REASON).to_pylist() == [None]
    assert [rows.column(name)[0].as_py() for name in model.measurement] == [
        float(i) for i in range(2, len(names))
    ]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,8}", fullmatch=True),
        min_size=3,
        max_size=5,
        unique_by=str.casefold,
    )
)
def test_a_spec_of_plain_names_is_unchanged(names: list[str]) -> None:
    key, time, *measured = (f"c_{name}" for name in names)
    size = len(measured)
    model = spec(
        key=[key],
        time=time,
        measurement=measured,
        states=[f"s{i}" for i in range(size)],
        process={
            "kind": "sum",
            "parts": [{"name": f"s{i}", "kind": "random_walk", "variance": 1.0} for i in range(size)],
        },
        observation={"H": np.eye(size).tolist(), "R": np.eye(size).tolist()},
    )
    assert model.files.names == {} and model.columns == [key, time, *measured]


def test_the_schema_of_a_spec_allows_several_columns_of_the_time() -> None:
    kinds = [one["type"] for one in build_json_schema()["properties"]["time"]["anyOf"]]
    assert kinds == ["string", "array", "object"]
