"""Commands without Spark use what `pretrain` has learned: each key its own, its group's or the pooled parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import filter as offline
from jobs import forecast
from jobs.core.errors import UserError
from jobs.core.report import Report
from tests.jobs.support.pipeline import Pipeline

LEARN: dict[str, dict[str, Any]] = {
    "by_key": {"parameters": ["variance", "R"], "scope": "key"},
    "by_group": {"parameters": ["variance", "R"], "scope": "group", "by": ["site"]},
    "pooled": {"parameters": ["variance", "R"]},
}


def spec(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "version": 1,
        "key": ["site", "id"] if name != "pooled" else ["id"],
        "time": "at",
        "time_unit": "hour",
        "measurement": ["a"],
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[1.0]]},
        "initial": {"mean": [0.0], "covariance": [[100.0]]},
        "learn": LEARN[name],
        "stream": {"partitions": 2},
        **changes,
    }


def readings() -> pd.DataFrame:
    """Return 60 rows of each of 5 keys, of two sites whose noise differs."""
    rng = np.random.default_rng(11)
    parts = []
    for number, (site, q, r) in enumerate(
        [("n ü", 1.0, 0.2), ("n ü", 1.5, 0.3), ('s "1"', 0.1, 4.0), ('s "1"', 0.05, 6.0), ('s "1"', 0.1, 9.0)]
    ):
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(np.cumsum(rng.integers(1, 4, 60)), "h")
        level = np.cumsum(rng.normal(scale=q**0.5, size=60))
        values = level + rng.normal(scale=r**0.5, size=60)
        parts.append(pd.DataFrame({"site": site, "id": number, "at": at.as_unit("us"), "a": values}))
    return pd.concat(parts, ignore_index=True)


def filtered(pipeline: Pipeline, rows: pd.DataFrame, **options: Any) -> tuple[Report, pd.DataFrame]:
    source, out = pipeline.folder / "in.csv", pipeline.folder / "out.parquet"
    rows.to_csv(source, index=False)
    report = offline.run(pipeline.settings, pipeline.name, str(source), str(out), **options)
    return report, pd.read_parquet(out)


def last_rows(out: pd.DataFrame) -> dict[int, tuple[float, float]]:
    newest = out.astype({"id": int}).sort_values("at").groupby("id").last()
    return {
        key: (float(m[0]), float(P[0]))
        for key, m, P in zip(newest.index, newest["mean"], newest["covariance"], strict=True)
    }


def states_of(pipeline: Pipeline, identity: str) -> dict[int, tuple[float, float]]:
    """Return mean and variance of each key of a snapshot, by the number of the key."""
    state = pipeline.snapshot(identity)
    keys = [int(key.strip('[]"').rpartition('"')[2] or key) for key in state["key"]]
    return {
        key: (float(m[0]), float(P[0]))
        for key, m, P in zip(keys, state["mean"], state["covariance"], strict=True)
    }


@pytest.mark.spark
@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("by_key", "by_group")), "pooled"]
)
def test_filter_ends_in_the_states_of_the_snapshot_whose_parameters_it_takes(
    tmp_path: Path, name: str
) -> None:
    """The filter and `pretrain` start from the prior with the same parameters, so they end with the same bits."""
    rows = readings()
    pipeline = Pipeline(tmp_path, spec(name))
    nothing, _ = filtered(pipeline, rows)
    assert nothing.data["snapshot"] is None
    assert nothing.lines[1].startswith("parameters: the spec's values, no snapshot of version 1")
    assert nothing.lines[1].endswith(f"learn them with `kalman-pipeline pretrain --model {name}`")
    pipeline.land(rows)
    identity = pipeline.pretrain().data["snapshot"]
    report, out = filtered(pipeline, rows)
    assert report.data["snapshot"] == identity
    assert last_rows(out) == states_of(pipeline, identity)
    assert report.data["log_likelihood"] > nothing.data["log_likelihood"] + 20
    own = {"by_key": "their own", "by_group": "their group's"}.get(name)
    told = f"parameters of snapshot {identity}"
    said = told if own is None else f"{told}: 5 keys with {own}, 0 with "
    assert report.lines[1].startswith(said)
    the_spec, _ = filtered(pipeline, rows, snapshot="none")
    assert the_spec.lines[1] == "parameters: the spec's values, as --snapshot none asks"
    assert the_spec.data["log_likelihood"] == nothing.data["log_likelihood"]
    _check_unknown_keys(pipeline, rows, name)
    _check_forecast(pipeline, rows, identity)
    if name == "pooled":
        _check_refusals(pipeline, rows, identity)
        _check_another_version(pipeline, rows, identity)


def _check_unknown_keys(pipeline: Pipeline, rows: pd.DataFrame, name: str) -> None:
    """A key that the snapshot does not know has the parameters of its group, or those of all."""
    known: Any = rows[rows["id"] == 2]
    other = known.assign(id=77)
    report, out = filtered(pipeline, pd.concat([known, other]))
    last = last_rows(out)
    if name == "by_key":
        assert last[2] != last[77]
        assert (report.data["keys_known"], report.data["keys_unknown"]) == (1, 1)
        assert report.lines[1].endswith(": 1 key with their own, 1 with the population's")
        pooled = spec(name, learn={"parameters": ["variance", "R"]})
        walk = pooled | {"process": {"kind": "random_walk", "variance": _learned(pipeline)["variance"]}}
        walk |= {"name": "by_hand", "observation": {"R": _learned(pipeline)["R"]}}
        by_hand = Pipeline(pipeline.folder / "by_hand", walk)
        assert last_rows(filtered(by_hand, other)[1])[77] == last[77]
    else:
        assert last[2] == last[77]
    if name == "by_group":
        elsewhere, _ = filtered(pipeline, other.assign(site="nowhere"))
        assert elsewhere.lines[1].endswith(": 0 keys with their group's, 1 with those of all groups")


def _learned(pipeline: Pipeline) -> dict[str, Any]:
    found = pipeline.pretrain().data
    assert not found["made"]
    return found["parameters"]


def _check_forecast(pipeline: Pipeline, rows: pd.DataFrame, identity: str) -> None:
    """The first step of a forecast is what the filter gives for a row without a measurement."""
    source, out = pipeline.folder / "in.csv", pipeline.folder / "ahead.parquet"
    rows.to_csv(source, index=False)
    options: Any = {"steps": 1, "every": "2h", "all_columns": True}
    report = forecast.run(pipeline.settings, pipeline.name, str(source), str(out), **options)
    assert report.data["snapshot"] == identity and report.lines[1].startswith(
        f"parameters of snapshot {identity}"
    )
    ahead = rows.groupby("id").tail(1).assign(a=np.nan)
    ahead["at"] += pd.Timedelta("2h")
    _, expected = filtered(pipeline, pd.concat([rows, ahead]))
    assert last_rows(pd.read_parquet(out)) == last_rows(expected)


def _check_refusals(pipeline: Pipeline, rows: pd.DataFrame, identity: str) -> None:
    with pytest.raises(
        UserError, match=rf"--snapshot nix: model pooled has no such .* \(it has {identity}\)"
    ):
        filtered(pipeline, rows, snapshot="nix")


def _check_another_version(pipeline: Pipeline, rows: pd.DataFrame, identity: str) -> None:
    pipeline.write_spec(spec("pooled", version=2))
    report, _ = filtered(pipeline, rows)
    assert report.data["snapshot"] is None and "(1 are of others)" in report.lines[1]
    with pytest.raises(
        UserError, match=f"--snapshot {identity}: it is of version 1 of pooled as its spec was"
    ):
        filtered(pipeline, rows, snapshot=identity)
