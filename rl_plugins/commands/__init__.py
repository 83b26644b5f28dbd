"""The command line. Each command is a file or folder of its name; `cli.py` puts them together, and `shared` is what
several of them use.

A command's file has its options and help, calls what does the work, and prints. It imports that inside its function, so
that `rl-plugins --help` loads no framework.
"""
