"""Functions, gates and starts from columns: the same bits in the stream and without Spark; a null is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import filter as offline
from jobs import forecast, inputs
from jobs.specs.model_spec import SpecError
from jobs.state.kernel import load_checked_spec
from tests.jobs.support.pipeline import (
    Pipeline,
    assert_bit_equal,
    ordered,
    random_rows,
    random_walk_spec,
    since,
)

MODULE = '''
"""Growth of a level with a column, seen through a gain that belongs to the key."""
import numpy as np

def move(x, dt, u, w):
    return np.stack([x[0] * np.exp(0.01 * w[0]) + 0.01 * dt * x[1], 0.99 * x[1] + 0.05 * u[0] + w[1]])

def see(x, u):
    return np.stack([u[2] * x[0] + np.tanh(u[0] * x[1]), x[1] + 0.1 * x[0]])
'''
DRIVEN: dict[str, Any] = {
    "control": ["push", "trust"],
    "inputs": {"columns": {"gain": "gain", "bias": "bias"}},
    "process": {
        "kind": "function",
        "f": "driven:move",
        "Q": [[0.5, 0.1], [0.1, 0.2]],
        "offset": [0.0, "push"],
    },
    "observation": {"h": "driven:see", "R": [[1.0, 0.3], [0.3, 2.0]], "offset": ["bias", 0.0]},
    "initial": {"mean": ["bias", "push"], "covariance": [["gain", 0.0], [0.0, 1.0]]},
    "robust": {"gate": {"probability": "trust"}},
}


def pipeline_of(folder: Path, **changes: Any) -> Pipeline:
    pipeline = Pipeline(folder, random_walk_spec())
    (pipeline.settings.models / "driven.py").write_text(MODULE)
    pipeline.write_spec(random_walk_spec(**{**DRIVEN, **changes}))
    return pipeline


def days_of(count: int) -> list[pd.DataFrame]:
    rng = np.random.default_rng(5)
    return [
        frame.assign(push=rng.normal(size=len(frame)), trust=rng.uniform(0.9, 0.9999, len(frame)))
        for frame in random_rows(count, rows=80)
    ]


def inputs_file(folder: Path) -> Path:
    rng = np.random.default_rng(7)
    path = folder / "inputs.csv"
    table = {"id": np.arange(60), "gain": rng.uniform(0.5, 2.0, 60), "bias": rng.normal(size=60)}
    pd.DataFrame(table).to_csv(path, index=False)
    return path


@pytest.mark.spark
@pytest.mark.slow
def test_stream_batch_and_the_filter_alone_agree_to_the_bit(tmp_path: Path) -> None:
    pipeline = pipeline_of(tmp_path, filter="unscented")
    days = days_of(3)
    table = inputs_file(tmp_path)
    inputs.run(pipeline.settings, "walk", str(table))
    pipeline.land(days[0])
    pipeline.pretrain()
    missing = days[1].assign(push=days[1]["push"].where(days[1].index != 5))
    landed = pipeline.land(missing)
    assert landed.data["quarantined"] == 1  # an input cannot be guessed
    pipeline.land(days[2])
    reasons = [row["reason"] for row in pipeline.warehouse.read("quarantine").collect()]
    assert len(reasons) == 1 and "control push: missing" in reasons[0]
    pipeline.stream()
    found = pipeline.estimates()
    assert len(found) == len(days[1]) - 1 + len(days[2])
    rows, out = tmp_path / "rows.parquet", tmp_path / "out.parquet"
    pd.concat([days[0], missing, days[2]]).to_parquet(rows, index=False)
    offline.run(pipeline.settings, "walk", str(rows), str(out), inputs=str(table))
    alone: Any = pd.read_parquet(out).rename(columns={"id": "key", "at": "event_time"})
    alone = alone[~alone["flag"].astype(str).str.startswith("rejected")]
    alone["event_time"] = alone["event_time"].dt.tz_localize(None)
    compared = ("key", "event_time", "mean", "covariance", "log_likelihood", "nis")
    expected = ordered(since(alone, days[1]).astype({"key": str}))
    assert_bit_equal(ordered(found.astype({"key": str})), expected, compared)


def test_forecasts_take_future_inputs(tmp_path: Path) -> None:
    """A forecast of rows to come is the filter's prediction of them, appended without measurements."""
    pipeline = pipeline_of(tmp_path, filter="extended")
    table, rows = inputs_file(tmp_path), days_of(1)[0].assign(trust=1.0 - 1e-12)
    past, future = tmp_path / "past.parquet", tmp_path / "future.csv"
    rows.to_parquet(past, index=False)
    later = rows.drop_duplicates("id", keep="last")[["id"]].assign(at=rows["at"].max() + pd.Timedelta("1h"))
    later["push"], later["trust"] = np.linspace(-1.0, 1.0, len(later)), 0.99
    later.to_csv(future, index=False)
    made, out = tmp_path / "forecast.parquet", tmp_path / "out.parquet"
    files: Any = {"future": str(future), "inputs": str(table)}
    forecast.run(pipeline.settings, "walk", str(past), str(made), steps=1, all_columns=True, **files)
    both = tmp_path / "both.parquet"
    pd.concat([rows, later.assign(a=np.nan, b=np.nan)]).to_parquet(both, index=False)
    offline.run(pipeline.settings, "walk", str(both), str(out), inputs=str(table))
    found: Any = pd.read_parquet(made).sort_values("id")
    expected: Any = pd.read_parquet(out)
    expected = expected[expected["at"] == later["at"].iloc[0]].sort_values("id")
    assert len(found) == len(later) == len(expected)
    np.testing.assert_array_equal(np.array(found["mean"].to_list()), np.array(expected["mean"].to_list()))
    np.testing.assert_array_equal(
        np.array(found["covariance"].to_list()), np.array(expected["covariance"].to_list())
    )
    bias = pd.read_csv(table).set_index("id")
    gain = bias.loc[found["id"]]
    x, push = np.array(found["mean"].to_list()), later.sort_values("id")["push"].to_numpy()
    seen = gain["gain"].to_numpy() * x[:, 0] + np.tanh(push * x[:, 1]) + gain["bias"].to_numpy()
    np.testing.assert_allclose(np.array(found["measurement_mean"].to_list())[:, 0], seen, rtol=1e-12)


def test_a_spec_says_which_arguments_a_function_lacks(tmp_path: Path) -> None:
    observation = {**DRIVEN["observation"], "h": "three_arguments:see"}
    pipeline = pipeline_of(tmp_path, filter="extended", observation=observation)
    text = MODULE.replace("def see(x, u)", "def see(x, u, gain)")
    (pipeline.settings.models / "three_arguments.py").write_text(text)
    said = r"observation.h.*takes \(x, u, gain\), and is called with \(x\), \(x, u\) or \(x, u, v\)"
    with pytest.raises(SpecError, match=said):
        load_checked_spec("walk", pipeline.settings.models)
