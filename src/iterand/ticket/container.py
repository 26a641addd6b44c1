"""The bytes of a ticket: one safetensors file with a JSON header in its metadata and a checksum over all of it."""

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from iterand.errors import TicketError

KEY = "ticket"  # of the metadata; the only one, since safetensors does not order them
DIGEST = "sha256"  # the tensor that holds the checksum

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def pack(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a ticket."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    digest = torch.zeros(32, dtype=torch.uint8)
    data = bytearray(safetensors.torch.save({**tensors, DIGEST: digest}, {KEY: text}))
    place = _digest_place(*_outer_header(data))
    data[place] = hashlib.sha256(data).digest()
    return bytes(data)


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The JSON header and the tensors of a ticket whose bytes are whole."""
    if len(data) > 8 and data[8:9] != b"{":
        raise TicketError("this is no ticket, nor any other safetensors file")
    try:
        tensors = safetensors.torch.load(data)
    except SafetensorError as error:
        raise TicketError(f"this is no whole safetensors file: {_sentence(error)}; copy or download it again") from None
    except KeyError as error:
        raise TicketError(f"it holds a tensor of type {error.args[0]}, which this torch does not know") from None
    outer, start = _outer_header(data)
    if KEY not in outer.get("__metadata__", {}) or tensors.get(DIGEST, torch.empty(0)).numel() != 32:
        raise TicketError("this is a safetensors file, but no ticket; save_ticket writes those")
    zeroed = bytearray(data)
    place = _digest_place(outer, start)
    zeroed[place] = bytes(32)
    if hashlib.sha256(zeroed).digest() != data[place]:
        raise TicketError("its checksum is wrong, so it was damaged on the way; copy or download it again")
    del tensors[DIGEST]
    try:
        header = json.loads(outer["__metadata__"][KEY], parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TicketError(f"its header is no JSON: {_sentence(error)}") from None
    if not isinstance(header, dict):
        raise TicketError(f"its header is a JSON {type(header).__name__}; it must be an object")
    return header, tensors


def native(element: bytes) -> bytes:
    """One little-endian element in this machine's order, or the other way round."""
    return element if sys.byteorder == "little" else element[::-1]


def _outer_header(data: bytes | bytearray) -> tuple[dict[str, Any], int]:
    """The JSON object that a safetensors file begins with, and where the data starts; ``data`` is a valid one."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def _digest_place(outer: dict[str, Any], start: int) -> slice:
    first, end = outer[DIGEST]["data_offsets"]
    return slice(start + first, start + end)


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _sentence(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
