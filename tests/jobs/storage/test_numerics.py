"""The mark of the numerics beside a position, and what earlier releases make of it."""

from __future__ import annotations

import json

import kalman
from jobs.lineage.generations import Generation, _generation, row_of
from jobs.snapshots.manifests import Manifest, _manifest
from jobs.snapshots.manifests import row_of as manifest_row
from jobs.storage.positions import FIRST_NUMERICS, with_numerics, without_numerics

POSITION = {"source": "delta", "table": "measurements/m", "version": 3}


def test_a_position_comes_back_with_the_numerics_of_its_owner() -> None:
    stored = with_numerics(POSITION, "m-g0001", 2)
    assert json.loads(json.dumps(stored)) == {**POSITION, "numerics": {"m-g0001": 2}}
    assert without_numerics(stored, "m-g0001") == (POSITION, 2)
    assert without_numerics(with_numerics(POSITION, "m-g0001", FIRST_NUMERICS), "m-g0001") == (
        POSITION,
        FIRST_NUMERICS,
    )


def test_a_mark_that_was_copied_from_another_does_not_count() -> None:
    copied = with_numerics(POSITION, "m-g0001", 2)
    assert without_numerics(copied, "m-g0002") == (POSITION, FIRST_NUMERICS)


def test_no_mark_is_the_first_numerics() -> None:
    assert without_numerics(POSITION, "m-g0001") == (POSITION, FIRST_NUMERICS)
    assert with_numerics(POSITION, "m-g0001", FIRST_NUMERICS) == POSITION


def test_a_row_of_generations_has_the_mark_in_its_json_and_nowhere_else() -> None:
    one = Generation("m-g0001", "m", 1, "f", "s", "c", POSITION, 1, 1, "live", numerics=kalman.NUMERICS)
    row = row_of(one)
    assert "numerics" not in row
    assert _generation(row) == one
    assert _generation({**row, "start_position": json.dumps(POSITION)}).numerics == FIRST_NUMERICS
    assert _generation({**row, "generation": "m-g0002"}).numerics == FIRST_NUMERICS


def test_a_manifest_has_the_mark_in_its_json_and_nowhere_else() -> None:
    one = Manifest(
        snapshot_id="s1", model="m", model_version=1, fingerprint="f", parameters={}, position=POSITION, key_count=1,
        checksum="", rows=1, snapshots_version=0, spec="", numerics=kalman.NUMERICS,
    )  # fmt: skip
    row = manifest_row(one)
    assert "numerics" not in row
    assert _manifest(row) == one
    assert _manifest({**row, "snapshot_id": "s2"}).numerics == FIRST_NUMERICS
