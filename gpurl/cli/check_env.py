"""Tries an environment out and reports where it breaks the contract of `gpurl.envs.vec_env`: the
first thing to run on a task of your own.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from gpurl.envs.registry import env_options, make_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import (
    TensorSpec,
    Timestep,
    VecEnv,
    space_problems,
    step_values,
    tensor_problem,
)
from gpurl.errors import EnvError, UsageError, first_line, raised_at
from gpurl.guards.contract import EnvGuard, check_reset, check_step, reset_env
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom

NUM_ENVS = 8  # of an environment given by name
SLACK = 1e-5  # relative: how far rounding may put an observation outside its space
REPLAYED = 16  # steps that are played twice
Check = Callable[[VecEnv, int, int], Iterator[str]]


def check_env(env: VecEnv | str, steps: int = 64, seed: int = 0) -> list[str]:
    """All problems of `env`, each with what was wanted and what was got; empty when it keeps the
    contract.

    An environment given as an object is stepped and left somewhere in an episode. Exceptions inside
    it are problems, not raised.
    """
    if isinstance(env, str):
        new_env = make_env(env, NUM_ENVS, seed=seed)
        try:
            return check_env(new_env, steps, seed)
        finally:
            new_env.close()
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
    return _each_once(problems)


def _each_once(problems: list[str]) -> list[str]:
    """`problems` without those that repeat an earlier one: of the same kind, by another check, with
    another number of environments, or at another line.
    """
    kept: dict[str, list[str]] = {}
    for problem in problems:
        cause = re.sub(r"^with num_envs=\d+: |^.*, got (?=\w+Error: )", "", problem)
        cause = re.sub(r"^\w+: (?=\w+Error: )|^\w+\.\w+ raised ", "", cause)
        cause = cause.removeprefix("EnvError: ")
        cause = re.sub(r" \(\S+:\d+: .*\)$", "", cause, flags=re.DOTALL)
        kept.setdefault(re.sub(r"\d+", "#", cause), []).append(problem)
    # an error inside the checks follows from what the environment did wrong before
    own = f"({__file__}:"
    caused = [group[0] for group in kept.values() if own not in group[0]]
    first = caused or [group[0] for group in kept.values()]
    return list(dict.fromkeys(first))


def advice(env: VecEnv, steps: int = 64) -> list[str]:
    """What keeps the contract and still makes trouble in a training; `env` is played."""
    draw = _action_source(env, 0)
    env.reset(seed=0)
    ends = any(
        bool((timestep.terminated | timestep.truncated).any())
        for timestep in (env.step(draw()) for _ in range(steps))
    )
    if env.max_episode_steps is None and not ends:
        return [
            f"no time limit, and no episode ended in {steps} steps: an evaluation waits for ends; "
            f"set max_episode_steps"
        ]
    return []


def _run(check: Check, env: VecEnv, steps: int, seed: int) -> list[str]:
    """The problems of one check; an exception inside the environment ends it, as the last one."""
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
    """What `VecEnv.__init__` sets, which checks the spaces."""
    name = type(env).__name__
    if not all(
        hasattr(env, key) for key in ("num_envs", "device", "observation_space", "action_space")
    ):
        yield (
            f"{name}: wanted num_envs, device and the batched spaces, got none; call "
            f"super().__init__(num_envs, device)"
        )
        return
    yield from space_problems(env)
    spec = TensorSpec((env.num_envs,), torch.int64)
    if problem := tensor_problem(env.episode_length_buf, spec, env.device):
        yield f"{name}.episode_length_buf: {problem}"
    if env.metadata.get("autoreset_mode") != env.autoreset_mode or not isinstance(
        env.autoreset_mode, AutoresetMode
    ):
        yield (
            f"{name}.metadata['autoreset_mode']: wanted {env.autoreset_mode}, got "
            f"{env.metadata.get('autoreset_mode')!r}"
        )


def _check_reset(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    name = f"{type(env).__name__}.reset"
    obs = reset_env(env, seed)
    yield from _value_problems(env, name, {"obs": obs})
    if env.episode_length_buf.any():
        yield (
            f"{name}: episode_length_buf: wanted zeros after a reset, got "
            f"{env.episode_length_buf.tolist()}"
        )
    if not _same(reset_env(env, seed), obs):
        yield f"{name}: obs: wanted the same first observations for the same seed, got others"


def _check_steps(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """Random actions; stops at the first step that is wrong."""
    draw = _action_source(env, seed)
    guard = EnvGuard(env)
    obs = reset_env(env, seed)
    # everything that was returned, and copies of it
    returned = {"reset: obs": obs}
    copies = {"reset: obs": obs.clone()}
    for step in range(steps):
        action = draw()
        before = action.clone()
        clocks = env.episode_length_buf.clone()
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
            if not _same(earlier, copies[key]):
                problems.append(
                    f"{type(env).__name__}.step: wanted earlier returned tensors left alone, got "
                    f"{key} changed by a later step"
                )
        if problems:
            yield from problems
            return
        returned |= {f"step {step}: {key}": value for key, value in tensors.items()}
        copies |= {f"step {step}: {key}": value.clone() for key, value in tensors.items()}


def _step_problems(env: VecEnv, timestep: Timestep, clocks: Tensor) -> Iterator[str]:
    """Wrong values in one step that has passed `check_step`; clocks: [N] episode_length_buf before
    it.
    """
    name = f"{type(env).__name__}.step"
    obs, reward, terminated, truncated, info = timestep
    done = terminated | truncated
    # numbers, and that the true successor differs from what is shown only where an episode ended
    pairs = {"obs": (obs, info["final_obs"])}
    if env.single_state_space is not None:
        pairs["state"] = (info["state"], info["final_state"])
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
    # flags and their repetitions in info
    both = terminated & truncated
    if both.any():
        yield (
            f"{name}: truncated: wanted False where terminated, got both in environments "
            f"{_where(both)}"
        )
    for key, flag in (("_final_obs", done), ("time_outs", truncated)):
        mask = info.get(key)
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not torch.equal(mask, flag):
            wanted = "terminated | truncated" if key == "_final_obs" else "truncated"
            yield f"{name}: info[{key!r}]: wanted {wanted}, got {_form(mask)}"
    # clocks and statistics of episodes
    valid = info.get("valid", torch.ones_like(done))
    expected = (clocks + valid).masked_fill(done, 0)
    if not torch.equal(env.episode_length_buf, expected):
        wrong = env.episode_length_buf != expected
        got = f"{env.episode_length_buf[wrong].tolist()} in environments {_where(wrong)}"
        yield f"{name}: episode_length_buf: wanted one more a step and 0 after an end, got {got}"
    empty = info["_episode"].bool() & (info["episode"]["l"] < 1)
    if empty.any():
        yield (
            f"{name}: info['episode']['l']: wanted at least 1 step in an episode that ended, got 0 "
            f"in environments {_where(empty)}"
        )


def _value_problems(env: VecEnv, name: str, values: dict[str, Tensor]) -> Iterator[str]:
    """Numbers that are not finite, and observations outside their space."""
    space = env.single_observation_space
    assert isinstance(space, Box)
    low, high = (
        torch.as_tensor(limit, dtype=torch.float64, device=env.device)
        for limit in (space.low, space.high)
    )
    for key, value in values.items():
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
    """Environments outside the mask stay as they are."""
    name = f"{type(env).__name__}.reset(options={{'reset_mask': ...}})"
    draw = _action_source(env, seed)
    env.reset(seed=seed)
    for _ in range(3):
        obs = env.step(draw()).obs
    obs = obs.clone()
    clocks = env.episode_length_buf.clone()
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
    expected = clocks.masked_fill(mask, 0)
    if not torch.equal(env.episode_length_buf, expected):
        yield (
            f"{name}: episode_length_buf: wanted {expected.tolist()}, got "
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
    """One environment, and three, show where axes are mixed up. Skipped where the constructor needs
    arguments that are not known here.
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
            reset_env(other, seed)
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
    name = type(env).__name__
    num_envs = env.num_envs + 2
    env.checked_initial_state(CounterRandom(seed, num_envs, env.device))
    rng = CounterRandom(seed, env.num_envs, env.device)
    state = env.initial_state(rng)
    draw = _action_source(env, seed)
    for _ in range(min(steps, REPLAYED)):
        action = draw()
        inputs = {**state, "action": action}
        inputs_before = {key: value.clone() for key, value in inputs.items()}
        next_state, _, _ = env.transition(state, action, rng)
        next_before = {key: value.clone() for key, value in next_state.items()}
        env.observe(next_state)
        observed = {key: value.clone() for key, value in next_state.items()}
        env.metrics(next_state)
        for call, before, after in (
            ("transition", inputs_before, inputs),
            ("observe", next_before, observed),
            ("metrics", observed, next_state),
        ):
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
    few = 3
    many = 8
    few_rng, many_rng = (CounterRandom(seed, count, env.device) for count in (few, many))
    few_state = env.initial_state(few_rng)
    many_state = env.initial_state(many_rng)
    space = copy.deepcopy(env.single_action_space)
    space.seed(seed)
    for _ in range(min(steps, REPLAYED)):
        action = torch.stack(
            [torch.as_tensor(space.sample(), device=env.device) for _ in range(many)]
        )
        for key, value in few_state.items():
            first = many_state[key][:few].double()
            if not torch.allclose(value.double(), first, rtol=1e-4, atol=1e-5, equal_nan=True):
                yield (
                    f"{type(env).__name__}: {key}: wanted the same environments whatever their "
                    f"number, got others with {few} and {many}"
                )
                return
        few_state = env.transition(few_state, action[:few], few_rng)[0]
        many_state = env.transition(many_state, action, many_rng)[0]
        few_rng.advance()
        many_rng.advance()


def _check_host_syncs(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """Reset and step with tensors that have no values: whatever makes the host read one raises."""
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
        place = raised_at(error, type(env))
        yield (
            f"{type(env).__name__}: wanted a step in which the host looks at no tensor, as "
            f"graph_safe says, got {operation} ({place})"
        )


def _action_source(env: VecEnv, seed: int) -> Callable[[], Tensor]:
    """Random actions [N, *action] of the space."""
    space = copy.deepcopy(env.action_space)
    space.seed(seed)
    return lambda: torch.as_tensor(space.sample(), device=env.device)


def _tensors(timestep: Timestep) -> dict[str, Tensor]:
    """All tensors of a step by their keys, also those of info that the contract does not know."""
    values = step_values(timestep)
    for key, value in timestep.info.items():
        if isinstance(value, dict):
            values |= {f"info[{key!r}][{name!r}]": inner for name, inner in value.items()}
        else:
            values[f"info[{key!r}]"] = value
    return {key: value for key, value in values.items() if isinstance(value, Tensor)}


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
