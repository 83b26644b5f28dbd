"""The host-free engine: what every adapter stands on. Methods do not import it."""
