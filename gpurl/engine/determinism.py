"""`--deterministic`: bit-for-bit equal runs on one device with one set of versions. An operation
without a deterministic form is an error.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gpurl.envs.torch_env import TorchEnv
from gpurl.envs.vec_env import VecEnv
from gpurl.errors import UsageError

# with cuBLAS's default workspaces, two streams may sum in another order
WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
WORKSPACES = (":4096:8", ":16:8")
_MEMORY: Any = torch.utils.deterministic
TORCH_SAYS = "does not have a deterministic implementation"


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """A `with` block that computes deterministically if `enabled`; enter it before CUDA is used.

    Restores torch's settings at the end, but not CUBLAS_WORKSPACE_CONFIG, which cuBLAS reads only
    once. UsageError if cuBLAS was started without it, or if an operation has no deterministic form.
    """
    if not enabled:
        yield
        return
    # remember torch's settings
    _set_workspace()
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = _MEMORY.fill_uninitialized_memory
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        # kernels write everything they return (tests poison the memory), so filling is not needed
        _MEMORY.fill_uninitialized_memory = False
        torch.backends.cudnn.benchmark = False
        yield
    except RuntimeError as error:
        if TORCH_SAYS not in str(error):
            raise
        operation = str(error).partition(TORCH_SAYS)[0]
        raise UsageError(
            f"--deterministic: {operation}{TORCH_SAYS}; train without --deterministic, or without "
            "the setting that uses this operation"
        ) from error
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warn_only)
        _MEMORY.fill_uninitialized_memory = fill
        torch.backends.cudnn.benchmark = benchmark


def _set_workspace() -> None:
    if not torch.cuda.is_available() or os.environ.get(WORKSPACE) in WORKSPACES:
        return
    if torch.cuda.is_initialized():  # cuBLAS has read it
        raise UsageError(
            f"--deterministic needs {WORKSPACE}={WORKSPACES[0]} in the environment before CUDA is "
            f"used, got {os.environ.get(WORKSPACE, 'none')}: set it before Python starts"
        )
    os.environ[WORKSPACE] = WORKSPACES[0]


def nondeterminism_warning(env: VecEnv) -> str:
    """A warning about simulators that `deterministic` does not cover; "" for gpurl's environments
    and on a CPU.
    """
    if env.device.type != "cuda" or isinstance(env, TorchEnv):
        return ""
    return (
        f"--deterministic covers gpurl only: {type(env).__name__} simulates on the GPU and may "
        f"differ in its last bits"
    )
