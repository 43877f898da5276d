"""A registry that Gymnasium knows nothing of."""

from types import SimpleNamespace

from tests.torch_walks import LENGTH


def list_tasks() -> list[str]:
    return ["Mjlab-Walks", "Mjlab-Walks-Depth"]


def load_env_cfg(task_name: str) -> SimpleNamespace:
    assert task_name in list_tasks()
    more = {"auto_reset": True, "is_finite_horizon": False, "episode_length_s": LENGTH * 0.02}
    more["has_camera"] = task_name.endswith("Depth")
    return SimpleNamespace(scene=SimpleNamespace(num_envs=1), seed=None, decimation=4, **more)


def load_rl_cfg(task_name: str) -> SimpleNamespace:
    camera = ("camera",) if task_name.endswith("Depth") else ()
    return SimpleNamespace(obs_groups={"actor": ("actor", *camera), "critic": ("critic", *camera)})
