"""Checkpoints of a warehouse that was moved: refused with both places before Spark makes folders at the old one."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from jobs.core.errors import UserError
from jobs.storage.checkpoints import Checkpoint
from jobs.storage.warehouse import Tables

NAME = "checkpoints/walk-g0001"


def write_checkpoint(
    root: Path, name: str = NAME, noted: Path | None = None, scheme: str = "file:"
) -> Checkpoint:
    """Write a checkpoint as Spark does, with the place that it notes for the types of its state variables."""
    folder = root / name
    schema = "state/0/_stateSchema/default/0_e30e4770"
    for file, content in (
        (schema, "v3"),
        ("offsets/0", 'v1\n{}\n{"reservoirVersion":2,"index":-1}'),
        ("commits/0", "v1\n{}"),
        ("state/0/_metadata/v2/0", f"v2\n{json.dumps({'stateStoreInfo': []})}"),
        (
            "state/0/_metadata/v2/10",
            "v2\n"
            + json.dumps(
                {"stateStoreInfo": [{"stateSchemaFilePaths": [f"{scheme}{(noted or root) / name / schema}"]}]}
            ),
        ),
    ):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(content)
    return Checkpoint(Tables(str(root)), name)


@pytest.mark.parametrize("name", ["w", "a b", "\u00e4[1]{x}?#", "it's", "state", "checkpoints"])
@pytest.mark.parametrize("scheme", ["file:", "file://", ""])
def test_a_moved_warehouse_is_refused_with_the_way_on(tmp_path: Path, name: str, scheme: str) -> None:
    old, new = tmp_path / "old" / name, tmp_path / "new" / name
    write_checkpoint(old, scheme=scheme).refuse_moved()
    shutil.move(old, new)
    moved = Checkpoint(Tables(str(new)), NAME)
    assert moved.find_former_root() == str(old)
    with pytest.raises(UserError) as told:
        moved.refuse_moved("; or something else")
    assert f"was moved from {old} to {new}" in told.value.message
    assert told.value.message.endswith("; or something else")
    assert not old.exists(), "nothing is made at the old place"
    command = told.value.message.split("`")[1]
    assert shlex.split(command) == ["ln", "-s", str(new), str(old)]
    subprocess.run(command, shell=True, check=True)
    moved.refuse_moved()


def test_a_copy_beside_the_original_and_other_checkpoints_go_on(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "copy")
    Checkpoint(Tables(str(tmp_path / "copy")), NAME).refuse_moved()
    Checkpoint(Tables(str(tmp_path / "none")), NAME).refuse_moved()
    landing = write_checkpoint(tmp_path / "landing", "checkpoints/ingest-walk")
    shutil.rmtree(tmp_path / "landing" / "checkpoints" / "ingest-walk" / "state")  # it has no states
    landing.refuse_moved()


@pytest.mark.parametrize("content", ["", "v2", "v2\n[]", "v2\n{}", 'v2\n{"stateStoreInfo": [7]}', "v2\n{"])
def test_a_note_that_is_not_understood_is_left_to_spark(tmp_path: Path, content: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "w", noted=tmp_path / "elsewhere")
    assert checkpoint.find_former_root() == str(tmp_path / "elsewhere")
    (tmp_path / "w" / NAME / "state/0/_metadata/v2/10").write_text(content)
    assert checkpoint.find_former_root() is None


def test_a_file_that_is_gone_from_the_right_place_is_damage_not_a_move(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "w")
    shutil.rmtree(tmp_path / "w" / NAME / "state/0/_stateSchema")
    assert checkpoint.find_former_root() is None
