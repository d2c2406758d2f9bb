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
    for name, path in re.findall(r"`(\w+)` in `([\w/]+\.py)`", text):
        assert re.search(rf"^\s*(def|class) {name}\b", (ROOT / path).read_text(), re.M), f"{name} in {path}"


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
