"""The session as a context: what ends it, and what its user is told."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import asyncflow  # noqa: E402
from asyncflow.api.load import load_job, to_yaml  # noqa: E402
from asyncflow.errors import ManifestError  # noqa: E402
from asyncflow.local.folder import JOB, QUEUE, SYNC, RunFolder  # noqa: E402
from asyncflow.local.record import Record  # noqa: E402
from asyncflow.session.engines import Engines  # noqa: E402
from asyncflow.session.joining import SessionPlace, place_of_run  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        (JOB, "Continue it with .* --resume"),
        (QUEUE, "asyncflow run .*/queue.yaml --output"),
        (SYNC, "asyncflow run .*/weights.yaml --output"),
    ],
)
def test_a_folder_in_which_nothing_goes_on_any_more_is_refused_at_once(tmp_path, name, hint):
    folder = RunFolder.claim(tmp_path / "run", name=name)
    folder.job.write_text("kind: RLJob\n")
    Record(mark="m", supervisor=1, started="", driver="tcp://127.0.0.1:1", http="").save(folder.processes)
    assert place_of_run(folder.path).address == "tcp://127.0.0.1:1"
    folder.release()
    with pytest.raises(ManifestError, match=rf"no run is active there\..*{hint}"):
        place_of_run(folder.path)


@pytest.mark.parametrize("take", [asyncflow.init_engines, asyncflow.load, asyncflow.train])
def test_what_is_neither_a_path_nor_a_job_is_refused(take):
    with pytest.raises(ManifestError, match=r"type dict was given\..*RLJob\.model_validate makes one from a mapping"):
        take({"kind": "RLJob"})


def test_the_model_is_made_when_it_is_first_asked_for(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr("asyncflow.session.engines.materialize_weights", lambda _, folder: made.append(folder))
    (tmp_path / JOB).write_text(to_yaml(load_job(EXAMPLE, ["trainer.external=true"])))
    place = SessionPlace(address="tcp://127.0.0.1:1", manifest=tmp_path / JOB, workdir=tmp_path)
    session = SimpleNamespace(opened=lambda: SimpleNamespace(state=None, step=0))
    engines = Engines(session=session, place=place, partition="train")
    assert made == []
    assert [engines.model] == made


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


def test_an_interrupted_close_can_be_repeated(monkeypatch):
    session = BrokenSession()
    engines = Engines(session=session, place=SessionPlace(address="tcp://127.0.0.1:1"), partition="train")

    def interrupted(_timeout):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(session.dismissed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engines.close()
    with pytest.raises(RuntimeError, match="a plug-in broke"):
        engines.close()
    engines.close()


def test_an_error_of_the_users_is_raised_whatever_the_end_of_the_session_says(caplog):
    session = BrokenSession()
    with (
        pytest.raises(ValueError, match="the loss is wrong"),
        Engines(session=session, place=SessionPlace(address="tcp://127.0.0.1:1"), partition="train"),
    ):
        raise ValueError("the loss is wrong")
    assert "while the session ended: a plug-in broke" in caplog.text
