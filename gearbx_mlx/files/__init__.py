"""Files: JSON of any origin, checked as it is read, and outputs that are complete or absent."""
