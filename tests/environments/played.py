"""Environments of the tests, loaded by their processes."""

from __future__ import annotations

import asyncio
import time


def mood(*, transcript, prompt, answer, meta, config):
    """Answer as the prompt says."""
    last = transcript[-1]["content"]
    match prompt:
        case "say":
            return f"{config['before']}{len(transcript)} {transcript[0]['role']} {last} {answer} {meta['n']}"
        case "end":
            pass
        case "raise":
            raise RuntimeError("there is no door")
        case "hang":
            time.sleep(60)
        case "die":
            raise SystemExit(3)
        case "number":
            return 5
        case "empty":
            return ""
    return None


class Countdown:
    """Counts down from the answer; each turn says by how much, and it ends at 0."""

    def __init__(self, *, prompt, answer, meta, config):
        self.left = answer

    def step(self, text):
        self.left -= int(text)
        return f"{self.left} left" if self.left > 0 else None


def needs_more(*, transcript, prompt, answer, meta, config, mystery):
    return None


async def awaited(*, transcript, prompt, answer, meta, config):
    await asyncio.sleep(0)
    return f"after {transcript[-1]['content']}"


class NoStep:
    def __init__(self, *, prompt, answer, meta, config):
        pass


class AsyncStep(NoStep):
    async def step(self, text):
        return None
