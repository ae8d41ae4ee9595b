"""What a trainer computes with; found by entry points of the group ``asyncflow.trainer_backends``."""
