import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asyncflow.errors import AsyncFlowError
from asyncflow.local.placement import PortReservation


def test_ports_are_free_and_below_those_that_the_kernel_gives_away():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with PortReservation(3) as ports:
        assert len(set(ports)) == 3
        for port in ports:
            assert port < low
            socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_asked_for_is_held_or_refused():
    with PortReservation(1) as (port,), pytest.raises(AsyncFlowError, match=rf"port {port} .* is taken. Use another"):
        PortReservation(2, first=port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(AsyncFlowError, match="is taken"):
        PortReservation(2, first=port)
    reserved = PortReservation(2, first=port)
    with reserved as ports:
        assert (ports[0], len(ports)) == (port, 2)
        assert reserved.another() == ports[2] not in ports[:2]


def test_two_holders_never_hold_the_same_port(monkeypatch):
    monkeypatch.setattr("asyncflow.local.placement._ephemeral_low", lambda: 60)
    monkeypatch.setattr("asyncflow.local.placement._LOWEST", 50)
    monkeypatch.setattr("asyncflow.local.placement._listen_once", lambda port: None)
    with PortReservation(15) as ports, PortReservation(15) as others:
        assert not set(ports) & set(others)
        with pytest.raises(AsyncFlowError, match="fewer than 1 free"):
            PortReservation(1)
    with PortReservation(30) as ports:
        assert sorted(ports) == list(range(30, 60))


def test_a_killed_holder_holds_nothing():
    code = (
        "import os, signal; from asyncflow.local.placement import PortReservation;"
        "print(PortReservation(1).ports[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    name = f"\0asyncflow-port-{int(run.stdout)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as claim:
        claim.bind(name)
