"""Names of inputs: what is no regular file is never opened, as it may wait for ever or never end."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jobs import cli
from jobs.core.errors import UserError
from jobs.core.input_files import find_files, names_several, path_of
from jobs.landing.folder_watch import Inbox
from jobs.offline.result_files import check_target
from jobs.specs.loading import load_spec

ROOT = Path(__file__).resolve().parents[3]
ENDINGS = (".csv",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file, and beside it a pipe, a link to a device, a folder, and a link to the file."""
    (tmp_path / "a.csv").write_text("id\n1\n")
    os.mkfifo(tmp_path / "b.csv")
    (tmp_path / "c.csv").symlink_to("/dev/zero")
    (tmp_path / "d.csv").mkdir()
    (tmp_path / "e.csv").symlink_to("a.csv")
    return tmp_path


@pytest.mark.parametrize("name", ["b.csv", "c.csv"])
def test_a_pipe_or_device_is_refused_by_its_name(folder: Path, name: str) -> None:
    for look in (
        path_of,
        lambda text: names_several(text, ENDINGS),
        lambda text: find_files([text], ENDINGS),
    ):
        with pytest.raises(UserError, match=f"{name}': is a pipe or a device, and no file") as caught:
            look(str(folder / name))
        assert caught.value.exit_code == 2


@pytest.mark.parametrize("several", ["", "*.csv"])
def test_of_a_folder_or_glob_only_files_are_taken(folder: Path, several: str) -> None:
    found = [Path(one).name for one in find_files([str(folder / several)], ENDINGS)]
    assert found == ["a.csv", "d.csv", "e.csv"]  # a folder with this ending is one of Spark's files


@pytest.mark.parametrize("name", ["x" * 300 + ".csv", "a\0b.csv"])
def test_names_that_no_path_has_are_refused_wherever_they_stand(tmp_path: Path, name: str) -> None:
    (tmp_path / "out.csv").write_text("")
    for target, source in ((tmp_path / "out.csv", name), (tmp_path / name, str(tmp_path / "in.csv"))):
        with pytest.raises(UserError, match="cannot be looked for|no path"):
            check_target(target, Path(source))


@pytest.mark.parametrize("verb", ["filter", "plot", "forecast", "init"])
def test_no_command_waits_for_a_pipe(folder: Path, verb: str) -> None:
    models, nile = folder / "models", ROOT / "models" / "nile.yaml"
    models.mkdir()
    (models / "nile.yaml").write_bytes(nile.read_bytes())
    words = {"filter": ["--output", "o.csv"], "plot": [], "forecast": ["--output", "o.csv", "--steps", "1"]}
    named = [] if verb == "init" else ["--model", "nile"]
    line = [f"--models={models}", verb, *named, "--input", str(folder / "b.csv"), *words.get(verb, [])]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 2 and "is a pipe or a device, and no file" in done.stderr, done.stderr


def test_a_model_whose_spec_is_no_file_is_told_what_it_is(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "ring.yaml").symlink_to("ring.yaml")
    for name, why in {"pipe": "is no regular file", "ring": "Too many levels of symbolic links"}.items():
        with pytest.raises(UserError, match=why):
            load_spec(name, folder)


def test_a_file_whose_name_is_no_text_is_refused_and_a_watch_goes_on_without_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows are kept with the name of their file."""
    folder = os.fsencode(tmp_path)
    for name in (b"\xff.csv", b"ok.csv"):
        Path(os.fsdecode(folder + b"/" + name)).write_text("id\n1\n")
    os.mkfifo(tmp_path / "pipe.csv")
    (tmp_path / "ring.csv").symlink_to("ring.csv")
    with pytest.raises(UserError, match="its name is not UTF-8 text"):
        find_files([str(tmp_path)], ENDINGS)
    inbox = Inbox([tmp_path], SimpleNamespace(has=lambda path, stamp: False), ENDINGS)  # type: ignore[arg-type]
    assert inbox.ready(0.0) == []
    assert [Path(path).name for path, _ in inbox.ready(1e9)] == ["ok.csv"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "\\udcff.csv: is not landed: its name is not UTF-8 text" in said[0]
