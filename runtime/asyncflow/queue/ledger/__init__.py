"""Events, their write-ahead log, and the independent audit of the log."""
