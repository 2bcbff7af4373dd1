"""Making a network's artifacts: weights, export, checks. Only what runs under ``prepare`` imports torch."""
