"""Tasks and environments that others made, for runs of TRL and verl: one module per library, each an optional extra.

A module imports its library when something is asked of it, so importing this package loads nothing.
"""
