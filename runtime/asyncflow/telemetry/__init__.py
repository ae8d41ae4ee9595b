"""Telemetry of a role: its metrics, how busy it was, and its log."""
