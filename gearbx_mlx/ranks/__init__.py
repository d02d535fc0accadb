"""Several processes that run one model: who they are, whether all of them are there, and what they agree on."""
