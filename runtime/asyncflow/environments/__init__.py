"""Environments: what answers a turn of the model, run in the sandboxed processes of rewards."""
