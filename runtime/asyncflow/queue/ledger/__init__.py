"""Events, their write-ahead log, and the audit that reads it on its own."""
