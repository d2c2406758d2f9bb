"""Names of inputs: what is no regular file is never opened, as it may wait for ever or never end."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from jobs import cli
from jobs.core.errors import UserError
from jobs.core.input_files import (
    find_files,
    get_known_inputs,
    is_several_files,
    know_inputs,
    list_part_files,
    open_input,
    parse_path,
)
from jobs.landing.folder_watch import Inbox
from jobs.offline.filtering import check_target
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
        parse_path,
        lambda text: is_several_files(text, ENDINGS),
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
    assert len(said) == 1 and "\\udcff.csv: is not read: its name is not UTF-8 text" in said[0]


# What a careful person expects: (link, what it leads to, is it read from a folder, is it read by its name)
LINKS = {
    "beside it": ("in/x.csv", "data.csv", True, True),
    "below, as Kubernetes mounts": ("in/x.csv", "..data/x.csv", True, True),
    "below, by a whole path": ("in/x.csv", "{root}/in/sub/deep.csv", True, True),
    "out and in again": ("in/x.csv", "../in/data.csv", True, True),
    "outside": ("in/x.csv", "../private.csv", False, True),
    "outside, through a link within": ("in/x.csv", "away/private.csv", False, True),
    "to a folder with a like name": ("in/x.csv", "../in2/other.csv", False, True),
    "another owner's Parquet": ("in/x.parquet", "../private.parquet", False, True),
    "the environment of this process": ("in/x.csv", "/proc/self/environ", False, False),
    "the environment of the parent": ("in/x.csv", "/proc/{parent}/environ", False, False),
    "the system's devices": ("in/x.csv", "/sys/kernel/uevent_seqnum", False, False),
    "a folder of processes": ("in/x.csv", "/proc/self", False, False),
    "a ring": ("in/x.csv", "x.csv", False, False),
    "nothing": ("in/x.csv", "absent.csv", False, False),
}


@pytest.fixture
def places(tmp_path: Path) -> Path:
    for name in (
        "in/data.csv",
        "in/sub/deep.csv",
        "in/..data_1/x.csv",
        "private.csv",
        "in2/other.csv",
        "private.parquet",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("id\n1\n")
    (tmp_path / "in" / "..data").symlink_to("..data_1")
    (tmp_path / "in" / "away").symlink_to("..")
    return tmp_path


@pytest.mark.parametrize("what", LINKS)
@pytest.mark.parametrize("pattern", ["", "*", "**/*"])
def test_a_link_in_a_folder_leads_below_it_and_a_named_one_anywhere(
    places: Path, what: str, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name, target, in_folder, by_name = LINKS[what]
    link, endings = places / name, (".csv", ".parquet")
    link.symlink_to(target.format(root=places, parent=os.getppid()))
    given = f"{places}/in/{pattern}.[cp]*" if pattern else f"{places}/in"
    found = find_files([given], endings)
    assert (str(link) in found) is in_folder
    assert not any("private" in one for one in found)
    told = not in_folder and what not in ("a ring", "nothing")
    assert (
        f"{link}: is not read: it is a link that leads out of the folder" in capsys.readouterr().err
    ) is told
    if by_name:
        assert find_files([str(link)], endings) == [str(link)]
        with open_input(link) as file:
            assert file.read() == b"id\n1\n"
    else:
        with pytest.raises(UserError, match="lies in /proc or /sys|no such file|Too many levels"):
            find_files([str(link)], endings)


def test_a_file_that_becomes_a_link_after_it_was_found_is_not_opened(places: Path) -> None:
    [found] = [one for one in find_files([str(places / "in")], ENDINGS) if one.endswith("data.csv")]
    for target in ("../private.csv", "/proc/self/environ", "away/in2/other.csv"):
        Path(found).unlink()
        Path(found).symlink_to(target)
        with pytest.raises(UserError, match="is a link that leads out of its folder"):
            open_input(found)
    Path(found).unlink()
    Path(found).symlink_to("sub/deep.csv")
    open_input(found).close()
    # So is a folder above it.
    Path(places / "in" / "sub" / "deep.csv").unlink()
    (places / "in" / "sub").rmdir()
    (places / "in" / "sub").symlink_to("../in2")
    (places / "in2" / "deep.csv").write_text("id\n2\n")
    with pytest.raises(UserError, match="leads out"):
        open_input(found)


def test_a_process_that_knows_the_inputs_checks_as_the_one_that_found_them(places: Path) -> None:
    find_files([str(places / "in")], ENDINGS)
    (places / "in" / "late.csv").symlink_to("../private.csv")
    know_inputs(pickle.loads(pickle.dumps(get_known_inputs())))
    with pytest.raises(UserError, match="leads out"):
        open_input(places / "in" / "late.csv")


def test_the_files_of_a_folder_that_spark_wrote_lie_in_it(places: Path) -> None:
    written = places / "rows.parquet"
    written.mkdir()
    (written / "part-0.parquet").write_text("")
    (written / "part-1.parquet").symlink_to("../private.parquet")
    assert [one.name for one in list_part_files(parse_path(str(written)))] == ["part-0.parquet"]
    assert list_part_files(places / "private.csv") == [places / "private.csv"]


def test_a_folder_that_is_a_link_itself_is_its_users_word(places: Path) -> None:
    (places / "named").symlink_to("in")
    assert f"{places}/named/data.csv" in find_files([str(places / "named")], ENDINGS)
    open_input(places / "named" / "data.csv").close()


def test_a_watch_leaves_links_out_and_goes_on(places: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (places / "in" / "out.csv").symlink_to("../private.csv")
    (places / "in" / "good.csv").symlink_to("..data/x.csv")
    (places / "in" / "key.csv").symlink_to("/proc/self/environ")
    inbox = Inbox([places / "in"], SimpleNamespace(has=lambda path, stamp: False), ENDINGS)  # type: ignore[arg-type]
    inbox.ready(0.0)
    assert [Path(path).name for path, _ in inbox.ready(1e9)] == ["data.csv", "good.csv"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("is a link that leads out of the folder" in line for line in said)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.sampled_from(["..", "in", "sub", "away", "in2", "."]), max_size=5),
    absolute=st.booleans(),
)
def test_a_link_of_any_spelling_is_read_only_below_its_folder(
    tmp_path_factory: pytest.TempPathFactory, steps: list[str], absolute: bool
) -> None:
    places_of = tmp_path_factory.mktemp("drawn")
    for name in ("in", "in/sub", "in2"):
        (places_of / name).mkdir()
    for folder in ("", "in", "in/sub", "in2"):
        (places_of / folder / "end.csv").write_text(folder)
    (places_of / "in" / "away").symlink_to("..")
    link = places_of / "in" / "x.csv"
    link.symlink_to((f"{places_of}/in/" if absolute else "") + "/".join([*steps, "end.csv"]))
    real = os.path.realpath(link)
    expected = link.is_file() and real.startswith(f"{places_of}/in/")
    assert (str(link) in find_files([str(places_of / "in")], ENDINGS)) is expected
    if link.is_file() and not expected:
        with pytest.raises(UserError, match="leads out"):
            open_input(link)


@pytest.mark.parametrize("verb", ["filter", "plot", "forecast", "init"])
def test_no_command_reads_the_environment_of_a_process(places: Path, verb: str) -> None:
    (places / "p.csv").symlink_to("/proc/self/environ")
    models, nile = places / "models", ROOT / "models" / "nile.yaml"
    models.mkdir()
    (models / "nile.yaml").write_bytes(nile.read_bytes())
    words = {"filter": ["--output", "o.csv"], "plot": [], "forecast": ["--output", "o.csv", "--steps", "1"]}
    named = [] if verb == "init" else ["--model", "nile"]
    line = [f"--models={models}", verb, *named, "--input", str(places / "p.csv"), *words.get(verb, [])]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 2 and "lies in /proc or /sys, which show the state" in done.stderr, done.stderr
    assert "PATH" not in done.stderr + done.stdout
