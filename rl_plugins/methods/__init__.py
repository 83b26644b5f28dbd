"""A file or folder per method, with its card NAME.toml; docs/methods.md has a line for each."""
