"""The embedded demo: a policy of 78,272 parameters, warm-started on this machine, and tasks and rewards to train it.

``tasks`` makes the prompts, ``rewards`` scores the completions, ``policy`` builds, warm-starts and caches the model.
Importing this package, ``tasks`` or ``rewards`` loads no torch; importing ``policy`` does.
"""
