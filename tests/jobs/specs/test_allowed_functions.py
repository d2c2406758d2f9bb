"""Which functions a spec may name: those of modules beside it or listed, and plain ones alone."""

from __future__ import annotations

import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

import kalman
from jobs.specs.functions import VARIABLE, find_refusal
from jobs.specs.loading import load_spec
from jobs.specs.model_spec import ModelSpec, SpecError

SPEC = """
name: swing
version: 1
time: at
measurement: [angle]
filter: extended
states: [angle, speed]
process: {{kind: function, f: "{f}", Q: [[0.1, 0.0], [0.0, 0.1]]}}
observation: {{H: [[1.0, 0.0]], R: [[0.1]]}}
initial: {{mean: [0.0, 0.0], covariance: [[1.0, 0.0], [0.0, 1.0]]}}
"""
MODULE = """
import functools, os, pickle, subprocess
from pathlib import Path
Path(__file__).with_name("imported").touch()
def move(x, dt, u):
    return x
class Shelf:
    def __call__(self, x, dt, u):
        return x
made = Shelf()
part = functools.partial(move)
loads = pickle.loads
run = subprocess.run
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def write(folder: Path, f: str, more: str = "") -> Path:
    path = folder / "swing.yaml"
    path.write_text(SPEC.format(f=f) + more)
    return path


@pytest.mark.parametrize(
    "name",
    ["pickle:loads", "os:system", "subprocess:run", "builtins:eval", "shutil:rmtree", "scipy.special:expit",
     "jobs.core.errors:show", "numpy:load", "pandas.io.pickle:read_pickle"],
)  # fmt: skip
def test_modules_that_are_not_listed_are_refused_without_being_imported(folder: Path, name: str) -> None:
    path = write(folder, name)
    before = set(sys.modules)
    with pytest.raises(SpecError) as refused:
        load_spec(path)
    assert f"{path}:8: process.f: module {name.partition(':')[0].partition('.')[0]}" in str(refused.value)
    assert not any(one.startswith(name.partition(".")[0]) for one in set(sys.modules) - before)


def test_a_module_of_the_current_folder_is_not_one_of_the_specs(folder: Path) -> None:
    (folder.parent / "elsewhere.py").write_text(MODULE)
    with pytest.raises(SpecError, match="module elsewhere is not in the folder of the spec"):
        load_spec(write(folder, "elsewhere:move"))
    assert not (folder.parent / "imported").exists()


def test_a_module_beside_the_spec_is_taken_before_one_of_the_current_folder(folder: Path) -> None:
    (folder.parent / "swings.py").write_text(MODULE)
    (folder / "swings.py").write_text(MODULE)
    kalman.build(load_spec(write(folder, "swings:move")).definition())
    assert (folder / "imported").exists() and not (folder.parent / "imported").exists()


def test_a_module_with_the_name_of_another_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = folder.parent / "other"
    other.mkdir()
    for place in (folder, other):
        (place / "swings.py").write_text(MODULE)
    monkeypatch.syspath_prepend(other)
    with pytest.raises(SpecError, match="is in the folder of the spec and at .*rename"):
        load_spec(write(folder, "swings:move"))
    (folder / "pickle.py").write_text(MODULE)
    with pytest.raises(SpecError, match="is Python's own"):
        load_spec(write(folder, "pickle:loads"))


@pytest.mark.parametrize("name", ["loads", "run", "made", "part", "os.system", "subprocess.run", "Shelf"])
def test_only_plain_functions_of_the_module_itself(folder: Path, name: str) -> None:
    (folder / "swings.py").write_text(MODULE)
    spec = load_spec(write(folder, f"swings:{name}"))
    with pytest.raises(kalman.ModelError, match="is not a plain Python function of swings"):
        kalman.build(spec.definition())


def test_the_owner_lists_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = folder.parent / "library"
    for package in ("kalman_ours", "acme"):
        (library / package).mkdir(parents=True)
        (library / package / "__init__.py").touch()
        (library / package / "swings.py").write_text(MODULE)
    (folder / "swings.py").write_text(MODULE)
    monkeypatch.syspath_prepend(library)
    load_spec(write(folder, "kalman_ours.swings:move"))
    with pytest.raises(SpecError, match=r"list it in KALMAN_FUNCTIONS \(now \. kalman_\*\)"):
        load_spec(write(folder, "acme.swings:move"))
    for listed in ("acme", "acme.swings", ". acme.*", "kalman_*,acme"):
        monkeypatch.setenv(VARIABLE, listed)
        kalman.build(load_spec(write(folder, "acme.swings:move")).definition())
    monkeypatch.setenv(VARIABLE, "acme.other")
    for name in ("acme.swings:move", "swings:move", "kalman_ours.swings:move"):
        with pytest.raises(SpecError):
            load_spec(write(folder, name))


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ("sinks: {functions: ['os:system']}", "sinks.functions[0]"),
        ("migrate: {from: 1, function: 'pickle:loads'}", "migrate.function"),
        (
            "monitor: {watermark: 1h, rules: "
            "[{name: one, kind: function, function: 'os:abort', reads: [nis], keeps: {a: int64}}]}",
            "monitor.rules[0].function",
        ),
    ],
)
def test_every_section_s_functions_are_checked(folder: Path, section: str, field: str) -> None:
    (folder / "swings.py").write_text(MODULE)
    path = write(folder, "swings:move", section + "\n")
    path.write_text(path.read_text().replace("version: 1", "version: 2"))
    with pytest.raises(SpecError, match=r"Python's own|not in the folder") as refused:
        load_spec(path)
    assert field in str(refused.value)


def test_a_spec_from_a_manifest_is_treated_alike(folder: Path) -> None:
    (folder / "swings.py").write_text(MODULE)
    own = load_spec(write(folder, "swings:move"))
    stored = ModelSpec.model_validate_json(
        own.model_dump_json(by_alias=True).replace("swings:move", "pickle:loads")
    )
    for found in (stored, stored.with_folder(str(folder))):
        assert found.fingerprint()  # to compare it runs nothing
        with pytest.raises(SpecError, match="module pickle"):
            found.definition()
    assert find_refusal("swings:move", None) is not None


def build(path: Path) -> None:
    kalman.build(load_spec(path).definition())


@pytest.mark.parametrize("listed", ["kalman_*", "kalman_ours", "kalman_ours.swings", "acme,kalman_*"])
@pytest.mark.parametrize("entry", [None, "", ".", "models", "{folder}", "{folder}/../models"])
@pytest.mark.parametrize("package", [False, True])
def test_a_listed_module_beside_the_spec_is_not_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str, entry: str | None, package: bool
) -> None:
    """Neither by the folder of the spec nor by a path that happens to contain it, as a module or a package."""
    (folder / "kalman_ours").mkdir()
    (folder / "kalman_ours" / "swings.py").write_text(MODULE)
    if package:
        (folder / "kalman_ours" / "__init__.py").write_text(MODULE)
    if entry is not None:
        monkeypatch.chdir(folder.parent if entry == "models" else folder)
        monkeypatch.syspath_prepend(entry.format(folder=folder))
    monkeypatch.setenv(VARIABLE, listed)
    with pytest.raises(
        SpecError, match=r"kalman_ours is beside the spec, and .*, or list \. in KALMAN_FUNCTIONS"
    ):
        build(write(folder, "kalman_ours.swings:move"))
    assert not list(folder.rglob("imported")) and "kalman_ours" not in sys.modules


@pytest.mark.parametrize("listed", [None, "kalman_*", ". kalman_*"])
def test_a_listed_module_of_the_path_is_taken_before_one_beside_the_spec(
    folder: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None
) -> None:
    library = folder.parent / "library"
    library.mkdir()
    for place in (library, folder):
        (place / "kalman_swings.py").write_text(MODULE)
    monkeypatch.syspath_prepend(library)
    if listed is not None:
        monkeypatch.setenv(VARIABLE, listed)
    build(write(folder, "kalman_swings:move"))
    assert (library / "imported").exists() and not (folder / "imported").exists()


def test_a_part_of_a_listed_package_beside_the_spec_is_not_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package without __init__.py may have parts in several folders of the path."""
    (folder.parent / "library" / "kalman_parts").mkdir(parents=True)
    (folder / "kalman_parts").mkdir()
    (folder / "kalman_parts" / "swings.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder.parent / "library")
    monkeypatch.setenv(VARIABLE, "kalman_*")
    with pytest.raises(kalman.ModelError, match=r"there is no module kalman_parts.swings"):
        build(write(folder, "kalman_parts.swings:move"))
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(SpecError, match="the folder of the spec is on the Python path"):
        build(write(folder, "kalman_parts.swings:move"))
    assert not list(folder.rglob("imported"))


@pytest.mark.parametrize("package", ["kalman_acme", "kalman_acme/models", "kalman_acme/in/models"])
@pytest.mark.parametrize("files", [False, True], ids=["folders", "packages"])
@pytest.mark.parametrize("linked", [False, True], ids=["folder", "link"])
def test_a_folder_of_specs_in_a_listed_package_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, files: bool, linked: bool
) -> None:
    """The package is on the path; the folder is the package itself, or lies in it at any depth."""
    folder = tmp_path / "library" / package
    folder.mkdir(parents=True)
    for above in (folder, *folder.parents):
        if files and above.is_relative_to(tmp_path / "library" / "kalman_acme"):
            (above / "__init__.py").touch()
    if linked:
        folder.rename(tmp_path / "models")
        folder.symlink_to(tmp_path / "models")
    (folder / "evil.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "library")
    monkeypatch.setenv(VARIABLE, "kalman_*")
    name = f"{package.replace('/', '.')}.evil:move"
    for spec in (write(folder, name), write(folder.resolve(), name)):
        with pytest.raises(SpecError, match="module kalman_acme is beside the spec, and the folder of the"):
            build(spec)
    assert not list(tmp_path.rglob("imported")) and "kalman_acme" not in sys.modules


def test_an_editable_package_with_a_folder_of_specs_runs_nothing_of_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installation puts a finder, and no folder, on the path."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object, target: object = None) -> object:
            place = folder.parent / "__init__.py"
            return spec_from_file_location(name, place) if name == "kalman_edited" else None

    (folder.parent / "__init__.py").touch()
    (folder / "evil.py").write_text(MODULE)
    (folder.parent / "good.py").write_text(MODULE)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    monkeypatch.setenv(VARIABLE, "kalman_*")
    with pytest.raises(SpecError, match="module kalman_edited is beside the spec"):
        build(write(folder, "kalman_edited.models.evil:move"))
    assert not (folder / "imported").exists()
    try:
        build(write(folder, "kalman_edited.good:move"))
    finally:
        for name in [one for one in sys.modules if one.startswith("kalman_edited")]:
            del sys.modules[name]
    assert (folder.parent / "imported").exists()


def test_a_listed_module_of_the_current_folder_alone_is_not_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "kalman_here.py").write_text(MODULE)
    monkeypatch.setenv(VARIABLE, "kalman_*")
    with pytest.raises(kalman.ModelError, match="there is no module kalman_here"):
        build(write(folder, "kalman_here:move"))


def test_a_listed_module_beside_the_spec_runs_where_the_folder_is_listed(folder: Path) -> None:
    (folder / "kalman_beside.py").write_text(MODULE)
    build(write(folder, "kalman_beside:move"))
    assert (folder / "imported").exists()
