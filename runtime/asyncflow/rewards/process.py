"""The parent's side of one reward process: it starts the process, sends questions, and kills it.

A user's function that executes a response in its own process allows the response to change that process, and with it
the scores of the following samples. The built-in functions never execute a response.

Invariants: an answer is accepted only with the nonce of an open question, and any other data in the pipe ends the
process. Therefore a process cannot answer in advance, and no answer is mistaken for the answer to another question. A
process has the pipes to its parent and a folder of its own to write to, but no environment variable, descriptor or
argument with information about the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import stat
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from asyncflow.api.names import REWARD_VARIABLES
from asyncflow.api.placement import PROFILES, AcceleratorSpec
from asyncflow.api.rewards import RewardSpec
from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, PeerLost
from asyncflow.process import adopt_orphans, reap, scratch_folder
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
_SCRATCH = "TMPDIR"
"""Variable with the folder that a reward process and its descendants may write to."""
_RUN_LOCK = "run/lock"
"""File that exists in the folder of every run, from its start on."""
_RUN_PRIVATE = ("run", "ledger", "checkpoints", "logs")
"""Private entries in the folder of a run, with its token, rows and weights."""
_MOST_FOLDERS = 20_000
"""Most folders that are searched for runs; folders beyond are hidden, since their contents are unknown."""
_MOST_SCRATCH_BYTES = 1 << 30
_MOST_SCRATCH_FILES = 10_000
_BLOCK_BYTES = 512
_WATCH_S = 0.5
_ROUNDS = 10
"""Most searches for new descendants when a process and its descendants are killed."""
_END_S = 10.0
"""Seconds that the kernel may take to end a killed process."""
_LATE_S = 1.0
"""Extra seconds for the answer of a process that enforces the deadlines of its calls itself."""
_MOST_LINES = 1000
_MOST_LINE_BYTES = 2000


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Definition of a reward process: the function that it loads, and its sandbox.

    function, extractor: see ``rewards.functions``; config: settings of the function; workdir: the job's folder, from
    which a user's module is imported; readable: paths that it may read in addition to that folder and Python; hidden:
    folders that it may not read even inside readable ones; memory: bytes of address space of each process; processes:
    number of processes that it may start; accelerator: devices that it computes with; module: the program of the
    process.
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
        """Return the scorer of each component of a manifest.

        workdir: the job's folder, at which relative paths start; run: the folder of the run. The folder of this run,
        and folders of other runs inside readable folders, are hidden from the function.
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
    """One child process that has loaded its function.

    unrestricted: restrictions that this kernel does not support; takes, concurrent: the kind of calls of its function,
    see ``ScoreAnswer``; broken: the reason why it is no longer usable, None while it is usable.
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
        self._killed: set[psutil.Process] = set()
        self._open: dict[bytes, asyncio.Future[ScoreAnswer]] = {}
        self._tasks = [asyncio.create_task(each()) for each in (self._listen, self._show_output, self._watch)]

    @classmethod
    async def start(cls, scorer: Scorer, *, timeout: float) -> RewardProcess:
        """Start a child and wait until it has loaded its function.

        timeout: seconds. Raises ManifestError if the function cannot be loaded, DeadlineExceeded, and PeerLost if the
        process ended or could not be started. If the function may start processes, this process adopts orphans.
        """
        try:
            if scorer.processes:
                adopt_orphans(enabled=True)
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
            raise PeerLost(f"a process for {scorer.function!r} cannot be started: {error}") from error
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
                what=f"loading {scorer.function!r}",
            )
            child.unrestricted, child.takes, child.concurrent = ready.unrestricted, ready.takes, ready.concurrent
            if ready.failure:
                raise ManifestError(
                    f"{scorer.function!r} cannot be loaded: {ready.detail}",
                    where="spec.reward.function",
                    hint="See the traceback in the log of the role; functions run in a sandbox (docs/guide/rewards.md)",
                )
        except BaseException:
            await child.kill()
            raise
        return child

    @property
    def open(self) -> int:
        """Number of calls without an answer, including calls that were open when the process ended."""
        return len(self._open)

    async def score(self, examples: Sequence[Example], *, timeout: float) -> ScoreAnswer:
        """Score examples in one call; a concurrent function allows several calls at the same time.

        Raises ValueError if the examples are too large or cannot be encoded (nothing was sent), DeadlineExceeded after
        ``timeout`` seconds, PeerLost if the process died or violated the protocol; then it must be killed.
        """
        question = Question(nonce=_nonce(), examples=list(examples), seconds=timeout)
        wait_s = timeout + _LATE_S if self.concurrent else timeout
        answer = await self._ask(question, timeout=wait_s, what="a call")
        if not answer.failure and len(answer.scores) != len(examples):
            self._break(f"answered {len(answer.scores)} scores for {len(examples)} samples")
            assert self.broken is not None
            raise self.broken
        return answer

    def end(self, why: str) -> None:
        """Kill the process and its descendants immediately; ``kill`` must still be called to release its resources."""
        self._break(why)

    async def kill(self) -> None:
        """Kill the process and its descendants immediately, and remove its files.

        A descendant may survive the end of a reward process that was not killed, if it has left the process group and
        changed its environment.
        """
        self._break("was killed")
        for descriptor in range(3):
            pipe = self._process._transport.get_pipe_transport(descriptor)  # type: ignore[attr-defined] # noqa: SLF001
            if pipe is not None:
                pipe.close()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
                self._kill_orphans()
                for pid in (-self.pid, *(process.pid for process in self._killed)) if self._processes else ():
                    await reap(pid)
        except TimeoutError:
            log.error("the reward process %d was killed but has not ended within %g s", self.pid, _END_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    async def _ask(self, message: Load | Question, *, timeout: float, what: str) -> ScoreAnswer:
        """Send a message and wait for the answer.

        After a timeout the question stays open, so that a late answer is recognized and ignored.
        """
        writer = self._process.stdin
        assert writer is not None
        data = frame(message)
        if self.broken is not None:
            raise self.broken
        answered: asyncio.Future[ScoreAnswer] = asyncio.get_running_loop().create_future()
        self._open[message.nonce] = answered
        try:
            writer.write(data)
            async with asyncio.timeout(timeout):
                return await answered
        except TimeoutError as error:
            raise DeadlineExceeded(f"{what} took longer than {timeout:g} s", where=f"pid {self.pid}") from error

    async def _listen(self) -> None:
        """Deliver answers until the pipe ends or contains anything else."""
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
            self._break(f"wrote an invalid answer: {error}")

    def _take(self, answer: ScoreAnswer) -> None:
        answered = self._open.pop(answer.nonce, None)
        if answered is None:
            raise PeerLost("its nonce belongs to no open question")
        if not answered.done():
            answered.set_result(answer)

    def _break(self, why: str) -> None:
        """Mark the process as unusable, and kill it and its descendants."""
        self.broken = self.broken or PeerLost(f"the reward process {why}", where=f"pid {self.pid}")
        if self._process.returncode is None and self._processes:
            self._kill_descendants()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for answered in self._open.values():
            if not answered.done():
                answered.set_exception(self.broken)

    def _kill_descendants(self) -> None:
        """Kill the descendants of the process in all groups; it has adopted those whose parents have ended."""
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            os.kill(self.pid, signal.SIGSTOP)
            for _ in range(_ROUNDS):
                fresh = set(self._descendants()) - self._killed
                for process in fresh:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
                self._killed |= fresh
                if not fresh:
                    break

    def _kill_orphans(self) -> None:
        """Kill the descendants that this process has adopted because the reward process ended by itself.

        They are recognised by their folder for temporary files.
        """
        for process in psutil.Process().children(recursive=True) if self._processes else ():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_SCRATCH) == str(self._scratch):
                    process.kill()
                    self._killed.add(process)

    def _descendants(self) -> list[psutil.Process]:
        """Return all descendants of the process. Raises psutil.NoSuchProcess."""
        return psutil.Process(self.pid).children(recursive=True) if self._processes else []

    async def _watch(self) -> None:
        """Kill the process if it exceeds limits that the kernel does not enforce."""
        while self.broken is None:
            await asyncio.sleep(_WATCH_S)
            try:
                processes = [psutil.Process(self.pid), *self._descendants()]
            except psutil.NoSuchProcess:
                return
            if _threads(processes) > MOST_THREADS + self._processes:
                self._break(f"had more than {MOST_THREADS + self._processes} threads")
            elif _is_full(self._scratch, processes):
                most = f"{_MOST_SCRATCH_BYTES} bytes or {_MOST_SCRATCH_FILES} files"
                self._break(f"wrote more than {most} to its folder, or hid some of them")

    async def _show_output(self) -> None:
        """Log the output of the function, at most ``_MOST_LINES`` lines."""
        reader = self._process.stderr
        assert reader is not None
        shown = 0
        while data := await reader.read(_MOST_LINE_BYTES):
            for line in data.decode(errors="replace").splitlines() if shown < _MOST_LINES else ():
                shown += 1
                log.info("reward process %d: %s", self.pid, line)
                if shown == _MOST_LINES:
                    log.warning("reward process %d: further output is not logged", self.pid)
                    break


def _nonce() -> bytes:
    return secrets.token_bytes(16)


def _threads(processes: Iterable[psutil.Process]) -> int:
    count = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            count += process.num_threads()
    return count


def _is_full(folder: Path, processes: Iterable[psutil.Process]) -> bool:
    """Return whether a folder exceeds the limits of a reward process.

    Deleted files that ``processes`` have open are counted, too. A folder or a process that hides its files counts as
    full.
    """
    errors: list[OSError] = []
    size = files = 0
    for place, folders, names in os.walk(folder, onerror=errors.append):
        files += len(folders) + len(names)
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_blocks * _BLOCK_BYTES
    deleted: dict[int, int] = {}
    for process in processes:
        try:
            deleted |= _deleted(process, folder)
        except PermissionError as error:
            errors += [] if _is_ending(process) else [error]
    hides = any(isinstance(error, PermissionError) for error in errors)
    size, files = size + sum(deleted.values()), files + len(deleted)
    return hides or size > _MOST_SCRATCH_BYTES or files > _MOST_SCRATCH_FILES


def _deleted(process: psutil.Process, folder: Path) -> dict[int, int]:
    """Return the bytes of the deleted files that a process has open on the disk of ``folder``, by inode."""
    found = {}
    opened = Path(f"/proc/{process.pid}/fd")
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(opened):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(opened / name)
                if stat.S_ISREG(status.st_mode) and not status.st_nlink and status.st_dev == os.stat(folder).st_dev:
                    found[status.st_ino] = status.st_blocks * _BLOCK_BYTES
    return found


def _is_ending(process: psutil.Process) -> bool:
    """Return whether a process has lost its memory: from then on the kernel shows its files to root only."""
    try:
        return not process.memory_info().vms
    except psutil.NoSuchProcess:
        return True


def _hidden(readable: Sequence[Path], *, run: Path | None) -> Iterator[Path]:
    """Yield the folders that a scorer may not read: folders of runs, and folders that were not searched.

    If the folder of a run contains the job's folder or a file of the manifest, only its private entries are hidden.
    """
    runs, unsearched = _runs(readable)
    for folder in runs if run is None else {*runs, run.resolve()}:
        if any(place.is_relative_to(folder) for place in readable):
            yield from (folder / name for name in _RUN_PRIVATE)
        else:
            yield folder
    if unsearched:
        words = "%s has more than %d folders; the reward function cannot read %s and %d further folders"
        log.warning(words, readable[0], _MOST_FOLDERS, unsearched[0], len(unsearched) - 1)
    yield from unsearched


def _runs(places: Sequence[Path]) -> tuple[set[Path], list[Path]]:
    """Return the folders of runs in ``places``, and folders that were not searched; symbolic links are not followed."""
    runs: set[Path] = set()
    searched, waiting = 0, deque(place for place in places if place.is_dir())
    while waiting and searched < _MOST_FOLDERS:
        searched += 1
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
    return kept | _SET_VARIABLES | {"HOME": str(scratch), _SCRATCH: str(scratch)}


def _sandbox(scorer: Scorer, *, scratch: Path) -> Sandbox:
    facts = PROFILES[scorer.accelerator.profile]
    return Sandbox(
        readable=[str(path) for path in (scorer.workdir, *scorer.readable, *facts.read)],
        hidden=[os.fsencode(path) for path in scorer.hidden],
        writable=[str(scratch)],
        memory=scorer.memory,
        network=scorer.network,
        processes=scorer.processes,
        devices=[str(file) for name in facts.opened for file in _DEVICES.glob(name)],
    )


def _ending(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
