"""Methods of a package that is not rl-plugins, one kind per module."""
