"""A table of states of the user's own becomes a snapshot: each key checked, and a stream begins from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import kalman
from jobs import export, import_states, migrate, verify
from jobs.core.errors import RUN_FAILED, UserError
from jobs.snapshots import manifests, store
from jobs.upgrades.migration.importing import check_rows, plan_table
from tests.jobs.support.pipeline import Pipeline, assert_bit_equal, random_rows, random_walk_spec, since

DAYS = random_rows(3, keys=24, rows=60)
TREND: dict[str, Any] = {
    "states": ["level", "slope"],
    "measurement": ["a"],
    "process": {"kind": "local_linear_trend", "level_variance": 0.5, "slope_variance": 0.01},
    "observation": {"R": [[1.0]]},
    "initial": {"mean": [0.0, 0.0], "covariance": [[10.0, 0.0], [0.0, 1.0]]},
}
GOOD = [4.0, 0.5, 0.5, 1.0]
STATES: list[tuple[str, dict[str, Any]]] = [
    ("", {}),
    ("", {"covariance": [4.0, 2.0, 2.0, 1.0]}),  # singular
    ("mean is not 2 finite numbers", {"mean": [1.0]}),
    ("mean is not 2 finite numbers", {"mean": None}),
    ("mean is not 2 finite numbers", {"mean": [1.0, None]}),
    ("mean is not 2 finite numbers", {"mean": [1.0, float("nan")]}),
    ("covariance is not 4 finite numbers", {"covariance": [4.0, float("inf"), 0.5, 1.0]}),
    ("covariance is not 4 finite numbers", {"covariance": [4.0, 0.5, 1.0]}),
    ("the covariance is not symmetric", {"covariance": [4.0, 0.5, 0.6, 1.0]}),
    ("the covariance is not positive semidefinite", {"covariance": [4.0, 3.0, 3.0, 1.0]}),
    ("the covariance is not positive semidefinite", {"covariance": [-4.0, 0.0, 0.0, 1.0]}),
    ("the key is missing, or of another type than in the measurements", {"key": None}),
    ("the key has several rows", {"times": 2}),
    ("event_time is missing or not a time", {"event_time": None}),
    ("state_index is below 1", {"state_index": 0}),
    ("log_likelihood is not a finite number", {"log_likelihood": float("nan")}),
]


def batch_of(changes: list[dict[str, Any]], fields: dict[str, Any]) -> pa.RecordBatch:
    """Return rows as the check takes them."""
    plain = {"event_time": 5, "state_index": 3, "log_likelihood": -1.0, "times": 1, "given": "{}"}
    rows = [{"key": str(i), **plain, **fields, **change} for i, change in enumerate(changes)]
    types = {
        "key": pa.string(),
        "event_time": pa.int64(),
        "state_index": pa.int64(),
        "log_likelihood": pa.float64(),
        "times": pa.int64(),
        "given": pa.string(),
    }
    names = [*types, *(name for name in fields)]
    arrays = [
        pa.array([row[name] for row in rows], types.get(name, pa.list_(pa.float64()))) for name in names
    ]
    return pa.RecordBatch.from_arrays(arrays, [name if name in types else f"l_{name}" for name in names])


@pytest.mark.parametrize("form", ["covariance", "square_root"])
@pytest.mark.parametrize("kind", ["linear", "unscented"])
def test_every_problem_of_a_state_is_named(kind: str, form: str, spark_columns: Any) -> None:
    model = kalman.build({**TREND, "filter": kind, "form": form})
    table = plan_table(model, ["id"], ["id", "event_time", "mean", "covariance"], "--input x")
    batch = batch_of([change for _, change in STATES], {"mean": [1.0, -2.0], "covariance": GOOD})
    out = check_rows(model, table.form, batch)
    assert out.column("problem").to_pylist() == [problem or None for problem, _ in STATES]
    assert out.column("mean").to_pylist()[0] == [1.0, -2.0]
    np.testing.assert_allclose(out.column("covariance").to_pylist()[0], GOOD, rtol=1e-15)
    np.testing.assert_allclose(out.column("covariance").to_pylist()[1], [4.0, 2.0, 2.0, 1.0], rtol=1e-8)
    assert out.column("given").to_pylist()[:3] == [None, None, "{}"]
    if form == "square_root":  # the factor is made of the covariance
        assert dict(out.column("extras").to_pylist()[0])["factor"][0] == 2.0


def test_fields_beside_mean_and_covariance_and_mixtures(spark_columns: Any) -> None:
    adaptive = kalman.build({**TREND, "filter": "extended", "adaptive": {"R": 0.02}})
    columns = ["id", "event_time", "mean", "covariance", "parameters"]
    table = plan_table(adaptive, ["id"], columns, "--input x")
    batch = batch_of(
        [{}, {"parameters": [float("inf")]}], {"mean": [1.0, 2.0], "covariance": GOOD, "parameters": [7.0]}
    )
    out = check_rows(adaptive, table.form, batch)
    assert dict(out.column("extras").to_pylist()[0])["parameters"] == [7.0]
    assert out.column("problem").to_pylist() == [None, "parameters is not 1 finite numbers"]
    mixture = kalman.build(
        {
            "filter": "poisson_mixture",
            "states": ["count"],
            "measurement": ["count"],
            "mixture": {"rates": [3.0, 9.0]},
        }
    )
    table = plan_table(
        mixture, ["id"], ["id", "event_time", "weights_0", "weights_1", "rates_0", "rates_1"], "x"
    )
    batch = batch_of([{}, {"weights": [0.5, 0.6]}], {"weights": [0.25, 0.75], "rates": [4.0, 8.0]})
    out = check_rows(mixture, table.form, batch)
    assert out.column("problem").to_pylist() == [None, "weights are below 0, or do not sum to 1"]
    np.testing.assert_allclose(out.column("mean").to_pylist()[0], [7.0], rtol=1e-15)


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        (["id", "event_time", "mean"], "there is no column covariance"),
        (["id", "mean", "covariance"], "there is no column event_time"),
        (["event_time", "mean", "covariance"], "there is no column id"),
        (["id", "event_time", "mean", "covariance", "smean"], "unknown column smean"),
        (["id", "event_time", "mean_level", "covariance"], "there is no column mean"),
        (["id", "event_time", "mean", "covariance", "factor"], "unknown column factor"),
    ],
)
def test_a_table_with_other_columns_is_refused(columns: list[str], problem: str, spark_columns: Any) -> None:
    model = kalman.build(TREND)
    with pytest.raises(UserError) as error:
        plan_table(model, ["id"], columns, "--input states.csv")
    said = str(error.value)
    assert said.startswith(f"--input states.csv: {problem}")
    assert "It may have id, event_time, mean, covariance; and state_index, log_likelihood" in said


@pytest.fixture
def spark_columns(tmp_path_factory: Any) -> Any:
    """Return a session: column expressions need one."""
    return Pipeline(tmp_path_factory.mktemp("columns"), random_walk_spec()).warehouse.spark


def states_of(pipeline: Pipeline, identity: str) -> pd.DataFrame:
    """Return a snapshot's states as a user's table has them."""
    columns = ["key", "event_time", "mean", "covariance", "state_index", "log_likelihood"]
    states = pipeline.snapshot(identity).loc[:, columns].rename(columns={"key": "id"})
    states["event_time"] = states["event_time"].dt.tz_localize("UTC")
    return states.astype({"id": int})


@pytest.mark.slow
@pytest.mark.spark
def test_imported_states_go_on_as_those_of_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of a snapshot, as a table with some bad rows: killed, repeated, streamed, exported and migrated."""
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(DAYS[0])
    made = pipeline.pretrain().data["snapshot"]
    states = states_of(pipeline, made)
    later = [key for key in DAYS[1]["id"].unique() if key in set(states["id"])][:3]
    table = states.copy()
    at = {key: table.index[table["id"] == key][0] for key in later}
    table.at[at[later[0]], "mean"] = np.array([np.nan, 0.0])
    table.at[at[later[1]], "covariance"] = np.array([1.0, 2.0, 0.0, 1.0])
    table = pd.concat([table, table.iloc[[at[later[2]]]]], ignore_index=True)
    path = tmp_path / "states.parquet"
    table.to_parquet(path, index=False)
    version = pipeline.warehouse.latest_version("measurements/walk")
    run: dict[str, Any] = {"input": str(path), "to_version": version}

    dry = import_states.run(pipeline.settings, "walk", **run, dry_run=True)
    assert dry.data["snapshot"] is None and not pipeline.warehouse.exists("quarantine")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            import_states.run(pipeline.settings, "walk", **run)
    assert [one.snapshot_id for one in manifests.read_manifests(pipeline.warehouse)] == [
        made
    ]  # nothing is visible

    done = import_states.run(pipeline.settings, "walk", **run)
    again = import_states.run(pipeline.settings, "walk", **run)
    identity = done.data["snapshot"]
    assert done.data["made"] and not again.data["made"] and again.data["snapshot"] == identity
    assert done.data["keys"] == len(states) - 3 and done.data["left_out"] == 4
    assert done.data["problems"] == {
        "mean is not 2 finite numbers": 1,
        "the covariance is not symmetric": 1,
        "the key has several rows": 2,
    }
    assert done.data["left_out_keys"] == sorted(str(key) for key in later)
    assert f"stream --model walk --adopt {identity}" in " ".join(done.lines)
    held = pipeline.warehouse.read("quarantine").toPandas()
    assert len(held) == 4 and held["reason"].str.endswith("; left out of the import").all()
    assert sorted(json.loads(text)["left_out"]["key"] for text in held["payload"]) == sorted(
        str(key) for key in [*later, later[2]]
    )
    kept = ~states["id"].isin(later)
    found, expected = pipeline.snapshot(identity), pipeline.snapshot(made).loc[kept.to_numpy()]
    columns = ["key", "state_index", "event_time", "mean", "covariance", "log_likelihood"]
    assert found.loc[:, columns].to_json() == expected.loc[:, columns].reset_index(drop=True).to_json()

    pipeline.land(DAYS[1])
    pipeline.stream(adopt=identity)
    batch = since(pipeline.batch(), DAYS[1])
    whole = pipeline.estimates()
    sound = ~whole["key"].isin([str(key) for key in later])
    matching = ~batch["key"].astype(str).isin([str(key) for key in later])
    assert_bit_equal(
        whole.loc[sound].reset_index(drop=True).astype({"key": str}),
        batch.loc[matching].reset_index(drop=True).astype({"key": str}),
    )
    checked = verify.run(pipeline.settings, "walk", share="100%")
    assert "was made of a table of states, which nothing else gives" in " ".join(checked.lines)
    exported = export.run(pipeline.settings, "walk").data["snapshot"]
    pipeline.write_spec(
        random_walk_spec(version=2, migrate={"states": {"level": {"from": "level", "scale": 2.0}}})
    )
    for source in (exported, identity):
        assert migrate.run(pipeline.settings, "walk", snapshot=source).data["change"]["wrong"] == 0

    worse = states.assign(mean=[np.array([np.inf, 0.0])] * len(states))
    worse.to_parquet(path, index=False)
    with pytest.raises(UserError, match="more than an import leaves out: nothing was written") as refused:
        import_states.run(pipeline.settings, "walk", **run)
    assert refused.value.exit_code == RUN_FAILED


@pytest.mark.slow
@pytest.mark.spark
def test_a_csv_of_states_before_any_row_begins_a_stream(tmp_path: Path) -> None:
    """Flat columns; the measurements are all after the states, which reflect none of them."""
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(DAYS[0])
    ids = sorted(DAYS[0]["id"].unique())
    path = tmp_path / "states.csv"
    rng = np.random.default_rng(2)
    mean = rng.normal(size=(len(ids), 2))
    pd.DataFrame(
        {
            "id": ids,
            "event_time": "2024-02-29T12:00:00Z",
            "mean_level": mean[:, 0],
            "mean_slope": mean[:, 1],
            **{f"covariance_{a}_{b}": float(a == b) for a in ("level", "slope") for b in ("level", "slope")},
        }
    ).to_csv(path, index=False)
    listed = tmp_path / "lists.csv"
    pd.DataFrame({"id": [1], "event_time": ["2024-02-29"], "mean": ["[1, 2]"], "covariance": ["[]"]}).to_csv(
        listed
    )
    with pytest.raises(UserError, match="unknown column _c0"):
        import_states.run(pipeline.settings, "walk", str(listed))
    pd.read_csv(listed, index_col=0).to_csv(listed, index=False)
    with pytest.raises(UserError, match="mean is of type string, not a list of numbers"):
        import_states.run(pipeline.settings, "walk", str(listed))
    made = import_states.run(pipeline.settings, "walk", str(path)).data
    assert made["keys"] == len(ids) and made["left_out"] == 0
    pipeline.stream()  # the only snapshot
    found = pipeline.estimates()
    assert len(found) == len(DAYS[0])
    model = kalman.build(pipeline.spec.definition())
    for number, key in enumerate(ids):
        rows = DAYS[0].loc[DAYS[0]["id"] == key]
        time = rows["at"].astype("int64").to_numpy()
        begun = kalman.KeyStates(
            model.from_moments(mean[number][:, None], np.eye(2).reshape(4, 1)),
            np.array([pd.Timestamp("2024-02-29T12:00:00Z").value // 1000]),
            np.array([1]),
            np.zeros(1),
        )
        if len(np.unique(time)) < len(time):
            continue  # rows of one time have an order of their own
        y = np.ascontiguousarray(rows[["a", "b"]].to_numpy().T)
        sorted_rows = kalman.SortedRows(np.zeros(len(rows), np.int64), time, y, np.empty((0, len(rows))))
        out = kalman.run(model, begun, sorted_rows, pipeline.spec.unit_us)[1]
        mine = found.loc[found["key"].astype(str) == str(key)].sort_values("event_time")
        np.testing.assert_array_equal(np.array(mine["mean"].to_list()).T, out.mean)
