"""How often a run is saved: a slow disk or a large network must not eat its time."""

import pytest

from iterand.lab.training import loop


@pytest.mark.parametrize(("took", "pause"), [(0.0, 10.0), (0.5, 10.0), (4.0, 80.0)])
def test_saving_takes_a_twentieth_of_the_time_at_most(monkeypatch, took, pause):
    now = 0.0

    class Session:
        def capture(self):
            return "state"

    class Folder:
        saved = ()

        def save(self, state):
            nonlocal now
            now += took
            self.saved = (*self.saved, state)

    monkeypatch.setattr(loop.time, "monotonic", lambda: now)
    folder = Folder()
    saving = loop._Checkpoints(Session(), folder)
    assert not saving.due()
    now += 10.1
    assert saving.due()
    saving.save()
    assert folder.saved == ("state",)
    now += pause - 0.1
    assert not saving.due()
    now += 0.2
    assert saving.due()
