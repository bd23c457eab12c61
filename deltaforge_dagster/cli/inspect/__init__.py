"""Commands that look into what was captured and delivered."""
