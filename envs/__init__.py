"""Tensor environments: one task a file, found by file name (`make_env("pendulum")` reads
envs/pendulum.py).
"""

if __name__ != "gpurl.envs":
    raise ImportError("import gpurl.envs, not envs: under two names every class would exist twice")

from gpurl.envs.registry import env_names, make_env, resolve_env

__all__ = ["env_names", "make_env", "resolve_env"]
