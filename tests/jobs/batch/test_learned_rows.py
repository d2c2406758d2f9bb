"""Learning through `pretrain` on somebody else's data: units far apart, every key named that could not be learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.tsa.statespace.structural import UnobservedComponents

from jobs.batch import key_learning
from jobs.core.errors import UserError
from jobs.snapshots import learned_rows, manifests, store
from tests.jobs.support.pipeline import Pipeline

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.usefixtures("tasks_of_spark")]

LENGTH = 200
SCALES = 10.0 ** np.linspace(-1, 8, 10)


def level_spec(**learn: Any) -> dict[str, Any]:
    return {
        "name": "level",
        "version": 1,
        "key": ["region", "id"],
        "time": "at",
        "time_unit": "minute",
        "measurement": ["y"],
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[1.0]]},
        "initial": {"diffuse": True},
        "learn": {"parameters": ["variance", "R"], **learn},
        "stream": {"partitions": 2},
    }


def unlike() -> pd.DataFrame:
    """Return ten series of unlike units and ratios of signal to noise, one that is constant, and one of two rows."""
    rng = np.random.default_rng(5)
    frames = []
    for k, scale in enumerate(SCALES):
        ratio = 10.0 ** rng.uniform(-1.0, 0.5)
        x = np.cumsum(np.sqrt(ratio) * rng.normal(size=LENGTH)) + 50.0 * rng.normal()
        y = scale * (x + rng.normal(size=LENGTH))
        frames.append(pd.DataFrame({"id": k, "minute": np.arange(LENGTH), "y": y}))
    frames.append(pd.DataFrame({"id": 10, "minute": np.arange(LENGTH), "y": 7.0}))
    frames.append(pd.DataFrame({"id": 11, "minute": np.arange(2), "y": [1.0, 2.0]}))
    whole = pd.concat(frames, ignore_index=True)
    at = pd.Timestamp("2024-03-01", tz="UTC") + pd.to_timedelta(whole.pop("minute"), "min")
    region = np.where(whole["id"] % 2 == 0, "even", "odd")
    return whole.assign(at=at.dt.as_unit("us"), region=region)


def best_of(y: np.ndarray) -> float:
    """Return the greatest log-likelihood that statsmodels finds from several starts."""
    scale = y.std()
    model = UnobservedComponents(y / scale, "llevel", use_exact_diffuse=True)  # type: ignore[arg-type]
    starts = ([1.0, 0.01], [0.01, 1.0], [0.3, 0.3])
    fits: list[Any] = [model.fit(start, disp=False) for start in starts]
    found = [one.llf for one in fits]
    return float(max(found)) - (len(y) - 1) * np.log(scale)


def learned(pipeline: Pipeline) -> pd.DataFrame:
    """Return the table as SQL shows it."""
    path = pipeline.warehouse.path("learned")
    query = f"""
        select scope, get_json_object(key, '$[1]') as id, key_group, outcome, reason, rows, log_likelihood,
               log_likelihood_a_row, parameters['variance'] as variance, parameters['R'] as R,
               standard_errors['R'] as R_error, own, nis, ljung_box, keys
        from delta.`{path}` order by scope, id, key_group
    """
    return pipeline.warehouse.spark.sql(query).toPandas()


def test_ten_unlike_series_learn_by_key_and_those_that_cannot_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = unlike()
    pipeline = Pipeline(tmp_path, level_spec(scope="key"))
    pipeline.land(frame)
    with pytest.raises(UserError, match="no rows to learn from"):
        pipeline.pretrain(learn_from="2030-01-01")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # after both tables are written, before the manifest
        patch.setattr(store, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            pipeline.pretrain()
    assert manifests.read_manifests(pipeline.warehouse) == [] and len(learned(pipeline)) == 13

    report = pipeline.pretrain()
    rows = learned(pipeline)
    assert len(rows) == 13  # those of the killed attempt are replaced
    keys = rows.loc[rows["scope"] == "key"].set_index("id")
    for k in range(10):
        own = keys.loc[str(k)]
        y = frame.loc[frame["id"] == k, "y"].to_numpy()
        # drawn towards the population a little
        assert own["log_likelihood"] == pytest.approx(best_of(y), abs=0.5) and own["rows"] == LENGTH
        assert own["log_likelihood_a_row"] == own["log_likelihood"] / LENGTH
        assert own["outcome"] == "converged" and 0.5 < own["own"] <= 1.0
        assert own["R"] > 1e-6 * own["variance"] and 0.0 < own["R_error"] < 3.0 * own["R"]
        assert 0.7 < own["nis"] < 1.4
    constant, short = keys.loc["10"], keys.loc["11"]
    assert constant["outcome"] == "failed" and "do not vary" in constant["reason"]
    assert short["outcome"] == "too_few_rows" and "2" not in keys.loc["2"]["outcome"]
    middle = rows.loc[rows["scope"] == "population"].iloc[0]
    assert constant["variance"] == pytest.approx(middle["variance"]) and constant["R"] == pytest.approx(
        middle["R"]
    )

    told = report.data["learned"]
    assert told["outcomes"] == {"converged": 10, "at_bound": 0, "too_few_rows": 1, "failed": 1}
    assert told["of"] == "key" and not report.data["converged"]
    text = "\n".join(report.lines)
    assert "learned for 12 keys: 10 converged, 1 with too few rows of their own, 1 failed" in text
    assert '["even","10"]: failed (its measurements do not vary)' in text
    assert told["worst"][0]["name"] == '["even","10"]' and told["worst"][1]["name"] == '["odd","11"]'

    # each key's states go on with its parameters
    states = pipeline.snapshot(report.data["snapshot"])
    for row in states.to_dict("records"):
        k = row["key"].split('"')[3]
        np.testing.assert_array_equal(
            dict(row["extras"])["parameters"], keys.loc[k][["variance", "R"]].astype(float)
        )

    again = pipeline.pretrain()  # reads what it has learned
    assert not again.data["made"] and again.data["learned"] == told
    store.remove(pipeline.warehouse, "level", [report.data["snapshot"]])
    assert len(learned(pipeline)) == 0


def test_units_far_apart_learned_together_by_group_and_by_key_in_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = unlike()
    frame = frame.loc[frame["id"] < 10]
    pipeline = Pipeline(tmp_path, level_spec(scope="group", by=["region"]))
    pipeline.land(frame)
    report = pipeline.pretrain()
    assert report.data["outcome"] == "converged" and report.data["reason"] is None
    rows = learned(pipeline)
    assert rows["scope"].tolist() == ["group", "group", "pooled"]
    assert rows["key_group"].tolist() == ['["even"]', '["odd"]', None]
    assert set(rows["outcome"]) == {"converged"} and rows["nis"].notna().sum() == 3
    # squares of the loudest series make the variances, and it is ten times as loud in one group as in the other
    assert 10.0 < rows["variance"][1] / rows["variance"][0] < 1e5
    assert report.data["learned"]["outcomes"]["converged"] == 2
    assert any("warning: the model does not fit" in line for line in report.lines)

    manifest = manifests.find(pipeline.warehouse, report.data["snapshot"])
    assert manifest is not None
    path = pipeline.warehouse.path("learned")
    pipeline.warehouse.spark.sql(f"update delta.`{path}` set nis = 1.0 where scope = 'pooled'")
    pinned = learned_rows.read_learned_rows(
        pipeline.warehouse, manifest, ["nis"]
    )  # the version that was written
    assert pinned is not None and 1.0 not in pinned["nis"].to_pylist()

    monkeypatch.setattr(key_learning, "LEAST_KEYS", 4)
    pipeline.write_spec(level_spec(scope="key", by=["region"]) | {"version": 2})
    report = pipeline.pretrain()
    rows = learned(pipeline)
    mine = rows.loc[rows["scope"] == "population"]
    assert mine["key_group"].tolist() == [None, '["even"]', '["odd"]'] and mine["keys"].tolist() == [10, 5, 5]
    groups = report.data["parameters"]["groups"]
    assert groups["by"] == ["region"] and groups["values"] == [["even"], ["odd"]]
    assert groups["parameters"][1]["variance"] == mine["variance"].iloc[2]
    found = manifests.find(pipeline.warehouse, report.data["snapshot"])
    assert found is not None
    populations = learned_rows.read_populations(pipeline.warehouse, found)
    assert set(populations) == {None, '["even"]', '["odd"]'} and populations['["odd"]'].covariance.shape == (
        2,
        2,
    )
