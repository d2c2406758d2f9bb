"""Model specs: valid ones are accepted, and every mistake is reported with file, line, field and remedy."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from jobs import schema as schema_command
from jobs.core.errors import UserError
from jobs.core.times import parse_duration_us
from jobs.specs import yaml_text
from jobs.specs.loading import list_model_names, list_spec_files, load_all, load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.state.kernel import load_checked_spec

ROOT = Path(__file__).resolve().parents[3]
MODELS = ROOT / "models"

NILE: dict[str, Any] = {
    "name": "nile",
    "version": 1,
    "key": ["river"],
    "time": "at",
    "measurement": ["volume"],
    "states": ["level"],
    "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1469.1]]},
    "observation": {"H": [[1.0]], "R": [[15099.0]]},
    "initial": {"mean": [0.0], "covariance": [[1.0e7]]},
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(NILE), **fields}


def refused(folder: Path, text: str | dict[str, Any], *, deep: bool = False) -> str:
    """Write a spec, expect it to be refused, and return the message."""
    path = folder / "m.yaml"
    path.write_text(
        text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False), encoding="utf-8"
    )
    with pytest.raises(SpecError) as caught:
        (load_checked_spec if deep else load_spec)(path)
    said = str(caught.value)
    assert all(line.startswith(str(path)) for line in said.splitlines())
    assert len(said.splitlines()) == len(caught.value.problems)
    return said


# Specs of the project


@pytest.mark.parametrize("path", list_spec_files(MODELS), ids=lambda path: path.stem)
def test_every_model_of_the_project_loads_and_builds(path: Path) -> None:
    spec = load_checked_spec(path.stem, MODELS)
    assert spec.name == path.stem and spec.source_path == path
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == "# yaml-language-server: $schema=../docs/model.schema.json"


def test_nile_is_the_model_of_the_design() -> None:
    spec = load_spec("nile", MODELS)
    assert spec.definition() == {
        "filter": "linear",
        "states": ["level"],
        "measurement": ["volume"],
        "control": [],
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[1469.1]]},
        "observation": {"H": [[1.0]], "R": [[15099.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0e7]]},
        "learn": None,
    }
    assert (spec.key, spec.time, spec.columns) == (["river"], "at", ["river", "at", "volume"])
    assert spec.unit_us == 1e6 and spec.late == "quarantine" and spec.stream.keys_per_block == 256


def test_all_models_load_together() -> None:
    assert [spec.name for spec in load_all(MODELS)] == [path.stem for path in list_spec_files(MODELS)]


def test_reading_specs_needs_no_numpy_pandas_or_spark() -> None:
    code = (
        "import sys; from jobs.specs.loading import load_all; load_all('models');"
        "print([name for name in ('numpy', 'pandas', 'pyarrow', 'pyspark', 'kalman') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_the_json_schema_is_fresh() -> None:
    kept = (ROOT / "docs" / "model.schema.json").read_text(encoding="utf-8")
    assert kept == schema_command.format_schema(), "run: kalman-pipeline schema > docs/model.schema.json"


def test_the_json_schema_describes_every_field() -> None:
    schema = json.loads(schema_command.format_schema())
    sections = [schema, *schema["$defs"].values()]
    for section in sections:
        for name, field in section.get("properties", {}).items():
            assert field.get("description"), f"{section['title']}.{name} has no description"


def test_the_guides_smallest_model_is_a_model(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    text = guide.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "nile.yaml").write_text(text, encoding="utf-8")
    spec = load_checked_spec("nile", tmp_path)
    assert spec.fingerprint() == load_spec("nile", MODELS).fingerprint()


def test_a_missing_field_is_described(tmp_path: Path) -> None:
    text = yaml.safe_dump({name: value for name, value in NILE.items() if name != "measurement"})
    (tmp_path / "nile.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(
        SpecError, match="measurement: is missing; add it: the measured columns, in the order"
    ):
        load_spec("nile", tmp_path)


def test_a_duration_in_a_list_is_refused_with_its_line(tmp_path: Path) -> None:
    section = "outputs: {measured: true}\nforecast:\n  horizons:\n  - 1h\n  - often\n"
    text = yaml.safe_dump(NILE) + section
    (tmp_path / "nile.yaml").write_text(text, encoding="utf-8")
    line = text.splitlines().index("  - often") + 1
    with pytest.raises(
        SpecError, match=rf"nile.yaml:{line}: forecast.horizons\[1\]: 'often' is not a duration"
    ):
        load_spec("nile", tmp_path)


def test_the_guide_has_every_field() -> None:
    guide = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = guide.split("## All fields")[1].split("\n## ")[0]
    for name, field in ModelSpec.model_fields.items():
        inner = [name]
        if name in ("learn", "outputs", "stream", "robust", "adaptive", "duplicates"):
            kind: Any = field.annotation
            section = kind if isinstance(kind, type) else kind.__args__[0]
            inner = [f"{name}.{part}" for part in section.model_fields]
        for path in inner:
            assert f"`{path}" in table, f"docs/models.md lacks {path}"


# Mistakes, each with its line and remedy


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"version": "1"}, "m.yaml:2: version: must be a whole number, not text; write it without quotes"),
        ({"version": True}, "version: must be a whole number, not true/false; write it without quotes"),
        ({"version": 1.5}, "version: must be a whole number, not a number; write it without quotes and "),
        (
            {"initial": {"mean": ["1"], "covariance": [[1.0]]}},
            "initial.mean[0]: must be a number, not text; ",
        ),
        ({"measurement": "volume"}, "measurement: must be a list, not text; write [volume]"),
        ({"measurement": {"a": 1}}, "measurement: must be a list, not a mapping; write it in brackets"),
        ({"time": 3}, "time: must be text, not a number; put it in quotes"),
        ({"time": None}, "time: must be text, not nothing; put it in quotes"),
        (
            {"initial": [1.0]},
            "initial: must be a mapping, not a list; write it as `field: value` lines or {field: val",
        ),
        ({"version": 0}, "version: 0 is too small; give a number from 1"),
        ({"name": "Nile"}, "name: 'Nile' is not valid"),
        ({"key": "river"}, "m.yaml:3: key: must be a list, not text; write [river]"),
        ({"key": [], "key_from_name": "river"}, "leave it out: the model has no key columns"),
        (
            {"key": [], "monitor": {"by": ["river"], "windows": [{"size": "1h"}]}},
            "monitor.by[0]: 'river' is not a column of a row; choose from volume",
        ),
        ({"key": [], "inputs": {"columns": {"b": "b"}}}, "belongs to keys, and the model has no key columns"),
        ({"key": ["a", "a"]}, "key: column 'a' is named twice"),
        ({"key": ["at"]}, "time: column 'at' is already used in key"),
        ({"measurement": ["at"]}, "measurement: column 'at' is already used in time"),
        ({"control": ["volume"]}, "control: column 'volume' is already used in measurement"),
        (
            {"time": "a t", "files": {"names": {"a t": "at"}}},
            "time: 'a t' cannot be the name of a column; use letters, digits and _",
        ),
        (
            {"key": ["mean_level"]},
            "key: 'mean_level' is the name of an output column; give the column another",
        ),
        (
            {"time": "covariance_level_level"},
            "time: 'covariance_level_level' is the name of an output column",
        ),
        ({"states": ["a", "a_b", "b_c", "c"]}, "states: two pairs of states share an output column"),
        ({"time_unit": "secnd"}, "time_unit: 'secnd' is not known; did you mean 'second'?"),
        ({"time_zone": "America/New_york_"}, "did you mean 'America/New_York'?"),
        ({"time_format": "%d/%m/%Q"}, "time_format: '%d/%m/%Q' is not a time format: %Q is not known"),
        ({"time_format": "%d/%m"}, "%Y is missing"),
        ({"smoothing": {"lag": 0}}, "smoothing.lag: 0 is too small; give a number from 1"),
        ({"late": "drop"}, "late: 'drop' is not known; use one of quarantine, apply"),
        ({"order": {"kind": "strict"}}, "order.delay: is missing; give by how much rows may be late"),
        ({"order": {"kind": "strict", "delay": "soon"}}, "order.delay: 'soon' is not a duration; write"),
        ({"order": {"kind": "replay"}}, "order.rows: is missing; give how many rows may overtake a late one"),
        ({"order": {"rows": 3}}, "order.rows: is for order.kind: replay; remove it, or write kind: replay"),
        ({"order": {"delay": "1h"}}, "order.delay: is for a watermark, and nothing here waits for one"),
        (
            {"order": {"kind": "strict", "delay": "1h"}, "late": "apply"},
            "late: is for order.kind: as-arrived",
        ),
        (
            {"order": {"kind": "replay", "rows": 3}, "expiry": {"after": "1d"}},
            "expiry: does not go with order",
        ),
        (
            {"expiry": {"after": "1d", "clock": "processing"}, "order": {"delay": "1h"}},
            "order.delay: is for a",
        ),
        (
            {"duplicates": {"id": "volume", "within": "1h"}},
            "duplicates.id: column 'volume' is already used in",
        ),
        (
            {"duplicates": {"id": "no"}},
            "duplicates.within: is missing; give how far apart a row and its repetition",
        ),
        ({"duplicates": {"within": "1h"}}, "duplicates.within: is for an id; remove it, or name the column"),
        (
            {"duplicates": {"id": "no", "within": "long"}},
            "duplicates.within: 'long' is not a duration; write",
        ),
        (
            {"duplicates": {"id": "no", "within": "1h"}, "stream": {"new_keys": "pretrained"}},
            "duplicates.id: does not go with stream.new_keys: pretrained",
        ),
        (
            {"source": {"kind": "kafka", "topic": "t", "whole_keys": ["no"]}},
            "source.whole_keys: 'no' is not a key column; name one of river",
        ),
        ({"expiry": {"after": "never"}}, "expiry.after: 'never' is not a duration; write"),
        (
            {"outputs": {"covariance": "diag"}},
            "outputs.covariance: 'diag' is not known; did you mean 'diagonal'?",
        ),
        ({"statez": ["x"]}, "m.yaml:26: statez: is not a field of a model spec; did you mean 'states'?"),
        ({"initial": {"mean": [0.0]}}, "initial: is incomplete; give `mean` and `covariance`, or"),
        ({"initial": {"mean": ["0"], "covariance": [[1.0]]}}, "initial.mean[0]: must be a number, not text"),
        ({"initial": {"diffuse": True, "mean": [0.0]}}, "initial: gives both"),
        ({"initial": 5}, "initial: must be a mapping, not a number"),
        ({"process": {"F": [[1.0]]}}, "process.kind: is missing; add it"),
        ({"learn": {"parameters": ["R"], "window": "90q"}}, "learn.window: '90q' is not a duration; write"),
        ({"learn": {"parameters": []}}, "learn.parameters: is empty"),
        (
            {"learn": {"parameters": ["R"], "scop": "key"}},
            "learn.scop: is not a field of a model spec; did you mean",
        ),
        ({"stream": {"partitions": 0}}, "stream.partitions: 0 is too small"),
        ({"stream": {"max_bytes_per_batch": "12x"}}, "stream.max_bytes_per_batch: '12x' is not valid"),
        ({"airflow": {"ingest": {"schedul": "@daily"}}}, "airflow.ingest.schedul: is not a field"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refused(tmp_path, changed(**fields))


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    lines = refused(tmp_path, changed(version="1", key="river", wrong=1)).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["version", "key", "wrong"]


def test_a_missing_field_is_reported_with_what_to_write(tmp_path: Path) -> None:
    said = refused(tmp_path, "name: nile\n")
    assert "m.yaml: time: is missing; add it: the column of the event time" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [a, b\nversion: 1", "m.yaml:2:8: is not valid YAML: expected ',' or ']'"),
        ("name: a\nkey: [x]\nkey: [y]", "m.yaml:3:1: key: 'key' is given twice"),
        ("process: {kind: a, kind: b}", "m.yaml:1:20: process.kind: 'kind' is given twice"),
        ("a: \t- b", "m.yaml:1:4: is not valid YAML"),
        ("a: &a [*a]", "contains itself through an alias"),
        ("a: !!python/object:os.system x", "has the tag 'os.system', which a spec does not use"),
        ("a: 1\n---\nb: 1", "m.yaml:2:1: is not valid YAML"),
        ("? [a, b]\n: 1", "has a list or a mapping as the name of a field"),
        ("", "must be a mapping of fields; begin with `name: ...`"),
        ("- 1", "must be a mapping of fields"),
        ("1: 2", "m.yaml:1: [1]: is not a field of a model spec"),
        ("a: \x01", "has a character that YAML does not allow"),
    ],
)
def test_text_that_is_not_a_spec_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    for path, said in (
        (tmp_path / "none.yaml", "there is no such file"),
        (tmp_path / "latin.yaml", "is not UTF-8 text"),
    ):
        with pytest.raises(UserError, match=said):
            load_spec(path)
    with pytest.raises(SpecError, match="is no regular file"):
        (tmp_path / "folder.yaml").mkdir()
        load_spec(tmp_path / "folder.yaml")


def test_a_name_that_no_model_can_have_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / f"{'a' * 64}.yaml").touch()
    with pytest.raises(
        SpecError, match=r"the name of a model has up to 64 characters, and 'a+\.\.\.' has 5,000;"
    ):
        load_spec("a" * 5000, tmp_path)


def test_an_unknown_model_is_reported_with_the_known_ones() -> None:
    with pytest.raises(SpecError, match=r"there is no model 'nil'; did you mean 'nile'\?"):
        load_spec("nil", MODELS)
    with pytest.raises(SpecError, match="models there are .*nile"):
        load_spec("zzz", MODELS)
    with pytest.raises(SpecError, match="there is no such folder of models"):
        load_all(ROOT / "no_such_folder")


def test_a_model_must_have_its_files_name(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(NILE))
    assert load_spec(tmp_path / "other.yaml").name == "nile"  # a path may have any name
    with pytest.raises(
        SpecError, match=r"name: 'nile' differs from its file's name; name the file nile.yaml"
    ):
        load_spec("other", tmp_path)


def test_a_file_with_a_name_that_no_model_has_is_not_listed(tmp_path: Path) -> None:
    for name in ("good", "Not A Model", "monitor-good", os.fsdecode(b"\xff")):
        (tmp_path / f"{name}.yaml").touch()
    assert list_model_names(tmp_path) == ["good"]
    for name in (tmp_path / "good.yaml", "a\0b", "~nobody-has-this-name/models"):
        assert list_model_names(name) == []
        with pytest.raises(SpecError, match="there is no such folder of models"):
            list_spec_files(name)
    with pytest.raises(SpecError, match="there is no such file"):
        load_spec("~nobody-has-this-name/nile.yaml")


def test_any_fault_while_a_spec_is_read_is_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for fault in (RecursionError(), MemoryError(), OverflowError("too large"), KeyError("x")):
        monkeypatch.setattr(ModelSpec, "find_refused_functions", Mock(side_effect=fault))
        with pytest.raises(SpecError, match=r"nile.yaml: cannot be understood \(\w+Error"):
            load_spec("nile", MODELS)


def test_problems_of_all_files_come_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(changed(name=name, version=0)))
    with pytest.raises(SpecError) as caught:
        load_all(tmp_path)
    assert len(caught.value.problems) == 2


# What only the numerics can judge


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"observation": {"H": [[1.0, 0.0]], "R": [[1.0]]}}, "m.yaml:17: observation.H"),
        ({"states": ["level", "slope"]}, "states: 2 named, but the process has 1"),
        ({"process": {"kind": "random_wlk", "variance": 1.0}}, "did you mean 'random_walk'?"),
        ({"process": {"kind": "random_walk", "varience": 1.0}}, "did you mean 'variance'?"),
        ({"process": {"kind": "random_walk", "variance": -1.0}}, "process.variance: -1.0 is not"),
        ({"observation": {"H": [[1.0]], "R": [[-1.0]]}}, "observation.R[0][0]: -1 is a variance below zero"),
        ({"filter": "lineer"}, "filter: 'lineer' is not a filter; did you mean 'linear'?"),
        ({"robust": {"gate": {"probability": 2}}}, "robust.gate.probability: 2.0 is not below 1"),
        ({"adaptive": {"R": 1.5}}, "adaptive.R: 1.5 is not below 1"),
        (
            {"learn": {"parameters": ["S"]}},
            "learn.parameters[0]: the model has no parameter 'S'; choose from Q, R",
        ),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    load_spec(_written(tmp_path, changed(**fields)))  # without the numerics it is valid
    assert said in refused(tmp_path, changed(**fields), deep=True)


def _written(folder: Path, fields: dict[str, Any]) -> Path:
    path = folder / "shallow.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


# Meaning


def test_the_fingerprint_depends_on_the_meaning_alone() -> None:
    own = ModelSpec(**NILE).fingerprint()
    assert len(own) == 64
    for same in (
        {"description": "other"},
        {"time_zone": "Europe/Berlin"},
        {"stream": {"partitions": 7}},
        {"airflow": {"owner": "me"}},
        {"outputs": {"covariance": "diagonal"}},
        {"observation": {"H": [[1]], "R": [[15099]]}},  # 1 and 1.0 are one number
        {"process": {"Q": [[1469.1]], "F": [[1.0]], "kind": "explicit"}},  # order is not meaning
    ):
        assert ModelSpec(**changed(**same)).fingerprint() == own, same
    by_id = ModelSpec(**changed(duplicates={"id": "no", "within": "1h"})).fingerprint()
    dropped = changed(duplicates={"id": "no", "within": "60min", "action": "drop"})
    assert ModelSpec(**dropped).fingerprint() == by_id
    for section in ({}, {"id": "other", "within": "1h"}, {"id": "no", "within": "2h"}):
        assert ModelSpec(**changed(duplicates=section)).fingerprint() not in (own, by_id)
    for other in (
        {"version": 2},
        {"name": "other"},
        {"key": ["stream"]},
        {"time_unit": "day"},
        {"states": ["height"]},
        {"observation": {"H": [[1.0]], "R": [[15098.0]]}},
        {"initial": {"diffuse": True}},
        {"learn": {"parameters": ["R"]}},
        {"robust": {"huber": {}}},
        {"adaptive": {"R": 0.1}},
        {"filter": "mmae", "modes": [{"name": "one"}]},
        {"filter": "mmae", "modes": [{"name": "one"}], "mmae": {"window": 9}},
    ):
        assert ModelSpec(**changed(**other)).fingerprint() != own, other


def test_the_fingerprint_is_the_same_in_every_release() -> None:
    # It is stored in snapshots and checkpoints: a change here makes all of them strangers.
    assert (
        ModelSpec(**NILE).fingerprint() == "9c4a7052317877a6dd7bfd1c5da3f408415d9b261a099dc68ac6c81894bed406"
    )


@pytest.mark.parametrize(
    ("text", "micros"),
    [
        ("90d", 90 * 86_400_000_000),
        ("12h", 12 * 3_600_000_000),
        ("30min", 1_800_000_000),
        ("1.5s", 1_500_000),
    ],
)
def test_durations(text: str, micros: int) -> None:
    assert parse_duration_us(text) == micros


@pytest.mark.parametrize("text", ["", "d", "5", "0d", "-1d", "5 fortnights", "1e3s"])
def test_text_that_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_duration_us(text)


def test_yaml_is_read_with_the_types_of_version_1_2() -> None:
    text = "{a: 1e7, b: 1.0e7, c: no, e: 12:30, f: 2013-01-01, g: 010, h: .5, i: true, j: ~, k: .inf}"
    assert yaml_text.parse(text).value == {
        "a": 1e7, "b": 1e7, "c": "no", "e": "12:30", "f": "2013-01-01", "g": 10, "h": 0.5, "i": True,
        "j": None, "k": float("inf"),
    }  # fmt: skip


def test_a_stored_spec_names_only_those_settings_of_landing_that_it_gives() -> None:
    """A driver of a release that lacks a setting refuses a manifest that names it."""
    plain = json.loads(ModelSpec.model_validate(NILE).format_stored_text())
    assert not {"files", "time_range"} & plain.keys()
    given = {"files": {"decimal": ",", "memory_mb": 512}, "time_range": {"latest": "2d"}}
    own = ModelSpec.model_validate(changed(**given))
    stored = json.loads(own.format_stored_text())
    assert (stored["files"], stored["time_range"]) == ({"decimal": ","}, {"latest": "2d"})
    assert ModelSpec.model_validate_json(own.format_stored_text()) == own
