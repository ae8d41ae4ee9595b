"""Calls between processes: addresses, TLS, framing, shared memory, client, server, membership."""
