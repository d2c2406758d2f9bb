"""Check, before the installation, that this machine has the Python and the Java that the pipeline needs.

Run it as `python jobs/spark/doctor.py` with Python 3.6 or later. It imports only the standard library and uses old
syntax, so that a Python that is too old can still run it and report the problem.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec

PYTHON_AT_LEAST = (3, 11)
JAVA_VERSIONS = (17, 21)
JAVA_MODULE = "jdk.incubator.vector"  # Spark requires it; Java runtimes from PyPI and stripped images lack it


def find_python_problem() -> str:
    """Return the problem of this Python and the package that solves it; an empty text if there is no problem."""
    if sys.version_info[:2] < PYTHON_AT_LEAST:
        found = "{}.{}".format(*sys.version_info[:2])
        return (
            f"Python 3.11 or later is needed, and {sys.executable} is {found}: install it "
            "(Debian, Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python@3.11) "
            "and run: make setup PYTHON=python3.11"
        )
    if not (find_spec("ensurepip") and find_spec("venv")):
        name = "python{}.{}-venv".format(*sys.version_info[:2])
        return (
            f"{sys.executable} cannot make a virtual environment: "
            f"install its package (Debian, Ubuntu: apt install {name})"
        )
    return ""


def find_java() -> str:
    """Return the path of the `java` that Spark will start, from JAVA_HOME or else from PATH; empty if there is none."""
    home = os.environ.get("JAVA_HOME")
    if home:
        command = os.path.join(home, "bin", "java")
        return command if os.access(command, os.X_OK) else ""
    return shutil.which("java") or ""


def find_java_problem() -> str:
    """Return the problem of Spark's Java and the package that solves it; an empty text if there is no problem."""
    command = find_java()
    if not command:
        home = os.environ.get("JAVA_HOME")
        where = f"JAVA_HOME is {home}, which has no bin/java" if home else "no java is on PATH"
        return f"Java 17 or 21 is needed, and {where}: {_format_install_hint()}"
    match = re.search(r'version "(\d+)(?:\.(\d+))?', _run([command, "-version"]))
    if not match:  # the `java` of macOS may only print that Java is not installed
        return f"Java 17 or 21 is needed, and {command} does not run: {_format_install_hint()}"
    major = int(match.group(2) or 0) if match.group(1) == "1" else int(match.group(1))
    if major not in JAVA_VERSIONS:
        return f"Java 17 or 21 is needed, and {command} is Java {major}: {_format_install_hint()}"
    if JAVA_MODULE not in _run([command, "--list-modules"]):
        return f"{command} lacks the module {JAVA_MODULE}, which Spark needs: {_format_install_hint()}"
    return ""


def _format_install_hint() -> str:
    if sys.platform == "darwin":
        return (
            "install it (brew install openjdk@17) and set JAVA_HOME "
            '(export JAVA_HOME="$(brew --prefix openjdk@17)/libexec/openjdk.jdk/Contents/Home")'
        )
    return (
        "install it (Debian, Ubuntu: apt install openjdk-17-jre-headless; "
        "Fedora: dnf install java-21-openjdk-headless; macOS: brew install openjdk@17), "
        "and if several are installed set JAVA_HOME to that one"
    )


def _run(command: list) -> str:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else ""


def main() -> int:
    """Print every problem on standard error and return 1, or print nothing and return 0."""
    problems = [problem for problem in (find_python_problem(), find_java_problem()) if problem]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
