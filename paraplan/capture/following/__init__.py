"""What export would not follow as it is written, done in a way it does, or refused."""
