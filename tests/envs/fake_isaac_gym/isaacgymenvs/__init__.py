"""Stands for IsaacGymEnvs: `make` as it is there, which takes a seed and forgets it, and fails
where there is no display.
"""

from typing import Any


def make(
    seed: int,
    task: str,
    num_envs: int,
    sim_device: str,
    rl_device: str,
    graphics_device_id: int = -1,
    headless: bool = False,
    multi_gpu: bool = False,
    virtual_screen_capture: bool = False,
    force_render: bool = True,
    cfg: Any = None,
) -> Any:
    from isaacgymenvs.tasks import isaacgym_task_map

    if not headless or force_render:
        raise RuntimeError("no display")
    if cfg is None or cfg.task["sim"]["use_gpu_pipeline"] != sim_device.startswith("cuda"):
        raise RuntimeError("the configuration's pipeline does not fit {}".format(sim_device))
    return isaacgym_task_map[cfg.task["name"]](
        cfg=cfg.task, rl_device=rl_device, sim_device=sim_device
    )
