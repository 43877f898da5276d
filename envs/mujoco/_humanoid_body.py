"""Base of Gymnasium's two humanoid tasks: the body, its observations, the cost of motors and
contacts.
"""

import torch
from torch import Tensor

from gpurl.envs.mujoco.base import Fields, MujocoEnv


class HumanoidBody(MujocoEnv):
    """Observation (348,): qpos without x and y, qvel, inertia and velocity of each body, the
    joints' motors, contact forces.
    """

    frame_skip = 5
    max_episode_steps = 1000
    # options, as in Gymnasium
    ctrl_cost_weight: float = 0.1  # cost of the squared action
    reset_noise_scale: float = 1e-2  # noise on the first state
    exclude_current_positions_from_observation: bool = True  # hide x (and y)
    include_cinert_in_observation: bool = True  # observe inertia of the bodies
    include_cvel_in_observation: bool = True  # observe velocities of the bodies
    include_qfrc_actuator_in_observation: bool = True  # observe forces of the motors
    include_cfrc_ext_in_observation: bool = True  # observe contact forces

    def observe(self, data: Fields) -> Tensor:
        positions = data.qpos[:, 2 * int(self.exclude_current_positions_from_observation) :]
        # the world is body 0, and the root joint's six coordinates have no motor
        columns = [positions, data.qvel]
        if self.include_cinert_in_observation:
            columns.append(data.cinert[:, 1:].flatten(1))
        if self.include_cvel_in_observation:
            columns.append(data.cvel[:, 1:].flatten(1))
        if self.include_qfrc_actuator_in_observation:
            columns.append(data.qfrc_actuator[:, 6:])
        if self.include_cfrc_ext_in_observation:
            columns.append(data.cfrc_ext[:, 1:].flatten(1))
        return torch.cat(columns, 1)

    def effort(
        self, data: Fields, contact_weight: float, contact_range: tuple[float, float]
    ) -> Tensor:
        """[N] cost of control and of contact forces; the latter is clamped to `contact_range`."""
        contacts = (contact_weight * data.cfrc_ext.square().sum((1, 2))).clamp(*contact_range)
        return self.ctrl_cost_weight * data.ctrl.square().sum(1) + contacts
