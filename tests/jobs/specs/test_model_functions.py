"""Functions that a spec names: through the filter command, in the fingerprint, and on the way to Spark's workers."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.core.settings import Settings
from jobs.filter import run
from jobs.snapshots import model_runtime
from jobs.specs import functions
from jobs.specs.functions import list_functions
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec, SpecError
from jobs.state.kernel import load_checked_spec

FUNCTIONS = """
import numpy as np

def move(x, dt, u):
    return np.array([x[0] + dt * x[1], x[1]])

def distance(x):
    return np.sqrt(1.0 + x[:1] ** 2)
"""
SPEC: dict[str, Any] = {
    "name": "car",
    "version": 1,
    "key": ["car"],
    "time": "at",
    "measurement": ["distance"],
    "filter": "unscented",
    "states": ["place", "speed"],
    "process": {"kind": "function", "f": "car_functions:move", "Q": [[0.01, 0.0], [0.0, 0.01]]},
    "observation": {"h": "car_functions:distance", "R": [[0.04]]},
    "initial": {"mean": [2.0, 1.0], "covariance": [[1.0, 0.0], [0.0, 1.0]]},
}
ROWS = """car,at,distance
a,2020-01-01T00:00:00,2.3
a,2020-01-01T00:00:01,3.2
a,2020-01-01T00:00:03,
b,2020-01-01T00:00:00,2.0
"""


def spec_in(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "car_functions.py").write_text(FUNCTIONS)
    path = folder / "car.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **changes}))
    return path


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"form": "square_root"},
        {"filter": "cubature"},
        {"filter": "extended", "form": "information"},
        {"unscented": {"alpha": 0.5, "beta": 2, "kappa": 0}},
    ],
)
def test_functions_beside_the_spec_are_found(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = spec_in(tmp_path / "models", **changes)
    (tmp_path / "rows.csv").write_text(ROWS)
    report = run(Settings.load(), str(path), str(tmp_path / "rows.csv"), str(tmp_path / "out.csv"))
    assert report.data["flagged"] == 0 and report.data["rows"] == 4
    lines = (tmp_path / "out.csv").read_text().splitlines()
    header = [name.strip('"') for name in lines[0].split(",")]
    last = dict(zip(header, lines[3].split(","), strict=True))
    assert 3 < float(last["mean_place"]) < 7 and float(last["log_likelihood"]) == 0 and last["nis"] == ""


def test_a_missing_function_is_reported_with_its_line(tmp_path: Path) -> None:
    path = spec_in(tmp_path, observation={"h": "car_functions:distanse", "R": [[0.04]]})
    with pytest.raises(SpecError, match=r"car.yaml:\d+: observation.h: module car_functions has no function"):
        load_checked_spec(path)


def test_the_fingerprint_holds_names_and_forms_not_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(functions.VARIABLE, ". car_functions")  # also without a folder
    own = load_spec(spec_in(tmp_path / "one"))
    assert own.fingerprint() == load_spec(spec_in(tmp_path / "two")).fingerprint()
    assert own.fingerprint() == load_spec(spec_in(tmp_path / "three", form="covariance")).fingerprint()
    assert own.definition()["folder"] == str(tmp_path / "one")
    others: list[dict[str, Any]] = [
        {"form": "square_root"},
        {"unscented": {"kappa": 1.0}},
        {"filter": "cubature"},
    ]
    for number, change in enumerate(others):
        assert load_spec(spec_in(tmp_path / f"other{number}", **change)).fingerprint() != own.fingerprint()
    assert "folder" not in ModelSpec(**{**SPEC, "name": "never_loaded"}).definition()


def test_a_spec_from_a_manifest_finds_functions_in_the_folder_that_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(functions.VARIABLE, ". car_functions")
    own = load_spec(spec_in(tmp_path))
    kept = ModelSpec.model_validate_json(own.model_dump_json(by_alias=True))
    assert kept.folder is None and "folder" not in kept.definition()
    found = kept.with_folder(own.folder)
    assert found.definition() == own.definition() and found.fingerprint() == own.fingerprint()
    assert found.model_copy(update={"stream": own.stream}).folder == own.folder, "a changed copy keeps it"
    assert kept.folder is None


class Context:
    """A stand-in for a Spark session that remembers the shipped files."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.files: list[str] = []

    def addPyFile(self, path: str) -> None:  # noqa: N802
        self.files.append(path)


def test_workers_get_the_files_of_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition = load_spec(spec_in(tmp_path / "models")).definition()
    spark: Any = Context()
    model_runtime.ship(spark, definition)
    assert spark.files == [str(tmp_path / "models" / "car_functions.py")]

    package = tmp_path / "models" / "car_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "moves.py").write_text(FUNCTIONS)
    definition["modes"] = [{"process": {"f": "car_package.moves:move"}}]
    files = model_runtime.list_function_files(list_functions(definition), definition.get("folder"))
    assert len(files) == 2 and files[1].name == "car_package.zip"
    names = zipfile.ZipFile(files[1]).namelist()
    assert "car_package/moves.py" in names and "car_package/__init__.py" in names


def test_installed_functions_and_models_without_functions_ship_nothing() -> None:
    for definition in (
        {"process": {"f": "scipy.linalg:block_diag"}},
        {"process": {"F": [[1.0]]}, "observation": {"H": [[1.0]]}},
    ):
        assert model_runtime.list_function_files(list_functions(definition), None) == []
    assert list(functions.list_functions(SPEC)) == ["car_functions:move", "car_functions:distance"]


@pytest.mark.parametrize("kind", ["extended", "unscented", "cubature"])
def test_a_model_of_functions_is_forecast(tmp_path: Path, kind: str) -> None:
    import numpy as np

    import kalman
    from kalman.evaluation.forecast import forecast

    model = kalman.build(load_spec(spec_in(tmp_path, filter=kind)).definition())
    ahead = forecast(model, kalman.initial_states(model, 2), np.ones((3, 2)))
    assert not ahead.flag.any() and ahead.measurement_mean.shape == (1, 3, 2)
    assert (np.diff(ahead.measurement_mean[0], axis=0) > 0.5).all(), "the car drives off"
    assert (ahead.measurement_covariance > 0.04).all()
