"""A broken spec is shown as an import error, and takes down no DAG but its own."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from jobs.specs.airflow import Airflow
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.specs.problems import Problem
from kalman_dags import specs
from kalman_dags.specs import read_specs
from tests.dags.conftest import MODELS, load_bag

pytestmark = pytest.mark.airflow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A models folder that holds one sound model."""
    shutil.copy(MODELS / "tiny.yaml", tmp_path)
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path))
    return tmp_path


def _fields(field: FieldInfo) -> dict[str, FieldInfo]:
    """Return the fields of a section's own section, none of a plain value."""
    return getattr(field.annotation, "model_fields", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: [", "is not valid YAML"),
        ("name: broken\nversion: one\n", "version"),
        ("- 1\n", "must be a mapping"),
        (MODELS.joinpath("tiny.yaml").read_text(), "name the file tiny.yaml"),
    ],
    ids=["not YAML", "bad field", "not a mapping", "name of another file"],
)
def test_a_broken_spec(folder: Path, text: str, said: str) -> None:
    (folder / "broken.yaml").write_text(text)
    bag = load_bag()
    assert {name.split("__")[1] for name in bag.dags} == {"tiny"}
    [(file, error)] = bag.import_errors.items()
    assert Path(file).name == "model_specs.py"
    assert "broken.yaml" in error and said in error


TINY = MODELS.joinpath("tiny.yaml").read_text().replace("name: tiny", "name: broken")
HOSTILE = {
    "huge": "description: " + "x" * 300_000,
    "many values": "states: [" + "1," * 100_000 + "]",
    "deep": "states: " + "[" * 100_000,
    "deep mappings": "a: " + "{a: " * 10_000,
    "aliases of aliases": "a: &a0 [1, 1]\n"
    + "".join(f"b{i}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(12)),
    "an alias of itself": "a: &a [*a]",
    "a version beyond the table's": TINY.replace("version: 1", f"version: {2**70}"),
    "digits": TINY.replace("version: 1", "version: " + "9" * 5000),
    "a binary field": TINY + "!!binary aGk=: 1\n",
    "a number as a field": TINY + "7: 1\n",
    "a list as a field": TINY + "? [a, b]\n: 1\n",
    "a set": TINY + "description: !!set {a, b}\n",
    "a time that is none": TINY + "description: !!timestamp 2001-99-01\n",
    "an object": "a: !!python/object/apply:os.system [id]",
    "half a character": TINY.replace("Three thermometers that wander.", '"\\ud800"'),
    "an escaped NUL": TINY.replace("Three thermometers that wander.", '"\\0"'),
    "a NUL": TINY + "\0",
    "an escape beyond all characters": TINY.replace("Three thermometers that wander.", '"\\U00110000"'),
    "an escape beyond all numbers": TINY.replace("Three thermometers that wander.", '"\\UFFFFFFFF"'),
    "a version of YAML beyond all numbers": f"%YAML {'9' * 5000}.1\n---\n" + TINY,
    "bytes": b"\xff\xfe\x00name",
    "an overlong tag": TINY.replace("tags: [test]", f"tags: [{'x' * 200}]"),
    "a schedule that is none": TINY.replace('"*/10 * * * *"', '"99 99 99 99 99"'),
    "a schedule of marks": TINY.replace('"*/10 * * * *"', '"\\t \\n"'),
    "a template that is none": TINY.replace("{{ data_interval_start | ds }}", "{{ {% "),
    "a time zone of a path": TINY + "time_zone: ../../../etc/passwd\n",
    "a pattern that is none": TINY + "line_pattern: '(?P<value>'\n",
    "an infinity": TINY.replace("0.01", "1e999"),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_no_spec_takes_down_another_ones_dags(folder: Path, content: str | bytes) -> None:
    (folder / "broken.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    began = time.process_time()
    sound, problems = read_specs()
    assert time.process_time() - began < 10
    assert "tiny" in [spec.name for spec in sound]
    lines = [str(problem) for problem in problems]
    assert all("broken.yaml" in line and len(line) < 800 for line in lines), lines
    # A spec that has no problem has its DAGs.
    assert {"tiny", *([] if problems else ["broken"])} == {spec.name for spec in sound}
    if not problems:
        assert {name.split("__")[1] for name in load_bag().dags} == {"tiny", "broken"}


def test_what_is_no_file_is_said_and_waited_for_by_nobody(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "nowhere.yaml").symlink_to(folder / "absent")
    (folder / "ring.yaml").symlink_to(folder / "ring.yaml")
    sound, problems = read_specs()
    assert [spec.name for spec in sound] == ["tiny"]
    assert len(problems) == 5
    bag = load_bag()
    assert {name.split("__")[1] for name in bag.dags} == {"tiny"}
    assert [Path(file).name for file in bag.import_errors] == ["model_specs.py"]
    for name in ("pipe", "folder", "zero", "nowhere", "ring"):
        with pytest.raises(SpecError):
            load_spec(folder / f"{name}.yaml")
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(SpecError):
            load_spec(name, folder)
        with pytest.raises(SpecError):
            load_spec(f"{folder}/{name}.yaml")


def test_a_mistake_of_ours_takes_down_one_model_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "broken.yaml").write_text(TINY)
    real = specs._find_bad_settings

    def fails(spec: ModelSpec) -> Iterator[Problem]:
        if spec.name == "broken":
            raise ZeroDivisionError("never seen before")
        return real(spec)

    monkeypatch.setattr(specs, "_find_bad_settings", fails)
    sound, [problem] = read_specs()
    assert [spec.name for spec in sound] == ["tiny"]
    assert "broken.yaml" in str(problem) and "ZeroDivisionError: never seen before" in str(problem)


def test_a_corrected_spec_has_its_dags(folder: Path) -> None:
    (folder / "broken.yaml").write_text("name: [")
    assert load_bag().import_errors
    text = (folder / "tiny.yaml").read_text()
    (folder / "broken.yaml").write_text(text.replace("name: tiny", "name: broken"))
    bag = load_bag()
    assert not bag.import_errors
    assert "kalman_stream__broken" in bag.dags


def test_a_schedule_that_is_no_cron_expression(folder: Path) -> None:
    text = (folder / "tiny.yaml").read_text().replace("name: tiny", "name: often")
    (folder / "often.yaml").write_text(text.replace('"@daily"', '"every day"'))
    bag = load_bag()
    assert {name.split("__")[1] for name in bag.dags} == {"tiny"}
    [error] = bag.import_errors.values()
    assert "often.yaml: airflow.pretrain.schedule: 'every day' is not a schedule" in error


def test_each_section_of_a_dag_is_checked(folder: Path) -> None:
    sections = [name for name, field in Airflow.model_fields.items() if "schedule" in _fields(field)]
    sections = [name for name in sections if name not in ("monitor", "skill", "forecast")]  # tiny has none
    assert {"estimate", "verify", "stream"} <= set(sections)
    text = (folder / "tiny.yaml").read_text()
    head = text[: text.index("\nairflow:")].replace("name: tiny", "name: often")
    bad = "".join(f"  {name}: {{schedule: every day}}\n" for name in sections)
    (folder / "often.yaml").write_text(f"{head}\nairflow:\n{bad}")
    bag = load_bag()
    assert {name.split("__")[1] for name in bag.dags} == {"tiny"}
    [error] = bag.import_errors.values()
    for name in sections:
        assert f"often.yaml: airflow.{name}.schedule: 'every day' is not a schedule" in error


def test_no_models_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KALMAN_MODELS", str(tmp_path / "absent"))
    bag = load_bag()
    assert not bag.dags
    [error] = bag.import_errors.values()
    assert "absent" in error
