"""`compare` over landed rows: the same ranking as over the files that landed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from jobs import compare, ingest
from tests.jobs.support.pipeline import Pipeline


def test_landed_rows_rank_as_their_file_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    at = pd.date_range("2024-01-01", periods=60, freq="1D").strftime("%Y-%m-%d")
    frame = pd.concat(
        pd.DataFrame({"at": at, "who": f"k{k}", "y": np.cumsum(rng.normal(size=60)) + rng.normal(size=60)})
        for k in range(6)
    )
    frame.to_csv(tmp_path / "rows.csv", index=False)
    spec = {
        "name": "walk",
        "version": 1,
        "key": ["who"],
        "time": "at",
        "time_unit": "day",
        "measurement": ["y"],
        "states": ["level"],
        "process": {"kind": "random_walk", "variance": 1.0},
        "observation": {"R": [[1.0]]},
        "initial": {"diffuse": True},
        "learn": {"parameters": ["variance", "R"]},
    }
    pipeline = Pipeline(tmp_path, spec)
    still = {**spec, "name": "still", "process": {"kind": "random_walk", "variance": 0.01}, "learn": None}
    folder = Path(pipeline.settings.models)
    (folder / "still.yaml").write_text(yaml.safe_dump(still))
    ingest.run(pipeline.settings, "walk", [str(tmp_path / "rows.csv")])
    landed = compare.run(pipeline.settings, ["walk", "still"])
    file = compare.run(pipeline.settings, ["walk", "still"], str(tmp_path / "rows.csv"))
    assert landed.data["best"] == "walk" and landed.data["equals"] == ["walk"]
    assert landed.data["keys"] == 6 and landed.data["rows"] == 6 * 18
    for one, other in zip(landed.data["models"], file.data["models"], strict=True):
        assert np.isclose(one["mean"], other["mean"], rtol=1e-12)
    some = compare.run(pipeline.settings, ["walk", "still"], keys=3, rows=50)
    assert (some.data["keys"], some.data["rows"]) == (3, 45)
