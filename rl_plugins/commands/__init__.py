"""What the commands of `rl-plugins` do. Each is imported only when it is called."""
