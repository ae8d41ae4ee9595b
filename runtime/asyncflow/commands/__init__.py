"""The bodies of the commands of ``cli``; each is imported when it runs."""
