"""The session as a context: what ends it, and what its user is told."""

import threading

import pytest

torch = pytest.importorskip("torch")

from asyncflow.session.engines import Engines  # noqa: E402
from asyncflow.session.joining import SessionPlace  # noqa: E402


class BrokenSession:
    """A session whose thread ended with an error that is none of AsyncFlow's own."""

    def __init__(self) -> None:
        self.error = RuntimeError("a plug-in broke")
        self.dismissed = threading.Event()
        self.dismissed.set()
        self.thread = threading.Thread(target=self.leave)
        self.thread.start()

    def leave(self) -> None:
        pass


def test_an_error_of_the_users_is_raised_whatever_the_end_of_the_session_says(caplog):
    session = BrokenSession()
    with (
        pytest.raises(ValueError, match="the loss is wrong"),
        Engines(session=session, place=SessionPlace(address="tcp://127.0.0.1:1"), partition="train"),
    ):
        raise ValueError("the loss is wrong")
    assert "while the session ended: a plug-in broke" in caplog.text
