"""Samples of several turns: the model generates a turn, an environment answers, until one of them ends the episode.

    engine ── a turn that stops ──> environment ── text ──> observation, masked in the loss ──> engine ...
                                         └── None, or it was the last turn allowed: the response is complete

Invariants: the environment receives the prompt and the transcript, which is read from the response's tokens, and keeps
no state between requests. A sample is therefore a function of its row, the settings and the weights, and the next
holder of the row continues exactly as the previous one would have. An aborted turn is handed on without its last token,
which the next holder makes again, as for any response. Observations are tokenised in a thread: one of megabytes
takes seconds, and seconds without heartbeats count as the end of the instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from asyncflow.data.base import Message
from asyncflow.environments.pool import Environments
from asyncflow.environments.transcripts import Transcriber
from asyncflow.models.tokenizer import Tokenizer
from asyncflow.rewards.wire import RewardResult
from asyncflow.rollout.engines.base import Completion, GenerationRequest, RolloutEngine
from asyncflow.rollout.job import Job


class Episodes:
    """Generates the responses of one instance.

    environment: None if responses have one turn; max_turns: of the model; stop_ids: the ids that end a turn.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        environment: Environments | None,
        tokenizer: Tokenizer,
        *,
        max_turns: int,
        stop_ids: Collection[int],
    ) -> None:
        self._engine = engine
        self._environment = environment
        self._tokenizer = tokenizer
        self._max_turns = max_turns
        self._transcriber = Transcriber(tokenizer=tokenizer, stop_ids=stop_ids)

    async def run(self, job: Job, request: GenerationRequest) -> tuple[Completion, RewardResult | None]:
        """Generate the response to ``request``; its finish is ``aborted`` if it was aborted.

        Also return the reason for a missing reward, if the environment has failed. ``job.turn`` is the partial response
        between two turns.
        """
        while True:
            completion = await self._engine.generate(request)
            if self._environment is None or completion.finish != "stop":
                return completion, None
            turns = sum(chosen for chosen, _ in completion.segments())
            if turns >= self._max_turns:
                return completion, None
            job.turn = completion
            answer = await self._environment.answer(job.example(self.transcript(completion)))
            if answer.failure:
                return completion, RewardResult(value=0.0, failure=answer.failure, detail=answer.detail)
            if answer.text is None:
                return completion, None
            ids = await asyncio.to_thread(self._tokenizer.encode, answer.text)
            if not ids:
                detail = f"the environment's answer {answer.text!r} has no tokens; it ends an episode with None"
                return completion, RewardResult(value=0.0, failure="invalid", detail=detail)
            if len(completion) + len(ids) >= request.max_tokens:
                return replace(completion, finish="length"), None
            request = replace(request, continues=completion.observed(ids))
            job.turn = None

    def transcript(self, completion: Completion) -> list[Message]:
        """Return the turns and observations of a response as texts."""
        return self._transcriber.transcript(completion.ids, completion.chosen)
