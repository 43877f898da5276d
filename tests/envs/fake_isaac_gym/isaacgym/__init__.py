"""Stands for NVIDIA's package where tests run: like it, it must be imported before torch."""

import sys

if "torch" in sys.modules:
    raise ImportError(
        "PyTorch was imported before isaacgym modules.  Please import torch after isaacgym modules."
    )
