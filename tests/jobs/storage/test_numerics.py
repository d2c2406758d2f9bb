"""The mark of the numerics beside a position, and what earlier releases make of it."""

from __future__ import annotations

import json

import kalman
from jobs.lineage.generations import Generation, _parse_generation, build_generation_row
from jobs.snapshots.manifests import Manifest, _parse_manifest
from jobs.snapshots.manifests import build_manifest_row as manifest_row
from jobs.storage.positions import FIRST_NUMERICS, split_numerics, with_numerics

POSITION = {"source": "delta", "table": "measurements/m", "version": 3}


def test_a_position_comes_back_with_the_numerics_of_its_owner() -> None:
    stored = with_numerics(POSITION, "m-g0001", 2)
    assert json.loads(json.dumps(stored)) == {**POSITION, "numerics": {"m-g0001": 2}}
    assert split_numerics(stored, "m-g0001") == (POSITION, 2)
    assert split_numerics(with_numerics(POSITION, "m-g0001", FIRST_NUMERICS), "m-g0001") == (
        POSITION,
        FIRST_NUMERICS,
    )


def test_a_mark_that_was_copied_from_another_does_not_count() -> None:
    copied = with_numerics(POSITION, "m-g0001", 2)
    assert split_numerics(copied, "m-g0002") == (POSITION, FIRST_NUMERICS)


def test_no_mark_is_the_first_numerics() -> None:
    assert split_numerics(POSITION, "m-g0001") == (POSITION, FIRST_NUMERICS)
    assert with_numerics(POSITION, "m-g0001", FIRST_NUMERICS) == POSITION


def test_a_row_of_generations_has_the_mark_in_its_json_and_nowhere_else() -> None:
    one = Generation("m-g0001", "m", 1, "f", "s", "c", POSITION, 1, 1, "live", numerics=kalman.NUMERICS)
    row = build_generation_row(one)
    assert "numerics" not in row
    assert _parse_generation(row) == one
    assert _parse_generation({**row, "start_position": json.dumps(POSITION)}).numerics == FIRST_NUMERICS
    assert _parse_generation({**row, "generation": "m-g0002"}).numerics == FIRST_NUMERICS


def test_a_manifest_has_the_mark_in_its_json_and_nowhere_else() -> None:
    one = Manifest(
        snapshot_id="s1", model="m", model_version=1, fingerprint="f", parameters={}, position=POSITION, key_count=1,
        checksum="", rows=1, snapshots_version=0, spec="", numerics=kalman.NUMERICS,
    )  # fmt: skip
    row = manifest_row(one)
    assert "numerics" not in row
    assert _parse_manifest(row) == one
    assert _parse_manifest({**row, "snapshot_id": "s2"}).numerics == FIRST_NUMERICS
