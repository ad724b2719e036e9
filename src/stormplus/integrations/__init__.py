"""One small module for each trainer; none of them is imported by the core."""
