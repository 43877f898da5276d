"""CartPole whose policy sees positions only; velocities are privileged."""

import torch
from torch import Tensor

from gpurl.envs.cart_pole import CartPole
from gpurl.envs.torch_env import State


class HiddenVelocity(CartPole):
    """Observations (x, angle); the privileged ones are CartPole's own, so that whoever plays
    CartPole can teach.
    """

    single_state_space = CartPole(1).single_observation_space

    def __init__(self, num_envs: int, device: torch.device | str = "cpu", seed: int = 0) -> None:
        super().__init__(num_envs, device, seed, velocities=False)

    def observe_state(self, state: State) -> Tensor:
        return state["motion"]
