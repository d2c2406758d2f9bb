"""The deployment's files: well formed, pinned, without secrets, and agreeing with the rest of the project.

No container engine is needed: the file is checked with the Compose specification's own schema, the Dockerfile with a
linter.
"""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from demo.ports import free_ports, listens
from tests.support.airflow_api import wait_for
from tests.support.object_store import HOW_TO_GET, program

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
STORE = ROOT / "docker-compose.s3.yml"
FILES = [COMPOSE, STORE]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, with anchors and merges resolved."""
    return yaml.safe_load(COMPOSE.read_text())["services"]


@pytest.fixture(scope="module")
def with_store(services: dict[str, Any]) -> dict[str, Any]:
    """The services of both files as Compose merges them: mappings by name, lists one after the other."""
    merged = copy.deepcopy(services)
    for name, added in yaml.safe_load(STORE.read_text())["services"].items():
        service = merged.setdefault(name, {})
        for field, value in added.items():
            if isinstance(value, dict):
                service[field] = {**service.get(field, {}), **value}
            elif field == "networks":
                service[field] = [*service.get(field, ["airflow", "database"]), *value]
            else:
                service[field] = value
    return merged


def test_the_compose_files_meet_the_specification() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", *FILES]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_s_recipe_is_clean() -> None:
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_needed_from_outside_is_named_and_nothing_secret_is_here(with_store: dict[str, Any]) -> None:
    # A variable without a value ends `docker compose up` instead of being an empty password.
    wanted = set(re.findall(r"(?<!\$)\$\{([A-Z_]+):\?", "".join(file.read_text() for file in FILES)))
    assert wanted == set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", "".join(file.read_text() for file in FILES)))
    offered = dict(
        line.split("=", 1)
        for line in (ROOT / ".env.example").read_text().splitlines()
        if "=" in line and line[0] != "#"
    )
    assert wanted == set(offered)
    secret = {name for name in offered if re.search("PASSWORD|SECRET|KEY", name)}
    assert secret and not any(offered[name] for name in secret)
    for name, service in with_store.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|_KEY", variable) and not variable.endswith("_FILE"):
                assert re.fullmatch(r"\$\{.*\}", value), f"{name}: {variable} is written out"


def test_every_image_has_a_version_and_every_service_can_tell_its_health(with_store: dict[str, Any]) -> None:
    for name, service in with_store.items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        assert name in ("prepare", "store-prepare") or "healthcheck" in service, name


def test_ours_run_as_no_root_and_on_the_versions_that_are_tested(services: dict[str, Any]) -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    users = re.findall(r"^USER (\S+)", recipe, re.MULTILINE)
    assert users and users[-1] not in ("root", "0")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert services["scheduler"]["image"] == f"{project['name']}:{project['version']}"
    python = re.search(r"^FROM python:(\d+\.\d+)", recipe, re.MULTILINE)
    assert python is not None and project["requires-python"] == f">={python.group(1)}"


def test_everything_that_the_image_copies_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    paths = {path for line in copied for path in line.split()}
    assert paths == sent
    assert all((ROOT / path).exists() for path in paths)


def test_services_wait_for_services_that_there_are(with_store: dict[str, Any]) -> None:
    named = {volume for file in FILES for volume in yaml.safe_load(file.read_text())["volumes"]}
    for name, service in with_store.items():
        assert set(service.get("depends_on", {})) <= set(with_store), name
        for volume in service.get("volumes", []):
            place = volume.split(":")[0]
            assert place in named or (ROOT / place).exists(), f"{name}: {volume}"


def test_spark_asks_for_a_secret_and_its_network_is_none_of_airflow_s(services: dict[str, Any]) -> None:
    for name in ("scheduler", "spark-master", "spark-worker"):
        assert "KALMAN_SPARK_SECRET" in services[name]["environment"], name
    networks = {name: set(service["networks"]) for name, service in services.items()}
    assert networks["spark-master"] == networks["spark-worker"] == networks["kafka"] == {"data"}
    assert networks["postgres"] == {"database"}
    both = {name for name, seen in networks.items() if "data" in seen and len(seen) > 1}
    assert both == {"scheduler"}
    assert yaml.safe_load(COMPOSE.read_text())["networks"]["database"] == {"internal": True}


def test_no_container_has_more_rights_than_it_needs(with_store: dict[str, Any]) -> None:
    for name, service in with_store.items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and service["pids_limit"], name
        assert "privileged" not in service and service.get("network_mode") != "host", name
        assert all(str(port).startswith("127.0.0.1:") for port in service.get("ports", [])), name
        ours = service["image"].startswith("kalman-pipeline")
        assert service.get("read_only", False) is ours, name
        assert set(service.get("cap_add", [])) <= {"CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"}, (
            name
        )
        assert "cap_add" not in service or name == "postgres"


def test_the_image_has_what_the_files_offer() -> None:
    recipe = (ROOT / "Dockerfile").read_text()
    assert re.search(r"python -m jobs\.spark\.jars kafka s3\b", recipe)
    assert re.search(r"^obstore==", (ROOT / "requirements" / "image.txt").read_text(), re.MULTILINE)


def test_logs_are_served_in_airflow_s_network_alone(services: dict[str, Any]) -> None:
    # Airflow's own servers listen on all interfaces of their containers, whatever is set.
    assert "--skip-serve-logs" in services["scheduler"]["command"]
    assert "--skip-serve-logs" in services["triggerer"]["command"]
    assert services["log-server"]["networks"] == ["airflow"]
    settings = services["log-server"]["environment"]
    assert settings["AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_SERVER_HOST"] == "127.0.0.1"
    assert "POSTGRES_PASSWORD" not in settings["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"]


def test_the_store_s_root_is_known_to_the_store_alone(with_store: dict[str, Any]) -> None:
    root = {
        name
        for name, one in with_store.items()
        if any("STORE_ROOT" in str(value) for value in one.get("environment", {}).values())
    }
    assert root == {"store", "store-prepare"}
    users = {
        name for name, one in with_store.items() if "AWS_SECRET_ACCESS_KEY" in one.get("environment", {})
    }
    assert users == {"api-server", "scheduler", "dag-processor", "triggerer", "spark-worker"}
    in_its_network = {name for name, one in with_store.items() if "store" in one["networks"]}
    assert in_its_network == users | root


@pytest.mark.skipif(program() is None, reason=HOW_TO_GET)
def test_the_pipeline_s_user_has_the_bucket_and_no_other(tmp_path: Path, with_store: dict[str, Any]) -> None:
    obstore = pytest.importorskip("obstore")
    root, user = ("root", "the secret of root"), ("kalman", "the secret of kalman")
    found = Path(program() or "")
    port = free_ports(1)[0]
    address = f"http://127.0.0.1:{port}"
    places = {
        "/data": str(tmp_path / "data"),
        "/users": str(tmp_path / "users"),
        ":7070": f"127.0.0.1:{port}",
    }
    for place in ("data", "users"):
        (tmp_path / place).mkdir()
    command: list[str] = [places.get(word) or word for word in with_store["store"]["command"]]
    secrets = {"ROOT_ACCESS_KEY": root[0], "ROOT_SECRET_KEY": root[1]}
    store = subprocess.Popen([found, *command], env={**os.environ, **secrets}, stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: listens(port), 20, "the store")
        given = {
            "PATH": f"{found.parent}:{os.environ['PATH']}",
            "ADMIN_ENDPOINT_URL": address,
            "ADMIN_ACCESS_KEY": root[0],
            "ADMIN_SECRET_KEY": root[1],
            "STORE_KEY": user[0],
            "STORE_SECRET": user[1],
        }
        prepare = with_store["store-prepare"]
        script = [*prepare["entrypoint"], prepare["command"][0].replace("$$", "$")]
        for secret in ("an earlier secret", user[1]):  # the second start, after `.env` has changed
            subprocess.run(script, env={**given, "STORE_SECRET": secret}, check=True, capture_output=True)
        (tmp_path / "data" / "others").mkdir()

        def reach(bucket: str, key: tuple[str, str]) -> Any:
            options = {"access_key_id": key[0], "secret_access_key": key[1], "region": "us-east-1"}
            patience = {"max_retries": 0}
            return obstore.store.S3Store(
                bucket,
                endpoint=address,
                config=options,
                client_options={"allow_http": True},
                retry_config=patience,
            )

        obstore.put(reach("warehouse", user), "kalman/one", b"1")
        assert (tmp_path / "data" / "warehouse" / "kalman" / "one").read_bytes() == b"1"
        for refused in (reach("others", user), reach("warehouse", (user[0], "an earlier secret"))):
            with pytest.raises(Exception, match=r"403|denied|Forbidden|SignatureDoesNotMatch"):
                obstore.put(refused, "one", b"1")
    finally:
        store.terminate()
        store.wait(20)


def test_the_web_page_has_a_password_that_the_installation_s_owner_chose(services: dict[str, Any]) -> None:
    settings = services["api-server"]["environment"]
    assert settings["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS"] == "false"
    assert [name for name, one in services.items() if "AIRFLOW_PASSWORD" in one.get("environment", {})] == [
        "prepare"
    ]
