"""Settings with which presets of several families of tasks begin."""

from gpurl.checkpoints.plain_files import Json
from gpurl.run.presets.table import Preset

SMALL_NETWORK: Json = {"hidden": [128, 128]}
# the sizes of FlashSAC's authors for robots on a GPU (scripts/run_isaaclab.sh there)
MANY_FLASH: Preset = {
    "num_envs": 1024,
    "horizon": 1,
    "updates": 2,
    "batch_size": 2048,
    "learning_starts": 100_000,
    "replay_size": 10_000_000,
    "total_steps": 50_000_000,
}
# and for Gymnasium's MuJoCo tasks (scripts/run_mujoco.sh there)
FEW_FLASH: Preset = {
    "num_envs": 1,
    "horizon": 2,
    "updates": 2,
    "batch_size": 512,
    "learning_starts": 10_000,
    "total_steps": 1_000_000,
}
# chosen here, for Pendulum and Chasing
SMALL_FLASH: Preset = {
    "num_envs": 64,
    "total_steps": 40_000,
    "horizon": 1,
    "updates": 8,
    "batch_size": 256,
    "learning_starts": 1280,
    "replay_size": 100_000,
    "learning_rate": 1e-3,
    "actor_network": {"hidden": [64, 64]},
    "critic_network": {"hidden": [64, 64]},
}
