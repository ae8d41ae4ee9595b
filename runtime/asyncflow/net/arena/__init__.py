"""Shared memory between processes of one host: where large parts lie and how long they stay."""
