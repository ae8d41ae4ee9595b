"""Functions that somebody gives as tasks, good and bad; imported by the processes that the tests start."""

import asyncio
import os
import subprocess
import sys


def lengths(rows, config):
    return [{"length": len(row["response_ids"]) + config.get("more", 0)} for row in rows]


def seen(rows, config):
    return [{"length": [row.serial, row.sample, len(row.response), len(row.question)]} for row in rows]


def plain(rows, config):
    """Say what it was given, print, read and write: none of it reaches the pipe."""
    print("printed", input() if config["reads"] else "")  # noqa: T201
    for row in rows:
        row["response_ids"][:] += 1
    (row,) = rows
    return [{"length": [row["response_ids"].dtype.itemsize, int(row["response_ids"].sum()), row.tags["x"], row.answer]}]


async def awaited(rows, config):
    await asyncio.sleep(config.get("seconds", 0))
    return lengths(rows, config)


begun = []


async def together(rows, config):
    """Wait until so many calls have begun."""
    begun.append(rows)
    while len(begun) < config["calls"]:
        await asyncio.sleep(0.001)
    return lengths(rows, config)


def odd_raises(rows, config):
    if any(row.sample % 2 for row in rows):
        raise ValueError("an odd sample")
    return lengths(rows, config)


def odd_exits(rows, config):
    if any(row.sample % 2 for row in rows):
        sys.exit()
    return lengths(rows, config)


async def awaited_odd_exits(rows, config):
    return odd_exits(rows, config)


def odd_dies(rows, config):
    if any(row.sample % 2 for row in rows):
        os._exit(7)
    return lengths(rows, config)


def odd_hangs(rows, config):
    if any(row.sample % 2 for row in rows):
        subprocess.run(["/bin/sleep", "60"])
    return lengths(rows, config)


def odd_is_wrong(rows, config):
    return [{"length": "long"} if row.sample % 2 else {"length": 1} for row in rows]


def wrong_number(rows, config):
    return []


def needs_more(rows, config, other):
    return []
