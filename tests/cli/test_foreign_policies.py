"""`gpurl convert --algorithm`: policies of other trainers act in gpurl as they did there. Libraries
that are not here are skipped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import gpurl
from gpurl.api import evaluate_run, resume
from tests.converted import convert
from tests.outward_truth import env_of
from tests.small_runs import exit_code

OBS = torch.randn(32, 8, generator=torch.Generator().manual_seed(0)) * 0.5  # Chasing's
CLOSE = {"rtol": 1e-5, "atol": 2e-6}


def mlp(inputs: int, outputs: int, hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, outputs),
    )


def shaken(module: nn.Module) -> nn.Module:
    """Weights as after training: none is 0 and biases matter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return module


def converted(
    file: Path, folder: Path, env: str = "chasing", activation: str = "tanh", *more: str
) -> gpurl.Policy:
    words = [
        "--algorithm",
        "ppo",
        "--env",
        env,
        "--network.activation",
        activation,
        "--run-dir",
        str(folder),
        "--num-envs",
        "16",
        "--quiet",
    ]
    assert convert(file, *words, *more) == 0
    return gpurl.load(folder)


class CleanRL(nn.Module):
    """The agent of cleanrl's ppo_continuous_action.py."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.critic, self.actor_mean = mlp(inputs, 1), mlp(inputs, outputs)
        self.actor_logstd = nn.Parameter(torch.zeros(1, outputs))


def test_cleanrls_agent_acts_and_values_as_it_did_in_units_of_the_task(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    agent = shaken(CleanRL(3, 1))
    torch.save(
        torch.nn.DataParallel(agent).state_dict(), tmp_path / "agent.pt"
    )  # names begin with module.
    obs = OBS[:, :3]
    policy = converted(tmp_path / "agent.pt", tmp_path / "run", "pendulum")
    assert "no normaliser of observations in it" in capsys.readouterr().out
    with torch.no_grad():
        torch.testing.assert_close(policy.act(obs), agent.actor_mean(obs).clamp(-2.0, 2.0), **CLOSE)
        torch.testing.assert_close(policy.value(obs), agent.critic(obs).squeeze(1), **CLOSE)
        drawn = gpurl.load(tmp_path / "run", num_envs=100_000).act(
            torch.zeros(100_000, 3), deterministic=False
        )
        mean, deviation = agent.actor_mean(torch.zeros(1, 3)), agent.actor_logstd.exp()
        expected = (mean + deviation * torch.randn(100_000, 1)).clamp(-2.0, 2.0)
    assert abs(float(drawn.mean() - expected.mean())) < 0.02
    assert abs(float(drawn.std() - expected.std())) < 0.02
    assert evaluate_run(tmp_path / "run", 1, "cpu")["eval/episodes"] == 1.0
    run = resume(tmp_path / "run", total_steps=16 * 32, eval_episodes=0)
    assert (run.outcome.steps, run.outcome.reason) == (16 * 32, "total_steps")


def test_a_discrete_policy_and_one_in_minus_one_to_one(tmp_path: Path) -> None:
    agent, obs = nn.ModuleDict({"actor": mlp(4, 2), "critic": mlp(4, 1, 16)}), OBS[:, :4] * 3
    shaken(agent)
    with torch.no_grad():
        agent["actor"][4].bias -= agent["actor"](obs).median(0).values  # both actions are taken
    torch.save({"agent": agent.state_dict()}, tmp_path / "agent.pt")
    policy = converted(tmp_path / "agent.pt", tmp_path / "run", "cart_pole")
    assert torch.equal(policy.act(obs), agent["actor"](obs).argmax(1))
    assert policy.act(obs).unique().tolist() == [0, 1]
    unit = nn.ModuleDict({"actor": mlp(3, 1), "critic": mlp(3, 1)})
    shaken(unit)
    torch.save(unit.state_dict(), tmp_path / "unit.pt")
    policy = converted(
        tmp_path / "unit.pt", tmp_path / "unit", "pendulum", "tanh", "--unit-actions"
    )
    torch.testing.assert_close(
        policy.act(OBS[:, :3]), 2.0 * unit["actor"](OBS[:, :3]).detach().clamp(-1.0, 1.0), **CLOSE
    )


MOMENTS = (OBS.mean(0).double() + 0.1, OBS.var(0).double() * 2.0)  # where nothing is clipped
OTHERS = (torch.full((8,), 9.0).double(), torch.ones(8).double())  # of the critic's states


def test_skrls_file_with_normalisers_of_observations_states_and_values(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    agent = shaken(nn.ModuleDict({"policy": mlp(8, 2), "value": mlp(8, 1)}))
    of_value = (torch.tensor([100.0]).double(), torch.tensor([2500.0]).double())
    state = dict(agent.state_dict())
    # the order of the file does not decide
    for name, (mean, variance) in (
        ("state_preprocessor", OTHERS),
        ("observation_preprocessor", MOMENTS),
        ("value_preprocessor", of_value),
    ):
        state |= {f"{name}.running_mean": mean, f"{name}.running_variance": variance}
    torch.save(state, tmp_path / "agent.pt")
    policy = converted(tmp_path / "agent.pt", tmp_path / "run")
    assert "no normaliser of observations" not in capsys.readouterr().out
    obs = ((OBS - MOMENTS[0]) / (MOMENTS[1].sqrt() + 1e-8)).float()
    with torch.no_grad():
        torch.testing.assert_close(policy.act(OBS), agent["policy"](obs).clamp(-1.0, 1.0), **CLOSE)
        # RunningStandardScaler with inverse=True
        value = 50.0 * agent["value"](obs).clamp(-5.0, 5.0) + 100.0
        torch.testing.assert_close(policy.value(OBS), value.squeeze(1), rtol=1e-5, atol=1e-3)


def test_rl_games_central_value_does_not_normalise_the_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    agent = shaken(nn.ModuleDict({"actor_mlp": mlp(8, 2), "value": mlp(8, 1)}))
    names = ("model.running_mean_std.running_mean", "model.running_mean_std.running_var")
    of_critic = {f"assymetric_vf_nets.{name}": each for name, each in zip(names, OTHERS)}
    torch.save(of_critic | dict(agent.state_dict()), tmp_path / "alone.pt")
    policy = converted(tmp_path / "alone.pt", tmp_path / "alone")
    assert "no normaliser of observations in it" in capsys.readouterr().out
    with torch.no_grad():
        expected = agent["actor_mlp"](OBS).clamp(-1.0, 1.0)
        torch.testing.assert_close(policy.act(OBS), expected, **CLOSE)
        own = dict(zip(names, MOMENTS))
        torch.save(of_critic | own | dict(agent.state_dict()), tmp_path / "both.pt")
        policy = converted(tmp_path / "both.pt", tmp_path / "both")
        obs = ((OBS - MOMENTS[0]) / (MOMENTS[1] + 1e-5).sqrt()).float()
        expected = agent["actor_mlp"](obs).clamp(-1.0, 1.0)
        torch.testing.assert_close(policy.act(OBS), expected, **CLOSE)


@pytest.mark.parametrize("module", ["actor_critic.", ""])
def test_a_module_called_actor_critic_and_random_network_distillation(
    tmp_path: Path, module: str
) -> None:
    agent = shaken(nn.ModuleDict({"actor": mlp(8, 2), "critic": mlp(8, 1)}))
    state = {f"model.{module}{name}": value for name, value in agent.state_dict().items()}
    predictor = {
        f"rnd_state_dict.predictor.{name}": value for name, value in mlp(8, 4).state_dict().items()
    }
    torch.save(state | predictor, tmp_path / "agent.pt")
    policy = converted(tmp_path / "agent.pt", tmp_path / "run")
    with torch.no_grad():
        expected = agent["actor"](OBS).clamp(-1.0, 1.0)
        torch.testing.assert_close(policy.act(OBS), expected, **CLOSE)
        torch.testing.assert_close(policy.value(OBS), agent["critic"](OBS).squeeze(1), **CLOSE)


@pytest.mark.parametrize(
    ("state", "env", "message"),
    [
        (
            {"a.weight": torch.ones(8, 5), "a.bias": torch.ones(8)},
            "pendulum",
            "wanted layers from 3 numbers to 1, found\n  a: 5 -> 8",
        ),
        ({"weight": torch.ones(3)}, "pendulum", "no dense layers"),
        (mlp(3, 1).state_dict(), "acrobot", "no actor of acrobot"),
    ],
    ids=["another size", "no layers", "discrete actions"],
)
def test_what_is_no_such_policy_is_refused_with_a_listing(
    tmp_path: Path, state: dict[str, Tensor], env: str, message: str, capsys: pytest.CaptureFixture
) -> None:
    torch.save(state, tmp_path / "agent.pt")
    words = [
        "--algorithm",
        "ppo",
        "--env",
        env,
        "--network.activation",
        "tanh",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert convert(tmp_path / "agent.pt", *words) == 5
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def named_mlp(*names: str) -> nn.Sequential:
    """From 3 numbers to 1 through hidden layers of the same size, called so."""
    sizes = [3, *[8] * (len(names) - 1), 1]
    module = nn.Sequential()
    for number, name in enumerate(names):
        module.add_module(name, nn.Linear(sizes[number], sizes[number + 1]))
        if number < len(names) - 1:
            module.add_module(f"{name}_tanh", nn.Tanh())
    return shaken(module)  # type: ignore[return-value]


def test_layers_of_the_same_size_keep_their_order_in_files_that_sort_names(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    obs, words = (
        OBS[:, :3],
        ["--algorithm", "ppo", "--env", "pendulum", "--network.activation", "tanh"],
    )
    numbered = named_mlp("actor:0", "actor:2", "actor:10", "actor:11")
    state = {name.replace(":", "."): value for name, value in numbered.state_dict().items()}
    save_file(state, tmp_path / "numbered.safetensors")
    torch.save(dict(sorted(state.items())), tmp_path / "sorted.pt")
    for name in ("numbered.safetensors", "sorted.pt"):
        policy = converted(tmp_path / name, tmp_path / f"run_{name}", "pendulum")
        torch.testing.assert_close(policy.act(obs), numbered(obs).clamp(-2.0, 2.0), **CLOSE)
    named = named_mlp("inp", "mid_b", "mid_a", "out")
    save_file(named.state_dict(), tmp_path / "named.safetensors")
    assert (
        convert(tmp_path / "named.safetensors", *words, "--run-dir", str(tmp_path / "refused")) == 5
    )
    errors = capsys.readouterr().err
    assert "its layers fit in 2 orders, and safetensors keeps none" in errors
    assert "  mid_a: 8 -> 8" in errors
    assert (
        convert(tmp_path / "named.safetensors", "--out", str(tmp_path / "copy.safetensors")) == 0
    )  # whose order is not known either
    assert (
        convert(tmp_path / "copy.safetensors", *words, "--run-dir", str(tmp_path / "refused")) == 5
    )
    torch.save(named.state_dict(), tmp_path / "ours.pt")
    assert convert(tmp_path / "ours.pt", "--out", str(tmp_path / "ours.safetensors")) == 0
    assert convert(tmp_path / "ours.safetensors", "--out", str(tmp_path / "again.safetensors")) == 0
    for name in ("ours.pt", "ours.safetensors", "again.safetensors"):
        policy = converted(tmp_path / name, tmp_path / f"run_{name}", "pendulum")
        torch.testing.assert_close(policy.act(obs), named(obs).clamp(-2.0, 2.0), **CLOSE)
    torch.save(
        named_mlp("inp", "h2", "h1", "out").state_dict(), tmp_path / "down.pt"
    )  # numbers from behind
    assert convert(tmp_path / "down.pt", *words, "--run-dir", str(tmp_path / "refused")) == 5
    assert (
        "fit in the order of the file and in that of their names, and these are two policies"
        in capsys.readouterr().err
    )


def test_weights_that_are_no_numbers_make_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    agent = shaken(CleanRL(3, 1))
    torch.save({**mlp(3, 1).state_dict(), "std": torch.tensor([-1.0])}, tmp_path / "agent.pt")
    words = [
        "--algorithm",
        "ppo",
        "--env",
        "pendulum",
        "--network.activation",
        "tanh",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert convert(tmp_path / "agent.pt", *words) == 5
    assert "not finite in gpurl: head.log_std" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    torch.save(agent.state_dict(), tmp_path / "agent.pt")
    assert convert(tmp_path / "agent.pt", *words) == 0
    assert {"run.pid", "run.lock"} <= {each.name for each in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize(
    "words",
    [
        ["--network.hidden", "3"],
        ["network.memory=gru"],
        ["--squash"],
        ["--no-normalize-obs"],
        ["normalize_value=true"],
        ["--config"],
    ],
    ids=str,
)
def test_what_the_weights_decide_is_no_setting(
    tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "x.yaml").write_text("network: {shared: true}")
    words = [*words, str(tmp_path / "x.yaml")] if words == ["--config"] else words
    words = ["--algorithm", "ppo", "--env", "pendulum", "--network.activation", "tanh", *words]
    assert exit_code(["convert", str(tmp_path / "none.pt"), *words]) == 2
    assert "of a converted policy follows from its weights: leave it out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithm", "ppo"], "a run needs --algorithm and --env"),
        (["--num-envs", "3"], "a run needs --algorithm and --env"),
        (["--algorithm", "ppo", "--env", "pendulum"], "weights do not show their activation"),
        (
            ["--algorithm", "ppo", "--env", "pendulum", "--out", "x", "network.activation=elu"],
            "the folder of a run is --run-dir",
        ),
        (
            ["--algorithm", "sac", "--env", "pendulum", "--network.activation", "elu"],
            "did you mean --actor-network.activation or",
        ),
    ],
    ids=str,
)
def test_words_that_cannot_be_are_refused(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert exit_code(["convert", str(tmp_path / "agent.pt"), *words]) == 2
    assert message in capsys.readouterr().err


def test_stable_baselines3(tmp_path: Path) -> None:
    library = pytest.importorskip("stable_baselines3")
    model = library.PPO(
        "MlpPolicy", "Pendulum-v1", n_steps=64, policy_kwargs={"net_arch": [8, 8]}, device="cpu"
    )
    shaken(model.policy)
    model.save(tmp_path / "model.zip")
    policy, obs = converted(tmp_path / "model.zip", tmp_path / "run", "pendulum"), OBS[:, :3]
    torch.testing.assert_close(
        policy.act(obs), torch.as_tensor(model.predict(obs.numpy(), deterministic=True)[0]), **CLOSE
    )
    torch.testing.assert_close(
        policy.value(obs), model.policy.predict_values(obs).squeeze(1).detach(), **CLOSE
    )


def test_rsl_rl(tmp_path: Path) -> None:
    pytest.importorskip("rsl_rl")
    from rsl_rl.runners import OnPolicyRunner

    from benchmarks.peers.job import Job
    from benchmarks.peers.rsl_rl_loop import settings
    from gpurl import adapters

    job = Job("chasing", "rsl_rl", "default", num_envs=4, horizon=4, iterations=1, warm_up=0)
    words = settings(job) | {"save_interval": 10}
    for name in ("actor", "critic"):
        words[name] |= {"obs_normalization": True, "activation": "elu", "hidden_dims": [8, 8]}
    runner = OnPolicyRunner(
        adapters.to_rsl_rl(env_of("chasing")), words, log_dir=None, device="cpu"
    )
    runner.learn(2)
    shaken(runner.alg._raw_actor)
    torch.save(
        runner.alg.save() | {"iter": 2, "infos": None}, tmp_path / "model_2.pt"
    )  # as runner.save does, whose logger wants a folder
    act: Callable[..., Tensor] = runner.get_inference_policy()
    policy = converted(tmp_path / "model_2.pt", tmp_path / "run", "chasing", "elu")
    with torch.no_grad():
        expected = act({"policy": OBS}).clamp(-1.0, 1.0)
    torch.testing.assert_close(policy.act(OBS), expected, **CLOSE)
    assert policy.algorithm.normalizer is not None


def test_skrl(tmp_path: Path) -> None:
    pytest.importorskip("skrl")
    from skrl.agents.torch.ppo import PPO
    from skrl.resources.preprocessors.torch import RunningStandardScaler

    from benchmarks.peers.job import Job
    from benchmarks.peers.skrl_loop import skrl_models
    from gpurl import adapters

    env = adapters.to_skrl(env_of("chasing"))
    models = skrl_models(env.env, Job("chasing", "skrl", activation="elu"))
    options = {
        "observation_preprocessor": RunningStandardScaler,
        "observation_preprocessor_kwargs": {"size": env.observation_space},
    }
    quiet = {"experiment": {"write_interval": 0, "checkpoint_interval": 0}}
    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    agent = PPO(models=models, cfg=options | quiet, **spaces)
    agent.init()
    shaken(agent.policy)
    agent._observation_preprocessor(OBS * 2 + 1, train=True)
    agent.save(str(tmp_path / "agent.pt"))
    policy = converted(tmp_path / "agent.pt", tmp_path / "run", "chasing", "elu")
    with torch.no_grad():
        expected, _ = agent.policy.compute(
            {"observations": agent._observation_preprocessor(OBS)}, role="policy"
        )
    torch.testing.assert_close(policy.act(OBS), expected.clamp(-1.0, 1.0), **CLOSE)


@pytest.mark.parametrize("separate", [True, False])
def test_rl_games(tmp_path: Path, separate: bool) -> None:
    pytest.importorskip("rl_games")
    from rl_games.common.algo_observer import AlgoObserver
    from rl_games.torch_runner import Runner

    from benchmarks.peers.job import Job
    from benchmarks.peers.rl_games_loop import settings
    from gpurl import adapters

    kept: dict[str, Any] = {}

    class Keep(AlgoObserver):
        def after_init(self, algo: Any) -> None:
            kept["algo"] = algo

    adapters.to_rl_games(env_of("chasing"), "chasing")
    params = settings(
        Job("chasing", "rl_games", mode="eager", num_envs=4, horizon=14), str(tmp_path)
    )
    params["config"] |= {
        "env_name": "chasing",
        "max_epochs": 2,
        "minibatch_size": 28,
        "normalize_input": True,
        "normalize_value": True,
    }
    params["network"]["separate"] = separate
    params["network"]["mlp"] |= {"units": [8, 8], "activation": "elu"}
    runner = Runner(Keep())
    runner.load_config(params)
    runner.run({"train": True})
    algo = kept["algo"]
    shaken(algo.model)
    algo.model.running_mean_std.running_mean.copy_(
        OBS.mean(0) + 0.1
    )  # what those few steps saw lies within 5 deviations, where it clips
    algo.model.running_mean_std.running_var.copy_(OBS.var(0) * 2.0)
    algo.last_mean_rewards = OBS.numpy()[0, 0]  # numpy's own number, as it is after an episode
    algo.save(str(tmp_path / "saved"))
    policy = converted(tmp_path / "saved.pth", tmp_path / "run", "chasing", "elu", "--unit-actions")
    algo.model.eval()
    with torch.no_grad():
        expected = algo.model(
            {"is_train": False, "prev_actions": None, "obs": OBS, "rnn_states": None}
        )
    torch.testing.assert_close(policy.act(OBS), expected["mus"].clamp(-1.0, 1.0), **CLOSE)
    torch.testing.assert_close(policy.value(OBS), expected["values"].squeeze(1), **CLOSE)
    assert policy.algorithm.config.network.shared == (not separate)
