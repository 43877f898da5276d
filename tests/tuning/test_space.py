"""What is sampled: the default ranges fit each algorithm, files are read by the settings' types,
and what is wrong in one is named.
"""

from pathlib import Path
from typing import Any

import pytest

from gpurl.algorithms import algorithm_names
from gpurl.errors import UsageError
from gpurl.run.settings import Settings, make_settings
from gpurl.tuning.space import Dimension, default_space, read_space, with_values


def settings_of(algorithm: str = "ppo", env: str = "cart_pole", **values: Any) -> Settings:
    return make_settings(algorithm, env, preset="none", **({"num_envs": 64} | values))


def space_of(tmp_path: Path, text: str, settings: Settings | None = None) -> dict[str, Dimension]:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return read_space(path, settings or settings_of())


# ---- by default ----


def test_the_default_space_of_ppo() -> None:
    space = default_space(settings_of())
    assert list(space) == [
        *("learning_rate", "gamma", "gae_lambda", "clip_range", "entropy_coef", "epochs"),
        *("minibatches", "horizon"),
    ]
    assert space["learning_rate"] == Dimension("learning_rate", 3e-5, 1e-2, log=True)
    assert space["epochs"] == Dimension("epochs", 1, 10, is_whole=True)


def test_the_default_space_has_what_an_algorithm_takes_and_nothing_else() -> None:
    assert set(default_space(settings_of("a2c"))) == {
        *("learning_rate", "gamma", "gae_lambda", "entropy_coef", "horizon")
    }
    assert set(default_space(settings_of("dqn"))) == {
        *("learning_rate", "gamma", "batch_size", "n_step", "tau", "epsilon_fraction")
    }
    assert "noise_std" in default_space(settings_of("td3", "pendulum"))
    for name in algorithm_names():
        env = "two_step_game" if name == "vdn" else "pendulum"
        values = {"dataset": "x.npz"} if name == "bc" else {}
        settings = settings_of(name, env, **values)
        space = default_space(settings).values()
        with_values(settings, {x.name: x.choices[-1] if x.choices else x.high for x in space})


def test_rollouts_of_the_default_space_are_divided_evenly_and_are_several() -> None:
    space = default_space(settings_of(num_envs=24, total_steps=24 * 32 * 8))
    assert space["minibatches"].choices == (1, 2, 4, 8)
    assert space["horizon"].choices == (8, 16, 32)
    assert "horizon" not in default_space(settings_of(num_envs=1000, total_steps=8000))


def test_a_population_samples_what_its_members_may_differ_in() -> None:
    names = {"learning_rate", "gamma", "gae_lambda", "clip_range", "entropy_coef"}
    assert set(default_space(settings_of(population=4))) == names


# ---- from a file ----


def test_a_file_names_ranges_choices_and_settings_alone(tmp_path: Path) -> None:
    text = """
    learning_rate: {low: 1e-5, high: 1, log: true}
    epochs: {low: 2, high: 8, log: true}
    gamma: {}
    schedule:
    normalize_obs: {}
    network.hidden: {choices: [[64, 64], 32]}
    max_grad_norm: {choices: [0.5, null]}
    num_envs: {choices: [64, 128]}
    """
    space = space_of(tmp_path, text.replace("32]", "[32]]"))
    assert space["learning_rate"] == Dimension("learning_rate", 1e-5, 1.0, log=True)
    assert space["epochs"] == Dimension("epochs", 2, 8, log=True, is_whole=True)
    assert space["gamma"].choices[0] == 0.9
    assert space["schedule"].choices == ("kl", "kl_minibatch", "linear", "constant")
    assert space["normalize_obs"].choices == (False, True)
    assert space["network.hidden"].choices == ((64, 64), (32,))
    assert space["max_grad_norm"].choices == (0.5, None)
    assert space["num_envs"].choices == (64, 128)
    # written again they are the same
    for name, each in space.items():
        line = f"{name}: {each.as_dict()}".replace("None", "null").replace("True", "true")
        assert space_of(tmp_path, line.replace("False", "false")) == {name: each}


WRONG = {
    "learing_rate: {low: 1e-5, high: 1e-2}": "did you mean learning_rate?",
    "lr: {low: 1e-5, high: 1e-2}": "here it is learning_rate",
    "network.hiden: {choices: [[8]]}": "did you mean hidden?",
    "nets.hidden: {choices: [[8]]}": "no setting is called 'nets'",
    "network: {choices: [[8]]}": "network is a group of settings: write network.",
    "gamma.x: {choices: [1]}": "gamma is no group of settings",
    "total_steps: {low: 1, high: 10}": "total_steps cannot be searched: give it as --total-steps",
    "seed: {choices: [1, 2]}": "seed cannot be searched: give it as --seed",
    "gamma: 0.9": r"gamma is 0.9; it must be \{low",
    "gamma: {low: 0.9, hihg: 0.99}": "gamma has 'hihg'; did you mean high?",
    "gamma: {low: 0.9}": "gamma has no high",
    "gamma: {low: 0.99, high: 0.9}": "gamma goes from 0.99 to 0.9: low must be below high",
    "gamma: {low: 0.9, high: 0.9}": "low must be below high",
    "gamma: {low: 0.9, high: .inf}": "low must be below high",
    "gamma: {low: .nan, high: 1.0}": "low must be below high",
    "gamma: {low: a, high: 1.0}": "low of gamma is 'a'; it must be float",
    "gamma: {low: true, high: 1.0}": "low of gamma is True; it must be float",
    "epochs: {low: 1.5, high: 4}": "low of epochs is 1.5; it must be int",
    "gamma: {low: 0.0, high: 1.0, log: true}": "low must be above 0",
    "gamma: {low: 0.1, high: 1.0, log: 2}": "log of gamma is 2",
    "gamma: {choices: []}": r"gamma has the choices \[\]; they must be a list, not empty",
    "gamma: {choices: 0.9}": "they must be a list",
    "gamma: {choices: [0.9], low: 0.1}": "gamma has choices and choices, low",
    "gamma: {choices: [x]}": "gamma is 'x'; it must be float",
    "schedule: {choices: [kl, liner]}": "choice 'liner'; did you mean linear?",
    "schedule: {low: 1, high: 2}": "schedule is no number: give",
    "value_coef: {}": "value_coef has no range of its own",
    "{}": "names no setting",
    "- 1": "must hold `name: value` lines",
    "gamma: !!python/object/apply:os.system [x]": "cannot read",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_in_a_file_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=WRONG[text]) as caught:
        space_of(tmp_path, text)
    assert "space.yaml" in str(caught.value)
    assert "\n" not in str(caught.value) or "cannot read" in str(caught.value)


def test_a_file_of_a_population_names_what_members_differ_in(tmp_path: Path) -> None:
    settings = settings_of(population=4)
    with pytest.raises(UsageError, match="members of a population cannot differ in epochs"):
        space_of(tmp_path, "epochs: {}", settings)
    assert "gamma" in space_of(tmp_path, "gamma: {}", settings)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no config file"):
        read_space(tmp_path / "none.yaml", settings_of())


# ---- values ----


def test_values_take_the_place_of_settings() -> None:
    settings = settings_of(env_options={"max_episode_steps": 7}, network={"activation": "relu"})
    hidden = Dimension("network.hidden", choices=((8, 8), (4,)))
    changed = with_values(
        settings, {"gamma": 0.5, "num_envs": 32, "network.hidden": hidden.value("[4]")}
    )
    config: Any = changed.algorithm_config
    assert (config.gamma, config.network.hidden, config.network.activation) == (0.5, (4,), "relu")
    assert changed.train.num_envs == 32
    assert changed.env_options == {"max_episode_steps": 7}
    with pytest.raises(UsageError, match="gamma must be from 0 to 1"):
        with_values(settings, {"gamma": 1.5})


@pytest.mark.parametrize(
    ("dimension", "sampled"),
    [
        (Dimension("gamma", 0.9, 0.99), 0.5),
        (Dimension("gamma", 0.9, 0.99), "0.95"),
        (Dimension("gamma", 0.9, 0.99), None),
        (Dimension("schedule", choices=("kl", "linear")), "constant"),
        (Dimension("network.hidden", choices=((8,),)), "[9]"),
        (Dimension("normalize_obs", choices=(False, True)), 1),
    ],
)
def test_a_value_of_a_storage_that_is_not_in_the_space_is_refused(
    dimension: Dimension, sampled: object
) -> None:
    with pytest.raises(UsageError, match=f"is not in {dimension.name}"):
        dimension.value(sampled)
