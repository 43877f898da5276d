"""Registers its tasks when it is imported, for which Isaac Sim must run, or Isaac Lab be one that
starts it later.
"""

import gymnasium
import isaaclab.app

assert isaaclab.app.launched or hasattr(isaaclab.app, "launch_simulation"), (
    "imported before the simulator was started"
)
gymnasium.register(
    "Isaac-Walks-Direct-v0",
    "isaaclab.envs:DirectRLEnv",
    kwargs={"env_cfg_entry_point": {"compute_final_obs": False}},
)
gymnasium.register(
    "Isaac-Walks-v0", "isaaclab.envs:ManagerBasedRLEnv", kwargs={"env_cfg_entry_point": {}}
)
