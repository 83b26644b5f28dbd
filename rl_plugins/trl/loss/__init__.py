"""The loss of a micro-batch in TRL, and what belongs to one optimizer step."""
