"""A driver in Kubernetes: submitted by the launcher, killed there, followed by the next, stopped by request.

The API server is the real one, with its rules of who may do what. Its pods are processes of this machine
(`tests/support/kubernetes_node.py`).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException

from jobs.supervision.driver_status import STARTING
from kalman_dags.operator import KalmanOperator
from tests.dags.conftest import ROOT
from tests.jobs.support.pipeline import Pipeline, random_rows, random_walk_spec
from tests.support.airflow_api import wait_for
from tests.support.in_cluster import PATIENCE, ClusterStream, set_environment
from tests.support.kubernetes_node import SUBMITTER, ApiServer, Node, Pod

PROGRAMS = {name: shutil.which(os.environ.get(name) or "") or "" for name in ("KUBE_APISERVER", "ETCD")}

pytestmark = [
    pytest.mark.airflow,
    pytest.mark.spark,
    pytest.mark.soak,
    pytest.mark.skipif(
        not all(PROGRAMS.values()), reason="KUBE_APISERVER and ETCD name no programs of Kubernetes"
    ),
    pytest.mark.skipif(
        find_spec("kubernetes") is None,
        reason="needs the extra: pip install -c requirements/lock.txt -e '.[kubernetes]'",
    ),
]

NAMESPACE, ACCOUNT, CLAIM = "streams", "driver", "tables"
IMAGE = "kalman-pipeline:test"
SUBMITS = {
    "pods": ["get", "watch", "create", "delete"],
    **{what: ["create", "patch"] for what in ("services", "configmaps", "networkpolicies")},
}
"""What the user that submits may do. `spark-submit` deletes a driver whose settings it could not leave there."""
DRIVES = {
    what: ["get", "list", "watch", "create", "delete", "deletecollection"]
    for what in ("pods", "services", "configmaps", "persistentvolumeclaims")
}
"""What the driver's service account may do."""


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path / "kubernetes", PROGRAMS["KUBE_APISERVER"], PROGRAMS["ETCD"]) as server:
        server.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for account in ("default", ACCOUNT):
            server.create(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": account}})
        driver = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
        allow(server, {"kind": "User", "name": SUBMITTER}, SUBMITS)
        allow(server, driver, DRIVES)
        yield server


def allow(server: ApiServer, who: dict[str, str], verbs: dict[str, list[str]]) -> None:
    """Let a user, or a service account, do these things in the namespace."""
    path, name = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}", {"name": who["name"]}
    rules = [
        {"apiGroups": ["", "networking.k8s.io"], "resources": [what], "verbs": may}
        for what, may in verbs.items()
    ]
    server.create(f"{path}/roles", {"metadata": name, "rules": rules})
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", **name}
    server.create(f"{path}/rolebindings", {"metadata": name, "roleRef": role, "subjects": [who]})


@pytest.fixture
def node(api: ApiServer, tmp_path: Path) -> Iterator[Node]:
    image = {
        name: os.environ[name] for name in ("PATH", "JAVA_HOME", "OMP_NUM_THREADS") if name in os.environ
    }
    image |= {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with Node(api, NAMESPACE, image, {CLAIM: tmp_path}) as one:
        yield one
        for pod in one.pods.values():
            print(f"--- {pod.name}\n{pod.said[-6000:]}")


def test_a_driver_in_kubernetes(
    tmp_path: Path, api: ApiServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = ClusterStream(tmp_path)
    connect(monkeypatch, api, walk.pipeline)
    assert walk.start().state == STARTING  # the submission has not waited for it
    walk.take_in(3)
    (first,) = walk.drives()
    (pod,) = of_role(node, "driver")
    assert first.owner.host == pod.name
    check(pod.spec, tmp_path)
    assert of_role(node, "executor")
    walk.kill(PATIENCE)
    assert phase(api, pod) == "Failed"
    walk.land_rest()
    assert walk.start().state == STARTING
    walk.take_in(5)
    walk.stop()
    _, second = of_role(node, "driver")
    wait_for(lambda: phase(api, second) == "Succeeded", 60, "the end of its pod")
    walk.compare()


def test_a_task_in_kubernetes(
    tmp_path: Path, api: ApiServer, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(tmp_path, random_walk_spec())
    pipeline.land(random_rows(1)[0])
    connect(monkeypatch, api, pipeline)

    def run(model: str) -> None:
        task = KalmanOperator(task_id="pretrain", verb="pretrain", options={"--model": model})
        task.execute({"ti": SimpleNamespace(try_number=1, max_tries=0)})  # pyright: ignore[reportArgumentType]

    run("walk")
    assert pipeline.warehouse.read("snapshots").count() > 0
    (pod,) = of_role(node, "driver")
    assert phase(api, pod) == "Succeeded"
    with pytest.raises(AirflowFailException):
        run("none_such")


def connect(monkeypatch: pytest.MonkeyPatch, api: ApiServer, pipeline: Pipeline) -> None:
    """Let tasks submit to this server: the connection, Spark's own settings, and who one is there."""
    extra = {"deploy-mode": "cluster", "namespace": NAMESPACE}
    connection = {"conn_type": "spark", "host": f"k8s://{api.address}", "extra": extra}
    defaults = {
        "spark.kubernetes.container.image": IMAGE,
        "spark.kubernetes.authenticate.driver.serviceAccountName": ACCOUNT,
        "spark.executor.instances": "1",
        "spark.executor.cores": "2",
        # Pods of a cluster would reach the server by the name that it has there.
        "spark.kubernetes.driver.master": api.address,
        "spark.ui.enabled": "false",
    }
    for role in ("driver", "executor"):
        volume = f"spark.kubernetes.{role}.volumes.persistentVolumeClaim.{CLAIM}"
        defaults[f"{volume}.mount.path"] = str(pipeline.folder)
        defaults[f"{volume}.options.claimName"] = CLAIM
    folder = pipeline.folder / "conf"
    folder.mkdir()
    (folder / "spark-defaults.conf").write_text(
        "".join(f"{name} {value}\n" for name, value in defaults.items())
    )
    variables = {"KUBECONFIG": str(api.kubeconfig(NAMESPACE)), "SPARK_CONF_DIR": str(folder)}
    set_environment(monkeypatch, pipeline, connection, **variables)


def of_role(node: Node, role: str) -> list[Pod]:
    """Return the pods of drivers, or of executors, in the order of their beginning."""
    return [pod for pod in node.pods.values() if pod.spec["metadata"]["labels"]["spark-role"] == role]


def phase(api: ApiServer, pod: Pod) -> str:
    return api.call(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}").json()["status"]["phase"]


def check(spec: dict[str, Any], folder: Path) -> None:
    """Check that a driver's pod is what was asked for."""
    pod, (container,) = spec["spec"], spec["spec"]["containers"]
    assert pod["serviceAccountName"] == ACCOUNT and pod["restartPolicy"] == "Never"
    assert container["image"] == IMAGE
    assert container["args"][0] == "driver"
    assert f"local://{ROOT / 'jobs' / 'stream.py'}" in container["args"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    assert {"KALMAN_WAREHOUSE", "KALMAN_MODELS", "KALMAN_LAUNCH"} <= given.keys()
    assert given["PYSPARK_DRIVER_PYTHON"] == sys.executable
    (volume,) = (one for one in pod["volumes"] if "persistentVolumeClaim" in one)
    assert volume["persistentVolumeClaim"]["claimName"] == CLAIM
    assert (volume["name"], str(folder)) in {
        (one["name"], one["mountPath"]) for one in container["volumeMounts"]
    }
