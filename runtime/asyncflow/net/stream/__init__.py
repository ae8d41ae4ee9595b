"""Messages over bytes, without any I/O: the handshake, the seals, and what is cut up and put together again."""
