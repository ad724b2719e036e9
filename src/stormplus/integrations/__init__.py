"""One module per trainer; none of them is imported by the core."""
