"""The operator of AsyncFlow: watches RLJob, TransferQueue and WeightSync, and places their roles as pods."""
