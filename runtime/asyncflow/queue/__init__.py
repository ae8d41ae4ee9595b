"""TransferQueue: a streaming two-dimensional table. Rows are samples, columns are fields, tasks are consumers."""
