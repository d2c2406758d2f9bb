"""`make cluster` runs nobody's code but that of those who have its secret."""

from __future__ import annotations

import json
import stat
import urllib.request
from pathlib import Path
from urllib.error import URLError

import psutil
import pytest

from demo.cluster import Cluster
from demo.ports import HOST

pytestmark = pytest.mark.spark

SUBMISSION = {
    "action": "CreateSubmissionRequest",
    "appResource": "",
    "appArgs": ["id"],
    "clientSparkVersion": "4.2.0",
    "environmentVariables": {},
    "mainClass": "org.apache.spark.deploy.PythonRunner",
    "sparkProperties": {"spark.app.name": "stranger", "spark.master": "spark://127.0.0.1:7077"},
}


def submitted(port: int) -> str:
    """Return what a server says to a submission without credentials."""
    request = urllib.request.Request(
        f"http://{HOST}:{port}/v1/submissions/create",
        json.dumps(SUBMISSION).encode(),
        {"Content-Type": "application/json;charset=UTF-8"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode(errors="replace")
    except (URLError, OSError) as error:
        return f"refused: {error}"


def ports_of(cluster: Cluster) -> set[int]:
    """Return the ports that the master and its workers listen at."""
    assert cluster.master is not None
    processes = [cluster.master, *cluster.workers.values()]
    family = [psutil.Process(process.pid) for process in processes]
    family += [child for one in family for child in one.children(recursive=True)]
    return {
        link.laddr.port
        for one in family
        for link in one.net_connections()
        if link.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_a_submission_without_the_secret_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "cluster", cores=1)
    try:
        cluster.start(workers=1)
        listening = ports_of(cluster)
        assert len(listening) == 4  # master and worker, and the page of each: no server of submissions
        for port in {6066, *listening}:
            assert '"success" : true' not in submitted(port), port
        said = "".join(path.read_text(errors="replace") for path in (tmp_path / "cluster").glob("*.log"))
        assert "REST server" not in said
        assert "authentication enabled" in said and "authentication disabled" not in said
        secret = dict(
            line.split(None, 1) for line in cluster.settings.read_text().splitlines() if line[:1] != "#"
        )["spark.authenticate.secret"]
        assert len(secret) >= 32
        assert stat.S_IMODE(cluster.settings.stat().st_mode) == 0o600
        # Nobody who lists processes, reads the log or the page learns it.
        with urllib.request.urlopen(cluster.page, timeout=10) as page:
            said += page.read().decode()
        said += " ".join(word for one in psutil.process_iter() for word in _words(one))
        assert secret not in said
    finally:
        cluster.stop()


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
