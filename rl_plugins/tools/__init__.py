"""What acts before, during or after a run and is no method: a function, a class or a command that you call."""
