"""Nested states as files without code in them: the tensors of each part in NAME.safetensors, the
rest in `state.json`.
"""

import json
import math
import struct
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gpurl.checkpoints.plain_files import Json, read_at_most
from gpurl.errors import CheckpointError

State = dict[str, Any]  # nested dicts, lists and tuples of Tensor, bool, int, float, str, None

MAX_DEPTH = 64
MAX_JSON_BYTES = 16 << 20  # takes up to 30 times as much memory
# what every version of safetensors that gpurl allows can store
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
DTYPES |= {torch.float8_e4m3fn, torch.float8_e5m2}
DTYPES |= {torch.int64, torch.int32, torch.int16, torch.int8}
DTYPES |= {torch.uint64, torch.uint32, torch.uint16, torch.uint8}


def write_state_files(folder: Path, parts: dict[str, State]) -> None:
    """Write `state.json` and one NAME.safetensors per part into `folder`; CheckpointError for what
    they cannot hold.
    """
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in parts}
    encoded = {name: _encode(state, (), tensors[name]) for name, state in parts.items()}
    text = json.dumps(encoded, allow_nan=False, indent=1).encode()
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"state.json would have {len(text)} bytes, more than {MAX_JSON_BYTES}: store arrays as "
            f"tensors"
        )
    (folder / "state.json").write_bytes(text)
    for name, named in tensors.items():
        save_file(_packed(named), folder / f"{name}.safetensors")


def read_state_files(
    folder: Path,
    device: str | torch.device,
    without: Collection[str] = (),
    on_host: Collection[str] = (),
) -> dict[str, State]:
    """The parts that `write_state_files` wrote, tensors on `device`, those of `on_host` in memory
    of the host. Damaged content raises errors of many types. without: parts that are not read and
    come as {}.
    """
    encoded, _ = read_json(folder / "state.json")
    # one file a part
    files = {file.name for file in folder.glob("*.safetensors")}
    if files != {f"{name}.safetensors" for name in encoded}:
        raise CheckpointError(f"state.json has parts {list(encoded)[:9]}, the files differ")
    # each part with its tensors, none of which is left over
    parts: dict[str, State] = {}
    for name, state in encoded.items():
        if name in without:
            parts[name] = {}
            continue
        with safe_open(folder / f"{name}.safetensors", framework="pt", device="cpu") as file:
            # pages of the file, copied: they outlive it, are on the device and share no storage
            place = "cpu" if name in on_host else device
            keys = file.keys()
            tensors = {key: file.get_tensor(key).to(place, copy=True) for key in keys}
        decoded = _decode(state, tensors)
        if tensors or not isinstance(decoded, dict):
            raise CheckpointError(
                f"{name}.safetensors and state.json do not match: {list(tensors)[:3]} left over"
            )
        parts[name] = decoded
    return parts


def read_json(file: Path) -> tuple[dict[str, Json], bytes]:
    """The JSON object in a file of limited size, and its bytes."""
    try:
        raw = read_at_most(file, MAX_JSON_BYTES)
    except ValueError as error:
        raise CheckpointError(f"{file.name}: {error}") from None
    content = json.loads(raw)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file.name} holds a {type(content).__name__}, wanted an object")
    return content, raw


def _encode(value: object, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Json:
    """`value` as JSON. What JSON cannot hold becomes `{"!kind": …}`; tensors go into `tensors`
    under their path.
    """
    kind = type(value)
    where = "/".join(path)
    if len(path) > MAX_DEPTH:
        raise CheckpointError(
            f"{where[:80]}…: a state may nest {MAX_DEPTH} deep, this one is deeper or contains "
            f"itself"
        )
    # tensors
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES or value.layout != torch.strided or value.is_meta:
            raise CheckpointError(
                f"{where}: cannot save a {value.dtype} tensor of layout {value.layout} on "
                f"{value.device}"
            )
        key = "/".join(name.replace("~", "~0").replace("/", "~1") for name in path)
        if key == "__metadata__":  # safetensors reserves this name
            key = "~__metadata__"
        tensors[key] = value.detach()
        return {"!tensor": key}
    # containers; names that begin with "!" get another one
    if isinstance(value, dict):
        items: dict[str, Json] = {}
        for name, item in value.items():
            if type(name) is not str or name.encode(errors="ignore").decode() != name:
                raise CheckpointError(
                    f"{where}: keys must be strings that UTF-8 can hold, got {name!r}"
                )
            items["!" * name.startswith("!") + name] = _encode(item, (*path, name), tensors)
        return items
    if type(value) is list or type(value) is tuple:
        elements = [_encode(item, (*path, str(n)), tensors) for n, item in enumerate(value)]
        return elements if kind is list else {"!tuple": elements}
    # numbers that JSON cannot hold exactly, and plain values
    if type(value) is int and value.bit_length() > 63:
        return {"!int": hex(value)}
    if type(value) is float and not math.isfinite(value):
        return {"!float": struct.pack(">d", value).hex()}
    if value is None or kind in (bool, int, float, str):
        return cast(Json, value)
    raise CheckpointError(
        f"{where}: cannot save a {kind.__module__}.{kind.__qualname__}; wanted Tensor, bool, int, "
        f"float, str, None"
    )


def _decode(value: Json, tensors: dict[str, Tensor], depth: int = 0) -> object:
    """The inverse of `_encode`; removes each tensor from `tensors`."""
    if depth > MAX_DEPTH:
        raise CheckpointError(f"state.json nests deeper than {MAX_DEPTH}")
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_decode(item, tensors, depth + 1) for item in value]
        case {"!tensor": str(key)} if len(value) == 1:
            return tensors.pop(key)
        case {"!tuple": list(items)} if len(value) == 1:
            return tuple(_decode(item, tensors, depth + 1) for item in items)
        case {"!int": str(digits)} if len(value) == 1:
            return int(digits, 16)
        case {"!float": str(bits)} if len(value) == 1:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
        case dict() if all(name[:1] != "!" or name[:2] == "!!" for name in value):
            return {
                name.removeprefix("!"): _decode(item, tensors, depth + 1)
                for name, item in value.items()
            }
    raise CheckpointError(f"state.json holds an unknown value {str(value)[:80]}")


def _packed(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values contiguous on the CPU, no two in one storage, as safetensors requires."""
    result: dict[str, Tensor] = {}
    storages = set()
    for key, tensor in named.items():
        packed = tensor.cpu().contiguous()
        if packed.untyped_storage().data_ptr() in storages:
            packed = packed.clone()
        storages.add(packed.untyped_storage().data_ptr())
        result[key] = packed
    return result
