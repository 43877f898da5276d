"""Pictures of MuJoCo worlds by MuJoCo's own renderer, off screen."""

import importlib
import os
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from gpurl.envs.mujoco._worlds import Fields
from gpurl.errors import UsageError, did_you_mean, first_line

ASPECT = 4 / 3  # width of a picture over its height
SHOWN = (
    "qpos",
    "qvel",
    "act",
    "ctrl",
    "mocap_pos",
    "mocap_quat",
)  # mj_forward has the rest of them
SAMPLES = 4  # of a pixel, against jagged edges

MAX_SHADOW = 1024  # rows of the shadows' map: twice as fast without a GPU, and as good to look at
BACKGROUND = (0.93, 0.94, 0.96, 1.0)


@dataclass(frozen=True)
class Camera:
    """Where a video looks from; what is None is as MuJoCo's viewer begins."""

    distance: float | None = None  # m
    azimuth: float | None = None  # degrees
    elevation: float | None = None  # degrees, below 0 it looks down
    lookat: tuple[float, float, float] | None = None  # m
    body: str | None = None  # the body that it follows


class Pictures:
    """Draws single worlds of one model, `height` pixels high, through a camera as
    `MujocoEnv.camera` has it.
    """

    def __init__(
        self, task: str, mujoco: ModuleType, model: Any, height: int, camera: Camera | str | None
    ) -> None:
        self.height = height
        self._mujoco = mujoco
        self._model = model
        self._camera = _make_camera(task, mujoco, model, camera)
        self._data = mujoco.MjData(model)
        width = 2 * round(height * ASPECT / 2)
        # room for the picture in the renderer's memory
        screen = model.vis.global_
        screen.offwidth = max(int(screen.offwidth), width)
        screen.offheight = max(int(screen.offheight), height)
        quality = model.vis.quality
        quality.offsamples = max(int(quality.offsamples), SAMPLES)
        quality.shadowsize = min(int(quality.shadowsize), MAX_SHADOW)
        self._has_sky = int(mujoco.mjtTexture.mjTEXTURE_SKYBOX) in model.tex_type
        try:
            _choose_backend(mujoco)
            self._renderer = mujoco.Renderer(model, height, width)
        except Exception as error:
            raise UsageError(
                f"MuJoCo has no renderer here ({type(error).__name__}: {first_line(error)}): set "
                f"MUJOCO_GL=egl and install libegl1, or set MUJOCO_GL=osmesa and install osmesa "
                f"(libosmesa6 or libosmesa6-dev)"
            ) from error

    def draw(self, fields: Fields, index: int) -> np.ndarray:
        """[height, W, 3] uint8 of world `index` of `fields`."""
        copy_state(self._mujoco, self._model, self._data, fields, index)
        self._renderer.update_scene(self._data, self._camera)
        if not self._has_sky:
            self._add_background()
        return np.array(self._renderer.render())

    def _add_background(self) -> None:
        """A pale wall far behind everything: without a sky it would be black."""
        mujoco, model, scene = self._mujoco, self._model, self._renderer.scene
        eye = scene.camera[0]
        ahead = np.array(eye.forward, dtype=np.float64)
        up = np.array(eye.up, dtype=np.float64)
        far = 0.9 * model.vis.map.zfar * model.stat.extent
        # the axes of the wall are its columns: right, up, and towards the eye
        axes = np.stack((np.cross(ahead, up), up, -ahead), axis=1)
        wall = scene.geoms[scene.ngeom]
        mujoco.mjv_initGeom(
            wall,
            mujoco.mjtGeom.mjGEOM_BOX,
            np.array((3 * far, 3 * far, 0.01 * far)),
            np.array(eye.pos, dtype=np.float64) + far * ahead,
            axes.flatten(),
            np.array(BACKGROUND, dtype=np.float32),
        )
        wall.category = mujoco.mjtCatBit.mjCAT_DECOR
        wall.emission = 1.0
        wall.specular = wall.shininess = wall.reflectance = 0.0
        scene.ngeom += 1

    def close(self) -> None:
        """Give the renderer's memory back."""
        self._renderer.close()


def copy_state(mujoco: ModuleType, model: Any, data: Any, fields: Fields, index: int) -> None:
    """Bring `data`, an MjData of `model`, to the state of world `index` of `fields`."""
    for name in SHOWN:
        field = getattr(data, name)
        if field.size:
            field[...] = getattr(fields, name)[index].numpy(force=True).reshape(field.shape)
    mujoco.mj_forward(model, data)


def _choose_backend(mujoco: ModuleType) -> None:
    """Without a screen MuJoCo's default, a window that is not shown, cannot draw; EGL can. What the
    user chose by MUJOCO_GL stays.
    """
    has_screen = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    if os.environ.get("MUJOCO_GL") or has_screen or sys.platform != "linux":
        return
    # MuJoCo reads MUJOCO_GL when it is imported, which happened long ago
    user = sys.modules[mujoco.Renderer.__module__]
    user.gl_context.GLContext = importlib.import_module("mujoco.egl").GLContext  # type: ignore[attr-defined]


def _make_camera(task: str, mujoco: ModuleType, model: Any, camera: Camera | str | None) -> Any:
    """The number of a camera of the model, or an mjvCamera."""
    names = [model.camera(number).name for number in range(model.ncam)]
    if camera is None and "track" in names:
        camera = "track"
    if isinstance(camera, str):
        if camera not in names:
            raise UsageError(
                f"{task}.camera: the model has no camera {camera!r}, "
                f"{did_you_mean(camera, names)}it has: {', '.join(filter(None, names)) or 'none'}"
            )
        return names.index(camera)
    # a camera of its own: as MuJoCo's viewer begins, then what is given
    view = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, view)
    if camera is None:
        return view
    for name in ("distance", "azimuth", "elevation", "lookat"):
        if (value := getattr(camera, name)) is not None:
            setattr(view, name, value)
    if camera.body is not None:
        view.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        view.trackbodyid = _number_of_body(task, model, camera.body)
    return view


def _number_of_body(task: str, model: Any, name: str) -> int:
    names = [model.body(number).name for number in range(model.nbody)]
    if name not in names:
        raise UsageError(
            f"{task}.camera: the model has no body {name!r}, {did_you_mean(name, names)}it has: "
            f"{', '.join(filter(None, names))}"
        )
    return names.index(name)
