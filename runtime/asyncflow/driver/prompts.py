"""The columns with which a sample begins, and how much may be in them and in those that follow.

Invariant: no sample holds more bytes than ``RLJobSpec.bytes_of_interval`` counts for it: what is larger than the
manifest says is refused here, and room for the outputs is asked for together with that for the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from asyncflow.api.job import RLJobSpec
from asyncflow.data.prompter import Prompter
from asyncflow.errors import ManifestError
from asyncflow.net.frames import Jagged

PROMPTS_PER_PUT = 32


@dataclass(frozen=True, kw_only=True)
class PromptColumns:
    """Makes the columns ``prompt_ids`` int32 and ``task`` uint8 (a packed ``Prompt``).

    what: the kind of prompt, for messages; outputs: most bytes of each column that is written to a sample later.
    """

    what: str
    prompter: Prompter
    max_tokens: int
    max_task_bytes: int
    outputs: Mapping[str, int]

    @classmethod
    def of(cls, spec: RLJobSpec, *, prompter: Prompter, what: str) -> PromptColumns:
        """Make them with the limits of a manifest."""
        return cls(
            what=what,
            prompter=prompter,
            max_tokens=spec.sampling.max_prompt_tokens,
            max_task_bytes=spec.data.max_task_bytes,
            outputs=spec.output_bytes,
        )

    def columns(self, serials: Iterable[int], *, copies: int) -> dict[str, Jagged]:
        """Give the columns of ``copies`` rows a serial. Raises ManifestError for a prompt that is too large."""
        ids: list[np.ndarray] = []
        tasks: list[np.ndarray] = []
        for serial in serials:
            prompt = self.prompter.source.prompt(serial)
            tokens, task = self.prompter.encode(prompt), prompt.packed()
            self._check(serial, len(tokens), self.max_tokens, unit="tokens", where="sampling.maxPromptTokens")
            self._check(serial, len(task), self.max_task_bytes, unit="bytes of task", where="data.maxTaskBytes")
            ids.extend([np.asarray(tokens, dtype=np.int32)] * copies)
            tasks.extend([np.frombuffer(task, dtype=np.uint8)] * copies)
        return {"prompt_ids": Jagged.from_rows(ids, np.int32), "task": Jagged.from_rows(tasks, np.uint8)}

    def _check(self, serial: int, size: int, most: int, *, unit: str, where: str) -> None:
        if size > most:
            raise ManifestError(
                f"{self.what} {serial} has {size} {unit}, more than {most}",
                where=f"spec.{where}",
                hint="Raise it, or give shorter prompts.",
            )
