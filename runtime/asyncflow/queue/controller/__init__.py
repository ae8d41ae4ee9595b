"""The process that serves the table: calls, those that are parked, storage units, several controllers of one queue."""
