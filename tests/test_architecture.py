"""The house rules that a machine can check: who may import whom, first lines, and the map in
docs/architecture.md.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.file_map import PAGE, START, file_map

ROOT = Path(__file__).resolve().parent.parent
LEAVES = {
    "errors",
    "checks",
    "colors",
    "discovery",
    "registration",
    "engine.threads",
    "checkpoints.plain_files",
    "native_output",
}  # anyone may import them
# a module imports from its own layer or from earlier ones; a package is named once for all that is
# in it
LAYERS = (
    {"kernels"},
    {
        "envs.canvas",
        "envs.observation_groups",
        "envs.stacked_box",
        "envs.vec_env",
        "envs.wrapper",
        "envs._counting_env",
        "envs.torch_env",
    },
    {"memory", "losses", "selection", "nn", "buffers", "checkpoints"},
    {"algorithms"},
    {"guards"},
    {"engine"},
    {"run", "video"},
    {
        *("api", "seeds", "runs_beside", "tuning", "cluster", "policy", "model_soup", "export"),
        "adapters",
    },
    {"cli", "__init__", "__main__"},
)
LINKS = (ROOT / "gpurl" / "envs", ROOT / "gpurl" / "kernels")
SOURCES = [
    path
    for folder in ("gpurl", "envs", "kernels")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not {*LINKS} & {*path.parents}
]


def module_of(path: Path) -> str:
    """gpurl/run/trainer.py -> run.trainer, envs/chasing.py -> envs.chasing."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts
    return ".".join(parts[1:] if parts[0] == "gpurl" else parts)


MODULES = {module_of(path) for path in SOURCES}


def imports_of(path: Path) -> set[str]:
    """gpurl's modules that a file imports: at its top, inside functions, and for type checkers."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpurl"):
            module = (node.module or "").removeprefix("gpurl").lstrip(".")
            inner = {f"{module}.{name.name}".lstrip(".") for name in node.names}
            modules = inner & MODULES  # of `from gpurl.run import plot`
            names |= modules or {module}
        elif isinstance(node, ast.Import):
            names |= {
                name.name.removeprefix("gpurl.")
                for name in node.names
                if name.name.startswith("gpurl.")
            }
    return names - {module_of(path)}


def layer_of(module: str) -> int:
    for number, layer in enumerate(LAYERS):
        if module in layer or module.split(".")[0] in layer:
            return number
    raise AssertionError(
        f"{module} has no layer in tests/test_architecture.py: add it where it belongs"
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    module = module_of(path)
    for imported in imports_of(path):
        if imported in LEAVES or imported == "":
            continue
        if module in LEAVES:
            raise AssertionError(f"{module} must import nothing of gpurl, imports {imported}")
        if module.startswith("kernels"):
            assert imported.startswith("kernels"), (
                f"{module} imports {imported}: kernels know torch and triton only"
            )
        elif module.startswith("envs"):
            assert imported.startswith(("kernels", "envs")), (
                f"{module} imports {imported}: envs import kernels and their own contract only"
            )
            if module in LAYERS[1]:
                assert imported in LAYERS[1] or imported.startswith("kernels"), (
                    f"{module} imports the task {imported}"
                )
        elif module == "cli.doctor" and imported.startswith(
            ("envs.isaac_gym", "envs.mujoco._warp_worlds")
        ):
            pass  # which asks whether those simulators can be started
        elif imported.startswith("envs"):
            assert imported in {
                "envs.canvas",
                "envs.names",
                "envs.numpy.spaces",
                "envs.deployment",
                "envs.observation_groups",
                "envs.stacked_box",
                "envs.vec_env",
                "envs.wrapper",
                "envs.torch_env",
                "envs.registry",
            }, f"{module} imports the task {imported}: get it by name"
        else:
            assert layer_of(imported) <= layer_of(module), (
                f"{module} imports {imported}, which stands above it"
            )


def test_there_are_no_circles() -> None:
    """Modules that import each other cannot be read one after the other."""
    imports = {module_of(path): imports_of(path) & MODULES for path in SOURCES}
    # take away what imports nothing that is left, until nothing changes
    while leaves := {name for name, needed in imports.items() if not needed & imports.keys()}:
        imports = {name: needed for name, needed in imports.items() if name not in leaves}
    # and what nothing that is left imports
    while imports:
        needed_by_some = set().union(*imports.values())
        if not (tops := imports.keys() - needed_by_some):
            break
        imports = {name: needed for name, needed in imports.items() if name not in tops}
    assert not imports, {name: needed & imports.keys() for name, needed in imports.items()}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_opens_with_a_sentence(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} has no first sentence"


def test_the_old_top_level_names_are_refused() -> None:
    for name in ("envs", "kernels"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"import gpurl.{name}, not {name}" in done.stderr


def test_import_is_light() -> None:
    """`import gpurl` and `--help` must not wait for torch; gymnasium is there because the tasks are
    registered with it.
    """
    heavy = "{'torch', 'triton', 'tyro', 'matplotlib', 'tensorboard'}"
    code = (
        f"import sys, gpurl, gpurl.cli.main; gpurl.cli.main.main(['--help']); assert not {heavy} & "
        f"set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_map_has_the_first_sentence_of_every_file() -> None:
    page = PAGE.read_text()
    advice = "docs/architecture.md is not current: python -m tests.tools.file_map"
    assert START + page.partition(START)[2] == file_map(), advice
    for path in SOURCES:
        folder = path.parent.relative_to(ROOT)
        assert f"## {folder}/\n" in page, path


def test_nothing_is_pickled_or_evaluated() -> None:
    banned = (
        "import pickle",
        "torch.load(",
        "torch.save(",
        "yaml.load(",
        "eval(",
        "exec(",
        "shell=True",
        "os.system(",
    )
    of_worker = (
        'torch.load(source, map_location="cpu", weights_only=True)'  # in a process of its own
    )
    for path in SOURCES:
        text = "\n".join(
            line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")
        )
        if path.parts[-2:] == ("convert", "worker.py"):
            assert text.count(of_worker) == 1
            text = text.replace(of_worker, "")
        for word in banned:
            hits = [
                line
                for line in text.splitlines()
                if word in line and f"_{word}" not in line and f".{word}" not in line
            ]
            assert not hits, f"{path}: {hits}"


def test_a_security_rule_is_switched_off_for_a_reason() -> None:
    lines = [
        f"{path}: {line}"
        for path in SOURCES
        for line in path.read_text().splitlines()
        if re.search(r"noqa: S\d", line)
    ]
    assert lines
    assert not [line for line in lines if not re.search(r"noqa: S\d+ - \w+", line)]
    assert not re.search(r"noqa: S(?!\d|IM)", "".join(path.read_text() for path in SOURCES))
