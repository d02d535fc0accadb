"""A server of models in gears, a proxy between two servers, and other servers as sources of tokens. Knows no flag.

Here are the names and defaults that flags show: importing them costs nothing.
"""

APIS = AUTO, OPENAI, OLLAMA = ("auto", "openai", "ollama")  # of other servers
DEFAULT_TIMEOUT = 120.0  # seconds, for another server
ASSUMED_VOCABULARY = 262144  # Gemma's, the largest that is common: for smaller ones the upper bounds hold too
