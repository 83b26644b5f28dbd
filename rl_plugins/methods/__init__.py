"""One file or folder per paper; docs/methods.md has a card of each."""
