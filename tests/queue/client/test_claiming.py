"""Claims on their way: what of a claim is said again, for how long, and what is said when its caller leaves."""

import asyncio
import sys
from pathlib import Path

import pytest

from asyncflow.errors import DeadlineExceeded, Misdirected, PeerLost
from asyncflow.queue.client import QueueClient
from asyncflow.queue.peers import GRACE_S, PARK_S, Peer, now
from asyncflow.queue.protocol.calls import Claimed, Done
from asyncflow.queue.protocol.messages import LeasedRow, RowMeta

sys.path.insert(0, str(Path(__file__).parent))
from by_hand import ByHand, carry_out

ROW = 1 << 44 | 1 << 32
NOTHING = Claimed()


def client_of(answer):
    client = QueueClient(find=lambda *_: None, units=list, worker="w")
    client.peers.call = ByHand(answer).call
    return client


def claim(client, timeout):
    return client.claim(partition="p", task="t", max_rows=8, timeout=timeout)


def test_a_claim_that_is_made_again_keeps_its_ticket_and_gives_the_ids_of_its_rows():
    asked = []
    meta = RowMeta(partition="p", serial=0, sample=0, step=0, purpose="open")
    rows = [LeasedRow(row=ROW + i, meta=meta, attempt=0, lease="1", until=1.0, unit=3, bytes={}) for i in range(100)]
    answers = [NOTHING, PeerLost("it broke"), PeerLost("it broke"), NOTHING, Claimed(rows)]

    def answer(call):
        asked.append(call.request)
        if isinstance(answers[0], PeerLost):
            raise answers.pop(0)
        return answers.pop(0), []

    claimed = carry_out(claim(client_of(answer), 60))
    assert len({request.ticket for request in asked}) == 1
    assert [request.wait_s for request in asked] == [PARK_S] * 5
    assert claimed.rows == rows


def test_no_call_of_a_claim_outlasts_its_time_and_the_grace_whatever_was_lost():
    ends = []

    def lost(call):
        ends.append(now() + call.timeout)
        raise PeerLost("it broke")

    with pytest.raises(DeadlineExceeded, match="it broke"):
        carry_out(claim(client_of(lost), 1.0))
    assert len(ends) > 2
    assert 1.0 < max(ends) < 1.01 + GRACE_S


def test_a_claim_follows_its_task_to_the_controller_that_decides_and_remembers_it():
    asked = []

    def answer(call):
        asked.append(call.peer.number)
        if call.peer.number != 2:
            raise Misdirected.at(2, "not here")
        return Claimed(ended=True), []

    async def twice(client):
        return [await claim(client, 1.0) for _ in range(2)]

    assert [claimed.ended for claimed in carry_out(twice(client_of(answer)))] == [True, True]
    assert asked == [0, 2, 2]


def test_a_claim_whose_caller_leaves_is_given_up_where_it_waits():
    said = []

    def answer(call):
        said.append((call.peer, call.method, call.request.ticket))
        return Done() if call.method == "queue.abandon" else NOTHING, []

    async def leave(client):
        client._deciding["p", "t"] = Peer("controller", 1)
        claiming = asyncio.create_task(claim(client, 60))
        while not said:
            await asyncio.sleep(0)
        claiming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claiming
        await client.close()

    carry_out(leave(client_of(answer)))
    assert [method for _, method, _ in said] == ["queue.claim"] * (len(said) - 1) + ["queue.abandon"]
    assert {(peer, ticket) for peer, _, ticket in said} == {(Peer("controller", 1), said[0][2])}
