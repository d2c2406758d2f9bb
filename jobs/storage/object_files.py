"""Small files in an object store without Spark, the settings of an S3 store, and the probe before its first use.

The address comes from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL; without these variables it is Amazon's address. The
region comes from AWS_REGION or AWS_DEFAULT_REGION. Each client looks up credentials by itself: in the environment, in
`~/.aws/credentials`, or from the machine's role. Settings of Spark, specs and messages never contain credentials.
"""

from __future__ import annotations

import configparser
import importlib
import json
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, NamedTuple

from jobs.core import times
from jobs.core.errors import RUN_FAILED, UserError
from jobs.core.faults import find_fault
from jobs.core.redaction import show_name
from jobs.core.settings import S3

_REGION = "us-east-1"
_PLACES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_ENDPOINT_URL",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ALLOW_HTTP",  # read by delta-rs
)
"""Environment variables that locate a store, without the variables that contain credentials."""


class StoreSettings(NamedTuple):
    """Address and region of a store; the address None means Amazon's address."""

    address: str | None
    region: str

    @property
    def encrypted(self) -> bool:
        """Return whether connections to the store use TLS."""
        return self.address is None or not self.address.startswith("http://")


def store() -> StoreSettings:
    """Return the settings of the store from the environment."""
    env = os.environ
    address = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or None
    region = env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or _REGION
    return StoreSettings(address and address.rstrip("/"), region)


def store_variables(root: str) -> dict[str, str]:
    """Return the environment variables that locate a warehouse's store, for a remote driver; empty outside S3."""
    return {name: os.environ[name] for name in _PLACES if is_in_s3(root) and os.environ.get(name)}


def is_in_s3(root: str) -> bool:
    """Return whether a folder, which is given by path or URI, is in S3."""
    return root.startswith(f"{S3}://")


def build_store_conf(root: str) -> dict[str, str]:
    """Return the Spark settings for a warehouse in S3, besides the settings of every job; empty outside S3."""
    if not is_in_s3(root):
        return {}
    where, hadoop = store(), "spark.hadoop.fs.s3a."
    conf = {
        # Delta's commits and Spark's checkpoints are objects that only one process can create (jobs/spark/java).
        f"spark.delta.logStore.{S3}.impl": "kalman.stores.ConditionalLogStore",
        "spark.sql.streaming.checkpointFileManagerClass": "kalman.stores.ConditionalCheckpoints",
        f"{hadoop}create.conditional.enabled": "true",
        f"{hadoop}aws.credentials.provider": "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider",
        f"{hadoop}endpoint.region": where.region,
        # The default stream would read ahead through a native library.
        f"{hadoop}input.stream.type": "classic",
        # Spark's Python workers read small files through another client.
        **{f"spark.executorEnv.{name}": value for name, value in store_variables(root).items()},
    }
    if where.address is not None:
        conf[f"{hadoop}endpoint"] = where.address
        conf[f"{hadoop}path.style.access"] = "true"
        conf[f"{hadoop}connection.ssl.enabled"] = str(where.encrypted).lower()
    return conf


def build_delta_options() -> dict[str, str]:
    """Return the options by which delta-rs reaches the store; delta-rs itself finds credentials in the environment."""
    where = store()
    options = {"AWS_REGION": where.region}
    if where.address is not None:
        options |= {"AWS_ENDPOINT_URL": where.address, "AWS_ALLOW_HTTP": str(not where.encrypted).lower()}
    return options | {f"AWS_{name.upper()}": value for name, value in read_credentials().items()}


def read_credentials() -> dict[str, str]:
    """Return the keys of the profile in `~/.aws/credentials`; empty if it has none or the environment has keys."""
    env = os.environ
    if env.get("AWS_ACCESS_KEY_ID") or env.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return {}
    file = Path(env.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(file, encoding="utf-8")
        profile = parser[env.get("AWS_PROFILE") or "default"]
    except (OSError, KeyError, configparser.Error, UnicodeDecodeError):
        return {}
    names = {
        "access_key_id": "aws_access_key_id",
        "secret_access_key": "aws_secret_access_key",
        "session_token": "aws_session_token",
    }
    return {ours: profile[name] for ours, name in names.items() if profile.get(name)}


_IDENTITY = "kalman-write"
"""Metadata key of an object: the identity of the call that created it. Java uses the same key (ConditionalFile)."""
_READS, _PAUSE_SECONDS = 5, 0.3
_REFUSALS = ("PermissionDeniedError", "UnauthenticatedError", "UnknownConfigurationKeyError")
"""Errors of the client that mean that no object was created."""
HOW_TO_GET = "pip install 'kalman-pipeline[s3]'"


class FileStamp(NamedTuple):
    """Mark and size of a file, but not its content. The mark changes when the file is replaced."""

    mark: str
    size: int


class ObjectFiles:
    """A folder of an object store. Names are paths relative to the folder; names that begin with a dot are hidden."""

    def __init__(self, root: str) -> None:
        """Open a folder, given as `s3a://bucket/folder` or as a URI of Azure's or Google's store.

        Raises:
            UserError: the package of the store's client is not installed.
        """
        place, _, folder = root.partition("://")[2].partition("/")
        self.root = root.rstrip("/")
        self._store, self._prefix = _open_client(f"{root.partition('://')[0]}://{place}"), folder.strip("/")

    def read(self, name: str, most: int | None = None) -> bytes | None:
        """Return a file's content, or None if the file does not exist.

        Raises:
            UserError: the file has more than `most` bytes, or cannot be read.
        """
        with self._report_failures(name), suppress(FileNotFoundError):
            for left in reversed(range(_READS)):
                found = self._store.get(self._path(name))
                if most is not None and found.meta["size"] > most:
                    raise ValueError(f"it has more than {most:,} bytes")
                try:
                    return bytes(found.bytes())
                except Exception:  # the client does not repeat a read whose answer was cut
                    if not left:
                        raise
        return None

    def read_first_line(self, name: str) -> bytes | None:
        """Return a file's first line, or None if the file does not exist."""
        content = self.read(name)
        return None if content is None else content.split(b"\n", 1)[0]

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file; a reader sees either the whole old content or the whole new content."""
        with self._report_failures(name):
            self._store.put(self._path(name), content, use_multipart=False)

    def send(self, name: str, file: IO[bytes]) -> None:
        """Write or replace a file with the content of an open file of any size."""
        with self._report_failures(name):
            self._store.put(self._path(name), file)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file unless it exists; return whether this call wrote it. Of concurrent calls exactly one does.

        Raises:
            UserError: the call failed, or its outcome cannot be determined.
        """
        identity = uuid.uuid4().hex
        mark = {_IDENTITY: identity}
        try:
            self._store.put(self._path(name), content, attributes=mark, mode="create", use_multipart=False)
            return True
        except Exception as error:
            return self._is_ours(name, identity, error)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._report_failures(name), suppress(FileNotFoundError):
            self._store.delete(self._path(name))

    def exists(self, name: str) -> bool:
        """Return whether a file or folder exists. Hadoop's folder markers do not count."""
        with self._report_failures(name):
            return any(self._below(self._path(name)))

    def seen(self, name: str) -> FileStamp | None:
        """Return the mark and size of a file without reading it, or None if the file does not exist."""
        with self._report_failures(name), suppress(FileNotFoundError):
            found = self._store.head(self._path(name))
            return FileStamp(str(found["e_tag"]), int(found["size"]))
        return None

    def read_modified_time(self, name: str) -> datetime:
        """Return the time when a file was last modified."""
        return self._store.head(self._path(name))["last_modified"]

    def rename(self, name: str, to: str) -> bool:
        """Copy a file, or the files of a folder, to another name and remove the old files.

        In a local folder this is one step, which makes missing parent folders of `to`. Return whether it succeeded.
        """
        source, target = self._path(name), self._path(to)
        try:
            for one in self._below(source):
                self._store.copy(one, target + one.removeprefix(source))
            for one in list(self._below(source)):
                self._store.delete(one)
        except Exception:  # callers do not need the reason: they try again later, or report the failure
            return False
        return True

    def remove_tree(self, name: str) -> bool:
        """Remove a folder with its content, and return whether the removal succeeded."""
        try:
            for one in list(self._below(self._path(name))):
                self._store.delete(one)
        except Exception:  # callers do not need the reason, as in `rename`
            return False
        return True

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if the folder does not exist."""
        found = self._list_level(folder)
        paths = [one["path"] for one in found["objects"]] + list(found["common_prefixes"])
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
        return sorted(name for name in names if not name.startswith("."))

    def _is_ours(self, name: str, identity: str, error: Exception) -> bool:
        """Return whether this call created the object that exists after a failure."""
        if type(error).__name__ in _REFUSALS:
            raise self._build_refusal(name, error) from error
        for read in range(_READS):
            time.sleep(_PAUSE_SECONDS if read else 0)
            try:
                found = self._get(name)
            except UserError:
                continue
            if found is not None:
                return found.attributes.get(_IDENTITY) == identity
        raise UserError(
            f"{self.root}/{name}: nobody can tell whether the store has created it "
            f"({_shorten_error(error)}); it is not tried "
            "again, as it may still arrive",
            RUN_FAILED,
        ) from None  # the cause alone would say that nothing is lost

    def _get(self, name: str) -> Any:
        with self._report_failures(name), suppress(FileNotFoundError):
            return self._store.get(self._path(name))
        return None

    @contextmanager
    def _report_failures(self, name: str) -> Iterator[None]:
        """Report a failure of the store as a `UserError`."""
        try:
            yield
        except Exception as error:
            raise self._build_refusal(name, error) from error

    def _list_level(self, folder: str) -> Any:
        """List the objects and folders in a folder, without Hadoop's marker object for the folder itself."""
        path = self._path(folder)
        with self._report_failures(folder):
            found = self._store.list_with_delimiter(path or None)
        return {**found, "objects": [one for one in found["objects"] if one["path"] != path]}

    def _below(self, path: str) -> Iterator[str]:
        """Yield the object with this name and the objects in the folder with this name, without folder markers."""
        if self._is_file(path):
            yield path
        for some in self._store.list(path):
            yield from (one["path"] for one in some if one["size"] or self._is_file(one["path"]))

    def _is_file(self, path: str) -> bool:
        """Return whether an object has this name. Listings omit the trailing slash of a folder marker's name."""
        try:
            self._store.head(path)
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name.strip("/")) if part)

    def _build_refusal(self, name: str, error: Exception) -> UserError:
        why = find_fault(error) or f"the store did not do it: {_shorten_error(error)}"
        return UserError(f"{self.root}/{name}: {why}", RUN_FAILED)


@lru_cache(maxsize=8)
def _open_client(place: str) -> Any:
    """Return the client of a bucket or container, which all threads of the process share."""
    try:
        stores = importlib.import_module("obstore.store")
    except ImportError as error:
        raise UserError(f"a warehouse at {place} needs the package obstore: {HOW_TO_GET}") from error
    patience = {"timeout": "60s", "connect_timeout": "10s"}
    if not is_in_s3(place):  # the client reads credentials and settings from the environment
        return stores.from_url(place, client_options=patience, retry_config={"max_retries": 4})
    where = store()
    config = {"region": where.region, **read_credentials()}
    if where.address is not None:
        config["endpoint"] = where.address
    options = {"allow_http": not where.encrypted, **patience}
    bucket = place.partition("://")[2]
    return stores.S3Store(bucket, config=config, client_options=options, retry_config={"max_retries": 4})


def _shorten_error(error: Exception) -> str:
    """Return the first line of a client's error, shortened, without the body of the store's answer."""
    return show_name(str(error).partition("\n")[0].partition("<?xml")[0].strip(), 200) or type(error).__name__


FOLDER = "_store"
NOTE = f"{FOLDER}/probed.json"
WRITERS, ROUNDS = 8, 12
_CONDITION = (
    "does not honour a condition (If-None-Match) as S3 does, "
    "and two commands would overwrite each other's commits"
)
_LISTING = "lists its objects later than S3 does, and a command would go on from an older state than there is"


def ensure_probed(root: str) -> bool:
    """Probe the store of a warehouse unless a note of an earlier probe exists.

    Return whether the process's first call for this root probed it; later calls do not look again.

    Raises:
        UserError: the store is not safe, or cannot be reached.
    """
    return is_in_s3(root) and _ensure_probed(root, store().address)


@lru_cache(maxsize=8)
def _ensure_probed(root: str, address: str | None) -> bool:
    kept = ObjectFiles(root).read(NOTE)
    with suppress(ValueError, KeyError, TypeError):  # another tool left an incomplete note
        if kept is not None and json.loads(kept)["address"] == address:
            return False
    probe_store(root)
    return True


def probe_store(root: str) -> None:
    """Probe the store of a warehouse, and write a note of the result there.

    Raises:
        UserError: the store is not safe, or cannot be reached.
    """
    files = ObjectFiles(root)
    _run_creation_race(files, root)
    note = {"address": store().address, "at": times.now().isoformat(), "rounds": ROUNDS, "writers": WRITERS}
    files.write(NOTE, json.dumps(note).encode())


def _run_creation_race(files: ObjectFiles, root: str) -> None:
    """Let several writers create the same file at the same moment, in several rounds.

    Raises:
        UserError: a round had no winner or several winners, or the file is not listed or has another writer's content.
    """
    run = uuid.uuid4().hex
    for number in range(ROUNDS):
        name = f"{FOLDER}/probe-{run}-{number}"
        try:
            winners = _round(files, name)
            content, listed = files.read(name), files.names(FOLDER)
        finally:
            files.remove(name)
        if len(winners) != 1:
            raise _build_refusal(
                root, f"{len(winners)} of {WRITERS} writers created the same object at the same moment"
            )
        if content != winners[0]:
            raise _build_refusal(root, "an object had another content than its creator wrote")
        if name.removeprefix(f"{FOLDER}/") not in listed:
            raise _build_refusal(root, "an object that had been created was not listed", _LISTING)


def _round(files: ObjectFiles, name: str) -> list[bytes]:
    """Return the contents written by the writers whose call of `create` succeeded."""
    start = threading.Barrier(WRITERS)

    def write(number: int) -> bytes | None:
        content = f"writer {number}".encode()
        start.wait()
        return content if files.create(name, content) else None

    with ThreadPoolExecutor(WRITERS) as writers:
        try:
            return [one for one in writers.map(write, range(WRITERS)) if one is not None]
        except BaseException:
            start.abort()  # if a thread cannot start, the others would wait for it for ever
            raise


def _build_refusal(root: str, why: str, so: str = _CONDITION) -> UserError:
    where = store().address or "Amazon S3"
    return UserError(
        f"a warehouse cannot be at {root}: {why}, so the store at {where} {so}. No table was written: use another "
        "store, or a newer release of it, and check it with `kalman-pipeline doctor --warehouse URI`",
        RUN_FAILED,
    )
