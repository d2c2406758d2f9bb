"""A warehouse with an odd path, and one that was moved: every verb that reads states finds them, or says why not."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import export, verify
from jobs.core.errors import UserError
from tests.jobs.support.pipeline import random_rows, streaming

pytestmark = pytest.mark.spark

ODD = "a b\u00e9#?+[x]:'\"{y,z}*|^<>$~!&;=,(@)%\U0001f40b"


@pytest.mark.slow
def test_states_are_read_wherever_the_warehouse_is_and_a_moved_one_says_how_it_goes_on(
    tmp_path: Path,
) -> None:
    days = random_rows(3, rows=40)
    (tmp_path / ODD).mkdir()
    pipeline = streaming(tmp_path / ODD, *days[:2])
    found = verify.run(pipeline.settings, "walk", share="100%").data
    assert found["differences"] == 0 and found["counts"]["landed"] == len(days[1])
    snapshot = export.run(pipeline.settings, "walk").data["snapshot"]

    old, new = Path(pipeline.settings.warehouse), tmp_path / "new place" / "warehouse"
    new.parent.mkdir()
    old.rename(new)
    pipeline.settings = replace(pipeline.settings, warehouse=str(new))
    pipeline.land(days[2])
    for run in (pipeline.stream, lambda: export.run(pipeline.settings, "walk")):
        with pytest.raises(UserError) as told:
            run()
        assert f"the warehouse was moved from {old} to {new}" in told.value.message
        assert f"stream --model walk --adopt {snapshot}" in told.value.message
        assert not old.exists(), "nothing is made at the old place"
    command = told.value.message.split("`")[1]
    assert shlex.split(command) == ["ln", "-s", str(new), str(old)]
    subprocess.run(command, shell=True, check=True)
    assert pipeline.stream().data["rows"] == len(days[2])
    old.unlink()
    adopted = pipeline.stream(adopt=snapshot).data
    assert adopted["began"] and adopted["rows"] == len(days[2])
