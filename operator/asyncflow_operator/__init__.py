"""The operator of AsyncFlow: watches RLJobs, TransferQueues and WeightSyncs, and runs their roles as pods."""
