"""Parts that methods are built of: agents, services, judges, memory of prompts, priors, masked decoding."""
