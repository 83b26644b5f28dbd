"""What `rl-plugins probe` does: which method makes the best gradient of a run's own rollouts, before it trains."""
