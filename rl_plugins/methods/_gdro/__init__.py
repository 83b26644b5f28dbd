"""What `gdro_prompt` and `gdro_rollout` share: bins of difficulty, and weights by bin."""
