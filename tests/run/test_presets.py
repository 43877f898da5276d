"""Presets: of the adapter and of one task of it, and that what they say can be trained with."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

import pytest

from gpurl.algorithms import config_class, resolve_algorithm
from gpurl.api import resume, saved_settings, train
from gpurl.cli.settings import parse_train
from gpurl.discovery import algorithm_names
from gpurl.envs.mujoco.ant import Ant
from gpurl.envs.mujoco.base import MujocoEnv
from gpurl.errors import UsageError
from gpurl.run import presets
from gpurl.run.presets.find import FEW_PRESETS, PRESETS, TWINS, name_for_presets, preset
from gpurl.run.presets.fit import MAX_FEW
from gpurl.run.presets.mujoco import MUJOCO_TASKS
from gpurl.run.settings import make_settings


def test_each_preset_stands_in_one_file() -> None:
    names = {file.name for file in pkgutil.iter_modules(presets.__path__)} - {"find"}
    files = [importlib.import_module(f"gpurl.run.presets.{name}") for name in names]
    assert len(PRESETS) == sum(len(getattr(file, "PRESETS", {})) for file in files)


def test_a_task_of_an_adapter_adds_to_what_all_of_them_share() -> None:
    shared, ant, humanoid = (
        preset("ppo", f"isaac_gym{task}") for task in ("", ":Ant", ":Humanoid")
    )
    assert ant == shared | {"max_grad_norm": None, "bounds_coef": 1e-4}
    assert preset("ppo", "isaac_gym:Trifinger") == shared
    assert humanoid["gamma"] == shared["gamma"]
    assert humanoid["network"] == shared["network"] | {"hidden": [400, 200, 100]}
    assert preset("sac", "isaac_gym:Ant") == preset("sac", "isaac_gym") == preset("sac", "*")


@pytest.mark.parametrize(
    ("task", "minibatch_size", "max_epochs", "bounds_loss_coef"),
    [
        ("Ant", 32768, 500, 1e-4),
        ("Humanoid", 32768, 1000, 1e-4),
        ("Cartpole", 8192, 100, 1e-4),
        ("Anymal", 32768, 1000, 1e-3),
        ("ShadowHand", 32768, 5000, 1e-4),
    ],
)
def test_isaac_gyms_presets_are_what_was_published(
    task: str, minibatch_size: int, max_epochs: int, bounds_loss_coef: float
) -> None:
    """As cfg/train/*PPO.yaml and the numEnvs of cfg/task/*.yaml say."""
    settings = make_settings("ppo", f"isaac_gym:{task}")
    rows = settings.train.num_envs * settings.algorithm_config.horizon
    assert rows == minibatch_size * settings.algorithm_config.minibatches
    assert settings.train.total_steps == rows * max_epochs
    assert settings.algorithm_config.bounds_coef == bounds_loss_coef


@pytest.mark.parametrize(("algorithm", "env"), [key for key in PRESETS if key[1] != "*"], ids=str)
def test_every_preset_can_be_read(algorithm: str, env: str) -> None:
    make_settings(algorithm, env)


@pytest.mark.parametrize(
    ("algorithm", "env"), [key for key in FEW_PRESETS if key[1] != "mujoco"], ids=str
)
def test_every_preset_of_few_environments_can_be_read(algorithm: str, env: str) -> None:
    make_settings(algorithm, env, num_envs=8)


def test_few_environments_and_a_cpu_have_a_preset_of_their_own() -> None:
    many = PRESETS["ppo", "half_cheetah"]
    few = FEW_PRESETS["ppo", "half_cheetah"]
    assert preset("ppo", "half_cheetah", MAX_FEW) == few
    assert preset("ppo", "half_cheetah", MAX_FEW + 1) == many
    # a number of environments counts, whatever the device
    assert preset("ppo", "half_cheetah", 64, "cuda") == few
    assert preset("ppo", "half_cheetah", 4096, "cpu") == many
    # without one the device does
    assert preset("ppo", "half_cheetah", None, "cpu") == few
    assert preset("ppo", "half_cheetah", None, "cuda:1") == many
    # a task without one for few environments keeps its preset
    assert preset("ppo", "chasing", 8) == preset("ppo", "chasing", 4096)
    # one for all MuJoCo tasks, but for what stands here
    changes = {
        "ant": {"normalize_obs_epsilon": 0.1},
        "reacher": {"gamma": 0.9},
    }
    # what they need more than discounts is measured on the results page
    for task in set(MUJOCO_TASKS) - {"swimmer", "inverted_double_pendulum"}:
        assert FEW_PRESETS["ppo", task] == few | changes.get(task, {})


def test_a_mujoco_task_of_ones_own_has_the_preset_of_all_of_them() -> None:
    class Own(MujocoEnv):
        pass

    class TallerAnt(Ant):
        pass

    assert name_for_presets("my_robot", Own, "gpurl.envs") == "mujoco"
    assert name_for_presets("my_ant", TallerAnt, "gpurl.envs") == "ant"
    for algorithm in ("ppo", "sac", "td3"):
        few = FEW_PRESETS[algorithm, "hopper"]
        assert PRESETS.get((algorithm, "*"), {}) | few == preset(algorithm, "mujoco", None, "cpu")
    assert preset("ppo", "mujoco", 4096) == {}


def test_flags_and_files_choose_the_preset(tmp_path: Path) -> None:
    def horizon(*flags: str) -> int:
        settings, _ = parse_train(["ppo", "half_cheetah", "--device", "cpu", *flags])
        return settings.algorithm_config.horizon

    assert horizon() == horizon("--num-envs", "64") == 32
    assert horizon("--num-envs", "2048") == horizon("num_envs=2048") == 24
    assert horizon("--num-envs", "2048", "--horizon", "16") == 16
    config = tmp_path / "many.yaml"
    config.write_text("num_envs: 2048\n")
    assert horizon("--config", str(config)) == 24
    assert horizon("--config", str(config), "--num-envs", "32") == 64


def settings_of(*words: str) -> dict[str, Any]:
    return parse_train(list(words))[0].to_dict()


# what all velocity tasks of Isaac Lab and mjlab share in their rsl_rl_ppo_cfg.py and rl_cfg.py
OF_RSL_RL = {
    "num_envs": 4096,
    "horizon": 24,
    "epochs": 5,
    "minibatches": 4,
    "learning_rate": 1e-3,
    "schedule": "kl_minibatch",
    "target_kl": 0.01,
    "gamma": 0.99,
    "gae_lambda": 0.95,
    "clip_range": 0.2,
    "clip_range_value": 0.2,
    "value_coef": 1.0,
    "max_grad_norm": 1.0,
    "normalize_obs": True,
    "normalize_value": False,
    "initial_std": 1.0,
}


@pytest.mark.parametrize(
    ("name", "env", "entropy_coef", "iterations"),
    [
        ("isaac", "isaac_lab:Isaac-Velocity-Rough-Anymal-C-v0", 0.005, 1500),
        ("mjlab", "torch_vector:mjlab.tasks:Mjlab-Velocity-Flat-Unitree-Go1", 0.01, 10_000),
        ("mjlab", "torch_vector:mjlab.tasks.velocity:Mjlab-Velocity-Rough", 0.01, 10_000),
    ],
)
def test_tasks_of_isaac_lab_and_mjlab_have_the_settings_of_their_rsl_rl(
    name: str, env: str, entropy_coef: float, iterations: int
) -> None:
    settings = settings_of("ppo", env)
    wanted = OF_RSL_RL | {"entropy_coef": entropy_coef, "preset": name}
    wanted["total_steps"] = iterations * 4096 * 24
    assert {key: settings[key] for key in wanted} == wanted
    network = {key: settings["network"][key] for key in ("hidden", "activation", "shared")}
    assert network == {"hidden": [512, 256, 128], "activation": "elu", "shared": False}
    # any other task by name, whose own preset plays no part
    named = settings_of("ppo", "chasing", "--preset", name)
    assert named | {"env": env} == settings


def test_other_tasks_do_not_have_the_preset_of_mjlab() -> None:
    for env in ("torch_vector:mjlabs.tasks:X", "torch_vector:mani_skill.envs:X", "torch_vector"):
        assert preset("ppo", env) == {}
    assert preset("sac", "torch_vector:mjlab.tasks:X") == preset("sac", "*")


def test_a_preset_by_name_gives_way_to_files_and_flags(tmp_path: Path) -> None:
    config = tmp_path / "mine.yaml"
    config.write_text("preset: isaac\nhorizon: 48\nepochs: 3\n")
    settings = settings_of("ppo", "chasing", "--config", str(config), "--epochs", "2")
    assert (settings["horizon"], settings["epochs"], settings["gamma"]) == (48, 2, 0.99)
    assert settings["preset"] == "isaac"
    # the flag takes the place of the file's preset, and none leaves the defaults
    by_flag = settings_of("ppo", "chasing", "--config", str(config), "--preset", "none")
    assert (by_flag["entropy_coef"], by_flag["horizon"]) == (0.0, 48)
    assert settings_of("ppo", "chasing", "preset=mjlab")["entropy_coef"] == 0.01


def test_a_preset_that_is_not_there_or_not_for_the_algorithm_is_named() -> None:
    with pytest.raises(UsageError, match=r"'issac'; did you mean isaac.* one of auto, none, isaac"):
        settings_of("ppo", "chasing", "--preset", "issac")
    with pytest.raises(UsageError, match=r"'isac'; did you mean isaac.* one of auto, none, isaac"):
        make_settings("ppo", "chasing", preset="isac")
    with pytest.raises(UsageError, match="preset isaac is for ppo, not for sac: take"):
        make_settings("sac", "chasing", preset="isaac")


def test_a_resumed_run_has_the_preset_of_its_checkpoint(tmp_path: Path) -> None:
    tiny: dict[str, Any] = {"num_envs": 8, "eval_episodes": 0, "quiet": True, "device": "cpu"}
    first = train("ppo", "pendulum", preset="isaac", run_dir=str(tmp_path), total_steps=192, **tiny)
    saved = saved_settings(first.folder)[2]
    assert (saved["preset"], saved["horizon"], saved["clip_range_value"]) == ("isaac", 24, 0.2)
    assert resume(tmp_path, total_steps=384).outcome.steps == 384
    assert saved_settings(first.folder)[2] == saved | {"total_steps": 384}
    with pytest.raises(UsageError, match="preset isaac, this run mjlab; a resumed run keeps"):
        resume(tmp_path, preset="mjlab", total_steps=576)


def total_updates(values: dict[str, Any]) -> float:
    rollout = values["num_envs"] * values.get("horizon", 1)
    return values["total_steps"] / rollout * values["updates"]


@pytest.mark.parametrize("num_envs", [1, 64, 1024, 4096])
@pytest.mark.parametrize(
    ("algorithm", "env"),
    [("sac", "pendulum"), ("sac", "chasing"), ("dqn", "cart_pole"), ("fast_sac", "chasing")],
)
def test_another_number_of_environments_gets_as_many_updates(
    algorithm: str, env: str, num_envs: int
) -> None:
    made_for = PRESETS["sac", "*"] | PRESETS[algorithm, env]
    values = preset(algorithm, env, num_envs) | {"num_envs": num_envs}
    assert total_updates(values) == pytest.approx(total_updates(made_for), rel=0.01)
    assert values["updates"] % values.get("policy_delay", 1) == 0


def test_an_update_for_each_step_stays_one() -> None:
    for num_envs in (1, 8, 64):
        assert preset("sac", "half_cheetah", num_envs)["updates"] == num_envs
        assert preset("sac", "half_cheetah", num_envs)["total_steps"] == 1_000_000
    # the actor is updated once in 4 updates
    assert preset("redq", "hopper", 1)["updates"] == 4
    assert preset("redq", "hopper", 3)["updates"] == 12
    assert preset("fast_sac", "hopper", 3)["updates"] == 4
    # one update for each step would be less than one of the actor
    td3 = preset("td3", "gymnasium_cpu", 1)
    assert (td3["updates"], td3["horizon"]) == (2, 2)


@pytest.mark.parametrize(
    ("algorithm", "env", "replay_size"),
    [("dqn", "cart_pole", 50_000), ("fast_sac", "pendulum", 100_000), ("sac", "chasing", 10**6)],
)
def test_learning_starts_before_the_replay_buffer_overwrites_anything(
    algorithm: str, env: str, replay_size: int
) -> None:
    first = (PRESETS["sac", "*"] | PRESETS[algorithm, env])["learning_starts"]
    assert first < replay_size
    assert preset(algorithm, env, 65_536)["learning_starts"] == replay_size


def test_a_preset_without_updates_is_left_alone() -> None:
    assert preset("ppo", "cart_pole", 8)["total_steps"] == 1_000_000


def test_fewer_environments_play_more_steps() -> None:
    """One of 32 steps would have minibatches of one row, whose advantage less its mean is 0."""
    few = FEW_PRESETS["ppo", "hopper"]
    assert preset("ppo", "hopper", 1) == few | {"horizon": 2048}
    assert preset("ppo", "hopper", 8) == few | {"horizon": 256}
    assert preset("ppo", "hopper", 256) == few
    # in another's environments too, but not where a preset is for a thousand
    lander = PRESETS["ppo", "gymnasium_cpu:LunarLander-v3"]
    values = preset("ppo", "gymnasium_cpu:LunarLander-v3", 4)
    assert values == PRESETS["ppo", "gymnasium_cpu"] | lander | {"horizon": 4096}
    assert preset("ppo", "acrobot", 8)["horizon"] == preset("ppo", "acrobot")["horizon"]
    # nor for what learns from no rollouts
    assert "horizon" not in preset("bc", "gymnasium_cpu:Pendulum-v1", 2)


@pytest.mark.parametrize("env", ["hopper", "swimmer", "gymnasium_cpu:Hopper-v5"])
def test_rollouts_of_any_number_of_environments_divide_into_minibatches(env: str) -> None:
    for num_envs in range(1, 65):
        values = preset("ppo", env, num_envs)
        rows = num_envs * values["horizon"]
        assert rows % values["minibatches"] == 0, num_envs
        assert rows >= 1024, num_envs


def test_a_preset_follows_its_task_into_gymnasium() -> None:
    # with a replay buffer: the same, on fewer environments
    known = PRESETS["dqn", "cart_pole"]
    values = preset("dqn", "gymnasium_cpu:CartPole-v1")
    assert values == preset("dqn", "cart_pole") | {"num_envs": 8, "updates": 32}
    assert known["updates"] == 4 * values["updates"]
    # rollouts of the same size, if the preset is one of few environments
    few = FEW_PRESETS["ppo", "hopper"]
    for version in (4, 5):
        values = preset("ppo", f"gymnasium_cpu:Hopper-v{version}")
        assert values["num_envs"] * values["horizon"] == few["num_envs"] * few["horizon"]
        assert values == few | {"num_envs": 8, "horizon": 256}
    assert preset("ppo", "gymnasium_cpu:Hopper-v5", 16)["horizon"] == 128
    # of a preset for a thousand only what is about the task
    shared = preset("ppo", "gymnasium_cpu")
    assert preset("ppo", "gymnasium_cpu:Pendulum-v1") == shared | {"gamma": 0.95}
    assert preset("ppo", "gymnasium_cpu:CarRacing-v3") == shared


def test_tasks_have_the_settings_of_the_published_trainings() -> None:
    """So that a command without settings learns what the results page shows."""
    ppo, walker = (
        make_settings(*words) for words in (("ppo", "LunarLander-v3"), ("sac", "BipedalWalker-v3"))
    )
    assert (ppo.train.num_envs, ppo.train.total_steps) == (16, 1_000_000)
    assert (ppo.algorithm_config.horizon, ppo.algorithm_config.gamma) == (1024, 0.999)
    assert (walker.algorithm_config.tau, walker.train.total_steps) == (0.02, 500_000)
    # an update for each step, also of a task that Gymnasium steps
    for env in ("mountain_car_continuous", "gymnasium_cpu:MountainCarContinuous-v0"):
        car = preset("sac", env, 4)
        assert (car["updates"], car["noise_span"], car["total_steps"]) == (4, 32, 50_000)
    assert preset("a2c", "gymnasium_cpu:Pendulum-v1", 16)["horizon"] == 16
    assert preset("dqn", "acrobot")["learning_rate"] == 2.5e-4
    assert preset("rainbow", "acrobot")["v_min"] == -100.0


def test_dqn_on_the_lander_has_updates_and_steps_for_any_number_of_environments() -> None:
    """Also by Gymnasium's id alone, and not with continuous actions."""
    settings = make_settings("dqn", "LunarLander-v3")
    assert (settings.algorithm_config.n_step, settings.algorithm_config.schedule) == (3, "linear")
    assert (settings.train.num_envs, settings.train.total_steps) == (4, 100_000)
    for num_envs in (1, 16):
        values = preset("dqn", "gymnasium_cpu:LunarLander-v3", num_envs)
        assert values["updates"] == num_envs
        assert values["total_steps"] == 100_000
    assert "n_step" not in preset("dqn", "gymnasium_cpu:LunarLanderContinuous-v3")
    assert preset("rainbow", "gymnasium_cpu:LunarLander-v3")["v_max"] == 300.0


@pytest.mark.parametrize("algorithm", algorithm_names())
def test_every_algorithm_has_a_preset_for_each_task_known_by_another_name(algorithm: str) -> None:
    """Whose rollouts divide into the preset's minibatches, or the algorithm's."""
    config = config_class(resolve_algorithm(algorithm))
    defaults = {name: getattr(config, name, 1) for name in ("horizon", "minibatches")}
    for task in TWINS:
        for num_envs in (None, *range(1, 66)):
            values = defaults | preset(algorithm, f"gymnasium_cpu:{task}-v1", num_envs, "cpu")
            rows = (num_envs or values["num_envs"]) * values["horizon"]
            assert rows % values["minibatches"] == 0, (task, num_envs)


def test_an_id_of_gymnasium_alone_has_the_same_preset() -> None:
    for algorithm in ("ppo", "dqn"):
        alone, named = (
            make_settings(algorithm, f"{adapter}CartPole-v1").to_dict()
            for adapter in ("", "gymnasium_cpu:")
        )
        assert alone | {"env": ""} == named | {"env": ""}
    assert make_settings("sac", "Pendulum-v1").algorithm_config.tau == 0.01
