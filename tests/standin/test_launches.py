"""Everything that an algorithm launches on a GPU binds, compiles and launches, under each supported
version of Triton: on the GPU that computes nothing.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.child_process import LONG, ROOT, run_python
from tests.standin import gpu
from tests.standin.play import cases
from tests.tritons import VERSIONS, environment

PARTS = 6  # of the cases, each with a process of its own
# under the versions that are not pinned: every kernel, in one form or two
SELECTED = (
    "ppo chasing persistent",
    "ppo cart_pole steps, 3 envs",
    "ppo pendulum persistent, 1 env",
    "ppo wide",
    "ppo memory",
    "ppo mingru",
    "ppo asynchronous",
    "sac prioritized",
    "rainbow, 5 rows",
    "fast_td3",
)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in's two libraries."""
    if missing := [compiler for compiler in ("cc", "c++") if shutil.which(compiler) is None]:
        pytest.skip(f"no {' and no '.join(missing)} to compile the stand-in with")
    folder = tmp_path_factory.mktemp("libraries")
    gpu.build(folder)
    return folder


def variables_of(version: str, libraries: Path) -> dict[str, str]:
    """Of a process with a version of Triton, "" for the pinned one, that compiles what no process
    with these libraries has compiled.
    """
    variables = environment(version) if version else os.environ | {"PYTHONPATH": str(ROOT)}
    return variables | {"TRITON_CACHE_DIR": str(libraries / "cache"), "OMP_NUM_THREADS": "1"}


def played(version: str, names: tuple[str, ...], libraries: Path, tmp_path: Path) -> dict[str, Any]:
    """What tests/standin/play.py says of these cases."""
    result = tmp_path / "result"
    words = ["-m", "tests.standin.play", str(libraries), str(result), *names]
    done = run_python(words, variables_of(version, libraries), check=False)
    assert result.exists(), done.stderr[-4000:]
    said = json.loads(result.read_text())
    failed = "\n\n".join(f"{name}: {text}" for name, text in said["failed"].items())
    assert not failed, failed
    return said


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_case_launches(part: int, libraries: Path, tmp_path: Path) -> None:
    names = tuple(cases())[part::PARTS]
    assert set(played("", names, libraries, tmp_path)["launched"]) == set(names)


def test_every_algorithm_is_played() -> None:
    from gpurl.algorithms import algorithm_names

    assert {algorithm for algorithm, _, _ in cases().values()} == set(algorithm_names())


@pytest.mark.timeout(LONG)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_kernel_launches_under_another_triton(
    version: str, libraries: Path, tmp_path: Path
) -> None:
    said = played(version, SELECTED, libraries, tmp_path)
    assert said["triton"] == version
    launched = {kernel for kernels in said["launched"].values() for kernel in kernels}
    assert set(said["kernels"]) == launched
    assert len(launched) > 20


# ---- that the stand-in sees mistakes ----

ARGUMENTS = "mean, x, 15, 3, 0, 0, 0, 1.0, BLOCK=16"
SEEN = {
    f"normalize_kernel[(1,)](x, mean, {ARGUMENTS})": "",
    f"normalize_kernel[(1,)](x, torch.zeros(3), {ARGUMENTS})": "cpu tensor?",
    f"normalize_kernel[(0,)](x, mean, {ARGUMENTS})": "an empty grid",
    f"normalize_kernel[(1, 70000)](x, mean, {ARGUMENTS})": "invalid argument",
    "normalize_kernel[(1,)](x, mean)": "missing",
    "x + torch.zeros(5, 3)": "Expected all tensors to be on the same device",
    "x.sum().item()": "the host waits for the device",
    "x if x.any() else mean": "the host waits for the device",
    "x[x > 0.0]": "DynamicOutputShapeException",
    "captured(lambda: normalize(x, mean, mean, 2.0))": "compiled during a capture",
    "captured(lambda: elsewhere(lambda: normalize(x, mean, mean, 1.0)))": "beside the capture",
}
TRY = """
import json, sys, traceback
from pathlib import Path
from tests.standin import gpu
from tests.standin.play import cases
gpu.load(Path(sys.argv[1]))
import torch
from gpurl.engine.graphs import CudaGraphs
from gpurl.kernels.moments import normalize, normalize_kernel
said = []
with gpu.stand_in() as device:
    x, mean = torch.zeros(5, 3, device="cuda"), torch.zeros(3, device="cuda")
    assert x.is_cuda and x[1:].data_ptr() == x.data_ptr() + 12
    captured = CudaGraphs(x.device).capture

    def elsewhere(function):
        with torch.cuda.stream(torch.cuda.default_stream()):
            return function()

    for line in json.loads(sys.argv[2]):
        try:
            eval(line)
        except Exception:
            said.append(traceback.format_exc())
        else:
            said.append("")
print(json.dumps([said, [str(launch) for launch in device.launches]]))
"""


def test_the_stand_in_sees_mistakes(libraries: Path) -> None:
    words = ["-c", TRY, str(libraries), json.dumps(list(SEEN))]
    done = run_python(words, variables_of("", libraries))
    errors, launches = json.loads(done.stdout)
    for (line, expected), error in zip(SEEN.items(), errors, strict=True):
        assert expected in error, (line, error)
        assert bool(expected) == bool(error), (line, error)
    launch = "Launch(kernel='normalize_kernel', grid=(1, 1, 1), threads=128, stream=0)"
    assert launches == [launch]
