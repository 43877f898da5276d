"""MuJoCo's model of a task, from a file or from XML text."""

import importlib
import inspect
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium

from gpurl.errors import UsageError, did_you_mean, first_line, install_extra

log = logging.getLogger("gpurl")
# the folder of Gymnasium's models; its MuJoCo tasks are never imported
ASSETS = Path(gymnasium.__file__).parent / "envs" / "mujoco" / "assets"
CONES = ("pyramidal", "elliptic")


def load_mujoco() -> ModuleType:
    """The package, which tells its warnings to our log. UsageError that says how to get it."""
    try:
        mujoco = importlib.import_module("mujoco")
    except ImportError as error:
        raise UsageError(
            f"MuJoCo tasks need mujoco, {error.name or error} is missing: {install_extra('mujoco')}"
        ) from error
    except Exception as error:
        chosen = os.environ.get("MUJOCO_GL")
        if not chosen:
            raise
        # it loads the renderer that the user chose
        raise UsageError(
            f"mujoco cannot be imported with MUJOCO_GL={chosen} ({type(error).__name__}: "
            f"{first_line(error)}): install that renderer (egl: libegl1, osmesa: libosmesa6), or "
            f"unset MUJOCO_GL"
        ) from error
    # MuJoCo would write its warnings into a file in the working directory
    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(log.info)
    return mujoco


def find_model(task: type, model_file: str) -> str:
    """The file of a model: a path, relative to the working directory or to the file of `task`, or
    the name of one of Gymnasium's models.
    """
    here = Path(model_file).expanduser()
    candidates = [Path(inspect.getfile(task)).parent / model_file, ASSETS / model_file]
    # a task's own model does not depend on where the program runs
    is_own = model_file == getattr(task, "model_file", None)
    candidates = [*candidates, here] if is_own else [here, *candidates]
    for path in candidates:
        if path.is_file():
            return str(path)
    hint = did_you_mean(model_file, [path.name for path in ASSETS.glob("*.xml")])
    raise UsageError(
        f"{task.__name__} needs the MuJoCo model {model_file!r}, {hint}none of these files exists: "
        f"{', '.join(dict.fromkeys(map(str, candidates)))}"
    )


def load_model(mujoco: ModuleType, task: type, model_file: str, cone: str | None) -> Any:
    """mujoco.MjModel of a file, or of XML text that begins with <."""
    before = mujoco.get_mju_user_warning()
    # otherwise MuJoCo writes a MUJOCO_LOG.TXT into the working directory
    mujoco.set_mju_user_warning(lambda text: log.info("%s: %s", task.__name__, text))
    try:
        if model_file.lstrip().startswith("<"):
            model = mujoco.MjModel.from_xml_string(model_file)
        else:
            model = mujoco.MjModel.from_xml_path(find_model(task, model_file))
    except ValueError as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"{task.__name__}: MuJoCo cannot read the model {model_file[:80]!r}: {error}"
        ) from error
    finally:
        mujoco.set_mju_user_warning(before)
    if cone is not None:
        if cone not in CONES:
            raise UsageError(
                f"cone must be one of {', '.join(CONES)}, or none for that of the model, got "
                f"{cone!r}"
            )
        model.opt.cone = CONES.index(cone)
    return model
