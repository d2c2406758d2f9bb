"""The deployment's files: well formed, pinned, without secrets, and agreeing with the rest of the project.

No container engine is needed: the file is checked with the Compose specification's own schema, the Dockerfile with a
linter.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
COMPOSE = ROOT / "docker-compose.yml"
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, with anchors and merges resolved."""
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_the_compose_file_meets_the_specification() -> None:
    command = [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_s_recipe_is_clean() -> None:
    done = subprocess.run([BIN / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_needed_from_outside_is_named_and_nothing_secret_is_here(services: dict[str, Any]) -> None:
    wanted = set(re.findall(r"(?<!\$)\$\{([A-Z_]+)", COMPOSE.read_text()))
    offered = dict(
        line.split("=", 1)
        for line in (ROOT / ".env.example").read_text().splitlines()
        if "=" in line and line[0] != "#"
    )
    assert wanted == set(offered)
    secret = {name for name in offered if re.search("PASSWORD|SECRET|KEY", name)}
    assert secret and not any(offered[name] for name in secret)
    for name, service in services.items():
        for variable, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|_KEY", variable) and not variable.endswith("_FILE"):
                assert re.fullmatch(r"\$\{.*\}", value), f"{name}: {variable} is written out"


def test_every_image_has_a_version_and_every_service_can_tell_its_health(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+", service["image"]), name
        assert name == "prepare" or "healthcheck" in service, name


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


def test_services_wait_for_services_that_there_are(services: dict[str, Any]) -> None:
    named = yaml.safe_load(COMPOSE.read_text())["volumes"]
    for name, service in services.items():
        assert set(service.get("depends_on", {})) <= set(services), name
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


def test_no_container_has_more_rights_than_it_needs(services: dict[str, Any]) -> None:
    for name, service in services.items():
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


def test_the_web_page_has_a_password_that_the_installation_s_owner_chose(services: dict[str, Any]) -> None:
    settings = services["api-server"]["environment"]
    assert settings["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS"] == "false"
    assert [name for name, one in services.items() if "AIRFLOW_PASSWORD" in one.get("environment", {})] == [
        "prepare"
    ]
