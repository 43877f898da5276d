"""Tests marked `gpu` are skipped where torch sees no CUDA device; runs draw their curve only in tests marked `curve`.

Properties (test_properties_*.py) are tried on the same examples each time; GPURL_EXAMPLES=N tries N instead of 30, for a soak.
"""

import os
import sys

import pytest
import torch

try:
    from hypothesis import HealthCheck, Phase, settings
except ImportError:  # a machine that has what the GPU tests need and no more
    collect_ignore_glob = ["test_properties_*.py"]
else:
    MANY = int(os.environ.get("GPURL_EXAMPLES", "30"))
    NO_CLOCK = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # of a machine that others work on
    settings.register_profile("gpurl", derandomize=True, database=None, max_examples=MANY, print_blob=True, **NO_CLOCK)
    settings.register_profile("mutants", settings.get_profile("gpurl"), phases=(Phase.explicit, Phase.generate))  # that it fails is enough
    settings.load_profile("gpurl")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_curve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes longer to draw than most runs of these tests take to train."""
    if "gpurl.api" in sys.modules and not request.node.get_closest_marker("curve"):
        monkeypatch.setattr("gpurl.api.plot_curve", lambda folder: folder)
