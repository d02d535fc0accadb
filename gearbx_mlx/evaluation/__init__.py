"""Quality against cost: a text replayed token by token under a policy, and compared with the top gear."""
