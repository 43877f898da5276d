"""Without Triton, as on macOS: everything imports, trains and reports, and a kernel that needs it
says so.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpurl.kernels import optional_triton

ROOT = Path(__file__).resolve().parents[2]
# what Python raises where the package is missing
WITHOUT = "import sys; sys.modules['triton'] = None; "


def python(folder: Path, code: str, **variables: str) -> str:
    """What a process without Triton prints."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kernels", ["c", "torch"])
def test_ppo_trains_without_triton(kernels: str, tmp_path: Path) -> None:
    words = ["train", "ppo", "chasing", "num_envs=16", "horizon=8", "minibatches=2"]
    words += ["total_steps=512", "eval_episodes=2", "device=cpu", "run_dir=run"]
    code = f"from gpurl.cli.main import main; sys.exit(main({words}))"
    text = python(tmp_path, code, GPURL_CPU_KERNEL="1" if kernels == "c" else "0")
    assert "ended after 512 steps: total_steps reached" in text


def test_everything_is_importable_and_the_doctor_reports(tmp_path: Path) -> None:
    names = [
        f"gpurl.{folder}.{path.stem}"
        for folder in ("kernels", "envs", "engine")
        for path in (ROOT / "gpurl" / folder).glob("*.py")
        if path.stem not in ("__init__", "isaac_lab")
    ]
    code = f"import importlib; [importlib.import_module(name) for name in {names}]; "
    code += "import importlib.metadata as m, gpurl.cli.doctor as doctor; find = m.version; "
    # as if it had never been installed, on a machine for which it does not exist
    code += "\ndef version(name):"
    code += "\n    if name == 'triton': raise m.PackageNotFoundError(name)"
    code += "\n    return find(name)"
    code += "\nm.version = version; sys.platform = 'darwin'"
    code += "\nfrom gpurl.cli.main import main; sys.exit(main(['doctor']))"
    text = python(tmp_path, code)
    assert "triton is missing: it exists for Linux only; kernels run in C or in torch" in text
    assert "engines" in text


def test_a_kernel_that_needs_it_says_so(tmp_path: Path) -> None:
    code = (
        "import torch; from gpurl.kernels.moments import normalize\n"
        "try: normalize(torch.ones(2, 3), torch.zeros(3), torch.ones(3), 1.0)\n"
        "except RuntimeError as error: print(error)\n"
    )
    text = python(tmp_path, code, GPURL_BACKEND="triton", TRITON_INTERPRET="1")
    assert "needs Triton, which is not installed" in text


def test_a_triton_that_cannot_be_imported_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("import no_such_library\n")
    done = subprocess.run(
        [sys.executable, "-c", "import gpurl.kernels.gae"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert "No module named 'no_such_library'" in done.stderr


def test_the_stand_in_counts_as_triton_does() -> None:
    triton = pytest.importorskip("triton")
    for number in range(1, 70):
        stand_in = optional_triton._Triton
        assert stand_in.next_power_of_2(number) == triton.next_power_of_2(number)
        assert stand_in.cdiv(number, 16) == triton.cdiv(number, 16)
