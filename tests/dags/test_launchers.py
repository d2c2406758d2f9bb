"""How a driver is submitted where it runs in a cluster: the command alone, as no such cluster is here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs.launch import LAUNCH_VARIABLE
from kalman_dags.launchers import ClusterLauncher, ProcessLauncher, Work, launcher
from kalman_dags.operator import application

pytestmark = pytest.mark.airflow


def connect(monkeypatch: pytest.MonkeyPatch, **connection: object) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", **connection}))


def test_a_driver_in_a_cluster_is_submitted_with_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only YARN: the provider's hook asks for a Kubernetes client before it makes a command for that.
    connect(monkeypatch, host="yarn", extra=json.dumps({"deploy-mode": "cluster"}))
    chosen = launcher()
    assert isinstance(chosen, ClusterLauncher)
    plain = chosen.hook("hdfs://tables/kalman", Work("nile", 10.0), "token")
    words = plain._build_spark_submit_command(application("stream"))
    jars = words[words.index("--jars") + 1].split(",")
    assert "delta" in {Path(jar).name.partition("-")[0] for jar in jars}
    monkeypatch.setattr("kalman_dags.launchers.optional_jars", lambda name: [f"/jars/{name}.jar"])
    hook = chosen.hook("hdfs://tables/kalman", Work("nile", 10.0, kafka=True), "token")
    words = hook._build_spark_submit_command(application("stream"))
    assert words[words.index("--jars") + 1].split(",") == [*jars, "/jars/kafka.jar"]
    assert words[words.index("--master") + 1] == "yarn"
    assert words[words.index("--deploy-mode") + 1] == "cluster"
    settings = {words[i + 1] for i, word in enumerate(words) if word == "--conf"}
    assert "spark.yarn.submit.waitAppCompletion=false" in settings
    assert f"spark.yarn.appMasterEnv.{LAUNCH_VARIABLE}=token" in settings
    after = words[words.index(application("stream")) + 1 :]
    assert after == ["--warehouse", "hdfs://tables/kalman", "--quiet", "--model", "nile", "--trigger", "10"]


def test_elsewhere_the_driver_is_a_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, host="spark://master", port=7077)
    assert launcher() == ProcessLauncher("spark://master:7077")
