"""``compile_ticket``: outputs, threads, the cache and what it refuses to load, and life without a compiler."""

import contextlib
import copy
import errno
import logging
import os
import pickle
import re
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import iterand
from iterand.errors import IterandError, TicketError
from iterand.inference import compiled
from iterand.inference.c import library as c_library

needs_compiler = pytest.mark.skipif(not c_library.find_compiler(), reason="needs a C compiler")
SHAPE = (3, 8, 8)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5)
    )


@pytest.fixture(scope="module")
def ticket(tmp_path_factory):
    torch.manual_seed(0)
    model = iterand.prune_(network(), 0.7, weights="signed_constant")
    for _ in range(2):
        model(torch.randn(16, *SHAPE))
    path = tmp_path_factory.mktemp("ticket") / "mine.ticket"
    iterand.save_ticket(model.eval(), path)
    return path


@pytest.fixture(scope="module")
def expected(ticket):
    model = iterand.load_ticket(ticket, network()).eval()
    images = torch.randn(7, *SHAPE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return images, model(images)


@pytest.fixture(scope="module")
def built(ticket, tmp_path_factory):
    """A cache with the library of the ticket."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        iterand.compile_ticket(ticket, network(), input_shape=SHAPE)
    return folder


@pytest.fixture
def cache(built, tmp_path, monkeypatch):
    """A copy of it for one test."""
    folder = tmp_path / "cache"
    shutil.copytree(built, folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "iterand" / "compiled"


@pytest.fixture
def builds(monkeypatch):
    """The folders of builds, which happen only if the cache is not used."""
    folders, build = [], c_library.build

    def counted(source, compiler, folder):
        folders.append(folder)
        return build(source, compiler, folder)

    monkeypatch.setattr(c_library, "build", counted)
    return folders


@needs_compiler
def test_arrays_and_tensors(ticket, expected, cache, builds):
    images, outputs = expected
    run = iterand.compile_ticket(ticket, network())
    assert (run.input_shape, run.is_compiled) == (None, False)
    found = run(images)
    assert (run.input_shape, run.output_shape, run.is_compiled) == (SHAPE, (5,), True)
    assert isinstance(found, torch.Tensor)
    torch.testing.assert_close(found, outputs)
    assert isinstance(run(images.numpy()), np.ndarray)
    np.testing.assert_array_equal(run(images.numpy().astype(np.float64)), found.numpy())
    np.testing.assert_array_equal(run(images.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)), found)
    assert torch.equal(run(images[:1]), found[:1])
    assert run(images[:0]).shape == (0, 5)
    assert builds == []  # all from the cache


@needs_compiler
def test_threads_share_a_batch(ticket, expected, cache):
    images, _ = expected
    one = iterand.compile_ticket(iterand.read_ticket(ticket), network(), input_shape=SHAPE)
    three = iterand.compile_ticket(ticket, network(), threads=3, input_shape=SHAPE)
    for batch in (images, images[:2], images.repeat(40, 1, 1, 1)):
        assert torch.equal(three(batch), one(batch))


@needs_compiler
def test_the_model_in_train_mode_gives_the_same(ticket, expected, cache):
    model = network().train()
    torch.testing.assert_close(iterand.compile_ticket(ticket, model)(expected[0]), expected[1])


def library(cache):
    (path,) = cache.glob("*.so")
    return path


def damage(cache):
    data = bytearray(library(cache).read_bytes())
    data[len(data) // 2] ^= 1
    library(cache).write_bytes(data)


def plant(cache):
    """Another library under this name, which would end the process."""
    library(cache).with_suffix(".json").unlink()
    library(cache).write_bytes(b"not a library at all")


def swap(cache):
    """The library and the seal of another network."""
    path = library(cache)
    seal = path.with_suffix(".json")
    seal.write_text(seal.read_text().replace(path.stem, "0" * 32))


def open_to_others(cache):
    library(cache).chmod(0o666)


def link(cache):
    path = library(cache)
    path.rename(cache / "elsewhere")
    path.symlink_to(cache / "elsewhere")


@needs_compiler
@pytest.mark.parametrize("harm", [damage, plant, swap, open_to_others, link])
def test_a_library_that_is_not_as_it_was_built_is_built_again(harm, ticket, expected, cache, builds):
    harm(cache)
    torch.testing.assert_close(iterand.compile_ticket(ticket, network())(expected[0]), expected[1])
    assert len(builds) == 1
    iterand.compile_ticket(ticket, network(), input_shape=SHAPE)
    assert len(builds) == 1  # and is in the cache again


@needs_compiler
def test_a_library_that_another_process_built_meanwhile_stays(ticket, expected, tmp_path, monkeypatch):
    """It may be between its check and its loading."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build, found = c_library.build, []

    def late(source, compiler, folder):
        if not found:
            found.append(None)
            iterand.compile_ticket(ticket, network(), input_shape=SHAPE)
            found[0] = library(tmp_path / "iterand" / "compiled").stat()
        return build(source, compiler, folder)

    monkeypatch.setattr(c_library, "build", late)
    monkeypatch.setattr(compiled, "_TRACING", contextlib.nullcontext())
    torch.testing.assert_close(iterand.compile_ticket(ticket, network())(expected[0]), expected[1])
    now = library(tmp_path / "iterand" / "compiled").stat()
    assert (now.st_ino, now.st_mtime_ns) == (found[0].st_ino, found[0].st_mtime_ns)


@needs_compiler
def test_a_cache_whose_files_cannot_be_executed_is_named(ticket, cache, monkeypatch):
    def refused(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr("iterand.inference.c.library.ctypes.CDLL", refused)
    sentence = re.escape(f"cannot load the network: {library(cache)}: failed") + ".*; set XDG_CACHE_HOME and TMPDIR"
    with pytest.raises(IterandError, match=sentence):
        iterand.compile_ticket(ticket, network(), input_shape=SHAPE)


@needs_compiler
def test_a_cache_that_others_can_write_is_not_used(ticket, expected, cache, builds):
    before = library(cache).stat().st_mtime_ns
    cache.chmod(0o777)
    torch.testing.assert_close(iterand.compile_ticket(ticket, network())(expected[0]), expected[1])
    assert len(builds) == 1
    assert builds[0].exists()  # until the process ends
    assert library(cache).stat().st_mtime_ns == before


@needs_compiler
def test_the_cache_is_the_users_own(cache):
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not library(cache).stat().st_mode & 0o022


@needs_compiler
def test_other_weights_are_another_library(ticket, expected, cache, builds, tmp_path):
    model = iterand.load_ticket(ticket, network())
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[5].bias += 1
    iterand.save_ticket(iterand.prune_(changed, 0.5), tmp_path / "other.ticket")
    other = iterand.compile_ticket(tmp_path / "other.ticket", network())
    assert not torch.allclose(other(expected[0]), expected[1])
    assert len(builds) == 1
    assert not builds[0].exists()  # it is in the cache


def test_without_a_compiler_torch_runs_it(ticket, expected, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    caplog.set_level(logging.WARNING, "iterand")
    run = iterand.compile_ticket(ticket, network())
    torch.testing.assert_close(run(expected[0]), expected[1])
    assert not run.is_compiled
    assert [record.getMessage() for record in caplog.records] == [
        "no C compiler is found, so the network runs with torch in float32, which is slower; install gcc or clang, "
        "or set CC"
    ]


def test_a_compiler_that_is_not_there(ticket, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    with pytest.raises(
        IterandError, match=r"^CC is 'no-such-compiler -O2', which is not found; set it to a C compiler"
    ):
        iterand.compile_ticket(ticket, network(), input_shape=SHAPE)


@needs_compiler
def test_a_compiler_may_have_a_relative_path(ticket, expected, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cc").symlink_to(shutil.which(c_library.find_compiler()[0]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", "./bin/cc -O1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.testing.assert_close(iterand.compile_ticket(ticket, network())(expected[0]), expected[1])


def test_a_compiler_that_fails(ticket, tmp_path, monkeypatch):
    script = tmp_path / "bad cc"
    script.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'network.c:1: fatal error: disk full' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"'{script}'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(IterandError, match=re.escape("cannot build the network: network.c:1: fatal error: disk full")):
        iterand.compile_ticket(ticket, network(), input_shape=SHAPE)
    assert list((tmp_path / "cache" / "iterand" / "compiled").iterdir()) == []


@needs_compiler
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.zeros(2, 3, 9, 9), "inputs have shape (2, 3, 9, 9); this network is compiled for (batch, 3, 8, 8);"),
        (torch.zeros(3, 8, 8), "inputs have shape (3, 8, 8); this network is compiled for (batch, 3, 8, 8);"),
        (torch.zeros(3), "inputs have shape (3,); they must be a batch, with the examples first"),
        (np.zeros((2, 3, 8, 8), np.uint8), "inputs are uint8; they must be floating-point numbers, prepared as in"),
    ],
)
def test_wrong_inputs_are_refused(inputs, message, ticket, cache):
    run = iterand.compile_ticket(ticket, network(), input_shape=SHAPE)
    with pytest.raises(ValueError, match=re.escape(message)):
        run(inputs)


def test_wrong_arguments_are_refused(ticket, tmp_path):
    (tmp_path / "half.ticket").write_bytes(ticket.read_bytes()[:-20])
    with pytest.raises(TicketError, match=r"half\.ticket"):
        iterand.compile_ticket(tmp_path / "half.ticket", network())
    with pytest.raises(TicketError, match=r"has shape \[8, 3, 3, 3\] in it and \[3, 3\] in Sequential"):
        iterand.compile_ticket(ticket, nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(TicketError, match="in Python, give the model, too"):
        iterand.compile_ticket(ticket)
    with pytest.raises(ValueError, match="threads"):
        iterand.compile_ticket(ticket, network(), threads=0)
    with pytest.raises(
        ValueError, match=r"^sample has shape \(2, 3, 4, 4, 4\); an input .* has one to three dimensions"
    ):
        iterand.compile_ticket(ticket, network(), activations="int8", sample=torch.randn(2, 3, 4, 4, 4))
    with pytest.raises(ValueError, match=r"^input_shape is -8; it is sizes such as \(3, 32, 32\)$"):
        iterand.compile_ticket(ticket, network(), input_shape=(3, -8, 8))
    with pytest.raises(ValueError, match=r"^input_shape is 32; it is sizes such as \(3, 32, 32\)$"):
        iterand.compile_ticket(ticket, network(), input_shape=32)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_models_and_inputs_of_other_precision(dtype, tmp_path):
    def build():
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).to(dtype)

    iterand.save_ticket(iterand.prune_(build(), 0.5, weights="signed_constant"), tmp_path / "a.ticket")
    model = iterand.load_ticket(tmp_path / "a.ticket", build())
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = iterand.compile_ticket(tmp_path / "a.ticket", model)(inputs)
    assert next(model.parameters()).dtype == dtype
    torch.testing.assert_close(found, copy.deepcopy(model).float()(inputs.float()).detach())


@needs_compiler
def test_the_callers_model_may_be_filled_again_before_the_first_call(ticket, expected, cache, tmp_path):
    model = network()
    first = iterand.compile_ticket(ticket, model)
    iterand.save_ticket(iterand.prune_(network(), 0.7, weights="signed_constant", seed=5), tmp_path / "other.ticket")
    iterand.load_ticket(tmp_path / "other.ticket", model)
    images, outputs = expected
    torch.testing.assert_close(first(images), outputs)


@needs_compiler
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_compiled_networks_are_copied_and_pickled(copied, ticket, expected, cache, builds):
    images, outputs = expected
    for ran in (False, True):
        network_ = iterand.compile_ticket(ticket, network(), input_shape=SHAPE if ran else None)
        again = copied(network_)
        torch.testing.assert_close(again(images), outputs)
        assert again.is_compiled
    assert builds == []


@needs_compiler
def test_the_first_calls_may_come_from_several_threads(ticket, expected, cache):
    images, outputs = expected
    shared = iterand.compile_ticket(ticket, network())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: shared(images), range(4)))
    for one in found:
        torch.testing.assert_close(one, outputs)


@needs_compiler
def test_a_cache_that_cannot_be_written_is_not_used(ticket, expected, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(c_library, "atomic_write", full)
    images, outputs = expected
    torch.testing.assert_close(iterand.compile_ticket(ticket, network())(images), outputs)


@needs_compiler
def test_without_a_home_there_is_no_cache(ticket, expected, tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.chdir(tmp_path)
    images, outputs = expected
    torch.testing.assert_close(iterand.compile_ticket(ticket, network())(images), outputs)
    assert list(tmp_path.iterdir()) == []


@needs_compiler
def test_defaults_of_torch_do_not_matter(ticket, expected, cache):
    images, outputs = expected
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            found = iterand.compile_ticket(ticket, network().float())(images)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, outputs)
