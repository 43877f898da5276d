"""Figures of the GPU: of the device that trains, in its units, and none instead of an error."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from gpurl.run.gpu_figures import GpuFigures

GPU = torch.device("cuda:1")


class Driver(ModuleType):
    """Stands in for pynvml: two devices, and calls that may fail."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.fails_at = ""
        self.devices = {"GPU-a": (1 << 30, 10), "GPU-b": (3 << 30, 75)}

    def _call(self, name: str) -> None:
        if name == self.fails_at:
            raise self.NVMLError(name)

    def nvmlInit(self) -> None:
        self._call("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("nvmlDeviceGetHandleByUUID")
        assert uuid in self.devices
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._call("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(used=self.devices[handle][0])

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._call("nvmlDeviceGetUtilizationRates")
        return SimpleNamespace(gpu=self.devices[handle][1])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    uuids = {0: "a", 1: "b"}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=uuids[torch.device(device).index]),
    )
    return driver


def test_the_figures_are_those_of_the_device(driver: Driver) -> None:
    assert GpuFigures(GPU).read() == {"system/gpu_use": 0.75, "system/gpu_memory_mib": 3072.0}


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_a_driver_that_does_not_answer_gives_none(driver: Driver, name: str) -> None:
    driver.fails_at = name
    assert GpuFigures(GPU).read() == {}


@pytest.mark.parametrize("name", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates"])
def test_a_driver_that_stops_answering_is_asked_no_more(driver: Driver, name: str) -> None:
    figures = GpuFigures(GPU)
    assert figures.read()
    driver.fails_at = name
    assert figures.read() == {}
    driver.fails_at = ""
    assert figures.read() == {}


def test_a_cpu_and_a_machine_without_the_package_have_none(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GpuFigures(torch.device("cpu")).read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuFigures(GPU).read() == {}
