"""A pre-trained language model without a hub: SmolLM2-135M-Instruct from a package of PyPI, and runs that train it."""
