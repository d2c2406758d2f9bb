"""The versions that the project pins, and that no file names a registry's host."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jobs.spark.jars import COORDINATES

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "lock.txt"
IMAGE = ROOT / "requirements" / "image.txt"
LEFT_BY_RUNS = {"var", "warehouse", "build", "dist", "logs", "spark-warehouse", "metastore_db", "__pycache__"}
# The extra `kubernetes`, which no set-up installs, with what it asks for.
KUBERNETES = {
    "aiofiles", "aiohappyeyeballs", "aiohttp", "aiosignal", "apache-airflow-providers-cncf-kubernetes", "durationpy",
    "frozenlist", "kubernetes", "kubernetes-asyncio", "multidict", "oauthlib", "propcache", "requests-oauthlib",
    "websocket-client", "yarl",
}  # fmt: skip
# What the extra `mutants`, which no set-up installs, brings along.
MUTANTS = {"coverage", "mdit-py-plugins", "platformdirs", "textual"}
# What the extra `sbom`, which no set-up installs, brings along.
SBOM = {
    "boolean-py", "chardet", "cyclonedx-python-lib", "defusedxml", "fqdn", "jsonpointer", "lark",
    "license-expression", "lxml", "packageurl-python", "pip-requirements-parser", "py-serializable",
    "rfc3986-validator", "rfc3987-syntax", "uri-template", "webcolors",
}  # fmt: skip
# What the extra `audit`, which no set-up installs, brings along.
AUDIT = {"cachecontrol", "filelock", "msgpack", "pip-api", "pip-audit", "tomli", "tomli-w"}
# In two halves, so that this file passes its own test.
REGISTRIES = [".".join(halves) for halves in (
    ("pypi", "org"), ("files", "pythonhosted.org"), ("repo1", "maven.org"), ("repo.maven", "apache.org"),
    ("repos", "spark-packages.org"), ("registry", "npmjs.org"), ("conda", "anaconda.org"),
)]  # fmt: skip


def project() -> dict:
    """Read pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def locked() -> dict[str, str]:
    """Read the versions of the lock by normalised name."""
    lines = [
        line for line in LOCK.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")
    ]
    pairs = (line.split("==", 1) for line in lines)
    return {canonicalize_name(name): version for name, version in pairs}


def asked_for() -> list[Requirement]:
    """Return every requirement of pyproject.toml, those of the extras of a set-up included."""
    given = project()["project"]
    extras = given["optional-dependencies"]
    return [Requirement(text) for text in [*given["dependencies"], *extras["demo"], *extras["dev"]]]


def text_files() -> Iterator[Path]:
    """Yield the repository's text files, without environments, caches and what runs leave."""
    for folder, folders, names in os.walk(ROOT):
        hidden = {name for name in folders if name.startswith(".") and name not in (".ci", ".github")}
        folders[:] = sorted(set(folders) - hidden - LEFT_BY_RUNS)
        for name in sorted(names):
            path = Path(folder, name)
            if path.suffix in {
                ".py",
                ".md",
                ".toml",
                ".yaml",
                ".yml",
                ".txt",
                ".json",
                ".cfg",
                ".sh",
                ".xml",
                "",
            }:
                yield path


def test_lock_holds_exact_versions_and_nothing_else():
    lines = [line for line in LOCK.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    odd = [line for line in lines if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][A-Za-z0-9.!+]*", line)]
    assert odd == []
    assert len(lines) == len(locked()), "a name is there twice"


def test_lock_satisfies_the_project():
    versions = locked()
    for requirement in asked_for():
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in the lock"
        assert requirement.specifier.contains(version), f"{requirement} against {version} in the lock"


def test_lock_is_complete():
    # Whatever a package of the lock asks for is in it too: else set-ups differ from day to day.
    versions, missing = locked(), []
    extras = project()["project"]["optional-dependencies"]
    others = (AUDIT | KUBERNETES | MUTANTS | SBOM) | {
        canonicalize_name(Requirement(text).name)
        for extra in ("audit", "bench", "mutants", "postgres", "sbom")
        for text in extras[extra]
    }
    for name in versions:
        try:
            wanted = requires(name) or []
        except PackageNotFoundError:
            assert canonicalize_name(name) in others, f"{name} is in the lock, and nothing asks for it"
            continue
        for text in wanted:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                version = versions.get(canonicalize_name(requirement.name), "none")
                if version == "none" or not requirement.specifier.contains(version, prereleases=True):
                    missing.append(f"{name} asks for {text}, the lock has {version}")
    assert missing == []


def test_what_the_image_installs_has_the_versions_of_the_lock_and_a_hash_each():
    lines = [line for line in IMAGE.read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    found: dict[str, str] = dict(
        re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line).groups()  # type: ignore[union-attr]
        for line in lines
    )
    versions = locked()
    assert len(found) == len(lines)
    assert {name: versions[canonicalize_name(name)] for name in found} == found
    given = project()["project"]
    wanted = [*given["dependencies"], *given["optional-dependencies"]["postgres"]]
    wanted += [*given["optional-dependencies"]["kubernetes"], *given["optional-dependencies"]["s3"]]
    there = {canonicalize_name(name) for name in found}
    assert {canonicalize_name(Requirement(text).name) for text in wanted} <= there
    recipe = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    installs = [line for line in recipe.splitlines() if "pip install" in line]
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)


def test_whatever_make_installs_and_builds_has_the_versions_of_the_lock():
    targets = ["setup", "airflow", "audit", "bench", "lock", "mutants", "sbom"]
    command = ["make", "--dry-run", "--always-make", "DATABASE=postgres", *targets]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    installs = [line for line in printed.replace("\\\n", " ").splitlines() if "pip install" in line]
    lock = str(LOCK.relative_to(ROOT))
    assert len(installs) >= len(targets)
    for line in installs:
        assert re.match(rf"\s*PIP_CONSTRAINT={lock} PIP_BUILD_CONSTRAINT={lock} ", line), line
        assert f" -c {lock} " in line, line


def test_versions_that_belong_together():
    delta = next(coordinate for coordinate in COORDINATES if coordinate.artifact.startswith("delta-spark"))
    assert delta.version == locked()["delta-spark"]
    assert delta.artifact.split("_")[1] == ".".join(locked()["pyspark"].split(".")[:2])


def test_no_file_names_a_registry():
    named = [
        f"{path.relative_to(ROOT)}: {host}"
        for path in text_files()
        for host in REGISTRIES
        if host in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert named == []
