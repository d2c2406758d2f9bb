"""The Kafka demo: its feed, and the whole of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from demo.kafka_feed import DEVICES, chunks, read, send_lines
from demo.kafka_run import table
from demo.ports import listens
from jobs.spark.kafka import Bounds, read_topic
from tests.jobs.support.feeds import Feed

ROOT = Path(__file__).resolve().parents[2]


def test_the_feed_has_each_reading_once_its_partitions_out_of_step_and_each_key_in_order() -> None:
    made = chunks(history=1, streamed=3, minutes=5, seed=3)
    assert len(made) == 1 + 3 + 1
    frames = [chunk.frame.assign(chunk=number) for number, chunk in enumerate(made)]
    whole = pd.concat(frames, ignore_index=True)
    good = whole.loc[whole["value"].str.contains('"value": -?[0-9.]+}$', na=False)]
    good = good.loc[~good["value"].str.contains("soon")]
    assert len(whole) - len(good) == sum(chunk.poison for chunk in made) > 0
    rows = pd.DataFrame([json.loads(value) for value in good["value"]])
    rows = rows.assign(partition=good["partition"].to_numpy(), chunk=good["chunk"].to_numpy())
    assert len(rows) == 4 * 5 * DEVICES == len(rows[["device", "at"]].drop_duplicates())
    assert len(rows[["device", "partition"]].drop_duplicates()) == DEVICES
    assert all(times.is_monotonic_increasing for _, times in rows.groupby("device")["at"])
    last = rows.drop_duplicates(["chunk", "partition"], keep="last")
    newest = dict(zip(zip(last["chunk"], last["partition"], strict=True), last["at"], strict=True))
    assert newest[2, 1] > newest[2, 0] and newest[0, 1] == newest[0, 0]


def test_the_table_names_what_is_counted() -> None:
    result = {
        "messages_sent": 1000, "rows_estimated": 990, "rows_quarantined": 10, "messages_out": 991,
        "messages_out_twice": 1, "keys": 4, "broker_kills": 1, "max_abs_difference": 0.0,
    }  # fmt: skip
    lines = table(result)
    assert lines[0].split("  ")[0] == "messages sent to the stream" and lines[0].endswith(" 1,000")
    assert lines[3].endswith("991 (1 twice)") and lines[-1].endswith("pass  0")


@pytest.mark.slow
@pytest.mark.spark
def test_lines_are_sent_in_their_order_to_a_topic_that_is_made(feed: Feed) -> None:
    for lines in (["one", "two"], ["three"]):
        assert send_lines(feed.spark, "by_hand", lines) == len(lines)
    assert read(feed.spark, "by_hand")["value"].tolist() == ["one", "two", "three"]
    assert read_topic(feed.spark, "by_hand").bounds == {0: Bounds(0, 3, 3)}


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_broker_of_the_command_line_ends_with_its_command(tmp_path: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "demo.broker", str(tmp_path / "kafka")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        assert listens(port)
        process.send_signal(end)
        assert process.wait(timeout=60) == 0
    assert not listens(port)


@pytest.mark.soak
def test_the_kafka_demo(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "demo.kafka_run", "--folder", str(tmp_path / "demo")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "demo" / "result.json").read_text())
    assert result["problems"] == [] and result["max_abs_difference"] == 0.0
    assert result["messages_sent"] == result["rows_estimated"] + result["rows_quarantined"]
