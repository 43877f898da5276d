"""Base of MuJoCo tasks on mujoco-warp: a task is a model's file and three pure functions of
MuJoCo's fields, all else stands here.

    class Reach(MujocoWarpEnv):
        model_file, frame_skip, max_episode_steps = "arm.xml", 2, 200

        def observe(self, data): return torch.cat((data.qpos, data.qvel), 1)
        def reward(self, data, before, action): return -data.site_xpos[:, 0].norm(dim=1)
        def terminated(self, data): return data.qvel.abs().amax(1) > 50.0

Physics runs in a Warp graph on torch's current stream. A reset is a selection, so no shape depends
on the data; on a CPU it is left out where nobody restarts. To hold a step in torch's graphs too
(`graph_safe`), the Warp graph would have to be recorded into torch's capture by
`warp.capture_begin(external=True)`, and the warning of dropped constraints be read outside of it.
"""

import importlib.util
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from torch import Tensor

from gpurl.envs._counting_env import CountingEnv, select
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
from gpurl.envs.vec_env import TensorSpec, Timestep, check_tensor
from gpurl.errors import EnvError, UsageError
from gpurl.kernels.backend import host_sync_is_free
from gpurl.kernels.random import CounterRandom

# a larger qpos or qvel is no state any more: mjMAXVAL, at which MuJoCo on a CPU starts anew
LARGEST = 1e10
STATE = ("qpos", "qvel", "act", "time", "qacc_warmstart", "ctrl")  # what the next step begins with
FORCES = (
    "cfrc_ext",
    "qfrc_actuator",
    "qfrc_constraint",
)  # none at rest; the others follow from them in the next step
GIVEN = (
    "qfrc_applied",
    "xfrc_applied",
    "eq_active",
    "mocap_pos",
    "mocap_quat",
    "userdata",
)  # no step changes them


class Before:
    """The fields as they were before the step, of those that `reward` looks at."""

    def __init__(self, fields: Fields, names: Iterable[str]) -> None:
        self.__dict__.update({name: getattr(fields, name).clone() for name in names})

    def __getattr__(self, name: str) -> Tensor:
        known = ", ".join(vars(self)) or "nothing"
        raise EnvError(
            f"reward looked at before.{name}, but at {known} when it was tried out: it must look "
            f"at the same fields every time"
        )


class _Watched:
    """Fields that remember which of them were looked at."""

    def __init__(self, fields: Fields) -> None:
        self._fields, self._names = fields, set[str]()

    def __getattr__(self, name: str) -> Tensor:
        value = getattr(self._fields, name)
        self._names.add(name)
        return value


class MujocoWarpEnv(CountingEnv):
    """Subclass it with `model_file` and the three functions below; they never change a tensor they
    are given.

    model_file: a path, also one from beside the task's file, the name of one of Gymnasium's models,
    or the XML itself. `data` holds MuJoCo's fields by their names in mjData, [N, ...] float32:
    data.qpos, data.xpos, data.cfrc_ext, data.sensordata, ... The action goes to data.ctrl; its
    space is the actuators' ctrlrange. After a reset the positions and velocities of bodies, sites
    and geoms are those of the new state, and forces are zero. A task that uses any other field
    (sensordata, qacc, ...) has all of them as mj_forward makes them of the new state, as in
    Gymnasium; this costs about a step of physics where episodes end, on a GPU in each step.

    A world whose state, reward or observation is no longer finite ends (terminated), with a reward
    and final_obs of zeros, and starts anew.
    Its last step is no transition: info["valid"] is False there. info["log"] counts such worlds,
    and those where MuJoCo dropped contacts or constraints for want of room (njmax constraints and
    nconmax contacts a world).
    """

    model_file: str
    frame_skip: int = 1  # steps of physics to a step of the environment
    reset_noise_scale: float = 0.0
    normal_velocity_noise = False  # uniform like that of the positions, or normal
    njmax: int | None = (
        # constraints a world, twice what random actions made of any; None: mujoco-warp's own guess
        None
    )
    nconmax: int | None = (
        # contacts a world, all worlds share their room; so many pairs of geoms may come near, too
        None
    )

    def __init__(
        self,
        num_envs: int,
        device: torch.device | str = "cpu",
        seed: int = 0,
        *,
        xml_file: str | None = None,
        frame_skip: int | None = None,
        max_episode_steps: int | None = None,
        cone: str | None = None,
        graph: bool = True,
        njmax: int | None = None,
        nconmax: int | None = None,
    ) -> None:
        """xml_file, frame_skip, max_episode_steps, njmax, nconmax: None is the task's own. cone:
        "pyramidal" or "elliptic" friction, None as the model says. graph: whether physics is
        captured.
        """
        chosen = {
            "frame_skip": frame_skip,
            "max_episode_steps": max_episode_steps,
            "njmax": njmax,
            "nconmax": nconmax,
        }
        for name, value in chosen.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
            if value is not None:
                setattr(self, name, value)
        self.xml_file, self.cone, self.graph = xml_file, cone, graph
        self.device = torch.device(device)
        simulators = load_simulators()
        self.model = load_model(simulators, type(self), xml_file or self.model_file, cone)
        self.dt = (
            float(self.model.opt.timestep) * self.frame_skip
        )  # seconds to a step of the environment
        self.initial_qpos = self.constant(self.model.qpos0)
        on_device = Model(simulators, self.model, self.device)
        self.single_action_space = self._action_space()
        self._names_before, self._names_used = self._try_out(
            Fields(simulators, on_device.worlds(1, self.njmax, self.nconmax))
        )
        super().__init__(num_envs, device)
        places_all = not KINEMATIC.issuperset(
            {*self._names_used} - {*STATE, *FORCES, *GIVEN, *CARRIED}
        )
        self._simulation = Simulation(
            on_device, self.num_envs, self.frame_skip, self.njmax, self.nconmax, graph, places_all
        )
        self.data = self._simulation.fields
        self._names_placed = self._find_placed()
        self._dropped = DroppedConstraints(self, self._simulation)
        self._random = CounterRandom(seed, self.num_envs, self.device)
        self._has_started = False

    @classmethod
    def missing(cls) -> str:
        lacks = [
            name
            for name in ("mujoco", "mujoco_warp", "warp")
            if importlib.util.find_spec(name) is None
        ]
        return f"{', '.join(lacks)}; pip install 'gpurl[mujoco]'" if lacks else ""

    @abstractmethod
    def observe(self, data: Any) -> Tensor:
        """[N, D] float32 what the policy sees."""

    @abstractmethod
    def reward(self, data: Any, before: Any, action: Tensor) -> Tensor:
        """[N] float32 for `action` [N, A], which led from the fields `before` to `data`. What it
        uses of before is copied, each step.
        """

    def terminated(self, data: Any) -> Tensor:
        """[N] bool: the task ended; a task without this function ends by time only."""
        return torch.zeros_like(data.time, dtype=torch.bool)

    def initial_state(self, rng: CounterRandom) -> tuple[Tensor, Tensor]:
        """(qpos [n, nq], qvel [n, nv]) of first states of `rng.num_envs` episodes: the model's own,
        and noise.
        """
        scale = self.reset_noise_scale
        qpos = self.initial_qpos + rng.uniform(-scale, scale, (self.model.nq,))
        if self.normal_velocity_noise:
            return qpos, scale * rng.normal((self.model.nv,))
        return qpos, rng.uniform(-scale, scale, (self.model.nv,))

    def constant(self, values: Any) -> Tensor:
        """float32 on the device; keep it, it costs a copy: `functools.cached_property`."""
        return torch.as_tensor(np.asarray(values), dtype=torch.float32, device=self.device)

    def body(self, name: str) -> int:
        """The number of a body: data.xpos[:, self.body("torso")]."""
        return int(self.model.body(name).id)

    # ---- the contract ----

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        if seed is not None and not isinstance(seed, (int, np.integer)):
            raise UsageError(
                f"reset takes one seed, of which every environment draws its own numbers, got "
                f"{seed!r}"
            )
        if seed is not None:
            self._random.load_state_dict(
                CounterRandom(int(seed), self.num_envs, self.device).state_dict()
            )
        given = (options or {}).get("reset_mask") if self._has_started else None
        mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if given is not None:
            mask = torch.as_tensor(given, dtype=torch.bool, device=self.device)
        self._start()
        self._restart(mask)
        self._random.advance(
            None if given is None else mask.any()
        )  # nobody restarts: nothing happened
        return self._observe(), {}

    def step(self, actions: Tensor) -> Timestep:  # type: ignore[override]
        if not self._has_started:
            raise UsageError(f"{type(self).__name__}.step: reset() comes before the first step")
        data, action, may_look = (
            self.data,
            self._checked_action(actions),
            host_sync_is_free(self.device),
        )
        before = Before(data, self._names_before)
        data.ctrl.copy_(action)
        self._dropped.begin()
        self._simulation.step()
        reward, terminated, final_obs = (
            self.reward(data, before, action),
            self.terminated(data),
            self._observe(),
        )
        state = torch.cat((data.qpos, data.qvel), 1)
        # times 0: 0, or NaN of what is not finite
        valid = (state.abs().amax(1) < LARGEST) & ((final_obs.sum(1) + reward) * 0.0 == 0.0)
        reward, terminated = torch.where(valid, reward, 0.0), terminated | ~valid
        final_obs = torch.where(valid.unsqueeze(1), final_obs, 0.0)
        self._count(reward, valid)
        truncated = torch.zeros_like(terminated)
        if self.max_episode_steps is not None:
            truncated = (self.episode_length_buf >= self.max_episode_steps) & ~terminated
        done = terminated | truncated
        info = self._episode_info(done, truncated)
        info |= {"final_obs": final_obs, "valid": valid}
        info["log"] = {
            "non_finite_worlds": (~valid).sum(),
            "worlds_lacking_room": self._dropped.look(may_look),
        }
        obs = final_obs
        if not may_look or bool(done.any()):
            self._restart(done)
            obs = self._observe()
        self._random.advance()
        return Timestep(obs, reward, terminated, truncated, info)

    def state_dict(self) -> dict[str, Any]:
        """Continues bit for bit on a CPU; on a GPU sums of forces are added up in any order."""
        fields = (
            {name: getattr(self.data, name) for name in self._saved_names()}
            if self._has_started
            else {}
        )
        return {"fields": fields, "clocks": self._clocks(), "random": self._random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._random.load_state_dict(state["random"])
        self._load_clocks(state["clocks"])
        if not state["fields"]:
            return
        self._start()
        for name in self._saved_names():
            getattr(self.data, name).copy_(state["fields"][name])

    def close_extras(self, **kwargs: Any) -> None:
        self._dropped.close()

    # ---- its parts ----

    def _action_space(self) -> Box:
        model = self.model
        if model.nu == 0:
            raise UsageError(
                f"the model of {type(self).__name__} has no actuators, so there is nothing to "
                f"decide"
            )
        limited = model.actuator_ctrllimited.astype(bool)
        low, high = (
            np.where(limited, limit, sign * np.inf)
            for limit, sign in zip(model.actuator_ctrlrange.T, (-1.0, 1.0))
        )
        return Box(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)

    def _try_out(self, fields: Fields) -> tuple[list[str], list[str]]:
        """(the fields that reward wants of before, all that are used): the three functions are
        called on one world, which no step has made.

        Tells what is wrong with them, and finds the width of observations where the task does not
        say it.
        """
        name, watched = type(self).__name__, _Watched(fields)
        action = torch.zeros(1, self.model.nu, device=self.device)
        obs = self.observe(fields)
        if getattr(self, "single_observation_space", None) is None:
            if not isinstance(obs, Tensor) or obs.dim() != 2:
                raise EnvError(
                    f"{name}.observe: wanted a tensor of shape (1, D), got "
                    f"{getattr(obs, 'shape', obs)!r}"
                )
            self.single_observation_space = Box(-np.inf, np.inf, (obs.shape[1],), np.float32)
        width = self.single_observation_space.shape or ()
        expected = {
            "observe": (obs, TensorSpec((1, *width), torch.float32)),
            "reward": (self.reward(fields, watched, action), TensorSpec((1,), torch.float32)),
            "terminated": (self.terminated(fields), TensorSpec((1,), torch.bool)),
        }
        for function, (value, spec) in expected.items():
            check_tensor(f"{name}.{function}", value, spec, self.device)
        return sorted(watched._names), fields.used()

    def _start(self) -> None:
        if not self._simulation.is_ready:
            self._simulation.prepare()
            self._dropped.peak.zero_()
        self._has_started = True

    def _observe(self) -> Tensor:
        """A tensor of its own: one that is a view of a field would be changed by the next step."""
        obs = self.observe(self.data)
        return (
            obs.clone()
            if obs._is_view()
            or not obs.is_contiguous()
            or any(obs is field for field in vars(self.data).values())
            else obs
        )

    def _restart(self, mask: Tensor) -> None:
        """First states where mask [N]; the other worlds are left as they are, bit for bit."""
        name, data, model = type(self).__name__, self.data, self.model
        qpos, qvel = self.initial_state(self._random)
        for key, value, width in (("qpos", qpos, model.nq), ("qvel", qvel, model.nv)):
            spec = TensorSpec((self.num_envs, width), torch.float32)
            check_tensor(f"{name}.initial_state: {key}", value, spec, self.device)
        for field, value in ((data.qpos, qpos), (data.qvel, qvel)):
            field.copy_(torch.where(mask.unsqueeze(1), value, field))
        for cleared in (*STATE[2:], *FORCES):
            field = getattr(data, cleared)
            if field.numel():
                field.masked_fill_(_wide(mask, field), 0.0)
        for carried, at_rest in self._simulation.carried.items():
            if carried not in (*STATE, *GIVEN):
                field = getattr(data, carried)
                field.copy_(select(mask, at_rest, field))
        # with RK4 positions of bodies are those of the last stage, not of qpos: what the others
        # show must not be computed anew
        kept = {field: getattr(data, field).clone() for field in self._names_placed}
        if kept:
            self._simulation.place()
        for field_name, value in kept.items():
            field = getattr(data, field_name)
            field.copy_(select(mask, field, value))
        self._restart_clocks(mask)

    def _find_placed(self) -> list[str]:
        """What `place` writes of that which a world shows or hands to its next step."""
        simulation = self._simulation
        names = {*self._names_used, *simulation.carried}
        names = names - {*STATE, *GIVEN} if simulation.places_all else names & KINEMATIC
        fields = {name: getattr(self.data, name) for name in sorted(names)}
        return [
            name for name, field in fields.items() if field.numel() and len(field) == self.num_envs
        ]  # nacon is one for all worlds

    def _saved_names(self) -> list[str]:
        """What the next step begins with, and what the task sees of the last one; fields of width 0
        have nothing to save.
        """
        return [
            name
            for name in sorted({*STATE, *self._simulation.carried, *self._names_used})
            if getattr(self.data, name).numel()
        ]


def _wide(mask: Tensor, field: Tensor) -> Tensor:
    """mask [N] as [N, 1, ...] beside `field`."""
    return mask.view(-1, *(1,) * (field.dim() - 1))
