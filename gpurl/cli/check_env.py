"""Tries an environment out and says where it breaks the contract of `gpurl.envs.vec_env`: the first
thing to run on a task of your own.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from gpurl.envs.registry import env_options, make_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import Timestep, VecEnv
from gpurl.errors import EnvError, UsageError, first_line, raised_at
from gpurl.guards.contract import EnvGuard, check_reset, check_step
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom

NUM_ENVS = 8  # of an environment given by name
SLACK = 1e-5  # relative: how far rounding may carry an observation over a limit of its space
REPLAYED = 16  # steps that are played twice
Check = Callable[[VecEnv, int, int], Iterator[str]]


def check_env(env: VecEnv | str, steps: int = 64, seed: int = 0) -> list[str]:
    """What is wrong with `env`, each with what was wanted and what was got; empty when it keeps the
    contract.

    An environment given as an object is stepped and left somewhere in an episode. Exceptions inside
    it are findings, not raised.
    """
    if isinstance(env, str):
        made = make_env(env, NUM_ENVS, seed=seed)
        try:
            return check_env(made, steps, seed)
        finally:
            made.close()
    if not isinstance(env, VecEnv):
        bases = ", ".join(base.__name__ for base in type(env).__bases__)
        return [
            f"{type(env).__name__}: wanted a subclass of gpurl.envs.vec_env.VecEnv, got one of "
            f"{bases}"
        ]
    problems = _run(_check_attributes, env, steps, seed)
    if problems:
        return problems  # nothing further can be trusted
    checks: list[Check] = [
        _check_reset,
        _check_steps,
        _check_replay,
        _check_reset_mask,
        _check_resume,
        _check_sizes,
    ]
    if isinstance(env, TorchEnv):
        checks += [_check_functions, _check_batch_independence]
    if env.graph_safe:
        checks.append(_check_host_syncs)
    for check in checks:
        problems += _run(check, env, steps, seed)
    return list(dict.fromkeys(problems))


def _run(check: Check, env: VecEnv, steps: int, seed: int) -> list[str]:
    """The findings of one check, up to an exception inside the environment, which is the last of
    them.
    """
    problems: list[str] = []
    try:
        problems.extend(check(env, steps, seed))
    except EnvError as error:
        problems.append(str(error))
    except Exception as error:
        problems.append(
            f"{check.__name__.removeprefix('_check_')}: {type(error).__name__}: {error} "
            f"({raised_at(error, type(env))})"
        )
    return problems


def _check_attributes(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """What `VecEnv.__init__` sets, and the spaces."""
    name = type(env).__name__
    for key in ("single_observation_space", "single_action_space"):
        if not isinstance(getattr(env, key, None), gymnasium.Space):
            yield f"{name}.{key}: wanted a gymnasium.Space, got {getattr(env, key, None)!r}"
    if not all(
        hasattr(env, key) for key in ("num_envs", "device", "observation_space", "action_space")
    ):
        yield (
            f"{name}: wanted num_envs, device and the batched spaces, got none; call "
            f"super().__init__(num_envs, device)"
        )
        return
    if not isinstance(env.single_observation_space, Box):
        yield f"{name}.single_observation_space: wanted a Box, got {env.single_observation_space}"
    clocks = env.episode_length_buf
    if (
        clocks.dtype != torch.int64
        or clocks.shape != (env.num_envs,)
        or clocks.device.type != env.device.type
    ):
        yield (
            f"{name}.episode_length_buf: wanted int64 of shape ({env.num_envs},) on {env.device}, "
            f"got {_form(clocks)}"
        )
    if env.metadata.get("autoreset_mode") != env.autoreset_mode or not isinstance(
        env.autoreset_mode, AutoresetMode
    ):
        yield (
            f"{name}.metadata['autoreset_mode']: wanted {env.autoreset_mode}, got "
            f"{env.metadata.get('autoreset_mode')!r}"
        )


def _check_reset(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    name = f"{type(env).__name__}.reset"
    result = env.reset(seed=seed)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        yield (
            f"{name}: wanted a tuple (obs, info), got {type(result).__name__} of "
            f"{[type(part).__name__ for part in result]}"
        )
        return
    obs, _ = result
    check_reset(env, obs)
    yield from _value_problems(env, name, {"obs": obs})
    if env.episode_length_buf.any():
        yield (
            f"{name}: episode_length_buf: wanted zeros after a reset, got "
            f"{env.episode_length_buf.tolist()}"
        )
    again, _ = env.reset(seed=seed)
    if not _same(again, obs):
        yield f"{name}: obs: wanted the same first observations for the same seed, got others"


def _check_steps(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """Random actions; stops at the first step that is wrong."""
    draw = _action_source(env, seed)
    obs, _ = env.reset(seed=seed)
    returned, kept, guard = {"reset: obs": obs}, {"reset: obs": obs.clone()}, EnvGuard(env)
    for step in range(steps):
        action = draw()
        before, clocks = action.clone(), env.episode_length_buf.clone()
        timestep = env.step(action)
        guard.check(timestep)
        problems = list(_step_problems(env, timestep, clocks))
        if not torch.equal(action, before):
            problems.append(
                f"{type(env).__name__}.step: actions: wanted them left as they were, got them "
                f"changed"
            )
        tensors = _tensors(timestep)
        for key, earlier in returned.items():
            if not _same(earlier, kept[key]):
                problems.append(
                    f"{type(env).__name__}.step: wanted earlier returned tensors left alone, got "
                    f"{key} changed by a later step"
                )
        if problems:
            yield from problems
            return
        returned |= {f"step {step}: {key}": value for key, value in tensors.items()}
        kept |= {f"step {step}: {key}": value.clone() for key, value in tensors.items()}


def _step_problems(env: VecEnv, timestep: Timestep, clocks: Tensor) -> Iterator[str]:
    """What is wrong in one step whose form is right; clocks: [N] episode_length_buf before it."""
    name = f"{type(env).__name__}.step"
    obs, reward, terminated, truncated, info = timestep
    done, final_obs = terminated | truncated, info["final_obs"]
    pairs = {"obs": (obs, final_obs)}
    if env.single_state_space is not None:
        pairs["state"] = info["state"], info["final_state"]
    for key, (now, final) in pairs.items():
        yield from _value_problems(
            env, name, {key: now, f"info['final_{key}']": final, "reward": reward}
        )
        differs = ((now != final) & ~((now != now) & (final != final))).flatten(1).any(1) & ~done
        if differs.any():
            yield (
                f"{name}: info['final_{key}']: wanted {key} where no episode ended, got another in "
                f"environments {_where(differs)}"
            )
    both = terminated & truncated
    if both.any():
        yield (
            f"{name}: truncated: wanted False where terminated, got both in environments "
            f"{_where(both)}"
        )
    valid = info.get("valid", torch.ones_like(done))
    for key, flag in (("_final_obs", done), ("time_outs", truncated)):
        mask = info.get(key)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not torch.equal(mask, flag):
            wanted = "terminated | truncated" if key == "_final_obs" else "truncated"
            yield f"{name}: info[{key!r}]: wanted {wanted}, got {_form(mask)}"
    expected = (clocks + valid).masked_fill(done, 0)
    if not torch.equal(env.episode_length_buf, expected):
        wrong = env.episode_length_buf != expected
        got = f"{env.episode_length_buf[wrong].tolist()} in environments {_where(wrong)}"
        yield f"{name}: episode_length_buf: wanted one more a step and 0 after an end, got {got}"
    if "episode" in info:
        for value in (info["episode"].get("r"), info["episode"].get("l"), info.get("_episode")):
            if not isinstance(value, Tensor) or value.shape != done.shape:
                wanted = f"r and l of shape ({env.num_envs},) and info['_episode'] beside it"
                yield f"{name}: info['episode']: wanted {wanted}, got {_form(value)}"
                return
        empty = info["_episode"].bool() & (info["episode"]["l"] < 1)
        if empty.any():
            yield (
                f"{name}: info['episode']['l']: wanted at least 1 step in an episode that ended, "
                f"got 0 in environments {_where(empty)}"
            )


def _value_problems(env: VecEnv, name: str, values: dict[str, Tensor]) -> Iterator[str]:
    """Not finite, outside the space, or in the autograd graph."""
    space: Any = env.single_observation_space
    low, high = (
        torch.as_tensor(limit, dtype=torch.float64, device=env.device)
        for limit in (space.low, space.high)
    )
    for key, value in values.items():
        if value.requires_grad:
            yield (
                f"{name}: {key}: wanted a tensor without gradient, got requires_grad=True; compute "
                f"under torch.no_grad() or detach()"
            )
        rows = ~torch.isfinite(value).reshape(env.num_envs, -1).all(1)
        if rows.any():
            yield (
                f"{name}: {key}: wanted finite numbers, got NaN or infinity in environments "
                f"{_where(rows)}"
            )
        elif "obs" in key:
            too_low = value < low - SLACK * low.abs().clamp(min=1.0)
            too_high = value > high + SLACK * high.abs().clamp(min=1.0)
            outside = (too_low | too_high).reshape(env.num_envs, -1).any(1)
            if outside.any():
                worst = value[outside][0].tolist()
                yield (
                    f"{name}: {key}: wanted it inside {space}, got {worst} in environments "
                    f"{_where(outside)}"
                )


def _check_replay(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """The same seed and the same actions, twice."""
    runs = []
    for _ in range(2):
        draw = _action_source(env, seed + 1)
        env.reset(seed=seed)
        runs.append([_tensors(env.step(draw())) for _ in range(min(steps, REPLAYED))])
    yield from _differences(
        f"{type(env).__name__}.step: {{key}}: wanted the same values for the same seed and "
        f"actions, got others",
        *runs,
    )


def _check_reset_mask(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    name = f"{type(env).__name__}.reset(options={{'reset_mask': ...}})"
    draw = _action_source(env, seed)
    obs, _ = env.reset(seed=seed)
    for _ in range(3):
        obs = env.step(draw()).obs
    obs, clocks = obs.clone(), env.episode_length_buf.clone()
    mask = torch.arange(env.num_envs, device=env.device) % 2 == 0
    options = {"reset_mask": mask}
    after, _ = env.reset(options=options)
    check_reset(env, after)
    yield from _value_problems(env, name, {"obs": after})
    if list(options) != ["reset_mask"]:
        yield f"{name}: options: wanted the dict left as it was, got the keys {list(options)}"
    if not _same(after[~mask], obs[~mask]):
        yield (
            f"{name}: obs: wanted the environments outside the mask left alone, got others in "
            f"{_where(~mask)}"
        )
    if not torch.equal(env.episode_length_buf, clocks.masked_fill(mask, 0)):
        yield (
            f"{name}: episode_length_buf: wanted {clocks.masked_fill(mask, 0).tolist()}, got "
            f"{env.episode_length_buf.tolist()}"
        )


def _check_resume(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """What `state_dict` holds continues exactly, where there is one."""
    draw = _action_source(env, seed)
    env.reset(seed=seed)
    env.step(draw())
    state = copy.deepcopy(env.state_dict())
    if not state:
        return
    actions = [draw() for _ in range(min(steps, REPLAYED))]
    first = [_tensors(env.step(action)) for action in actions]
    env.load_state_dict(state)
    second = [_tensors(env.step(action)) for action in actions]
    yield from _differences(
        f"{type(env).__name__}.load_state_dict: {{key}}: wanted the same steps again, got others",
        first,
        second,
    )


def _check_sizes(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """One environment, and three: where axes are mixed up it shows. Passed over where the
    constructor wants more than it can be given.
    """
    for num_envs in (1, 3):
        try:
            other = type(env)(num_envs=num_envs, device=env.device, **_options_of(env))
        except (TypeError, UsageError):
            return
        if (
            other.single_observation_space != env.single_observation_space
            or other.single_action_space != env.single_action_space
        ):
            return  # made with options that are not known here
        try:
            obs, _ = other.reset(seed=seed)
            check_reset(other, obs)
            draw = _action_source(other, seed)
            for _ in range(3):
                check_step(other, other.step(draw()))
        except EnvError as error:
            yield f"with num_envs={num_envs}: {error}"
        finally:
            other.close()


def _options_of(env: VecEnv) -> dict[str, Any]:
    """The constructor's options that stand as attributes of the same name."""
    names = set(env_options(type(env))) - {"env"}
    return {name: getattr(env, name) for name in names if hasattr(env, name)}


def _check_functions(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """The three functions of a TorchEnv: sizes, fixed forms, and that they change nothing they are
    given.
    """
    assert isinstance(env, TorchEnv)
    name, num_envs = type(env).__name__, env.num_envs + 2
    state = env.initial_state(rng := CounterRandom(seed, num_envs, env.device))
    for key, value in state.items():
        if value.shape[:1] != (num_envs,):
            yield (
                f"{name}.initial_state: {key}: wanted {num_envs} rows, as many as rng.num_envs, "
                f"got shape {tuple(value.shape)}"
            )
            return
    state = env.initial_state(rng := CounterRandom(seed, env.num_envs, env.device))
    draw = _action_source(env, seed)
    for _ in range(min(steps, REPLAYED)):
        action = draw()
        given = {**state, "action": action}
        kept = {key: value.clone() for key, value in given.items()}
        next_state, _, _ = env.transition(state, action, rng)
        observed = {key: value.clone() for key, value in next_state.items()}
        env.observe(next_state)
        for call, before, after in (("transition", kept, given), ("observe", observed, next_state)):
            changed = [key for key, value in before.items() if not _same(value, after[key])]
            if changed:
                yield (
                    f"{name}.{call}: wanted what it is given left alone, got {', '.join(changed)} "
                    f"changed in place"
                )
                return
        if (problem := _form_change(name, state, next_state)) is not None:
            yield problem
            return
        rng.advance()
        state = next_state


def _form_change(name: str, state: dict[str, Tensor], next_state: dict[str, Tensor]) -> str | None:
    """What differs in keys, shapes and dtypes, which a graph needs fixed."""
    if set(state) != set(next_state):
        return (
            f"{name}.transition: state: wanted the keys {sorted(state)}, got {sorted(next_state)}"
        )
    for key, value in state.items():
        if value.shape != next_state[key].shape or value.dtype != next_state[key].dtype:
            return (
                f"{name}.transition: {key}: wanted {_form(value)} as in initial_state, got "
                f"{_form(next_state[key])}"
            )
    return None


def _check_batch_independence(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """The first environments of many do what as few alone do, up to the rounding of vector
    instructions.
    """
    assert isinstance(env, TorchEnv)
    few, many = 3, 3 + 5
    states, generators = [], []
    for num_envs in (few, many):
        generators.append(CounterRandom(seed, num_envs, env.device))
        states.append(env.initial_state(generators[-1]))
    space = copy.deepcopy(env.single_action_space)
    space.seed(seed)
    for _ in range(min(steps, REPLAYED)):
        action = torch.stack(
            [torch.as_tensor(space.sample(), device=env.device) for _ in range(many)]
        )
        for key in states[0]:
            small, large = states[0][key].double(), states[1][key][:few].double()
            if not torch.allclose(small, large, rtol=1e-4, atol=1e-5, equal_nan=True):
                yield (
                    f"{type(env).__name__}: {key}: wanted the same environments whatever their "
                    f"number, got others with {few} and {many}"
                )
                return
        states = [
            env.transition(state, action[: len(action) if at else few], generators[at])[0]
            for at, state in enumerate(states)
        ]
        for generator in generators:
            generator.advance()


def _check_host_syncs(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """Reset and step with tensors that have no values: whatever makes the host look at one stands
    out.
    """
    action = _action_source(env, seed)()
    env.reset(seed=seed)
    try:
        with no_host_syncs(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            with FakeCopyMode(mode):
                fake = copy.deepcopy(env)
            fake.reset(
                options={
                    "reset_mask": torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
                }
            )
            for _ in range(2):
                fake.step(mode.from_tensor(action))
    except Exception as error:
        operation = (
            str(getattr(error, "func", "")) or f"{type(error).__name__}: {first_line(error)}"
        )
        wanted = "a step in which the host looks at no tensor, as graph_safe says"
        place = raised_at(error, type(env))
        yield f"{type(env).__name__}: wanted {wanted}, got {operation} ({place})"


def _action_source(env: VecEnv, seed: int) -> Callable[[], Tensor]:
    """Random actions [N, *action] of the space."""
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return lambda: torch.as_tensor(space.sample(), device=env.device)


def _tensors(timestep: Timestep) -> dict[str, Tensor]:
    """The tensors of a step by name, those of info included."""
    found = {name: getattr(timestep, name) for name in ("obs", "reward", "terminated", "truncated")}
    for key, value in timestep.info.items():
        nested = value.items() if isinstance(value, dict) else ((None, value),)
        found |= {
            f"info[{key!r}]" + (f"[{inner!r}]" if inner else ""): part
            for inner, part in nested
            if isinstance(part, Tensor)
        }
    return found


def _differences(
    message: str, first: list[dict[str, Tensor]], second: list[dict[str, Tensor]]
) -> Iterator[str]:
    """`message` for every key that differs, at the first step where one does."""
    for one, two in zip(first, second):
        keys = [key for key in one if key not in two or not _same(one[key], two[key])]
        if keys:
            yield message.format(key=", ".join(keys))
            return


def _same(one: Tensor, two: Tensor) -> bool:
    """Equal, NaN with NaN included."""
    return one.shape == two.shape and bool(((one == two) | ((one != one) & (two != two))).all())


def _where(mask: Tensor) -> list[int]:
    """The first environments in mask [N]."""
    return mask.nonzero().squeeze(1)[:8].tolist()


def _form(value: object) -> str:
    return (
        f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
    )
