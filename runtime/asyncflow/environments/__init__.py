"""Environments: functions that answer each turn of the model, run in sandboxed processes like reward functions."""
