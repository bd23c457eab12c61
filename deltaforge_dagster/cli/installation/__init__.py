"""Commands that start processes or concern the whole installation."""
