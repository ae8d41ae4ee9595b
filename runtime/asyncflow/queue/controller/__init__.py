"""The pure table of rows and claims, and the process that serves it."""
