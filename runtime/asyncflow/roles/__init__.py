"""The roles: one module each, which only connects the components of a process.

Except for shared helpers, these modules are imported only by the command line, when a role runs.
"""
