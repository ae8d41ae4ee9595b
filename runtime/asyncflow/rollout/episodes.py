"""Samples of several turns: the model says something, an environment answers, and so on until either ends it.

    engine ── a turn that stops ──> environment ── text ──> observation, masked in the loss ──> engine ...
                                         └── None, or it was the last turn allowed: the response is done

Invariants: the environment is asked with the prompt and the transcript, which is read from the response's tokens, and
keeps nothing from one question to the next; so a sample is a function of its row, the settings and the weights, and who
has the row next goes on as who had it before would have. A turn that another ended is handed on without its last token,
which whoever goes on makes again, as it does for any response.
"""

from __future__ import annotations

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
    """Makes the responses of one instance.

    environment: None where they have one turn; max_turns: of the model; stop_ids: those that end a turn.
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
        """Make the response to ``request``, ``aborted`` where the engine was told to end it.

        Return why it has no reward, too: where its environment did not answer. Between two turns ``job.turn`` is what
        there is.
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
            ids = self._tokenizer.encode(answer.text)
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
