"""Gradient quality of the methods: real classes, driven through the runtime in worlds whose exact gradients are known.

`drive` makes a batch, `worlds` has the worlds, `variants` says which methods act where, `measure` runs them and
`page` tells it. `rl-plugins bench --quality` is the command.
"""
