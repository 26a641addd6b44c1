"""A pytest plugin: where workers run the tests and nothing is heard of any of them any more, the session ends, red.

That a worker was killed is seen by the end of its connection, which does not come while a process lives that the
worker has forked.
"""

import faulthandler
import os
import sys

LONGEST = float(os.environ.get("ITERAND_TEST_SILENCE", "3600"))  # seconds: more than a test may take


def pytest_sessionstart(session):
    if session.config.pluginmanager.hasplugin("dsession"):
        session.config.pluginmanager.register(Listener())


class Listener:
    """Sets the clock again with every test that is done."""

    def __init__(self):
        self.pytest_runtest_logreport(None)

    def pytest_runtest_logreport(self, report):
        faulthandler.dump_traceback_later(LONGEST, exit=True, file=sys.__stderr__)

    def pytest_unconfigure(self):
        faulthandler.cancel_dump_traceback_later()
