"""Run a PostgreSQL server for one Airflow: data in a folder, on a loopback port, with a password."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import IO, NoReturn

import psutil

INSTALL = "install it (Debian, Ubuntu: apt install postgresql; macOS: brew install postgresql)"


def fail_with_remedy(message: str) -> NoReturn:
    """Exit with the error, and with what always helps."""
    raise SystemExit(f"error: {message}, or use DATABASE=sqlite")


def find_programs(version: str | None = None) -> Path | None:
    """Return the folder of the server programs of this PostgreSQL, or of the newest; None where it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if version:
        found = [path for path in found if path.parts[-3] == version]
    on_path = shutil.which("initdb")
    if found or not on_path:
        return found[-1].parent if found else None
    said = subprocess.run([on_path, "--version"], capture_output=True, text=True).stdout
    return Path(on_path).resolve().parent if not version or f" {version}." in said else None


def was_used(folder: Path) -> bool:
    """Return whether this folder has a database, because a start that was interrupted leaves none.

    Raises:
        SystemExit: the folder is another user's.
    """
    if folder.is_dir() and not os.access(folder, os.X_OK):
        fail_with_remedy(f"only another user can read {folder}: start Airflow as that user")
    return (folder / "data" / "PG_VERSION").is_file()


class PrivatePostgres:
    """A PostgreSQL server whose data and password are in a folder.

    PostgreSQL refuses to run as root, so root runs it as the user `postgres`, who gets the folder.

    Args:
        folder: the folder; it is made if it does not exist.
        port: the port of the loopback address.

    Raises:
        SystemExit: PostgreSQL, or the version that made the data, is not installed.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.data, self.port = folder, folder / "data", port
        version = (self.data / "PG_VERSION").read_text().strip() if was_used(folder) else None
        self.programs = find_programs(version)
        if self.programs is None:
            if version:
                fail_with_remedy(
                    f"{self.data} needs PostgreSQL {version}, which is gone: install postgresql-{version}"
                )
            fail_with_remedy(f"PostgreSQL is not installed: {INSTALL}")
        self.user = "postgres" if os.geteuid() == 0 else None
        try:
            pwd.getpwnam(self.user or "root")
        except KeyError:
            fail_with_remedy(
                "PostgreSQL refuses root, and there is no user postgres: start Airflow as another user"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.password = folder / "password"
        if not self.password.exists():
            made = folder / "password.new"
            made.touch(mode=0o600)
            made.write_text(secrets.token_hex(16))
            made.replace(self.password)
        if self.user and not version:
            shutil.chown(folder, self.user)
            shutil.chown(self.password, self.user)
        self.address = f"postgresql+psycopg2://airflow:{self.password.read_text()}@127.0.0.1:{port}/postgres"

    def start(self) -> None:
        """Start the server, after making its data if there are none; end a server that a killed start has left.

        Raises:
            SystemExit: the server does not start.
        """
        self._check_reach()
        if not was_used(self.folder):
            self._make_data()
        self.stop()
        options = f"-c listen_addresses=127.0.0.1 -c port={self.port} -c unix_socket_directories="
        self._run(
            "pg_ctl", self.data, "start", "--wait", f"--log={self.folder / 'log'}", f"--options={options}"
        )

    def stop(self) -> None:
        """Stop the server if it runs."""
        if self.runs():
            self._run("pg_ctl", self.data, "stop", "--wait", "--mode=fast", check=False)

    def runs(self) -> bool:
        """Return whether the server runs.

        The file with its process id may be left from before a crash, and the id may be another process's by now; a
        server's working folder is its data.
        """
        try:
            process = psutil.Process(int((self.data / "postmaster.pid").read_text().split()[0]))
            return process.name() == "postgres" and Path(process.cwd()) == self.data.resolve()
        except (OSError, ValueError, IndexError, psutil.Error):
            return False

    def _make_data(self) -> None:
        """Make the data beside their place, so that an interrupted start leaves none there."""
        if self.data.exists() and any(self.data.iterdir()):
            fail_with_remedy(f"{self.data} is in the way and not a database of PostgreSQL: move it")
        made = self.folder / "data.new"
        shutil.rmtree(made, ignore_errors=True)
        self._run(
            "initdb", made, "--username=airflow", f"--pwfile={self.password}", "--auth=scram-sha-256",
            "--encoding=UTF8", "--no-locale",
        )  # fmt: skip
        made.rename(self.data)

    def _check_reach(self) -> None:
        """Check that the user who runs the server can reach the folder."""
        for parent in reversed(self.folder.resolve().parents) if self.user else ():
            if self._spawn(["test", "-x", str(parent)], subprocess.DEVNULL):
                fail_with_remedy(
                    f"PostgreSQL refuses root, and the user postgres cannot enter {parent}: set KALMAN_AIRFLOW_HOME to"
                    " a folder elsewhere, start Airflow as another user"
                )

    def _run(self, program: str, data: Path, *words: str, check: bool = True) -> None:
        assert self.programs is not None
        with (self.folder / "start.log").open("w+") as said:
            code = self._spawn([str(self.programs / program), f"--pgdata={data}", *words], said)
            said.seek(0)
            if code and check:
                who = " as the user postgres, because it refuses root," if self.user else ""
                why = " ".join(said.read().split())
                fail_with_remedy(f"{program} of PostgreSQL{who} failed, see {self.folder}: {why}; mend this")

    def _spawn(self, words: list[str], out: IO[str] | int) -> int:
        """Run a program as the server's user, without a shell's settings of language and of PostgreSQL."""
        ours = {
            name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PG"))
        }
        return subprocess.run(
            words, cwd="/", env=ours, user=self.user, group=self.user, extra_groups=self.user and [],
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        ).returncode  # fmt: skip
