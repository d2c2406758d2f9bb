"""What each key has learned is used by the forecast skill, and goes with its state into the next version and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import kalman
from jobs import report, rollback, skill, upgrade, verify
from jobs.core.errors import UserError
from jobs.snapshots import manifests
from tests.jobs.support.pipeline import Pipeline

FIRST: dict[str, Any] = {
    "name": "walk",
    "version": 1,
    "key": ["id"],
    "time": "at",
    "time_unit": "hour",
    "measurement": ["a"],
    "states": ["level"],
    "process": {"kind": "random_walk", "variance": 0.5},
    "observation": {"R": [[1.0]]},
    "initial": {"mean": [0.0], "covariance": [[100.0]]},
    "learn": {"parameters": ["variance", "R"], "scope": "key"},
    "outputs": {"measured": True},
    "forecast": {"horizons": ["2h"], "probability": 0.8, "watermark": "30d"},
    "stream": {"partitions": 2},
}
SECOND: dict[str, Any] = {
    # The walk is a part of a sum now, beside a short-lived error.
    **FIRST,
    "version": 2,
    "states": ["level", "gust"],
    "process": {
        "kind": "sum",
        "parts": [
            {"kind": "random_walk", "variance": 0.5},
            {"kind": "ornstein_uhlenbeck", "rate": 1.0, "variance": 0.3},
        ],
    },
    "initial": {"mean": [0.0, 0.0], "covariance": [[100.0, 0.0], [0.0, 0.3]]},
    "learn": {"parameters": ["random_walk.variance", "ornstein_uhlenbeck.variance", "R"], "scope": "key"},
    "migrate": {"states": {"gust": {"initial": True}}},
    "upgrade": {"loss": 10.0},
}


def readings(first: int, rows: int, keys: int) -> pd.DataFrame:
    """Return hourly rows, from an hour on, of keys whose noise differs by powers of 4."""
    rng = np.random.default_rng(first)
    parts = []
    for key in range(keys):
        at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(first + np.arange(rows), "h")
        q, r = 0.1 * 4.0 ** (key % 3), 4.0 ** (1 - key % 2)
        values = np.cumsum(rng.normal(scale=q**0.5, size=rows)) + rng.normal(scale=r**0.5, size=rows)
        parts.append(pd.DataFrame({"id": key, "at": at.as_unit("us"), "a": values}))
    return pd.concat(parts, ignore_index=True)


def own(pipeline: Pipeline, identity: str) -> dict[str, tuple[float, ...]]:
    """Return the parameters of each key in a snapshot."""
    state = pipeline.snapshot(identity)
    fields = [tuple(dict(extras)["parameters"]) for extras in state["extras"]]
    return dict(zip(state["key"], fields, strict=True))


Own = dict[str, tuple[float, ...]]


def begun(folder: Path) -> tuple[Pipeline, dict[str, Any], Own]:
    """Return a stream of version 1, the report of its `pretrain`, and each key's parameters; key 6 is new in it."""
    pipeline = Pipeline(folder, FIRST)
    pipeline.land(readings(0, 100, 6))
    trained = pipeline.pretrain().data
    pipeline.land(readings(100, 12, 7))
    pipeline.stream()
    pooled = trained["parameters"]["variance"], trained["parameters"]["R"][0][0]
    return pipeline, trained, {**own(pipeline, trained["snapshot"]), "6": pooled}


@pytest.mark.slow
@pytest.mark.spark
def test_what_each_key_has_learned_goes_with_it_into_the_next_version(tmp_path: Path) -> None:
    pipeline, trained, parameters = begun(tmp_path)
    assert len(set(parameters.values())) == 7
    _check_skill(pipeline, parameters, trained["snapshot"])
    pipeline.write_spec(SECOND)
    pooled = trained["parameters"]
    preview = upgrade.run(pipeline.settings, "walk", dry_run=True)
    told = {one["name"]: one for one in preview.data["change"]["parameters"]}
    walk, gust = told["random_walk.variance"], told["ornstein_uhlenbeck.variance"]
    assert (walk["before"], walk["after"]) == (pooled["variance"], pooled["variance"])
    assert walk["from"] == "learned by version 1 as variance, carried over"
    assert (gust["before"], gust["after"], gust["from"]) == (None, 0.3, "the spec")
    lines = "\n".join(preview.lines)
    assert (
        "not learned yet: ornstein_uhlenbeck.variance; learn from history instead with `kalman-pipeline"
        in lines
    )
    mean = float(f"{np.mean([q for q, _ in parameters.values()]):.6g}")
    assert f"each key has its own variance: on average {mean} before, - after" in lines
    assert f"random_walk.variance: on average - before, {mean} after" in lines
    done = upgrade.run(pipeline.settings, "walk", mode="stop-start")
    assert done.data["parameters"] == preview.data["change"]["parameters"]
    after = own(pipeline, done.data["snapshot"])
    assert after == {key: (q, 0.3, r) for key, (q, r) in parameters.items()}


@pytest.mark.spark
@pytest.mark.slow
def test_the_next_version_filters_with_what_was_learned_and_gives_it_back(tmp_path: Path) -> None:
    pipeline, _, parameters = begun(tmp_path)
    pipeline.write_spec(SECOND)
    done = upgrade.run(pipeline.settings, "walk", mode="stop-start").data
    pipeline.land(later := readings(112, 5, 7))
    pipeline.stream()
    _check_estimates(pipeline, done, later)
    checked = verify.run(pipeline.settings, "walk", share="100%")
    assert (checked.errors, checked.data["differences"]) == ([], 0)
    # 7 keys have 12 and 5 rows in the two generations. States: 6 of the first snapshot and 7 of the second, and at the
    # end of each generation 7.
    assert any("119 estimates and 27 states are equal to the bit" in line for line in checked.lines)
    began = report.run(pipeline.settings, "walk", snapshot=done["snapshot"], against="walk-g0001")
    assert began.data["generation"] == "walk-g0002"
    assert began.data["snapshots"]["walk-g0002"] == done["snapshot"]
    assert any(line.startswith("parameters of walk-g0001: variance = ") for line in began.lines)
    back = rollback.run(pipeline.settings, "walk", last_state=True)
    assert own(pipeline, back.data["snapshot"]) == parameters


def _check_skill(pipeline: Pipeline, parameters: Own, snapshot: str) -> None:
    """Each forecast is that of a random walk with the key's own variances, of a new key with the pooled ones."""
    done = skill.run(pipeline.settings, "walk")
    assert done.data["snapshots"] == {"walk-g0001": snapshot}
    assert f"forecasts of walk-g0001 with the parameters of snapshot {snapshot}" in done.lines
    assert pipeline.spec.forecast is not None
    _compare(pipeline, parameters, pipeline.spec.forecast)
    skill.run(pipeline.settings, "walk", snapshot="none")
    spec_values = dict.fromkeys(parameters, (0.5, 1.0))
    _compare(pipeline, spec_values, pipeline.spec.forecast.with_snapshot("none"))
    with pytest.raises(UserError, match="--snapshot nix: model walk has no such snapshot"):
        skill.run(pipeline.settings, "walk", snapshot="nix")


def _compare(pipeline: Pipeline, parameters: dict[str, tuple[float, ...]], section: Any) -> None:
    scored: Any = pipeline.warehouse.read("forecast_skill/walk").toPandas()
    scored = scored[scored["definition"] == section.definition()]
    assert len(scored) == 7 * 10
    made: Any = pipeline.estimates().set_index(["key", "event_time"])
    for one in scored.to_dict("records"):
        origin = made.loc[(one["key"], one["made_at"])]
        q, r = parameters[one["key"]]
        assert one["mean"] == pytest.approx(origin["mean"][0], rel=1e-12)
        assert one["variance"] == pytest.approx(origin["covariance"][0] + 2 * q + r, rel=1e-12)


def _check_estimates(pipeline: Pipeline, done: dict[str, Any], rows: pd.DataFrame) -> None:
    """The new version filters each key with the parameters that came with its state, to the last bit."""
    manifest = manifests.find(pipeline.warehouse, done["snapshot"])
    assert manifest is not None
    model = kalman.build(pipeline.spec.definition(), manifest.parameters)
    found: Any = pipeline.estimates(done["generation"]).set_index(["key", "event_time"])
    for one in pipeline.snapshot(done["snapshot"]).to_dict("records"):
        extras = {name: np.array(values)[:, None] for name, values in dict(one["extras"]).items()}
        state = model.restore(np.array(one["mean"])[:, None], np.array(one["covariance"])[:, None], extras)
        mine: Any = rows[rows["id"] == int(one["key"])]
        at = np.array([one["event_time"].value // 1000])
        before = kalman.KeyStates(state, at, np.ones(1, np.int64), np.zeros(1))
        time = mine["at"].astype("int64").to_numpy()
        part = kalman.SortedRows(
            np.zeros(len(mine), np.int64), time, mine[["a"]].to_numpy().T, np.empty((0, len(mine)))
        )
        _, out = kalman.run(model, before, part, 3_600e6)
        for moment, mean in zip(mine["at"].dt.tz_localize(None), out.mean.T, strict=True):
            assert found.loc[(one["key"], moment)]["mean"] == tuple(mean)
