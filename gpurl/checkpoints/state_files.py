"""Nested states as files without code in them: tensors in one NAME.safetensors per part, all the
rest in `state.json`.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpurl.checkpoints.plain_files import read_at_most
from gpurl.errors import CheckpointError

State = dict[str, Any]  # nested dicts, lists and tuples of Tensor, bool, int, float, str, None

MAX_DEPTH = 64
MAX_JSON_BYTES = 64 << 20
DTYPES = {  # what every safetensors that we allow can store
    *(
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
    ),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
}


def write_state_files(folder: Path, parts: dict[str, State]) -> None:
    """Writes `state.json` and one NAME.safetensors per part into `folder`; CheckpointError for what
    they cannot hold.
    """
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
    encoded = {name: _encode(state, (), tensors[name]) for name, state in parts.items()}
    text = json.dumps(encoded, allow_nan=False, indent=1).encode()
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"state.json would have {len(text)} bytes, more than {MAX_JSON_BYTES}: keep arrays in "
            f"tensors"
        )
    (folder / "state.json").write_bytes(text)
    for name, named in tensors.items():
        save_file(_packed(named), folder / f"{name}.safetensors")


def read_state_files(folder: Path, device: str | torch.device) -> dict[str, State]:
    """What `write_state_files` was given, tensors on `device`; content that makes no sense raises
    errors of many types.
    """
    encoded, _ = read_json(folder / "state.json")
    if {f"{name}.safetensors" for name in encoded} != {
        file.name for file in folder.glob("*.safetensors")
    }:
        raise CheckpointError(f"state.json wants parts {list(encoded)[:9]}, other files are there")
    parts = {}
    for name, state in encoded.items():
        with safe_open(folder / f"{name}.safetensors", framework="pt", device="cpu") as file:
            # these are pages of the file: copied, so that they outlive it, lie on `device` and
            # share no storage
            tensors = {key: file.get_tensor(key).to(device, copy=True) for key in file.keys()}  # noqa: SIM118 - not a dict
        parts[name] = _decode(state, tensors)
        if tensors or not isinstance(parts[name], dict):
            raise CheckpointError(
                f"{name}.safetensors and state.json do not fit: {list(tensors)[:3]} left over"
            )
    return parts


def read_json(file: Path) -> tuple[dict[str, Any], bytes]:
    """The JSON object in a file of sane size, and its bytes."""
    try:
        raw = read_at_most(file, MAX_JSON_BYTES)
    except ValueError as error:
        raise CheckpointError(f"{file.name}: {error}") from None
    content = json.loads(raw)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.name} holds a {type(content).__name__}, wanted an object")
    return content, raw


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON; what JSON lacks becomes `{"!kind": …}`, tensors go into `tensors` under
    their path.
    """
    kind, where = type(value), "/".join(path)
    if len(path) > MAX_DEPTH:
        raise CheckpointError(
            f"{where[:80]}…: a state may nest {MAX_DEPTH} deep, this one is deeper or contains "
            f"itself"
        )
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
            raise CheckpointError(
                f"{where}: cannot save a {value.dtype} tensor of layout {value.layout} on "
                f"{value.device}"
            )
        key = "/".join(name.replace("~", "~0").replace("/", "~1") for name in path)
        key = (
            "~__metadata__" if key == "__metadata__" else key
        )  # safetensors keeps this name for itself
        tensors[key] = value.detach()
        return {"!tensor": key}
    if isinstance(value, dict):
        for name in value:
            if type(name) is not str or name.encode(errors="ignore").decode() != name:
                raise CheckpointError(
                    f"{where}: keys must be strings that UTF-8 can hold, got {name!r}"
                )
        return {
            "!" * name.startswith("!") + name: _encode(item, (*path, name), tensors)
            for name, item in value.items()
        }
    if kind in (list, tuple):
        items = [_encode(item, (*path, str(index)), tensors) for index, item in enumerate(value)]
        return items if kind is list else {"!tuple": items}
    if kind is int and value.bit_length() > 63:
        return {"!int": hex(value)}
    if kind is float and not math.isfinite(value):
        return {"!float": struct.pack(">d", value).hex()}
    if value is None or kind in (bool, int, float, str):
        return value
    raise CheckpointError(
        f"{where}: cannot save a {kind.__module__}.{kind.__qualname__}; wanted Tensor, bool, int, "
        f"float, str, None"
    )


def _decode(value: Any, tensors: dict[str, Tensor], depth: int = 0) -> Any:
    """Inverse of `_encode`; takes each tensor out of `tensors`."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"state.json nests deeper than {MAX_DEPTH}")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_decode(item, tensors, depth + 1) for item in value]
        case {"!tensor": str(key), **rest} if not rest:
            return tensors.pop(key)
        case {"!tuple": list(items), **rest} if not rest:
            return tuple(_decode(item, tensors, depth + 1) for item in items)
        case {"!int": str(digits), **rest} if not rest:
            return int(digits, 16)
        case {"!float": str(bits), **rest} if not rest:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case dict() if all(name[:1] != "!" or name[:2] == "!!" for name in value):
            return {
                name.removeprefix("!"): _decode(item, tensors, depth + 1)
                for name, item in value.items()
            }
    raise CheckpointError(f"state.json holds an unknown value {str(value)[:80]}")


def _packed(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values contiguous on the CPU, no two in one storage, as safetensors demands."""
    result: dict[str, Tensor] = {}
    storages = set()
    for key, tensor in named.items():
        packed = tensor.cpu().contiguous()
        if packed.untyped_storage().data_ptr() in storages:
            packed = packed.clone()
        storages.add(packed.untyped_storage().data_ptr())
        result[key] = packed
    return result
