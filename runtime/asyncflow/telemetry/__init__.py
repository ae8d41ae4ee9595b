"""Telemetry of a role: metrics, busy time, spans, logs, and sinks."""
