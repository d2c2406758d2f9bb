"""A warehouse on a real S3 store: the same bits as in a folder, and every commit once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, cli_environment
from tests.support import object_store
from tests.support.in_s3 import EACH

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def test_a_pipeline_in_s3_is_the_pipeline_in_a_folder(tmp_path: Path):
    """Landing, training, a stream that is resumed while answers are lost; and writers of two kinds on one table."""
    if object_store.program() is None:
        pytest.skip(object_store.HOW_TO_GET)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.in_s3", str(tmp_path)],
        cwd=ROOT,
        env=cli_environment(tmp_path / "unused", {"KALMAN_KAFKA_JARS": None}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            step = json.loads(line.removeprefix("FOUND "))
            found[step["step"]] = step
    assert done.returncode == 0, done.stderr[-3000:]
    assert found["compared"]["rows"] > 0
    assert not found["resumed"]["began"]
    assert found["resumed"]["lost_commits"] > 1 and found["resumed"]["lost_checkpoints"] > 1
    both = [0, *(100 * writer + i for writer in (1, 2, 3, 4) for i in range(EACH))]
    assert found["writers"]["failed"] == []
    assert found["writers"]["rows"] == both  # none is lost and none is there twice
    assert found["writers"]["version"] == len(both) - 1
    assert found["lost"] == {"step": "lost", "rows": [0, 1, 2, 3, 4], "lost": 4, "version": 4}
