"""Tests marked `gpu` are skipped where torch sees no CUDA device; runs draw their curve only in tests marked `curve`."""

import sys

import pytest
import torch


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
