"""Run a PostgreSQL server for one Airflow: data in a folder, on a loopback port, with a password."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path

INSTALL = "install it (Debian, Ubuntu: apt install postgresql; macOS: brew install postgresql)"


def find_programs() -> Path | None:
    """Return the folder of the newest PostgreSQL's server programs; None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    return found[-1].parent if found else Path(on_path).parent if on_path else None


class PrivatePostgres:
    """A PostgreSQL server whose data and password are in a folder.

    PostgreSQL refuses to run as root, so root runs it as the user `postgres`, who gets the folder.

    Args:
        folder: the folder; it is made if it does not exist.
        port: the port of the loopback address.

    Raises:
        SystemExit: PostgreSQL is not installed.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.programs = folder, port, find_programs()
        if self.programs is None:
            raise SystemExit(f"error: PostgreSQL is not installed: {INSTALL}, or use DATABASE=sqlite")
        self.user = "postgres" if os.geteuid() == 0 else None
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.password = folder / "password"
        if not self.password.exists():
            self.password.touch(mode=0o600)
            self.password.write_text(secrets.token_hex(16))
            if self.user:
                shutil.chown(folder, self.user)
                shutil.chown(self.password, self.user)
        self.address = f"postgresql+psycopg2://airflow:{self.password.read_text()}@127.0.0.1:{port}/postgres"

    def start(self) -> None:
        """Start the server, after making its data if there are none; end a server that a killed start has left.

        Raises:
            SystemExit: the server does not start.
        """
        if not (self.folder / "data").exists():
            self._run(
                "initdb",
                "--username=airflow",
                f"--pwfile={self.password}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
            )
        self.stop()
        options = f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories="
        self._run("pg_ctl", "start", "--wait", f"--log={self.folder / 'log'}", f"--options={options}")

    def stop(self) -> None:
        """Stop the server if it runs."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self._run("pg_ctl", "stop", "--wait", "--mode=fast", check=False)

    def _run(self, program: str, *words: str, check: bool = True) -> None:
        assert self.programs is not None
        with (self.folder / "start.log").open("w+") as said:
            done = subprocess.run(
                [self.programs / program, f"--pgdata={self.folder / 'data'}", *words],
                cwd="/", user=self.user, group=self.user, extra_groups=self.user and [],
                stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            said.seek(0)
            if done.returncode and check:
                who = " as the user postgres, because it refuses root," if self.user else ""
                raise SystemExit(
                    f"error: {program} of PostgreSQL{who} failed, see {self.folder}: {' '.join(said.read().split())}"
                )
