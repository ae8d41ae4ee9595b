"""Reward functions of the tests, loaded by reward processes."""

from __future__ import annotations

import time


def one(*, response, prompt, answer, meta):
    return 1.0


def words(*, response, prompt, answer, meta):
    return float(len(response.split()) + (prompt == f"q{answer}") / 2)


def stuck_on_three(*, response, prompt, answer, meta):
    while answer == "3":
        time.sleep(1)
    return 1.0


def of_group(*, responses, prompt, answer):
    if prompt != f"q{answer}":
        raise ValueError(prompt)
    longest = max(map(len, responses))
    return [
        {"reward": float(len(responses)), "details": {"longest": len(each) == longest, "of": len(responses)}}
        for each in responses
    ]
