"""Messages over bytes, without any I/O: the greeting, and what is cut up and put together again."""
