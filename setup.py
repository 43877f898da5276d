"""Maps the top-level folders to packages: envs/ is gpurl.envs, kernels/ is gpurl.kernels.

For the rest see pyproject.toml.
"""

from pathlib import Path

from setuptools import find_packages, setup

# an editable install by a path instead of a finder, which mypy and editors do not follow; the links
# gpurl/envs and gpurl/kernels lead it to those folders, where the checkout has links
HAS_LINKS = all((Path("gpurl") / name).is_dir() for name in ("envs", "kernels"))

setup(
    options={"editable_wheel": {"mode": "compat"}} if HAS_LINKS else {},
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
