"""Pretrain: positions and cuts, learning on Spark, snapshots found again, and damaged ones refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

import kalman
from jobs.core.errors import RUN_FAILED, UserError
from jobs.snapshots import manifests, store
from jobs.state.encoding.row_order import order_rows
from kalman.learning.maximum_likelihood import build_linear_learner
from tests.conftest import RunCli
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark

UNIT = 60e6


def sorted_rows(frame: pd.DataFrame) -> tuple[kalman.SortedRows, int]:
    """Return a frame's rows in the order in which the filter applies them, and the number of keys."""
    _, code = np.unique(frame["id"], return_inverse=True)
    time = frame["at"].astype("int64").to_numpy()
    y = frame[["a", "b"]].to_numpy().T
    order = order_rows(code, time, y)
    rows = kalman.SortedRows(
        code[order], time[order], np.ascontiguousarray(y[:, order]), np.empty((0, len(order)))
    )
    return rows, int(code.max()) + 1


def learning_spec(**learn: Any) -> dict[str, Any]:
    return random_walk_spec(learn={"parameters": ["level_variance", "R"], **learn})


def test_pooled_learning_on_spark_finds_what_one_process_finds(tmp_path: Path) -> None:
    frame = random_rows(1, keys=20, rows=400)[0]
    pipeline = Pipeline(tmp_path, learning_spec())
    pipeline.land(frame)
    report = pipeline.pretrain()
    # The level is constant in these rows.
    assert not report.data["converged"] and report.data["outcome"] == "at_bound"
    assert "level_variance is zero" in report.data["reason"] and "at a bound" in "".join(report.lines)

    rows, keys = sorted_rows(frame)
    problem = build_linear_learner(pipeline.spec.definition())
    direct = problem.fit(
        lambda theta: problem.evaluate(theta, rows, keys, UNIT), lambda: np.empty((2, 0)), 100
    )
    assert report.data["log_likelihood"] == pytest.approx(direct.log_likelihood, rel=1e-12)
    for name, value in problem.parameters(direct.theta).items():
        # Sums over buckets round differently from one sum, and the maximum is flat to the square root of that.
        np.testing.assert_allclose(report.data["parameters"][name], value, rtol=1e-5, atol=1e-9)

    # The snapshot is filtered with the learned parameters.
    kernel = kalman.build(pipeline.spec.definition(), report.data["parameters"])
    final, _ = kalman.run(kernel, kalman.initial_states(kernel, keys), rows, UNIT)
    found = pipeline.snapshot(report.data["snapshot"])
    order = [sorted(str(k) for k in set(frame["id"])).index(str(k)) for k in sorted(set(frame["id"]))]
    np.testing.assert_array_equal(np.stack(list(found["mean"]))[order].T, kernel.moments(final.values)[0])


def test_each_key_learns_its_own_parameters_and_the_stream_continues_with_them(tmp_path: Path) -> None:
    days = random_rows(3, keys=6, rows=100)
    pipeline = Pipeline(tmp_path, learning_spec(scope="key", max_iterations=5))
    pipeline.land(pd.concat(days[:2]))
    report = pipeline.pretrain()
    found = pipeline.snapshot(report.data["snapshot"])
    own = np.array([extras["parameters"] for extras in found["extras"]])
    assert len({tuple(row) for row in own}) == len(found)  # no two keys have learned the same parameters
    pipeline.land(days[2])
    pipeline.stream()

    # An independent pass: each key's rows of the last day, from its state and parameters in the snapshot.
    kernel = kalman.build(pipeline.spec.definition(), report.data["parameters"])
    estimates = pipeline.estimates()
    for row in found.to_dict("records"):
        mine = days[2].loc[days[2]["id"] == int(row["key"])]
        if len(mine) == 0:
            continue
        rows, _ = sorted_rows(mine)
        mean, covariance = np.array(row["mean"])[:, None], np.array(row["covariance"])[:, None]
        extras = {name: np.array(value)[:, None] for name, value in dict(row["extras"]).items()}
        values = kernel.restore(mean, covariance, extras)
        time = np.array([pd.Timestamp(row["event_time"]).value // 1000])
        count, total = np.array([row["state_index"]]), np.array([row["log_likelihood"]])
        _, out = kalman.run(kernel, kalman.KeyStates(values, time, count, total), rows, UNIT)
        streamed = estimates.loc[estimates["key"] == row["key"]]
        assert sorted(streamed["log_likelihood"]) == sorted(out.log_likelihood)


def test_the_same_inputs_give_the_same_snapshot(tmp_path: Path) -> None:
    days = pd.concat(random_rows(2, rows=60))
    ids, sums = [], []
    for folder in ("one", "other"):
        pipeline = Pipeline(tmp_path / folder, learning_spec(window="1d", sample_keys=20, max_iterations=2))
        pipeline.land(days)
        report = pipeline.pretrain()
        ids.append(report.data["snapshot"])
        manifest = manifests.find(pipeline.warehouse, ids[-1])
        assert manifest is not None
        sums.append((manifest.checksum, manifest.parameters))
    assert pipeline.pretrain().data["snapshot"] == ids[-1]
    assert len(manifests.read_manifests(pipeline.warehouse)) == 1
    assert ids[0] != ids[1]  # the tables have the same rows, and are two
    assert sums[0] == sums[1]


def test_positions_and_cuts(tmp_path: Path) -> None:
    days = random_rows(3)
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(*days)
    second = pipeline.pretrain(
        as_of="2024-03-03"
    )  # files end at midnight: a version is "before the third day"
    assert (second.data["version"], second.data["cut"], second.data["rows"]) == (2, None, 300)
    noon = pipeline.pretrain(as_of="2024-03-02T12:00:00Z")  # in the middle of a file: history only
    before = sum((day["at"] < pd.Timestamp("2024-03-02T12:00Z")).sum() for day in days)
    assert (noon.data["version"], noon.data["rows"]) == (3, before)
    assert noon.data["cut"] is not None
    with pytest.raises(UserError, match="covers only rows before 2024-03-02 12:00 UTC"):
        pipeline.stream(adopt=noon.data["snapshot"])
    assert (
        pipeline.stream().data["snapshot"] == second.data["snapshot"]
    )  # the newest one that a stream can start from


def test_impossible_requests_are_refused_and_change_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    with pytest.raises(UserError, match="has no measurements"):
        pipeline.pretrain()
    with pytest.raises(UserError, match="has no measurements"):
        pipeline.stream()
    pipeline.land(random_rows(1)[0])
    with pytest.raises(UserError, match="has versions 0 to 1"):
        pipeline.pretrain(to_version=7)
    with pytest.raises(UserError, match="is not a time"):
        pipeline.pretrain(as_of="soon")
    with pytest.raises(UserError, match="no snapshot that a stream can start from"):
        pipeline.stream()
    with pytest.raises(UserError, match="has no such snapshot"):
        pipeline.stream(adopt="walk-v1-9-0")
    with pytest.raises(UserError, match="--trigger never"):
        pipeline.stream(trigger="never")
    assert not (tmp_path / "warehouse" / "manifests").exists()
    assert not (tmp_path / "warehouse" / "generations").exists()


def test_a_damaged_snapshot_and_a_changed_model_are_refused(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(*random_rows(2))
    first = pipeline.pretrain(to_version=1).data["snapshot"]
    manifest = manifests.find(pipeline.warehouse, first)
    assert manifest is not None
    other = dataclasses.replace(manifest, checksum="0" * 16)
    with pytest.raises(UserError, match="is damaged") as refused:
        store.verify(pipeline.warehouse, other)
    assert refused.value.exit_code == RUN_FAILED

    pipeline.stream()
    changed = random_walk_spec()
    changed["process"]["level_variance"] = 0.7
    pipeline.write_spec(changed)
    with pytest.raises(
        UserError, match="its spec has changed since walk-g0001 began, under the same version 1"
    ):
        pipeline.stream()
    with pytest.raises(UserError, match="would change its meaning"):
        pipeline.stream(adopt=first)  # the live generation began from it
    changed["version"] = 2
    pipeline.write_spec(changed)
    assert (
        pipeline.stream().data["generation"] == "walk-g0001"
    )  # with the spec of its snapshot, until an upgrade
    third = pipeline.spec.name + "-v1-2-none"
    with pytest.raises(UserError, match=rf"no such snapshot \(it has {first}\)"):
        pipeline.stream(adopt=third)


@pytest.mark.slow
def test_each_group_learns_its_own_parameters_and_new_keys_of_the_stream_begin_with_them(
    tmp_path: Path,
) -> None:
    """Groups of text keys on Spark learn as in one process; keys unknown to the snapshot join their group."""
    learn = {"parameters": ["level_variance", "R"], "scope": "group", "by": ["region"], "max_iterations": 3}
    pipeline = Pipeline(tmp_path, random_walk_spec(key=["id", "region"], learn=learn))
    first, second = random_rows(2, keys=20, rows=150)
    for frame in (first, second):
        frame["region"] = np.array(["é a", 'b"', "c"])[frame["id"] % 3]
    later = second.loc[
        second["id"].isin(list(set(second["id"]) - set(first["id"]))) | (second["id"] % 2 == 0)
    ]
    pipeline.land(first.loc[first["region"] != "c"])
    report = pipeline.pretrain()
    groups = report.data["parameters"]["groups"]
    assert groups["by"] == ["region"] and sorted(groups["values"]) == [['b"'], ["é a"]]
    found = pipeline.snapshot(report.data["snapshot"])
    wanted = {
        name[0]: [own["level_variance"], *np.array(own["R"])[np.tril_indices(2)]]
        for name, own in zip(groups["values"], groups["parameters"], strict=True)
    }
    definition = pipeline.spec.definition()
    pooled = {name: value for name, value in report.data["parameters"].items() if name != "groups"}
    for row in found.to_dict("records"):
        region = json.loads(row["key"])[1]
        assert list(row["extras"]["parameters"]) == wanted[region]

    pipeline.land(later)
    pipeline.stream()
    estimates = pipeline.estimates()
    known = set(found["key"])
    for key in sorted(set(estimates["key"]) - known):
        identity, region = json.loads(key)
        own = dict(zip([name[0] for name in groups["values"]], groups["parameters"], strict=True)).get(
            region, {}
        )
        kernel = kalman.build({**definition, "learn": None}, {**pooled, **own})
        rows, keys = sorted_rows(later.loc[later["id"] == int(identity)])
        _, out = kalman.run(kernel, kalman.initial_states(kernel, keys), rows, UNIT)
        streamed = estimates.loc[estimates["key"] == key]
        assert sorted(streamed["log_likelihood"]) == sorted(out.log_likelihood)
    assert {json.loads(key)[1] for key in set(estimates["key"]) - known} == {'b"', "é a", "c"}


def test_gaps_and_keys_that_stop_being_filtered_are_told(tmp_path: Path) -> None:
    spec = {
        "name": "gated",
        "version": 1,
        "key": ["id"],
        "time": "at",
        "time_unit": "hour",
        "measurement": ["a"],
        "states": ["level"],
        "process": {"kind": "explicit", "F": [[1.0]], "Q": [[0.01]]},
        "observation": {"H": [[1.0]], "R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]},
        "robust": {"gate": {"threshold": 9.0}},
    }
    hours = [hour for hour in range(50) if hour not in (10, 30, 31)]
    keys = {
        "good": lambda hour: 0.1,
        "moved": lambda hour: 0.1 if hour < 7 else 100.0,
        "worse": lambda hour: 100.0,
    }
    rows = [
        {"id": key, "at": pd.Timestamp(hour, unit="h"), "a": value(hour)}
        for key, value in keys.items()
        for hour in hours
    ]
    pipeline = Pipeline(tmp_path, spec)
    pipeline.land(pd.DataFrame(rows))
    report = pipeline.pretrain()
    gaps, lost = report.data["notes"]
    assert "6 of 138 steps (3 keys)" in gaps and gaps.startswith("note: explicit takes one step a row")
    assert lost.startswith(
        "warning: 2 of 3 keys have flagged rows alone from some row on, 87 rows, such as worse"
    )
    assert "with 47 from the first on" in lost and "estimate --model gated` writes says why" in lost
    assert gaps in report.lines and lost in report.lines
    pipeline.write_spec({**spec, "version": 2, "robust": {"gate": {"threshold": 9.0, "limit": 2}}})
    assert pipeline.pretrain().data["notes"] == [gaps]


@pytest.mark.slow
def test_a_command_that_filtered_few_rows_itself_names_lost_keys(tmp_path: Path, run_cli: RunCli) -> None:
    spec = {
        "name": "jump", "version": 1, "time": "at", "time_unit": "hour", "measurement": ["y"], "states": ["level"],
        "process": {"kind": "random_walk", "variance": 0.1}, "observation": {"R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[1.0]]}, "robust": {"gate": {"probability": 0.99}},
    }  # fmt: skip
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "jump.yaml").write_text(yaml.safe_dump(spec))
    rows = [f"2024-05-{1 + at // 24:02d}T{at % 24:02d}:00:00Z,{100 * (at >= 12)}" for at in range(40)]
    (tmp_path / "rows.csv").write_text("at,y\n" + "\n".join(rows) + "\n")
    where = (
        "--model",
        "jump",
        "--models",
        str(tmp_path / "models"),
        "--warehouse",
        str(tmp_path / "warehouse"),
    )
    assert run_cli("ingest", *where, "--input", str(tmp_path / "rows.csv")).code == 0
    done = run_cli("pretrain", *where)
    assert done.code == 0 and "all of its 28 rows after" in done.stdout, done.stderr
