"""The roles: one module each, which only connects the components of a process.

``asyncflow role`` imports the module of a role only when the role runs.
"""
