"""Use and memory of the GPU that a run trains on, as its driver counts them: asking does not wait
for the device.
"""

from types import ModuleType
from typing import Any

import torch

MIB = 2**20


class GpuFigures:
    """Reads the figures of one device; those of a CPU, of a machine without nvidia-ml-py and of a
    driver that does not answer are {}.
    """

    def __init__(self, device: torch.device) -> None:
        self._nvml: ModuleType | None = None
        self._handle: Any = None
        if device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            # by its identity: CUDA_VISIBLE_DEVICES numbers devices anew, the driver does not
            uuid = torch.cuda.get_device_properties(device).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            return
        self._nvml = pynvml

    def read(self) -> dict[str, float]:
        """{"system/gpu_use": share of the last moments in which a kernel ran, 0 to 1,
        "system/gpu_memory_mib": memory in use by all processes}.
        """
        nvml = self._nvml
        if nvml is None:
            return {}
        try:
            used = nvml.nvmlDeviceGetMemoryInfo(self._handle).used
            share = nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0
        except nvml.NVMLError:
            # a driver that is restarted, or a device without these counters: no more questions
            self._nvml = None
            return {}
        return {"system/gpu_use": share, "system/gpu_memory_mib": used / MIB}
