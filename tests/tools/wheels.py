"""Finds and downloads the wheels that a machine with a GPU and no network needs.

`python -m tests.tools.wheels --python-version 3.12` downloads them into wheels/, without torch and
triton, which the machine must have.
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
except ImportError:  # a bare Python has pip, which contains a copy
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

from benchmarks.peers.installation import PEERS
from benchmarks.results_table import ROOT

WHEELS = ROOT / "wheels"
CONSTRAINTS = ROOT / "constraints.txt"
PREINSTALLED = ("torch", "triton")  # with their requirements
FOR_TESTS = ("pytest>=8", "pytest-timeout>=2.3")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)


@dataclass(frozen=True)
class Distribution:
    """A distribution that is installed, is there as a wheel, or could be downloaded."""

    name: str
    version: str
    requires: tuple[str, ...]
    wheel: Path | None = None


Find = Callable[[Requirement], Distribution | None]


def own_requirements() -> list[str]:
    """The requirements of gpurl, from pyproject.toml, and of its tests."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise ValueError("pyproject.toml has no list of dependencies")
    return [*re.findall(r'^ *"(.+)",$', block[1], re.MULTILINE), *FOR_TESTS]


def physics_requirements() -> list[str]:
    """The requirements of MuJoCo's tasks: the extra `mujoco` of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    line = re.search(r"^mujoco = \[(.*)\]$", text, re.MULTILINE)
    if line is None:
        raise ValueError("pyproject.toml has no extra mujoco")
    return re.findall(r'"([^"]+)"', line[1])


def closure(
    roots: Iterable[str], find: Find, environment: dict[str, str] | None = None
) -> tuple[dict[str, Distribution], dict[str, Requirement]]:
    """(the distributions that `roots` need and `find` has, by name; the requirements that it
    lacks). Markers are evaluated in `environment`; requirements of PREINSTALLED are ignored.
    """
    distributions = dict[str, Distribution]()
    missing = dict[str, Requirement]()
    marker_environment = {**default_environment(), **(environment or {})}
    waiting = [(Requirement(root), frozenset[str]()) for root in roots]
    seen = set[tuple[str, frozenset[str]]]()
    while waiting:
        # skip what this machine does not need, or has
        requirement, parent_extras = waiting.pop()
        if requirement.marker and not any(
            requirement.marker.evaluate({**marker_environment, "extra": extra})
            for extra in parent_extras | {""}
        ):
            continue
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if name in PREINSTALLED:
            continue

        # note the missing ones with all their versions, and go on with what the others need
        distribution = find(requirement)
        if distribution is None:
            merged = missing.setdefault(
                name, Requirement(f"{requirement.name}{requirement.specifier}")
            )
            merged.specifier &= requirement.specifier
        elif (name, extras) not in seen:
            seen.add((name, extras))
            distributions[name] = distribution
            waiting += [(Requirement(each), extras) for each in distribution.requires]
    return distributions, missing


# ---- sources of distributions ----


def installed(requirement: Requirement) -> Distribution | None:
    """The distribution in this Python, if its version satisfies the requirement."""
    try:
        package = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return None
    if not requirement.specifier.contains(package.version, prereleases=True):
        return None
    return Distribution(package.metadata["Name"], package.version, tuple(package.requires or ()))


def finder(folder: Path) -> Find:
    """A function that finds wheels in `folder`."""
    wheels = [_read_wheel(path) for path in sorted(folder.glob("*.whl"))]

    def find(requirement: Requirement) -> Distribution | None:
        name = canonicalize_name(requirement.name)
        matches = [
            each
            for each in wheels
            if canonicalize_name(each.name) == name and requirement.specifier.contains(each.version)
        ]
        return matches[-1] if matches else None

    return find


def _read_wheel(path: Path) -> Distribution:
    with zipfile.ZipFile(path) as archive:
        (metadata,) = (
            name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        fields = email.message_from_bytes(archive.read(metadata))
    return Distribution(
        fields["Name"], fields["Version"], tuple(fields.get_all("Requires-Dist") or ()), path
    )


def pinned(requirement: Requirement) -> str:
    """`name==version` if constraints.txt pins it for this Python, else the requirement itself."""
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
    """The distributions that `roots` need, by name, on the machine that pip's options `target` and
    the markers' `environment` describe.

    pip resolves one level at a time, as otherwise it would look for torch and its libraries too.
    ValueError if two distributions need different versions of a third one.
    """
    known = dict[str, Distribution]()

    def find(requirement: Requirement) -> Distribution | None:
        chosen = known.get(canonicalize_name(requirement.name))
        if chosen and not requirement.specifier.contains(chosen.version, prereleases=True):
            raise ValueError(
                f"{chosen.name} {chosen.version} was chosen, but {requirement} is needed too"
            )
        return chosen

    while True:
        distributions, missing = closure(roots, find, environment)
        if not missing:
            return distributions
        known |= _choose_versions(list(map(str, missing.values())), target)


def _choose_versions(requirements: list[str], target: list[str]) -> dict[str, Distribution]:
    """The distributions that pip chooses for these requirements, without their own ones."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps"]
        pip += ["--ignore-installed", "--report", str(report), "--target", folder]
        pip += ["--constraint", str(CONSTRAINTS)]
        subprocess.run([*pip, *target, *requirements], check=True)
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    chosen = dict[str, Distribution]()
    for item in items:
        fields = item["metadata"]
        chosen[canonicalize_name(fields["name"])] = Distribution(
            fields["name"], fields["version"], tuple(fields.get("requires_dist", ()))
        )
    return chosen


def main(words: list[str] | None = None) -> int:
    """Download the wheels."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--python-version", default="3.12", help="Python of the machine; default 3.12"
    )
    parser.add_argument(
        "--platform",
        nargs="+",
        default=PLATFORMS,
        help=f"platforms of its wheels; default {' '.join(PLATFORMS)}",
    )
    parser.add_argument("--without-peers", action="store_true", help="skip the other trainers")
    parser.add_argument("--without-physics", action="store_true", help="skip MuJoCo, 150 MiB")
    parser.add_argument(
        "--have",
        type=Path,
        help="a file with the packages of the machine, like `pip freeze`; they are skipped",
    )
    parser.add_argument("--folder", type=Path, default=WHEELS, help="default wheels/")
    options = parser.parse_args(words)

    # resolve for that machine
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
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
    }
    distributions = resolved(roots, target, environment)

    # download the missing ones
    freeze = options.have.read_text() if options.have else ""
    have = {canonicalize_name(name) for name in re.findall(r"^[\w.-]+", freeze, re.M)}
    pins = [
        f"{each.name}=={each.version}"
        for name, each in sorted(distributions.items())
        if name not in have
    ]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", str(options.folder), *target, *pins], check=True)
    size = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    print(
        f"{len(pins)} wheels for Python {options.python_version}; {options.folder} now holds "
        f"{size / 2**20:.0f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
