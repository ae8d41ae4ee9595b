"""The columns with which a sample begins, and how much may be in them and in those that follow.

Invariant: no sample holds more bytes than ``RLJobSpec.bytes_of_interval`` counts for it: what is larger than the
manifest says is not put, and room for the outputs is asked for together with that for the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncflow.api.job import RLJobSpec
from asyncflow.data.prompter import Prompter
from asyncflow.errors import ManifestError
from asyncflow.net.frames import Jagged

PROMPTS_PER_PUT = 32


class Overlong(ManifestError):
    """A prompt has more tokens, or its task more bytes, than the manifest allows."""


class EncodedPrompt(NamedTuple):
    """A prompt as it is put. ids: its tokens, int32; task: the packed ``Prompt``, uint8."""

    ids: NDArray[np.int32]
    task: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Makes the columns ``prompt_ids`` and ``task``.

    what: the kind of prompt, for messages; skips: whether prompts that are too long are left out (``data.overlong``);
    outputs: most bytes of each column that is written to a sample later.
    """

    what: str
    prompter: Prompter
    max_tokens: int
    max_task_bytes: int
    skips: bool
    outputs: Mapping[str, int]

    @classmethod
    def of(cls, spec: RLJobSpec, *, prompter: Prompter, what: str) -> PromptColumns:
        """Make them with the limits of a manifest."""
        return cls(
            what=what,
            prompter=prompter,
            max_tokens=spec.sampling.max_prompt_tokens,
            max_task_bytes=spec.data.max_task_bytes,
            skips=spec.data.overlong == "skip",
            outputs=spec.output_bytes,
        )

    def encode(self, serial: int) -> EncodedPrompt:
        """Return prompt ``serial``. Raises Overlong for one that is larger than the manifest allows."""
        prompt = self.prompter.source.prompt(serial)
        tokens, task = self.prompter.encode(prompt), prompt.packed()
        self._check(serial, len(tokens), self.max_tokens, unit="tokens", where="sampling.maxPromptTokens")
        self._check(serial, len(task), self.max_task_bytes, unit="bytes of task", where="data.maxTaskBytes")
        return EncodedPrompt(np.asarray(tokens, dtype=np.int32), np.frombuffer(task, dtype=np.uint8))

    def columns(self, prompts: Sequence[EncodedPrompt], *, copies: int) -> dict[str, Jagged]:
        """Return the columns of ``copies`` rows for each prompt."""
        return {
            "prompt_ids": Jagged.from_rows([prompt.ids for prompt in prompts for _ in range(copies)], np.int32),
            "task": Jagged.from_rows([prompt.task for prompt in prompts for _ in range(copies)], np.uint8),
        }

    def _check(self, serial: int, size: int, most: int, *, unit: str, where: str) -> None:
        if size > most:
            raise Overlong(
                f"{self.what} {serial} has {size} {unit}, more than {most}",
                where=f"spec.{where}",
                hint="Raise it, give shorter prompts, or set data.overlong: skip",
            )
