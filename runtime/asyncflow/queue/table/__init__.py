"""The queue as a pure state machine: rows, claims, the trainer's gang and what the ledger makes of them. No I/O."""
