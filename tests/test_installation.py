"""How gpurl is installed and its pages are published: editable installs that tools follow, the
Dockerfile, the extras, the site.
"""

import itertools
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
import yaml

tomllib = pytest.importorskip("tomllib")  # of Python 3.11 on
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {*PROJECT["optional-dependencies"]}
# the words that Docker knows
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "ARG", "ENTRYPOINT", "CMD"}


# ---- setup.py ----


def setup_arguments(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """What setup.py gives to setuptools in this working directory."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", given.update)
    monkeypatch.chdir(folder)
    runpy.run_path(str(ROOT / "setup.py"))
    return given


def test_an_editable_install_is_a_path_where_links_lead_to_all_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """mypy and editors follow a path, no import hook; each package is where the path leads."""
    given = setup_arguments(monkeypatch, ROOT)
    assert given["options"] == {"editable_wheel": {"mode": "compat"}}
    assert {"gpurl", "gpurl.envs.mujoco", "gpurl.kernels"} <= {*given["packages"]}
    for package in given["packages"]:
        assert (ROOT / package.replace(".", "/") / "__init__.py").is_file(), package
    assert (ROOT / "gpurl" / "py.typed").is_file()
    assert given["package_data"]["gpurl"] == ["py.typed"]


def test_a_checkout_without_links_keeps_the_finder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("gpurl", "envs", "kernels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    # git writes the path of the target into a file there
    (tmp_path / "gpurl" / "envs").write_text("../envs")
    given = setup_arguments(monkeypatch, tmp_path)
    assert given["options"] == {}
    assert given["package_dir"]["gpurl.envs"] == "envs"


# ---- Dockerfile ----


def instructions() -> Iterator[tuple[str, str]]:
    """(instruction, its words) of deploy/Dockerfile."""
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, words = line.partition(" ")
            yield name, words


def test_the_dockerfile_copies_what_there_is_and_installs_what_is_tested() -> None:
    steps = list(instructions())
    assert steps[0][0] == "FROM"
    assert {name for name, _ in steps} <= INSTRUCTIONS
    # what a build needs is copied, and nothing that is not there
    copied = {word for name, words in steps if name == "COPY" for word in words.split()[:-1]}
    assert all((ROOT / word).exists() for word in copied)
    needed = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "gpurl", "envs", "kernels"}
    assert copied == needed | {"constraints.txt"}
    # the tested versions, with extras that exist
    runs = [shlex.split(words) for name, words in steps if name == "RUN"]
    (installs,) = (words for words in runs if "--requirements" in words)
    assert installs[installs.index("--constraint") + 1] == "constraints.txt"
    extras = {after for word, after in itertools.pairwise(installs) if word == "--extra"}
    assert extras == {"mujoco", "video", "plot"}
    assert extras <= EXTRAS
    assert dict(steps)["ENTRYPOINT"] == '["gpurl"]'


# ---- pages ----


def test_the_page_of_installing_has_every_extra() -> None:
    rows = re.findall(r"^\| (`.+?) \|", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert sorted(named) == sorted(EXTRAS)


def pages(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for each in nav if isinstance(nav, list) else nav.values():
            yield from pages(each)


def test_the_site_has_every_page_of_docs_once() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert site["docs_dir"] == "docs"
    written = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(pages(site["nav"])) == sorted(written)


def test_the_moving_picture_is_small() -> None:
    picture = (ROOT / "docs" / "chasing.gif").read_bytes()
    assert picture[:6] == b"GIF89a"
    assert len(picture) < 600_000
