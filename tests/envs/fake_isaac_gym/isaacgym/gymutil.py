"""Reads a command line as Isaac Gym's own helper does."""

import argparse
import sys
from typing import Any, Dict, List


def parse_arguments(
    description: str, custom_parameters: List[Dict[str, Any]]
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--sim_device", default="cuda:0")
    parser.add_argument("--pipeline", default="gpu")
    for parameter in custom_parameters:
        parser.add_argument(parameter.pop("name"), **parameter)
    args = parser.parse_args(sys.argv[1:])
    args.sim_device_type, _, number = args.sim_device.partition(":")
    args.compute_device_id = int(number or 0)
    args.use_gpu_pipeline = args.pipeline == "gpu"
    return args
