"""Stores that other people wrote: how their servers are started, and clients that cannot be used wrongly."""
