"""The documents: links, anchors and files that they name exist, and their Python imports public modules only."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jobs.api
import kalman
from tests.support.named_tests import is_test

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDE = [
    page for page in PAGES if page.parent != ROOT / "docs" / "decisions" and page.name != "CONTRIBUTING.md"
]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.M | re.S)


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: those of its headings, as GitHub makes them, and those that it sets itself."""
    text = prose(page)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return set(re.findall(r'<a id="([^"]+)">', text)) | {
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        there = page if not name else (page.parent / name).resolve()
        if not there.exists() or (anchor and anchor not in anchors(there)):
            lost.append(target)
    assert lost == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_blank_line_splits_a_table(page: Path):
    parts = [part.splitlines() for part in re.split(r"\n\n+", prose(page))]
    tables = [part for part in parts if part and part[0].startswith("|")]
    assert [part[0] for part in tables if len(part) < 2 or not re.fullmatch(r"\|[\s:|-]+\|", part[1])] == []


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_guide_imports_public_modules(page: Path):
    for indent, language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            continue
        text = "\n".join(line.removeprefix(indent) for line in code.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("jobs", "kalman"):
                assert node.module in ("jobs.api", "kalman")
                public = jobs.api.__all__ if node.module == "jobs.api" else kalman.__all__
                assert {alias.name for alias in node.names} <= set(public)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CONTRIBUTING.md"], ids=lambda page: page.stem
)
def test_files_that_a_page_names_exist(page: Path):
    rooms = "jobs|kalman|dags|tests|scripts|demo|benchmarks|examples"
    named = re.findall(rf"`((?:{rooms})/[\w./-]+?)/?`", prose(page))
    assert [name for name in named if "VERB" not in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", ["architecture.md", "protocol.md"])
def test_the_map_names_functions_where_they_are(page: str):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", text)
    named += [(name, path) for path, name in re.findall(r"`([\w/]+\.py)::(\w+)`", text)]
    assert named
    for name, path in named:
        assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.M), f"{name} in {path}"


def proofs() -> list[tuple[str, list[str]]]:
    """Return the promise and the tests of each row of the page of proofs."""
    rows: list[tuple[str, list[str]]] = []
    in_table = False
    for line in (ROOT / "docs" / "proofs.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if cells == ["promise", "how", "tests"]:
            in_table = True
        elif not line.startswith("|"):
            in_table = False
        elif in_table and not line.startswith("|---"):
            rows.append((cells[0], re.findall(r"`((?:tests/|make )[^`]+)`", cells[2])))
    return rows


def test_every_promise_names_tests_that_exist():
    rows = proofs()
    assert len(rows) > 100
    assert [promise for promise, tests in rows if not tests] == []
    assert [name for _, tests in rows for name in tests if not is_test(name)] == []


@pytest.mark.parametrize(
    "name", ["tests/test_docs.py::test_nothing", "tests/test_nothing.py", "tests/kalman", "make nothing"]
)
def test_a_test_that_does_not_exist_is_found(name: str):
    assert not is_test(name) and is_test("tests/test_docs.py::test_every_promise_names_tests_that_exist")


def test_the_site_has_every_page_and_its_links(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 'not included in the "nav"' not in done.stderr
    assert (tmp_path / "decisions" / "index.html").exists()


def test_every_decision_is_in_the_list():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- \[.+\]\((\d{4}-.+\.md)\)$", (folder / "README.md").read_text(), re.M)
    assert sorted(listed) == sorted(page.name for page in folder.glob("0*.md"))
