"""What is done with a plan around planning it: its model and data made, its file read, its ranks run and checked."""
