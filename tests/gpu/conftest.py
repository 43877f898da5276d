"""These tests need a GPU. With GPURL_FAKE_GPU=1 the first case of each runs on the stand-in of
tests/fake_cuda.py, its kernels interpreted, in small sizes: tests/test_gpu_tests.py starts them so.
That shows a wrong name or argument, a tensor on the wrong device, and a wait where none may be.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.conftest import FAKE_GPU
from tests.fake_cuda import FakeCuda
from tests.quick_interpreter import quicken

# warp and the server of Isaac Gym would have to see the stand-in too
collect_ignore_glob = ["test_isaac_gym_*", "test_mujoco_*"] if FAKE_GPU else []
if FAKE_GPU:
    quicken()


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with FakeCuda() if FAKE_GPU else nullcontext():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not FAKE_GPU:
        return
    first = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
    config.hook.pytest_deselected(items=[item for item in items if item not in first])
    items[:] = [item for item in items if item in first]
