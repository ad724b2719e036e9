"""What both kinds of transformation stand on: their arguments, and trees of parameters."""
