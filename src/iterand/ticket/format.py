"""Ticket file format 2: magic bytes, checksum, compressed JSON header, byte planes of tensors.

``docs/reference/ticket-format.md`` is the specification.
"""

import hashlib
import itertools
import json
import math
import struct
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.errors import TicketError

FORMAT = 2
_MAGIC = b"iterand"
_START = struct.Struct("<7sB32sI")  # magic, format, SHA-256 of all other bytes, length of the header
_DIGEST = slice(8, 40)

# Limit on the inflated size of a header: a constant, plus a multiple of its compressed size.
_HEADER_ALLOWANCE = 1 << 20
_INFLATED_PER_BYTE = 1 << 7

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

# Preset dictionary for DEFLATE: strings that headers have in common. It is part of the format (section 8).
DICTIONARY = b"".join(
    (
        b'"aliases":{"levels":{"unit":[0.25,"floor":[0.01],"rank_by":["magnitude"],"score_distribution":["uniform"],',
        b'"saved_as":["F16","BF16","F64","I32","BOOL","identity":["module.model.backbone.head.embeddings.word_embeddings.',
        b"encoder.layer.0.attention.self.query.key.value.output.dense.intermediate.LayerNorm.self_attn.in_proj_weight.",
        b"mlp.linear1.linear2.norm1.norm2.features.0.downsample.0.conv2.bn2.layer1.0.conv1.bn1.fc.blocks.0.",
        b'"training":{"epochs":160,"batch_size":128,"precision":"bfloat16","channels_last":true,',
        b'"norm_statistics":"recomputed","label_smoothing":0.1,"temperature":0.25,"threads":1}},',
        b'"learning_rate":{"initial":0.5,"schedule":"cosine","milestones":[],"factor":0.1},',
        b'"optimizer":{"momentum":0.9,"weight_decay":0.0005},"weight_decay":0.0001},',
        b'"method":{"name":"edge_popup","sparsity":0.9,"weight_distribution":"signed_constant","ranking":"global",',
        b'"norms":"shifted","sparsity_schedule":"cubic","sparsity_schedule_share":0.8,"period":1000,"rate":1.0,',
        b'"candidates":"negative","redrawn_scores":"follow"},"network":{"name":"resnet20","vgg11","conv6",',
        b'"width_factor":0.25,"classes":10},"data":{"name":"cifar10","augmentation":"crop_cutout",',
        b'"normalization":"imagenet"},"recipe":{"name":"best-digits","seed":1,"metrics":{"accuracy":9,',
        b'"test_accuracy":9,"test_loss":0.,"validation_accuracy":9},"planes":[1,2,3,4,5,6,7,8,9,',
        b'"weights_sha256":"0123456789abcdef0123456789abcdef","I64"],"element":["0000000000000000",',
        b'"00000000","0000803f","0000803f"]},"dtype":["F32","I64","tensors":{"name":["',
        b'stem.0.normalization.running_var","stages.1.0.shortcut.normalization.running_mean",',
        b'"stages.0.0.branch.2.normalization.num_batches_tracked","filled":{"name":["convolutions.0.0.bias",',
        b'"classifier.bias"],"ranking":["global"],"history":[[[4294967296,9]]],"history":[[[429496730,117]]],',
        b'"stored":["level"],"stored":["first"],["latest","round","counts":[[16,-1,3],"sparsity":[0.9],[0.5],',
        b'"fan_in":[27,144,8,288,8,576,8,"seed":[0],"weight_distribution":["signed_constant"],["kaiming_uniform"],',
        b'"shape":[[512,512,3,3],[256,256,3,3],[128,128,3,3],[64,64,3,3],[64],[32,32,3,3],[32],[16,16,3,3],[16],',
        b'[16,3,3,3],[10,64]],"stages.0.0.branch.0.normalization.bias","stages.0.0.branch.0.convolution.weight",',
        b'{"iterand":"0.2.0","layers":{"name":["0.weight","',
    )
)


def pack(header: Mapping[str, Any], body: bytes) -> bytes:
    """The bytes of a ticket file. ``body`` holds the byte planes of the tensors, then the coded stream."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_DEFAULT_STRATEGY, DICTIONARY)
    deflated = compressor.compress(text) + compressor.flush()
    data = bytearray(_START.pack(_MAGIC, FORMAT, bytes(32), len(deflated)) + deflated + body)
    data[_DIGEST] = _checksum(data)
    return bytes(data)


def unpack(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body of a ticket file. Checks magic bytes, version and checksum."""
    if data[: len(_MAGIC)] != _MAGIC:
        raise TicketError("this is no ticket; save_ticket writes those")
    if len(data) < _START.size:
        raise TicketError(f"it has {len(data)} bytes, so it was cut off; copy or download it again")
    _, version, checksum, length = _START.unpack_from(data)
    if version != FORMAT:
        writer, hint = "a newer version", "upgrade it"
        if version < FORMAT:
            writer, hint = "an older version", "train or save the network again"
        raise TicketError(
            f"it is a ticket of format {version}, written by {writer}; this iterand reads format {FORMAT}, so {hint}"
        )
    if _checksum(data) != checksum:
        raise TicketError("its checksum is wrong, so it was damaged on the way; copy or download it again")
    if _START.size + length > len(data):
        raise TicketError(f"its header has {length} bytes, and the file only {len(data)}")
    end = _START.size + length
    text = _inflate(data[_START.size : end], _HEADER_ALLOWANCE + _INFLATED_PER_BYTE * length, "header", DICTIONARY)
    try:
        header = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TicketError(f"its header is no JSON: {str(error).splitlines()[0].rstrip('.')}") from None
    if not isinstance(header, dict):
        raise TicketError(f"its header is a JSON {type(header).__name__}; it must be an object")
    return header, data[end:]


def pack_tensors(tensors: Sequence[Tensor]) -> tuple[bytes, list[int]]:
    """Pack tensors as byte planes. Returns the bytes and the number of bytes of each plane.

    Consecutive tensors of one dtype are one sequence; plane k holds byte k of each element. This separates the
    exponent bytes of float32, which compress well, from the mantissa bytes, which look random.
    """
    planes = []
    for _, group in itertools.groupby(tensors, key=lambda tensor: tensor.dtype):
        elements = np.concatenate([_bytes(tensor) for tensor in group])
        for plane in elements.T:
            compressor = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9)
            deflated = compressor.compress(plane.tobytes()) + compressor.flush()
            planes.append(min(plane.tobytes(), deflated, key=len))
    return b"".join(planes), [len(plane) for plane in planes]


def unpack_tensors(
    body: bytes, described: Sequence[tuple[str, tuple[int, ...]]], lengths: Sequence[int]
) -> tuple[list[Tensor], bytes]:
    """Unpack tensors of these dtypes and shapes. Returns the tensors and the rest of ``body``."""
    tensors: list[Tensor] = []
    position = 0
    remaining = list(lengths)
    for name, group in itertools.groupby(described, key=lambda entry: entry[0]):
        dtype, shapes = DTYPES[name], [shape for _, shape in group]
        sizes = [math.prod(shape) for shape in shapes]
        if len(remaining) < dtype.itemsize:
            raise TicketError(f"it names {len(lengths)} planes, too few for its tensors")
        planes = []
        for length in remaining[: dtype.itemsize]:
            planes.append(_read_plane(body[position : position + length], length, sum(sizes)))
            position += length
        del remaining[: dtype.itemsize]
        elements = np.ascontiguousarray(np.stack(planes, axis=1))
        if dtype == torch.bool and (elements > 1).any():
            raise TicketError("it has a tensor of truth values with others than 0 and 1")
        for shape, part in zip(shapes, np.split(elements, np.cumsum(sizes)[:-1])):
            tensors.append(_from_bytes(part, dtype).reshape(shape))
    if remaining:
        raise TicketError(f"it names {len(lengths)} planes, too many for its tensors")
    return tensors, body[position:]


def element_bytes(tensor: Tensor) -> bytes:
    """The little-endian bytes of a tensor with one element."""
    return _bytes(tensor).tobytes()


def full(dtype: str, shape: tuple[int, ...], element: bytes) -> Tensor:
    """A tensor filled with one element, given as little-endian bytes."""
    one = _from_bytes(np.frombuffer(element, dtype=np.uint8)[None], DTYPES[dtype])
    return one.squeeze(0).expand(shape).clone(memory_format=torch.contiguous_format)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The little-endian bytes of a CPU tensor, shape [element, byte]."""
    elements: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    elements = elements.reshape(tensor.numel(), tensor.dtype.itemsize)
    return elements if sys.byteorder == "little" else _swap_bytes(elements, tensor.dtype)


def _from_bytes(elements: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    """The inverse of ``_bytes``, as a flat tensor."""
    elements = elements if sys.byteorder == "little" else _swap_bytes(elements, dtype)
    return torch.from_numpy(np.array(elements).reshape(-1)).view(dtype)


def _swap_bytes(elements: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.uint8]:
    parts = 2 if dtype.is_complex else 1
    return elements.reshape(len(elements), parts, -1)[:, :, ::-1].reshape(elements.shape)


def _read_plane(data: bytes, length: int, size: int) -> NDArray[np.uint8]:
    if len(data) < length:
        raise TicketError("its tensors are longer than the file")
    if length > size:
        raise TicketError(f"a plane of {size} bytes is stored in {length}")
    plain = data if length == size else _inflate(data, size, "plane")
    if len(plain) != size:
        raise TicketError(f"a plane inflates to {len(plain)} bytes instead of {size}")
    return np.frombuffer(plain, dtype=np.uint8)


def _inflate(data: bytes, most: int, what: str, dictionary: bytes = b"") -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS, dictionary)
    try:
        text = inflater.decompress(data, most + 1)
    except zlib.error as error:
        raise TicketError(f"its {what} cannot be inflated: {error}") from None
    if len(text) > most:
        raise TicketError(f"its {what} inflates to more than {most} bytes")
    if not inflater.eof or inflater.unused_data:
        raise TicketError(f"its {what} does not end where it should")
    return text


def _checksum(data: bytes | bytearray) -> bytes:
    digest = hashlib.sha256(data[: _DIGEST.start])
    digest.update(memoryview(data)[_DIGEST.stop :])
    return digest.digest()


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is no float64 number")
    return number
