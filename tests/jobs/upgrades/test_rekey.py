"""States get other keys: split, joined and merged by the functions that a spec names, and only by these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kalman
from jobs import export, migrate, upgrade
from jobs.core.errors import RUN_FAILED, UserError
from jobs.lineage.live import live_estimates
from jobs.spark.queries import find_cause
from jobs.specs.model_spec import ModelSpec
from jobs.state.encoding.keys import KeyKind
from jobs.upgrades.migration.rekey import Rekey, compute_new_keys, merge_states
from jobs.upgrades.migration.state_map import build_state_map
from jobs.upgrades.migration.versions import MigrationStep
from kalman.models.named import Named
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec

FUNCTIONS = '''
import numpy as np
import pandas as pd


def split(keys):
    """room-sensor -> room, sensor"""
    parts = keys["id"].str.split("-", expand=True)
    return pd.DataFrame({"room": parts[0], "sensor": parts[1].astype("int64")})


def rooms(keys):
    return pd.DataFrame({"id": keys["id"].str.split("-").str[0]})


def shorter(keys):
    return rooms(keys).head(1)


def other(keys):
    return keys.rename(columns={"id": "place"})


def holes(keys):
    return pd.DataFrame({"id": np.where(keys["id"].str.endswith("1"), None, keys["id"])})


def halves(keys):
    return pd.DataFrame({"id": np.full(len(keys), 0.5)})


def fused(group, event_time, mean, covariance):
    """Independent estimates of one state, weighted by their precision."""
    n, groups = len(mean), group[-1] + 1
    information, vector = np.zeros((groups, n, n)), np.zeros((groups, n))
    P = np.linalg.inv(covariance.T.reshape(-1, n, n))
    np.add.at(information, group, P)
    np.add.at(vector, group, np.einsum("kij,kj->ki", P, mean.T))
    P = np.linalg.inv(information)
    P = (P + P.transpose(0, 2, 1)) / 2
    return np.einsum("kij,kj->ik", P, vector), P.reshape(groups, n * n).T


def wrong(group, event_time, mean, covariance):
    return mean, covariance


def negative(group, event_time, mean, covariance):
    mean, covariance = fused(group, event_time, mean, covariance)
    return mean, -covariance
'''
KEYS = [f"{room}-{sensor}" for room in ("attic", "hall", "é a") for sensor in range(1, 5)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of models with the functions beside the specs."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "walk_keys.py").write_text(FUNCTIONS)
    return tmp_path


def named(folder: Path, function: str) -> Named:
    return Named(f"walk_keys:{function}", str(folder / "models"))


def rekey(folder: Path, function: str, *names: str, whole: tuple[bool, ...] = (), merge: Any = None) -> Rekey:
    target = kalman.build(ModelSpec.model_validate(random_walk_spec()).definition())
    kind = KeyKind(("id",), ("string",), False)
    return Rekey(kind, names, whole or (False,) * len(names), named(folder, function), merge, target)


def test_key_columns_are_split(folder: Path) -> None:
    old = pd.DataFrame({"id": KEYS})
    found = compute_new_keys(rekey(folder, "split", "room", "sensor", whole=(False, True)), old)
    assert [f"{room}-{sensor}" for room, sensor in zip(*found, strict=True)] == KEYS


@pytest.mark.parametrize(
    ("function", "names", "whole", "message"),
    [
        (
            "shorter",
            ("id",),
            (False,),
            "shorter returned 1 rows for 12 keys: it has to give each key one new key",
        ),
        ("other", ("id",), (False,), r"other returned \['place'\], not a pandas table of the columns id"),
        ("holes", ("id",), (False,), "holes: id has no value for 3 of 12 keys"),
        ("halves", ("id",), (False,), "halves: id is float64: give whole numbers or texts"),
        ("rooms", ("id",), (True,), "rooms: id is to be a whole number, as in the measurements table"),
    ],
)
def test_an_invalid_key_function_is_refused(
    folder: Path, function: str, names: tuple[str, ...], whole: tuple[bool, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        compute_new_keys(rekey(folder, function, *names, whole=whole), pd.DataFrame({"id": KEYS}))


def test_a_merge_function_gets_all_colliding_states(folder: Path) -> None:
    rng = np.random.default_rng(0)
    group = np.array([0, 0, 1, 1, 1])
    root = rng.normal(size=(5, 2, 2))
    P = root @ root.transpose(0, 2, 1) + np.eye(2)
    mean, covariance = rng.normal(size=(2, 5)), P.reshape(5, 4).T.copy()
    rule = rekey(folder, "rooms", "id", merge=named(folder, "fused"))
    found = merge_states(rule, group, np.arange(5), mean, covariance)
    for g in range(2):
        weights = [np.linalg.inv(P[k]) for k in np.flatnonzero(group == g)]
        expected = np.linalg.inv(sum(weights))
        vector = sum(w @ mean[:, k] for w, k in zip(weights, np.flatnonzero(group == g), strict=True))
        np.testing.assert_allclose(found[1][:, g].reshape(2, 2), expected, rtol=1e-12)
        np.testing.assert_allclose(found[0][:, g], expected @ vector, rtol=1e-12)
    for function, message in (
        ("wrong", r"mean \(2, 5\) and covariance \(4, 5\), not"),
        ("negative", "made 2 states of 2"),
    ):
        with pytest.raises(UserError, match=message):
            merge_states(rule._replace(merge=named(folder, function)), group, np.arange(5), mean, covariance)


def test_other_key_columns_are_refused_without_a_function() -> None:
    old = ModelSpec.model_validate(random_walk_spec())
    new = random_walk_spec(version=2, key=["room", "sensor"])
    with pytest.raises(UserError, match="Say in migrate.keys how the old keys become the new ones"):
        build_state_map(MigrationStep.forward(old, ModelSpec.model_validate(new)))
    new["migrate"] = {"keys": {"function": "walk_keys:split"}}
    build_state_map(MigrationStep.forward(old, ModelSpec.model_validate(new)))


def test_the_cause_of_a_failed_query_is_the_message_it_raised() -> None:
    text = (
        "An exception was raised\nCaused by: org.x.SparkRuntimeException: [USER_RAISED_EXCEPTION] a row of m"
    )
    for more in (" SQLSTATE: P0001", " SQLSTATE: P0001\n\tat org.apache.spark", ""):
        assert find_cause(RuntimeError(text + " has no key" + more)) == "a row of m has no key"


def prepared(folder: Path) -> tuple[Pipeline, list[pd.DataFrame]]:
    """Return a pipeline with text keys, a day of them in its snapshot and one in its stream, and a third day."""
    pipeline = Pipeline(folder, random_walk_spec())
    days = random_rows(3, keys=len(KEYS) * 2, rows=80)
    for day in days:
        day["id"] = np.array(KEYS)[day["id"] % len(KEYS)]
    pipeline.land(days[0])
    pipeline.pretrain()
    pipeline.land(days[1])
    pipeline.stream()
    return pipeline, days


def deploy(pipeline: Pipeline, key: list[str], **keys: str) -> None:
    rules = {name: value if value == "newest" else f"walk_keys:{value}" for name, value in keys.items()}
    pipeline.write_spec(random_walk_spec(version=2, key=key, migrate={"keys": rules}))


@pytest.mark.slow
@pytest.mark.spark
def test_a_stream_continues_with_other_keys(folder: Path) -> None:
    pipeline, days = prepared(folder)
    settings = pipeline.settings
    exported(pipeline)

    # No two keys are joined by accident.
    deploy(pipeline, ["id"], function="rooms")
    with pytest.raises(
        UserError, match=r"12 keys come out as 3 \(such as attic-1, attic-2, attic-3 -> attic;"
    ) as no:
        migrate.run(settings, "walk", dry_run=True)
    assert no.value.exit_code == RUN_FAILED

    # Split into two columns, under the stream: each key goes on with its own state.
    deploy(pipeline, ["room", "sensor"], function="split")
    with pytest.raises(UserError, match="has other keys, so it cannot read the same rows in shadow"):
        upgrade.run(settings, "walk")
    done = upgrade.run(settings, "walk", mode="stop-start").data
    assert done["generation"] == "walk-g0002"
    add_columns(pipeline, "room string, sensor bigint")
    later = days[2].copy()
    parts = later["id"].str.split("-", expand=True)
    pipeline.land(later.assign(room=parts[0], sensor=parts[1].astype("int64")).drop(columns="id"))
    assert pipeline.stream().data["rows"] == len(later)
    found = pipeline.estimates("walk-g0002")
    whole = Pipeline(folder / "whole", random_walk_spec())
    whole.land(*days)
    expected = whole.batch()
    expected = expected.loc[expected["event_time"] >= later["at"].min().tz_localize(None)]
    found["key"] = ["-".join(json.loads(key)) for key in found["key"]]
    order = ["key", "event_time", "log_likelihood", "mean"]
    assert_bit_equal(
        found.sort_values(order, ignore_index=True), expected.sort_values(order, ignore_index=True)
    )
    assert len(live_estimates(pipeline.warehouse, "walk").toPandas()) == len(days[1]) + len(later)

    # A row that version 1 lands now has no key of version 2.
    pipeline.write_spec(random_walk_spec())
    pipeline.land(days[2].assign(at=days[2]["at"] + pd.Timedelta("2d")))
    deploy(pipeline, ["room", "sensor"], function="split")
    with pytest.raises(
        UserError,
        match="a row of measurements/walk has no room or sensor: a version with other key columns landed it",
    ):
        pipeline.stream()


@pytest.mark.soak
@pytest.mark.spark
def test_colliding_keys_are_merged_by_the_rule(folder: Path) -> None:
    pipeline, _ = prepared(folder)
    settings = pipeline.settings
    before = exported(pipeline)
    deploy(pipeline, ["id"], function="holes")
    with pytest.raises(UserError, match=r"^migrate.keys.function: walk_keys:holes: id has no value for"):
        migrate.run(settings, "walk", dry_run=True)
    deploy(pipeline, ["id"], function="rooms", merge="newest")
    done = migrate.run(settings, "walk", snapshot=before).data
    assert done["change"]["rekeyed"] == {"keys": 3, "merged": 12, "into": 3}
    old, new = pipeline.snapshot(before), pipeline.snapshot(done["snapshot"])
    old["room"] = old["key"].str.split("-").str[0]
    newest = old.sort_values(["event_time", "state_index"]).groupby("room").tail(1).sort_values("room")
    assert list(new["key"]) == list(newest["room"])
    for name in ("mean", "covariance"):
        assert [tuple(v) for v in new[name]] == [tuple(v) for v in newest[name]]
    deploy(pipeline, ["id"], function="rooms", merge="fused")
    done = migrate.run(settings, "walk", snapshot=before).data
    new = pipeline.snapshot(done["snapshot"])
    assert list(new["state_index"]) == list(old.groupby("room")["state_index"].sum())
    assert list(new["event_time"]) == list(old.groupby("room")["event_time"].max())
    (attic,) = [row for row in new.to_dict("records") if row["key"] == "attic"]
    weights = [np.linalg.inv(np.reshape(v, (2, 2))) for v in old.loc[old["room"] == "attic", "covariance"]]
    np.testing.assert_allclose(
        np.reshape(attic["covariance"], (2, 2)), np.linalg.inv(sum(weights)), rtol=1e-9
    )


def exported(pipeline: Pipeline) -> str:
    """Export the stream and return the snapshot."""
    return export.run(pipeline.settings, "walk").data["snapshot"]


def add_columns(pipeline: Pipeline, columns: str) -> None:
    warehouse = pipeline.warehouse
    warehouse.spark.sql(f"ALTER TABLE delta.`{warehouse.path('measurements/walk')}` ADD COLUMNS ({columns})")
