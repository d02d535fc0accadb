"""A server of models in gears, a proxy between two servers, and servers of others. Knows no command and no flag."""
