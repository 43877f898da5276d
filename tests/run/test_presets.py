"""Presets: of the adapter and of one task of it, and that what they say can be trained with."""

import pytest

from gpurl.run.presets import PRESETS, preset
from gpurl.run.settings import make_settings


def test_a_task_of_an_adapter_adds_to_what_all_of_them_share() -> None:
    shared, ant, humanoid = (
        preset("ppo", f"isaac_gym{task}") for task in ("", ":Ant", ":Humanoid")
    )
    assert ant == shared | {"max_grad_norm": None}
    assert preset("ppo", "isaac_gym:Trifinger") == shared
    assert humanoid["gamma"] == shared["gamma"]
    assert humanoid["network"] == {"hidden": [400, 200, 100], "activation": "elu", "shared": True}
    assert preset("sac", "isaac_gym:Ant") == preset("sac", "isaac_gym") == preset("sac", "*")


@pytest.mark.parametrize(
    ("task", "minibatch_size", "max_epochs"),
    [
        ("Ant", 32768, 500),
        ("Humanoid", 32768, 1000),
        ("Cartpole", 8192, 100),
        ("Anymal", 32768, 1000),
        ("ShadowHand", 32768, 5000),
    ],
)
def test_isaac_gyms_presets_are_what_was_published(
    task: str, minibatch_size: int, max_epochs: int
) -> None:
    """As cfg/train/*PPO.yaml and the numEnvs of cfg/task/*.yaml say."""
    settings = make_settings("ppo", f"isaac_gym:{task}")
    rows = settings.train.num_envs * settings.algorithm_config.horizon
    assert rows == minibatch_size * settings.algorithm_config.minibatches
    assert settings.train.total_steps == rows * max_epochs


@pytest.mark.parametrize(("algorithm", "env"), [key for key in PRESETS if key[1] != "*"], ids=str)
def test_every_preset_can_be_read(algorithm: str, env: str) -> None:
    make_settings(algorithm, env)
