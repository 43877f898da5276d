"""Names of the numbers in observations and actions, for pictures: those that a task declares, those
that its simulator knows, else their places.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from gpurl.envs.vec_env import VecEnv
from gpurl.errors import EnvError


@dataclass(frozen=True)
class Names:
    """Of one agent: `observation` [D]; `action` [A], one name for each number of an action;
    `choices`, one for each choice of a Discrete action, [] for other spaces.
    """

    observation: list[str]
    action: list[str]
    choices: list[str]


def names_of(env: VecEnv) -> Names:
    """EnvError for names that do not fit the spaces."""
    for problem in name_problems(env):
        raise EnvError(problem)
    known = env.known_names()
    observation = _fitting(env.observation_names or known[0], observation_width(env))
    declared = env.action_names or known[1]
    space = env.single_action_space
    if isinstance(space, Discrete):
        return Names(observation, ["action"], _fitting(declared, int(space.n)))
    return Names(observation, _fitting(declared, action_width(env)), [])


def observation_width(env: VecEnv) -> int:
    """D, the numbers in the observation of one agent."""
    return int(np.prod(env.single_observation_space.shape or ())) // env.num_agents


def action_width(env: VecEnv) -> int:
    """A, the numbers in the action of one agent."""
    return int(np.prod(env.single_action_space.shape or (1,))) // env.num_agents


def name_problems(env: VecEnv) -> Iterator[str]:
    """What is wrong with the names that the task declares."""
    if not isinstance(env.single_action_space, Box | Discrete | MultiDiscrete):
        return  # a problem of its own
    space = env.single_action_space
    num_actions = int(space.n) if isinstance(space, Discrete) else action_width(env)
    for key, place, number in (
        ("observation_names", "single_observation_space", observation_width(env)),
        ("action_names", "single_action_space", num_actions),
    ):
        names = getattr(env, key)
        if names is None:
            continue
        where = f"{type(env).__name__}.{key}"
        is_row = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_row or not all(isinstance(name, str) for name in names):
            yield f"{where}: wanted a tuple of {number} texts, got {names!r}"
        elif len(names) != number and not _is_of_base(env, key, place):
            of = "observation" if key == "observation_names" else "action"
            kind = "choice" if of == "action" and isinstance(space, Discrete) else "number"
            yield (
                f"{where}: wanted {number}, one for each {kind} of an agent's {of}, got "
                f"{len(names)}: {', '.join(names)}"
            )


def _is_of_base(env: VecEnv, key: str, space: str) -> bool:
    """Whether the attribute `key` is that of a base of the class that has the space: a task that
    observes less than its base need not name it again.
    """
    owners = [
        next(
            (depth for depth, kind in enumerate(type(env).__mro__) if name in vars(kind)),
            0,
        )
        for name in (key, space)
    ]
    return key not in vars(env) and owners[0] > owners[1]


def _fitting(names: Sequence[str] | None, number: int) -> list[str]:
    """`names`, or places where there are none or another number."""
    return list(names) if names and len(names) == number else [str(i) for i in range(number)]
