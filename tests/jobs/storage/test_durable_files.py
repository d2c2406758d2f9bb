"""Small files outlive a loss of power: the order of the calls to the operating system is what can be shown here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.storage.files import LocalFiles

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls that put content or a name on the disk, in their order, with the file or folder."""
    made: Calls = []
    fsync, replace, link, mkdir = os.fsync, os.replace, os.link, os.mkdir

    def synced(handle: int) -> None:
        made.append(("fsync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def named(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def traced(source: str, to: str, **rest: object) -> None:
            made.append((name, f"{source} {to}"))
            call(source, to, **rest)

        return traced

    def made_folder(folder: str, *rest: int) -> None:
        mkdir(folder, *rest)
        made.append(("mkdir", str(folder)))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", named("replace", replace))
    monkeypatch.setattr(os, "link", named("link", link))
    monkeypatch.setattr(os, "mkdir", made_folder)
    return made


@pytest.mark.parametrize("verb", ["replace", "link"])
def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_call_returns(
    tmp_path: Path, calls: Calls, verb: str
) -> None:
    files, path = LocalFiles(tmp_path), tmp_path / "model" / "new" / "note.json"
    if verb == "replace":
        files.write("model/new/note.json", b"content")
    else:
        assert files.create("model/new/note.json", b"content")
    names = [name for name, _ in calls]
    assert names == ["mkdir", "fsync", "mkdir", "fsync", "fsync", verb, "fsync"]
    assert calls[:4] == [
        ("mkdir", str(path.parent.parent)),
        ("fsync", str(tmp_path)),
        ("mkdir", str(path.parent)),
        ("fsync", str(path.parent.parent)),
    ]
    draft, to = calls[5][1].split()
    assert (calls[4][1], to, calls[6][1]) == (draft, str(path), str(path.parent))
    assert path.read_bytes() == b"content" and os.listdir(path.parent) == ["note.json"]


def test_a_folder_that_cannot_be_synced_is_no_error_and_a_failing_disk_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    fsync, code = os.fsync, errno.EINVAL

    def refuse_folders(handle: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(code, "refused")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    files = LocalFiles(tmp_path)
    files.write("note", b"1")
    code = errno.EIO
    with pytest.raises(OSError, match="refused"):
        files.write("note", b"2")
