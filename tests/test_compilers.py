"""The processes in which torch compiles end while a run goes on, and come back if they are needed after all."""

import os
import threading

import pytest
from torch._inductor import config
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers

from iterand.training.compilers import CompilersLeave
from iterand.training.loop import Silent


class Counting(Silent):
    def __init__(self):
        self.seen = []

    def step(self, session):
        self.seen.append(session)

    def epoch(self, session, metrics):
        self.seen.append((session, metrics))


@pytest.fixture
def compilers(monkeypatch):
    monkeypatch.setattr(config, "compile_threads", 2)
    monkeypatch.setattr(config, "worker_start_method", "subprocess")
    shutdown_compile_workers()  # those of other tests, which are more
    yield AsyncCompile.process_pool()
    shutdown_compile_workers()


def wait_until_gone():
    for thread in threading.enumerate():
        if thread.name == "iterand-compilers":
            thread.join(60)


def test_compilers_leave_after_two_epochs_and_come_back(compilers):
    assert compilers.submit(os.getpid).result(60) != os.getpid()
    watched = CompilersLeave(Counting())
    watched.epoch(None, {"epoch": 41})
    wait_until_gone()
    assert compilers.process.poll() is None
    watched.epoch(None, {"epoch": 42})
    wait_until_gone()
    assert compilers.process.poll() == 0
    assert AsyncCompile.process_pool() is not compilers
    assert AsyncCompile.process_pool().submit(os.getpid).result(60) != os.getpid()
    watched.epoch(None, {"epoch": 43})
    wait_until_gone()
    assert AsyncCompile.process_pool().process.poll() is None


def test_the_other_observer_hears_everything():
    observer = Counting()
    watched = CompilersLeave(observer)
    watched.step("session")
    watched.epoch("session", {"epoch": 1})
    assert observer.seen == ["session", ("session", {"epoch": 1})]
