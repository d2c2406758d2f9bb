"""Kubernetes with one node and without containers: its real API server, and processes in place of pods.

The server is `kube-apiserver` with `etcd` behind it. This module replaces scheduler, kubelet, image and cluster DNS. A
pod's container is the image's entrypoint as a process of this machine, with the container's environment, a separate
address in 127.0.0.0/8, and the mounted files in a separate folder.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import requests
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from demo.ports import HOST, free_ports
from demo.service import Service, end

ROOT = Path(__file__).resolve().parents[2]
ENTRYPOINT = ROOT / "scripts" / "entrypoint"
START_SECONDS = 120.0
GRACE_SECONDS = 30.0
ADMIN, SUBMITTER = "admin", "submitter"
NODE = "here"
PROPERTIES = "spark.properties"
SECRETS = "/var/run/secrets/kubernetes.io/serviceaccount"


class ApiServer(Service):
    """A Kubernetes API server; the submitter is a separate user with the rights of a `Role`."""

    def __init__(self, folder: Path, program: str, etcd: str) -> None:
        self.folder, self._program, self._etcd = folder, program, etcd
        folder.mkdir(parents=True, exist_ok=True)
        self.port, self._store, self._peer = free_ports(3)
        self.address = f"https://{HOST}:{self.port}"
        self.certificate = folder / "apiserver.crt"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start its store and the server, and return once it is ready."""
        store, peer = f"http://{HOST}:{self._store}", f"http://{HOST}:{self._peer}"
        self._spawn(
            self._etcd,
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )
        key, tokens = self.folder / "accounts.pem", self.folder / "tokens.csv"
        key.write_bytes(
            rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        tokens.write_text(f"{ADMIN},{ADMIN},{ADMIN},system:masters\n{SUBMITTER},{SUBMITTER},{SUBMITTER}\n")
        self._spawn(
            self._program,
            f"--etcd-servers={store}",
            f"--cert-dir={self.folder}",
            f"--bind-address={HOST}",
            f"--advertise-address={HOST}",
            f"--secure-port={self.port}",
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
        )
        deadline = time.monotonic() + START_SECONDS
        while not self._ready():
            for process in self._processes:
                assert process.poll() is None, f"{process.args} ended: see {self.folder}"
            assert time.monotonic() < deadline, f"the API server is not ready: see {self.folder}"
            time.sleep(0.5)

    def _spawn(self, program: str, *options: str) -> None:
        with (self.folder / f"{Path(program).name}.log").open("wb") as log:
            process = subprocess.Popen(
                [program, *options], cwd=self.folder, stdout=log, stderr=subprocess.STDOUT
            )
        self._processes.append(process)

    def _ready(self) -> bool:
        try:
            return self.certificate.exists() and self.call("/readyz").ok
        except requests.ConnectionError:
            return False

    def stop(self) -> None:
        """End the server, and then its store."""
        for process in reversed(self._processes):
            end(process, 20)

    def call(
        self, path: str, body: Any = None, method: str | None = None, **options: Any
    ) -> requests.Response:
        """Call it as its administrator."""
        return requests.request(
            method or ("GET" if body is None else "POST"),
            self.address + path,
            json=body,
            headers={"Authorization": f"Bearer {ADMIN}", **options.pop("headers", {})},
            verify=str(self.certificate),
            timeout=30,
            **options,
        )

    def create(self, path: str, body: Any) -> Any:
        """Create an object; it must succeed."""
        answer = self.call(path, body)
        assert answer.ok, answer.text
        return answer.json()

    def kubeconfig(self, namespace: str) -> Path:
        """Write the kubeconfig of the submitter."""
        file = self.folder / "kubeconfig"
        ca = base64.b64encode(self.certificate.read_bytes()).decode()
        cluster = {"server": self.address, "certificate-authority-data": ca}
        context = {"cluster": "it", "user": SUBMITTER, "namespace": namespace}
        settings = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [{"name": "it", "cluster": cluster}],
            "users": [{"name": SUBMITTER, "user": {"token": SUBMITTER}}],
            "contexts": [{"name": "it", "context": context}],
        }
        file.write_text(json.dumps(settings))
        return file


class Node:
    """A node that runs the pods of a namespace.

    Args:
        api: the API server.
        namespace: namespace of its pods.
        image: the image's environment.
        claims: folder of each volume claim.
    """

    def __init__(
        self, api: ApiServer, namespace: str, image: dict[str, str], claims: dict[str, Path]
    ) -> None:
        self.api, self.namespace, self.image, self.claims = api, namespace, image, claims
        self.folder = api.folder / "pods"
        self.folder.mkdir()
        self.hosts = self.folder / "hosts"
        self.pods: dict[str, Pod] = {}
        """All pods so far, by name."""
        self.error: BaseException | None = None
        self._path = f"/api/v1/namespaces/{namespace}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(60)
        for pod in self.pods.values():
            pod.end()
        assert self.error is None, self.error

    def _run(self) -> None:
        while not self._stop.wait(0.3):
            try:
                self._look()
                self.error = None
            except Exception as error:
                self.error = error
                print(f"the node: {error!r}", file=sys.stderr)

    def _list(self, what: str) -> list[dict[str, Any]]:
        answer = self.api.call(f"{self._path}/{what}")
        answer.raise_for_status()
        return answer.json()["items"]

    def _look(self) -> None:
        found = {one["metadata"]["name"]: one for one in self._list("pods")}
        self._write_hosts(found)
        for name, spec in found.items():
            pod = self.pods.get(name)
            if "deletionTimestamp" in spec["metadata"]:
                if pod is not None:
                    pod.end(GRACE_SECONDS)
                self.api.call(f"{self._path}/pods/{name}", {"gracePeriodSeconds": 0}, "DELETE")
            elif pod is None:
                self._take(name, spec)
            elif pod.process is None:
                self._begin(pod)
            elif not pod.told and pod.process.poll() is not None:
                self._tell_end(pod)
        for name, pod in self.pods.items():
            if name not in found:
                pod.end()

    def _write_hosts(self, pods: dict[str, dict[str, Any]]) -> None:
        """Give each service the address of the pod that it selects, as the cluster's DNS does for headless ones."""
        lines = [f"{HOST} localhost", f"{HOST} {socket.gethostname()}"]
        for service in self._list("services"):
            wanted = service["spec"].get("selector") or {}
            for name, pod in self.pods.items():
                labels = pods.get(name, {}).get("metadata", {}).get("labels", {})
                if wanted and pod.lives and wanted.items() <= labels.items():
                    lines.append(f"{pod.address} {service['metadata']['name']}.{self.namespace}.svc")
        text = "\n".join([*lines, ""])
        if not self.hosts.exists() or self.hosts.read_text() != text:
            self.hosts.write_text(text)

    def _take(self, name: str, spec: dict[str, Any]) -> None:
        number = len(self.pods) + 1
        self.pods[name] = Pod(name, spec, self.folder / name, f"127.77.{number // 250}.{number % 250 + 1}")
        target = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.api.create(f"{self._path}/pods/{name}/binding", binding)

    def _begin(self, pod: Pod) -> None:
        mounts = self._mounts(pod)
        if mounts is None:
            return  # its mounts do not exist yet
        if "--properties-file" in pod.arguments:
            self._in_its_place(mounts)
        pod.start(self._environment(pod, mounts), [_moved(one, mounts) for one in pod.arguments])
        began = _now()
        self._tell(pod, "Running", {"running": {"startedAt": began}}, ready=True)

    def _mounts(self, pod: Pod) -> dict[str, Path] | None:
        """Create the container's mounts; return the place of each path, or None if a mount does not exist yet."""
        volumes = {one["name"]: one for one in pod.spec["spec"].get("volumes", [])}
        found = {}
        for mount in pod.container.get("volumeMounts", []):
            volume, place = volumes[mount["name"]], pod.folder / mount["name"]
            if "persistentVolumeClaim" in volume:
                place = self.claims[volume["persistentVolumeClaim"]["claimName"]]
            place.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                answer = self.api.call(f"{self._path}/configmaps/{volume['configMap']['name']}")
                if answer.status_code == 404:
                    return None
                answer.raise_for_status()
                for file, text in (answer.json().get("data") or {}).items():
                    (place / file).write_text(text)
            elif "projected" in volume:
                account = pod.spec["spec"]["serviceAccountName"]
                asked = {"spec": {"expirationSeconds": 3600}}
                token = self.api.create(f"{self._path}/serviceaccounts/{account}/token", asked)
                (place / "token").write_text(token["status"]["token"])
                (place / "ca.crt").write_bytes(self.api.certificate.read_bytes())
                (place / "namespace").write_text(self.namespace)
            found[mount["mountPath"]] = place
        return found

    def _in_its_place(self, mounts: dict[str, Path]) -> None:
        """Write the places of the service account's files into the driver's properties."""
        place, prefix = mounts[SECRETS], "spark.kubernetes.authenticate.driver.mounted"
        with next(path / PROPERTIES for path in mounts.values() if (path / PROPERTIES).exists()).open(
            "a"
        ) as file:
            file.write(f"{prefix}.oauthTokenFile={place / 'token'}\n{prefix}.caCertFile={place / 'ca.crt'}\n")

    def _environment(self, pod: Pod, mounts: dict[str, Path]) -> dict[str, str]:
        given = dict(self.image)
        for one in pod.container.get("env", []):
            field = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            known = {"status.podIP": pod.address, "metadata.name": pod.name}
            given[one["name"]] = known[field] if field else _moved(one.get("value", ""), mounts)
        return {
            **given,
            "HOME": str(pod.folder),
            # A container's host name is the pod's; processes share this machine's.
            "KALMAN_HOST": pod.name,
            "JAVA_TOOL_OPTIONS": f"-Djdk.net.hosts.file={self.hosts}",
        }

    def _tell_end(self, pod: Pod) -> None:
        assert pod.process is not None
        code = pod.process.returncode
        code = 128 - code if code < 0 else code
        pod.told = True
        end = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now()}
        self._tell(pod, "Failed" if code else "Succeeded", {"terminated": end}, ready=False)

    def _tell(self, pod: Pod, phase: str, state: dict[str, Any], ready: bool) -> None:
        image = pod.container["image"]
        container = {"name": pod.container["name"], "image": image, "imageID": image, "ready": ready}
        status = {
            "phase": phase,
            "podIP": pod.address,
            "podIPs": [{"ip": pod.address}],
            "hostIP": HOST,
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [{**container, "restartCount": 0, "state": state}],
        }
        patch = {"Content-Type": "application/strategic-merge-patch+json"}
        answer = self.api.call(
            f"{self._path}/pods/{pod.name}/status", {"status": status}, "PATCH", headers=patch
        )
        assert answer.ok or answer.status_code == 404, answer.text


class Pod:
    """A pod and the process of its container."""

    def __init__(self, name: str, spec: dict[str, Any], folder: Path, address: str) -> None:
        self.name, self.spec, self.folder, self.address = name, spec, folder, address
        (self.container,) = spec["spec"]["containers"]
        self.arguments: list[str] = self.container.get("args", [])
        self.process: subprocess.Popen[bytes] | None = None
        self.told = False
        folder.mkdir()

    @property
    def lives(self) -> bool:
        """Return whether its process is running."""
        return self.process is None or self.process.poll() is None

    @property
    def said(self) -> str:
        """Return the container's output."""
        log = self.folder / "log"
        return log.read_text(errors="replace") if log.exists() else ""

    def start(self, environment: dict[str, str], arguments: list[str]) -> None:
        """Run the image's entrypoint in a new session."""
        assert "command" not in self.container
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [ENTRYPOINT, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, grace: float = 0.0) -> None:
        """End its process, or kill its session after the grace period."""
        if self.process is None:
            return
        if grace and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


def _moved(text: str, mounts: dict[str, Path]) -> str:
    """Return a text with mounted paths replaced by their places on this machine."""
    for path, place in mounts.items():
        if text == path or text.startswith(f"{path}/"):
            return str(place) + text[len(path) :]
    return text


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
