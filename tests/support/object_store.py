"""A real S3 store as a process of this machine, and a proxy before it that loses answers.

The store is versitygw over a folder (`go install github.com/versity/versitygw/cmd/versitygw@v1.8.0`).
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from demo.ports import HOST, free_ports, listens
from demo.service import Service, end
from jobs.spark.jars import MANIFEST, find_jar_folder

KEY, SECRET, BUCKET = "kalman", "a-secret-of-the-tests", "bucket"
HOW_TO_GET = (
    "versitygw is not installed: go install github.com/versity/versitygw/cmd/versitygw@v1.8.0 "
    "(Go 1.26 or later; put ~/go/bin on PATH)"
)
START_SECONDS = 30.0


def program() -> str | None:
    """Return the program of the store; None where it is not installed."""
    own = Path.home() / "go" / "bin" / "versitygw"
    return shutil.which("versitygw") or (str(own) if own.is_file() else None)


def missing(java: bool = False) -> str | None:
    """Return what this machine lacks for a test on the store, with Spark's jars or without; None if it has everything.
    Tests download nothing.
    """
    if program() is None:
        return HOW_TO_GET
    if find_spec("obstore") is None:
        return "obstore is not installed: pip install 'kalman-pipeline[s3]'"
    if java and not (find_jar_folder() / "s3" / MANIFEST).is_file():
        return "the client of S3 for Spark is not there: python -m jobs.spark.jars s3"
    return None


class ObjectStore(Service):
    """A store with one bucket, whose objects are files in `folder`."""

    def __init__(self, folder: Path) -> None:
        found = program()
        assert found is not None, HOW_TO_GET
        self._program, self.folder = found, folder
        self.port = free_ports(1)[0]
        self.address = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        (folder / BUCKET).mkdir(parents=True)

    def start(self) -> None:
        """Start the store, and return once it accepts connections."""
        secrets = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
        with (self.folder.parent / "store.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._program, "--port", f"{HOST}:{self.port}", "--quiet", "posix", str(self.folder)],
                env={**os.environ, **secrets},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + START_SECONDS
        while not listens(self.port):
            assert self._process.poll() is None and time.monotonic() < deadline, "versitygw did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop it."""
        if self._process is not None:
            end(self._process, 10)


def environment(address: str) -> dict[str, str]:
    """Return the variables with which a command reaches a store."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ALLOW_HTTP": "true",  # delta-rs
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def mark_folder(address: str, path: str) -> None:
    """Create the empty object by which Hadoop marks a folder: its name ends with a slash."""
    host = address.removeprefix("http://")
    asked = ("PUT", f"/{BUCKET}/{path}/", False)
    connection = http.client.HTTPConnection(host, timeout=60)
    try:
        connection.request(*asked[:2], headers=_signed_again(asked, {"Host": host, "Content-Length": "0"}))
        assert connection.getresponse().status == 200
    finally:
        connection.close()


Asked = tuple[str, str, bool]
"""A request: method, path, and whether it has the header If-None-Match."""


class Proxy:
    """A proxy between a client and the store, which forwards requests and can misbehave.

    lose: whether the client gets a closed connection instead of the store's answer to a request. refuse: whether the
    client gets an error (`codes`, in turn) and the store never gets the request. cut: whether the client gets half of
    the answer's body and then a closed connection. delay: seconds before the store gets a request.
    without_condition: remove the header If-None-Match, as if the store ignored it, and sign the request again.
    """

    def __init__(self, store: str) -> None:
        self._store = store.removeprefix("http://")
        self.lose: Callable[[Asked], bool] = lambda asked: False
        self.refuse: Callable[[Asked], bool] = lambda asked: False
        self.delay: Callable[[Asked], float] = lambda asked: 0.0
        self.cut: Callable[[Asked], bool] = lambda asked: False
        self.codes: tuple[int, ...] = (503,)
        self.without_condition = False
        self.seen: list[tuple[Asked, int]] = []
        self.lost: list[str] = []
        self.refused: list[str] = []
        self.delayed: list[str] = []
        self.halved: list[str] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.forward(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_any  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://{HOST}:{self._server.server_address[1]}"

    def behave(self) -> None:
        """Lose, refuse, cut and delay nothing from now on."""
        self.lose = self.refuse = self.cut = lambda asked: False
        self.delay = lambda asked: 0.0

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """Listen during the `with`."""
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        """Forward one request and return its answer, unless a rule applies."""
        asked = (handler.command, handler.path, handler.headers.get("If-None-Match") is not None)
        length = int(handler.headers.get("Content-Length") or 0)
        body = handler.rfile.read(length)
        if self.refuse(asked):
            self.refused.append(asked[1])
            handler.send_response(self.codes[len(self.refused) % len(self.codes)])
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        if seconds := self.delay(asked):
            self.delayed.append(asked[1])
            time.sleep(seconds)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "expect"}
        if self.without_condition and asked[2]:
            headers = _signed_again(asked, headers)
        store = http.client.HTTPConnection(self._store, timeout=60)
        try:
            store.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers.items():
                store.putheader(name, value)
            store.endheaders(body)
            answer = store.getresponse()
            content = answer.read()
        finally:
            store.close()
        self.seen.append((asked, answer.status))
        if self.lose(asked):
            self.lost.append(asked[1])
            handler.close_connection = True
            handler.connection.close()
            return
        handler.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                handler.send_header(name, value)
        size = answer.getheader("Content-Length") if handler.command == "HEAD" else str(len(content))
        handler.send_header("Content-Length", size or "0")
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if len(content) > 1 and self.cut(asked):
            self.halved.append(asked[1])
            handler.wfile.write(content[: len(content) // 2])
            handler.close_connection = True
            return
        handler.wfile.write(content)


def _signed_again(asked: Asked, headers: dict[str, str]) -> dict[str, str]:
    """Return the headers of a request without its condition, signed by Amazon's Signature Version 4."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    kept = {name.lower(): value for name, value in headers.items()}
    kept = {name: value for name, value in kept.items() if name not in ("if-none-match", "authorization")}
    kept |= {"x-amz-date": now, "x-amz-content-sha256": "UNSIGNED-PAYLOAD"}
    names = sorted(name for name in kept if name == "host" or name.startswith("x-amz-"))
    lines = [asked[0], asked[1], "", *(f"{name}:{kept[name].strip()}" for name in names), "", ";".join(names)]
    canonical = "\n".join([*lines, "UNSIGNED-PAYLOAD"])
    scope = f"{now[:8]}/us-east-1/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = f"AWS4{SECRET}".encode()
    for part in (*scope.split("/"), to_sign):
        key = hmac.digest(key, part.encode(), "sha256")
    credential = f"Credential={KEY}/{scope}, SignedHeaders={';'.join(names)}, Signature={key.hex()}"
    return {**kept, "authorization": f"AWS4-HMAC-SHA256 {credential}"}
