"""Our environments as an rsl_rl VecEnv: tensors stay on the device, none is copied."""

from gymnasium.spaces import Box
from rsl_rl.env import VecEnv as RslRlVecEnv
from tensordict import TensorDict
from torch import Tensor

from gpurl.adapters.transfer import action_limiter, log_of_all
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError


class EnvConfig(dict[str, object]):
    """What rsl_rl's writers for Weights & Biases and Neptune note of the environment."""

    def to_dict(self) -> dict[str, object]:
        return dict(self)


class RslRlEnv(RslRlVecEnv):
    """Observations are the group "policy", privileged observations the group "critic".

    rsl_rl adds gamma V(s_t) to the reward of a time-out, the value of the observation before it,
    and has no place for final_obs; the extras hold it for an algorithm of your own. Actions are
    clipped to the Box. An environment without a time limit has max_episode_length 1, so that random
    initial clocks are all 0.
    """

    def __init__(self, env: VecEnv) -> None:
        space = env.single_action_space
        if not isinstance(space, Box) or len(space.shape) != 1:
            raise UsageError(
                f"rsl_rl draws actions from Gaussians: wanted a Box of one axis, this environment "
                f"has {space}"
            )
        self.env = env
        self.num_envs = env.num_envs
        self.device = env.device
        self.num_actions = space.shape[0]
        self.max_episode_length = env.max_episode_steps or 1
        self.cfg = EnvConfig(
            name=type(env).__name__,
            num_envs=env.num_envs,
            max_episode_steps=env.max_episode_steps,
        )
        self._limit = action_limiter(env)
        # the runner asks for observations before the first step and never resets
        obs, info = env.reset()
        self._observations = self._groups(obs, info.get("state"))

    @property
    def unwrapped(self) -> "RslRlEnv":
        """Where random network distillation looks for `step_dt`."""
        return self

    @property
    def step_dt(self) -> float:
        """Simulated seconds of a step, 1 where the task does not know them."""
        return self.env.control_step or 1.0

    @property
    def episode_length_buf(self) -> Tensor:  # type: ignore[override]
        """[N] int64 episode clocks; setting them staggers the first episodes."""
        return self.env.episode_length_buf

    @episode_length_buf.setter
    def episode_length_buf(self, clocks: Tensor) -> None:
        self.env.stagger(clocks)

    def get_observations(self) -> TensorDict:
        return self._observations

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, object]]:
        """(observations, rewards [N], dones [N] int64, extras)."""
        obs, reward, terminated, truncated, info = self.env.step(self._limit(actions))
        self._observations = self._groups(obs, info.get("state"))
        extras: dict[str, object] = {
            "time_outs": truncated,
            "final_obs": self._groups(info["final_obs"], info.get("final_state")),
        }
        if "log" in info:
            extras["log"] = log_of_all(info["log"])  # a copy: rsl_rl writes to it
        return self._observations, reward, (terminated | truncated).long(), extras

    def close(self) -> None:
        self.env.close()

    def _groups(self, obs: Tensor, state: Tensor | None) -> TensorDict:
        groups = {"policy": obs} if state is None else {"policy": obs, "critic": state}
        return TensorDict(groups, batch_size=[self.num_envs], device=self.device)
