"""The process that serves the table: calls, parked calls, storage units, and several controllers of one queue."""
