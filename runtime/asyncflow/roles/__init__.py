"""The roles: one file each, wiring only. Nothing imports them but the command line, lazily."""
