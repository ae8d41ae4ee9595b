"""Implementations of the commands of ``cli``; each module is imported when its command runs."""
