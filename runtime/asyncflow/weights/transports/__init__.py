"""Ways to move the bytes of a version from one worker to another."""
