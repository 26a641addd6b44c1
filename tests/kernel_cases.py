"""Scores that a selection could stumble over, and a selection that does not take long without a GPU."""

import importlib.util
from dataclasses import replace

import torch

DENORMAL = 1e-42


def patch_language_once():
    """Let Triton's interpreter patch its language once a launch, not again for each function that a kernel calls."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    def once(fn):
        modules = [value for value in fn.__globals__.values() if value is language or value is language.core]
        unpatched = any(language.core.is_builtin(module.load) for module in modules)
        return patch(fn) if unpatched else interpreter._LangPatchScope()  # of nothing

    interpreter._patch_lang = once


def leave_out_unused_checks():
    """Let Triton's interpreter not ask of each sum whether it overflows, which is heard of in debug mode only."""
    from triton.runtime import interpreter

    options = interpreter.interpreter_builder.options
    if not options.debug:
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)


def remember_types():
    """Let Triton's interpreter find out about a type once, not again for each value that has it."""
    from triton import language
    from triton.runtime import interpreter

    of_blocks, of_values, of_arrays = {}, {}, {}
    init_block, init_value = language.core.block_type.__init__, language.core.tensor.__init__
    find_array = interpreter._get_np_dtype

    def block(self, element_ty, shape):
        key = element_ty.name, *(size if type(size) is int else size.value for size in shape)
        if key not in of_blocks:
            init_block(self, element_ty, shape)
            of_blocks[key] = dict(self.__dict__)
        self.__dict__.update(of_blocks[key])

    def value(self, handle, type):
        if type.name not in of_values:
            init_value(self, handle, type)
            of_values[type.name] = dict(self.__dict__)
        self.__dict__.update(of_values[type.name])
        self.handle = handle

    def array(type):
        if type.name not in of_arrays:
            of_arrays[type.name] = find_array(type)
        return of_arrays[type.name]

    language.core.block_type.__init__, language.core.tensor.__init__ = block, value
    interpreter._get_np_dtype = array


if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    patch_language_once()
    leave_out_unused_checks()
    remember_types()


def shrink(monkeypatch):
    """The interpreter takes milliseconds for what a GPU does in nanoseconds."""
    from iterand.backend.triton import cuts

    monkeypatch.setattr(cuts, "CANDIDATES", 512)
    monkeypatch.setattr(cuts, "_WANTED", 64)
    monkeypatch.setattr(cuts, "_TILE", 128)  # few programs, since each costs the same however much it does
    monkeypatch.setattr(cuts, "_PROGRAMS", 3)


def misses(cuts):
    """How often the cut of each group was outside its bracket."""
    from iterand.backend.triton.layers import MISSES

    return cuts._numbers[:, int(MISSES.value)]


def cases(size):
    """Name, scores and how many are kept; ``size`` is more than a bracket holds."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    odd = torch.full((500,), -0.0)
    odd[::3], odd[7], odd[9], odd[11], odd[12], odd[13] = 0.0, torch.inf, -torch.inf, DENORMAL, -DENORMAL, 3e38
    convolution = normal(12, 6, 3, 3)
    return {
        "random": ([normal(100), normal(40, 30)], [30, 1199]),
        "larger than a bracket": ([normal(size), normal(50)], [size // 3, 7]),
        "tied": ([normal(size).round(), normal(70).round()], [size // 3, 30]),
        "constant": ([torch.full((size,), 0.25), torch.zeros(5)], [size // 2, 2]),
        "channels last": ([convolution.to(memory_format=torch.channels_last), normal(90)], [300, 45]),
        "channels last, tied": ([convolution.mul(2).round().to(memory_format=torch.channels_last)], [444]),
        "denormal": ([normal(300) * DENORMAL], [150]),
        "huge": ([normal(300) * 1e38], [10]),
        "infinite": ([torch.where(normal(300) > 0, torch.inf, -torch.inf), normal(8)], [149, 1]),
        "odd": ([odd], [3]),
        "odd, negative zeros tied": ([odd.clone()], [200]),
        "none": ([normal(100), normal(100)], [0, 0]),
        "some none": ([normal(100), normal(size)], [0, 1]),
        "all": ([normal(100), normal(size)], [100, size]),
        "one": ([normal(1), normal(1)], [1, 0]),
    }
