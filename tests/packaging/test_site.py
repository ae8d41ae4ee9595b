"""The documentation builds as a site without a warning, and needs nothing from another host to be read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["'](?:https?:)?//|<link\b(?![^>]*canonical)[^>]*\bhref=["'](?:https?:)?//"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr
    return folder


def test_every_page_of_the_docs_is_a_page_of_the_site(site: Path) -> None:
    pages = [ROOT / "README.md", ROOT / "GLOSSARY.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    pages += (ROOT / "docs").rglob("*.md")
    for page in pages:
        built = page.relative_to(ROOT).with_suffix(".html")
        assert (site / built.with_name(built.name.replace("README", "index"))).is_file(), page


HEADING = re.compile(r"^#{1,6} ", re.MULTILINE)
BLOCK = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def test_every_heading_of_a_page_is_a_heading_of_the_site(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        built = site / page.relative_to(ROOT).with_suffix(".html")
        built = built.with_name(built.name.replace("README", "index"))
        written = HEADING.findall(BLOCK.sub("", page.read_text()))
        assert len(written) == len(re.findall(r"<h[1-6][ >]", built.read_text())), page


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert [page.name for page in pages if FETCHED.search(page.read_text())] == []
    styles = "".join(file.read_text() for file in site.rglob("*.css"))
    assert not re.search(r"""(?:@import|url\()\s*["']?(?:https?:)?//""", styles)


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w/.-]+)\)", index))


@pytest.mark.parametrize(
    "folder", ["runtime", "operator", "tests", "benchmarks", "hack", "examples", "crds", "Makefile"]
)
def test_every_page_that_the_code_names_exists(folder: str) -> None:
    files = [ROOT / folder] if (ROOT / folder).is_file() else list((ROOT / folder).rglob("*.*"))
    for file in files:
        if file.suffix in (".py", ".yaml", "") and "site" not in file.parts:
            for page in re.findall(r"\bdocs/[\w/-]+\.(?:md|png)\b", file.read_text()):
                assert (ROOT / page).is_file(), f"{file.relative_to(ROOT)} names {page}"
