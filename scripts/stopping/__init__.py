"""Commands that are stopped at random moments: stop_commands.py."""
