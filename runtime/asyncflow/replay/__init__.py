"""A finished step made again, and the life of one sample, from what a run has written down."""
