"""A new version is judged by the real verbs on no row, on ten rows of one key, and on enough rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from jobs import promote, upgrade
from jobs.core.errors import ALREADY_RUNNING, RUN_FAILED, UserError
from jobs.lineage.generations import read_live_lineage
from jobs.upgrades.statistics import BLOCKS, compute_gain
from tests.jobs.support.pipeline import Pipeline, random_walk_spec, streaming
from tests.jobs.upgrades.test_paired import sums_of

pytestmark = pytest.mark.spark

START = pd.Timestamp("2026-01-01", tz="UTC")


def rows_of(keys: int, count: int, begin: int) -> pd.DataFrame:
    """Return rows of keys (K) at `count` common times, a minute apart, from minute `begin` on."""
    rng = np.random.default_rng(begin)
    level = np.cumsum(rng.standard_normal((keys, count)), axis=1)
    noise = rng.standard_normal((2, keys, count))
    return pd.DataFrame(
        {
            "id": np.repeat(np.arange(1, keys + 1), count),
            "at": np.tile(START + pd.to_timedelta(np.arange(begin, begin + count), unit="min"), keys),
            "a": (level + noise[0]).ravel(),
            "b": (0.5 * level + noise[1]).ravel(),
        }
    )


def other_noise(version: int, **limits: Any) -> dict[str, Any]:
    """Return the model with a little less noise in Q."""
    process = {"kind": "local_linear_trend", "level_variance": 0.48, "slope_variance": 0.01}
    return random_walk_spec(version=version, process=process, upgrade=limits)


def live(pipeline: Pipeline) -> str:
    return read_live_lineage(pipeline.warehouse, "walk")[0].generation


def refused(pipeline: Pipeline, verb: Any, **options: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        verb.run(pipeline.settings, "walk", **options)
    assert live(pipeline) == "walk-g0001"
    return caught.value


@pytest.mark.slow
def test_nothing_is_promoted_on_nothing_and_noise_is_no_verdict(tmp_path: Path) -> None:
    pipeline = streaming(tmp_path, rows_of(5, 40, 0), rows_of(5, 3, 40))
    pipeline.write_spec(other_noise(2, rows=0, loss=0.0))

    # No row has come since the shadow began.
    begun = upgrade.run(pipeline.settings, "walk", promote=False)
    assert (begun.data["generation"], begun.data["answer"]) == ("walk-g0002", "not enough to tell")
    assert "verdict: not good: there is nothing to compare: no row has been estimated by both" in begun.lines
    assert "it stays in shadow, and `kalman-pipeline promote --model walk` refuses it: " in begun.lines[-2]
    for verb in (upgrade, promote):
        error = refused(pipeline, verb)
        assert "walk-g0002 was not promoted; there is nothing to compare" in error.message
        assert "`kalman-pipeline promote --model walk --force`" in error.message
        assert error.exit_code == RUN_FAILED

    # Ten rows of one key.
    pipeline.land(rows_of(1, 10, 43))
    pipeline.stream()
    error = refused(pipeline, upgrade, needed=True)
    assert (
        "not enough to tell: 10 rows of 1 key span too little time to know the noise; about " in error.message
    )
    assert error.exit_code == ALREADY_RUNNING  # to come again

    # Enough rows, and no loss that matters.
    pipeline.write_spec(other_noise(2))
    pipeline.land(rows_of(12, 100, 53))
    pipeline.stream()
    done = upgrade.run(pipeline.settings, "walk")
    assert done.data["promoted"] and live(pipeline) == "walk-g0002"
    check_gain(pipeline, done.data["comparison"]["gain"])
    page = Path(done.data["report"])
    assert done.data["answer"] == json.loads(page.with_suffix(".json").read_text())["answer"] == "not worse"
    (line,) = [one for one in done.lines if one.startswith("gain per row: ")]
    assert line.endswith("over 1,210 rows of 12 keys") and "95 % interval from -0.00" in line
    assert "The new version predicts no worse than is allowed. Gain per row: " in page.read_text()

    # A worse one, by force.
    observation = {"H": [[1.0, 0.0], [0.5, 1.0]], "R": [[400.0, 0.0], [0.0, 400.0]]}
    pipeline.write_spec(random_walk_spec(version=3, observation=observation))
    upgrade.run(pipeline.settings, "walk", promote=False)
    pipeline.land(rows_of(12, 60, 153))
    pipeline.stream()
    with pytest.raises(UserError, match="walk-g0003 was not promoted; it predicts worse: .* 0.01 allowed"):
        upgrade.run(pipeline.settings, "walk")
    forced = promote.run(pipeline.settings, "walk", force=True)
    assert forced.lines[0] == "forced: it was not compared" and live(pipeline) == "walk-g0003"


def check_gain(pipeline: Pipeline, found: dict[str, Any]) -> None:
    """Check a gain against one from the estimates themselves, each row of each key by pandas."""
    table = pipeline.estimates()
    table = table[table["event_time"] >= (START + pd.Timedelta(43, "min")).tz_localize(None)]
    scores: Any = table.pivot(index=["key", "event_time"], columns="generation", values="log_likelihood")
    gains = (scores["walk-g0002"] - scores["walk-g0001"]).unstack("event_time")
    assert gains.shape == (12, 110)
    # Of the same blocks of time: those of BLOCKS quantiles over the rows.
    times = np.repeat(gains.columns.to_numpy(), gains.notna().sum().to_numpy())
    edges = np.unique(
        np.quantile(times.astype("int64"), np.arange(1, BLOCKS) / BLOCKS, method="inverted_cdf")
    )
    block = np.searchsorted(edges, gains.columns.to_numpy().astype("int64"))
    filled = gains.fillna(0.0).to_numpy()
    rows = gains.notna().to_numpy()
    sums = sums_of(filled)._replace(
        rows=int(rows.sum()),
        block_rows=np.bincount(block, rows.sum(0)),
        block_gain=np.bincount(block, filled.sum(0)),
    )
    n, total = rows.sum(1).astype(float), filled.sum(1)
    sums = sums._replace(
        moments=sums.moments._replace(rows2=float(rows.sum())),
        by_key=sums.by_key._replace(gain_rows=float(total @ n), rows2=float(n @ n)),
        rows4=float((n**4).sum()),
    )
    expected = compute_gain(sums)._asdict()
    assert found.keys() == expected.keys() and found["rows"] == 1210 and found["low"] is not None
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
