"""Everything that crosses a socket between roles: calls, column frames, keys, membership and the HTTP face."""
