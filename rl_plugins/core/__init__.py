"""The contract: what authors of methods and of adapters build on. It imports nothing else of the package."""
