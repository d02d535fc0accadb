"""What was seen and done, as files, numbers and pictures. Knows records, no models."""
