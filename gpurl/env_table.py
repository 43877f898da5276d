"""The list of environments that `gpurl envs` prints: what each is, and what a simulator that is missing needs."""

from gpurl.envs.registry import env_names, env_options, make_env, resolve_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv


def env_table() -> str:
    """Groups of environments: tensor tasks, the tasks of each simulator's folder, adapters that take a task's name."""
    groups: dict[str, list[str]] = {"tensor tasks, built in": [], "adapters": []}
    for name in env_names():
        env_class, _ = resolve_env(name)
        if issubclass(env_class, TorchEnv):
            groups["tensor tasks, built in"].append(_made(name))
            continue
        text, missing = (env_class.__doc__ or "").splitlines()[0], env_class.missing()
        folder = env_class.__module__.removeprefix("gpurl.envs.").rpartition(".")[0]
        if folder:
            groups.setdefault(f"{folder}: {missing or 'there'}", []).append(f"  {name}\n      {text}{_options(env_class)}")
        else:
            needs = f"\n      missing: {missing}" if missing else ""
            groups["adapters"].append(f"  {name}:TASK\n      {text}{needs}")
    lines = [line for group, entries in groups.items() for line in (group, *entries)]
    return "\n".join([*lines, "or the module path of your own (README: an environment of your own)"])


def simulators() -> list[str]:
    """A line for each simulator of which environments here say whether it is there."""
    found: dict[str, str] = {}
    for name in env_names():
        env_class, _ = resolve_env(name)
        if "missing" in {key for base in env_class.__mro__ if base is not VecEnv for key in vars(base)}:
            module = env_class.__module__.removeprefix("gpurl.envs.")
            found[module.partition(".")[0]] = env_class.missing() or "there"
    return [f"{name}: {text}" for name, text in found.items()]


def _made(name: str) -> str:
    """A tensor task with its spaces, which take making it."""
    env = make_env(name, 1)
    agents = f"{env.num_agents} agents, " if env.num_agents > 1 else ""
    limit = "no time limit" if env.max_episode_steps is None else f"{env.max_episode_steps} steps"
    spaces = f"observation {env.single_observation_space.shape}, action {env.single_action_space}"
    return f"  {name}\n      {agents}{spaces}, {limit}{_options(type(env))}"


def _options(env_class: type[VecEnv]) -> str:
    own = [f"{key}={option.default}" for key, option in env_options(env_class).items() if key != "max_episode_steps"]
    return f", options: {', '.join(own)}" if own else ""
