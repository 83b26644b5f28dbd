"""The contract: all that the author of a method, or of an adapter, builds on. It imports nothing else of the package."""
