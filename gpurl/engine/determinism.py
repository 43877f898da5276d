"""The same bits every time, on one device with one set of versions: deterministic operations only,
or an error that names the other.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

# cuBLAS: two streams that share a workspace may add up in another order
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
_MEMORY: Any = torch.utils.deterministic
TORCH_SAYS = "does not have a deterministic implementation"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """A `with` block, entered before CUDA is used, that computes deterministically, if wanted;
    afterwards all is as it was.

    All but CUBLAS_WORKSPACE_CONFIG, which stays for the next such block: cuBLAS read it once, and
    goes on with it.
    UsageError where cuBLAS was started without what it needs, or where an operation has no
    deterministic form.
    """
    if not wanted:
        yield
        return
    _set_workspace()
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled, benchmark = _MEMORY.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        _MEMORY.fill_uninitialized_memory = (
            False  # every kernel here writes what it returns; tests poison it
        )
        torch.backends.cudnn.benchmark = False
        yield
    except RuntimeError as error:
        if TORCH_SAYS not in str(error):
            raise
        operation = str(error).partition(TORCH_SAYS)[0]
        raise UsageError(
            f"--deterministic: {operation}{TORCH_SAYS}; leave the setting out, or what uses it"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _MEMORY.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = benchmark


def _set_workspace() -> None:
    if not torch.cuda.is_available() or os.environ.get(WORKSPACE) in WORKSPACES:
        return
    if torch.cuda.is_initialized():  # cuBLAS reads it once
        raise UsageError(
            f"--deterministic needs {WORKSPACE}={WORKSPACES[0]} in the environment before CUDA is "
            f"used, "
            f"got {os.environ.get(WORKSPACE, 'none')}: set it before Python starts"
        )
    os.environ[WORKSPACE] = WORKSPACES[0]


def nondeterminism_warning(env: VecEnv) -> str:
    """What `deterministic` cannot promise of `env`, in words; nothing where all is gpurl's own or
    runs on a CPU.
    """
    if env.device.type != "cuda" or isinstance(env, TorchEnv):
        return ""
    return (
        f"--deterministic is about gpurl's own work: {type(env).__name__} simulates on the GPU and "
        f"may differ in its last bits"
    )
