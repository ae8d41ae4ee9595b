"""The parent's end of one reward process: start it, ask it, kill it.

Invariants: an answer counts only with the nonce of a question that is open, and anything else that comes through the
pipe ends the process, so that nothing is answered ahead, and no answer is taken for another question's. A function that
runs a response in its own process lets it change that process, and so what is answered for its later samples; the
functions of the project run none. A process has the pipes to its parent, a folder of its own to write to, and no
variable, descriptor or argument that says anything of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from asyncflow.api.names import REWARD_VARIABLES
from asyncflow.api.placement import PROFILES, AcceleratorSpec
from asyncflow.api.rewards import RewardSpec
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import scratch_folder
from asyncflow.rewards.sandbox import MOST_THREADS, Sandbox
from asyncflow.rewards.wire import LENGTH, MAX_ANSWER, Example, Load, Question, ScoreAnswer, Takes, frame

log = logging.getLogger(__name__)

_DEVICES = Path("/dev")
_SET_VARIABLES = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
    "PYTHONDONTWRITEBYTECODE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
_RUN_LOCK = "run/lock"
"""File that every folder of a run holds, from its start on."""
_RUN_PRIVATE = ("run", "ledger", "checkpoints", "logs")
"""Entries that a run keeps to itself in its folder: its token, its rows, its weights."""
_MOST_FOLDERS = 20_000
"""Folders that are looked into for runs; those below are hidden, since it is not known what they hold."""
_MOST_SCRATCH_BYTES = 1 << 30
_MOST_SCRATCH_FILES = 10_000
_BLOCK_BYTES = 512
_WATCH_S = 0.5
_ROUNDS = 10
"""Number of looks for processes that started meanwhile, when a process is ended with what it started."""
_END_S = 10.0
"""Seconds that the kernel may take to end what was killed."""
_LATE_S = 1.0
"""Seconds that a process which keeps the deadlines of its calls itself may be late to say that one is over."""
_MOST_LINES = 1000
_MOST_LINE_BYTES = 2000


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Definition of a reward process: the function that it loads and how it is confined.

    function, extractor: see ``rewards.functions``; config: settings of the function; workdir: the job's folder, from
    where a user's module is imported; readable: what it may read beside that folder and Python; hidden: folders that it
    may not see, wherever they are; memory: bytes of address space, for each process; processes: how many it may start;
    accelerator: the devices that it computes with; module: the program of the process.
    """

    function: str
    extractor: str = "text"
    config: Mapping[str, Any] | None = None
    workdir: Path
    readable: tuple[Path, ...] = ()
    hidden: tuple[Path, ...] = ()
    memory: int = 4 << 30
    network: bool = False
    processes: int = 0
    accelerator: AcceleratorSpec = field(default_factory=AcceleratorSpec)
    module: str = "asyncflow.rewards.child"

    @classmethod
    def of(cls, spec: RewardSpec, *, workdir: Path, run: Path | None = None) -> list[Scorer]:
        """Return what a manifest asks for, by component. workdir: the job's folder, where relative paths start; run:
        the run's own.

        The folder of the run, and those of other runs in what it may read, are hidden from it.
        """
        folder = workdir.resolve()
        readable = tuple((folder / path).resolve() for path in spec.files)
        hidden = tuple(_hidden((folder, *readable), run=run))
        accelerator = AcceleratorSpec() if spec.role is None else spec.role.accelerator
        return [
            cls(
                function=part.function,
                extractor=part.extractor,
                config=part.config,
                workdir=folder,
                readable=readable,
                hidden=hidden,
                memory=spec.memory.bytes,
                network=spec.network,
                processes=spec.processes,
                accelerator=accelerator,
            )
            for part in spec.parts
        ]


class RewardProcess:
    """One child, with its function loaded.

    unrestricted: what this kernel could not take from it; takes, concurrent: how its function is called, as ``wire``
    says it; broken: why it can be asked no more, None while it can.
    """

    def __init__(self, process: Process, *, scratch: Path, processes: int) -> None:
        self.pid = process.pid
        self.unrestricted: list[str] = []
        self.takes: Takes = "sample"
        self.concurrent = False
        self.broken: PeerLost | None = None
        self._process = process
        self._scratch = scratch
        self._processes = processes
        self._open: dict[bytes, asyncio.Future[ScoreAnswer]] = {}
        self._tasks = [asyncio.create_task(each()) for each in (self._listen, self._show_output, self._watch)]

    @classmethod
    async def start(cls, scorer: Scorer, *, timeout: float) -> RewardProcess:
        """Start a child and wait until it has loaded its function.

        timeout: seconds. Raises ManifestError where the function cannot be loaded, DeadlineExceeded, PeerLost where the
        process ended, or the machine has no room for it.
        """
        try:
            scratch = scratch_folder()
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", scorer.module),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=PIPE,
                    cwd=scorer.workdir,
                    env=_environment(scorer, scratch=scratch),
                    process_group=0,
                )
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
        except OSError as error:
            raise PeerLost(f"no process for {scorer.function!r} can be started: {error}") from error
        child = cls(process, scratch=scratch, processes=scorer.processes)
        try:
            ready = await child._ask(
                Load(
                    nonce=_nonce(),
                    function=scorer.function,
                    extractor=scorer.extractor,
                    config=dict(scorer.config) if scorer.config is not None else None,
                    workdir=str(scorer.workdir),
                    parent=os.getpid(),
                    sandbox=_sandbox(scorer, scratch=scratch),
                    device=PROFILES[scorer.accelerator.profile].device,
                    share=scorer.accelerator.share,
                ),
                timeout=timeout,
                what=f"{scorer.function!r} to load",
            )
            child.unrestricted, child.takes, child.concurrent = ready.unrestricted, ready.takes, ready.concurrent
            if ready.failure:
                raise ManifestError(
                    f"{scorer.function!r} cannot be loaded: {ready.detail}",
                    where="reward.function",
                    hint="It is loaded in a sandbox (docs/guide/rewards.md); the log of the role has the traceback.",
                )
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def open(self) -> int:
        """Calls without an answer; those that had none when it ended are among them."""
        return len(self._open)

    async def score(self, examples: Sequence[Example], *, timeout: float) -> ScoreAnswer:
        """Score examples in one call; of a concurrent function there may be several calls at once.

        Raises ValueError where the examples are too large or no JSON (nothing was sent), DeadlineExceeded after
        ``timeout`` seconds, PeerLost where the process died or broke the protocol: then it must be killed.
        """
        question = Question(nonce=_nonce(), examples=list(examples), seconds=timeout)
        waits = timeout + _LATE_S if self.concurrent else timeout
        answer = await self._ask(question, timeout=waits, what="a reward")
        if not answer.failure and len(answer.scores) != len(examples):
            self._break(f"answered {len(answer.scores)} scores for {len(examples)} samples")
            assert self.broken is not None
            raise self.broken
        return answer

    def end(self, why: str) -> None:
        """End the process and what it started, at once; it still has to be killed."""
        self._break(why)

    async def kill(self) -> None:
        """End the process and what it started, at once, and remove what it wrote.

        A process that has left its group and whose parents have ended may stay: nobody waits for it, or for the ends of
        the pipes that it holds.
        """
        self._break("was killed")
        for descriptor in range(3):
            pipe = self._process._transport.get_pipe_transport(descriptor)  # type: ignore[attr-defined] # noqa: SLF001
            if pipe is not None:
                pipe.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            log.error("the reward process %d was killed and has not ended in %g s", self.pid, _END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _ask(self, message: Load | Question, *, timeout: float, what: str) -> ScoreAnswer:
        """Ask, and wait; what is given up stays open, so that its answer is known for one that nobody wants."""
        writer = self._process.stdin
        assert writer is not None
        asked = frame(message)
        if self.broken is not None:
            raise self.broken
        answered: asyncio.Future[ScoreAnswer] = asyncio.get_running_loop().create_future()
        self._open[message.nonce] = answered
        try:
            writer.write(asked)
            async with asyncio.timeout(timeout):
                return await answered
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} did not come in {timeout:g} s", where=f"pid {self.pid}") from error

    async def _listen(self) -> None:
        """Hand on answers until the pipe ends or something else comes through it."""
        reader = self._process.stdout
        assert reader is not None
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                if length > MAX_ANSWER:
                    raise PeerLost(f"announced an answer of {length} bytes")
                self._take(msgspec.msgpack.decode(await reader.readexactly(length), type=ScoreAnswer))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._break(f"ended ({_ending(await self._process.wait())})")
        except (AsyncFlowError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._break(f"wrote something that is no answer: {error}")

    def _take(self, answer: ScoreAnswer) -> None:
        answered = self._open.pop(answer.nonce, None)
        if answered is None:
            raise PeerLost("it has the nonce of no open question")
        if not answered.done():
            answered.set_result(answer)

    def _break(self, why: str) -> None:
        """Stop using the process, and end it with all that it started."""
        self.broken = self.broken or PeerLost(f"the reward process {why}", where=f"pid {self.pid}")
        if self._process.returncode is None and self._processes:
            self._end_started()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for answered in self._open.values():
            if not answered.done():
                answered.set_exception(self.broken)

    def _end_started(self) -> None:
        """End what it started, in whatever group: it adopts those of them whose parents have ended."""
        ended: set[psutil.Process] = set()
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            os.kill(self.pid, signal.SIGSTOP)
            for _ in range(_ROUNDS):
                fresh = set(self._started()) - ended
                for process in fresh:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                ended |= fresh
                if not fresh:
                    break

    def _started(self) -> list[psutil.Process]:
        """Return the processes that it started, and those that these started. Raises psutil.NoSuchProcess."""
        return psutil.Process(self.pid).children(recursive=True) if self._processes else []

    async def _watch(self) -> None:
        """End it where it takes more than the kernel can be told to give it."""
        while self.broken is None:
            await asyncio.sleep(_WATCH_S)
            try:
                threads = _threads(psutil.Process(self.pid), *self._started())
            except psutil.NoSuchProcess:
                return
            if threads > MOST_THREADS + self._processes:
                self._break(f"had more than {MOST_THREADS + self._processes} threads")
            elif _is_full(self._scratch):
                self._break(f"wrote more than {_MOST_SCRATCH_BYTES} bytes or {_MOST_SCRATCH_FILES} files")

    async def _show_output(self) -> None:
        """Log what the function prints, as long as that is not too much."""
        reader = self._process.stderr
        assert reader is not None
        shown = 0
        while data := await reader.read(_MOST_LINE_BYTES):
            for line in data.decode(errors="replace").splitlines() if shown < _MOST_LINES else ():
                shown += 1
                log.info("reward process %d: %s", self.pid, line)
                if shown == _MOST_LINES:
                    log.warning("reward process %d: what it prints from here on is not shown", self.pid)
                    break


def _nonce() -> bytes:
    return secrets.token_bytes(16)


def _threads(*processes: psutil.Process) -> int:
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.num_threads()
    return count


def _is_full(folder: Path) -> bool:
    """Return whether a folder takes more room than a reward process may."""
    size = files = 0
    for place, folders, names in os.walk(folder):
        files += len(folders) + len(names)
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_blocks * _BLOCK_BYTES
    return size > _MOST_SCRATCH_BYTES or files > _MOST_SCRATCH_FILES


def _hidden(readable: Sequence[Path], *, run: Path | None) -> Iterator[Path]:
    """Yield the folders that a scorer may not read: those of runs, and those that could not be looked into.

    Of a run's folder in which the job's own or a file that the manifest names lies, only what the run keeps to itself.
    """
    runs, unseen = _runs(readable)
    for folder in runs if run is None else {*runs, run.resolve()}:
        if any(place.is_relative_to(folder) for place in readable):
            yield from (folder / name for name in _RUN_PRIVATE)
        else:
            yield folder
    if unseen:
        words = "%s has more than %d folders; the reward function cannot read %s, nor %d others that deep"
        log.warning(words, readable[0], _MOST_FOLDERS, unseen[0], len(unseen) - 1)
    yield from unseen


def _runs(places: Sequence[Path]) -> tuple[set[Path], list[Path]]:
    """Return the folders of runs in ``places``, and what was not looked into; symbolic links are not followed."""
    runs: set[Path] = set()
    seen, waiting = 0, deque(place for place in places if place.is_dir())
    while waiting and seen < _MOST_FOLDERS:
        seen += 1
        folder = waiting.popleft()
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            waiting.extend(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
            if (folder / _RUN_LOCK).exists():
                runs.add(folder)
    return runs, list(waiting)


def _environment(scorer: Scorer, *, scratch: Path) -> dict[str, str]:
    facts = PROFILES[scorer.accelerator.profile]
    names = (*REWARD_VARIABLES, *facts.env, *facts.variables, facts.visible)
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return kept | _SET_VARIABLES | {"HOME": str(scratch), "TMPDIR": str(scratch)}


def _sandbox(scorer: Scorer, *, scratch: Path) -> Sandbox:
    facts = PROFILES[scorer.accelerator.profile]
    return Sandbox(
        readable=[str(path) for path in (scorer.workdir, *scorer.readable, *facts.read)],
        hidden=[str(path) for path in scorer.hidden],
        writable=[str(scratch)],
        memory=scorer.memory,
        network=scorer.network,
        processes=scorer.processes,
        devices=[str(file) for name in facts.opened for file in _DEVICES.glob(name)],
    )


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
