"""Models and scripts that show paraplan at work."""
