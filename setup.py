"""Maps the top-level folders to packages: envs/ is gpurl.envs, kernels/ is gpurl.kernels.

For the rest see pyproject.toml.
"""

from setuptools import find_packages, setup

setup(
    package_dir={"gpurl": "gpurl", "gpurl.envs": "envs", "gpurl.kernels": "kernels"},
    packages=[
        *("gpurl", "gpurl.envs", "gpurl.kernels"),
        *(f"gpurl.{name}" for name in find_packages("gpurl", exclude=["envs*", "kernels*"])),
        *(f"gpurl.envs.{name}" for name in find_packages("envs")),
        *(f"gpurl.kernels.{name}" for name in find_packages("kernels")),
    ],
    package_data={
        "gpurl": ["py.typed"],
        "gpurl.kernels": ["cpu/*.c", "cpu/*.h"],
    },  # built by the user's compiler at first use
)
