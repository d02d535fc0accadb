"""Several texts that share each pass over the weights."""
