"""The driver: data, admission, groups, evaluation and progress. It restores its state from the ledger and its files."""
