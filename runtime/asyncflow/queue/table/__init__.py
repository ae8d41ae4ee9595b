"""The queue as a pure state machine without I/O: rows, claims, the trainer's gang, and their ledger events."""
