"""The report of `gpurl doctor` on Isaac Gym: the versions in its Python, and a test of shared
tensors in both directions.
"""

import torch

from gpurl.envs.isaac_gym.process import SimulatorProcess, find_python
from gpurl.envs.isaac_gym.server import CudaTensors, HostTensors, layout_of
from gpurl.errors import EnvError, GpurlError

SIZES = (4, 4, 0, 4)  # obs and action: [4, 4]


def describe(seconds: float = 120.0) -> list[str]:
    """Two lines: versions, shared tensors. UsageError or EnvError if Isaac Gym cannot be imported
    there; seconds: limit of each call.
    """
    gpu = torch.cuda.current_device() if torch.cuda.is_available() else None
    simulator = SimulatorProcess(find_python(), gpu)
    try:
        description = simulator.call("describe", seconds)
        if not description["sees_gpu"]:
            gpu = None
        name = "shared memory" if gpu is None else "CUDA IPC"
        try:
            try_sharing(simulator, gpu, seconds)
        # RuntimeError and OSError are of CUDA and the kernel
        except (GpurlError, RuntimeError, OSError) as error:
            return [description["text"], f"{name} does not work: {error}"]
        return [description["text"], f"{name} works"]
    finally:
        simulator.close()


def try_sharing(simulator: SimulatorProcess, gpu: int | None, seconds: float) -> None:
    """Write numbers into a shared tensor, let the simulator process double them, and read them from
    another one; EnvError if they are wrong.
    """
    layout = layout_of(*SIZES)
    shared = (
        HostTensors(layout, simulator.memory_file)
        if gpu is None
        else CudaTensors(layout, torch.device("cuda", gpu))
    )
    try:
        # to the other process
        written = shared.tensors["action"]
        written.copy_(torch.arange(1.0, written.numel() + 1.0).view_as(written))
        shared.hand_over()
        simulator.call(
            "try_sharing",
            seconds,
            sizes=SIZES,
            memory_file=simulator.memory_file,
            handles=shared.handles(),
        )
        # and back
        shared.take_over()
        expected = 2.0 * written.cpu()
        got = shared.tensors["obs"].cpu()
        if not torch.equal(got, expected):
            raise EnvError(
                f"wanted {expected.flatten().tolist()} from the other process, got "
                f"{got.flatten().tolist()}"
            )
    finally:
        shared.close()
