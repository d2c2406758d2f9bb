"""A snapshot in which each key has learned its own parameters is recomputed with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import verify
from jobs.verification import snapshot_check
from jobs.verification.snapshot_check import LearnedInitialStates, read_learned_states
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_each_key_is_recomputed_with_what_it_has_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = {"parameters": ["level_variance", "R"], "scope": "key"}
    spec: dict[str, Any] = {**random_walk_spec(), "learn": learn}
    parts = random_rows(2, keys=12, rows=200, text=True)
    pipeline = Pipeline(tmp_path, spec)
    pipeline.land(parts[0])
    pipeline.pretrain()
    pipeline.land(parts[1])
    pipeline.stream()
    report = verify.run(pipeline.settings, pipeline.name, share="100%")
    assert (report.data["not_verified"], report.data["outcome"], report.errors) == ([], "equal", [])
    assert report.data["counts"]["states"] > parts[0]["id"].nunique()

    def of_another_key(*arguments: Any) -> LearnedInitialStates:
        found = read_learned_states(*arguments)
        return LearnedInitialStates(found.kernel, found.identity, np.roll(found.values, 1, axis=1))

    monkeypatch.setattr("jobs.verification.snapshot_check.read_learned_states", of_another_key)
    report = verify.run(pipeline.settings, pipeline.name, share="100%")
    assert report.data["outcome"] == "different"
    monkeypatch.undo()
    monkeypatch.setattr(snapshot_check, "MOST_KEYS", 5)
    report = verify.run(pipeline.settings, pipeline.name, share="100%")
    assert any("take a smaller --share" in told for told in report.data["not_verified"])
