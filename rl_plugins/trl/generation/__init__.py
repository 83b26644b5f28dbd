"""One generation batch in TRL: prompts, rollouts, rewards, and the decision applied to TRL's batch."""
