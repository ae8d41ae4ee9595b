"""Calls between processes, with deadlines that travel: over streams, in an event loop or in a thread that blocks."""

from asyncflow.net.rpc.client import RpcClient
from asyncflow.net.rpc.server import Handler, Reply, RpcCounters, RpcServer

__all__ = ["Handler", "Reply", "RpcClient", "RpcCounters", "RpcServer"]
