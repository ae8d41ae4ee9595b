"""A loop of one's own as the trainer of a job: killed, started again, replaced, joined by folder and by address."""

import asyncio
import json
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from socket import inet_aton
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from one_run import EXAMPLES, finish, kill, start, wait_for_step
from pod_world import pods
from safetensors.torch import save_file

torch = pytest.importorskip("torch")

import asyncflow  # noqa: E402
from asyncflow.api.load import load_job, to_yaml  # noqa: E402
from asyncflow.errors import AsyncFlowError, Fenced, ManifestError, Refused  # noqa: E402
from asyncflow.identity import SampleKey  # noqa: E402
from asyncflow.local.folder import RunFolder  # noqa: E402
from asyncflow.local.record import Record  # noqa: E402
from asyncflow.models import tiny  # noqa: E402
from asyncflow.models.tiny import write_config  # noqa: E402
from asyncflow.plan import plan  # noqa: E402
from asyncflow.queue.ledger.audit import audit_ledgers  # noqa: E402
from asyncflow.queue.partition import Partition  # noqa: E402
from asyncflow.queue.torch.dataset import Consumer  # noqa: E402
from asyncflow.rpc.shm import SHARED_MEMORY_ENV  # noqa: E402
from asyncflow.training.checkpoint import Checkpoints  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

STEPS, PROMPTS, GROUP = 6, 4, 4
SAMPLES = STEPS * PROMPTS * GROUP
SETTINGS = [
    f"algorithm.steps={STEPS}",
    f"algorithm.promptsPerStep={PROMPTS}",
    "evaluation=null",
    "storage.checkpoints.every=2",
    "transferQueue.storageUnits=1",
    "rollout.replicas=1",
]
OWN = EXAMPLES / "own"
PAGE = EXAMPLES.parent / "docs" / "guide" / "python.md"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model for jobs that count: there are weights, of which nobody makes a model."""
    folder = tmp_path_factory.mktemp("model")
    write_config(folder)
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def model(weights: Path) -> str:
    """The setting by which a job has it, instead of warming the tiny model up."""
    return f"model.source={weights}"


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting for the tiny model as it is before its warm-up."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("untaught")
    write_config(folder)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    return f"model.source={folder}"


def run_example(name: str, *arguments: str) -> None:
    """Run an example in this process, as from the command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(OWN / name), run_name="__main__")


def run_block(words: str, folder: Path, job: asyncflow.RLJob, **names: Any) -> Path:
    """Run the block of the page that has ``words`` as it stands there, beside ``job``; return the folder of the run."""
    (code,) = (block for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if words in block)
    (folder / "job.yaml").write_text(to_yaml(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, names)
    return folder / "runs" / job.name


def small(manifest: str, folder: Path, *settings: str) -> list[str]:
    """Return the arguments of an example that trains a few samples."""
    return [str(EXAMPLES / manifest), str(folder), *SETTINGS, *settings]


def count(engines: asyncflow.Engines, *, until: int) -> torch.Tensor:
    """Count samples up to step ``until``."""
    seen = torch.zeros(4096) if engines.state is None else engines.state["seen"]
    engines.weight_sync_notify({"seen": seen})
    return go_on(engines, seen, until=until)


def go_on(engines: asyncflow.Engines, seen: torch.Tensor, *, until: int = STEPS) -> torch.Tensor:
    while engines.step < until:
        while (batch := engines.get_experience_data(timeout=120)) is not None:
            for serial, sample in batch.keys:
                seen[serial * GROUP + sample] += 1
        engines.weight_sync_notify({"seen": seen}, state={"seen": seen})
    return seen


def trained_once(folder: Path, *, samples: int = SAMPLES) -> None:
    report = audit_ledgers(folder / "ledger")
    assert report.ok, report.problems
    assert (report.dispatched, report.trained, report.lost, report.duplicated) == (samples, samples, 0, 0)


def test_a_loop_that_is_killed_with_its_job_goes_on_and_trains_each_sample_once(tmp_path: Path, untaught: str) -> None:
    folder = tmp_path / "run"
    simulated = "rollout.engine={name: simulated, options: {token_s: 0.02}}"
    arguments = small("quickstart.yaml", folder, untaught, simulated)
    with subprocess.Popen([sys.executable, str(OWN / "loop.py"), *arguments]) as first:
        wait_for_step(folder, 3, first, within_s=200)
        first.send_signal(signal.SIGKILL)
    assert not (folder / "summary.json").exists()
    run_example("loop.py", *arguments)
    trained_once(folder, samples=STEPS * PROMPTS * 8)
    assert (folder / "export" / "model.safetensors").exists()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["attempt"]) == (STEPS, 1)


def test_an_algorithm_may_bring_its_own_loss_and_its_own_generation(tmp_path: Path, untaught: str) -> None:
    class Generating(asyncflow.Trainer):
        gaps: ClassVar[list[float]] = []

        def generate_sequences(self, prompts):
            return super().generate_sequences(prompts)

        def logprobs(self, batch):
            found = super().logprobs(batch)
            self.gaps.append(float((found.detach() - batch.logprobs)[batch.mask].abs().max()))
            return found

    sync = "schedule={mode: sync, update: sync, maxStaleness: 0}"
    sizes = ["algorithm.steps=2", "algorithm.groupSize=2", "rollout.replicas=0", "rollout.minReplicas=0"]
    job = load_job(EXAMPLES / "quickstart.yaml", [*SETTINGS, untaught, sync, *sizes, "trainer.external=true"])
    asked = SimpleNamespace(Trainer=Generating, Experience=asyncflow.Experience, init_engines=asyncflow.init_engines)
    folder = run_block("class TruncatedImportance", tmp_path, job, asyncflow=asked, Tensor=torch.Tensor)
    report = audit_ledgers(folder / "ledger")
    assert (report.trained, report.duplicated) == (2 * PROMPTS * 2, 0)
    assert max(Generating.gaps) < 1e-4  # what was generated, was generated by the weights that were just trained


def test_a_loop_puts_its_own_prompts_and_a_killed_driver_forgets_none(tmp_path: Path, model: str) -> None:
    steps, prompts = 5, 16
    sizes = [f"algorithm.steps={steps}", f"algorithm.promptsPerStep={prompts}", "trainer.external=true"]
    sources = ["data.train.source=put://", "data.eval=null", "data.overlong=refuse"]
    job = load_job(EXAMPLES / "counting.yaml", [*SETTINGS, model, *sizes, *sources])
    seen, sessions = torch.zeros(4096), []

    def refused(engines: asyncflow.Engines) -> None:
        with pytest.raises(ManifestError, match="prompt 300 has 40 tokens"):
            engines.put_prompts_data([*["12"] * 300, "0123456789" * 4])
        with pytest.raises(ManifestError, match="prompt 0 has 'text'"):
            engines.put_prompts_data([{"text": "1"}])
        with pytest.raises(ManifestError, match="prompt 1 is invalid"):
            engines.put_prompts_data(["1", {"question": "2", "answer": object()}])
        with pytest.raises(ManifestError, match="one prompt was given"):
            engines.put_prompts_data("1")

    def killed(engines: asyncflow.Engines) -> None:
        asked = [{"question": text, "answer": text} for text in "123"]
        kill(tmp_path / "runs" / job.name, "driver")
        number = engines.prompts
        there = list(range(number, number + len(asked)))
        assert engines.put_prompts_data(asked) == there
        assert engines.put_prompts_data(asked, first=number) == there, "once more: they are there"
        with pytest.raises(Refused, match="other prompts already have these serials"):
            engines.put_prompts_data(asked, first=number - 1)

    def started(*given: Any) -> asyncflow.Engines:
        sessions.append(asyncflow.init_engines(*given))
        refused(sessions[0])
        return sessions[0]

    def learn(model: dict[str, torch.Tensor], batch: asyncflow.Experience) -> None:
        if sessions[0].step == 2 and seen.sum() == 2 * prompts * GROUP:
            killed(sessions[0])
        for serial, sample in batch.keys:
            seen[serial * GROUP + sample] += 1

    asked = SimpleNamespace(init_engines=started)
    folder = run_block("put_prompts_data", tmp_path, job, asyncflow=asked, model={"seen": seen}, learn=learn)
    trained_once(folder, samples=steps * prompts * GROUP)
    assert (seen[: steps * prompts * GROUP] == 1).all()
    assert seen.sum() == steps * prompts * GROUP
    texts = [json.loads(line) for file in (folder / "samples").glob("*.jsonl") for line in file.open()]
    assert texts
    asked_of = {step: f"{1 + step}*" for step in range(1, steps)} | {steps: ("1", "2", "3", f"{1 + steps}*")}
    assert {text["step"] for text in texts} == asked_of.keys()
    assert all(text["prompt"].startswith(asked_of[text["step"]]) for text in texts)


def test_a_notebook_may_await_every_verb_in_a_thread_or_call_it_in_its_running_loop(tmp_path: Path, model: str) -> None:
    settings = [*SETTINGS, model, "algorithm.steps=2", "data.train.source=put://", "data.eval=null"]
    asked = [{"question": str(n), "answer": str(n)} for n in range(PROMPTS)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def aside(verb: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        before = ticks
        result = await asyncio.to_thread(verb, *arguments, **options)
        await asyncio.sleep(0.01)
        assert ticks > before, "the loop has gone on"
        return result

    async def cells() -> None:
        ticking = asyncio.create_task(tick())
        engines = await aside(
            asyncflow.init_engines, EXAMPLES / "counting.yaml", output=tmp_path / "run", overrides=settings
        )
        assert ticks > 10, "processes have been started meanwhile"
        seen = {"seen": torch.zeros(1)}
        await aside(engines.weight_sync_notify, seen)
        assert await aside(engines.put_prompts_data, asked) == [0, 1, 2, 3]
        while await aside(engines.get_experience_data, timeout=120) is not None:
            pass
        await aside(engines.weight_sync_notify, seen, state=None)
        before = ticks
        assert engines.put_prompts_data(asked) == [4, 5, 6, 7]
        while engines.get_experience_data(timeout=120) is not None:
            pass
        engines.weight_sync_notify(seen, state=None)
        assert ticks == before, "called directly, they hold the loop up, and say nothing against it"
        await aside(engines.close)
        ticking.cancel()

    asyncio.run(cells())
    report = audit_ledgers(tmp_path / "run" / "ledger")
    assert report.ok, report.problems
    assert (report.trained, report.lost, report.duplicated) == (2 * PROMPTS * GROUP, 0, 0)


def test_a_stage_that_the_job_leaves_to_the_caller_is_done_by_threads_and_processes_and_no_other_is(
    tmp_path: Path, model: str
) -> None:
    folder = tmp_path / "run"
    own = (
        "tasks=[{name: mark, reads: [response_ids], writes: [{name: tokens, dtype: int32, most: 1}], leaseSeconds: 5}]"
    )

    def mark(engines: asyncflow.Engines) -> list[SampleKey]:
        done = []
        while (got := engines.get_experience_data("mark", ["response_ids"], 5, timeout=120)) is not None:
            lengths = [len(row) for row in got.data["response_ids"]]
            put = engines.put_experience_data({"tokens": lengths}, got.index)
            done += [row.meta.key for row, ok in zip(got.index.rows, put, strict=True) if ok]
        return done

    def load(engines: asyncflow.Engines) -> list[SampleKey]:
        done = []
        with engines.create_stream_data_loader("mark", ["response_ids"], 5, use_vllm=True, num_workers=1) as loader:
            for data, index in loader:
                with pytest.raises(Refused, match="no int32"):
                    loader.put({"tokens": [0.5] * len(index.rows)}, index)
                put = loader.put({"tokens": list(map(len, data["response_ids"]))}, index)
                done += [row.meta.key for row, ok in zip(index.rows, put, strict=True) if ok]
        return done

    with (
        ThreadPoolExecutor() as threads,
        asyncflow.init_engines(EXAMPLES / "counting.yaml", output=folder, overrides=[*SETTINGS, model, own]) as engines,
        ExitStack() as left_open,
    ):
        for stage in ("advantage", "reviewer"):
            with pytest.raises(Refused, match=f"does not leave the task '{stage}' to you"):
                engines.get_experience_data(stage, ["response_ids"], 5)
            with pytest.raises(Refused, match=f"does not leave the task '{stage}' to you"):
                engines.create_stream_data_loader(stage, ["response_ids"], 5)
        with pytest.raises(Refused, match="a job makes its rows itself"):
            engines.put_experience_data({"tokens": [1]})
        with pytest.raises(Refused, match="the driver makes the prompts"):
            engines.put_prompts_data(["1 + 1"])
        with pytest.raises(Refused, match="ends after its steps"):
            engines.put_prompts_data(["1 + 1"], last=True)
        beside = left_open.enter_context(asyncflow.init_engines(folder, trains=False))
        seen = torch.zeros(4096)
        engines.weight_sync_notify({"seen": seen})
        with pytest.raises(Refused, match="is not the trainer's"):
            beside.get_experience_data()
        with asyncflow.init_engines(folder, trains=False) as careless:
            left = careless.get_experience_data("mark", ["response_ids"], 5, timeout=120)
            assert left is not None, "others have these rows, too"
        with (
            pytest.raises(ZeroDivisionError),
            beside.get_experience_data("mark", ["response_ids"], 5, timeout=120) as (_, index),
        ):
            1 / (len(index.rows) - len(index.rows))  # beside lives on, and yet others have these rows
        work = ((mark, engines), (load, engines), (mark, beside))
        marking = [threads.submit(each, by) for each, by in work]
        client = Consumer(engines.queue)
        rows = Partition(client.client, "train")
        for harm in (
            rows.declare("reviewer", ["response_ids"]),
            rows.claim("advantage", 5),
            rows.put({"response_ids": [1]}),
            rows.reset("rollout"),
            rows.clear(),
            rows.close(),
        ):
            with pytest.raises(Refused, match=r"client-0 may not call|done by the job's own processes"):
                client.run(harm)
        client.close()
        while engines.step < STEPS:
            while (batch := engines.get_experience_data(timeout=120)) is not None:
                assert batch.extra["tokens"][:, 0].tolist() == batch.mask.sum(1).tolist()
            engines.weight_sync_notify({"seen": seen}, state=None)
        marked = [key for each in marking for key in each.result(60)]
    assert len(marked) == len(set(marked)) == SAMPLES
    trained_once(folder)


def test_the_thread_of_the_page_does_what_is_left_to_it_and_ends_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    own = "tasks=[{name: mark, reads: [response_ids], writes: [{name: novelty, most: 1}]}]"
    job = load_job(EXAMPLES / "counting.yaml", [*SETTINGS, model, "algorithm.steps=2", "trainer.external=true", own])
    learned = []

    def learn(_model: Any, batch: asyncflow.Experience, novelty: torch.Tensor) -> None:
        assert novelty.tolist() == [[tokens / 2] for tokens in batch.mask.sum(1).tolist()]
        learned.extend(batch.keys)

    folder = run_block(
        "def mark()",
        tmp_path,
        job,
        asyncflow=asyncflow,
        threading=threading,
        model={"seen": torch.zeros(1)},
        novelty=lambda rows: [len(row) / 2 for row in rows],
        learn=learn,
    )
    for thread in threading.enumerate():
        if "(mark)" in thread.name:
            thread.join(60)
            assert not thread.is_alive()
    assert not failed, "it was told that no more rows come"
    assert len(set(learned)) == len(learned) == 2 * PROMPTS * GROUP
    trained_once(folder, samples=len(learned))


def test_trl_trains_what_the_queue_gives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    monkeypatch.setattr(tiny, "STEPS", 1)  # of the warm-up, by which there are weights
    folder = tmp_path / "run"
    sizes = ["algorithm.steps=2", "algorithm.groupSize=4"]
    run_example("trl_grpo.py", *small("quickstart.yaml", folder, "rollout.engine={name: simulated}", *sizes))
    report = audit_ledgers(folder / "ledger")
    assert (report.trained, report.duplicated, report.unfinished) == (2 * PROMPTS * 4, 0, 0)


def test_sessions_by_folder_and_by_address_follow_one_another(tmp_path: Path, model: str) -> None:
    folder = tmp_path / "run"
    settings = [*SETTINGS, model, "trainer.external=true"]
    run = start("counting.yaml", folder, settings)
    try:
        while not (folder / "run" / "processes.json").exists():
            assert run.poll() is None, run.communicate()
        with pytest.raises(Refused, match="no weights yet"), asyncflow.init_engines(folder) as hasty:
            hasty.get_experience_data()
        first = asyncflow.init_engines(folder)
        counted = count(first, until=1)
        assert first.get_experience_data(timeout=120) is not None
        with pytest.raises(Refused, match="not taken yet"):
            first.weight_sync_notify({"seen": torch.zeros(1)}, state=None)

        keys = tmp_path / "keys"
        for name in ("trainer-0", "client-0"):
            shutil.copytree(folder / "run" / "tls" / name, keys / name)
        driver = json.loads((folder / "run" / "processes.json").read_text())["driver"]
        with asyncflow.init_engines(
            EXAMPLES / "counting.yaml",
            overrides=settings,
            address=driver.rpartition("/")[0],
            tls=keys,
            workdir=folder,
        ) as second:
            with pytest.raises(Fenced):
                go_on(first, counted)
            count(second, until=3)
        assert Checkpoints(folder / "checkpoints").latest().manifest.step == 3
        with asyncflow.init_engines(folder) as third:
            assert third.step == 3
            seen = count(third, until=STEPS)
        finish(run, within_s=120)
    finally:
        run.kill()
    assert (seen[:SAMPLES] == 1).all()
    assert seen.sum() == SAMPLES
    trained_once(folder)


def dialed(host: str) -> bool:
    """Tell whether a connection leads to that address, or did within the last minute."""
    there = inet_aton(host)[::-1].hex().upper()
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(remote.startswith(f"{there}:") for _, _, remote, *_ in lines)


def test_a_job_that_shares_only_the_network_is_joined_with_a_folder_and_an_address_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Path
) -> None:
    monkeypatch.setenv(SHARED_MEMORY_ENV, "off")  # what another host has not: all goes over TCP, and so over TLS
    settings = [*SETTINGS, "algorithm.steps=3", "trainer.external=true"]
    keys, mine = tmp_path / "keys", tmp_path / "mine"
    shutil.copytree(weights, mine / "model" / "reverse-digits-0")  # as they lie there once they have been made
    with pods(tmp_path / "pods", EXAMPLES / "counting.yaml", settings, leader="driver") as job:
        job.place(*plan(load_job(EXAMPLES / "counting.yaml", settings)).roles)
        job.start()
        for role in ("trainer", "client"):
            shutil.copytree(job.issuer.issue(role), keys / f"{role}-0")
        host = job.address_of(len(job.pods) + 1)
        with asyncflow.init_engines(
            EXAMPLES / "counting.yaml", overrides=settings, address=job.address, tls=keys, workdir=mine, host=host
        ) as engines:
            seen = count(engines, until=1)
            assert dialed(host), "the rollout has its weights from there"
            go_on(engines, seen, until=3)
            assert engines.model.is_relative_to(mine)
        assert set(job.finish(within_s=60).values()) == {0}, job.logs()
        report = audit_ledgers(job.pods["controller-0"].folder / "ledger")
    samples = 3 * PROMPTS * GROUP
    assert report.ok, report.problems
    assert (report.trained, report.lost, report.duplicated) == (samples, 0, 0)
    assert (seen[:samples] == 1).all()
    assert seen.sum() == samples
    assert Checkpoints(mine / "checkpoints").latest().manifest.step == 3
    assert not list((tmp_path / "pods").glob("*/checkpoints")), "they are the trainer's"


def test_a_job_with_a_trainer_of_its_own_is_not_joined(tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path / "run")
    Record(mark="m", supervisor=1, started="", driver="tcp://127.0.0.1:1", http="").save(folder.processes)
    shutil.copy(EXAMPLES / "counting.yaml", folder.job)
    with pytest.raises(ManifestError, match="trainer of its own"):
        asyncflow.init_engines(folder.path)
    folder.release()


def test_where_nothing_runs_there_is_nothing_to_join(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no run is active there"):
        asyncflow.init_engines(tmp_path)


def test_a_job_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    with pytest.raises(AsyncFlowError, match=r"algorithm\.steps = -1"):
        asyncflow.init_engines(EXAMPLES / "counting.yaml", output=tmp_path / "run", overrides=["algorithm.steps=-1"])


def test_a_job_that_a_loop_cannot_train_is_not_started(tmp_path: Path) -> None:
    settings = ["algorithm.epochs=2"]
    with pytest.raises(AsyncFlowError, match="makes its updates itself"):
        asyncflow.init_engines(EXAMPLES / "counting.yaml", output=tmp_path / "run", overrides=settings)
    assert not (tmp_path / "run").exists()


def test_a_manifest_without_an_external_trainer_joins_no_job_by_address(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="set the field in the manifest, too"):
        asyncflow.init_engines(EXAMPLES / "counting.yaml", address="tcp://127.0.0.1:1", workdir=tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_who_does_not_train_joins_a_job_that_runs(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="started here needs its trainer"):
        asyncflow.init_engines(EXAMPLES / "counting.yaml", output=tmp_path / "run", trains=False)
