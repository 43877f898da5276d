"""Its registry of tasks and its reading of the command line."""

import argparse
import random
from typing import Any, Dict, Tuple

import numpy as np
import torch
from isaacgym import gymutil


def get_args() -> argparse.Namespace:
    numbers = [{"name": "--" + name, "type": int} for name in ("num_envs", "seed")]
    texts = [{"name": "--task", "default": "none"}, {"name": "--rl_device", "default": "cuda:0"}]
    args = gymutil.parse_arguments(
        "RL Policy", numbers + texts + [{"name": "--headless", "action": "store_true"}]
    )
    args.sim_device = args.sim_device_type
    if args.sim_device == "cuda":
        args.sim_device += ":{}".format(args.compute_device_id)
    return args


class TaskRegistry:
    def __init__(self) -> None:
        self.task_classes: Dict[str, Any] = {}
        self.env_cfgs: Dict[str, Any] = {}

    def register(self, name: str, task_class: Any, env_cfg: Any) -> None:
        self.task_classes[name], self.env_cfgs[name] = task_class, env_cfg

    def get_cfgs(self, name: str) -> Tuple[Any, None]:
        self.env_cfgs[name].seed = 1
        return self.env_cfgs[name], None

    def make_env(self, name: str, args: argparse.Namespace, env_cfg: Any) -> Tuple[Any, Any]:
        env_cfg.env.num_envs = args.num_envs
        random.seed(env_cfg.seed)
        np.random.seed(env_cfg.seed)
        torch.manual_seed(env_cfg.seed)
        if not args.headless or args.use_gpu_pipeline != args.sim_device.startswith("cuda"):
            raise RuntimeError(
                "no display, or a pipeline that does not fit {}".format(args.sim_device)
            )
        return self.task_classes[name](env_cfg, args.sim_device), env_cfg


task_registry = TaskRegistry()
