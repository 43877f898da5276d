"""The wheels that a machine with a GPU and no network needs: which they are, and how to fetch them
elsewhere.

`python -m tests.tools.wheels --python-version 3.12` downloads them into wheels/, without torch and
triton, which such a machine has.
"""

import argparse
import email
import importlib.metadata
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

try:
    from packaging.markers import default_environment
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError:  # a bare Python has pip, which brings a copy
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

from benchmarks.peers.installation import PEERS
from benchmarks.results_table import ROOT

WHEELS, CONSTRAINTS = ROOT / "wheels", ROOT / "constraints.txt"
OF_THE_MACHINE = ("torch", "triton")  # with all that torch brings
FOR_TESTS = ("pytest>=8", "pytest-timeout>=2.3")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


@dataclass(frozen=True)
class Distribution:
    """A distribution that is installed, lies as a wheel, or could be downloaded."""

    name: str
    version: str
    requires: tuple[str, ...]
    wheel: Path | None = None


Find = Callable[[Requirement], Distribution | None]


def own_requirements() -> list[str]:
    """What gpurl itself needs, from pyproject.toml, and what its tests need."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise ValueError("pyproject.toml has no list of dependencies")
    return [*re.findall(r'^ *"(.+)",$', block[1], re.MULTILINE), *FOR_TESTS]


def physics_requirements() -> list[str]:
    """What MuJoCo's tasks need, the extra `mujoco` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = re.search(r"^mujoco = \[(.*)\]$", text, re.MULTILINE)
    if line is None:
        raise ValueError("pyproject.toml has no extra mujoco")
    return re.findall(r'"([^"]+)"', line[1])


def closure(
    roots: Iterable[str], find: Find, environment: dict[str, str] | None = None
) -> tuple[dict[str, Distribution], dict[str, Requirement]]:
    """(all that `roots` need and `find` has, by name; what it lacks). Where markers apply in
    `environment`; not through OF_THE_MACHINE.
    """
    found, missing = dict[str, Distribution](), dict[str, Requirement]()
    surroundings = {**default_environment(), **(environment or {})}
    waiting, seen = (
        [(Requirement(root), frozenset[str]()) for root in roots],
        set[tuple[str, frozenset[str]]](),
    )
    while waiting:
        requirement, extras_of_parent = waiting.pop()
        if requirement.marker and not any(
            requirement.marker.evaluate({**surroundings, "extra": extra})
            for extra in extras_of_parent | {""}
        ):
            continue
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if name in OF_THE_MACHINE:
            continue
        distribution = find(requirement)
        if distribution is None:
            wanted = missing.setdefault(
                name, Requirement(f"{requirement.name}{requirement.specifier}")
            )
            wanted.specifier &= requirement.specifier
            continue
        if (name, extras) not in seen:
            seen.add((name, extras))
            found[name] = distribution
            waiting += [(Requirement(each), extras) for each in distribution.requires]
    return found, missing


# ---- where distributions are found ----


def installed(requirement: Requirement) -> Distribution | None:
    """In this Python, if its version will do."""
    try:
        found = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not requirement.specifier.contains(found.version, prereleases=True):
        return None
    return Distribution(found.metadata["Name"], found.version, tuple(found.requires or ()))


def classes_defined_in(folder: Path) -> Find:
    """A function that finds wheels in `folder`."""
    wheels = [_of_wheel(path) for path in sorted(folder.glob("*.whl"))]

    def find(requirement: Requirement) -> Distribution | None:
        name = canonicalize_name(requirement.name)
        validate_for_resume = [
            each
            for each in wheels
            if canonicalize_name(each.name) == name and requirement.specifier.contains(each.version)
        ]
        return validate_for_resume[-1] if validate_for_resume else None

    return find


def _of_wheel(path: Path) -> Distribution:
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (
            name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        fields = email.message_from_bytes(archive.read(metadata))
    return Distribution(
        fields["Name"], fields["Version"], tuple(fields.get_all("Requires-Dist") or ()), path
    )


def pinned(requirement: Requirement) -> str:
    """`name==version` where constraints.txt has one for this Python, else the requirement
    itself.
    """
    for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            applies = pin.marker is None or pin.marker.evaluate()
            if applies and canonicalize_name(pin.name) == canonicalize_name(requirement.name):
                return f"{pin.name}{pin.specifier}"
    return f"{requirement.name}{requirement.specifier}"


# ---- fetching ----


def resolved(
    roots: list[str], target: list[str], environment: dict[str, str]
) -> dict[str, Distribution]:
    """What `roots` need on the machine that pip's options `target` and the markers' `environment`
    describe, by name.

    pip is asked level by level and never for all at once: it would look for torch and its libraries
    too. ValueError when two distributions need versions of a third one that exclude each other.
    """
    known = dict[str, Distribution]()

    def find(requirement: Requirement) -> Distribution | None:
        found = known.get(canonicalize_name(requirement.name))
        if found is not None and not requirement.specifier.contains(
            found.version, prereleases=True
        ):
            raise ValueError(
                f"{found.name} {found.version} was chosen, but {requirement} is needed too"
            )
        return found

    while True:
        found, missing = closure(roots, find, environment)
        if not missing:
            return found
        known |= _asked(list(map(str, missing.values())), target)


def _asked(requirements: list[str], target: list[str]) -> dict[str, Distribution]:
    """The versions that pip chooses for these alone."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--report",
            str(report),
        ]
        subprocess.run(
            [*pip, "--target", folder, "--constraint", str(CONSTRAINTS), *target, *requirements],
            check=True,
        )
        items = [
            item["metadata"] for item in json.loads(report.read_text(encoding="utf-8"))["install"]
        ]
    return {
        canonicalize_name(item["name"]): Distribution(
            item["name"], item["version"], tuple(item.get("requires_dist", ()))
        )
        for item in items
    }


def main(words: list[str] | None = None) -> int:
    """Download the wheels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python-version", default="3.12", help="of the machine with the GPU; default 3.12"
    )
    parser.add_argument(
        "--platform",
        nargs="+",
        default=PLATFORMS,
        help=f"what its wheels may be for; default {' '.join(PLATFORMS)}",
    )
    parser.add_argument("--without-peers", action="store_true", help="leave out the other trainers")
    parser.add_argument("--without-physics", action="store_true", help="leave out MuJoCo, 150 MiB")
    parser.add_argument(
        "--have",
        type=Path,
        help="a file of names, or `pip freeze`, of what that machine has: left out",
    )
    parser.add_argument("--folder", type=Path, default=WHEELS, help="default wheels/")
    options = parser.parse_args(words)
    target = ["--only-binary=:all:", "--python-version", options.python_version]
    target += [word for platform in options.platform for word in ("--platform", platform)]
    roots = [
        *own_requirements(),
        *(() if options.without_peers else PEERS),
        *(() if options.without_physics else physics_requirements()),
    ]
    environment = {
        "python_version": options.python_version,
        "python_full_version": f"{options.python_version}.0",
    }
    environment |= {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    found = resolved(roots, target, environment)
    have = (
        set()
        if options.have is None
        else {
            canonicalize_name(name)
            for name in re.findall(r"^[\w.-]+", options.have.read_text(), re.M)
        }
    )
    wanted = [
        f"{each.name}=={each.version}" for name, each in sorted(found.items()) if name not in have
    ]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(options.folder),
    ]
    subprocess.run([*pip, *target, *wanted], check=True)
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    print(
        f"{len(wanted)} wheels for Python {options.python_version}; {options.folder} now holds "
        f"{size / 2**20:.0f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
