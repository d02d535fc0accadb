"""A proxy between two servers of OpenAI's API."""
