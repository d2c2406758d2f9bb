"""What `init --quick` prints agrees with `pretrain` and the estimates of history that follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from jobs import estimate, ingest, init, pretrain
from jobs.core.settings import Settings
from kalman.evaluation.diagnostics import coverage
from tests.jobs.choosing.test_init import write_quiet_end


@pytest.mark.slow
@pytest.mark.spark
def test_nis_and_coverage_are_those_after_pretrain(tmp_path: Path) -> None:
    settings = Settings.load(str(tmp_path / "warehouse"), str(tmp_path / "models"), None)
    write_quiet_end(tmp_path / "walks.csv")
    said = init.run(
        settings, str(tmp_path / "walks.csv"), structure="level", quick=True, no_picture=True
    ).data
    ingest.run(settings, "walks", [str(tmp_path / "walks.csv")])
    learned = pretrain.run(settings, "walks")
    estimate.run(settings, "walks")
    table = DeltaTable(str(tmp_path / "warehouse" / "estimates_history" / "walks")).to_pyarrow_table()
    nis = table["nis"].cast(pa.float64()).to_numpy()
    assert said["nis_per_component"] == pytest.approx(np.nanmean(nis), rel=0.03)
    assert said["inside"] == pytest.approx(coverage(nis[np.isfinite(nis)]), abs=0.01)
    assert said["fits"] is not any("does not fit" in line for line in learned.lines)
