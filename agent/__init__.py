"""What is said, what is seen, and the loop: draw, look, say, edit, until it is right."""
