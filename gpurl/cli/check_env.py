"""Tries an environment out and reports where it breaks the contract of `gpurl.envs.vec_env`: the
first thing to run on a task of your own.
"""

import copy
import difflib
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from gpurl.envs.names import name_problems
from gpurl.envs.registry import construction_problem, env_options, make_env
from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import (
    TensorSpec,
    Timestep,
    VecEnv,
    attribute_problems,
    step_values,
    tensor_problem,
)
from gpurl.errors import EnvError, UsageError, first_line, raised_at
from gpurl.guards.contract import EnvGuard, check_reset, check_step, reset_env, step_env
from gpurl.guards.space import limits
from gpurl.kernels.backend import no_host_syncs
from gpurl.kernels.random import CounterRandom
from gpurl.run.display import counted
from gpurl.run.evaluator import MAX_STEPS

NUM_ENVS = 8  # of an environment given by name
REPLAYED = 16  # steps that are played twice
PLAYED = 1000  # steps after which an episode has probably ended, if there is a time limit
PLAYED_SECONDS = 3.0  # of those that are played for an end, at most
KEPT = 64  # steps whose tensors later ones must leave alone
# causes that several checks see
REPEATABLE = "repeatable"
SPACE = "space"
FINITE = "finite"
SOURCE = "; random numbers come from rng or the seed of reset, and nothing else may differ"


class Finding(NamedTuple):
    """What one check has found; findings of the same cause are one problem."""

    text: str
    cause: str
    check: "Check"
    stops: bool = False  # an error, after which later checks cannot be trusted


Check = Callable[[VecEnv, int, int], Iterator[str | tuple[str, str]]]


def check_env(env: VecEnv | str, steps: int = 64, seed: int = 0) -> list[str]:
    """All problems of `env`, each with what was wanted and what was got; empty when it keeps the
    contract. One mistake is one problem: the checks that fail for the same reason are counted.
    steps: at least; more, up to the time limit, where that takes seconds.

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
    findings = list(_run(_check_attributes, env, steps, seed))
    if findings:
        return _each_once(findings)  # nothing further can be trusted
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
        if isinstance(env, TorchEnv):
            checks.append(_check_device)
    for check in checks:
        findings += _run(check, env, steps, seed)
    return _each_once(findings)


def _each_once(findings: list[Finding]) -> list[str]:
    """The problems: findings of the same cause are one, and so is all that follows a reset or a
    step that fails, with the number of the later checks.
    """
    texts: dict[str, str] = {}
    later: dict[str, set[Check]] = {}
    root = ""  # the cause that stops all others
    for finding in findings:
        cause = root or finding.cause
        # torch.rand is neither repeatable nor, without a device, on the right one
        if finding.check is _check_device and REPEATABLE in texts:
            cause = REPEATABLE
        if cause not in texts:
            texts[cause] = finding.text
            later[cause] = {finding.check}
            if finding.stops and finding.check in (_check_reset, _check_steps):
                root = cause
        later[cause].add(finding.check)
    problems = []
    for cause, text in texts.items():
        count = len(later[cause]) - 1
        fail = "fails" if count == 1 else "fail"
        note = f"; and {counted(count, 'later check')} {fail}, probably for the same reason"
        problems.append(text + note if count else text)
    return problems


def advice(env: VecEnv, steps: int = 64) -> list[str]:
    """What keeps the contract and still makes trouble in a training, or was not seen in `steps`;
    `env` is played.
    """
    return [*_image_note(env), *_misspelt_names(env), *_ends_note(env, steps)]


def _image_note(env: VecEnv) -> Iterator[str]:
    space = env.single_observation_space
    shape = space.shape or ()
    is_read_as_image = space.dtype == np.uint8 and env.num_agents == 1
    if len(shape) - (env.num_agents > 1) == 3 and not is_read_as_image:
        yield (
            f"observations of shape {shape} look like images; they are flattened into rows of "
            f"{math.prod(shape):,} numbers: convolutions read uint8 ones, of one agent "
            f"(docs/algorithms.md)"
        )


def _misspelt_names(env: VecEnv) -> Iterator[str]:
    """Names of the task's class that nothing reads, and that resemble one that is read."""
    kind = type(env)
    bases = [base for base in kind.__mro__ if base.__module__.startswith("gpurl.")]
    if kind in bases:
        return
    base = bases[0]
    known = [name for name in dir(base) if not name.startswith("_")]
    own = {name for one in kind.__mro__ if one not in base.__mro__ for name in vars(one)}
    unused = [name for name in known if name not in own]
    for name in sorted(own):
        near = difflib.get_close_matches(name, unused, n=1, cutoff=0.85)
        if near and not hasattr(base, name) and not name.startswith("_"):
            yield f"{kind.__name__}.{name} is not a name that gpurl reads; is it {near[0]}?"


def _ends_note(env: VecEnv, steps: int) -> Iterator[str]:
    """Of an environment in which random actions reach no time limit, or no end at all."""
    limit = env.max_episode_steps
    draw = _action_source(env, 0)
    env.reset(seed=0)
    ended = torch.zeros(env.num_envs, dtype=torch.bool, device=env.device)
    played = 0
    for _ in _steps_to_play(env, steps):
        timestep = env.step(draw())
        played += 1
        ended |= timestep.terminated
        if timestep.truncated.any() or (limit is not None and ended.any()):
            return
    if limit is not None:
        yield (
            f"no episode ended in {played:,} steps of random actions, so ends are unchecked: "
            f"--steps {limit + 1}"
        )
        return
    yield (
        f"no time limit: max_episode_steps is None, and in {played:,} steps of random actions "
        f"episodes ended in {int(ended.sum())} of {env.num_envs} environments. An evaluation waits "
        f"for the ends, at most {MAX_STEPS:,} steps; set max_episode_steps"
    )


def _steps_to_play(env: VecEnv, steps: int) -> Iterator[int]:
    """`steps`, then past the time limit, where mistakes of a restart show, if that is quick."""
    yield from range(steps)
    limit = PLAYED if env.max_episode_steps is None else env.max_episode_steps + 1
    began = time.monotonic()
    for step in range(steps, min(limit, PLAYED)):
        if time.monotonic() - began > PLAYED_SECONDS:
            return
        yield step


def _run(check: Check, env: VecEnv, steps: int, seed: int) -> Iterator[Finding]:
    """The findings of one check; an exception inside the environment ends it, as the last one."""
    try:
        for found in check(env, steps, seed):
            text, cause = found if isinstance(found, tuple) else (found, _form_of(found))
            yield Finding(text, cause, check)
    except EnvError as error:
        yield Finding(str(error), _form_of(str(error)), check, stops=True)
    except Exception as error:
        doing = (check.__doc__ or "").partition(":")[0]
        text = (
            f"{type(env).__name__} raised {type(error).__name__}: {error} "
            f"({raised_at(error, type(env))}) in the check of {doing}"
        )
        yield Finding(text, _form_of(text), check, stops=True)


def _form_of(problem: str) -> str:
    """`problem` without what differs where another check sees the same: the number of environments,
    the method, the line.
    """
    cause = re.sub(r"^with num_envs=\d+: |^.*, got (?=\w+Error: )", "", problem)
    cause = re.sub(r"^[\w.]+ raised ", "", cause)
    cause = re.sub(r" \(\S+:\d+: .*$", "", cause, flags=re.DOTALL)
    return re.sub(r"\d+", "#", cause)


def _check_attributes(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """the attributes: what `VecEnv.__init__` sets, which checks the spaces."""
    name = type(env).__name__
    if problem := construction_problem(env):
        yield problem
        return
    yield from attribute_problems(env)
    yield from name_problems(env)
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


def _check_reset(env: VecEnv, steps: int, seed: int) -> Iterator[str | tuple[str, str]]:
    """reset: the form, the values, and the same for the same seed."""
    name = f"{type(env).__name__}.reset"
    obs = reset_env(env, seed)
    yield from _value_problems(env, name, {"obs": obs})
    if env.episode_length_buf.any():
        yield (
            f"{name}: episode_length_buf: wanted zeros after a reset, got "
            f"{env.episode_length_buf.tolist()}"
        )
    if not _same(reset_env(env, seed), obs):
        yield (
            f"{name}: obs: wanted the same first observations for the same seed, got "
            f"others{SOURCE}",
            REPEATABLE,
        )


def _check_steps(env: VecEnv, steps: int, seed: int) -> Iterator[str | tuple[str, str]]:
    """steps: random actions, until the first step that is wrong."""
    draw = _action_source(env, seed)
    guard = EnvGuard(env)
    obs = reset_env(env, seed)
    # everything that was returned, and copies of it
    returned = {"reset: obs": obs}
    copies = {"reset: obs": obs.clone()}
    # [n, *obs] each: where episodes begin, and where those before them ended
    firsts, lasts = [obs.clone()], [obs[:0]]
    for step in _steps_to_play(env, steps):
        action = draw()
        before = action.clone()
        clocks = env.episode_length_buf.clone()
        timestep = step_env(env, action)
        guard.check(timestep)
        problems = list(_step_problems(env, timestep, clocks))
        if not torch.equal(action, before):
            problems.append(
                f"{type(env).__name__}.step: actions: wanted them left as they were, got them "
                f"changed"
            )
        changed = []
        if step < steps:
            changed = [key for key, earlier in returned.items() if not _same(earlier, copies[key])]
        if changed:
            problems.append(
                f"{type(env).__name__}.step: wanted earlier returned tensors left alone, got "
                f"{' and '.join(changed)} changed by a later step; return clones"
            )
        if problems:
            yield from problems
            return
        if step < KEPT:
            tensors = {f"step {step}: {key}": each for key, each in _tensors(timestep).items()}
            returned |= tensors
            copies |= {key: each.clone() for key, each in tensors.items()}
        if not (guard.has_valid or env.resets_late):
            done = timestep.terminated | timestep.truncated
            firsts.append(timestep.obs[done])
            lasts.append(timestep.info["final_obs"][done])
    yield from _final_obs_problem(env, torch.cat(firsts), torch.cat(lasts))


def _final_obs_problem(env: VecEnv, firsts: Tensor, lasts: Tensor) -> Iterator[str]:
    """final_obs taken after the restart; firsts, lasts: [n, *obs] observations with which episodes
    began and ended, as the environment shows them.
    """
    # an episode that ends as the next one begins is no accident where all begin at random
    is_random = bool((firsts != firsts[0]).any())
    if is_random and len(lasts) >= env.num_envs and torch.equal(firsts[env.num_envs :], lasts):
        yield (
            f"{type(env).__name__}.step: info['final_obs']: wanted the last observation of the "
            f"episode where one ended, got obs, the first of the next one, at all {len(lasts)} "
            f"ends; take it before the restart"
        )


def _step_problems(
    env: VecEnv, timestep: Timestep, clocks: Tensor
) -> Iterator[str | tuple[str, str]]:
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
    # a MuJoCo task ends worlds that are not finite
    log = info.get("log", {})
    if "non_finite_worlds" in log and (count := int(log["non_finite_worlds"])):
        yield (
            f"{name}: wanted finite states, rewards and observations, got NaN or infinity in "
            f"{count} of {env.num_envs} worlds, whose episodes end there",
            FINITE,
        )
        return
    # clocks and statistics of episodes
    valid = info.get("valid", torch.ones_like(done))
    expected = (clocks + valid).masked_fill(done, 0)
    if not torch.equal(env.episode_length_buf, expected):
        wrong = env.episode_length_buf != expected
        got = f"{env.episode_length_buf[wrong].tolist()} in environments {_where(wrong)}"
        yield (
            f"{name}: episode_length_buf: wanted one more a step and 0 after an end, where the "
            f"next episode begins at once, got {got}"
        )
        return
    empty = info["_episode"].bool() & (info["episode"]["l"] < 1)
    if empty.any():
        yield (
            f"{name}: info['episode']['l']: wanted at least 1 step in an episode that ended, got 0 "
            f"in environments {_where(empty)}"
        )


def _value_problems(env: VecEnv, name: str, values: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Numbers that are not finite, and observations outside their space."""
    space = env.single_observation_space
    assert isinstance(space, Box)
    low, high = limits(space, env.device)
    for key, value in values.items():
        rows = ~torch.isfinite(value).reshape(env.num_envs, -1).all(1)
        if rows.any():
            yield (
                f"{name}: {key}: wanted finite numbers, got NaN or infinity in environments "
                f"{_where(rows)}",
                FINITE,
            )
        elif "obs" in key:
            outside = ((value < low) | (value > high)).reshape(env.num_envs, -1).any(1)
            if outside.any():
                worst = value[outside][0].tolist()
                yield (
                    f"{name}: {key}: wanted it inside {space}, got {worst} in environments "
                    f"{_where(outside)}; widen the space, to np.inf where there is no limit",
                    SPACE,
                )


def _check_replay(env: VecEnv, steps: int, seed: int) -> Iterator[tuple[str, str]]:
    """repeatability: the same seed and the same actions, twice."""
    runs = []
    for _ in range(2):
        draw = _action_source(env, seed + 1)
        env.reset(seed=seed)
        runs.append([_tensors(env.step(draw())) for _ in range(min(steps, REPLAYED))])
    yield from _differences(
        f"{type(env).__name__}.step: {{key}}: wanted the same values for the same seed and "
        f"actions, got others{SOURCE}",
        *runs,
    )


def _check_reset_mask(env: VecEnv, steps: int, seed: int) -> Iterator[str | tuple[str, str]]:
    """a reset of some: environments outside the mask stay as they are."""
    name = f"{type(env).__name__}.reset(options={{'reset_mask': ...}})"
    draw = _action_source(env, seed)
    env.reset(seed=seed)
    for _ in range(3):
        obs = env.step(draw()).obs
    obs = obs.clone()
    clocks = env.episode_length_buf.clone()
    mask = torch.arange(env.num_envs, device=env.device) % 2 == 0
    options = {"reset_mask": mask}
    try:
        after, _ = env.reset(options=options)
    except TypeError as error:
        if "options" not in str(error):
            raise
        yield (
            f"{type(env).__name__}.reset: wanted reset(*, seed=None, options=None), which resets "
            f"the environments of options['reset_mask'], got TypeError: {error}"
        )
        return
    check_reset(env, after)
    yield from _value_problems(env, name, {"obs": after})
    if list(options) != ["reset_mask"]:
        yield f"{name}: options: wanted the dict left as it was, got the keys {list(options)}"
    if not _same(after[~mask], obs[~mask]):
        yield (
            f"{name}: obs: wanted the environments outside the mask left alone, got others in "
            f"{_where(~mask)}",
            REPEATABLE,
        )
        return
    expected = clocks.masked_fill(mask, 0)
    if not torch.equal(env.episode_length_buf, expected):
        yield (
            f"{name}: episode_length_buf: wanted {expected.tolist()}, got "
            f"{env.episode_length_buf.tolist()}"
        )


def _check_resume(env: VecEnv, steps: int, seed: int) -> Iterator[tuple[str, str]]:
    """state_dict and load_state_dict: what is saved continues exactly."""
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
    """other numbers of environments: one and three show where axes are mixed up. Skipped where
    the constructor needs arguments that are not known here.
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
    """The constructor's options that stand as attributes of the same name and differ from their
    defaults: one of MuJoCo that is given may choose another simulator.
    """
    options = env_options(type(env))
    return {
        name: getattr(env, name)
        for name, option in options.items()
        if name != "env" and hasattr(env, name) and getattr(env, name) is not option.default
    }


def _check_functions(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """the functions: those of a TorchEnv change nothing that they are given."""
    assert isinstance(env, TorchEnv)
    name = type(env).__name__
    rng = CounterRandom(seed, env.num_envs, env.device)
    state = env.checked_initial_state(rng)
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
        rng.advance()
        state = next_state


def _check_batch_independence(env: VecEnv, steps: int, seed: int) -> Iterator[tuple[str, str]]:
    """independence: the first environments of many do what as few alone do, up to the rounding of
    vector instructions.
    """
    assert isinstance(env, TorchEnv)
    few = 3
    many = 8
    few_rng, many_rng = (CounterRandom(seed, count, env.device) for count in (few, many))
    few_state = env.checked_initial_state(few_rng)
    many_state = env.checked_initial_state(many_rng)
    space = copy.deepcopy(env.single_action_space)
    space.seed(seed)
    for _ in range(min(steps, REPLAYED)):
        action = torch.stack(
            [torch.as_tensor(space.sample(), device=env.device) for _ in range(many)]
        )
        few_next, *few_values = env.transition(few_state, action[:few], few_rng)
        many_next, *many_values = env.transition(many_state, action, many_rng)
        for key, value in zip(("reward", "terminated"), few_values):
            if value.shape[:1] != (few,):
                yield (
                    f"{type(env).__name__}.transition: {key}: wanted {few} rows, as many as the "
                    f"state has, got {_form(value)}: what belongs to an episode stands in the "
                    f"state, also its clock; gpurl adds the time limit, max_episode_steps",
                    REPEATABLE,
                )
                return
        pairs = {key: (value, many_state[key]) for key, value in few_state.items()}
        pairs |= dict(zip(("reward", "terminated"), zip(few_values, many_values)))
        for key, (value, of_many) in pairs.items():
            first = of_many[:few].double()
            if not torch.allclose(value.double(), first, rtol=1e-4, atol=1e-5, equal_nan=True):
                yield (
                    f"{type(env).__name__}: {key}: wanted the same in an environment whatever "
                    f"their number, got others with {few} and {many}: does an operation mix "
                    f"environments, such as mean() without an axis?",
                    REPEATABLE,
                )
                return
        few_state = few_next
        many_state = many_next
        few_rng.advance()
        many_rng.advance()


def _check_host_syncs(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """host syncs: reset and step with tensors that have no values; whatever makes the host read
    one raises.
    """
    action = _action_source(env, seed)()
    env.reset(seed=seed)
    try:
        with no_host_syncs(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = _fake_copy(env, mode)
            fake.reset(
                options={
                    "reset_mask": torch.ones(env.num_envs, dtype=torch.bool, device=env.device)
                }
            )
            for _ in range(2):
                fake.step(mode.from_tensor(action))
    except EnvError as error:
        yield str(error)
    except Exception as error:
        operation = (
            str(getattr(error, "func", "")) or f"{type(error).__name__}: {first_line(error)}"
        )
        place = raised_at(error, type(env))
        yield (
            f"{type(env).__name__}: wanted a step in which the host looks at no tensor, as "
            f"graph_safe says, got {operation} ({place})"
        )


def _fake_copy(env: VecEnv, mode: FakeTensorMode) -> VecEnv:
    """A copy of `env` in the tensors of `mode`; EnvError if something in it cannot be copied."""
    try:
        with FakeCopyMode(mode):
            return copy.deepcopy(env)
    except Exception as error:
        raise EnvError(
            f"{type(env).__name__}: wanted an environment of tensors and plain values, as "
            f"graph_safe says, got one that cannot be copied ({type(error).__name__}: "
            f"{first_line(error)}); a torch.Generator cannot: graph_safe = False steps it outside "
            f"of graphs"
        ) from error


def _check_device(env: VecEnv, steps: int, seed: int) -> Iterator[str]:
    """the device: on torch's device without memory, a tensor that is made elsewhere shows, as it
    would on a GPU.
    """
    options = _options_of(env)
    try:
        other = type(env)(num_envs=env.num_envs, device="meta", **options)
        other.reset()
        action = torch.as_tensor(_action_source(env, seed)()).to("meta")
        for _ in range(2):
            other.step(action)
    except (RuntimeError, EnvError) as error:
        # anything else is not of the device, and other checks see it
        if not re.search(
            r"on meta, got a tensor on|device meta|devices, meta|meta and", str(error)
        ):
            return
        yield (
            f"{type(env).__name__}: wanted every tensor on self.device, so that the task runs on a "
            f"GPU, got one on the CPU; torch.zeros(..., device=self.device) "
            f"({raised_at(error, type(env))})"
        )
    except Exception:
        return


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
) -> Iterator[tuple[str, str]]:
    """`message` for every key that differs, at the first step where one does."""
    for one, two in zip(first, second):
        keys = [key for key in one if key not in two or not _same(one[key], two[key])]
        if keys:
            yield message.format(key=", ".join(keys)), REPEATABLE
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
