"""A broken spec is shown as an import error, and takes down no DAG but its own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from jobs.specs.airflow import Airflow
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
