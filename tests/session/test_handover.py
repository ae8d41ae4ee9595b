"""The trainer's thread and the user's thread, which hand each other samples and weights."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from asyncflow.api.load import load_job  # noqa: E402
from asyncflow.errors import CheckpointError, DeadlineExceeded, Fenced, Refused  # noqa: E402
from asyncflow.identity import SampleKey  # noqa: E402
from asyncflow.rpc.columns import Jagged  # noqa: E402
from asyncflow.session.engines import Engines  # noqa: E402
from asyncflow.session.handover import Handover  # noqa: E402
from asyncflow.session.joining import SessionPlace  # noqa: E402
from asyncflow.session.role import TrainerSession  # noqa: E402
from asyncflow.session.trainer import OwnTrainer  # noqa: E402
from asyncflow.training.batch import MicroBatch  # noqa: E402
from asyncflow.training.checkpoint import MANIFEST, CheckpointManifest  # noqa: E402
from asyncflow.training.ranks import GroupLeft, SingleProcess  # noqa: E402
from asyncflow.training.settings import BackendSettings, OptimizerSettings  # noqa: E402

EXAMPLE = Path(__file__).parents[2] / "examples" / "counting.yaml"
WAIT_S = 60.0


@pytest.fixture
def trainer():
    with ThreadPoolExecutor(max_workers=1) as thread:
        yield thread


@pytest.fixture
def handover(trainer):
    made = Handover(BackendSettings(optimizer=OptimizerSettings(learning_rate=0.1, steps=1)), group=SingleProcess())
    yield made
    made.end(lambda: Refused("the test is over"))


def same(batch):
    return batch


def one(serial):
    empty = Jagged.from_rows([[]], "int32")
    return MicroBatch(
        keys=[SampleKey(serial, 0)],
        prompts=Jagged.from_rows([[1]], "int32"),
        responses=empty,
        logprobs=Jagged.from_rows([[]], "float32"),
        versions=Jagged.from_rows([[]], "int64"),
        advantages=np.zeros(1, np.float32),
    )


def test_a_step_goes_through(handover, trainer):
    loaded = trainer.submit(handover.load, None, checkpoint=None)
    handover.begin({"w": torch.ones(2)})
    loaded.result(WAIT_S)
    assert (handover.state, handover.step) == (None, 0)
    for serial in (1, 2):
        trainer.submit(handover.micro_batch, one(serial), version=None)
    finished = trainer.submit(handover.finish_step, 1)
    taken = [handover.take(same, what="samples", timeout=WAIT_S) for _ in range(3)]
    assert [batch and batch.keys[0].serial for batch in taken] == [1, 2, None]
    assert handover.trained == 2
    weights = torch.full((2,), 5.0)
    handover.finish({"w": weights}, state={"step": 1}, metrics={"loss": 0.5})
    with pytest.raises(Refused, match="step 2 has samples that were not taken yet"):
        handover.finish({"w": weights}, state={"step": 2}, metrics={})
    weights += 1
    assert finished.result(WAIT_S) == {"loss": 0.5}
    assert {name: array.tolist() for name, array in handover.tensors()} == {"w": [5.0, 5.0]}
    assert handover.trained == 0


def test_what_a_step_was_finished_with_is_what_a_checkpoint_holds(handover, trainer, tmp_path):
    trainer.submit(handover.finish_step, 1)
    assert handover.take(same, what="samples", timeout=WAIT_S) is None
    state = {"step": 1, "moments": torch.ones(3)}
    handover.finish({"w": torch.ones(1)}, state=state, metrics={})
    state["moments"] += 1
    handover.snapshot()(tmp_path)
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(CheckpointManifest(attempt=0, step=1, samples=4)))
    again = Handover(handover.settings, group=SingleProcess())
    again.begin({"w": torch.ones(1)})
    again.load(tmp_path, checkpoint=tmp_path)
    assert (again.step, again.state["step"], again.state["moments"].tolist()) == (1, 1, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("file", [None, b"", b"no state", b"PK\3\4"])
def test_a_checkpoint_of_another_backend_is_refused(handover, tmp_path, file):
    if file is not None:
        (tmp_path / "state.pt").write_bytes(file)
    (tmp_path / MANIFEST).write_bytes(msgspec.json.encode(CheckpointManifest(attempt=0, step=1, samples=4)))
    with pytest.raises(CheckpointError, match="another backend"):
        handover.load(tmp_path, checkpoint=tmp_path)


def test_a_step_is_not_finished_before_its_samples_were_taken(handover, trainer):
    trainer.submit(handover.micro_batch, one(1), version=None)
    with pytest.raises(Refused, match="not taken yet"):
        handover.finish({"w": torch.ones(1)}, state=None, metrics={})


@pytest.mark.parametrize("state", [threading.Thread, lambda: 1, threading.Lock()])
def test_a_state_that_could_not_be_read_again_is_refused_at_once(handover, trainer, state):
    trainer.submit(handover.finish_step, 1)
    handover.take(same, what="samples", timeout=WAIT_S)
    with pytest.raises(Refused, match="could not be read"):
        handover.finish({"w": torch.ones(1)}, state={"who": state}, metrics={})


def test_a_state_that_could_not_be_read_again_is_refused_in_every_step(handover, trainer):
    trainer.submit(handover.finish_step, 1)
    handover.take(same, what="samples", timeout=WAIT_S)
    handover.finish({"w": torch.ones(1)}, state={"best": None}, metrics={})
    trainer.submit(handover.finish_step, 2)
    handover.take(same, what="samples", timeout=WAIT_S)
    with pytest.raises(Refused, match="could not be read"):
        handover.finish({"w": torch.ones(1)}, state={"best": np.float64(0.5)}, metrics={})


def test_all_threads_that_wait_for_samples_hear_that_there_are_no_more(handover, trainer):
    with ThreadPoolExecutor(max_workers=2) as threads:
        waiting = [threads.submit(handover.take, same, what="samples", timeout=WAIT_S) for _ in range(2)]
        while len(handover._changed._waiters) < 2:
            assert not any(each.done() for each in waiting)
        trainer.submit(handover.finish_step, 1)
        assert [each.result(WAIT_S / 6) for each in waiting] == [None, None]


def test_a_wait_for_samples_has_an_end(handover):
    with pytest.raises(DeadlineExceeded, match="samples of step 3 did not arrive"):
        handover.take(same, what="samples of step 3", timeout=0.01)


@contextmanager
def interrupted():
    """Interrupt the main thread, as a notebook does, in the course of the block.

    A process that is started in the background may have SIGINT ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.01, os.kill, [os.getpid(), signal.SIGINT]).start()
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_wait_that_is_interrupted_loses_no_sample(handover, trainer):
    with pytest.raises(KeyboardInterrupt), interrupted():
        handover.take(same, what="samples", timeout=WAIT_S)
    trainer.submit(handover.micro_batch, one(1), version=None)
    with pytest.raises(ZeroDivisionError):
        handover.take(lambda _: 1 / 0, what="samples", timeout=WAIT_S)
    assert handover.take(same, what="samples", timeout=WAIT_S).keys == [SampleKey(1, 0)]


class Fits(OwnTrainer):
    interrupt = 0

    def build(self):
        model = torch.nn.Linear(1, 1, bias=False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self, batch):
        Fits.interrupt -= 1
        if not Fits.interrupt:
            raise KeyboardInterrupt
        return self.model.weight.sum()


def fitting(handover):
    session, place = SimpleNamespace(opened=lambda: handover), SessionPlace(address="tcp://127.0.0.1:1")
    engines = Engines(session=session, place=place, partition="train")
    engines.job, engines.steps, engines._handover = load_job(EXAMPLE, ["trainer.external=true"]), 2, handover
    return Fits(engines)


def play(handover, *steps):
    for step in steps:
        for serial in (1, 2):
            handover.micro_batch(one(serial), version=None)
        handover.finish_step(step)


def test_fit_goes_on_after_an_interruption_between_two_steps(handover, trainer):
    fits = fitting(handover)
    with pytest.raises(KeyboardInterrupt), interrupted():
        fits.fit()
    play_all = trainer.submit(play, handover, 1, 2)
    fits.fit()
    fits.fit()
    play_all.result(WAIT_S)
    assert fits.engines.step == 2
    assert fits.engines.get_experience_data() is None


@pytest.mark.parametrize("where", ["update", "step"])
def test_fit_refuses_to_go_on_after_an_interruption_within_a_step(handover, trainer, monkeypatch, where):
    fits, played = fitting(handover), trainer.submit(play, handover, 1, 2)
    with monkeypatch.context() as patch:
        if where == "step":
            patch.setattr(fits.optimizer, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Fits, "interrupt", 2 if where == "update" else 0)
        with pytest.raises(KeyboardInterrupt):
            fits.fit()
    with pytest.raises(Refused, match=r"step 1 was interrupted .*\. Call close, and init_engines again"):
        fits.fit()
    assert fits.engines.step == 0
    assert not played.done()


def test_the_end_wakes_both_sides(handover, trainer):
    offered = trainer.submit(handover.micro_batch, one(1), version=None)
    handover.take(same, what="samples", timeout=WAIT_S)
    offered.result(WAIT_S)
    finishing = trainer.submit(handover.finish_step, 1)
    threading.Timer(0.01, handover.end, [lambda: Fenced("replaced")]).start()
    with pytest.raises(GroupLeft):
        finishing.result(WAIT_S)
    handover.take(same, what="samples", timeout=WAIT_S)  # the end of the step had been offered before
    with pytest.raises(Fenced, match="replaced"):
        handover.finish({"w": torch.ones(1)}, state=None, metrics={})


def test_a_session_that_nobody_closed_leaves_when_the_interpreter_ends():
    def script():
        waits, left = threading.Event(), threading.Event()

        class Session(TrainerSession):
            def leave(self):
                super().leave()
                left.set()

        def place():
            waits.set()
            left.wait()

        Session(place, run=None, host="127.0.0.1", timeout=WAIT_S)
        waits.wait()

    process = multiprocessing.get_context("fork").Process(target=script)
    process.start()
    process.join(10.0)
    process.kill()
    assert process.exitcode == 0
