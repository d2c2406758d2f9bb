"""Java's settings by the size of the measurements, as the log of a local warehouse tells it."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from jobs.spark import before_spark
from jobs.spark.before_spark import java_conf
from jobs.spark.conf import quick_java_conf


def test_few_measurements_need_no_optimising_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = str(tmp_path)
    assert java_conf(root, "walk") == {}  # nothing is known
    write_deltalake(str(tmp_path / "measurements" / "walk"), pa.table({"id": [1, 2]}))
    assert java_conf(root, "walk") == quick_java_conf()
    assert "TieredStopAtLevel=1" in java_conf(root, "walk")["spark.driver.extraJavaOptions"]
    monkeypatch.setattr(before_spark, "QUICK_BYTES", 100)
    assert java_conf(root, "walk") == {}
