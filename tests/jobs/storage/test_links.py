"""Lock files and results are never written through a link that somebody has laid; busy machines and rates in words."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs.core.errors import RUN_FAILED, UserError, show
from jobs.core.report import format_rate
from jobs.lineage.leases import stream_lock
from jobs.offline.filtering import save
from jobs.spark.queries import find_cause
from jobs.spark.warehouse import Warehouse
from jobs.specs.model_spec import ModelSpec
from jobs.storage.tables import refuse_absent
from tests.jobs.support.pipeline import random_walk_spec


def test_a_link_in_place_of_a_lock_is_refused_and_its_target_stays(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("text")
    locks = tmp_path / "warehouse" / "_locks"
    locks.mkdir(parents=True)
    no_spark: Any = None
    warehouse = Warehouse(no_spark, str(tmp_path / "warehouse"))
    for name in ("ingest-walk.lock", "stream-walk.lock"):
        (locks / name).symlink_to(target)
    with (
        pytest.raises(UserError, match=r"ingest-walk.lock: is a link.*remove it"),
        warehouse.lock("ingest-walk"),
    ):
        pass
    with pytest.raises(UserError, match=r"stream-walk.lock: is a link"), stream_lock(warehouse.root, "walk"):
        pass
    assert target.read_text() == "text"
    with warehouse.lock("other"), pytest.raises(BlockingIOError):
        import fcntl

        with open(locks / "other.lock") as second:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_results_are_not_written_through_a_link(tmp_path: Path) -> None:
    target, out = tmp_path / "precious", tmp_path / "out.csv"
    target.write_text("text")
    (tmp_path / f".{out.name}.{os.getpid()}.part").symlink_to(target)
    out.symlink_to(target)
    save(out, {"a": pa.array([1.5])})
    assert target.read_text() == "text"
    assert not out.is_symlink() and out.read_text() == '"a"\n1.5\n'
    assert out.stat().st_mode & 0o777 == 0o666 & ~_mask()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["precious", "out.csv", f".{out.name}.{os.getpid()}.part"]
    )


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_busy_machine_is_told_in_a_sentence() -> None:
    try:
        try:
            raise OSError("Timed out while waiting for the Python worker to connect back")
        except OSError as cause:
            raise RuntimeError(
                "org.apache.spark.SparkException: Python worker failed to connect back."
            ) from cause
    except RuntimeError as error:
        out = io.StringIO()
        assert show(error, stream=out) == RUN_FAILED
    busy = (
        "the machine is too busy: a Python process that Spark started did not answer in time: run the same command "
        "again, if possible with less beside it; nothing is lost"
    )
    assert out.getvalue() == f"error: {busy}\n"
    failed = RuntimeError("Python worker failed to connect back.\n=== Streaming Query ===\nIdentifier: rooms")
    assert find_cause(failed) == busy


@pytest.mark.parametrize(
    ("rows", "seconds", "said"),
    [
        (1, 14.2, "4.2 rows/min"),
        (1, 7200, "0.5 rows/h"),
        (0, 3, "0.0 rows/h"),
        (30, 6, "5.0 rows/s"),
        (1_000_000, 2, "500,000 rows/s"),
    ],
)
def test_a_rate_is_never_a_rounded_nothing(rows: int, seconds: float, said: str) -> None:
    assert format_rate(rows, seconds) == said


def test_measurements_without_a_column_that_the_spec_has_now_are_told_with_what_they_have() -> None:
    spec = ModelSpec.model_validate(random_walk_spec(key=["station"]))
    with pytest.raises(UserError) as error:
        refuse_absent(("river", "AT", "a", "b", "_origin"), spec.name, spec.columns)
    assert (
        "have no column station, which the spec names now (they have river, AT, a, b): put"
        in error.value.message
    )
    assert (
        "a name of its own" in error.value.message and "ALTER TABLE (docs/upgrades.md)" in error.value.message
    )
