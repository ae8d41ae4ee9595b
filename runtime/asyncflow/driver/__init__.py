"""The driver: data, admission, groups, evaluation, progress. Its state is the ledger plus the last checkpoint."""
