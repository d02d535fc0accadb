"""Records of a run as files, numbers and pictures. Knows no model."""
