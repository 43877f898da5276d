"""Maps the top-level folders to packages: envs/ is gpurl.envs, kernels/ is gpurl.kernels (see pyproject.toml for the rest)."""

from setuptools import setup

setup(
    package_dir={"gpurl": "gpurl", "gpurl.envs": "envs", "gpurl.kernels": "kernels"},
    packages=["gpurl", "gpurl.algorithms", "gpurl.buffers", "gpurl.outward", "gpurl.envs", "gpurl.envs.mujoco_warp", "gpurl.kernels"],
    package_data={"gpurl.kernels": ["*.c", "*.h"]},  # built by the user's compiler at first use
)
