"""Files: JSON that anybody may have written, checked as it is read, and outputs that are complete or absent."""
