"""What the command line does with TRL: its scripts, dry runs, and runs described by a config alone."""
