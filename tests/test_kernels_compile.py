"""Every kernel compiles for a GPU, on a machine without one: the interpreter accepts what the compiler refuses."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton")

SCRIPT = """
import inspect, json, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from iterand.backend.triton import bracket, masks, radix_select, redraw
from iterand.backend.triton.layers import EXACT
from iterand.engine import convolution, normalization, pooling

INTEGERS = {"block_layer", "halves", "any_failed", "keys", "digits", "normal"}
FLOATS = {"sums", "stats", "shift", "mean", "variance", "first_thresholds", "thresholds", "bracket", "learning_rate"}
SCALARS = {"blocks": "i32", "pixels": "i32", "parts": "i32", "count": "i32", "number": "i32", "coin": "i64",
           "channels": "i32", "columns": "i32", "each": "i32", "eps": "fp32",
           "momentum": "fp32", "weight_decay": "fp32"}
SIZES = {"CANDIDATES": 8192, "WANTED": 512, "BLOCK": 1024, "PARTS": 4, "TILE": 32, "OTHERS": 128, "ROUNDS": 6,
         "DIGITS": 2048}


CONVOLUTION = {"HEIGHT": 32, "WIDTH": 32, "ROWS": 16, "COLUMNS": 16, "INPUTS": 3, "OUTPUTS": 20, "KERNEL": 3,
               "STRIDE": 2, "IN": 32, "OUT": 32, "STEPS": 1, "PIXELS": 128, "EACH": 4}
NORM = {"WIDTH": 64, "HEIGHT": 64, "WEIGHTED": True, "SHIFTED": True, "RECTIFIED": True}
HALVES = {"images", "added", "for_added", "weight", "result", "gradient", "for_images"}


def kind(name, kernel):
    if name.isupper():
        return "constexpr"
    if name in SCALARS:
        return SCALARS[name]
    if name in HALVES:
        return "*bf16"
    return "*u8" if name == "chosen" else "*fp32" if name in FLOATS else "*i32" if name in INTEGERS else "*i64"


def compiled(kernel, **choices):
    names = list(inspect.signature(kernel.fn).parameters)
    constants = {name: (SIZES | choices)[name] for name in names if name.isupper()}
    source = ASTSource(kernel, {name: kind(name, kernel) for name in names},
                       {(names.index(name),): value for name, value in constants.items()})
    return len(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=EXACT).asm["cubin"])


found = {
    "collect": compiled(bracket.collect, MAGNITUDE=False, FIRST=False),
    "collect, floors": compiled(bracket.collect, MAGNITUDE=True, FIRST=True),
    "compare": compiled(bracket.compare),
    "digits of scores": compiled(radix_select.count_digits, INDICES=False, MAGNITUDE=False, FIRST=False),
    "digits of indices": compiled(radix_select.count_digits, INDICES=True, MAGNITUDE=True, FIRST=True),
    "finish": compiled(radix_select.finish),
    "apply": compiled(masks._apply, MAGNITUDE=False, SAME=False, COATS=1, SIGNED=False, ROUNDED=False),
    "apply, signed": compiled(masks._apply, MAGNITUDE=True, SAME=True, COATS=1, SIGNED=True, ROUNDED=False),
    "apply, coats": compiled(masks._apply, MAGNITUDE=False, SAME=True, COATS=3, SIGNED=False, ROUNDED=True),
    "differentiate": compiled(masks._differentiate, MAGNITUDE=True, ADD=True),
    "update": compiled(masks._update, MAGNITUDE=True, DECAYS=True, MOVES=True),
    "redraw": compiled(redraw._redraw, MAGNITUDE=False, SAME=False, NEGATIVE=True, FOLLOW=True, DRAW_BYTES=1),
    "convolution": compiled(convolution._convolve, **CONVOLUTION),
    "convolution, more channels": compiled(convolution._convolve, **CONVOLUTION | {"INPUTS": 32, "STEPS": 9}),
    "its gradient by images": compiled(convolution._input_gradient, **CONVOLUTION),
    "its gradient by weights": compiled(convolution._weight_gradient, **CONVOLUTION),
    "sum of parts": compiled(normalization._add_up, ROWS=512, COLUMNS=8),
    "sums of images": compiled(normalization.partial_sums, **NORM),
    "mean and deviation": compiled(normalization.finish_statistics, ROWS=512, COLUMNS=8),
    "norm": compiled(normalization.apply_norm, **NORM, ADDED=True),
    "sums of gradients": compiled(normalization.partial_gradient_sums, **NORM, FROM_RESULT=False),
    "gradients of a norm": compiled(normalization.input_gradients, **NORM, FROM_RESULT=True, ADDED=True, TRAINING=True),
    "pooling": compiled(pooling._pool, **NORM),
    "its gradient": compiled(pooling._scatter, **NORM),
}
print(json.dumps(found))
"""


def test_every_kernel_compiles_for_a_gpu(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert len(found) == 24
    assert all(size > 1000 for size in found.values()), found
