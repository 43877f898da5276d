"""Tests marked `gpu` are skipped without a CUDA device; runs draw their curve only in tests marked
`curve`; no test uses a network.

Properties (test_properties_*.py) are tried on the same 30 examples each time; with GPURL_EXAMPLES=N
on N others each time, for a soak.
"""

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.child_process import LONG

try:
    from hypothesis import HealthCheck, Phase, settings
except ImportError:  # a machine that has what the GPU tests need and no more
    collect_ignore_glob = ["**/test_properties_*.py"]
else:
    MANY = int(os.environ.get("GPURL_EXAMPLES", "30"))
    NO_CLOCK = {
        "deadline": None,
        "suppress_health_check": [HealthCheck.too_slow],
    }  # of a machine that others work on
    settings.register_profile(
        "gpurl",
        derandomize="GPURL_EXAMPLES" not in os.environ,
        database=None,
        max_examples=MANY,
        print_blob=True,
        **NO_CLOCK,
    )
    settings.register_profile(
        "mutants", settings.get_profile("gpurl"), phases=(Phase.explicit, Phase.generate)
    )  # that it fails is enough
    settings.load_profile("gpurl")


# tests marked `gpu` run on the stand-in of tests/fake_cuda.py
FAKE_GPU = os.environ.get("GPURL_FAKE_GPU") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name.startswith("test_properties_"):
            item.add_marker(pytest.mark.soak)
    # minutes long: begun first, none of them is what the last worker is still busy with
    items.sort(key=lambda item: not _takes_minutes(item))
    if torch.cuda.is_available() or FAKE_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _takes_minutes(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("timeout")
    return marker is not None and marker.args[0] >= LONG


@pytest.fixture(autouse=True)
def _no_curve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to draw than most runs of these tests take to train."""
    if "gpurl.api" in sys.modules and not request.node.get_closest_marker("curve"):
        monkeypatch.setattr("gpurl.api.plot_curve", lambda folder: folder)


def _is_here(address: Any) -> bool:
    """Of a Unix socket, or of this machine's loopback."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@pytest.fixture(autouse=True, scope="session")
def _no_network() -> Iterator[None]:
    """Tests that talk to another machine, or let one talk to them, fail: this program does neither
    unless it is asked to.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex", "bind", "sendto"):
            patch.setattr(socket.socket, name, _guarded(name))
        yield


def _guarded(name: str) -> Any:
    real = getattr(socket.socket, name)

    def call(self: socket.socket, *arguments: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_here(arguments[-1]):
            pytest.fail(f"socket.{name} to {arguments[-1]}: tests use no network")
        return real(self, *arguments)

    return call


@pytest.fixture
def _in_float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="session")
def balancer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that cloned ten episodes of `balance`."""
    from gpurl.envs.registry import make_env
    from tests.cloned_runs import balance, clone, record

    folder = tmp_path_factory.mktemp("balancer")
    path = record(folder / "ten.npz", make_env("cart_pole", 2, "cpu", 0), balance, 2500)
    return clone(folder / "run", "cart_pole", dataset=path).folder
