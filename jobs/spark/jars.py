"""Fetch, once, the jars that Spark needs besides its own, and compile the project's Java classes into a jar.

The jars include those for object stores. Every later start then works offline and is fast.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
import zipfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import quoteattr

from jobs.core.errors import RUN_FAILED, UserError, show
from jobs.core.settings import S3
from jobs.spark.doctor import find_java, find_java_problem

GROUP = "kalman"
"""The Maven group of the jars that are compiled here instead of being downloaded."""
SOURCES = Path(__file__).with_name("java")
_COMPILER = ("janino-", "commons-compiler-")
_MAIN = "org.codehaus.commons.compiler.samples.CompilerDemo"
_COMPILE_SECONDS = 300
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


def compute_source_digest() -> str:
    """Return a short digest of the sources, which serves as their version."""
    digest = hashlib.sha256()
    for file in sorted(SOURCES.rglob("*.java")):
        digest.update(f"{file.relative_to(SOURCES).as_posix()}\n".encode())
        digest.update(file.read_bytes().replace(b"\r\n", b"\n"))
    return f"0.{int.from_bytes(digest.digest()[:4], 'big')}"


def compile_jar(jar: Path, class_path: Sequence[Path]) -> None:
    """Compile the sources into a jar.

    Args:
        jar: path of the jar to write.
        class_path: jars with the compiler, and with the classes that the sources use.

    Raises:
        UserError: the compiler is not among the jars, or cannot compile the sources.
    """
    compiler = [path for path in class_path if path.name.startswith(_COMPILER)]
    if len(compiler) < len(_COMPILER):
        raise UserError(
            "this PySpark contains no Janino, which compiles our classes: reinstall pyspark", RUN_FAILED
        )
    with tempfile.TemporaryDirectory(prefix="kalman-") as folder:
        command = [
            find_java(),
            "-cp",
            _join_paths(compiler),
            _MAIN,
            "-rebuild",
            "-g:none",
            "-encoding",
            "UTF-8",
        ]
        command += ["-d", folder, "-classpath", _join_paths(class_path)]
        command += [str(file) for file in sorted(SOURCES.rglob("*.java"))]
        output, failed = _run(command, _COMPILE_SECONDS)
        classes = sorted(Path(folder).rglob("*.class"))
        if failed or not classes:
            said = output.strip()[:400] or "the compiler said nothing"
            raise UserError(f"our classes for Spark could not be compiled: {said}", RUN_FAILED)
        # Times and compression differ between releases; without them, the jar is the same everywhere.
        with zipfile.ZipFile(jar, "w", zipfile.ZIP_STORED) as packed:
            for file in classes:
                entry = zipfile.ZipInfo(file.relative_to(folder).as_posix(), _LONG_AGO)
                packed.writestr(entry, file.read_bytes())


def _join_paths(paths: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, paths))


MANIFEST = "manifest.json"
DIGESTS = Path(__file__).with_name("jars.sha256")
HOW_TO_FETCH = "run `make setup` (or `python -m jobs.spark.jars`)"
_ATTEMPTS = 2  # the second attempt continues the downloads of the first attempt
_SECONDS = 900


class Coordinate(NamedTuple):
    """A Maven artifact; `without` lists those of its dependencies that the pipeline does not need."""

    group: str
    artifact: str
    version: str
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


COORDINATES: tuple[Coordinate, ...] = (
    # Delta's kernel and Unity Catalog's client are for tables managed by a catalog server, but the warehouse consists
    # of folders. Writing, reading, MERGE, streaming, OPTIMIZE, VACUUM and cloning were tested without these jars.
    Coordinate(
        "io.delta",
        "delta-spark_4.2_2.13",
        "4.4.0",
        without=(
            "delta-kernel-api",
            "delta-kernel-defaults",
            "delta-kernel-unitycatalog",
            "unitycatalog-client",
            "unitycatalog-hadoop",
            "jackson-datatype-jdk8",
        ),
    ),
    Coordinate(GROUP, "kalman-stores", compute_source_digest()),
)

_AWS = "2.35.4"
OPTIONAL: dict[str, tuple[Coordinate, ...]] = {
    "kafka": (
        # Some mirrors lack the token provider in the connector's release. The token provider only serves delegation
        # tokens, and has not changed since 4.0.0.
        Coordinate(
            "org.apache.spark",
            "spark-sql-kafka-0-10_2.13",
            "4.2.0",
            without=("spark-token-provider-kafka-0-10_2.13",),
        ),
        Coordinate(
            "org.apache.spark",
            "spark-token-provider-kafka-0-10_2.13",
            "4.0.0",
            without=("kafka-clients",),
        ),
        Coordinate("org.apache.spark", "spark-avro_2.13", "4.1.1"),  # only for from_avro, the same as in 4.2
    ),
    "broker": (
        Coordinate("org.apache.kafka", "kafka_2.13", "4.1.1"),
        Coordinate("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"),
    ),
    "yarn": (
        Coordinate(
            "org.apache.hadoop",
            "hadoop-client-minicluster",
            "3.5.0",
            without=("hadoop-client-api", "hadoop-client-runtime"),
        ),
        Coordinate("org.junit.jupiter", "junit-jupiter-api", "5.13.4"),
        Coordinate("org.bouncycastle", "bcpkix-jdk18on", "1.82"),
    ),
    "s3": (
        # Amazon's bundle has 640 MB. These are only the parts that a file system needs, in the release that Hadoop
        # names.
        Coordinate("org.apache.hadoop", "hadoop-aws", "3.5.0", without=("bundle", "wildfly-openssl")),
        Coordinate("software.amazon.awssdk", "s3", _AWS),
        Coordinate("software.amazon.awssdk", "s3-transfer-manager", _AWS),
        Coordinate("software.amazon.awssdk", "sts", _AWS),
        Coordinate("software.amazon.awssdk", "apache-client", _AWS),
    ),
    "azure": (
        # These exclude the dependencies that only the former `wasb://` needs.
        Coordinate(
            "org.apache.hadoop", "hadoop-azure", "3.5.0", without=("azure-storage", "azure-keyvault-core")
        ),
    ),
    "google": (Coordinate("org.apache.hadoop", "hadoop-gcp", "3.5.0"),),
}
"""Sets of jars that only some models need; each set has a folder of the same name."""
_ALONE = {"broker"}
"""Sets that run without Spark, and so also need jars that PySpark contains."""


def find_jar_folder() -> Path:
    """Return the folder of the jars: the value of KALMAN_JARS, or else a folder inside this Python environment."""
    given = os.environ.get("KALMAN_JARS")
    return Path(given or Path(sys.prefix) / "share" / "kalman-pipeline" / "jars").expanduser().absolute()


def list_jars() -> list[str]:
    """Return the paths of the fetched jars, sorted.

    Raises:
        UserError: the jars are missing, incomplete, from another release, or have other content.
    """
    folder = find_jar_folder()
    names = _list_fetched(folder, COORDINATES)
    if names is None:
        raise UserError(f"Spark's jars are not in {folder}, or not those of this release: {HOW_TO_FETCH}")
    return _check_jars(folder, names)


def read_known_digests() -> dict[str, str]:
    """Return the SHA-256, in hex, of every jar that the release was tested with, by file name."""
    lines = DIGESTS.read_text(encoding="utf-8").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines if line and line[0] != "#")}


def _check_jars(folder: Path, names: Iterable[str]) -> list[str]:
    """Return the paths of jars after a check of the jars' content.

    Raises:
        UserError: the content of a jar differs from the content in the release.
    """
    known = read_known_digests()
    for name in names:
        if known.get(name) != _hash_file(folder / name):
            raise UserError(
                f"{folder / name} is not the jar that this release was tested with (its SHA-256 is not the one in "
                f"{DIGESTS.name}): remove {folder}, look where the file came from, and {HOW_TO_FETCH}"
            )
    return [str(folder / name) for name in names]


def fetch_optional_jars(part: str) -> list[str]:
    """Return the paths of a set of `OPTIONAL`, sorted; fetch missing jars.

    Raises:
        UserError: the jars that every job needs are missing, or the jars of the set cannot be fetched.
    """
    list_jars()  # checked first, because `fetch_jars` refuses a folder with other content
    folder, coordinates = find_jar_folder() / part, OPTIONAL[part]
    names = _list_fetched(folder, coordinates)
    if names is None:
        fetch_jars(coordinates, folder, alone=part in _ALONE)
        names = _list_fetched(folder, coordinates) or []
    return _check_jars(folder, names)


def fetch_jars(
    coordinates: Sequence[Coordinate] = COORDINATES, folder: Path | None = None, alone: bool = False
) -> bool:
    """Fetch the jars into `folder` and return True; return False if the folder has them with the right content.

    Jars that PySpark contains are left out, unless the set runs `alone`. The folder appears as a whole or not at all.

    Raises:
        UserError: there is no Java or no network, the folder has other content, or the content of a jar differs from
            the content in the release.
    """
    target = folder or find_jar_folder()
    if _list_fetched(target, coordinates, check_content=True) is not None:
        return False
    _refuse_foreign(target)
    problem = find_java_problem()
    if problem:
        raise UserError(problem)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".jars-", dir=target.parent) as scratch:
            complete = _resolve(coordinates, Path(scratch), alone)
            for own in (one for one in coordinates if one.group == GROUP):
                jar = complete / f"{own.artifact}-{own.version}.jar"
                compile_jar(jar, [*_list_pyspark_jars(), *complete.glob("*.jar")])
            _check_jars(complete, sorted(path.name for path in complete.glob("*.jar")))
            _write_manifest(complete, coordinates)
            complete.chmod(complete.stat().st_mode & ~0o022)  # whoever could write here could exchange a jar
            _swap(complete, target, Path(scratch))
    except OSError as error:
        raise UserError(
            f"cannot write Spark's jars to {target}: {error.strerror or error}", RUN_FAILED
        ) from error
    return True


def _list_fetched(
    folder: Path, coordinates: Sequence[Coordinate], check_content: bool = False
) -> list[str] | None:
    """Return the names of the jars in `folder`; None if some jars are missing or differ."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        jars: dict[str, str] = manifest["jars"]
        if manifest["coordinates"] != _list_wanted(coordinates):
            return None
        for name, digest in jars.items():
            if not (folder / name).is_file() or (check_content and _hash_file(folder / name) != digest):
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return sorted(jars)


def _list_wanted(coordinates: Iterable[Coordinate]) -> list[str]:
    return [" !".join([str(coordinate), *coordinate.without]) for coordinate in coordinates]


def _refuse_foreign(folder: Path) -> None:
    # The folder is replaced as a whole, so it must be empty or made by `fetch_jars`.
    if (
        folder.exists()
        and not (folder / MANIFEST).is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise UserError(
            f"{folder} holds something other than Spark's jars: set KALMAN_JARS to a folder of its own"
        )


def _resolve(coordinates: Sequence[Coordinate], scratch: Path, alone: bool) -> Path:
    """Let Ivy fetch the jars below `scratch`; return their folder."""
    own = _list_pyspark_jars()
    ivy = next((path for path in own if path.name.startswith("ivy-")), None)
    if ivy is None:
        raise UserError(
            "this PySpark contains no Ivy, so Spark's jars cannot be fetched: reinstall pyspark", RUN_FAILED
        )
    jars = scratch / "jars"
    jars.mkdir()
    settings, module = scratch / "ivysettings.xml", scratch / "ivy.xml"
    settings.write_text(_build_ivy_settings(scratch / "cache"), encoding="utf-8")
    carried = set() if alone else {_parse_artifact_name(path.name) for path in own}
    fetched = [one for one in coordinates if one.group != GROUP]
    module.write_text(_build_ivy_module(fetched, carried), encoding="utf-8")
    command = [find_java(), *_build_proxy_options(), "-cp", str(ivy), "org.apache.ivy.Main"]
    command += ["-settings", os.environ.get("KALMAN_IVYSETTINGS") or str(settings), "-ivy", str(module)]
    command += ["-cache", str(scratch / "cache"), "-confs", "default", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{jars}/[artifact]-[revision].[ext]", "-warn"]
    output = ""
    for _ in range(_ATTEMPTS):
        output, failed = _run(command)
        if not failed and any(jars.glob("*.jar")):
            return jars
    raise UserError(f"Spark's jars could not be fetched: {_explain_failure(output)}", RUN_FAILED)


def _run(command: Sequence[str], seconds: float = _SECONDS) -> tuple[str, bool]:
    """Run a program; return its output, and whether it failed or ran out of time."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return "timed out", True
    return done.stdout + done.stderr, done.returncode != 0


def _build_ivy_settings(cache: Path) -> str:
    # Without a root, the resolver uses Ivy's default, Maven Central. No other repository is needed.
    return f"""<ivysettings>
  <settings defaultResolver="central"/>
  <caches defaultCacheDir={quoteattr(str(cache))}/>
  <timeout-constraints>
    <timeout-constraint name="patient" connectionTimeout="20000" readTimeout="120000"/>
  </timeout-constraints>
  <resolvers>
    <ibiblio name="central" m2compatible="true" usepoms="true" timeoutConstraint="patient"/>
  </resolvers>
</ivysettings>
"""


def _build_ivy_module(coordinates: Iterable[Coordinate], carried: set[str]) -> str:
    """Return an Ivy module that depends on `coordinates`, without the jars that PySpark contains."""
    lines = ['<ivy-module version="2.0">', '  <info organisation="kalman-pipeline" module="jars"/>']
    lines += ['  <configurations><conf name="default"/></configurations>', "  <dependencies>"]
    for coordinate in coordinates:
        group, artifact, version = (quoteattr(text) for text in coordinate[:3])
        lines.append(
            f'    <dependency org={group} name={artifact} rev={version} conf="default->master,runtime">'
        )
        lines += [f"      <exclude module={quoteattr(name)}/>" for name in coordinate.without]
        lines.append("    </dependency>")
    lines += [f"    <exclude module={quoteattr(name)}/>" for name in sorted(carried)]
    return "\n".join([*lines, "  </dependencies>", "</ivy-module>", ""])


def _list_pyspark_jars() -> list[Path]:
    # The folder is looked up without importing PySpark, because the import takes a second.
    spec = find_spec("pyspark")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("PySpark is not installed in this Python: run `make setup`")
    return [
        path
        for root in spec.submodule_search_locations
        for path in sorted((Path(root) / "jars").glob("*.jar"))
    ]


def _parse_artifact_name(file_name: str) -> str:
    """Return the artifact name in the file name of a jar, such as `jackson-core` for `jackson-core-2.21.2.jar`."""
    return re.sub(r"-\d[^/]*$", "", file_name.removesuffix(".jar"))


def _build_proxy_options() -> list[str]:
    """Return the Java options for the proxy in the environment variables, which Java does not read."""
    options = []
    for scheme, address in urllib.request.getproxies().items():
        proxy = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
        with contextlib.suppress(ValueError):  # Java itself reports a port that is not a number
            if scheme in ("http", "https") and proxy.hostname:
                options.append(f"-D{scheme}.proxyHost={proxy.hostname}")
                options.append(f"-D{scheme}.proxyPort={proxy.port or 80}")
    return options


def _explain_failure(output: str) -> str:
    """Return one sentence with the cause of a failure, taken from Ivy's output, and the remedy."""
    where = "check the network, the proxy (https_proxy) and, behind a mirror, KALMAN_IVYSETTINGS"
    if re.search(
        r"UnknownHost|Host .* not found|ConnectException|timed out|refused|unreachable|Server access",
        output,
        re.I,
    ):
        return f"no connection to the Maven repository; {where}"
    if re.search(r"SSL|PKIX|certificate", output):
        return (
            "Java does not trust the Maven repository's certificate; import its authority into Java's store"
        )
    missing = re.findall(r"::\s*([\w.-]+)#([\w.-]+);([\w.-]+):\s*not found", output)
    if missing:
        return f"{':'.join(missing[0])} was not found in the Maven repository; {where}"
    lines = [line.strip() for line in output.splitlines() if re.search(r"[A-Za-z]{4}", line)]
    return f"{lines[-1] if lines else 'Ivy printed nothing'}; {where}"


def _write_manifest(folder: Path, coordinates: Sequence[Coordinate]) -> None:
    jars = {path.name: _hash_file(path) for path in sorted(folder.glob("*.jar"))}
    text = json.dumps({"coordinates": _list_wanted(coordinates), "jars": jars}, indent=2)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _swap(complete: Path, target: Path, scratch: Path) -> None:
    if target.exists():
        target.rename(scratch / "replaced")
    try:
        complete.rename(target)
    except OSError:
        # Another process fetched the jars first. Its folder is used if it is complete.
        if not (target / MANIFEST).is_file():
            raise


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(parts: Sequence[str] = ()) -> int:
    """Fetch missing jars, including the jars of the named sets, and print the folders of the jars."""
    began = time.monotonic()
    try:
        unknown = [part for part in parts if part not in OPTIONAL]
        if unknown:
            raise UserError(f"there is no set of jars '{unknown[0]}': give {' or '.join(OPTIONAL)}")
        print(f"Spark's jars: {', '.join(map(str, COORDINATES))}", flush=True)
        fetched = fetch_jars()
        how = f"fetched in {time.monotonic() - began:.0f} s" if fetched else "all there"
        print(f"Spark's jars: {len(list_jars())} in {find_jar_folder()}, {how}")
        for part in parts:
            print(f"Jars of {part}: {len(fetch_optional_jars(part))} in {find_jar_folder() / part}")
    except (Exception, KeyboardInterrupt) as error:
        return show(error)
    return 0


_AZURE = ("azure", "Azure's store")
_CLIENTS = {
    S3: ("s3", "S3"),
    "abfs": _AZURE,
    "abfss": _AZURE,
    "gs": ("google", "Google's store"),
}
"""For each scheme of a store, the set of jars and the name of the store."""


def store_jars(root: str) -> list[str]:
    """Return the paths of the jars for a warehouse's store, fetched if necessary; a local folder needs no jars.

    Raises:
        UserError: the jars are missing and cannot be fetched.
    """
    client = _CLIENTS.get(root.partition("://")[0])
    if client is None:
        return []
    part, store = client
    list_jars()  # outside the block below, so that its own error message is not replaced
    try:
        return fetch_optional_jars(part)
    except UserError as error:
        raise UserError(
            f"a warehouse at {root} needs Spark's client of {store}, which is not in {find_jar_folder() / part}: "
            f"{error.message}; then run `python -m jobs.spark.jars {part}` (docs/deploy.md)"
        ) from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
