"""Base of MuJoCo tasks: a task is a model file and three pure functions of MuJoCo's
fields; everything else is here.

    class Reach(MujocoEnv):
        model_file = "arm.xml"
        frame_skip = 2
        max_episode_steps = 200

        def observe(self, data): return torch.cat((data.qpos, data.qvel), 1)
        def reward(self, data, before, action): return -data.site_xpos[:, 0].norm(dim=1)
        def terminated(self, data): return data.qvel.abs().amax(1) > 50.0

On a CPU MuJoCo's own C steps the worlds, on a GPU mujoco-warp in a Warp graph on torch's current
stream. A reset is a selection, so no shape depends on the data; on a CPU it is skipped if no world
restarts. For `graph_safe` steps the Warp graph would have to be recorded into torch's capture by
`warp.capture_begin(external=True)`, and the counts of dropped constraints be read outside of it.
"""

import importlib.util
import inspect
import logging
from abc import abstractmethod
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, get_origin

import numpy as np
import torch
from gymnasium.spaces import Box
from numpy.typing import ArrayLike
from torch import Tensor

from gpurl.envs._counting_env import CountingEnv, check_functions, select
from gpurl.envs.mujoco._c_worlds import CSimulator, obstacle
from gpurl.envs.mujoco._model import load_model, load_mujoco
from gpurl.envs.mujoco._names import action_names, observation_names
from gpurl.envs.mujoco._pictures import Camera, Pictures, copy_state
from gpurl.envs.mujoco._warp_worlds import WarpSimulator
from gpurl.envs.mujoco._worlds import Fields, FieldsBefore, RecordedFields, Simulator
from gpurl.envs.registry import check_options
from gpurl.envs.vec_env import (
    Info,
    Options,
    Seed,
    TensorSpec,
    Timestep,
    check_at_least_one,
    check_tensor,
    describe,
)
from gpurl.errors import EnvError, UsageError, install_extra
from gpurl.kernels import c_library
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.random import CounterRandom

log = logging.getLogger("gpurl")
# limit of qpos and qvel: mjMAXVAL, beyond which MuJoCo on a CPU resets the state
LARGEST = 1e10
SIMULATORS = ("auto", "mujoco", "warp")
WARPS_OPTIONS = ("graph", "njmax", "nconmax")
FUNCTIONS = ("observe(data)", "reward(data, before, action)")
OPTIONAL_FUNCTIONS = ("terminated(data)", "metrics(data)", "initial_state(rng)")


class MujocoEnv(CountingEnv):
    """A subclass sets `model_file` and defines `observe`, `reward` and `terminated`, which never
    change their arguments.

    Annotated class attributes with a value are options: `push_cost: float = 0.1` makes
    `--env.push-cost 0.2`, `MyTask(4096, push_cost=0.2)` and `self.push_cost`.

    model_file: a path, also relative to the task's file, the name of one of Gymnasium's models, or
    XML text. `data` holds MuJoCo's fields by their names in mjData, [N, ...] float32: data.qpos,
    data.xpos, data.cfrc_ext, data.sensordata, ... The action goes to data.ctrl; its space is the
    actuators' ctrlrange. After a reset the positions and velocities of bodies, sites and geoms are
    those of the new state, and cfrc_ext is zero. If a task uses any other field (sensordata, qacc,
    qfrc_actuator, ...), mj_forward computes all fields of the new state, as in Gymnasium; with
    mujoco-warp this costs about a step of physics when episodes end, on a GPU in each step.

    A world whose state, reward or observation is not finite ends (terminated), with a reward and
    final_obs of zeros, and restarts. Its last step is no transition: info["valid"] is False there.
    info["log"] counts such worlds, and those in which MuJoCo dropped contacts or constraints
    because they did not fit into njmax constraints and nconmax contacts per world.
    """

    takes_share_seeds = True
    model_file: ClassVar[str]
    # of videos: one of the model by name, or of its own; None: "track" of the model, else as
    # MuJoCo's viewer begins
    camera: ClassVar[Camera | str | None] = None
    reset_noise_scale = 0.0
    normal_velocity_noise = False  # uniform like that of the positions, or normal
    # options of all tasks
    xml_file: str | None = None  # replaces model_file
    frame_skip: int = 1  # steps of physics in a step of the environment
    max_episode_steps: int | None = None  # steps to the time limit
    cone: str | None = None  # "pyramidal" or "elliptic" friction; None: that of the model
    # "mujoco": its own C on a CPU; "warp": mujoco-warp; "auto": mujoco on a CPU, warp on a GPU or
    # where an option of warp is given
    simulator: str = "auto"
    graph: bool = True  # of warp: whether physics is captured in a graph
    # of warp: room for constraints in a world, about twice what random actions need; None: MuJoCo's
    # guess
    njmax: int | None = None
    # of warp: room for contacts per world, shared by all worlds; pairs of near geoms need it too
    nconmax: int | None = None

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        **options: Any,
    ) -> None:
        """options: values for `declared_options`; None: the default of the task."""
        check_functions(self, MujocoEnv, FUNCTIONS, OPTIONAL_FUNCTIONS)
        if getattr(type(self), "model_file", None) is None and options.get("xml_file") is None:
            raise EnvError(
                f"{type(self).__name__}: wanted a model_file, the path of an MJCF file or XML "
                f"text, got none"
            )
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
        if not self.reset_noise_scale >= 0:
            raise UsageError(f"reset_noise_scale must be at least 0, got {self.reset_noise_scale}")
        # the model, and what the task needs of it
        self.device = torch.device(device)
        mujoco = load_mujoco()
        model_file = self.xml_file or self.model_file
        self.model = load_model(mujoco, type(self), model_file, self.cone)
        self.dt = float(self.model.opt.timestep) * self.frame_skip  # seconds in a step
        self.initial_qpos = self.constant(self.model.qpos0)
        simulator = self._choose_simulator(mujoco, options)
        self.single_action_space = self._action_space()
        # for the trial of one world; `super` makes those of all
        self.training_progress = torch.ones((), device=self.device)
        self.episode_length_buf = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._fields_before, used = self._try_functions(simulator.worlds(1, ()).fields)
        super().__init__(num_envs, device)
        # the worlds
        self._worlds = simulator.worlds(self.num_envs, used)
        self.data = self._worlds.fields
        self._random = CounterRandom(seed, self.num_envs, self.device)
        self._has_started = False
        self._pictures: Pictures | None = None
        self._viewed: Any = None
        self.control_step = self.dt
        self.render_fps = 1 / self.dt

    @classmethod
    def declared_options(cls) -> dict[str, inspect.Parameter]:
        """The class attributes with an annotation and a value, of the task and of its bases."""
        options = {}
        for base in reversed(cls.__mro__):
            if not issubclass(base, MujocoEnv):
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
        packages = ["mujoco"]
        if torch.cuda.is_available():
            packages += ["mujoco_warp", "warp"]
        lacking = [name for name in packages if importlib.util.find_spec(name) is None]
        return f"{', '.join(lacking)}; {install_extra('mujoco')}" if lacking else ""

    @classmethod
    def is_quick_to_make(cls, options: Options) -> bool:
        """In C, which is the default on a CPU; mujoco-warp compiles kernels."""
        given = {name for name in WARPS_OPTIONS if options.get(name) is not None}
        is_warp = given or options.get("simulator", cls.simulator) == "warp"
        return not is_warp and c_library.load().functions is not None

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

    def metrics(self, data: Fields) -> dict[str, Tensor]:
        """Numbers [N] to log by name, as `TorchEnv.metrics`, of the fields that a step leads to."""
        return {}

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
        self, *, seed: Seed | None = None, options: Options | None = None
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
        before = FieldsBefore(data, self._fields_before)
        data.ctrl.copy_(action)
        self._worlds.step()
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
            "worlds_lacking_room": self._worlds.count_lacking_room(may_read),
            # copies: a restart overwrites the fields
            **self._log_of_metrics({key: x.clone() for key, x in self.metrics(data).items()}, info),
        }
        # autoreset
        obs = final_obs
        if not may_read or bool(done.any()):
            if self._watcher is not None:
                for index in done.nonzero().flatten().tolist():
                    self._watcher(index)
            self._restart(done)
            obs = self._observe()
        self._random.advance()
        return Timestep(obs, reward, terminated, truncated, info)

    def state_dict(self) -> Info:
        """Continues bit for bit on a CPU; on a GPU forces are summed in any order."""
        fields = self._worlds.state_dict() if self._has_started else {}
        return {"fields": fields, "clocks": self._clocks(), "random": self._random.state_dict()}

    def load_state_dict(self, state: Info) -> None:
        self._random.load_state_dict(state["random"])
        self._load_clocks(state["clocks"])
        if not state["fields"]:
            return
        self._start()
        self._worlds.load_state_dict(state["fields"])

    def picture(self, index: int, height: int, action: Tensor | None = None) -> np.ndarray:
        """By MuJoCo's renderer, through `camera`. UsageError if this machine has no renderer."""
        if self._pictures is None or self._pictures.height != height:
            self._close_pictures()
            name = type(self).__name__
            mujoco = load_mujoco()
            self._pictures = Pictures(name, mujoco, self.model, height, self.camera)
        return self._pictures.draw(self.data, index)

    def mujoco_data(self, index: int) -> Any:
        """World `index` as MuJoCo's own MjData of `self.model`, for a viewer; the next call writes
        into the same one.
        """
        mujoco = load_mujoco()
        if self._viewed is None:
            self._viewed = mujoco.MjData(self.model)
        copy_state(mujoco, self.model, self._viewed, self.data, index)
        return self._viewed

    def use_threads(self, count: int) -> None:
        self._worlds.threads = count

    def known_names(self) -> tuple[Sequence[str] | None, Sequence[str] | None]:
        observation = None
        if self.observation_names is None:
            observation = observation_names(self.model, self.data, self.observe)
        return observation, action_names(self.model)

    def close_extras(self, **kwargs: object) -> None:
        self._close_pictures()
        self._worlds.close()

    def _close_pictures(self) -> None:
        if self._pictures is not None:
            self._pictures.close()
            self._pictures = None

    # ---- parts of the contract ----

    def _choose_simulator(self, mujoco: ModuleType, options: dict[str, Any]) -> Simulator:
        """That of the option `simulator`; "auto" takes what suits the device and `options`."""
        name = type(self).__name__
        given = [option for option in WARPS_OPTIONS if options.get(option) is not None]
        if self.simulator not in SIMULATORS:
            raise UsageError(
                f"simulator must be one of {', '.join(SIMULATORS)}, got {self.simulator!r}"
            )
        if self.simulator == "mujoco" and given:
            raise UsageError(f"{given[0]} is an option of simulator warp; this is mujoco")
        # MuJoCo's C, where it can be had
        if self.simulator != "warp":
            why = obstacle(mujoco, self.model, self.device)
            if self.simulator == "mujoco" or not (why or given):
                return CSimulator(name, mujoco, self.model, self.device, self.frame_skip)
            if why and self.device.type == "cpu":
                log.info("%s is stepped by mujoco-warp, which is slower: %s", name, why)
        return WarpSimulator(
            name,
            mujoco,
            self.model,
            self.device,
            self.frame_skip,
            self.njmax,
            self.nconmax,
            self.graph,
        )

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
        # the worlds read fields too, as those of the task count only what it reads
        read, before = RecordedFields(fields), RecordedFields(fields)
        action = torch.zeros(1, self.model.nu, device=self.device)
        obs = self.observe(read)
        if getattr(self, "single_observation_space", None) is None:
            if not isinstance(obs, Tensor) or obs.dim() != 2:
                hint = ""
                if isinstance(obs, Tensor) and obs.dim() == 1:
                    hint = ": a field [N, k] keeps its axis as data.qpos[:, 0:1]"
                raise EnvError(
                    f"{name}.observe: wanted a tensor of shape (1, D) for one world, got "
                    f"{describe(obs)}{hint}"
                )
            self.single_observation_space = Box(-np.inf, np.inf, (obs.shape[1],), np.float32)
        # shapes and dtypes of the results
        width = self.single_observation_space.shape or ()
        results = {
            "observe": (obs, TensorSpec((1, *width), torch.float32)),
            "reward": (self.reward(read, before, action), TensorSpec((1,), torch.float32)),
            "terminated": (self.terminated(read), TensorSpec((1,), torch.bool)),
        }
        for function, (value, spec) in results.items():
            check_tensor(f"{name}.{function}", value, spec, self.device)
        used = sorted({*read.names(), *before.names()})
        self._check_leaves_alone(fields, before, action, used)
        return before.names(), used

    def _check_leaves_alone(
        self, fields: Fields, before: Fields, action: Tensor, used: list[str]
    ) -> None:
        """EnvError if a function changes a field that it reads; torch counts the changes in place
        of each tensor, also those that leave the values as they are.
        """
        calls = {
            "observe": lambda: self.observe(fields),
            "reward": lambda: self.reward(fields, before, action),
            "terminated": lambda: self.terminated(fields),
        }
        values = {key: getattr(fields, key) for key in used}
        tracked = {key: value for key, value in values.items() if not value.is_inference()}
        for function, call in calls.items():
            versions = {key: value._version for key, value in tracked.items()}
            call()
            changed = [key for key, value in tracked.items() if value._version != versions[key]]
            if changed:
                raise EnvError(
                    f"{type(self).__name__}.{function}: wanted data left alone, got data."
                    f"{', data.'.join(changed)} changed in place"
                )

    def _start(self) -> None:
        if not self._worlds.is_ready:
            self._worlds.prepare()
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
        # all else of the old episodes goes
        self._worlds.restart(mask)
        self._restart_clocks(mask)
