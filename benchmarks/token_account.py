"""An account of the tokens that the rollouts of a run generate: each is part of a trained sample, or generated again.

A rollout that leaves in order logs the number of its tokens. A rollout that will be killed is queried just before, also
for its unsaved tokens, which no other rollout can continue; it may lose at most the tokens of one lease.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from run_lines import lines

MOST_AGAIN = 0.02
"""The share of the tokens that may be generated again for reasons other than kills."""
_LEFT = re.compile(r"left; (\d+) tokens were made here")
_ASK_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A rollout at the time of its kill.

    made: its tokens; unsaved: the tokens that other rollouts must generate again; busy_s: seconds of generation.
    """

    name: str
    made: int = 0
    unsaved: int = 0
    busy_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.name}, which had made {self.made} tokens in {self.busy_s:.1f} s, {self.unsaved} of them unsaved"

    def of_a_lease(self, lease_s: float) -> float:
        """Return the tokens that it generated in ``lease_s`` seconds, or all tokens if it generated for less time."""
        return self.made * min(1.0, lease_s / self.busy_s) if self.busy_s else float(self.made)


def ask(name: str, http: str) -> Killed | None:
    """Return the counters of the rollout at ``http``, 0 if it does not serve yet; None if it does not answer."""
    try:
        with urllib.request.urlopen(f"{http}/metrics", timeout=_ASK_S) as answer:
            text = answer.read().decode()
    except OSError as error:
        refused = isinstance(getattr(error, "reason", error), ConnectionRefusedError)
        return Killed(name=name) if refused else None
    values = {
        (sample.name.removeprefix("asyncflow_rollout_"), sample.labels.get("cause", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Killed(
        name=name,
        made=int(values["tokens_generated_total", ""]),
        unsaved=int(values["unsaved_tokens", ""]),
        busy_s=values.get(("busy_seconds_total", "generate"), 0.0),
    )


def made_in_order(folder: Path) -> int:
    """Return the number of tokens of rollouts that left in order, from their logs."""
    logs = "".join(log.read_text() for log in (folder / "logs").glob("rollout-*.log"))
    return sum(map(int, _LEFT.findall(logs)))


def kept(folder: Path) -> int:
    """Return the number of tokens in trained samples, by the last execution of each step."""
    return sum({line["step"]: int(line["response_tokens"]) for line in lines(folder)}.values())


@dataclass(frozen=True, kw_only=True)
class Account:
    """The account of one run.

    in_order: tokens of rollouts that left in order; killed: the killed rollouts; kept: tokens in trained samples.
    """

    in_order: int
    killed: Sequence[Killed]
    kept: int
    lease_s: float

    @property
    def made(self) -> int:
        """The number of all generated tokens."""
        return self.in_order + sum(each.made for each in self.killed)

    @property
    def unsaved(self) -> int:
        """The number of tokens that were lost by kills."""
        return sum(each.unsaved for each in self.killed)

    @property
    def others(self) -> int:
        """The number of tokens that were generated again for reasons other than kills."""
        return self.made - self.kept - self.unsaved

    def __str__(self) -> str:
        share = max((each.unsaved / max(1.0, each.of_a_lease(self.lease_s)) for each in self.killed), default=0.0)
        kills = f"{len(self.killed)} kills cost {self.unsaved}, one at most {share:.2f} of what it made in a lease"
        again = f"{self.made - self.kept} ({(self.made - self.kept) / max(1, self.made):.2%})"
        others = f"{self.others} ({self.others / max(1, self.made):.2%})"
        return f"tokens made {self.made}, kept {self.kept}, made again {again}: {kills}; everything else {others}"

    def problems(self) -> list[str]:
        """Return the violated limits."""
        found = [
            f"{each.name} lost {each.unsaved} tokens, and made {each.of_a_lease(self.lease_s):.0f} within a lease"
            for each in self.killed
            if each.unsaved > each.of_a_lease(self.lease_s)
        ]
        if not self.made or abs(self.others) > MOST_AGAIN * self.made:
            found.append(f"{self.others} of {self.made} tokens, more than {MOST_AGAIN:.0%}, are not accounted for")
        return found
