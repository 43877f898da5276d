"""What tests of several files share: numbers in float64, and a policy that balances."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpurl.envs.registry import make_env
from tests.cloned_runs import balance, clone, record


@pytest.fixture
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that cloned ten episodes of `balance`."""
    folder = tmp_path_factory.mktemp("balancer")
    path = record(folder / "ten.npz", make_env("cart_pole", 2, "cpu", 0), balance, 2500)
    return clone(folder / "run", "cart_pole", dataset=path).folder
