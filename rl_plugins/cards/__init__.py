"""What is known of the methods: cards, problems, results, and how they are listed and shown."""
