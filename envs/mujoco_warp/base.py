"""Base of MuJoCo tasks on mujoco-warp: a task is a model file and three pure functions of MuJoCo's
fields; everything else is here.

    class Reach(MujocoWarpEnv):
        model_file = "arm.xml"
        frame_skip = 2
        max_episode_steps = 200

        def observe(self, data): return torch.cat((data.qpos, data.qvel), 1)
        def reward(self, data, before, action): return -data.site_xpos[:, 0].norm(dim=1)
        def terminated(self, data): return data.qvel.abs().amax(1) > 50.0

Physics runs in a Warp graph on torch's current stream. A reset is a selection, so no shape depends
on the data; on a CPU it is skipped if no world restarts. For `graph_safe` steps the Warp graph
would have to be recorded into torch's capture by `warp.capture_begin(external=True)`, and the
counts of dropped constraints be read outside of it.
"""

import importlib.util
import inspect
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, get_origin

import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import ArrayLike
from torch import Tensor

from gpurl.envs._counting_env import CountingEnv, select, widen
from gpurl.envs.mujoco_warp._simulation import (
    CARRIED,
    KINEMATIC,
    DroppedConstraints,
    Fields,
    Model,
    Simulation,
    load_model,
    load_simulators,
)
from gpurl.envs.registry import check_options
from gpurl.envs.vec_env import (
    Info,
    Options,
    TensorSpec,
    Timestep,
    check_at_least_one,
    check_tensor,
)
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.random import CounterRandom

# limit of qpos and qvel: mjMAXVAL, beyond which MuJoCo on a CPU resets the state
LARGEST = 1e10
STATE = ("qpos", "qvel", "act", "time", "qacc_warmstart", "ctrl")  # inputs of a step
# zero at rest; the next step computes the other forces from them
FORCES = ("cfrc_ext", "qfrc_actuator", "qfrc_constraint")
# fields that no step changes
INPUTS = (
    "qfrc_applied",
    "xfrc_applied",
    "eq_active",
    "mocap_pos",
    "mocap_quat",
    "userdata",
)


class Before(Fields):
    """Copies of the fields before the step, of those that `reward` reads."""

    def __init__(self, fields: Fields, names: Iterable[str]) -> None:
        self.__dict__.update({name: getattr(fields, name).clone() for name in names})

    def __getattr__(self, name: str) -> Tensor:
        known = ", ".join(vars(self)) or "nothing"
        raise EnvError(
            f"reward read before.{name}, but read {known} in its first call: it must read the same "
            f"fields in every call"
        )


class _RecordedFields(Fields):
    """Fields that record which of them were read."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._names = set[str]()

    def __getattr__(self, name: str) -> Tensor:
        value = getattr(self._fields, name)
        self._names.add(name)
        return value


class MujocoWarpEnv(CountingEnv):
    """A subclass sets `model_file` and defines `observe`, `reward` and `terminated`, which never
    change their arguments.

    Annotated class attributes with a value are options: `push_cost: float = 0.1` makes
    `--env.push-cost 0.2`, `MyTask(4096, push_cost=0.2)` and `self.push_cost`.

    model_file: a path, also relative to the task's file, the name of one of Gymnasium's models, or
    XML text. `data` holds MuJoCo's fields by their names in mjData, [N, ...] float32: data.qpos,
    data.xpos, data.cfrc_ext, data.sensordata, ... The action goes to data.ctrl; its space is the
    actuators' ctrlrange. After a reset the positions and velocities of bodies, sites and geoms are
    those of the new state, and forces are zero. If a task uses any other field (sensordata, qacc,
    ...), mj_forward computes all fields of the new state, as in Gymnasium; this costs about a step
    of physics when episodes end, on a GPU in each step.

    A world whose state, reward or observation is not finite ends (terminated), with a reward and
    final_obs of zeros, and restarts. Its last step is no transition: info["valid"] is False there.
    info["log"] counts such worlds, and those in which MuJoCo dropped contacts or constraints
    because they did not fit into njmax constraints and nconmax contacts per world.
    """

    model_file: ClassVar[str]
    reset_noise_scale = 0.0
    normal_velocity_noise = False  # uniform like that of the positions, or normal
    # options of all tasks
    xml_file: str | None = None  # replaces model_file
    frame_skip: int = 1  # steps of physics in a step of the environment
    max_episode_steps: int | None = None
    cone: str | None = None  # "pyramidal" or "elliptic" friction; None: that of the model
    graph: bool = True  # whether physics is captured in a graph
    # room for constraints in a world: about twice what random actions need; None: MuJoCo's guess
    njmax: int | None = None
    # room for contacts per world, shared by all worlds; pairs of near geoms need it too
    nconmax: int | None = None

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """options: values for `declared_options`; None: the default of the task."""
        # options
        check_options(type(self).__name__, type(self), options)
        for name, value in options.items():
            if value is not None:
                setattr(self, name, value)
        check_at_least_one(
            frame_skip=self.frame_skip,
            max_episode_steps=self.max_episode_steps,
            njmax=self.njmax,
            nconmax=self.nconmax,
        )
        # the model, and what the task needs of it
        self.device = torch.device(device)
        simulators = load_simulators()
        model_file = self.xml_file or self.model_file
        self.model = load_model(simulators, type(self), model_file, self.cone)
        self.dt = float(self.model.opt.timestep) * self.frame_skip  # seconds in a step
        self.initial_qpos = self.constant(self.model.qpos0)
        on_device = Model(simulators, self.model, self.device)
        self.single_action_space = self._action_space()
        self._fields_before, self._fields_used = self._try_functions(
            Fields(simulators, on_device.worlds(1, self.njmax, self.nconmax))
        )
        super().__init__(num_envs, device)
        # the worlds; a task that reads derived fields needs all of mj_forward
        derived = {*self._fields_used} - {*STATE, *FORCES, *INPUTS, *CARRIED}
        self._simulation = Simulation(
            on_device,
            self.num_envs,
            self.frame_skip,
            self.njmax,
            self.nconmax,
            self.graph,
            forward_all=not KINEMATIC.issuperset(derived),
        )
        self.data = self._simulation.fields
        self._fields_of_forward = self._find_fields_of_forward()
        self._dropped = DroppedConstraints(self, self._simulation)
        self._random = CounterRandom(seed, self.num_envs, self.device)
        self._has_started = False

    @classmethod
    def declared_options(cls) -> dict[str, inspect.Parameter]:
        """The class attributes with an annotation and a value, of the task and of its bases."""
        options = {}
        for base in reversed(cls.__mro__):
            if not issubclass(base, MujocoWarpEnv):
                continue
            for name, kind in inspect.get_annotations(base, eval_str=True).items():
                if hasattr(cls, name) and get_origin(kind) is not ClassVar:
                    options[name] = inspect.Parameter(
                        name,
                        inspect.Parameter.KEYWORD_ONLY,
                        default=getattr(cls, name),
                        annotation=kind,
                    )
        return options

    @classmethod
    def missing(cls) -> str:
        packages = ("mujoco", "mujoco_warp", "warp")
        lacking = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacking)}; pip install 'gpurl[mujoco]'" if lacking else ""

    @abstractmethod
    def observe(self, data: Fields) -> Tensor:
        """[N, D] float32 observations."""

    @abstractmethod
    def reward(self, data: Fields, before: Fields, action: Tensor) -> Tensor:
        """[N] float32 reward of `action` [N, A], which led from the fields `before` to `data`. Each
        step copies the fields that it reads of `before`.
        """

    def terminated(self, data: Fields) -> Tensor:
        """[N] bool: the task ended. By default only the time limit ends an episode."""
        return torch.zeros_like(data.time, dtype=torch.bool)

    def initial_state(self, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        """(qpos [n, nq], qvel [n, nv]) of the first states of n = `rng.num_envs` episodes: by
        default those of the model, with noise.
        """
        scale = self.reset_noise_scale
        qpos = self.initial_qpos + rng.uniform(-scale, scale, (self.model.nq,))
        if self.normal_velocity_noise:
            return qpos, scale * rng.normal((self.model.nv,))
        return qpos, rng.uniform(-scale, scale, (self.model.nv,))

    def constant(self, values: ArrayLike) -> Tensor:
        """`values` as float32 on the device. It costs a copy, so cache the result, for example by
        `functools.cached_property`.
        """
        return torch.as_tensor(np.asarray(values), dtype=torch.float32, device=self.device)

    def body(self, name: str) -> int:
        """The number of a body: data.xpos[:, self.body("torso")]."""
        return int(self.model.body(name).id)

    # ---- the contract ----

    def reset(
        self, *, seed: int | None = None, options: Options | None = None
    ) -> tuple[Tensor, Info]:
        self._reseed(self._random, seed)
        # all worlds, or those in the mask
        mask = (options or {}).get("reset_mask") if self._has_started else None
        restarts_any = None
        if mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        else:
            mask = torch.as_tensor(mask, dtype=torch.bool, device=self.device)
            restarts_any = mask.any()
        self._start()
        self._restart(mask)
        self._random.advance(restarts_any)
        return self._observe(), {}

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if not self._has_started:
            raise UsageError(f"{type(self).__name__}.step: reset() comes before the first step")
        data = self.data
        action = self._checked_action(actions)
        may_read = host_sync_is_free(self.device)
        # physics
        before = Before(data, self._fields_before)
        data.ctrl.copy_(action)
        self._dropped.begin()
        self._simulation.step()
        reward = self.reward(data, before, action)
        terminated = self.terminated(data)
        final_obs = self._observe()
        # worlds that are not finite end
        state = torch.cat((data.qpos, data.qvel), 1)
        # times 0: 0, or NaN of what is not finite
        valid = (state.abs().amax(1) < LARGEST) & ((final_obs.sum(1) + reward) * 0.0 == 0.0)
        reward = torch.where(valid, reward, 0.0)
        terminated = terminated | ~valid
        final_obs = torch.where(valid.unsqueeze(1), final_obs, 0.0)
        # time limit and statistics
        self._count(reward, valid)
        truncated = self._time_limit(terminated)
        done = terminated | truncated
        info = self._episode_info(done, truncated)
        info |= {"final_obs": final_obs, "valid": valid}
        info["log"] = {
            "non_finite_worlds": (~valid).sum(),
            "worlds_lacking_room": self._dropped.count(may_read),
        }
        # autoreset
        obs = final_obs
        if not may_read or bool(done.any()):
            self._restart(done)
            obs = self._observe()
        self._random.advance()
        return Timestep(obs, reward, terminated, truncated, info)

    def state_dict(self) -> Info:
        """Continues bit for bit on a CPU; on a GPU forces are summed in any order."""
        names = self._saved_fields() if self._has_started else []
        fields = {name: getattr(self.data, name) for name in names}
        return {"fields": fields, "clocks": self._clocks(), "random": self._random.state_dict()}

    def load_state_dict(self, state: Info) -> None:
        self._random.load_state_dict(state["random"])
        self._load_clocks(state["clocks"])
        if not state["fields"]:
            return
        self._start()
        for name in self._saved_fields():
            getattr(self.data, name).copy_(state["fields"][name])

    def close_extras(self, **kwargs: object) -> None:
        self._dropped.close()

    # ---- parts of the contract ----

    def _action_space(self) -> Box:
        model = self.model
        if model.nu == 0:
            raise UsageError(
                f"the model of {type(self).__name__} has no actuators, so there are no actions"
            )
        is_limited = model.actuator_ctrllimited.astype(bool)
        low = np.where(is_limited, model.actuator_ctrlrange[:, 0], -np.inf)
        high = np.where(is_limited, model.actuator_ctrlrange[:, 1], np.inf)
        return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def _try_functions(self, fields: Fields) -> tuple[list[str], list[str]]:
        """Calls the three functions on one world in its initial state; returns (the fields of
        `before` that reward reads, all fields that are read).

        EnvError if they return something wrong. Sets the observation space if the task does not.
        """
        name = type(self).__name__
        before = _RecordedFields(fields)
        action = torch.zeros(1, self.model.nu, device=self.device)
        obs = self.observe(fields)
        if getattr(self, "single_observation_space", None) is None:
            if not isinstance(obs, Tensor) or obs.dim() != 2:
                raise EnvError(
                    f"{name}.observe: wanted a tensor of shape (1, D), got "
                    f"{getattr(obs, 'shape', obs)!r}"
                )
            self.single_observation_space = Box(-np.inf, np.inf, (obs.shape[1],), np.float32)
        # shapes and dtypes of the results
        width = self.single_observation_space.shape or ()
        results = {
            "observe": (obs, TensorSpec((1, *width), torch.float32)),
            "reward": (self.reward(fields, before, action), TensorSpec((1,), torch.float32)),
            "terminated": (self.terminated(fields), TensorSpec((1,), torch.bool)),
        }
        for function, (value, spec) in results.items():
            check_tensor(f"{name}.{function}", value, spec, self.device)
        return sorted(before._names), fields.used()

    def _start(self) -> None:
        if not self._simulation.is_ready:
            self._simulation.prepare()
            self._dropped.peak.zero_()
        self._has_started = True

    def _observe(self) -> Tensor:
        """The observations in new memory: the next step would overwrite a view of a field."""
        obs = self.observe(self.data)
        is_field = any(obs is field for field in vars(self.data).values())
        return obs.clone() if is_field or obs._is_view() or not obs.is_contiguous() else obs

    def _restart(self, mask: Tensor) -> None:
        """Set first states where mask [N]; the other worlds do not change, bit for bit."""
        name = type(self).__name__
        data = self.data
        # positions and velocities of new episodes
        qpos, qvel = self.initial_state(self._random)
        for key, value, width in (("qpos", qpos, self.model.nq), ("qvel", qvel, self.model.nv)):
            spec = TensorSpec((self.num_envs, width), torch.float32)
            check_tensor(f"{name}.initial_state: {key}", value, spec, self.device)
            field = getattr(data, key)
            field.copy_(select(mask, value, field))
        # fields that would carry over from the old episode
        for cleared in (*STATE[2:], *FORCES):
            field = getattr(data, cleared)
            if field.numel():
                field.masked_fill_(widen(mask, field), 0.0)
        for carried, at_rest in self._simulation.carried.items():
            if carried not in (*STATE, *INPUTS):
                field = getattr(data, carried)
                field.copy_(select(mask, at_rest, field))
        # fields that depend on the new states. With RK4 the positions of bodies are those of the
        # last stage, not of qpos, so in the other worlds they must not be updated
        kept = {field: getattr(data, field).clone() for field in self._fields_of_forward}
        if kept:
            self._simulation.forward()
        for field_name, value in kept.items():
            field = getattr(data, field_name)
            field.copy_(select(mask, field, value))
        self._restart_clocks(mask)

    def _find_fields_of_forward(self) -> list[str]:
        """Fields that `Simulation.forward` writes and the task or the next step reads."""
        simulation = self._simulation
        names = {*self._fields_used, *simulation.carried}
        names = names - {*STATE, *INPUTS} if simulation.forward_all else names & KINEMATIC
        fields = {name: getattr(self.data, name) for name in sorted(names)}
        # per world: nacon is one number for all worlds
        return [
            name for name, field in fields.items() if field.numel() and len(field) == self.num_envs
        ]

    def _saved_fields(self) -> list[str]:
        """Fields that the next step starts from or that the task reads, except empty ones."""
        names = sorted({*STATE, *self._simulation.carried, *self._fields_used})
        return [name for name in names if getattr(self.data, name).numel()]
