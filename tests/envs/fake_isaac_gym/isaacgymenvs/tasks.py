"""Tasks that restart where IsaacGymEnvs' tasks do: after the physics, before it, or in the step
that ends the episode.
"""

from typing import Any, Dict, Tuple

import numpy as np
import torch
from hydra import compose
from simulated_walkers import NUM_OBS, Walkers

JUNK = 1e6  # reward of a step that only restarted
BONUS = 64.0  # of the last step


class VecTask:
    """What all of them share; observations are zeros until the first step, and everything is to be
    reset.
    """

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        self.cfg, self.device, self.rl_device = cfg, sim_device, rl_device
        settings = cfg["env"]
        self.num_envs, self.num_agents = settings["numEnvs"], 1
        self.num_obs = self.num_observations = NUM_OBS
        self.num_actions = self.num_acts = 1
        self.num_states = settings["numStates"]
        self.clip_obs, self.clip_actions = (
            settings["clipObservations"],
            settings.get("clipActions", float("inf")),
        )
        self.max_episode_length = settings["episodeLength"]
        self.walkers = Walkers(self.num_envs, sim_device, settings["fault"], settings["faultStep"])
        self.obs_buf = torch.zeros(self.num_envs, NUM_OBS, device=sim_device)
        self.rew_buf = torch.zeros(
            (self.num_envs, 1) if settings["rewardColumn"] else self.num_envs, device=sim_device
        )
        self.states_buf = torch.zeros(self.num_envs, self.num_states, device=sim_device)
        self.reset_buf = torch.ones(self.num_envs, device=sim_device, dtype=torch.long)
        self.progress_buf = torch.zeros(self.num_envs, device=sim_device, dtype=torch.long)
        self.extras, self.obs_dict = {}, {}  # type: Dict[str, Any], Dict[str, Any]
        self.total_train_env_frames = 0

    def set_train_info(self, env_frames: int, *args: Any, **kwargs: Any) -> None:
        self.total_train_env_frames = env_frames

    def get_env_state(self) -> Any:
        return None

    def set_env_state(self, env_state: Any) -> None:
        pass

    def reset_idx(self, env_ids: Any) -> None:
        self.walkers.restart(env_ids)
        self.reset_buf[env_ids] = 0
        self.progress_buf[env_ids] = 0

    def step(self, actions: Any) -> Tuple[Dict[str, Any], Any, Any, Dict[str, Any]]:
        self.pre_physics_step()
        self.walkers.advance(torch.clamp(actions, -self.clip_actions, self.clip_actions))
        self.post_physics_step()
        if self.cfg["env"]["giveTimeOuts"]:
            self.extras["time_outs"] = (self.progress_buf >= self.max_episode_length - 1) & (
                self.reset_buf != 0
            )
        self._show()
        return self.obs_dict, self.rew_buf, self.reset_buf, self.extras

    def reset(self) -> Dict[str, Any]:
        self._show()
        return self.obs_dict

    def _show(self) -> None:
        self.obs_dict["obs"] = torch.clamp(self.obs_buf, -self.clip_obs, self.clip_obs)
        if self.num_states > 0:
            self.write_states()
            self.obs_dict["states"] = self.states_buf.clone()

    def write_states(self) -> None:
        self.states_buf[:] = 10.0 * self.obs_buf[:, : self.num_states]

    def pre_physics_step(self) -> None:
        pass

    def post_physics_step(self) -> None:
        raise NotImplementedError

    def look(self) -> None:
        """Observations and, in the place where they always are, rewards and ends."""
        self.obs_buf = self.walkers.obs()
        self.rew_buf[:] = self.walkers.reward().view_as(self.rew_buf)
        is_over = self.walkers.has_fallen() | (self.progress_buf >= self.max_episode_length - 1)
        self.reset_buf[:] = torch.where(is_over, torch.ones_like(self.reset_buf), self.reset_buf)


class AfterPhysics(VecTask):
    """As Ant, Humanoid, Cartpole: the step after an end moves the old walker, then restarts it."""

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        env_ids = self.reset_buf.nonzero().flatten()
        if len(env_ids) > 0:
            self.reset_idx(env_ids)
        self.look()
        self.rew_buf[env_ids] = JUNK


class BeforePhysics(VecTask):
    """As ShadowHand, Quadcopter: the step after an end restarts, then moves the new walker by an
    action for the old one. Its model is written into the working directory.
    """

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        with open("walkers.xml", "w") as file:
            file.write("<walkers/>")
        VecTask.__init__(self, cfg, rl_device, sim_device)

    def pre_physics_step(self) -> None:
        env_ids = self.reset_buf.nonzero().flatten()
        if len(env_ids) > 0:
            self.reset_idx(env_ids)

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        self.look()


class InTheSameStep(VecTask):
    """As AnymalTerrain: no terminal observation, and time-outs that are looked for when the clock
    is zero again; reset_buf is bool. It logs, and its level rises with the episodes that end.
    """

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        VecTask.__init__(self, cfg, rl_device, sim_device)
        self.level = torch.zeros(2, device=sim_device)
        self.reset_idx(torch.arange(self.num_envs, device=sim_device))
        self.progress_buf[:] = cfg["env"].get("firstClock", 0)

    def get_env_state(self) -> Any:
        fault = self.cfg["env"]["fault"]
        if fault == "no_state":
            raise RuntimeError("the ranges are not there yet")
        ranges = {"odd_key": {7: 0.5}, "odd_value": {"mass": [{0.5}]}}
        return {
            "level": self.level,
            "ranges": ranges.get(fault, {"mass": [0.5, 2], "arm": np.float32(0.1)}),
            "masses": np.arange(6, dtype=np.float32).reshape(2, 3),
        }

    def set_env_state(self, env_state: Any) -> None:
        ranges = {"mass": [0.5, 2], "arm": float(np.float32(0.1))}
        assert env_state["ranges"] == ranges, env_state
        masses = env_state["masses"]
        assert masses.dtype == np.float32, env_state
        assert masses.tolist() == [[0, 1, 2], [3, 4, 5]], env_state
        self.level = env_state["level"]

    def reset_idx(self, env_ids: Any) -> None:
        self.walkers.restart(env_ids)
        self.reset_buf[env_ids] = 1
        self.progress_buf[env_ids] = 0
        self.level += 0.5
        self.extras["episode"] = {"terrain_level": self.level.mean()}

    def post_physics_step(self) -> None:
        self.progress_buf += 1
        self.reset_buf = self.walkers.has_fallen() | (
            self.progress_buf >= self.max_episode_length - 1
        )
        self.rew_buf[:] = self.walkers.reward()
        env_ids = self.reset_buf.nonzero().flatten()
        if len(env_ids) > 0:
            self.reset_idx(env_ids)
        self.obs_buf = self.walkers.obs()
        self.extras["frames"] = self.total_train_env_frames
        self.extras["scalars"] = {"late": torch.tensor(0.25)}
        self.extras["age"] = self.progress_buf  # [N]
        self.extras["picture"] = self.obs_buf
        self.extras["text"] = "not a number"


class InOneClock(BeforePhysics):
    """As Factory and IndustReal: what the last step gives all is seen by the clock of environment
    0; reset_idx is called by keywords; a part of its settings is composed while it is made.
    """

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        compose(config_name="task/FakeFactory")
        VecTask.__init__(self, cfg, rl_device, sim_device)
        self.cfg_task = cfg

    def reset_idx(self, env_ids: Any, hard: bool = True) -> None:
        VecTask.reset_idx(self, env_ids)

    def pre_physics_step(self) -> None:
        env_ids = self.reset_buf.nonzero().flatten()
        if len(env_ids) > 0:
            self.reset_idx(hard=False, env_ids=env_ids)

    def post_physics_step(self) -> None:
        BeforePhysics.post_physics_step(self)
        if self.progress_buf[0] == self.max_episode_length - 1:
            self.rew_buf += BONUS


class WithDiscriminator(AfterPhysics):
    """As HumanoidAMP: restarting is left to its trainer."""

    def fetch_amp_obs_demo(self) -> None:
        raise NotImplementedError


class WithObservationDict(AfterPhysics):
    """As AllegroHandADR of Dextreme: a dict of observations, and no `obs`."""

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        VecTask.__init__(self, cfg, rl_device, sim_device)
        self.use_dict_obs, self.obs_dims = True, {"dof_pos": (16,), "goal_pose": (7,)}


class WithoutStates(BeforePhysics):
    """As AllegroKuka: the index of the device is read, also of a CPU, and states are declared but
    never written.
    """

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        device, index = sim_device.split(":")
        assert int(index) == 0
        BeforePhysics.__init__(self, cfg, rl_device, device)

    def write_states(self) -> None:
        pass


def _of_subtask(cfg: Dict[str, Any], **options: Any) -> VecTask:
    """A function in the place of a class, as there."""
    subtasks = {"lift": WithoutStates}
    if cfg["env"]["subtask"] not in subtasks:
        raise ValueError("Unknown subtask={} in {}".format(cfg["env"]["subtask"], sorted(subtasks)))
    return subtasks[cfg["env"]["subtask"]](cfg, **options)


class WithoutAssets(VecTask):
    """One whose files are missing."""

    def __init__(self, cfg: Dict[str, Any], rl_device: str, sim_device: str) -> None:
        raise OSError("asset not found: walkers.urdf")


isaacgym_task_map = {
    "FakeCartpole": AfterPhysics,
    "FakeHand": BeforePhysics,
    "FakeTerrain": InTheSameStep,
    "FakeFactory": InOneClock,
    "FakeAmp": WithDiscriminator,
    "FakeAssets": WithoutAssets,
    "FakeDextreme": WithObservationDict,
    "FakeKuka": _of_subtask,
}
