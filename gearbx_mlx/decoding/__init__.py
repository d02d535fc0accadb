"""From gears to tokens: one file for each way of driving."""
