"""Shared memory between processes of one host: where large parts lie, who is lent them, and for how long."""
