"""Anthropic's Messages API, in terms of chat completions: requests, whole answers, streams and errors."""
