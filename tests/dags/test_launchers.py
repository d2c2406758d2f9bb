"""How a driver is submitted where it runs in a cluster: the command alone, without a cluster."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from airflow.providers.apache.spark.hooks import spark_submit
from airflow.sdk.exceptions import AirflowException

from jobs.core.errors import UserError
from jobs.supervision.driver_log import DriverLog
from jobs.supervision.driver_status import read_driver_status
from jobs.supervision.launcher import LAUNCH_VARIABLE
from kalman_dags.submit import KUBERNETES_PROVIDER, build_spark_environment, find_application
from kalman_dags.supervision.launchers import ClusterLauncher, ProcessLauncher, Work, build_launcher
from tests.support.object_store import SECRET, environment

pytestmark = pytest.mark.airflow


def connect(monkeypatch: pytest.MonkeyPatch, **connection: object) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", **connection}))


def test_a_driver_in_a_cluster_is_submitted_with_all_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, host="yarn", extra=json.dumps({"deploy-mode": "cluster"}))
    chosen = build_launcher()
    assert isinstance(chosen, ClusterLauncher)
    plain = chosen.hook("/tables/kalman", Work("nile", 10.0), "token")
    words = plain._build_spark_submit_command(find_application("stream"))
    jars = words[words.index("--jars") + 1].split(",")
    assert "delta" in {Path(jar).name.partition("-")[0] for jar in jars}
    monkeypatch.setattr(
        "kalman_dags.supervision.launchers.fetch_optional_jars", lambda name: [f"/jars/{name}.jar"]
    )
    hook = chosen.hook("/tables/kalman", Work("nile", 10.0, kafka=True), "token")
    words = hook._build_spark_submit_command(find_application("stream"))
    assert words[words.index("--jars") + 1].split(",") == [*jars, "/jars/kafka.jar"]
    assert words[words.index("--master") + 1] == "yarn"
    assert words[words.index("--deploy-mode") + 1] == "cluster"
    settings = {words[i + 1] for i, word in enumerate(words) if word == "--conf"}
    assert "spark.yarn.submit.waitAppCompletion=false" in settings
    assert f"spark.yarn.appMasterEnv.{LAUNCH_VARIABLE}=token" in settings
    after = words[words.index(find_application("stream")) + 1 :]
    assert after == ["--warehouse=/tables/kalman", "--quiet", "--model=nile", "--trigger=10"]


def test_a_driver_in_a_cluster_gets_the_client_and_the_address_of_its_store_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connect(monkeypatch, host="yarn", extra=json.dumps({"deploy-mode": "cluster"}))
    monkeypatch.setattr("kalman_dags.supervision.launchers.store_jars", lambda root: ["/jars/client.jar"])
    for name, value in environment("http://store:9000").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "a-token-of-the-tests")
    hook = build_launcher().hook("s3a://bucket/kalman", Work("nile", 10.0), "token")  # type: ignore[attr-defined]
    words = hook._build_spark_submit_command(find_application("stream"))
    assert "/jars/client.jar" in words[words.index("--jars") + 1].split(",")
    settings = {words[i + 1] for i, word in enumerate(words) if word == "--conf"}
    assert "spark.delta.logStore.s3a.impl=kalman.stores.ConditionalLogStore" in settings
    for where in ("yarn.appMasterEnv", "kubernetes.driverEnv", "executorEnv"):
        assert f"spark.{where}.AWS_ENDPOINT_URL=http://store:9000" in settings
        assert f"spark.{where}.AWS_REGION=us-east-1" in settings
    assert SECRET not in " ".join(words) and "a-token-of-the-tests" not in " ".join(words)


def test_elsewhere_the_driver_is_a_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, host="spark://master", port=7077)
    assert build_launcher() == ProcessLauncher("spark://master:7077")


@pytest.fixture
def kubernetes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection to Kubernetes, with the provider's part for it as if it were installed."""
    connect(monkeypatch, host="k8s://https://master:6443", extra=json.dumps({"deploy-mode": "cluster"}))
    monkeypatch.setattr("kalman_dags.submit.version", lambda name: "1")
    monkeypatch.setattr(spark_submit, "kube_client", object(), raising=False)


def submit_with(monkeypatch: pytest.MonkeyPatch, home: Path, body: str) -> None:
    """Let spark-submit be a script."""
    program = home / "bin" / "spark-submit"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    given = {**build_spark_environment(), "SPARK_HOME": str(home)}
    monkeypatch.setattr("kalman_dags.supervision.launchers.build_spark_environment", lambda: given)


def test_in_kubernetes_all_is_in_the_image_and_nobody_waits_for_the_driver(
    kubernetes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_with(monkeypatch, tmp_path, f'printf "%s\\n" "$@" > {tmp_path}/words')
    root = str(tmp_path / "warehouse")
    launch = build_launcher().start(root, Work("nile", 10.0), "")
    words = (tmp_path / "words").read_text().splitlines()
    assert words[words.index("--master") + 1] == "k8s://https://master:6443"
    assert f"local://{find_application('stream')}" in words
    assert all(jar.startswith("local:///") for jar in words[words.index("--jars") + 1].split(","))
    assert "spark.kubernetes.submission.waitAppCompletion=false" in words
    assert f"spark.kubernetes.driverEnv.{LAUNCH_VARIABLE}={launch.token}" in words
    assert read_driver_status(DriverLog.at(root, "nile")).driven


def test_a_driver_that_could_not_be_submitted_is_not_waited_for(
    kubernetes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_with(monkeypatch, tmp_path, "echo no such cluster; exit 1")
    root = str(tmp_path / "warehouse")
    with pytest.raises(AirflowException, match="no such cluster"):
        build_launcher().start(root, Work("nile", 10.0), "")
    sight = read_driver_status(DriverLog.at(root, "nile"))
    assert not sight.driven and "could not be submitted" in sight.text()


def test_kubernetes_without_the_provider_s_part_for_it_says_what_to_install(
    kubernetes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("kalman_dags.submit.version", missing)
    with pytest.raises(UserError, match=KUBERNETES_PROVIDER):
        build_launcher().start(str(tmp_path / "warehouse"), Work("nile", 10.0), "")
    assert not (tmp_path / "warehouse").exists()
