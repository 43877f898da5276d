"""What is imported is declared, what is declared is imported, known holes lie below the floors, and
the tested set pins all of it.
"""

import ast
import itertools
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

tomllib = pytest.importorskip("tomllib")  # of Python 3.11 on
ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(text) for text in PROJECT["dependencies"]]
EXTRAS = {
    extra: [Requirement(text) for text in texts]
    for extra, texts in PROJECT["optional-dependencies"].items()
}
MODULES = {
    "pillow": "PIL",
    "pyyaml": "yaml",
    "warp-lang": "warp",
    "rsl-rl-lib": "rsl_rl",
    "mlflow-skinny": "mlflow",
    "nvidia-ml-py": "pynvml",
}  # where the package is called otherwise
NO_REQUIREMENT = {
    "isaacgym",
    "isaacgymenvs",
    "hydra",
}  # of the simulator's own Python, which the user makes
NOT_IMPORTED = {"sqlalchemy", "alembic"}  # mlflow-skinny's local data base needs them
TOOLS = {
    "gymnasium",
    "hypothesis",
    "imageio",
    "imageio-ffmpeg",
    "ipykernel",
    "nbclient",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "optuna",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "scipy",
    "mjviser",
    "mypy",
    "trackio",
    "viser",
    "wandb",
}  # of the tests; imageio draws Gymnasium's MuJoCo, gymnasium[box2d] has more tasks to learn
FLOORS = {  # the first versions without the hole
    "torch": (
        "2.10",
        "CVE-2025-32434 (2.6) and CVE-2026-24747 (2.10): files that torch.load(weights_only=True) "
        "reads run code",
    ),
    "pyyaml": ("5.4", "CVE-2020-14343: full_load runs code"),
    "filelock": (
        "3.20.3",
        "CVE-2025-68146 (3.20.1) and CVE-2026-22701 (3.20.3): a lock goes through a link that "
        "appears in time",
    ),
    "numpy": ("1.22", "CVE-2021-34141 and others: buffer overflows"),
    "ray": (
        "2.59",
        "from then on its local clusters ask for a token: others here run no code",
    ),
    "stable-baselines3": ("2.9", "GHSA-887c-mr87-cxwp comes in by its floor of torch"),
}


def module_of(requirement: Requirement) -> str:
    name = canonicalize_name(requirement.name)
    return MODULES.get(name, name.replace("-", "_"))


def imported() -> set[str]:
    """First names of all modules that gpurl/, envs/ and kernels/ import, by a statement or by a
    name in import_module's place.
    """
    found = set()
    for folder in ("gpurl", "envs", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {name.name.partition(".")[0] for name in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    found.add(node.module.partition(".")[0])
                elif isinstance(node, ast.Constant) and node.value in (
                    "mujoco",
                    "mujoco_warp",
                    "warp",
                    "onnx",
                    "onnxruntime",
                    "onnxscript",
                ):
                    found.add(node.value)
    return found - set(sys.stdlib_module_names) - {"gpurl"} - NO_REQUIREMENT


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    declared = {module_of(each) for each in CORE} | {
        module_of(each) for extra in EXTRAS if extra != "dev" for each in EXTRAS[extra]
    }
    assert imported() == declared - NOT_IMPORTED
    assert {canonicalize_name(each.name) for each in EXTRAS["dev"]} == TOOLS


def test_what_every_run_needs_is_no_extra() -> None:
    """The core is what files import at their top."""
    top = set()
    for path in [*(ROOT / "gpurl").glob("*.py"), *(ROOT / "kernels").glob("*.py")]:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                top |= {(getattr(node, "module", None) or node.names[0].name).partition(".")[0]}
    assert top - set(sys.stdlib_module_names) - {"gpurl"} <= {module_of(each) for each in CORE}


@pytest.mark.parametrize("name", FLOORS)
def test_floors_stay_above_known_holes(name: str) -> None:
    (requirement,) = (
        each
        for each in [*CORE, *itertools.chain(*EXTRAS.values())]
        if canonicalize_name(each.name) == name
    )
    floors = [
        Version(each.version)
        for each in requirement.specifier
        if each.operator in (">=", "==", "~=")
    ]
    assert floors, f"{name} has no floor: {FLOORS[name][1]}"
    assert max(floors) >= Version(FLOORS[name][0]), FLOORS[name][1]


def test_the_tested_set_pins_what_is_needed_and_tested() -> None:
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert all(re.match(r"[\w.-]+==[\w.]+(; .+)?$", line) for line in lines)
    pins: dict[str, list[Requirement]] = {}
    for line in lines:
        pins.setdefault(canonicalize_name(Requirement(line).name), []).append(Requirement(line))
    for requirement in [*CORE, *EXTRAS["dev"], *EXTRAS["mujoco"]]:
        name = canonicalize_name(requirement.name)
        assert name in pins, f"constraints.txt lacks {name}"
        for pin in pins[name]:
            (version,) = (each.version for each in pin.specifier)
            assert requirement.specifier.contains(version), f"{pin} is not {requirement}"
