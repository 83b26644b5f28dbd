"""What a person sees of a trace: in the terminal and as a page. Reads files alone; no host, no model, no network."""
